// Command box is a trial workload: `box serve` answers HTTP and ends gracefully, `box get URL`, `box resolve NAME` and
// `box hostname` are run in it by `kubectl exec`.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "box:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	switch {
	case len(args) == 1 && args[0] == "serve":
		return serve(":8080", 2*time.Second)
	case len(args) == 1 && args[0] == "hostname":
		name, err := os.Hostname()
		fmt.Println(name)
		return err
	case len(args) == 2 && args[0] == "get":
		return get(args[1])
	case len(args) == 2 && args[0] == "resolve":
		addresses, err := net.LookupHost(args[1])
		fmt.Println(strings.Join(addresses, "\n"))
		return err
	}
	return errors.New("say serve, hostname, get URL or resolve NAME")
}

// serve answers every request with the host's name. After SIGTERM it serves on for the linger, as a server behind a
// Service should, then closes and says so.
func serve(address string, linger time.Duration) error {
	name, err := os.Hostname()
	if err != nil {
		return err
	}
	server := &http.Server{Addr: address, ReadHeaderTimeout: 5 * time.Second}
	server.Handler = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, name) })
	asked, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	done := make(chan error, 1)
	go func() { done <- server.ListenAndServe() }()
	fmt.Println("serving", name)
	select {
	case err := <-done:
		return err
	case <-asked.Done():
	}
	fmt.Println("asked to stop")
	time.Sleep(linger)
	closing, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	err = server.Shutdown(closing)
	fmt.Println("stopped")
	return err
}

func get(url string) error {
	client := http.Client{Timeout: 3 * time.Second}
	answer, err := client.Get(url)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	_, err = io.Copy(os.Stdout, answer.Body)
	return err
}
