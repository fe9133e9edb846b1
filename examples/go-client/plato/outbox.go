package plato

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	mrand "math/rand/v2"
	"time"
	"unicode/utf8"

	"plato-go-client/wire"
)

const upsMax = 48 // unanswered per connection; the platform takes 64

type state int

const (
	queued   state = iota // to be sent on this connection
	flying                // sent, unanswered
	accepted              // the platform holds it; it stays here until its outcome
)

// entry is an Out with what one connection knows of it.
type entry struct {
	Out
	state state
}

// sending is the outbox of one conversation.
type sending struct {
	lastID uint64   // client_id of the newest message ever
	outbox []*entry // unsettled, by client_id
	timer  *request // of the oldest one in flight
	timed  uint64   // its client_id
	hold   time.Time
	retry  backoff
	alone  uint64 // EXPECTED named it: nothing behind it goes out until it is answered
}

// Dialogue is the conversation_id of two users.
func Dialogue(a, b string) string {
	if a > b {
		a, b = b, a
	}
	h := sha256.New()
	for _, user := range []string{a, b} {
		h.Write(binary.BigEndian.AppendUint16(nil, uint16(len(user))))
		h.Write([]byte(user))
	}
	return "d:" + base64.RawURLEncoding.EncodeToString(h.Sum(nil))
}

func (c *Client) enqueue(to string, body []byte) error {
	user, err := c.user()
	switch {
	case err != nil:
		return err
	case len(to) == 0 || len(to) > 64 || !utf8.ValidString(to):
		return errors.New("a user_id is 1 to 64 bytes of UTF-8")
	case len(body) > c.limits.maxBody:
		return fmt.Errorf("the body is longer than %d bytes", c.limits.maxBody)
	}
	cv := c.conv(Dialogue(user, to))
	id := make([]byte, 16)
	if _, err := rand.Read(id); err != nil {
		return err
	}
	id[6], id[8] = id[6]&0x0f|0x40, id[8]&0x3f|0x80 // a UUID, version 4
	out := Out{Conversation: cv.id, ClientID: cv.lastID + 1, ClientMsgID: id, To: to, Body: body}
	cv.add(out)
	c.store.tx.Out = append(c.store.tx.Out, out)
	return nil
}

func (s *sending) add(out Out) {
	s.outbox = append(s.outbox, &entry{Out: out})
	s.lastID = max(s.lastID, out.ClientID)
}

// find goes by client_msg_id, or by client_id where that is empty.
func (s *sending) find(id []byte, clientID uint64) *entry {
	for _, e := range s.outbox {
		if len(id) > 0 && bytes.Equal(e.ClientMsgID, id) || len(id) == 0 && e.ClientID == clientID {
			return e
		}
	}
	return nil
}

func (s *sending) remove(e *entry) {
	for i := range s.outbox {
		if s.outbox[i] == e {
			s.outbox = append(s.outbox[:i], s.outbox[i+1:]...)
			return
		}
	}
}

func (c *Client) mark(e *entry, to state) {
	if e.state == flying {
		c.inflight--
	}
	if to == flying {
		c.inflight++
	}
	e.state = to
}

// requeue sends again whatever is in this state, in every conversation.
func (c *Client) requeue(from state) {
	for _, cv := range c.convs {
		for _, e := range cv.outbox {
			if e.state == from {
				c.mark(e, queued)
			}
		}
	}
}

// resend is what a new connection needs: the whole outbox goes out again, in order.
func (c *Client) resend() {
	c.requeue(flying)
	c.requeue(accepted)
	for _, cv := range c.convs {
		cv.alone, cv.timer, cv.hold = 0, nil, time.Time{}
	}
}

func (c *Client) pumpUps(l *link) {
	for _, cv := range c.convs {
		if len(cv.outbox) > 0 {
			if c.pumpConv(l, cv); c.live == nil {
				return
			}
		}
	}
}

func (c *Client) pumpConv(l *link, cv *conv) {
	if c.now.Before(cv.hold) {
		c.wakeAt(cv.hold)
	} else if c.now.Before(c.upsAt) {
		c.wakeAt(c.upsAt)
	} else {
		for _, e := range cv.outbox {
			if c.inflight == upsMax || cv.alone != 0 && e.ClientID > cv.alone {
				break
			}
			if e.state == queued {
				c.mark(e, flying)
				c.send(l, cv.up(e))
			}
		}
	}
	var oldest *entry
	for _, e := range cv.outbox {
		if e.state == flying {
			oldest = e
			break
		}
	}
	if oldest == nil {
		cv.timer = nil
		return
	}
	if cv.timer == nil || cv.timed != oldest.ClientID {
		cv.timer, cv.timed = &request{cmd: cv.up(oldest)}, oldest.ClientID
		c.pending(cv.timer) // it was sent: wait
	}
	c.pumpRequest(l, cv.timer)
}

func (s *sending) up(e *entry) wire.Cmd {
	// The outbox is sorted, so everything before its first message is settled; e itself is one that is not.
	return wire.Cmd{Type: wire.UP, Payload: wire.Up{ClientID: e.ClientID, Acked: s.outbox[0].ClientID - 1,
		Conversation: e.Conversation, ClientMsgID: e.ClientMsgID, To: e.To, Body: e.Body}.Encode()}
}

func (c *Client) onUpAck(l *link, a wire.Ack) {
	cv := c.conv(a.Conversation)
	e := cv.find(a.ClientMsgID, a.ClientID)
	if e == nil {
		return // settled before
	}
	switch act := a.Code.Act(); {
	case a.Code == wire.Pending:
		if cv.timer != nil && cv.timed == e.ClientID {
			c.pending(cv.timer)
		}
	case act == wire.Fine:
		c.mark(e, accepted)
		c.answered(cv, e)
	case a.Code == wire.Expected && cv.find(nil, a.Expected) != nil:
		if cv.alone == a.Expected && cv.find(nil, a.Expected).state == flying {
			return // one of many such answers for one gap
		}
		cv.from(c, a.Expected)
		cv.alone = a.Expected
	case act == wire.Retry:
		if a.Code == wire.SyncFirst {
			l.lost = true
		}
		first := e.ClientID
		if a.Code == wire.Expected { // one that is settled here: acked tells the platform, after the back-off
			first = min(first, a.Expected)
		}
		cv.from(c, first)
		if a.RetryMS > 0 { // our turn, in all conversations; earlier is refused again
			t := told(a.RetryMS)
			c.upsAt = later(c.upsAt, c.now.Add(t+mrand.N(t/4+1)))
		}
		if c.now.Before(cv.hold) {
			return // what was sent behind it is answered the same: one back-off for all
		}
		cv.hold = c.now.Add(cv.retry.next(c.limits.repeatMax))
	case act == wire.Reconnect || act == wire.LogIn:
		c.refused(l, &wire.Refusal{Code: a.Code, Msg: a.Msg})
	default: // in this place 400 and above, all of them, are about the message
		c.settle(cv, e, a.Code, 0)
	}
}

// from has everything sent again from one client_id on.
func (s *sending) from(c *Client, clientID uint64) {
	s.timer = nil
	for _, e := range s.outbox {
		if e.ClientID >= clientID {
			c.mark(e, queued)
		}
	}
}

func (c *Client) answered(cv *conv, e *entry) {
	cv.retry = 0
	if cv.alone == e.ClientID {
		cv.alone = 0
	}
}

// settle is the end of a message's stay in the outbox.
func (c *Client) settle(cv *conv, e *entry, code wire.Code, seq uint64) {
	c.mark(e, accepted)
	c.answered(cv, e)
	cv.remove(e)
	c.store.tx.Settled = append(c.store.tx.Settled, settled{cv.id, e.ClientID, code})
	c.tell(Event{Kind: "settled", Conversation: cv.id, ClientID: e.ClientID, Code: code, Seq: seq})
}

func (c *Client) onReceipt(r wire.Receipt) {
	cv := c.conv(r.Conversation)
	e := cv.find(r.ClientMsgID, 0)
	switch {
	case r.Code >= 400:
		if e != nil {
			c.settle(cv, e, r.Code, 0)
		}
	case r.Code >= 100: // no outcome
	case e != nil: // settles it, and is its row: the body is here
		c.onRow(wire.Row{MsgID: r.MsgID, Conversation: r.Conversation, Seq: r.Seq, PrevSeq: r.PrevSeq,
			From: c.store.user, ClientMsgID: r.ClientMsgID, Body: e.Body, AtMS: r.At})
	default: // settled before; if its row is not stored yet, that is a gap
		c.reaches(cv, r.Seq)
	}
}
