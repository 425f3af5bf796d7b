package node

import (
	"testing"

	"github.com/stretchr/testify/require"
)

const goodConfig = `
host: 1
data: ./d
hosts:
  - {id: 1, role: full, raft: 127.0.0.1:1, peer: 127.0.0.1:2, api: 127.0.0.1:3, domain: a}
  - {id: 2, role: full, raft: 127.0.0.1:4, peer: 127.0.0.1:5, api: 127.0.0.1:6}
  - {id: 3, role: witness, raft: 127.0.0.1:7, peer: 127.0.0.1:8}
`

func TestConfigGood(t *testing.T) {
	c, err := ParseConfig([]byte(goodConfig))
	require.NoError(t, err)
	require.Equal(t, "127.0.0.1:7191", c.Admin)
	require.Equal(t, "2", c.Hosts[1].Domain)
}

func TestConfigRefusals(t *testing.T) {
	for name, tc := range map[string]struct{ text, want string }{
		"unknown key":       {goodConfig + "colour: red\n", `unknown key "colour" at line 8`},
		"unknown host key":  {"host: 1\nhosts:\n  - {id: 1, rack: 4}\n", `unknown key "rack" at line 3`},
		"host not listed":   {"host: 9\n" + goodConfig[9:], "host: 9 is not in hosts"},
		"one host":          {"host: 1\nhosts:\n  - {id: 1, raft: 127.0.0.1:1, peer: 127.0.0.1:2, api: 127.0.0.1:3}\n", "needs at least two"},
		"role":              {"host: 1\nhosts:\n  - {id: 1, role: boss, raft: 127.0.0.1:1, peer: 127.0.0.1:2}\n", `"boss": use full or witness`},
		"open without TLS":  {"host: 1\nhosts:\n  - {id: 1, raft: 10.0.0.1:1, peer: 127.0.0.1:2, api: 127.0.0.1:3}\n", `add "raft" to`},
		"address twice":     {"host: 1\nhosts:\n  - {id: 1, raft: 127.0.0.1:1, peer: 127.0.0.1:1, api: 127.0.0.1:3}\n", "already used by host 1"},
		"not yaml":          {"[", "not a YAML mapping"},
		"witness with API":  {"host: 1\nhosts:\n  - {id: 1, role: witness, raft: 127.0.0.1:1, peer: 127.0.0.1:2, api: 127.0.0.1:3}\n", "remove it"},
		"log level":         {goodConfig + "log: loud\n", `log: "loud" is not a level`},
		"profile":           {goodConfig + "profile: huge\n", `profile: "huge": use default or many-shards`},
		"missing addresses": {"host: 1\nhosts:\n  - {id: 1}\n", `raft: "" is not HOST:PORT`},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := ParseConfig([]byte(tc.text))
			require.ErrorContains(t, err, tc.want)
		})
	}
}
