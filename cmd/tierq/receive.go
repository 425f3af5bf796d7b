package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/tierq/tierq/queue/client"
	"github.com/tierq/tierq/queue/code"
)

type receiveFlags struct {
	group    string
	in       partitionFlag
	consumer string
	max      int
	wait     time.Duration
	lease    time.Duration
	ack      bool
	follow   bool
	output   string
}

func receiveCommand(a *app) *cobra.Command {
	var f receiveFlags
	c := &cobra.Command{
		Use:   "receive QUEUE",
		Short: "take messages and print them",
		Long: "Take up to --max messages of a group and print them: bodies byte for byte, each followed by a line feed, or JSON, one\n" +
			"object a line. With --ack a message is acked after it was written; without, its lease ends by itself and it comes\n" +
			"again. With --follow it goes on until it is stopped (Ctrl-C) or --max messages have come.",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkNames(args[0], f.group); err != nil {
				return err
			}
			if !cmd.Flags().Changed("max") && f.follow {
				f.max = 0
			}
			if err := f.check(); err != nil {
				return err
			}
			if a.json {
				f.output = "json"
			}
			return a.receive(cmd.Context(), args[0], f)
		},
	}
	fs := c.Flags()
	fs.StringVar(&f.group, "group", "", "consumer group (default: the queue's default group)")
	f.in.add(c, allPartitions)
	fs.StringVar(&f.consumer, "consumer", "", "name of this consumer")
	fs.IntVar(&f.max, "max", 1, "most messages; with --follow the default is no limit")
	fs.DurationVar(&f.wait, "wait", 5*time.Second, "how long to wait for a message, at most 20s")
	fs.DurationVar(&f.lease, "lease", 0, "how long the messages stay hidden from others (default: the group's)")
	fs.BoolVar(&f.ack, "ack", false, "ack what was printed")
	fs.BoolVar(&f.follow, "follow", false, "go on until stopped")
	fs.StringVar(&f.output, "output", "body", "body, or json")
	return c
}

func (f *receiveFlags) check() error {
	switch {
	case f.output != "body" && f.output != "json":
		return usagef("--output %q: it is body or json", f.output)
	case f.wait < 0 || f.wait > 20*time.Second:
		return usagef("--wait %s: it is 0 to 20s", f.wait)
	case f.lease < 0 || f.lease > 12*time.Hour:
		return usagef("--lease %s: it is 0 to 12h", f.lease)
	case f.max < 0 || (f.max == 0 && !f.follow):
		return usagef("--max %d: it is at least 1", f.max)
	}
	return nil
}

// receiver is one `receive`.
type receiver struct {
	a     *app
	c     *client.Client
	queue string
	f     receiveFlags
	out   *bufio.Writer

	received, acked, refused, unknown int
}

// maxReceive bounds one receive call.
const maxReceive = 256

func (a *app) receive(ctx context.Context, queue string, f receiveFlags) error {
	o, err := a.options()
	if err != nil {
		return err
	}
	o.FailFast = !f.follow && a.timeout == 0
	r := &receiver{a: a, queue: queue, f: f, out: bufio.NewWriterSize(a.out, 256<<10)}
	err = withOptions(ctx, o, func(ctx context.Context, c *client.Client) error {
		r.c = c
		return r.run(ctx)
	})
	if f.follow || f.ack {
		fmt.Fprintf(a.err, "received %d, acked %d, refused acks %d, acks of unknown outcome %d\n", r.received, r.acked, r.refused, r.unknown)
	}
	return err
}

func (r *receiver) run(ctx context.Context) error {
	for {
		n, err := r.round(ctx)
		switch {
		case ctx.Err() != nil && err == nil, ctx.Err() != nil && r.f.follow && isCode(err):
			return nil // stopped by the user
		case err != nil && r.f.follow && mayPass(err):
			r.a.complain(errorLine(codeOf(err)) + " (going on)")
			continue
		case err != nil:
			return err
		case r.f.max > 0 && r.received >= r.f.max:
			return nil
		case n == 0 && !r.f.follow:
			if r.received == 0 {
				fmt.Fprintf(r.a.err, "no message within %s\n", r.f.wait)
			}
			return nil
		case n > 0 && !r.f.follow:
			r.f.wait = 0 // what is there has come; more is not waited for
		}
	}
}

func isCode(err error) bool { return codeOf(err) != nil }

func codeOf(err error) *code.Error {
	var e *code.Error
	errors.As(err, &e)
	return e
}

// mayPass reports whether following goes on after err: somebody is being elected or restarted.
func mayPass(err error) bool {
	e := codeOf(err)
	if e == nil {
		return false
	}
	switch e.Code.Info().Class {
	case code.ClassTransient, code.ClassRenegotiate, code.ClassNoop:
		return true
	}
	return false
}

// round does one receive: take, write, flush, and only then ack.
func (r *receiver) round(ctx context.Context) (int, error) {
	n := maxReceive
	if r.f.max > 0 {
		n = min(n, r.f.max-r.received)
	}
	wait := r.f.wait
	if wait == 0 {
		wait = client.NoWait
	}
	ds, err := r.c.Receive(ctx, r.queue, r.f.group, client.ReceiveOptions{Max: n, Wait: wait, Lease: r.f.lease, Consumer: r.f.consumer, Partition: r.f.in.given})
	if err != nil {
		return 0, err
	}
	for _, d := range ds {
		if err := r.write(d); err != nil {
			return 0, fmt.Errorf("write a message: %w", err)
		}
	}
	if err := r.out.Flush(); err != nil {
		return 0, fmt.Errorf("write messages: %w", err)
	}
	r.received += len(ds)
	if r.f.ack && len(ds) > 0 {
		return len(ds), r.ack(ctx, ds)
	}
	return len(ds), nil
}

// ack finishes what was written, also when the user has just stopped the program.
func (r *receiver) ack(ctx context.Context, ds []*client.Delivery) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.a.tryFor(10*time.Second))
	defer cancel()
	receipts := make([]string, len(ds))
	for i, d := range ds {
		receipts[i] = d.Receipt
	}
	rs, err := r.c.Ack(ctx, r.queue, r.f.group, receipts...)
	for _, s := range rs {
		switch {
		case s.Err == nil:
			r.acked++
		case s.Err.Effect == code.EffectMaybe:
			r.unknown++
		default:
			r.refused++
		}
	}
	return err
}

// jsonMessage is one line of --output json. A body that is not UTF-8 is in body_base64.
type jsonMessage struct {
	Address    uint64       `json:"address"`
	Receipt    string       `json:"receipt"`
	Attempt    uint32       `json:"attempt"`
	Published  string       `json:"published"`
	Key        []byte       `json:"key_base64,omitempty"`
	Headers    []jsonHeader `json:"headers,omitempty"`
	Body       *string      `json:"body,omitempty"`
	BodyBase64 []byte       `json:"body_base64,omitempty"`
	// Of a message that has been delivered before.
	FirstDelivered string `json:"first_delivered,omitempty"`
	LastFailure    string `json:"last_failure,omitempty"`
	Round          uint32 `json:"round,omitempty"`
	Partition      uint32 `json:"partition,omitempty"`
}

type jsonHeader struct {
	Name  string `json:"name"`
	Value []byte `json:"value_base64"`
}

func (r *receiver) write(d *client.Delivery) error {
	if r.f.output == "body" {
		if _, err := r.out.Write(d.Body); err != nil {
			return err
		}
		return r.out.WriteByte('\n')
	}
	m := jsonMessage{
		Address: d.Address, Receipt: d.Receipt, Attempt: d.Attempt, Published: d.Published.UTC().Format(time.RFC3339Nano), Key: d.Key,
	}
	for _, h := range d.Headers {
		m.Headers = append(m.Headers, jsonHeader{h.Name, h.Value})
	}
	m.Body, m.BodyBase64 = jsonBody(d.Body)
	m.LastFailure, m.Round, m.Partition = d.LastFailure, d.Round, d.Partition
	if !d.FirstDelivered.IsZero() && (d.Attempt > 1 || d.Round > 0) {
		m.FirstDelivered = d.FirstDelivered.UTC().Format(time.RFC3339Nano)
	}
	return json.NewEncoder(r.out).Encode(m)
}

func jsonBody(b []byte) (*string, []byte) {
	if !utf8.Valid(b) {
		return nil, b
	}
	s := string(b)
	return &s, nil
}
