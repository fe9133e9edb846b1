package plato

import (
	"bufio"
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"strconv"
	"time"

	"plato-go-client/wire"
)

const (
	maxFrame    = 1 << 20          // what the platform may send; it keeps to 65,536 unless it is set otherwise
	writeWait   = 10 * time.Second // a peer that takes nothing for so long is gone
	queueFrames = 1024
)

// conn is one socket: a goroutine reads frames into events, another writes, so that the client's loop never waits for it.
type conn struct {
	sock net.Conn
	out  chan []byte
	done chan struct{}
}

func address(g wire.Gateway) string { return net.JoinHostPort(g.IP, strconv.FormatUint(g.Port, 10)) }

func dial(g wire.Gateway, conf *tls.Config, timeout time.Duration) (net.Conn, error) {
	d := &net.Dialer{Timeout: timeout}
	if conf != nil {
		return tls.DialWithDialer(d, "tcp", address(g), conf)
	}
	return d.Dial("tcp", address(g))
}

// newConn starts both goroutines. frame gets each frame in order, then closed the reason of the end, once.
func newConn(sock net.Conn, frame func(wire.Cmd), closed func(error)) *conn {
	c := &conn{sock: sock, out: make(chan []byte, queueFrames), done: make(chan struct{})}
	go c.write()
	go func() { closed(c.read(frame)) }()
	return c
}

func (c *conn) read(frame func(wire.Cmd)) error {
	in := bufio.NewReaderSize(c.sock, 1<<16)
	for {
		var head [4]byte
		if _, err := io.ReadFull(in, head[:]); err != nil {
			return err
		}
		size := binary.BigEndian.Uint32(head[:])
		if size == 0 || size > maxFrame {
			return fmt.Errorf("a frame of %d bytes", size)
		}
		body := make([]byte, size)
		if _, err := io.ReadFull(in, body); err != nil {
			return err
		}
		cmd, err := wire.DecodeCmd(body)
		if err != nil {
			return err
		}
		frame(cmd)
	}
}

func (c *conn) write() {
	defer c.sock.Close() // the reader sees it and tells
	for {
		select {
		case <-c.done:
			return
		case b := <-c.out:
			_ = c.sock.SetWriteDeadline(time.Now().Add(writeWait))
			if _, err := c.sock.Write(b); err != nil {
				return
			}
		}
	}
}

// send queues a frame. A full queue means a peer that does not read: the end of this socket, not of the message.
func (c *conn) send(cmd wire.Cmd) {
	body := cmd.Encode()
	b := append(binary.BigEndian.AppendUint32(make([]byte, 0, 4+len(body)), uint32(len(body))), body...)
	select {
	case c.out <- b:
	default:
		c.sock.Close()
	}
}

// close may be called once.
func (c *conn) close() {
	close(c.done)
	c.sock.Close()
}
