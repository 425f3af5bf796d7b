package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// natsNode is the argument under which this binary runs one JetStream node.
const natsNode = "nats-node"

// nodes is a JetStream cluster of three processes with sync always: the fsync is before the confirmation, as TierQ's.
type nodes struct {
	procs  []*exec.Cmd
	conns  []*nats.Conn
	js     []jetstream.JetStream
	crowd  []*nats.Conn
	by     []jetstream.JetStream // of crowd
	url    string
	row    int
	queues int
}

func startNATS(ctx context.Context, dir string) (_ peer, err error) {
	ports, err := freePorts(6)
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	var routes, urls []string
	for i := range 3 {
		routes = append(routes, fmt.Sprintf("nats://127.0.0.1:%d", ports[2*i+1]))
		urls = append(urls, fmt.Sprintf("nats://127.0.0.1:%d", ports[2*i]))
	}
	n := &nodes{url: strings.Join(urls, ",")}
	defer func() {
		if err != nil {
			n.Close()
		}
	}()
	for i := range 3 {
		store := filepath.Join(dir, fmt.Sprint("node", i))
		cmd := exec.CommandContext(ctx, self, natsNode, fmt.Sprint("n", i), strconv.Itoa(ports[2*i]), strconv.Itoa(ports[2*i+1]), store, strings.Join(routes, ","))
		cmd.Stderr = os.Stderr
		if err := cmd.Start(); err != nil {
			return nil, err
		}
		n.procs = append(n.procs, cmd)
	}
	deadline := time.Now().Add(30 * time.Second)
	for {
		if err = n.connect(ctx); err == nil {
			return n, nil
		}
		if time.Now().After(deadline) {
			return nil, fmt.Errorf("the cluster did not form: %w", err)
		}
		time.Sleep(200 * time.Millisecond)
	}
}

// connect opens one connection a queue, and waits until the cluster can hold a stream.
func (n *nodes) connect(ctx context.Context) error {
	for len(n.conns) < 8 {
		c, js, err := n.dial()
		if err != nil {
			return err
		}
		n.conns, n.js = append(n.conns, c), append(n.js, js)
	}
	try, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	if _, err := n.js[0].CreateOrUpdateStream(try, jetstream.StreamConfig{Name: "probe", Subjects: []string{"probe"}, Replicas: 3}); err != nil {
		return err
	}
	return n.js[0].DeleteStream(ctx, "probe")
}

func (n *nodes) dial() (*nats.Conn, jetstream.JetStream, error) {
	c, err := nats.Connect(n.url, nats.MaxReconnects(-1))
	if err != nil {
		return nil, nil, err
	}
	js, err := jetstream.New(c, jetstream.WithPublishAsyncMaxPending(4096), jetstream.WithPublishAsyncTimeout(20*time.Second))
	return c, js, err
}

func (n *nodes) Name() string { return "nats" }

func (n *nodes) subject(queue int) string { return fmt.Sprintf("bench-%d-%d", n.row, queue) }

func (n *nodes) Queues(ctx context.Context, count int) error {
	for i := range n.queues {
		if err := n.js[0].DeleteStream(ctx, n.subject(i)); err != nil {
			return err
		}
	}
	n.row++
	n.queues = count
	for i := range count {
		_, err := n.js[0].CreateStream(ctx, jetstream.StreamConfig{
			Name: n.subject(i), Subjects: []string{n.subject(i)}, Replicas: 3, Storage: jetstream.FileStorage, Retention: jetstream.WorkQueuePolicy,
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func (n *nodes) of(queue int) jetstream.JetStream { return n.js[queue%len(n.js)] }

func (n *nodes) Sync(ctx context.Context, queue int, body []byte) error {
	_, err := n.of(queue).Publish(ctx, n.subject(queue), body)
	return err
}

func (n *nodes) Connect(_ context.Context, clients int) error {
	for _, c := range n.crowd {
		c.Close()
	}
	n.crowd, n.by = nil, nil
	for range clients {
		c, js, err := n.dial()
		if err != nil {
			return err
		}
		n.crowd, n.by = append(n.crowd, c), append(n.by, js)
	}
	return nil
}

func (n *nodes) Async(_ context.Context, by, queue int, body []byte, done func(error)) {
	js := n.of(queue)
	if by != shared {
		js = n.by[by]
	}
	f, err := js.PublishAsync(n.subject(queue), body)
	if err != nil {
		done(err)
		return
	}
	go func() {
		select {
		case <-f.Ok():
			done(nil)
		case err := <-f.Err():
			done(err)
		}
	}()
}

func (n *nodes) Consume(ctx context.Context, queue int, handle func([]byte)) error {
	c, err := n.of(queue).CreateOrUpdateConsumer(ctx, n.subject(queue), jetstream.ConsumerConfig{Durable: "bench", AckPolicy: jetstream.AckExplicitPolicy, MaxAckPending: 20_000})
	if err != nil {
		return err
	}
	cc, err := c.Consume(func(m jetstream.Msg) {
		handle(m.Data())
		_ = m.Ack()
	}, jetstream.PullMaxMessages(1000))
	if err != nil {
		return err
	}
	<-ctx.Done()
	cc.Stop()
	return ctx.Err()
}

func (n *nodes) Close() {
	for _, c := range append(n.crowd, n.conns...) {
		c.Close()
	}
	for _, p := range n.procs {
		_ = p.Process.Kill()
		_ = p.Wait()
	}
}

// runNATSNode runs one node until it is killed: name, client port, route port, store, routes.
func runNATSNode(args []string) {
	port, _ := strconv.Atoi(args[1])
	route, _ := strconv.Atoi(args[2])
	s, err := server.NewServer(&server.Options{
		ServerName: args[0], Host: "127.0.0.1", Port: port, JetStream: true, StoreDir: args[3], SyncAlways: true, NoSigs: true,
		Cluster: server.ClusterOpts{Name: "bench", Host: "127.0.0.1", Port: route}, Routes: server.RoutesFromStr(args[4]),
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, "nats node:", err)
		os.Exit(1)
	}
	s.Start()
	s.WaitForShutdown()
}
