package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"

	"github.com/tierq/tierq/queue/client"
	"github.com/tierq/tierq/queue/code"
)

type sendFlags struct {
	lines     bool
	key       string
	headers   []string
	delay     time.Duration
	ttl       time.Duration
	dedupID   string
	batch     int
	unordered bool
	progress  bool

	atomic     bool
	expectLast uint64
	in         partitionFlag
}

func sendCommand(a *app) *cobra.Command {
	var f sendFlags
	c := &cobra.Command{
		Use:   "send QUEUE [MESSAGE]",
		Short: "publish a message, or every line of stdin",
		Long: "Publish MESSAGE, or with --lines every line of stdin without its line end. A line counts as acked when a quorum has\n" +
			"it on disk. While hosts fail over, the same lines are tried again with the same seqs, each for --timeout, so none is\n" +
			"stored twice; DUPLICATES counts those that a repeat found stored already.",
		Args: cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkName("queue", args[0]); err != nil {
				return err
			}
			m, err := f.message()
			switch {
			case err != nil:
				return err
			case f.lines && len(args) == 2:
				return usagef("MESSAGE and --lines exclude each other")
			case f.atomic && !f.lines:
				return usagef("--atomic needs --lines: a single message is stored or not")
			case f.lines && !f.atomic && f.in.given != nil:
				return usagef("--partition with --lines needs --atomic")
			case f.lines && !f.atomic && cmd.Flags().Changed("expect-last"):
				return usagef("--expect-last with --lines needs --atomic")
			case f.atomic:
				return a.sendAtomic(cmd.Context(), args[0], m, f.conditions(cmd.Flags().Changed))
			case f.lines:
				return a.sendLines(cmd.Context(), args[0], m, f)
			case len(args) == 1:
				return usagef("no message: give one as argument, or --lines to send the lines of stdin")
			}
			m.Body = []byte(args[1])
			return a.sendOne(cmd.Context(), args[0], m, f.conditions(cmd.Flags().Changed))
		},
	}
	fs := c.Flags()
	fs.BoolVar(&f.lines, "lines", false, "send every line of stdin as a message")
	fs.StringVar(&f.key, "key", "", "ordering key")
	fs.StringArrayVar(&f.headers, "header", nil, "header as name=value; may be repeated")
	fs.DurationVar(&f.delay, "delay", 0, "hide the message for so long")
	fs.DurationVar(&f.ttl, "ttl", 0, "drop the message unread after so long")
	fs.StringVar(&f.dedupID, "dedup-id", "", "drop a second message of this id within five minutes")
	fs.IntVar(&f.batch, "batch", 1024, "with --lines: most messages in one request, 1 to 8192")
	fs.BoolVar(&f.unordered, "unordered", false, "with --lines: several requests at once; lines may be stored out of order")
	fs.BoolVar(&f.atomic, "atomic", false, "with --lines: store all lines, 8,192 at most, or none")
	f.in.add(c, "by key, else by dedup id, else they take turns")
	fs.Uint64Var(&f.expectLast, "expect-last", 0, "refuse unless the queue's last address is this one; 0 is an empty queue")
	fs.BoolVar(&f.progress, "progress", false, "draw progress also when stderr is no terminal")
	return c
}

// message is what all messages of one send share.
func (f *sendFlags) message() (client.Message, error) {
	m := client.Message{Delay: f.delay, TTL: f.ttl}
	if f.delay < 0 || f.ttl < 0 {
		return m, usagef("--delay and --ttl cannot be below zero")
	}
	if f.batch < 1 || f.batch > 8192 {
		return m, usagef("--batch %d: it is 1 to 8192", f.batch)
	}
	if f.lines && f.dedupID != "" {
		return m, usagef("--dedup-id with --lines would drop every line but the first")
	}
	if f.key != "" {
		m.Key = []byte(f.key)
	}
	if f.dedupID != "" {
		m.DedupID = []byte(f.dedupID)
	}
	for _, h := range f.headers {
		name, value, ok := strings.Cut(h, "=")
		if !ok || name == "" {
			return m, usagef("--header %q: it is name=value", h)
		}
		m.Headers = append(m.Headers, client.Header{Name: name, Value: []byte(value)})
	}
	return m, nil
}

const sendTimeout = 60 * time.Second

func (a *app) sendOne(ctx context.Context, queue string, m client.Message, on client.PublishOptions) error {
	o, err := a.options()
	if err != nil {
		return err
	}
	o.FailFast = a.timeout == 0 // somebody who names a time wants it used
	o.PublishTimeout = a.tryFor(sendTimeout)
	return withOptions(ctx, o, func(ctx context.Context, c *client.Client) error {
		ctx, cancel := context.WithTimeout(ctx, o.PublishTimeout)
		defer cancel()
		rs, err := c.PublishWith(ctx, queue, on, m)
		if err != nil {
			return err
		}
		r := rs[0]
		t := newTable("QUEUE", "ADDRESS", "DUPLICATE", "DATA_COPIES", "SHARD", "INDEX", "PARTITION")
		t.add(queue, r.Address, r.Duplicate, r.DataCopies, r.Shard, r.Index, r.Partition)
		return a.printOne(t)
	})
}

// lineSender is one `send --lines`. Lines are published in the reader's goroutine, answers counted in another.
type lineSender struct {
	queue string
	c     *client.Client
	m     client.Message

	read, acked, duplicates, refused, unknown, bytes atomic.Int64
	total                                            int64 // bytes of stdin, if known
	first                                            error // of the answers; read after the counter is done
	failed                                           atomic.Bool
}

// maxLinesInFlight bounds the lines that are read and not answered yet; the client's own buffer bounds their bytes.
const maxLinesInFlight = 16384

// sentLine is one line on its way.
type sentLine struct {
	future *client.Future
	bytes  int
}

func (a *app) sendLines(ctx context.Context, queue string, m client.Message, f sendFlags) error {
	o, err := a.options()
	if err != nil {
		return err
	}
	o.PublishTimeout = a.tryFor(sendTimeout)
	o.MaxBatchMessages, o.Unordered, o.RefreshEvery = f.batch, f.unordered, 30*time.Second
	began := time.Now()
	s := &lineSender{queue: queue, m: m, total: inputSize(a.in)}
	err = withOptions(ctx, o, func(ctx context.Context, c *client.Client) error {
		s.c = c
		done := startProgress(a.err, f.progress, s.line)
		defer done()
		return s.run(ctx, a.in)
	})
	took := time.Since(began)
	t := newTable("QUEUE", "ACKED", "DUPLICATES", "REFUSED", "UNKNOWN", "BYTES", "SECONDS", "PER_SECOND")
	t.add(queue, s.acked.Load(), s.duplicates.Load(), s.refused.Load(), s.unknown.Load(), s.bytes.Load(), round(took.Seconds()), round(float64(s.acked.Load())/took.Seconds()))
	return errors.Join(a.printOne(t), err)
}

func round(v float64) float64 { return float64(int64(v*100)) / 100 }

func (s *lineSender) line() (int64, int64, string) {
	return s.bytes.Load(), s.total, fmt.Sprintf("%d acked, %d in flight, %d duplicates", s.acked.Load(), s.read.Load()-s.acked.Load()-s.refused.Load()-s.unknown.Load(), s.duplicates.Load())
}

// run publishes line by line until the input ends, a line fails for good, or ctx ends, and waits for all answers.
func (s *lineSender) run(ctx context.Context, in io.Reader) error {
	futures := make(chan sentLine, maxLinesInFlight)
	var counter sync.WaitGroup
	counter.Add(1)
	go func() {
		defer counter.Done()
		for f := range futures {
			s.count(f)
		}
	}()
	err := s.publish(ctx, in, futures)
	close(futures)
	counter.Wait()
	if s.first != nil {
		return s.first
	}
	return err
}

func (s *lineSender) publish(ctx context.Context, in io.Reader, futures chan<- sentLine) error {
	r := bufio.NewReaderSize(in, 256<<10)
	for !s.failed.Load() && ctx.Err() == nil {
		body, err := readLine(r)
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return fmt.Errorf("line %d of stdin: %w", s.read.Load()+1, err)
		}
		m := s.m
		m.Body = body
		s.read.Add(1)
		futures <- sentLine{s.c.PublishAsync(ctx, s.queue, m), len(body)}
	}
	if ctx.Err() != nil {
		return errors.New("stopped before the input's end: the lines counted as ACKED are stored, the rest was not sent")
	}
	return nil
}

// readLine returns the next line without its line feed; a last line without one counts.
func readLine(r *bufio.Reader) ([]byte, error) {
	var line []byte
	for {
		part, err := r.ReadSlice('\n')
		line = append(line, part...)
		switch {
		case err == nil:
			return line[:len(line)-1], nil
		case err == io.EOF && len(line) > 0:
			return line, nil
		case err != bufio.ErrBufferFull:
			return nil, err
		case len(line) > client.MaxBodyBytes+1:
			return nil, code.New(code.TooLarge, "the line has more than %d bytes: send less, or a reference to it", client.MaxBodyBytes)
		}
	}
}

// count waits for one answer; the client bounds how long that takes.
func (s *lineSender) count(f sentLine) {
	p, err := f.future.Wait(context.Background())
	var e *code.Error
	switch {
	case err == nil:
		s.acked.Add(1)
		s.bytes.Add(int64(f.bytes) + 1)
		if p.Duplicate {
			s.duplicates.Add(1)
		}
		return
	case errors.As(err, &e) && e.Effect == code.EffectMaybe:
		s.unknown.Add(1)
	default:
		s.refused.Add(1)
	}
	if s.first == nil {
		s.first = err
	}
	s.failed.Store(true)
}
