package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"go.uber.org/zap/zapcore"
	"gopkg.in/yaml.v3"

	"github.com/tierq/tierq/host/catalog"
)

// Role is what a host does for its shards.
type Role string

const (
	// RoleFull holds state, serves queues, and votes.
	RoleFull Role = "full"
	// RoleWitness votes on metadata only; it has no state store and no queue listener.
	RoleWitness Role = "witness"
)

// HostConfig describes one host of the fleet. Every host's file lists all of them, and equally.
type HostConfig struct {
	// ID names the host for ever, from 1.
	ID uint64 `yaml:"id"`
	// Role is full or witness.
	Role Role `yaml:"role"`
	// Raft and Peer are the addresses at which the other hosts reach its Raft transport and peer API.
	Raft string `yaml:"raft"`
	Peer string `yaml:"peer"`
	// API is the address that clients are sent to; full hosts only.
	API string `yaml:"api"`
	// Domain is the failure domain: two voters of one shard are never in the same one. Defaults to the host id.
	Domain string `yaml:"domain"`
}

// Profile says what a host is tuned for.
type Profile string

const (
	// ProfileDefault replaces a lost leader within a second.
	ProfileDefault Profile = "default"
	// ProfileManyShards lets idle shards cost less CPU, and replaces a lost leader within four seconds (docs/adr/0055).
	ProfileManyShards Profile = "many-shards"
)

// TLSFiles names PEM files, which are followed: a new certificate needs no restart. Paths are relative to the working directory.
type TLSFiles struct {
	// Cert is the certificate, then the intermediate ones; Key its private key.
	Cert string `yaml:"cert"`
	Key  string `yaml:"key"`
	// CA are the roots that the other side's certificate is checked against.
	CA string `yaml:"ca"`
}

// AuthConfig says who may call the API of this host. All hosts of a fleet are configured alike.
type AuthConfig struct {
	// Required refuses calls without a token. Off, every caller is an operator, of the default tenant unless the call names another.
	Required bool `yaml:"required"`
	// OperatorTokenFile holds the token of an operator, with which the first others are made; it is read at start.
	OperatorTokenFile string `yaml:"operator_token_file"`
}

// Config is one host's YAML file. Per process: a change needs a restart. An unknown key is refused.
type Config struct {
	// Host is this host's id; it must be in Hosts.
	Host uint64 `yaml:"host"`
	// Data is the directory that holds everything of this host.
	Data string `yaml:"data"`
	// Hosts lists the fleet.
	Hosts []HostConfig `yaml:"hosts"`
	// Admin is the listener of /metrics, /healthz, /readyz, /stats and pprof. Defaults to 127.0.0.1:7191; "off" for none.
	Admin string `yaml:"admin"`
	// TLS protects the ports between hosts, raft and peer: each side shows its certificate. All hosts have it, or none.
	TLS *TLSFiles `yaml:"tls"`
	// TLSRequireHostIDs refuses certificates of `tls` that do not name the host by a URI, tierq:///HOST or tierq://FLEET/HOST. One that names
	// another host is refused anyhow.
	TLSRequireHostIDs bool `yaml:"tls_require_host_ids"`
	// APITLS protects the API port. With a CA, clients must show a certificate that it has signed.
	APITLS *TLSFiles `yaml:"api_tls"`
	// Auth says whether clients need tokens.
	Auth *AuthConfig `yaml:"auth"`
	// Insecure names the listeners that may bind other than loopback without TLS: any of api, raft, peer, admin.
	Insecure []string `yaml:"insecure"`
	// LowSpaceBytes is the free space of the data directory's disk below which publishes are refused with 0x4004 while
	// consumers go on. Defaults to 1 GiB.
	LowSpaceBytes uint64 `yaml:"low_space_bytes"`
	// Profile is what the host is tuned for: default or many-shards; the same on all hosts. Defaults to default.
	Profile Profile `yaml:"profile"`
	// Log is the least level that is logged: debug, info, warn or error. Defaults to info.
	Log string `yaml:"log"`

	// Version is the program's, as it is shown to operators; not part of the file.
	Version string `yaml:"-"`

	wall func() time.Time // nil: the machine's; a test's

	// growthAt, if not nil, is called by a test's host that drives a growth, at each of its steps.
	growthAt func(ctx context.Context, host uint64, step growthStep, g catalog.Growth)
}

// LoadConfig reads and validates a host's file.
func LoadConfig(path string) (Config, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return Config{}, fmt.Errorf("read the configuration: %w", err)
	}
	c, err := ParseConfig(raw)
	if err != nil {
		return Config{}, fmt.Errorf("%s: %w", path, err)
	}
	return c, nil
}

// ParseConfig decodes and validates a host's YAML text. It refuses unknown keys and names them.
func ParseConfig(raw []byte) (Config, error) {
	var c Config
	dec := yaml.NewDecoder(bytes.NewReader(raw))
	dec.KnownFields(true)
	if err := dec.Decode(&c); err != nil {
		return Config{}, explainYAML(err)
	}
	c.EnsureDefaults()
	return c, c.Validate()
}

// explainYAML turns the decoder's report of an unknown key into one line that names it and the fix.
func explainYAML(err error) error {
	var te *yaml.TypeError
	if errors.As(err, &te) {
		lines := make([]string, 0, len(te.Errors))
		for _, l := range te.Errors {
			before, field, ok := strings.Cut(l, ": field ")
			key, _, found := strings.Cut(field, " not found in type")
			if ok && found {
				l = fmt.Sprintf("unknown key %q at %s: remove it or correct its name (docs/reference/config.md lists the keys)", key, before)
			}
			lines = append(lines, l)
		}
		return errors.New(strings.Join(lines, "; "))
	}
	return fmt.Errorf("not a YAML mapping of known keys: %w", err)
}

// EnsureDefaults fills what the file left out.
func (c *Config) EnsureDefaults() {
	if c.Data == "" {
		c.Data = "tierq-data"
	}
	if c.Admin == "" {
		c.Admin = "127.0.0.1:7191"
	}
	if c.Log == "" {
		c.Log = "info"
	}
	if c.Profile == "" {
		c.Profile = ProfileDefault
	}
	for i := range c.Hosts {
		h := &c.Hosts[i]
		if h.Role == "" {
			h.Role = RoleFull
		}
		if h.Domain == "" {
			h.Domain = strconv.FormatUint(h.ID, 10)
		}
	}
}

// Validate joins every problem of the configuration; each names the key and the fix.
func (c *Config) Validate() error {
	var problems []error
	bad := func(format string, args ...any) { problems = append(problems, fmt.Errorf(format, args...)) }
	if _, err := zapcore.ParseLevel(c.Log); err != nil {
		bad("log: %q is not a level: use debug, info, warn or error", c.Log)
	}
	if c.Profile != ProfileDefault && c.Profile != ProfileManyShards {
		bad("profile: %q: use default or many-shards", c.Profile)
	}
	if len(c.Hosts) == 0 {
		bad("hosts: list every host of the fleet with id, role, raft, peer and api")
	}
	seen, used := map[uint64]bool{}, map[string]uint64{}
	full := 0
	for i, h := range c.Hosts {
		if h.ID == 0 {
			bad("hosts[%d].id: host ids begin at 1", i)
		}
		if seen[h.ID] {
			bad("hosts[%d].id: host %d is listed twice", i, h.ID)
		}
		seen[h.ID] = true
		if h.Role == RoleFull {
			full++
		}
		for _, p := range h.problems() {
			bad("hosts[%d].%s", i, p)
		}
		for _, a := range []string{h.Raft, h.Peer, h.API} {
			if other, ok := used[a]; ok && a != "" {
				bad("hosts[%d]: address %s is already used by host %d", i, a, other)
			}
			used[a] = h.ID
		}
	}
	if len(c.Hosts) > 0 && full < 2 {
		bad("hosts: %d full host(s): a replicated queue needs at least two, and a witness or a third", full)
	}
	if len(c.Hosts) > 0 && len(c.Hosts) < 3 {
		bad("hosts: %d host(s): a quorum needs at least three (two full hosts and a witness will do)", len(c.Hosts))
	}
	if c.Host == 0 {
		bad("host: this host's id is missing")
	} else if !seen[c.Host] && len(c.Hosts) > 0 {
		bad("host: %d is not in hosts", c.Host)
	} else {
		problems = append(problems, c.bindProblems()...)
	}
	problems = append(problems, c.tlsProblems()...)
	return errors.Join(problems...)
}

func (h *HostConfig) problems() []string {
	var out []string
	addr := func(key, a string) {
		if _, port, err := net.SplitHostPort(a); err != nil || port == "" || port == "0" {
			out = append(out, fmt.Sprintf("%s: %q is not HOST:PORT", key, a))
		}
	}
	addr("raft", h.Raft)
	addr("peer", h.Peer)
	switch h.Role {
	case RoleFull:
		addr("api", h.API)
	case RoleWitness:
		if h.API != "" {
			out = append(out, "api: a witness has no queue listener: remove it")
		}
	default:
		out = append(out, fmt.Sprintf("role: %q: use full or witness", h.Role))
	}
	return out
}

// tlsFix is how a listener gets TLS; the admin listener has none.
var tlsFix = map[string]string{"raft": "configure `tls`, or ", "peer": "configure `tls`, or ", "api": "configure `api_tls`, or "}

// tlsProblems names what is missing; the files are read when the host is opened.
func (c *Config) tlsProblems() []error {
	var problems []error
	need := func(key, path, what string) {
		if path == "" {
			problems = append(problems, fmt.Errorf("%s is missing: name the PEM file of %s", key, what))
		}
	}
	if t := c.TLS; t != nil {
		need("tls.cert", t.Cert, "this host's certificate")
		need("tls.key", t.Key, "its private key")
		need("tls.ca", t.CA, "the CA that signs the certificates of all hosts")
	}
	if t := c.APITLS; t != nil {
		need("api_tls.cert", t.Cert, "the certificate that clients are shown")
		need("api_tls.key", t.Key, "its private key")
		if c.Self().Role == RoleWitness {
			problems = append(problems, errors.New("api_tls: a witness has no queue listener: remove it"))
		}
	}
	return problems
}

// bindProblems refuses listeners beyond loopback until TLS protects them or Insecure names them.
func (c *Config) bindProblems() []error {
	open := map[string]bool{}
	var problems []error
	for _, n := range c.Insecure {
		switch n {
		case "api", "raft", "peer", "admin":
			open[n] = true
		default:
			problems = append(problems, fmt.Errorf("insecure: %q: use api, raft, peer or admin", n))
		}
	}
	self := c.Self()
	check := func(name, addr string) {
		host, _, err := net.SplitHostPort(addr)
		if err != nil || addr == "" || open[name] {
			return
		}
		if ip := net.ParseIP(host); host == "localhost" || ip != nil && ip.IsLoopback() {
			return
		}
		problems = append(problems, fmt.Errorf("%s: %s is not a loopback address and TLS does not protect it: %sadd %q to `insecure` to accept plain text there", name, addr, tlsFix[name], name))
	}
	if c.TLS == nil {
		check("raft", self.Raft)
		check("peer", self.Peer)
	}
	if c.APITLS == nil {
		check("api", self.API)
	}
	if c.Admin != "off" {
		check("admin", c.Admin)
	}
	return problems
}

// Self is this host's entry; the zero value if it is missing.
func (c *Config) Self() HostConfig {
	for _, h := range c.Hosts {
		if h.ID == c.Host {
			return h
		}
	}
	return HostConfig{}
}
