package plato

import (
	"math/rand/v2"

	"plato-go-client/wire"
)

func (c *Client) nextBeat(l *link) {
	l.beat = nil
	l.beatAt = c.now.Add(c.limits.heartbeat - rand.N(c.limits.heartbeat/10))
}

func (c *Client) pumpBeat(l *link) {
	if l.beat == nil {
		if c.now.Before(l.beatAt) {
			c.wakeAt(l.beatAt)
			return
		}
		m := wire.Heartbeat{Run: l.storedRun, PushNo: l.storedNo}
		l.beat = &request{cmd: wire.Cmd{Type: wire.HEARTBEAT, Payload: m.Encode()}}
	}
	c.pumpRequest(l, l.beat)
}

// takeLeave says LOGOUT, again on each connection until it was answered.
func (c *Client) takeLeave(l *link) {
	if c.leaving {
		l.leave = &request{cmd: wire.Cmd{Type: wire.LOGOUT}}
	}
}

func (c *Client) pumpLeave(l *link) {
	if l.leave != nil {
		c.pumpRequest(l, l.leave)
	}
}

func (c *Client) onBeatAck(l *link, a wire.Ack) {
	if l.beat == nil {
		return
	}
	switch {
	case a.Code == wire.Pending:
		c.pending(l.beat)
	case a.Code.Act() == wire.Retry:
		c.later(l.beat, a.RetryMS)
	case a.Code.Act() == wire.Fine:
		c.takeTimes(a)
		c.nextBeat(l)
		if a.Run > l.run || a.Run == l.run && a.PushNo > l.no { // something never came
			l.run, l.no, l.lost = a.Run, a.PushNo, true
		}
	default:
		c.refused(l, &wire.Refusal{Code: a.Code, Msg: a.Msg})
	}
}
