package plato

import (
	"encoding/hex"
	"sort"

	"plato-go-client/wire"
)

const (
	earlyRows = 256 // kept per conversation while a gap before them is pulled; the pull brings those beyond
	pullsMax  = 3   // of the four requests that may be unanswered, one is for SYNC
)

// conv is one conversation: how far it is stored, and what is to be sent.
type conv struct {
	id     string
	known  bool // cursor means something
	cursor uint64
	want   uint64 // it reaches at least so far; above cursor: a gap
	early  map[uint64]wire.Row
	pull   *request
	sending
}

func (c *Client) conv(id string) *conv {
	cv := c.convs[id]
	if cv == nil {
		cv = &conv{id: id, early: map[uint64]wire.Row{}}
		c.convs[id] = cv
	}
	return cv
}

func (c *Client) know(cv *conv, cursor uint64) {
	cv.known = true
	c.advance(cv, cursor)
	c.settleEarly(cv)
}

func (c *Client) advance(cv *conv, cursor uint64) {
	cv.cursor = max(cv.cursor, cursor)
	c.store.setCursor(cv.id, cv.cursor)
	c.reaches(cv, 0)
}

// reaches notes that a conversation has rows up to seq. Of one that is not known the Sync tells where it begins.
func (c *Client) reaches(cv *conv, seq uint64) {
	cv.want = max(cv.want, seq)
	if cv.known && cv.want > cv.cursor {
		c.gaps[cv.id] = cv
		return
	}
	delete(c.gaps, cv.id)
	cv.pull = nil
	if !cv.known && seq > 0 && c.live != nil {
		c.live.lost = true
	}
}

// onRow takes a message from PUSH, PULLED or an own RECEIPT.
func (c *Client) onRow(row wire.Row) {
	cv := c.conv(row.Conversation)
	if row.From == c.store.user {
		if e := cv.find(row.ClientMsgID, 0); e != nil {
			c.settle(cv, e, wire.OK, row.Seq)
		}
	}
	if !cv.known && row.PrevSeq == 0 {
		c.know(cv, 0)
	}
	switch {
	case cv.known && row.Seq <= cv.cursor: // seen
	case cv.known && row.PrevSeq <= cv.cursor:
		c.keep(cv, row)
		c.settleEarly(cv)
	default:
		if len(cv.early) < earlyRows {
			cv.early[row.Seq] = row
		}
		c.reaches(cv, row.Seq)
	}
}

// keep stores a row whose turn it is.
func (c *Client) keep(cv *conv, row wire.Row) {
	c.store.tx.Rows = append(c.store.tx.Rows, row)
	c.tell(messageOf(row))
	c.advance(cv, row.Seq)
}

// settleEarly takes from the reorder buffer what fits now.
func (c *Client) settleEarly(cv *conv) {
	seqs := make([]uint64, 0, len(cv.early))
	for seq := range cv.early {
		seqs = append(seqs, seq)
	}
	sort.Slice(seqs, func(i, j int) bool { return seqs[i] < seqs[j] })
	for _, seq := range seqs {
		row := cv.early[seq]
		if row.PrevSeq > cv.cursor {
			return
		}
		delete(cv.early, seq)
		if seq > cv.cursor {
			c.keep(cv, row)
		}
	}
}

func (c *Client) pumpPulls(l *link) {
	n := 0
	for _, cv := range c.gaps {
		if cv.pull != nil {
			n++
		}
	}
	for _, cv := range c.gaps {
		if cv.pull == nil && n < pullsMax {
			n++
			m := wire.Pull{Ref: c.nextRef(), Conversation: cv.id, From: cv.cursor + 1}
			cv.pull = &request{cmd: wire.Cmd{Type: wire.PULL, Payload: m.Encode()}, ref: m.Ref}
		}
		if cv.pull != nil {
			if c.pumpRequest(l, cv.pull); c.live == nil {
				return
			}
		}
	}
}

func (c *Client) pulling(ref uint64) *conv {
	for _, cv := range c.gaps {
		if cv.pull != nil && cv.pull.ref == ref {
			return cv
		}
	}
	return nil
}

func (c *Client) onPulled(l *link, m wire.Pulled) {
	cv := c.pulling(m.Ref)
	if cv == nil {
		return
	}
	if m.Code.Act() != wire.Fine {
		c.refusedPull(l, cv, &wire.Refusal{Code: m.Code, Msg: m.Msg, RetryMS: m.RetryMS})
		return
	}
	before := cv.cursor
	asked := cv.pull
	for _, row := range m.Rows {
		if row.From == c.store.user {
			if e := cv.find(row.ClientMsgID, 0); e != nil {
				c.settle(cv, e, wire.OK, row.Seq)
			}
		}
		if row.Seq > cv.cursor && m.CoveredFrom <= before+1 {
			c.keep(cv, row)
		}
	}
	if m.CoveredFrom <= before+1 {
		c.advance(cv, min(m.CoveredTo, m.Newest))
		c.reaches(cv, m.Newest)
	}
	c.settleEarly(cv)
	if cv.cursor > before {
		cv.pull = nil // the next page, if there is still a gap, is another request
	} else {
		c.later(asked, 0)
	}
}

// refusedPull is a PULL's refusal, by PULLED, ACK or ERROR.
func (c *Client) refusedPull(l *link, cv *conv, r *wire.Refusal) {
	switch r.Code.Act() {
	case wire.Retry:
		c.later(cv.pull, r.RetryMS)
	case wire.StopRequest: // no member any more, or no such range: there is no gap to fill
		c.log("pull of %s: %v", cv.id, r)
		clear(cv.early)
		cv.want = cv.cursor
		c.reaches(cv, 0)
	default:
		c.refused(l, r)
	}
}

// onNumbered counts a PUSH, NOTIFY or RECEIPT, and says whether it is to be handled.
func (l *link) onNumbered(run, no uint64) bool {
	switch {
	case run < l.run:
		return false
	case run > l.run:
		l.run, l.no, l.lost = run, no, true
	case no <= l.no:
		l.again = true // the platform missed the ACK
	case no == l.no+1:
		l.no = no
	default:
		l.no, l.lost = no, true
	}
	return true
}

func (c *Client) onNotify(l *link, newest []wire.Cursor) {
	for _, at := range newest {
		c.reaches(c.conv(at.Conversation), at.Seq)
	}
	l.lost = l.lost || len(newest) == 0
}

// pumpStored acknowledges cumulatively what came, once everything up to there is stored: no gap is open, no Sync due.
func (c *Client) pumpStored(l *link) {
	if l.walk != nil || l.lost || len(c.gaps) > 0 || l.run == 0 {
		return
	}
	if l.again || l.run != l.storedRun || l.no != l.storedNo {
		l.storedRun, l.storedNo, l.again = l.run, l.no, false
		c.send(l, wire.Cmd{Type: wire.ACK, Payload: wire.EncodeStored(l.run, l.no)})
	}
}

func messageOf(r wire.Row) Event {
	return Event{Kind: "message", Conversation: r.Conversation, Seq: r.Seq, PrevSeq: r.PrevSeq, MsgID: r.MsgID,
		From: r.From, ClientMsgID: hex.EncodeToString(r.ClientMsgID), Body: string(r.Body), MsgType: r.MsgType}
}
