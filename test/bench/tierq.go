package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/tierq/tierq/host/freeport"
	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
)

// tierq is a fleet of three full hosts in processes of their own.
type tierq struct {
	hosts  []*exec.Cmd
	addrs  []string
	client *client.Client
	crowd  []*client.Client
	row    int
	queues []string
}

func freePorts(n int) ([]int, error) {
	var ports []int
	for range n {
		p, err := freeport.Get()
		if err != nil {
			return nil, err
		}
		ports = append(ports, p)
	}
	return ports, nil
}

func startTierQ(ctx context.Context, binary, dir string) (_ peer, err error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	ports, err := freePorts(9)
	if err != nil {
		return nil, err
	}
	var list strings.Builder
	var addrs []string
	for i := range 3 {
		fmt.Fprintf(&list, "  - {id: %d, role: full, raft: 127.0.0.1:%d, peer: 127.0.0.1:%d, api: 127.0.0.1:%d}\n", i+1, ports[3*i], ports[3*i+1], ports[3*i+2])
		addrs = append(addrs, fmt.Sprintf("127.0.0.1:%d", ports[3*i+2]))
	}
	t := &tierq{addrs: addrs}
	defer func() {
		if err != nil {
			t.Close()
		}
	}()
	for i := range 3 {
		config := filepath.Join(dir, fmt.Sprintf("host%d.yaml", i+1))
		text := fmt.Sprintf("host: %d\ndata: %s\nadmin: \"off\"\nlog: warn\nhosts:\n%s", i+1, filepath.Join(dir, fmt.Sprint("data", i+1)), list.String())
		if err := os.WriteFile(config, []byte(text), 0o644); err != nil {
			return nil, err
		}
		log, err := os.Create(filepath.Join(dir, fmt.Sprintf("host%d.log", i+1)))
		if err != nil {
			return nil, err
		}
		cmd := exec.CommandContext(ctx, binary, "serve", "--config", config)
		cmd.Stdout, cmd.Stderr = log, log
		if err := cmd.Start(); err != nil {
			return nil, err
		}
		t.hosts = append(t.hosts, cmd)
	}
	if t.client, err = client.New(client.Options{Addrs: addrs, Unordered: true, MaxBatchesInFlight: 4}); err != nil {
		return nil, err
	}
	ready, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	for {
		s, err := t.client.FleetStatus(ready)
		if err == nil && len(s.GetHosts()) == 3 {
			return t, nil
		}
		if ready.Err() != nil {
			return nil, fmt.Errorf("the fleet did not form: %w", ready.Err())
		}
		time.Sleep(100 * time.Millisecond)
	}
}

func (t *tierq) Name() string { return "tierq" }

func (t *tierq) Queues(ctx context.Context, n int) error {
	for _, q := range t.queues {
		if err := t.client.DeleteQueue(ctx, q); err != nil {
			return err
		}
	}
	t.row++
	t.queues = nil
	for i := range n {
		name := fmt.Sprintf("bench-%d-%d", t.row, i)
		if _, err := t.client.CreateQueue(ctx, &tierqv1.CreateQueueRequest{Name: name, Replicas: 3}); err != nil {
			return err
		}
		t.queues = append(t.queues, name)
	}
	return nil
}

func (t *tierq) Sync(ctx context.Context, queue int, body []byte) error {
	_, err := t.client.Publish(ctx, t.queues[queue], client.Message{Body: body})
	return err
}

func (t *tierq) Connect(ctx context.Context, clients int) error {
	for _, c := range t.crowd {
		closeClient(c)
	}
	t.crowd = nil
	for range clients {
		c, err := client.New(client.Options{Addrs: t.addrs})
		if err != nil {
			return err
		}
		t.crowd = append(t.crowd, c)
		if _, err := c.FleetStatus(ctx); err != nil { // by now it has a connection to one host, before the load
			return err
		}
	}
	return nil
}

func (t *tierq) Async(ctx context.Context, by, queue int, body []byte, done func(error)) {
	c := t.client
	if by != shared {
		c = t.crowd[by]
	}
	f := c.PublishAsync(ctx, t.queues[queue], client.Message{Body: body})
	go func() {
		<-f.Done()
		_, err := f.Wait(ctx)
		done(err)
	}()
}

func (t *tierq) Consume(ctx context.Context, queue int, handle func([]byte)) error {
	return t.client.Consume(ctx, t.queues[queue], "", func(_ context.Context, d *client.Delivery) error {
		handle(d.Body)
		return nil
	}, client.ConsumeOptions{Concurrency: 4, MaxInFlight: 4096})
}

func (t *tierq) Close() {
	for _, c := range append(t.crowd, t.client) {
		if c != nil {
			closeClient(c)
		}
	}
	for _, h := range t.hosts {
		_ = h.Process.Kill()
		_ = h.Wait()
	}
}

func closeClient(c *client.Client) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	_ = c.Close(ctx)
}
