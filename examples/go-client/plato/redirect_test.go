package plato

import (
	"errors"
	"io"
	"net"
	"slices"
	"testing"

	"plato-go-client/wire"
)

// While a REDIRECT's second connection is about to commit, the end of the first one is no loss: the platform closes it
// after the commit, and that may come before the commit's ACK does. Only if the second one fails as well is it told.
func TestTheFirstConnectionsEndIsALossOnlyIfTheSecondOneFails(t *testing.T) {
	ends := map[string]func(*Client, *link){
		"kicked": func(c *Client, l *link) { c.onKick(l, &wire.Refusal{Code: wire.Replaced}) },
		"closed": func(c *Client, l *link) { c.lose(l, io.EOF) },
	}
	goesOn := map[string]struct {
		phase phase
		then  func(*Client, *link)
		told  []string
	}{
		"commits":        {syncing, func(c *Client, l *link) { c.commit(l) }, []string{"live"}},
		"breaks":         {syncing, func(c *Client, l *link) { c.lose(l, io.EOF) }, []string{"lost"}},
		"must log in":    {syncing, func(c *Client, l *link) { c.refused(l, &wire.Refusal{Code: wire.LoginFirst}) }, []string{"lost"}},
		"was not so far": {opening, func(*Client, *link) {}, []string{"lost"}},
	}
	for first, end := range ends {
		for second, on := range goesOn {
			if first == "kicked" && on.phase == opening {
				continue // nothing was committed: somebody else logged in, and the client stops
			}
			t.Run(first+", the second one "+second, func(t *testing.T) {
				var told []string
				c, err := Open(Config{Dir: t.TempDir(), Log: func(string, ...any) {}, Tell: func(e Event) { told = append(told, e.Kind) },
					Token: func(bool) (string, error) { return "", errors.New("not asked for") }})
				if err != nil {
					t.Fatal(err)
				}
				defer c.shut()
				c.live, c.next = played(t, live), played(t, on.phase)
				c.seek.on, c.next.resume = true, true
				end(c, c.live)
				on.then(c, c.next)
				for _, fn := range c.queue {
					fn()
				}
				if !slices.Equal(told, on.told) {
					t.Errorf("told %v, not %v", told, on.told)
				}
			})
		}
	}
}

// played is a connection to a gateway that says nothing.
func played(t *testing.T, at phase) *link {
	here, there := net.Pipe()
	t.Cleanup(func() { there.Close() })
	return &link{phase: at, conn: newConn(here, func(wire.Cmd) {}, func(error) {})}
}
