package plato

import (
	"errors"
	"math/rand/v2"
	"time"

	"plato-go-client/wire"
)

const (
	tries     = 3 // unanswered sendings of one frame, then the connection is dead
	firstBack = 250 * time.Millisecond
)

var errDead = errors.New("no answer: the connection is dead")

// backoff doubles from firstBack up to the cap that each call names, less up to a quarter at random.
type backoff time.Duration

func (b *backoff) next(cap time.Duration) time.Duration {
	d := min(max(time.Duration(*b)*2, firstBack), cap)
	*b = backoff(d)
	return d - rand.N(d/4)
}

// request is a frame that wants an answer: it is repeated by timer, the same each time, until it has one.
type request struct {
	cmd   wire.Cmd
	ref   uint64
	sent  int // since the last sign of life
	wait  time.Duration
	due   time.Time // zero: now
	retry backoff
}

// pumpRequest sends what is due. The third of one frame unanswered loses the connection.
func (c *Client) pumpRequest(l *link, r *request) {
	if !c.now.Before(r.due) {
		if r.sent == tries {
			c.lose(l, errDead)
			return
		}
		if r.sent == 0 {
			r.wait = c.limits.repeatMin
		} else {
			r.wait = min(2*r.wait, c.limits.repeatMax)
		}
		r.sent++
		r.due = c.now.Add(r.wait)
		c.send(l, r.cmd)
	}
	c.wakeAt(r.due)
}

// pending: the platform has it and is at it, so the timer and its count begin anew.
func (c *Client) pending(r *request) {
	r.sent, r.wait = 1, c.limits.repeatMin
	r.due = c.now.Add(r.wait)
}

// later: a "retry" code; the same again after a back-off, and not before the platform told, up to a quarter later.
func (c *Client) later(r *request, retryMS uint64) {
	r.sent = 0
	r.due = c.now.Add(r.retry.next(c.limits.repeatMax))
	if retryMS > 0 {
		t := told(retryMS)
		r.due = later(r.due, c.now.Add(t+rand.N(t/4+1)))
	}
}

// told is a time that the platform told, kept to up to ten minutes.
func told(retryMS uint64) time.Duration {
	return time.Duration(min(retryMS, 600_000)) * time.Millisecond
}
