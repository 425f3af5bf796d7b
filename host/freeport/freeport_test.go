package freeport

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
)

const asChild = "TIERQ_FREEPORT_CHILD"

// TestMain lets the test binary be another process, which reserves many ports and tells them until its input ends.
func TestMain(m *testing.M) {
	if os.Getenv(asChild) == "" {
		os.Exit(m.Run())
	}
	for range 500 {
		p, err := Get()
		if err != nil {
			panic(err)
		}
		fmt.Println(p)
	}
	fmt.Println("done")
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// Two processes never hold the same port.
func TestDistinctOverProcesses(t *testing.T) {
	if testing.Short() {
		t.Skip("starts a process")
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), asChild+"=1")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = in.Close()
		_ = cmd.Wait()
	}()
	theirs := map[string]bool{}
	for lines := bufio.NewScanner(out); lines.Scan() && lines.Text() != "done"; {
		theirs[lines.Text()] = true
	}
	if len(theirs) != 500 {
		t.Fatalf("the other process reserved %d ports", len(theirs))
	}
	for range 500 {
		addr := For(t)
		port := addr[strings.LastIndexByte(addr, ':')+1:]
		if _, err := strconv.Atoi(port); err != nil || theirs[port] {
			t.Fatalf("%s is another process's", addr)
		}
	}
}

// A thousand callers get a thousand ports, each of which can be listened on.
func TestDistinct(t *testing.T) {
	var mu sync.Mutex
	var wg sync.WaitGroup
	seen := map[string]bool{}
	for range 1000 {
		wg.Go(func() {
			addr := For(t)
			mu.Lock()
			defer mu.Unlock()
			if seen[addr] {
				t.Errorf("%s was given twice", addr)
			}
			seen[addr] = true
		})
	}
	wg.Wait()
	l, err := net.Listen("tcp", For(t))
	if err != nil {
		t.Fatal(err)
	}
	_ = l.Close()
}
