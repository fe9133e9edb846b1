package wire

import "fmt"

// Code is a number of docs/protocol.md §4. Only those that a client treats otherwise than their range have a name here.
type Code uint64

const (
	OK             Code = 0
	Duplicate      Code = 1
	Pending        Code = 2
	TryAgain       Code = 101
	Expected       Code = 102
	SyncFirst      Code = 103
	LoginLater     Code = 106
	GatewayFull    Code = 200
	GatewayClosing Code = 204
	Flooding       Code = 206
	AddressBusy    Code = 207
	LoginFirst     Code = 300
	SecretWrong    Code = 302
	TokenExpired   Code = 303
	TokenInvalid   Code = 305
	Replaced       Code = 402
	LoggedOut      Code = 404
)

// Act is what a code's range tells a client to do.
type Act int

const (
	Fine Act = iota
	Retry
	Reconnect
	LogIn
	Stop        // the client; in the answer to an UP, only the message
	StopRequest // the message or request, not the connection
)

// Act goes by the range, so that a code of a later version is understood as well.
func (c Code) Act() Act {
	switch {
	case c < 100:
		return Fine
	case c < 200:
		return Retry
	case c < 300:
		return Reconnect
	case c < 400:
		return LogIn
	case c >= 420 && c < 500:
		return StopRequest
	}
	return Stop
}

// Refusal is a code with its words, and with the time that some tell: not before so long.
type Refusal struct {
	Code    Code
	Msg     string
	RetryMS uint64
}

func (r *Refusal) Error() string { return fmt.Sprintf("%s (code %d)", r.Msg, uint64(r.Code)) }
