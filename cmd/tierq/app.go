package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/tierq/tierq/queue/client"
	"github.com/tierq/tierq/queue/code"
)

// Exit codes; scripts rely on them.
const (
	exitOK          = 0
	exitLocal       = 1
	exitUsage       = 2
	exitUnreachable = 3
	exitRefused     = 4
)

// version is set by the linker for releases: -ldflags "-X main.version=…".
var version = ""

// app is one run of the program.
type app struct {
	in       io.Reader
	out, err io.Writer

	addr    string
	json    bool
	timeout time.Duration
	tls     tlsFlags
	auth    authFlags
	// began is set when the command line was found right: later errors are not about it.
	began bool
}

const defaultAddr = "127.0.0.1:7188"

func (a *app) rootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:           "tierq",
		Short:         "TierQ: a replicated message queue",
		Version:       versionText(),
		Args:          cobra.NoArgs,
		SilenceErrors: true,
		SilenceUsage:  true,
		PersistentPreRun: func(*cobra.Command, []string) {
			a.began = true
		},
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	root.CompletionOptions.HiddenDefaultCmd = true
	addr := os.Getenv("TIERQ_ADDR")
	if addr == "" {
		addr = defaultAddr
	}
	fs := root.PersistentFlags()
	fs.StringVar(&a.addr, "addr", addr, "API addresses of the fleet, separated by commas (env TIERQ_ADDR)")
	fs.BoolVar(&a.json, "json", false, "print JSON for scripts")
	fs.DurationVar(&a.timeout, "timeout", 0, "how long to try (default 10s; send, digest, doctor: 60s)")
	a.tls.register(fs)
	a.auth.register(fs)
	for _, command := range commands {
		root.AddCommand(command(a))
	}
	return root
}

// commands are the subcommands, in the order of the help.
var commands = []func(*app) *cobra.Command{
	devCommand, serveCommand, witnessCommand,
	queueCommand, groupCommand, sendCommand, receiveCommand, settleCommand, deadCommand, delayedCommand, browseCommand, lookupCommand,
	statusCommand, tenantCommand, tokenCommand, fleetHostCommand, rebalanceCommand, leaderCommand, shardCommand, snapshotCommand, doctorCommand, eventsCommand, benchCommand, walCommand, errorsCommand,
}

func versionText() string {
	if version != "" {
		return version
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "devel"
}

// parent makes a command that only has subcommands.
func parent(use, short string, children ...*cobra.Command) *cobra.Command {
	c := &cobra.Command{Use: use, Short: short, Args: cobra.ArbitraryArgs, RunE: func(c *cobra.Command, args []string) error {
		var names []string
		for _, k := range children {
			names = append(names, k.Name())
		}
		if len(args) > 0 {
			return usagef("%s has no command %q: it has %s", c.CommandPath(), args[0], strings.Join(names, ", "))
		}
		return usagef("%s needs a command: %s", c.CommandPath(), strings.Join(names, ", "))
	}}
	c.AddCommand(children...)
	return c
}

// usageError is a command line that cannot be meant.
type usageError struct{ text string }

func (e *usageError) Error() string { return e.text }

func usagef(format string, args ...any) error { return &usageError{fmt.Sprintf(format, args...)} }

// checkError is a check that did not hold; what is wrong has been printed.
type checkError struct{ text string }

func (e *checkError) Error() string { return e.text }

// exit prints err, if any, and returns the exit code.
func (a *app) exit(err error) int {
	if err == nil {
		return exitOK
	}
	var refused *code.Error
	var usage *usageError
	var check *checkError
	switch {
	case errors.As(err, &refused):
		a.complain(errorLine(refused))
		return exitOf(refused)
	case errors.As(err, &check):
		a.complain(check.text)
		return exitRefused
	case errors.As(err, &usage) || !a.began:
		a.complain(err.Error() + ": see `tierq --help`")
		return exitUsage
	}
	a.complain(err.Error())
	return exitLocal
}

func (a *app) complain(text string) {
	fmt.Fprintln(a.err, "tierq: "+strings.Join(strings.Fields(text), " "))
}

// errorLine says what happened and what to do. A text with a colon in it names its own remedy, as the registry's do.
func errorLine(e *code.Error) string {
	line, text := e.Code.String()+": ", e.Text
	if rest, ok := strings.CutPrefix(text, e.Code.String()); ok { // a host that quotes the code too
		_, text, _ = strings.Cut(rest, ": ")
	}
	switch fix := e.Code.Info().Text; {
	case text == "":
		line += fix
	case strings.Contains(text, ": "):
		line += text
	default:
		line += text + ": " + fix
	}
	if e.Effect == code.EffectMaybe && e.Code != code.QuorumLost {
		line += " (it may have taken effect)"
	}
	return line
}

func exitOf(e *code.Error) int {
	switch e.Code {
	case code.Unavailable, code.DeadlineExceeded, code.QuorumLost:
		return exitUnreachable
	case code.InvalidName, code.InvalidArgument:
		return exitUsage
	case code.Malformed:
		return exitUnreachable // no TierQ host at that address
	}
	return exitRefused
}

// options are what every client of this program starts from.
func (a *app) options() (client.Options, error) {
	o := client.Options{RefreshEvery: -1, CallTimeout: a.tryFor(10 * time.Second)}
	for _, addr := range strings.Split(a.addr, ",") {
		if addr = strings.TrimSpace(addr); addr != "" {
			o.Addrs = append(o.Addrs, addr)
		}
	}
	var err error
	if o.TLS, err = a.tls.store(); err != nil {
		return o, err
	}
	if o.Token, err = a.auth.token(); err != nil {
		return o, err
	}
	o.Tenant = a.auth.tenant
	o.EnsureDefaults()
	if err = o.Validate(); err != nil {
		return o, usagef("--addr: %v", err)
	}
	return o, nil
}

func (a *app) tryFor(d time.Duration) time.Duration {
	if a.timeout > 0 {
		return a.timeout
	}
	return d
}

// withClient runs f with a client that gives up as soon as no address answers, within --timeout.
func (a *app) withClient(ctx context.Context, f func(context.Context, *client.Client) error) error {
	return a.withClientFor(ctx, 10*time.Second, f)
}

// withClientFor is withClient with another default for --timeout.
func (a *app) withClientFor(ctx context.Context, d time.Duration, f func(context.Context, *client.Client) error) error {
	o, err := a.options()
	if err != nil {
		return err
	}
	o.FailFast = true
	ctx, cancel := context.WithTimeout(ctx, a.tryFor(d))
	defer cancel()
	return withOptions(ctx, o, f)
}

func withOptions(ctx context.Context, o client.Options, f func(context.Context, *client.Client) error) error {
	c, err := client.New(o)
	if err != nil {
		return err
	}
	defer func() {
		done, cancel := context.WithCancel(context.Background())
		cancel() // what is to be answered has been waited for
		_ = c.Close(done)
	}()
	return f(ctx, c)
}

// checkName refuses what no fleet would take, before asking one.
func checkName(what, name string) error {
	ok := name != "" && len(name) <= 80 && name[0] != '.' && name[0] != '$'
	for _, r := range name {
		ok = ok && (r == '.' || r == '_' || r == '-' || ('0' <= r && r <= '9') || ('a' <= r && r <= 'z') || ('A' <= r && r <= 'Z'))
	}
	if !ok {
		return usagef("%s name %q: names are 1 to 80 of A-Z a-z 0-9 . _ - and begin with neither . nor $", what, name)
	}
	return nil
}

// checkGroup is checkName for a group, of which the default one has a name that nobody can create.
func checkGroup(name string) error {
	if name == "" || name == "$default" {
		return nil
	}
	return checkName("group", name)
}
