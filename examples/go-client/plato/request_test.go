package plato

import (
	"testing"
	"time"

	"plato-go-client/wire"
)

const busy wire.Code = 100

// docs/protocol.md §7: a told retry_ms is kept to, up to ten minutes.
func TestToldTimesAreKeptTo(t *testing.T) {
	c, err := Open(Config{Dir: t.TempDir(), Tell: func(Event) {}, Log: func(string, ...any) {}})
	if err != nil {
		t.Fatal(err)
	}
	defer c.store.close()
	l := &link{phase: live, walk: &walk{req: &request{ref: 1}}}
	cv := c.conv("d:x")
	c.know(cv, 0)
	c.reaches(cv, 5)
	within := func(name string, due time.Time, least time.Duration) {
		t.Helper()
		if wait := due.Sub(c.now); wait < least || wait > least+least/4+time.Millisecond {
			t.Errorf("%s: again after %v, told were %v", name, wait, least)
		}
	}
	cv.pull = &request{ref: 7}
	c.onPulled(l, wire.Pulled{Ref: 7, Code: busy, RetryMS: 8_000})
	within("PULLED", cv.pull.due, 8*time.Second)
	c.onAck(l, wire.Ack{Type: wire.PULL, Ref: 7, Code: busy, RetryMS: 9_000})
	within("ACK of PULL", cv.pull.due, 9*time.Second)
	c.onSynced(l, wire.Synced{Ref: 1, Code: busy, RetryMS: 8_000})
	within("SYNCED", l.walk.req.due, 8*time.Second)
	c.onAck(l, wire.Ack{Type: wire.SYNC, Ref: 1, Code: busy, RetryMS: 1 << 63})
	within("ACK of SYNC", l.walk.req.due, 10*time.Minute)
	l.phase, l.open = opening, &request{cmd: wire.Cmd{Type: wire.LOGIN}}
	c.onAck(l, wire.Ack{Type: wire.LOGIN, Code: wire.LoginLater, RetryMS: 3_000})
	within("LOGIN_LATER", l.open.due, 3*time.Second)
}
