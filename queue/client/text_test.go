package client_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/queue/client"
	"github.com/tierq/tierq/queue/client/clienttest"
	"github.com/tierq/tierq/queue/code"
)

// A handler's error may be any bytes and of any length; what it asks for happens all the same.
func TestReasonsOfHandlers(t *testing.T) {
	f := fleetWithQueue(t, 1)
	c := open(t, quick(f.Addrs()...))
	ctx, stop := context.WithCancel(within(t, clienttest.Patience))
	defer stop()
	ends := map[string]error{
		"long reject":  &client.Reject{Reason: strings.Repeat("r", 1000)},
		"bytes reject": &client.Reject{Reason: "bad \xff"},
		"cut":          errors.New("x" + strings.Repeat("ä", 150)),
		"bytes":        errors.New("bad \xff"),
	}
	for body := range ends {
		_, err := c.Publish(ctx, "q", client.Message{Body: []byte(body)})
		require.NoError(t, err)
	}
	settled := make(chan client.Settled, 100)
	go func() {
		_ = c.Consume(ctx, "q", "g", func(_ context.Context, d *client.Delivery) error {
			err := ends[string(d.Body)]
			if d.Attempt > 1 {
				return nil
			}
			return err
		}, client.ConsumeOptions{OnSettled: func(d *client.Delivery, s client.Settled) {
			if d.Attempt == 1 { // what is tried again may be acked before another one was rejected
				settled <- s
			}
		}})
	}()
	for range ends {
		s := <-settled
		require.Nil(t, s.Err)
	}
	dead, _, err := c.ListDeadLetters(ctx, "q", "g", 0, 10)
	require.NoError(t, err)
	require.Len(t, dead, 2)
	for _, d := range dead {
		require.LessOrEqual(t, len(d.Reason), 255)
		require.True(t, utf8.ValidString(d.Reason))
	}
}

// What cannot be sent is refused at once, and holds up nothing else.
func TestNamesThatAreNoText(t *testing.T) {
	f := fleetWithQueue(t, 1)
	c := open(t, quick(f.Addrs()...))
	ctx := within(t, clienttest.Patience)
	refused := func(err error) {
		t.Helper()
		var e *code.Error
		require.ErrorAs(t, err, &e)
		require.Equal(t, code.EffectNone, e.Effect)
		require.Contains(t, []code.Code{code.InvalidArgument, code.InvalidName}, e.Code)
	}
	_, err := c.Publish(ctx, "q", client.Message{Headers: []client.Header{{Name: "\xff"}}})
	refused(err)
	_, err = c.Publish(ctx, "q\xff", client.Message{})
	refused(err)
	none := func(context.Context, *client.Delivery) error { return nil }
	refused(c.Consume(ctx, "q", "g\xff", none, client.ConsumeOptions{}))
	refused(c.Consume(ctx, "q", "g", none, client.ConsumeOptions{Consumer: "\xff"}))
	require.Zero(t, f.Calls("Publish"))
	_, err = c.Publish(ctx, "q", client.Message{})
	require.NoError(t, err)
}
