package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/tierq/tierq/queue/client"
)

// maxAtomicLines bounds the lines of one `send --atomic`.
const maxAtomicLines = 8192

// conditions are what one publish may depend on.
func (f *sendFlags) conditions(changed func(string) bool) client.PublishOptions {
	o := client.PublishOptions{Atomic: f.atomic, Partition: f.in.given}
	if changed("expect-last") {
		o.ExpectedLastAddress = &f.expectLast
	}
	return o
}

// sendAtomic publishes all lines of stdin in one request: all of them are stored, or none.
func (a *app) sendAtomic(ctx context.Context, queue string, m client.Message, on client.PublishOptions) error {
	o, err := a.options()
	if err != nil {
		return err
	}
	var msgs []client.Message
	for r := bufio.NewReaderSize(a.in, 256<<10); ; {
		body, err := readLine(r)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("line %d of stdin: %w", len(msgs)+1, err)
		}
		if len(msgs) == maxAtomicLines {
			return usagef("--atomic: stdin has more than %d lines", maxAtomicLines)
		}
		m.Body = body
		msgs = append(msgs, m)
	}
	if len(msgs) == 0 {
		return usagef("--atomic: stdin has no line")
	}
	o.FailFast, o.MaxBatchMessages, o.PublishTimeout = a.timeout == 0, maxAtomicLines, a.tryFor(sendTimeout)
	return withOptions(ctx, o, func(ctx context.Context, c *client.Client) error {
		ctx, cancel := context.WithTimeout(ctx, o.PublishTimeout)
		defer cancel()
		rs, err := c.PublishWith(ctx, queue, on, msgs...)
		if err != nil {
			return err
		}
		t := newTable("QUEUE", "ACKED", "FIRST_ADDRESS", "LAST_ADDRESS", "DUPLICATE", "DATA_COPIES", "SHARD", "INDEX")
		first, last := rs[0], rs[len(rs)-1]
		t.add(queue, len(rs), first.Address, last.Address, last.Duplicate, last.DataCopies, last.Shard, last.Index)
		return a.printOne(t)
	})
}
