package client

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/tierq/tierq/queue/certs"
)

// Options configure a Client. All are per process and fixed when New returns; the zero value of a field means its
// default.
type Options struct {
	// Addrs are API addresses (host:port) of any full hosts of one fleet. They are seeds: the client learns the other
	// hosts from them and keeps trying each of them for ever. Required.
	Addrs []string

	// ProducerID names this producer to the fleet. Two processes must never share one.
	//
	// Defaults to a random number. A caller that sets it must also raise ProducerEpoch at every start, since seqs
	// start at 1 again. The client itself never raises it: when a message's outcome stays unknown, so that what follows
	// cannot be in order, every further publish into that partition fails with PRODUCER_EPOCH_STALE until a new client comes
	// with a greater ProducerEpoch. A random producer, and one that is Unordered in a queue that does not demand order,
	// goes on by itself.
	ProducerID    uint64
	ProducerEpoch uint64

	// Unordered lets messages overtake each other when a request is refused or its answer is lost. Without it a partition's
	// messages are stored in the order in which they were published, whatever fails: what is behind a failed request waits.
	// Queues with `ordering: key` are always in order.
	Unordered bool

	// MaxBatchMessages and MaxBatchBytes bound one publish request. A single larger message travels alone.
	//
	// Default to 1,024 and 1 MiB. MaxBatchMessages must be in [1, 8192].
	MaxBatchMessages int
	MaxBatchBytes    int
	// MaxBatchesInFlight bounds the publish requests in flight for one partition. Defaults to 8. With hosts that do not
	// stream it is 1, but for Unordered.
	MaxBatchesInFlight int

	// MaxBufferedMessages and MaxBufferedBytes bound what is published and not answered yet, over all queues. A single
	// message larger than MaxBufferedBytes is accepted when nothing else is buffered.
	//
	// Default to 16,384 and 64 MiB.
	MaxBufferedMessages int
	MaxBufferedBytes    int64
	// FailWhenFull makes a publish into a full buffer fail at once with BACKPRESSURE instead of waiting.
	FailWhenFull bool

	// PublishTimeout is how long an asynchronous publish, or one whose context has no deadline, is tried. Defaults to 30s.
	PublishTimeout time.Duration
	// CallTimeout bounds every other call whose context has no deadline. Defaults to 30s.
	CallTimeout time.Duration
	// AttemptTimeout bounds one try of a call at one host; a long poll adds its wait. Defaults to 5s.
	AttemptTimeout time.Duration
	// DialTimeout bounds one TCP connect. Defaults to 2s.
	DialTimeout time.Duration
	// PingAfter is how long a connection may be silent before it is pinged, and PingTimeout how long the answer may
	// take before the connection is given up: together, how fast a frozen host is noticed. Default to 2s each.
	PingAfter   time.Duration
	PingTimeout time.Duration

	// ReconnectBase and ReconnectCap bound the pause before an unreachable address is tried again: a random part of
	// base × 2^n, at most the cap. With another address at hand a call does not wait. Default to 500ms and 30s.
	ReconnectBase time.Duration
	ReconnectCap  time.Duration
	// RetryBase and RetryCap bound the pause before a call that a reachable host refused for now (no leader,
	// backpressure) is tried again. Default to 50ms and 2s.
	RetryBase time.Duration
	RetryCap  time.Duration
	// RefreshEvery is how often the addresses of the fleet's hosts are asked for. Defaults to 60s; below 0: never.
	RefreshEvery time.Duration

	// Token is what the fleet asks for where it wants tokens. It goes to every address of Addrs and every host that one of them names:
	// without TLS, in plain text.
	Token string
	// Tenant is the tenant for which an operator calls; any other token has its own.
	Tenant string

	// FailFast makes a call fail as soon as every known address has been found unreachable once, instead of trying
	// until its deadline.
	FailFast bool

	// TLS, if not nil, makes the client speak TLS 1.3: it trusts the store's roots, else the system's, and shows the store's
	// certificate, if any. New connections use what the store's files say then. Without it, connections are plain text.
	TLS *certs.Store
	// HTTPClient replaces the built-in one, which speaks HTTP/2 and keeps connections alive by pings. It does its own TLS:
	// with TLS set, addresses are https.
	HTTPClient *http.Client
	// Clock and Rand are for tests; they default to the process's. Rand returns a number in [0, 1) and must be safe
	// for concurrent use.
	Clock Clock
	Rand  func() float64
	// Logger defaults to none.
	Logger *zap.Logger
}

// Clock is the time that pauses are measured on. Deadlines of contexts stay on the process's clock.
type Clock interface {
	Now() time.Time
	// After sends once on the returned channel when d has passed.
	After(d time.Duration) <-chan time.Time
}

type systemClock struct{}

func (systemClock) Now() time.Time                         { return time.Now() }
func (systemClock) After(d time.Duration) <-chan time.Time { return time.After(d) }

// producerWindow is how far above its lowest unanswered seq a producer may run (the state machine's limit).
const producerWindow = 8192

// EnsureDefaults replaces zero values by the defaults.
func (o *Options) EnsureDefaults() {
	for o.ProducerID == 0 {
		o.ProducerID = rand.Uint64()
	}
	orInt(&o.MaxBatchMessages, 1024)
	orInt(&o.MaxBatchBytes, 1<<20)
	orInt(&o.MaxBatchesInFlight, 8)
	orInt(&o.MaxBufferedMessages, 16384)
	if o.MaxBufferedBytes == 0 {
		o.MaxBufferedBytes = 64 << 20
	}
	orDuration(&o.PublishTimeout, 30*time.Second)
	orDuration(&o.CallTimeout, 30*time.Second)
	orDuration(&o.AttemptTimeout, 5*time.Second)
	orDuration(&o.DialTimeout, 2*time.Second)
	orDuration(&o.PingAfter, 2*time.Second)
	orDuration(&o.PingTimeout, 2*time.Second)
	orDuration(&o.ReconnectBase, 500*time.Millisecond)
	orDuration(&o.ReconnectCap, 30*time.Second)
	orDuration(&o.RetryBase, 50*time.Millisecond)
	orDuration(&o.RetryCap, 2*time.Second)
	orDuration(&o.RefreshEvery, 60*time.Second)
	if o.Clock == nil {
		o.Clock = systemClock{}
	}
	if o.Rand == nil {
		o.Rand = rand.Float64
	}
	if o.Logger == nil {
		o.Logger = zap.NewNop()
	}
	if o.HTTPClient == nil {
		o.HTTPClient = newHTTPClient(o)
	}
}

// Validate names every problem of the options at once.
func (o *Options) Validate() error {
	var errs []error
	if len(o.Addrs) == 0 {
		errs = append(errs, errors.New("no address: give at least one host:port of a full host"))
	}
	for _, a := range o.Addrs {
		if err := checkAddr(a); err != nil {
			errs = append(errs, err)
		} else if scheme, _, ok := strings.Cut(a, "://"); ok && scheme != o.scheme() {
			errs = append(errs, fmt.Errorf("address %q is not %s: TLS is on with Options.TLS, and only then", a, o.scheme()))
		}
	}
	if o.MaxBatchMessages < 1 || o.MaxBatchMessages > producerWindow {
		errs = append(errs, fmt.Errorf("MaxBatchMessages %d is not in [1, %d]", o.MaxBatchMessages, producerWindow))
	}
	for name, n := range map[string]int64{
		"MaxBatchBytes": int64(o.MaxBatchBytes), "MaxBatchesInFlight": int64(o.MaxBatchesInFlight),
		"MaxBufferedMessages": int64(o.MaxBufferedMessages), "MaxBufferedBytes": o.MaxBufferedBytes,
		"PublishTimeout": int64(o.PublishTimeout), "CallTimeout": int64(o.CallTimeout), "AttemptTimeout": int64(o.AttemptTimeout),
		"ReconnectBase": int64(o.ReconnectBase), "ReconnectCap": int64(o.ReconnectCap),
		"RetryBase": int64(o.RetryBase), "RetryCap": int64(o.RetryCap),
	} {
		if n < 1 {
			errs = append(errs, fmt.Errorf("%s %d is not positive", name, n))
		}
	}
	return errors.Join(errs...)
}

func checkAddr(a string) error {
	host, port, err := net.SplitHostPort(normalAddr(a))
	if err != nil || host == "" || port == "" {
		return fmt.Errorf("address %q is not host:port", a)
	}
	return nil
}

func orInt(p *int, d int) {
	if *p == 0 {
		*p = d
	}
}

func orDuration(p *time.Duration, d time.Duration) {
	if *p == 0 {
		*p = d
	}
}

func (o *Options) scheme() string {
	if o.TLS != nil {
		return "https"
	}
	return "http"
}

// newHTTPClient makes a client that speaks HTTP/2 with prior knowledge, one connection a host, pinged when silent.
func newHTTPClient(o *Options) *http.Client {
	protocols := new(http.Protocols)
	dialer := &net.Dialer{Timeout: o.DialTimeout, KeepAlive: 5 * time.Second}
	t := &http.Transport{
		Protocols:          protocols,
		DialContext:        dialer.DialContext,
		DisableCompression: true,
		IdleConnTimeout:    5 * time.Minute,
		HTTP2: &http.HTTP2Config{
			SendPingTimeout:  o.PingAfter,
			PingTimeout:      o.PingTimeout,
			WriteByteTimeout: o.PingAfter + o.PingTimeout,
		},
	}
	if o.TLS == nil {
		protocols.SetUnencryptedHTTP2(true)
		return &http.Client{Transport: t}
	}
	protocols.SetHTTP2(true)
	store := o.TLS
	t.DialTLSContext = func(ctx context.Context, _, address string) (net.Conn, error) {
		return store.Dial(ctx, dialer, address, "h2")
	}
	return &http.Client{Transport: t}
}
