package plato

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"plato-go-client/wire"
)

const (
	fastBack   = 5 * time.Second
	slowBack   = 30 * time.Second
	stays      = 2 * time.Second // a connection that lived so long was a good one
	shortLives = 5
	listWait   = 5 * time.Second
	dialsMax   = 3
)

// seek is the search for a gateway. A round is a list, tried from its first to its last; then there is a back-off.
type seek struct {
	on       bool
	busy     bool // a list is on its way
	dials    int  // connections are on their way, the next one not before nextDial
	nextDial time.Time
	at       time.Time
	list     []wire.Gateway
	fresh    bool // this round asked ipconfig
	code     bool // a refusal came in this round, so hurry helps nobody
	back     backoff
	short    int // connections in a row that did not stay

	failed, full int           // attempts of this round; those that ADDRESS_BUSY refused
	least        time.Duration // the least time that those told
}

// crowded notes an ADDRESS_BUSY.
func (s *seek) crowded(wait time.Duration) {
	if s.full == 0 || wait < s.least {
		s.least = wait
	}
	s.full++
}

// gone begins the search after a live connection was lost.
func (c *Client) gone(l *link) {
	s := &c.seek
	if c.now.Sub(l.since) < stays {
		s.short++
	} else {
		s.short, s.back = 0, 0
	}
	if s.on { // a REDIRECT's search goes on, without a delay
		return
	}
	s.on, s.list, s.fresh, s.code, s.failed, s.full = true, nil, false, false, 0, 0
	if s.short >= shortLives {
		s.at = c.now.Add(s.back.next(slowBack))
	} else {
		s.at = c.now.Add(rand.N(c.limits.delay + 1)) // so that not all clients of a dead gateway come at once
	}
}

// redirected looks for a second connection; the live one stands meanwhile.
func (c *Client) redirected(to []wire.Gateway) {
	if c.seek.on {
		return
	}
	c.log("%s: it will close and names %d others", address(c.live.gateway), len(to))
	list := append([]wire.Gateway(nil), to...)
	if len(list) > 0 {
		i := rand.N(min(len(list), 3))
		list[0], list[i] = list[i], list[0]
	}
	c.avoid = address(c.live.gateway)
	c.seek.on, c.seek.at, c.seek.list, c.seek.fresh, c.seek.code = true, c.now, list, false, false
}

func (c *Client) pumpSeek() {
	s := &c.seek
	switch {
	case !s.on || s.busy || c.next != nil:
	case c.now.Before(s.at):
		c.wakeAt(s.at)
	case len(s.list) > 0 && s.dials < dialsMax && (s.dials == 0 || !c.now.Before(s.nextDial)):
		g, conf, timeout := s.list[0], c.conf.TLS, c.limits.dial
		s.list, s.dials, s.nextDial = s.list[1:], s.dials+1, c.now.Add(c.limits.race)
		go func() {
			sock, err := dial(g, conf, timeout)
			taken := make(chan struct{})
			c.post(func() {
				close(taken)
				c.dialled(sock, g, err)
			})
			select {
			case <-taken:
			case <-c.ended: // by now it was taken, or never will be
				select {
				case <-taken:
				default:
					if err == nil {
						sock.Close()
					}
				}
			}
		}()
		c.wakeAt(s.nextDial)
	case s.dials > 0:
		if len(s.list) > 0 && s.dials < dialsMax {
			c.wakeAt(s.nextDial)
		}
	case !s.fresh:
		s.fresh, s.busy = true, true
		c.fetch()
	case c.live != nil: // a REDIRECT that leads nowhere: stay; it comes again
		s.on = false
	default:
		cap := fastBack
		if s.code || s.short >= shortLives {
			cap = slowBack
		}
		s.at = later(s.at, c.now.Add(s.back.next(cap)))
		if s.full > 0 && s.full == s.failed {
			s.at = later(s.at, c.now.Add(s.least))
		}
		s.fresh, s.code, s.failed, s.full = false, false, 0, 0
		c.wakeAt(s.at)
	}
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

func (c *Client) dialled(sock net.Conn, g wire.Gateway, err error) {
	c.seek.dials--
	switch {
	case err != nil:
		c.log("%s: %v", address(g), err)
		c.seek.failed++
		c.seek.nextDial = c.now
	case c.next != nil: // another one won; should it be of no use, this one comes next
		sock.Close()
		c.seek.list = append([]wire.Gateway{g}, c.seek.list...)
	case !c.seek.on || c.live != nil && address(g) == c.avoid: // not wanted any more
		sock.Close()
	default:
		c.opened(sock, g)
	}
}

// listed orders a round's gateways: the one that served last first, one that closes last.
func (c *Client) listed(list []wire.Gateway) {
	c.seek.busy = false
	var first, rest, last []wire.Gateway
	for _, g := range list {
		switch address(g) {
		case c.avoid:
			last = append(last, g)
		case c.store.served:
			first = append(first, g)
		default:
			rest = append(rest, g)
		}
	}
	if c.live != nil {
		last = nil // a REDIRECT leads away from this one
	}
	c.seek.list = append(append(first, rest...), last...)
}

// fetch asks ipconfig. Without an answer, or where it refuses a token that a resume does not need, the kept list serves.
func (c *Client) fetch() {
	token, err := c.conf.Token(c.tokenRefused)
	if err != nil && c.store.session.ConnID == 0 {
		c.end(fmt.Errorf("no token: %w", err))
		return
	}
	url := strings.TrimSuffix(c.conf.IPConfig, "/") + "/ip/list"
	go func() {
		list, wait, err := ask(url, token)
		c.post(func() {
			var r *wire.Refusal
			if errors.As(err, &r) {
				c.seek.code = true
				c.seek.at = later(c.seek.at, c.now.Add(wait))
				if r.Code.Act() == wire.LogIn {
					c.tokenRefused = true
				}
			}
			if err != nil {
				c.log("ipconfig: %v; going by the list of last time", err)
				c.listed(c.store.gateways)
				return
			}
			c.store.setGateways(list)
			c.listed(list)
		})
	}()
}

func ask(url, token string) (list []wire.Gateway, wait time.Duration, err error) {
	request, err := http.NewRequest(http.MethodGet, url, nil)
	if err != nil {
		return nil, 0, err
	}
	request.Header.Set("Authorization", "Bearer "+token)
	response, err := (&http.Client{Timeout: listWait}).Do(request)
	if err != nil {
		return nil, 0, err
	}
	defer response.Body.Close()
	var answer struct {
		Message string         `json:"message"`
		Code    wire.Code      `json:"code"`
		Data    []wire.Gateway `json:"data"`
	}
	if err := json.NewDecoder(io.LimitReader(response.Body, 1<<20)).Decode(&answer); err != nil {
		return nil, 0, fmt.Errorf("%s: %w", response.Status, err)
	}
	if answer.Code != wire.OK {
		seconds, _ := strconv.Atoi(response.Header.Get("Retry-After"))
		return nil, time.Duration(seconds) * time.Second, &wire.Refusal{Code: answer.Code, Msg: answer.Message}
	}
	return answer.Data, 0, nil
}

// user is who the platform said this is, or, before the first login, whom the token names.
func (c *Client) user() (string, error) {
	if c.store.user != "" {
		return c.store.user, nil
	}
	token, err := c.conf.Token(false)
	if err != nil {
		return "", err
	}
	parts := strings.Split(token, ".")
	if len(parts) == 3 {
		var claims struct{ Sub string }
		body, err := base64.RawURLEncoding.DecodeString(strings.TrimRight(parts[1], "="))
		if err == nil && json.Unmarshal(body, &claims) == nil && claims.Sub != "" {
			return claims.Sub, nil
		}
	}
	return "", errors.New("the token names no user")
}
