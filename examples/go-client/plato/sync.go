package plato

import (
	"sort"
	"time"

	"plato-go-client/wire"
)

const chunk = 500 // cursors in one SYNC

// walk is one Sync over all conversations: chunks of known ids in the order of their bytes, each asked page by page.
type walk struct {
	req   *request
	ids   []string // known ones that are still to come, those of this chunk first
	size  int      // of this chunk
	after string
	upto  string
	heals bool // it follows a loss on a standing connection
}

func (c *Client) beginWalk(l *link, heals bool) {
	w := &walk{heals: heals}
	for id, cv := range c.convs {
		if cv.known {
			w.ids = append(w.ids, id)
		}
	}
	sort.Strings(w.ids) // Go compares strings by their bytes, as the platform does
	l.walk = w
	w.cut()
	c.ask(l)
}

// cut begins the next chunk. The last one is open to the end, where the conversations are that nobody knows yet.
func (w *walk) cut() {
	w.size, w.upto = len(w.ids), ""
	if w.size > chunk {
		w.size, w.upto = chunk, w.ids[chunk-1]
	}
}

func (c *Client) ask(l *link) {
	w := l.walk
	m := wire.Sync{Ref: c.nextRef(), After: w.after, Upto: w.upto}
	for _, id := range w.ids[:w.size] {
		m.Cursors = append(m.Cursors, wire.Cursor{Conversation: id, Seq: c.convs[id].cursor})
	}
	w.req = &request{cmd: wire.Cmd{Type: wire.SYNC, Payload: m.Encode()}, ref: m.Ref}
}

func (c *Client) pumpSync(l *link) {
	if l.walk == nil && l.lost {
		if c.now.Before(l.walkAt) {
			c.wakeAt(l.walkAt)
			return
		}
		l.lost = false
		c.beginWalk(l, true)
	}
	if l.walk != nil {
		c.pumpRequest(l, l.walk.req)
	}
}

func (c *Client) onSynced(l *link, m wire.Synced) {
	w := l.walk
	if w == nil || m.Ref != w.req.ref {
		return // of a repeat, answered already
	}
	if m.Code.Act() != wire.Fine {
		c.refusedSync(l, &wire.Refusal{Code: m.Code, Msg: m.Msg, RetryMS: m.RetryMS})
		return
	}
	if l.phase == syncing {
		c.commit(l) // its ACK was lost
	}
	for _, it := range m.Items {
		cv := c.conv(it.Conversation)
		if !cv.known {
			c.know(cv, it.First)
		}
		c.reaches(cv, it.Newest)
	}
	switch {
	case m.More && m.Covered > w.after:
		w.after = m.Covered
		n := sort.SearchStrings(w.ids[:w.size], m.Covered)
		if n < w.size && w.ids[n] == m.Covered {
			n++
		}
		w.ids, w.size = w.ids[n:], w.size-n
		c.ask(l)
	case m.More: // a page that moves nothing
		c.later(w.req, 0)
	case w.upto != "":
		w.after, w.ids = w.upto, w.ids[w.size:]
		w.cut()
		c.ask(l)
	default:
		l.walk = nil
		if w.heals {
			c.requeue(accepted)
		}
		for _, cv := range c.convs {
			if !cv.known && len(cv.early) > 0 { // not listed yet, though a row of it came
				l.lost, l.walkAt = true, c.now.Add(time.Second)
			}
		}
	}
}

// refusedSync is a SYNC's refusal, by ACK, SYNCED or ERROR.
func (c *Client) refusedSync(l *link, r *wire.Refusal) {
	switch r.Code.Act() {
	case wire.Retry:
		if l.phase == syncing && r.Code == wire.TryAgain {
			c.begin(l)
			c.later(l.open, r.RetryMS)
			return
		}
		c.later(l.walk.req, r.RetryMS)
	case wire.StopRequest:
		c.log("sync refused for good: %v", r)
		l.walk = nil
		if l.phase == syncing {
			c.lose(l, r)
		}
	default:
		c.refused(l, r)
	}
}
