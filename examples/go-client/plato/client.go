// Package plato is a chat client for the platform Plato, written after docs/protocol.md alone.
//
// One loop owns all state. Sockets, the list of gateways and the application come in as events; each round of the loop
// handles what came, decides what to send and to show, makes all of it durable in one transaction, and only then sends
// and shows it. So a crash at any point loses nothing that was answered and answers nothing that was lost.
//
// Memory is bounded by the outbox, a cursor per conversation and earlyRows rows per conversation with a gap.
package plato

import (
	"context"
	"crypto/tls"
	"errors"
	"time"

	"plato-go-client/wire"
)

// Config says who the client is and where it looks.
type Config struct {
	IPConfig string                             // URL of ipconfig, such as http://127.0.0.1:8904
	Token    func(refused bool) (string, error) // the user's token; refused: the last one was, get another
	Dir      string                             // the durable state; one folder per user and installation
	TLS      *tls.Config                        // of the gateways; nil: plain text
	History  bool                               // tell the stored messages first
	Tell     func(Event)                        // called by the loop, after what it tells is durable
	Log      func(format string, args ...any)
}

// Event is what the application sees. Kind is message, settled, live or lost.
type Event struct {
	Kind         string    `json:"kind"`
	Conversation string    `json:"conversation,omitempty"`
	Seq          uint64    `json:"seq,omitempty"`
	PrevSeq      uint64    `json:"prev_seq,omitempty"`
	MsgID        uint64    `json:"msg_id,omitempty,string"`
	From         string    `json:"from,omitempty"`
	ClientMsgID  string    `json:"client_msg_id,omitempty"` // in hex
	Body         string    `json:"body,omitempty"`
	MsgType      uint64    `json:"msg_type,omitempty"`
	ClientID     uint64    `json:"client_id,omitempty"` // settled
	Code         wire.Code `json:"code,omitempty"`      // settled: 400 and above, the message was refused
	ConnID       uint64    `json:"conn_id,omitempty,string"`
	Resumed      bool      `json:"resumed,omitempty"` // live
	Gateway      string    `json:"gateway,omitempty"`
	Why          string    `json:"why,omitempty"` // lost
}

// Client is one device of one user.
type Client struct {
	conf   Config
	store  *store
	events chan func()
	ended  chan struct{}

	now  time.Time
	wake time.Time // the next timer

	convs    map[string]*conv
	gaps     map[string]*conv // of convs: those with rows to pull
	inflight int              // UPs unanswered on the live connection
	upsAt    time.Time        // the platform told us to send none before

	live *link // the committed connection
	next *link // the one that is being opened
	seek seek
	ref  uint64 // of the last SYNC or PULL

	limits       limits
	leaving      bool // LOGOUT is to be said
	tokenRefused bool
	avoid        string // address of a gateway that said it closes
	replaced     bool   // the first connection was replaced while a REDIRECT's second one was about to commit
	held         *Event // the first connection's loss, told only if that second one fails

	queue []func() // sends and tells of this round, after its transaction
	stop  error
	over  bool
}

// limits are what the platform tells at login; these are its defaults.
type limits struct {
	heartbeat, delay, repeatMin, repeatMax, race, dial time.Duration
	maxBody                                            int
}

// Open reads the durable state.
func Open(conf Config) (*Client, error) {
	c := &Client{
		conf: conf, events: make(chan func(), 256), ended: make(chan struct{}), now: time.Now(),
		convs: map[string]*conv{}, gaps: map[string]*conv{},
		limits: limits{30 * time.Second, time.Second, 2 * time.Second, 30 * time.Second, 250 * time.Millisecond,
			5 * time.Second, 63_488},
	}
	var err error
	c.store, err = openStore(conf.Dir, c.replay)
	return c, err
}

func (c *Client) replay(r *record) {
	for _, out := range r.Out {
		c.conv(out.Conversation).add(out)
	}
	for _, s := range r.Settled {
		cv := c.conv(s.Conversation)
		if e := cv.find(nil, s.ClientID); e != nil {
			cv.remove(e)
		}
	}
	for id, seq := range r.Cursors {
		cv := c.conv(id)
		cv.known, cv.cursor = true, seq
	}
	if c.conf.History {
		for _, row := range r.Rows {
			c.conf.Tell(messageOf(row))
		}
	}
}

// Run lives until ctx ends, the client logs out (both: nil), or the platform says stop.
func (c *Client) Run(ctx context.Context) error {
	defer c.shut()
	c.seek.on = true
	timer := time.NewTimer(0)
	for {
		c.now, c.wake = time.Now(), time.Time{}
		c.pump()
		if err := c.store.commit(); err != nil {
			return err
		}
		queue := c.queue
		c.queue = nil
		for _, fn := range queue {
			fn()
		}
		if c.over {
			return c.stop
		}
		wait := time.Hour
		if !c.wake.IsZero() {
			wait = time.Until(c.wake)
		}
		timer.Reset(max(wait, 0))
		select {
		case <-ctx.Done():
			return nil
		case fn := <-c.events:
			c.now = time.Now()
			fn()
		case <-timer.C:
		}
		c.drain()
	}
}

// drain handles what else came, so that one transaction holds a burst. A process that was stopped for a while finds its
// timers past and its sockets full: it reads until nothing comes any more before it believes a timer.
func (c *Client) drain() {
	quiet := time.Duration(0)
	if !c.wake.IsZero() && time.Since(c.wake) > time.Second {
		quiet = 200 * time.Millisecond
	}
	for n := 0; n < 1024; n++ {
		select {
		case fn := <-c.events:
			fn()
			continue
		default:
		}
		if quiet == 0 {
			return
		}
		select {
		case fn := <-c.events:
			fn()
		case <-time.After(quiet):
			return
		}
	}
}

func (c *Client) shut() {
	close(c.ended)
	for _, l := range []*link{c.live, c.next} {
		if l != nil {
			l.conn.close()
		}
	}
	c.store.close()
}

// post hands an event to the loop, from any goroutine.
func (c *Client) post(fn func()) {
	select {
	case c.events <- fn:
	case <-c.ended:
	}
}

// Send puts a message to another user into the outbox. When it returns nil the message is durable and takes effect once.
func (c *Client) Send(to string, body []byte) error {
	reply := make(chan error, 1)
	c.post(func() {
		err := c.enqueue(to, body)
		c.queue = append(c.queue, func() { reply <- err })
	})
	select {
	case err := <-reply:
		return err
	case <-c.ended:
		return errors.New("the client has ended")
	}
}

// Logout ends the session for good; Run returns when the platform said so. Without it the session waits for a resume.
func (c *Client) Logout() {
	c.post(func() {
		c.leaving = true
		if c.live != nil {
			c.takeLeave(c.live)
		}
	})
}

// Unsettled calls fn with the number of messages in the outbox and of conversations of which rows are still to be pulled: a
// message may have its place before what was said meanwhile has come.
func (c *Client) Unsettled(fn func(int)) {
	c.post(func() {
		n := len(c.gaps)
		for _, cv := range c.convs {
			n += len(cv.outbox)
		}
		fn(n)
	})
}

func (c *Client) end(err error) { c.over, c.stop = true, err }

// send queues a frame until this round's transaction is durable.
func (c *Client) send(l *link, cmd wire.Cmd) {
	c.queue = append(c.queue, func() { l.conn.send(cmd) })
}

func (c *Client) tell(e Event) { c.queue = append(c.queue, func() { c.conf.Tell(e) }) }

func (c *Client) log(format string, args ...any) { c.conf.Log(format, args...) }

func (c *Client) wakeAt(t time.Time) {
	if c.wake.IsZero() || t.Before(c.wake) {
		c.wake = t
	}
}

func (c *Client) nextRef() uint64 {
	c.ref++
	return c.ref
}

// pump decides what is due, and finds out when the next thing is.
func (c *Client) pump() {
	c.pumpSeek()
	if l := c.next; l != nil {
		c.pumpOpening(l)
	}
	for _, step := range []func(*link){c.pumpSync, c.pumpPulls, c.pumpUps, c.pumpBeat, c.pumpLeave, c.pumpStored} {
		if l := c.live; l != nil {
			step(l)
		}
	}
}
