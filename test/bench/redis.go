package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

func haveRedis() bool {
	_, err := exec.LookPath("redis-server")
	return err == nil
}

// streams is one Redis server whose file is synced before every answer. Nothing is replicated: there is no failover.
type streams struct {
	proc  *exec.Cmd
	addr  string
	by    []*pipeline // of shared, by queue
	crowd []*pipeline
	row   int
	names []string

	consumers sync.WaitGroup
}

// pipeline sends what waits in one write, and the next one when that is answered.
type pipeline struct {
	client  *redis.Client
	waiting chan entry
	done    chan struct{}
}

// entry is a message on its way to a stream.
type entry struct {
	stream string
	body   []byte
	done   func(error)
}

// group is the one consumer group of every stream, field the name under which an entry has its body.
const (
	group = "bench"
	field = "b"
)

func startRedis(ctx context.Context, dir string) (_ peer, err error) {
	ports, err := freePorts(1)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	s := &streams{addr: fmt.Sprintf("127.0.0.1:%d", ports[0])}
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	cmd := exec.CommandContext(ctx, "redis-server", "--bind", "127.0.0.1", "--port", strconv.Itoa(ports[0]), "--dir", dir,
		"--appendonly", "yes", "--appendfsync", "always", "--save", "", "--logfile", filepath.Join(dir, "redis.log"))
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	s.proc = cmd
	deadline := time.Now().Add(30 * time.Second)
	for len(s.by) < 8 {
		p, err := s.connect(ctx, 128<<10)
		if err == nil {
			s.by = append(s.by, p)
			continue
		}
		if time.Now().After(deadline) || ctx.Err() != nil {
			return nil, fmt.Errorf("the server did not start: %w", err)
		}
		time.Sleep(100 * time.Millisecond)
	}
	return s, nil
}

// connect opens a client, with so many bytes of buffer for what it pipelines. Nothing is sent twice.
func (s *streams) connect(ctx context.Context, buffer int) (*pipeline, error) {
	c := redis.NewClient(&redis.Options{
		Addr: s.addr, MaxRetries: -1, ReadTimeout: 20 * time.Second, PipelineReadBufferSize: buffer, PipelineWriteBufferSize: buffer,
		DisableIdentity: true, MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	})
	if _, err := c.Pipelined(ctx, func(p redis.Pipeliner) error { return p.Ping(ctx).Err() }); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	p := &pipeline{client: c, waiting: make(chan entry, 1024), done: make(chan struct{})}
	go p.run()
	return p, nil
}

func (p *pipeline) run() {
	defer close(p.done)
	var batch []entry
	for e := range p.waiting {
		batch = append(batch[:0], e)
		for n := len(p.waiting); n > 0; n-- {
			batch = append(batch, <-p.waiting)
		}
		p.send(batch)
	}
}

func (p *pipeline) send(batch []entry) {
	ctx := context.Background()
	pipe := p.client.Pipeline()
	for _, e := range batch {
		pipe.XAdd(ctx, &redis.XAddArgs{Stream: e.stream, Values: []any{field, e.body}})
	}
	answers, _ := pipe.Exec(ctx) // an error is in the answers too
	for i, e := range batch {
		e.done(answers[i].Err())
	}
}

// close ends a pipeline; what waits is sent, or fails if the server is gone. No publish may come after it.
func (p *pipeline) close() {
	close(p.waiting)
	<-p.done
	_ = p.client.Close()
}

func (s *streams) Name() string { return "redis" }

func (s *streams) of(queue int) *pipeline { return s.by[queue%len(s.by)] }

func (s *streams) Queues(ctx context.Context, count int) error {
	c := s.by[0].client
	for _, name := range s.names {
		if err := c.Del(ctx, name).Err(); err != nil {
			return err
		}
	}
	s.row++
	s.names = nil
	for i := range count {
		name := fmt.Sprintf("bench-%d-%d", s.row, i)
		if err := c.XGroupCreateMkStream(ctx, name, group, "0").Err(); err != nil {
			return err
		}
		s.names = append(s.names, name)
	}
	return nil
}

func (s *streams) Sync(ctx context.Context, queue int, body []byte) error {
	return s.of(queue).client.XAdd(ctx, &redis.XAddArgs{Stream: s.names[queue], Values: []any{field, body}}).Err()
}

func (s *streams) Connect(ctx context.Context, clients int) error {
	for _, p := range s.crowd {
		p.close()
	}
	s.crowd = nil
	for range clients {
		p, err := s.connect(ctx, 4<<10)
		if err != nil {
			return err
		}
		s.crowd = append(s.crowd, p)
	}
	return nil
}

func (s *streams) Async(_ context.Context, by, queue int, body []byte, done func(error)) {
	p := s.of(queue)
	if by != shared {
		p = s.crowd[by]
	}
	p.waiting <- entry{s.names[queue], body, done}
}

func (s *streams) Consume(ctx context.Context, queue int, handle func([]byte)) error {
	s.consumers.Add(1)
	defer s.consumers.Done()
	c, stream := s.of(queue).client, s.names[queue]
	read := &redis.XReadGroupArgs{Group: group, Consumer: "bench", Streams: []string{stream, ">"}, Count: 1000, Block: time.Second}
	for ctx.Err() == nil {
		got, err := c.XReadGroup(ctx, read).Result()
		if errors.Is(err, redis.Nil) {
			continue
		}
		if err != nil {
			return err
		}
		if err := finish(ctx, c, stream, got[0].Messages, handle); err != nil {
			return err
		}
	}
	return ctx.Err()
}

// finish handles messages, and acknowledges and removes them.
func finish(ctx context.Context, c *redis.Client, stream string, messages []redis.XMessage, handle func([]byte)) error {
	ids := make([]string, 0, len(messages))
	for _, m := range messages {
		body, _ := m.Values[field].(string)
		handle([]byte(body))
		ids = append(ids, m.ID)
	}
	_, err := c.Pipelined(ctx, func(p redis.Pipeliner) error {
		p.XAck(ctx, stream, group, ids...)
		p.XDel(ctx, stream, ids...)
		return nil
	})
	return err
}

func (s *streams) Close() {
	if s.proc != nil {
		_ = s.proc.Process.Kill()
		_ = s.proc.Wait()
	}
	s.consumers.Wait() // the library complains of a client that is closed during a read
	for _, p := range append(s.crowd, s.by...) {
		p.close()
	}
}
