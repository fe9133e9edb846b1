// Command plato-go-client chats on the platform Plato from a terminal.
//
//	go run . -ip http://127.0.0.1:8904 -token TOKEN -to bob -send "hello"   sends one message, ends when it has its place
//	go run . -ip http://127.0.0.1:8904 -token TOKEN -to bob                 sends the lines of standard input
//	go run . -ip http://127.0.0.1:8904 -token TOKEN -listen                 shows what comes, until it is interrupted
package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"

	"plato-go-client/plato"
)

var (
	ip        = flag.String("ip", "http://127.0.0.1:8904", "URL of ipconfig")
	token     = flag.String("token", "", "the user's token")
	tokenFile = flag.String("token-file", "", "file with the token, read at each login: whoever makes tokens may replace it")
	to        = flag.String("to", "", "user to send to")
	text      = flag.String("send", "", "what to send to that user; without it the lines of standard input")
	listen    = flag.Bool("listen", false, "go on until interrupted")
	state     = flag.String("state", "plato-state", "folder of the durable state; one per user")
	history   = flag.Bool("history", false, "show what is stored first")
	asJSON    = flag.Bool("json", false, "show events as lines of JSON")
	logout    = flag.Bool("logout", false, "end the session at the end; else it waits for a resume")
	useTLS    = flag.Bool("tls", false, "speak TLS with the gateways")
	tlsName   = flag.String("tls-name", "", "name in the gateways' certificate; needed with -tls, since lists name addresses")
	tlsCA     = flag.String("tls-ca", "", "PEM file of who signed it; without it the system's")
	verbose   = flag.Bool("v", false, "log to standard error")
)

func main() {
	flag.Parse()
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "plato-go-client:", err)
		os.Exit(1)
	}
}

func run() error {
	if *text != "" && *to == "" {
		return errors.New("-send needs -to")
	}
	if *token == "" && *tokenFile == "" {
		return errors.New("-token or -token-file is needed")
	}
	conf, err := tlsConfig()
	if err != nil {
		return err
	}
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()

	var refused atomic.Bool
	settled := make(chan struct{}, 1)
	client, err := plato.Open(plato.Config{
		IPConfig: *ip, Token: readToken, Dir: filepath.Clean(*state), TLS: conf, History: *history,
		Log: func(format string, args ...any) {
			if *verbose {
				log.Printf(format, args...)
			}
		},
		Tell: func(e plato.Event) {
			show(e)
			if e.Kind == "settled" && e.Code >= 400 {
				refused.Store(true)
			}
			select {
			case settled <- struct{}{}:
			default: // one is enough: whoever waits counts anew
			}
		},
	})
	if err != nil {
		return err
	}
	trouble := make(chan error, 1)
	go func() {
		if err := send(client); err != nil {
			trouble <- err
			cancel()
			return
		}
		if *listen {
			<-ctx.Done()
		} else {
			drain(ctx, client, settled)
		}
		if *logout && ctx.Err() == nil {
			client.Logout()
		} else {
			cancel()
		}
	}()
	if err := client.Run(ctx); err != nil {
		return err
	}
	select {
	case err := <-trouble:
		return err
	default:
	}
	if refused.Load() {
		return errors.New("a message was refused")
	}
	return nil
}

// send puts into the outbox what the command line or standard input says.
func send(client *plato.Client) error {
	switch {
	case *to == "":
		return nil
	case *text != "":
		return client.Send(*to, []byte(*text))
	}
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		if err := client.Send(*to, append([]byte(nil), lines.Bytes()...)); err != nil {
			return err
		}
	}
	return lines.Err()
}

// drain waits until the outbox is empty and nothing is missing before what was sent.
func drain(ctx context.Context, client *plato.Client, settled <-chan struct{}) {
	for {
		left := make(chan int, 1)
		client.Unsettled(func(n int) { left <- n })
		select {
		case n := <-left:
			if n == 0 {
				return
			}
		case <-ctx.Done():
			return
		}
		select {
		case <-settled:
		case <-ctx.Done():
			return
		}
	}
}

func show(e plato.Event) {
	if *asJSON {
		line, err := json.Marshal(e)
		if err == nil {
			fmt.Println(string(line))
		}
		return
	}
	switch {
	case e.Kind == "message" && e.MsgType != 0: // not text: an operation, or another application's
		fmt.Printf("%s #%d %s: [msg_type %d, %d bytes]\n", e.Conversation, e.Seq, e.From, e.MsgType, len(e.Body))
	case e.Kind == "message":
		fmt.Printf("%s #%d %s: %s\n", e.Conversation, e.Seq, e.From, e.Body)
	case e.Kind == "settled" && e.Code >= 400:
		fmt.Printf("%s: refused with code %d\n", e.Conversation, uint64(e.Code))
	}
}

// readToken ignores that the last one was refused: the file is read anew, and a token of the command line is all there is.
func readToken(bool) (string, error) {
	if *tokenFile == "" {
		return *token, nil
	}
	b, err := os.ReadFile(*tokenFile)
	return strings.TrimSpace(string(b)), err
}

func tlsConfig() (*tls.Config, error) {
	if !*useTLS {
		return nil, nil
	}
	if *tlsName == "" {
		return nil, errors.New("-tls needs -tls-name")
	}
	conf := &tls.Config{ServerName: *tlsName, MinVersion: tls.VersionTLS12}
	if *tlsCA != "" {
		pem, err := os.ReadFile(*tlsCA)
		if err != nil {
			return nil, err
		}
		conf.RootCAs = x509.NewCertPool()
		if !conf.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%s holds no certificate", *tlsCA)
		}
	}
	return conf, nil
}
