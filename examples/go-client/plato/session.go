package plato

import (
	"fmt"
	"net"
	"time"

	"plato-go-client/wire"
)

type phase int

const (
	opening phase = iota // LOGIN or RECONN was sent
	syncing              // it was answered; the first SYNC commits
	live
)

// link is one connection with what is counted on it.
type link struct {
	conn    *conn
	gateway wire.Gateway
	phase   phase
	since   time.Time // of live

	open   *request
	resume bool // open is a RECONN
	connID uint64
	secret []byte

	walk   *walk
	walkAt time.Time
	lost   bool // numbers are missing, or a conversation is unknown: a Sync is due

	run, no             uint64 // the newest that came
	storedRun, storedNo uint64 // the newest acknowledged
	again               bool   // acknowledge although nothing new came

	leave  *request // LOGOUT
	beat   *request
	beatAt time.Time
}

// opened begins a connection's life: resume where there is a session, else log in.
func (c *Client) opened(sock net.Conn, g wire.Gateway) {
	l := &link{gateway: g}
	l.conn = newConn(sock,
		func(cmd wire.Cmd) { c.post(func() { c.onFrame(l, cmd) }) },
		func(err error) { c.post(func() { c.lose(l, err) }) })
	c.next = l
	c.begin(l)
}

// begin sends LOGIN or RECONN, as the first frame or again on the same socket.
func (c *Client) begin(l *link) {
	s := c.store.session
	l.phase, l.resume, l.walk = opening, s.ConnID != 0, nil
	if l.resume {
		l.open = &request{cmd: wire.Cmd{Type: wire.RECONN, Payload: wire.ReConn(s).Encode()}}
		return
	}
	token, err := c.conf.Token(c.tokenRefused)
	if err != nil {
		c.end(fmt.Errorf("no token: %w", err))
		return
	}
	l.open = &request{cmd: wire.Cmd{Type: wire.LOGIN, Payload: wire.Login{
		Device: c.store.device, Token: token, Platform: "go", Version: "1"}.Encode()}}
}

func (c *Client) pumpOpening(l *link) {
	if l.phase == opening {
		c.pumpRequest(l, l.open)
	} else if l.walk != nil {
		c.pumpRequest(l, l.walk.req)
	}
}

func (c *Client) onOpenAck(l *link, a wire.Ack) {
	switch {
	case l.phase != opening || a.Type != l.open.cmd.Type:
		return // of a repeat
	case a.Code == wire.Pending:
		c.pending(l.open)
		return
	case a.Code.Act() == wire.Retry:
		c.later(l.open, a.RetryMS)
		if a.Code == wire.LoginLater { // our turn is kept
			l.open.due = c.now.Add(told(a.RetryMS))
		}
		return
	case a.Code.Act() != wire.Fine:
		c.refused(l, &wire.Refusal{Code: a.Code, Msg: a.Msg})
		return
	}
	if c.store.user != "" && a.User != c.store.user {
		c.end(fmt.Errorf("the state here is that of %q, the token that of %q", c.store.user, a.User))
		return
	}
	if c.store.user == "" {
		c.store.setUser(a.User)
	}
	c.takeTimes(a)
	c.tokenRefused = false
	l.phase, l.connID, l.secret = syncing, a.ConnID, a.Secret
	if len(l.secret) == 0 {
		l.secret = c.store.session.Secret
	}
	c.beginWalk(l, false)
}

func (c *Client) takeTimes(a wire.Ack) {
	for _, t := range []struct {
		to *time.Duration
		ms uint64
	}{{&c.limits.heartbeat, a.HeartbeatMS}, {&c.limits.repeatMin, a.RepeatMinMS}, {&c.limits.repeatMax, a.RepeatMaxMS},
		{&c.limits.race, a.ConnectDelayMS}, {&c.limits.dial, a.ConnectTimeoutMS}} {
		if t.ms > 0 {
			*t.to = time.Duration(t.ms) * time.Millisecond
		}
	}
	if a.Type != wire.HEARTBEAT && a.HeartbeatMS > 0 { // then 0 is a time as well
		c.limits.delay = time.Duration(a.DelayMS) * time.Millisecond
	}
	if a.MaxBodyBytes > 0 {
		c.limits.maxBody = int(a.MaxBodyBytes)
	}
}

// commit: the first SYNC was answered, so this connection is the device's and this session the one to resume.
func (c *Client) commit(l *link) {
	if c.live != nil {
		c.live.conn.close() // a REDIRECT's first one; what was on its way here the Sync brings
	}
	c.live, c.next = l, nil
	c.seek.on, c.replaced, c.avoid, c.held = false, false, "", nil
	l.phase, l.since = live, c.now
	c.store.setSession(Session{l.connID, l.secret})
	c.store.setServed(address(l.gateway))
	for _, cv := range c.convs {
		cv.pull = nil
	}
	c.resend()
	c.nextBeat(l)
	c.takeLeave(l)
	c.tell(Event{Kind: "live", ConnID: l.connID, Resumed: l.resume, Gateway: l.gateway.Name})
}

// lose is the end of a connection, for whatever reason. The session lives on.
func (c *Client) lose(l *link, why error) {
	switch l {
	case c.next:
		c.next = nil
		c.seek.on = true // at the next gateway
		c.seek.failed++
		c.tellHeld()
	case c.live:
		c.live = nil
		c.gone(l)
		c.held = &Event{Kind: "lost", Gateway: l.gateway.Name, Why: why.Error()}
		if c.next == nil || c.next.phase != syncing { // else a REDIRECT's second one is about to commit, and nothing is lost
			c.tellHeld()
		}
	default:
		return // closed before
	}
	c.log("%s: %v", address(l.gateway), why)
	l.conn.close()
}

// tellHeld says that the connection is lost after all.
func (c *Client) tellHeld() {
	if c.held != nil {
		c.tell(*c.held)
		c.held = nil
	}
}

// forget: the session is done, only a login helps. The outbox and the cursors stay.
func (c *Client) forget() { c.store.setSession(Session{}) }

// refused does what a code's range says to a connection: for a refusal that is not about one message or request.
func (c *Client) refused(l *link, r *wire.Refusal) {
	second := l == c.next && c.live != nil // a REDIRECT's: its failures do not touch the first one
	if l == c.next {
		c.seek.code = true
	}
	switch act := r.Code.Act(); {
	case l == c.next && c.replaced && r.Code == wire.SecretWrong:
		c.end(&wire.Refusal{Code: wire.Replaced, Msg: "this device logged in elsewhere"})
	case second && act != wire.Fine && act != wire.Retry:
		c.lose(l, r)
	case act == wire.Reconnect:
		c.lose(l, r)
		switch r.Code {
		case wire.GatewayClosing:
			c.avoid = address(l.gateway)
		case wire.GatewayFull:
			c.seek.at = c.now
		case wire.AddressBusy:
			c.seek.at = c.now
			c.seek.crowded(told(r.RetryMS))
		case wire.Flooding:
			c.seek.at = c.now.Add(c.seek.back.next(slowBack))
		}
	case act == wire.LogIn && c.leaving: // there is no session to end any more
		c.forget()
		c.end(nil)
	case act == wire.LogIn && l == c.live:
		if r.Code != wire.LoginFirst { // that one leaves open whether the session lives: RECONN will tell
			c.forget()
		}
		c.lose(l, r)
	case act == wire.LogIn && l.resume:
		c.tellHeld()
		c.forget()
		c.begin(l)
	case act == wire.LogIn:
		if c.tokenRefused { // another one was refused, too: no gateway will take it
			c.seek.list = nil
		}
		c.tokenRefused = true
		c.lose(l, r)
	case r.Code == wire.LoggedOut:
		c.forget()
		c.end(nil)
	case act == wire.Stop:
		c.end(r)
	}
}

func (c *Client) onFrame(l *link, cmd wire.Cmd) {
	if l != c.live && l != c.next {
		return
	}
	if err := c.handle(l, cmd); err != nil {
		c.lose(l, err)
	}
}

func (c *Client) handle(l *link, cmd wire.Cmd) error {
	switch cmd.Type {
	case wire.ACK:
		a, err := wire.DecodeAck(cmd.Payload)
		if err == nil {
			c.onAck(l, a)
		}
		return err
	case wire.SYNCED:
		m, err := wire.DecodeSynced(cmd.Payload)
		if err == nil {
			c.onSynced(l, m)
		}
		return err
	case wire.PULLED:
		m, err := wire.DecodePulled(cmd.Payload)
		if err == nil {
			c.onPulled(l, m)
		}
		return err
	case wire.PUSH, wire.NOTIFY, wire.RECEIPT:
		if l.phase == opening || !l.onNumbered(cmd.Run, cmd.PushNo) {
			return nil
		}
		return c.handleNumbered(l, cmd)
	case wire.REDIRECT:
		to, err := wire.DecodeRedirect(cmd.Payload)
		if err == nil && l == c.live {
			c.redirected(to)
		}
		return err
	case wire.KICK:
		r, err := wire.DecodeKick(cmd.Payload)
		if err == nil {
			c.onKick(l, r)
		}
		return err
	case wire.ERROR:
		m, err := wire.DecodeError(cmd.Payload)
		if err == nil {
			c.onError(l, m)
		}
		return err
	}
	return nil // of a later version
}

func (c *Client) handleNumbered(l *link, cmd wire.Cmd) error {
	switch cmd.Type {
	case wire.PUSH:
		row, err := wire.DecodeRow(cmd.Payload)
		if err == nil {
			c.onRow(row)
		}
		return err
	case wire.RECEIPT:
		r, err := wire.DecodeReceipt(cmd.Payload)
		if err == nil {
			c.onReceipt(r)
		}
		return err
	}
	newest, err := wire.DecodeNotify(cmd.Payload)
	if err == nil {
		c.onNotify(l, newest)
	}
	return err
}

func (c *Client) onAck(l *link, a wire.Ack) {
	r := &wire.Refusal{Code: a.Code, Msg: a.Msg, RetryMS: a.RetryMS}
	switch a.Type {
	case wire.LOGIN, wire.RECONN:
		c.onOpenAck(l, a)
	case wire.HEARTBEAT:
		c.onBeatAck(l, a)
	case wire.LOGOUT:
		c.refused(l, &wire.Refusal{Code: wire.LoggedOut, Msg: "logged out"})
	case wire.UP:
		c.onUpAck(l, a)
	case wire.PULL:
		if cv := c.pulling(a.Ref); cv != nil && a.Code == wire.Pending {
			c.pending(cv.pull)
		} else if cv != nil && a.Code.Act() != wire.Fine {
			c.refusedPull(l, cv, r)
		}
	case wire.SYNC:
		switch {
		case l.walk == nil || l.walk.req.ref != a.Ref:
		case a.Code == wire.Pending:
			c.pending(l.walk.req)
		case a.Code.Act() != wire.Fine:
			c.refusedSync(l, r)
		case l.phase == syncing: // the commit's, which alone starts the counting
			if l.run == 0 {
				l.run, l.no, l.storedRun, l.storedNo = a.Run, a.PushNo, a.Run, a.PushNo
			}
			c.pending(l.walk.req) // SYNCED ends it
			c.commit(l)
		default:
			c.pending(l.walk.req)
		}
	}
}

func (c *Client) onKick(l *link, r *wire.Refusal) {
	if r.Code == wire.Replaced && l == c.live && c.next != nil && c.next.phase == syncing {
		c.replaced = true // by our own second connection, most likely; if not, RECONN will say SECRET_WRONG
		c.lose(l, r)
		return
	}
	c.refused(l, r)
}

func (c *Client) onError(l *link, m wire.Error) {
	c.log("%s: %v", address(l.gateway), &m.Refusal)
	act := m.Code.Act()
	cv := c.pulling(m.Ref)
	switch {
	case m.Type == wire.PULL && cv != nil && (act == wire.Retry || act == wire.StopRequest):
		c.refusedPull(l, cv, &m.Refusal)
	case m.Type == wire.SYNC && l.walk != nil && l.walk.req.ref == m.Ref && (act == wire.Retry || act == wire.StopRequest):
		c.refusedSync(l, &m.Refusal)
	case act == wire.LogIn && l.phase == opening && m.Type != l.open.cmd.Type: // of a frame before this LOGIN or RECONN
	case act == wire.Retry && l.phase == opening:
		c.later(l.open, m.RetryMS)
	case m.Code == wire.SyncFirst:
		l.lost = true
	case act == wire.Retry && m.Type == wire.UP: // too fast: what was dropped is repeated by timer, the rest waits
		for _, cv := range c.convs {
			cv.hold = c.now.Add(cv.retry.next(c.limits.repeatMax))
		}
	case act == wire.Retry || act == wire.StopRequest: // of a frame that a timer repeats, or that was settled
	default:
		c.refused(l, &m.Refusal)
	}
}
