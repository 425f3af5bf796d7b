// Package admin serves a host's own view of itself on loopback: /metrics, /healthz, /readyz, /stats and pprof. It only
// reads, through the functions that it is given.
package admin

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/pprof"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/tierq/tierq/queue/code"
)

// Options are what the listener shows. Every function may be called at any time and from any goroutine.
type Options struct {
	Gatherer prometheus.Gatherer
	// Healthy is nil while the process works; its text is shown otherwise.
	Healthy func() error
	// Ready is nil once the host serves: the catalog is known, and every shard of this host has a leader.
	Ready func() error
	// Stats reads one queue at one applied index per shard.
	Stats func(ctx context.Context, queue string) (any, error)
	// AllStats reads every queue of which this host has a replica.
	AllStats func(ctx context.Context) (any, error)
}

// statsTimeout bounds a /stats call.
const statsTimeout = 10 * time.Second

// Handler returns the listener's routes.
func Handler(o Options) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(o.Gatherer, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", state(o.Healthy))
	mux.HandleFunc("GET /readyz", state(o.Ready))
	mux.HandleFunc("GET /stats", func(w http.ResponseWriter, r *http.Request) { stats(w, r, o) })
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	return mux
}

func state(check func() error) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		if err := check(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		_, _ = w.Write([]byte("ok\n"))
	}
}

func stats(w http.ResponseWriter, r *http.Request, o Options) {
	name := r.URL.Query().Get("queue")
	if name == "" {
		http.Error(w, "name a queue: /stats?queue=NAME, or /stats?queue=* for all", http.StatusBadRequest)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), statsTimeout)
	defer cancel()
	var v any
	var err error
	if name == "*" {
		v, err = o.AllStats(ctx)
	} else {
		v, err = o.Stats(ctx, name)
	}
	if err != nil {
		status := http.StatusServiceUnavailable
		if e, ok := err.(*code.Error); ok && e.Code == code.UnknownQueue {
			status = http.StatusNotFound
		}
		http.Error(w, err.Error(), status)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	_ = enc.Encode(v)
}
