package plato

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"syscall"

	"plato-go-client/wire"
)

// Out is a message in the outbox. None of it ever changes, whatever is answered.
type Out struct {
	Conversation string
	ClientID     uint64
	ClientMsgID  []byte
	To           string
	Body         []byte
}

// Session is what a resume needs. ConnID 0: there is none.
type Session struct {
	ConnID uint64
	Secret []byte
}

// record is one transaction: a line of the journal. What belongs together is in one record (a row and the cursor that
// passes it, an outcome and the message that leaves the outbox), so a crash keeps all of it or nothing.
type record struct {
	Device   uint64            `json:",omitempty"`
	User     string            `json:",omitempty"`
	Session  *Session          `json:",omitempty"`
	Served   string            `json:",omitempty"`
	Gateways []wire.Gateway    `json:",omitempty"`
	Out      []Out             `json:",omitempty"`
	Settled  []settled         `json:",omitempty"`
	Rows     []wire.Row        `json:",omitempty"`
	Cursors  map[string]uint64 `json:",omitempty"`
}

type settled struct {
	Conversation string
	ClientID     uint64
	Code         wire.Code
}

func (r *record) empty() bool {
	return r.Device == 0 && r.User == "" && r.Session == nil && r.Served == "" && len(r.Gateways) == 0 &&
		len(r.Out) == 0 && len(r.Settled) == 0 && len(r.Rows) == 0 && len(r.Cursors) == 0
}

// store is the client's durable state: a journal that is only appended to. It grows with the history that it keeps; an
// application with a database of its own would put the same transactions there.
type store struct {
	file *os.File
	tx   record // what the next commit writes

	device   uint64
	user     string
	session  Session
	served   string // address of the gateway that served last
	gateways []wire.Gateway
}

// openStore reads the journal in dir and calls replay for each transaction, in order. One process at a time may have it:
// two of them would give one client_id to two messages.
func openStore(dir string, replay func(*record)) (*store, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	file, err := os.OpenFile(filepath.Join(dir, "journal"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		file.Close()
		return nil, fmt.Errorf("the state in %s is in use by another client: %w", dir, err)
	}
	s := &store{file: file}
	if err := s.load(replay); err != nil {
		file.Close()
		return nil, err
	}
	if s.device == 0 {
		for s.tx.Device == 0 {
			s.tx.Device = rand.Uint64()
		}
		s.device = s.tx.Device
		if err := s.commit(); err != nil {
			file.Close()
			return nil, err
		}
		// The file's name must outlive a crash as well as its content.
		if d, err := os.Open(dir); err == nil {
			_ = d.Sync()
			d.Close()
		}
	}
	return s, nil
}

func (s *store) load(replay func(*record)) error {
	var good int64
	in := bufio.NewReader(s.file)
	for {
		line, err := in.ReadBytes('\n')
		if err == io.EOF {
			break // without its end the last line is a transaction that a crash cut: it never was
		}
		if err != nil {
			return err
		}
		var r record
		if err := json.Unmarshal(bytes.TrimSpace(line), &r); err != nil {
			return fmt.Errorf("the journal is broken at byte %d: %w", good, err)
		}
		good += int64(len(line))
		s.take(&r)
		replay(&r)
	}
	if err := s.file.Truncate(good); err != nil {
		return err
	}
	_, err := s.file.Seek(good, io.SeekStart)
	return err
}

func (s *store) take(r *record) {
	if r.Device != 0 {
		s.device = r.Device
	}
	if r.User != "" {
		s.user = r.User
	}
	if r.Session != nil {
		s.session = *r.Session
	}
	if r.Served != "" {
		s.served = r.Served
	}
	if len(r.Gateways) > 0 {
		s.gateways = r.Gateways
	}
}

func (s *store) setUser(user string) { s.user, s.tx.User = user, user }

func (s *store) setSession(x Session) { s.session, s.tx.Session = x, &x }

func (s *store) setServed(address string) { s.served, s.tx.Served = address, address }

func (s *store) setGateways(list []wire.Gateway) { s.gateways, s.tx.Gateways = list, list }

func (s *store) setCursor(conversation string, seq uint64) {
	if s.tx.Cursors == nil {
		s.tx.Cursors = map[string]uint64{}
	}
	s.tx.Cursors[conversation] = seq
}

// commit makes everything since the last one durable. Nothing may be sent or shown before.
func (s *store) commit() error {
	if s.tx.empty() {
		return nil
	}
	line, err := json.Marshal(&s.tx)
	if err != nil {
		return err
	}
	if _, err := s.file.Write(append(line, '\n')); err != nil {
		return err
	}
	s.tx = record{}
	return s.file.Sync()
}

func (s *store) close() { s.file.Close() }
