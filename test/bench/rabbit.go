package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// rabbitBin is where Debian has the server's own scripts. The one on PATH is a wrapper there, which runs as another user with data of
// its own.
const rabbitBin = "/usr/lib/rabbitmq/bin"

// rabbitServer is the script that runs one node.
func rabbitServer() (string, error) {
	if p, err := exec.LookPath(filepath.Join(rabbitBin, "rabbitmq-server")); err == nil {
		return p, nil
	}
	return exec.LookPath("rabbitmq-server")
}

// haveRabbit says that the programs are here: the server's script, and Erlang's, which it finds on PATH.
func haveRabbit() bool {
	_, noServer := rabbitServer()
	_, noErlang := exec.LookPath("erl")
	_, noMapper := exec.LookPath("epmd")
	return errors.Join(noServer, noErlang, noMapper) == nil
}

// maxUnconfirmed is how many publishes of a channel may be without their confirmation before the next one waits; as JetStream's.
const maxUnconfirmed = 4096

// rabbit is a RabbitMQ cluster of three processes. Its queues are quorum queues, whose log is synced before the confirmation.
type rabbit struct {
	procs  []*exec.Cmd // the first is epmd, which tells the nodes each other's ports
	urls   []string
	conns  []*amqp.Connection
	admin  *amqp.Channel
	row    int
	queues []*publisher
	crowd  []*publisher
	dialed []*amqp.Connection // of crowd
}

// publisher is a channel in confirm mode. One goroutine waits for its confirmations in the order of the publishes, in which a quorum
// queue gives them. The library resolves a confirmation of `multiple` by a walk over all that is outstanding: part of the client's CPU.
type publisher struct {
	channel *amqp.Channel
	name    string // of the queue of shared ones

	mu          sync.Mutex // a publish and its place in unconfirmed
	unconfirmed chan unconfirmed
	done        chan struct{}
}

type unconfirmed struct {
	confirmation *amqp.DeferredConfirmation
	done         func(error)
}

func startRabbit(ctx context.Context, dir string) (_ peer, err error) {
	ports, err := freePorts(7)
	if err != nil {
		return nil, err
	}
	if err := writeAll(dir, map[string]string{
		".erlang.cookie": "bench", "env.conf": "", "advanced.config": "[].\n", "plugins": "[].\n",
	}); err != nil {
		return nil, err
	}
	r := &rabbit{}
	defer func() {
		if err != nil {
			r.Close()
			showOutput(dir)
		}
	}()
	mapper := []string{fmt.Sprint("ERL_EPMD_PORT=", ports[6]), "ERL_EPMD_ADDRESS=127.0.0.1"}
	if err := r.run(ctx, filepath.Join(dir, "epmd.log"), mapper, "epmd"); err != nil {
		return nil, err
	}
	// The first node is up before the others ask it to take them in, so that none of them begins a cluster of its own.
	for i := range 3 {
		if err := r.startNode(ctx, dir, i, ports[2*i], ports[2*i+1], mapper); err != nil {
			return nil, err
		}
		if i == 0 {
			if err := r.connect(ctx, 1); err != nil {
				return nil, fmt.Errorf("the first node did not start: %w", err)
			}
		}
	}
	if err := r.connect(ctx, 8); err != nil {
		return nil, fmt.Errorf("the cluster did not form: %w", err)
	}
	return r, r.probe()
}

// showOutput prints what the nodes printed, before the directory goes.
func showOutput(dir string) {
	files, _ := filepath.Glob(filepath.Join(dir, "*.out"))
	for _, f := range files {
		text, _ := os.ReadFile(f)
		fmt.Fprintf(os.Stderr, "%s:\n%s\n", filepath.Base(f), text)
	}
}

// writeAll makes a directory with files that only their owner reads, as Erlang's cookie must be.
func writeAll(dir string, files map[string]string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			return err
		}
	}
	return nil
}

func nodeName(i int) string { return fmt.Sprintf("bench%d@localhost", i+1) }

// startNode starts one node. Everything that it would look for in the machine's directories is named, so that it meets no other.
func (r *rabbit) startNode(ctx context.Context, dir string, i, port, dist int, env []string) error {
	server, err := rabbitServer()
	if err != nil {
		return err
	}
	at := func(name string) string { return filepath.Join(dir, name) }
	node := fmt.Sprint("node", i+1)
	conf := fmt.Sprintf("listeners.tcp.1 = 127.0.0.1:%d\nlog.file.level = warning\n", port)
	if i > 0 {
		conf += fmt.Sprintf("cluster_formation.peer_discovery_backend = classic_config\n"+
			"cluster_formation.classic_config.nodes.1 = %s\ncluster_formation.classic_config.nodes.2 = %s\n", nodeName(0), nodeName(i))
	}
	if err := writeAll(at(node), map[string]string{"rabbitmq.conf": conf}); err != nil {
		return err
	}
	r.urls = append(r.urls, fmt.Sprintf("amqp://guest:guest@127.0.0.1:%d/", port))
	return r.run(ctx, at(node+".out"), append([]string{
		"RABBITMQ_NODENAME=" + nodeName(i),
		fmt.Sprint("RABBITMQ_DIST_PORT=", dist),
		"RABBITMQ_CONF_ENV_FILE=" + at("env.conf"),
		"RABBITMQ_CONFIG_FILE=" + at(node+"/rabbitmq.conf"),
		"RABBITMQ_ADVANCED_CONFIG_FILE=" + at("advanced.config"),
		"RABBITMQ_GENERATED_CONFIG_DIR=" + at(node+"/config"),
		"RABBITMQ_ENABLED_PLUGINS_FILE=" + at("plugins"),
		"RABBITMQ_MNESIA_BASE=" + at(node),
		"RABBITMQ_LOG_BASE=" + at(node),
		"RABBITMQ_PID_FILE=" + at(node+"/pid"),
		// No waiting of idle schedulers in a loop, which on a machine that is shared takes the CPU of the others.
		"RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS=+sbwt none +sbwtdcpu none +sbwtdio none -kernel inet_dist_use_interface {127,0,0,1}",
		// The script becomes the node, in place of being its parent.
		"RUNNING_UNDER_SYSTEMD=true",
		"HOME=" + dir, // of the cookie
	}, env...), server)
}

// run starts a program in a process group of its own, which ends with this process at the latest.
func (r *rabbit) run(ctx context.Context, output string, env []string, program string) error {
	out, err := os.Create(output)
	if err != nil {
		return err
	}
	defer out.Close()
	cmd := exec.CommandContext(ctx, program)
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "LANG=C.UTF-8"}, env...)
	cmd.Dir = filepath.Dir(output)
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	if err := cmd.Start(); err != nil {
		return err
	}
	r.procs = append(r.procs, cmd)
	return nil
}

// connect opens connections, to the nodes by turns, until there are want.
func (r *rabbit) connect(ctx context.Context, want int) error {
	deadline := time.Now().Add(60 * time.Second)
	for len(r.conns) < want {
		c, err := r.dial(len(r.conns))
		if err == nil {
			r.conns = append(r.conns, c)
			continue
		}
		if time.Now().After(deadline) || ctx.Err() != nil {
			return errors.Join(err, ctx.Err())
		}
		time.Sleep(200 * time.Millisecond)
	}
	return nil
}

// dial connects to one node after the other.
func (r *rabbit) dial(i int) (*amqp.Connection, error) { return amqp.Dial(r.urls[i%len(r.urls)]) }

// probe fails unless the nodes are one cluster: each knows a queue that the first one made.
func (r *rabbit) probe() (err error) {
	if r.admin, err = r.conns[0].Channel(); err != nil {
		return err
	}
	if _, err := r.admin.QueueDeclare("probe", true, false, false, false, quorum); err != nil {
		return err
	}
	for i := range 3 {
		c, err := r.conns[i].Channel()
		if err != nil {
			return err
		}
		if _, err := c.QueueDeclarePassive("probe", true, false, false, false, quorum); err != nil {
			return fmt.Errorf("%s is not in the cluster: %w", nodeName(i), err)
		}
		if err := c.Close(); err != nil {
			return err
		}
	}
	_, err = r.admin.QueueDelete("probe", false, false, false)
	return err
}

// quorum are a queue's arguments: three replicas, and leaders on all nodes.
var quorum = amqp.Table{"x-queue-type": "quorum", "x-quorum-initial-group-size": 3, "x-queue-leader-locator": "balanced"}

func (r *rabbit) Name() string { return "rabbit" }

func (r *rabbit) Queues(_ context.Context, count int) error {
	for _, q := range r.queues {
		q.close()
		if _, err := r.admin.QueueDelete(q.name, false, false, false); err != nil {
			return err
		}
	}
	r.row++
	r.queues = nil
	for i := range count {
		name := fmt.Sprintf("bench-%d-%d", r.row, i)
		if _, err := r.admin.QueueDeclare(name, true, false, false, false, quorum); err != nil {
			return err
		}
		p, err := newPublisher(r.conns[i%len(r.conns)], name)
		if err != nil {
			return err
		}
		r.queues = append(r.queues, p)
	}
	return nil
}

func newPublisher(c *amqp.Connection, name string) (*publisher, error) {
	ch, err := c.Channel()
	if err != nil {
		return nil, err
	}
	if err := ch.Confirm(false); err != nil {
		return nil, err
	}
	p := &publisher{channel: ch, name: name, unconfirmed: make(chan unconfirmed, maxUnconfirmed), done: make(chan struct{})}
	go p.confirm()
	return p, nil
}

var errNacked = errors.New("nacked, or the channel is closed")

func (p *publisher) confirm() {
	defer close(p.done)
	for u := range p.unconfirmed {
		if u.confirmation.Wait() {
			u.done(nil)
		} else {
			u.done(errNacked)
		}
	}
}

// close fails what is not confirmed. No publish may come after it.
func (p *publisher) close() {
	_ = p.channel.Close()
	close(p.unconfirmed)
	<-p.done
}

func (p *publisher) publish(queue string, body []byte) (*amqp.DeferredConfirmation, error) {
	return p.channel.PublishWithDeferredConfirm("", queue, false, false, amqp.Publishing{DeliveryMode: amqp.Persistent, Body: body})
}

func (r *rabbit) Sync(ctx context.Context, queue int, body []byte) error {
	q := r.queues[queue]
	c, err := q.publish(q.name, body)
	if err != nil {
		return err
	}
	acked, err := c.WaitContext(ctx)
	if err == nil && !acked {
		err = errNacked
	}
	return err
}

func (r *rabbit) Connect(_ context.Context, clients int) error {
	for i, p := range r.crowd {
		p.close()
		_ = r.dialed[i].Close()
	}
	r.crowd, r.dialed = nil, nil
	for i := range clients {
		c, err := r.dial(i)
		if err != nil {
			return err
		}
		p, err := newPublisher(c, "")
		if err != nil {
			return errors.Join(err, c.Close())
		}
		r.crowd, r.dialed = append(r.crowd, p), append(r.dialed, c)
	}
	return nil
}

func (r *rabbit) Async(_ context.Context, by, queue int, body []byte, done func(error)) {
	p := r.queues[queue]
	if by != shared {
		p = r.crowd[by]
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	c, err := p.publish(r.queues[queue].name, body)
	if err != nil {
		done(err)
		return
	}
	p.unconfirmed <- unconfirmed{c, done}
}

// Consume has a connection of its own: RabbitMQ stops reading from one whose publishes are too many, and acks would wait with them.
func (r *rabbit) Consume(ctx context.Context, queue int, handle func([]byte)) error {
	c, err := r.dial(queue)
	if err != nil {
		return err
	}
	defer func() { _ = c.CloseDeadline(time.Now().Add(2 * time.Second)) }()
	ch, err := c.Channel()
	if err != nil {
		return err
	}
	if err := ch.Qos(1000, 0, false); err != nil {
		return err
	}
	deliveries, err := ch.Consume(r.queues[queue].name, "", false, false, false, false, nil)
	if err != nil {
		return err
	}
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case d, ok := <-deliveries:
			if !ok {
				return amqp.ErrClosed
			}
			handle(d.Body)
			_ = d.Ack(false)
		}
	}
}

// Close ends the nodes first, for a connection of a node that is busy takes long to close in order.
func (r *rabbit) Close() {
	for i := len(r.procs) - 1; i >= 0; i-- {
		_ = r.procs[i].Cancel()
		_ = r.procs[i].Wait()
	}
	for _, c := range append(r.dialed, r.conns...) {
		_ = c.CloseDeadline(time.Now().Add(2 * time.Second))
	}
	for _, p := range append(r.crowd, r.queues...) {
		p.close()
	}
}
