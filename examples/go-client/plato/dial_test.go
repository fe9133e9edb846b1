package plato

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"
)

// A dial that comes through after Run has returned leaves no connection: here the gateway's handshake ends only then.
func TestADialThatEndsAfterRunLeavesNoConnection(t *testing.T) {
	gateway, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer gateway.Close()
	at := gateway.Addr().(*net.TCPAddr)
	list := httptest.NewTLSServer(nil) // for its certificate
	defer list.Close()
	ipconfig := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		gateways := []map[string]any{{"ip": at.IP.String(), "port": at.Port}}
		_ = json.NewEncoder(w).Encode(map[string]any{"message": "ok", "code": 0, "data": gateways})
	}))
	defer ipconfig.Close()
	trusted := list.Client().Transport.(*http.Transport).TLSClientConfig

	for n := 0; n < 8; n++ { // what it has to say may be taken by nobody, or lie there unread
		c, err := Open(Config{IPConfig: ipconfig.URL, Dir: t.TempDir(), TLS: trusted.Clone(), Tell: func(Event) {},
			Log: func(string, ...any) {}, Token: func(bool) (string, error) { return "token", nil }})
		if err != nil {
			t.Fatal(err)
		}
		ctx, stop := context.WithCancel(context.Background())
		ran := make(chan error)
		go func() { ran <- c.Run(ctx) }()
		sock, err := gateway.Accept()
		if err != nil {
			t.Fatal(err)
		}
		stop()
		if err := <-ran; err != nil {
			t.Fatal(err)
		}
		_ = sock.SetDeadline(time.Now().Add(10 * time.Second))
		served := tls.Server(sock, &tls.Config{Certificates: list.TLS.Certificates})
		if err := served.Handshake(); err == nil {
			if _, err := served.Read(make([]byte, 1)); err != io.EOF {
				t.Errorf("the connection is still there: %v", err)
			}
		}
		sock.Close()
	}
}
