package code

import (
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var rewrite = flag.Bool("rewrite", false, "write testdata/registry.txt and docs/reference/errors.md anew; then read the diff")

var classNames = map[Class]string{
	ClassOK: "ok", ClassFatal: "fatal", ClassRenegotiate: "renegotiate", ClassTransient: "transient",
	ClassPermanent: "permanent", ClassNoop: "noop", ClassOperator: "operator", ClassWarning: "warning",
}

// segments are the ranges that numbers may come from.
var segments = []struct {
	first, last Code
	title       string
}{
	{0x0001, 0x0fff, "Protocol and messages"},
	{0x2000, 0x2fff, "Metadata"},
	{0x4000, 0x4fff, "Flow"},
	{0x6000, 0x6fff, "Replication"},
	{0x7000, 0x7fff, "Local outcomes"},
}

// reserved numbers had a meaning in the protocols before this one, which nothing here has. They are never assigned.
var reserved = map[Code]string{
	0x0001: "BAD_LENGTH", 0x0002: "UNKNOWN_OP", 0x0004: "UNSUPPORTED_VERSION", 0x0007: "AUTH_TIMEOUT",
	0x0024: "GROUP_MEMBER_LIMIT", 0x0025: "GROUP_ASSIGNMENT_LIMIT", 0x0026: "UNKNOWN_MEMBER", 0x0030: "DLQ_PATH_OVERFLOW",
	0x4006: "NO_CREDIT", 0x4007: "SLOW_CONSUMER",
	0x6007: "CATCHUP_REQUIRED", 0x6008: "LOG_GAP", 0x600a: "QUORUM_RECOVERED", 0x600b: "UNCLEAN_ELECTION_REJECTED",
}

// inherited numbers keep the meaning, though not always the name, that they had.
var inherited = map[Code]Code{
	0x0003: Malformed, 0x0005: NotAuthenticated, 0x0006: AuthFailed, 0x0008: UnknownQueue, 0x0009: UnknownPartition,
	0x000a: Internal, 0x000b: InvalidName, 0x0010: SeqGap, 0x0011: SeqExpired, 0x0012: ProducerEpochStale,
	0x0013: ProducerSeqInvalid, 0x0020: StaleGeneration, 0x0021: NotOwner, 0x0022: StaleOwner, 0x0023: UnknownDelivery,
	0x0027: MaxWaitingPulls, 0x0031: DeadTargetDown, 0x2001: QueueExistsMismatch, 0x2002: GroupExistsMismatch,
	0x2003: MetadataReadOnly, 0x2004: MetadataQuarantined, 0x2005: UnknownGroup, 0x2006: MutationFenced,
	0x4001: Backpressure, 0x4002: QuotaExceeded, 0x4003: RateLimited, 0x4004: StorageHighWatermark,
	0x4005: MessageExceedsCredit, 0x6001: QuorumLost, 0x6002: ReadOnlyDegraded, 0x6003: InSyncNotEnough,
	0x6004: FollowerLag, 0x6005: StaleLeader, 0x6006: LeaseExpired, 0x6009: Divergent,
}

// The registry only grows: a number that was released keeps its name for ever. The class may be corrected.
func TestRegistryIsLocked(t *testing.T) {
	path := filepath.Join("testdata", "registry.txt")
	now := "# number name class; grows only: a line never changes its number or name and never goes\n"
	for _, i := range All() {
		now += fmt.Sprintf("0x%04x %s %s\n", uint16(i.Code), i.Name, classNames[i.Class])
	}
	if *rewrite {
		keepsEveryLine(t, path, now)
		require.NoError(t, os.MkdirAll("testdata", 0o755))
		require.NoError(t, os.WriteFile(path, []byte(now), 0o644))
		return
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err, "run with -rewrite to write it")
	require.Equal(t, string(want), now)
}

// keepsEveryLine: not even -rewrite takes a number or name away.
func keepsEveryLine(t *testing.T, path, now string) {
	old, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return
	}
	require.NoError(t, err)
	for line := range strings.Lines(string(old)) {
		if f := strings.Fields(line); len(f) == 3 && !strings.HasPrefix(line, "#") {
			require.Contains(t, now, "\n"+f[0]+" "+f[1]+" ", "this number and name have been released")
		}
	}
}

func TestRegistryIsABijectionInOrder(t *testing.T) {
	names := make(map[string]Code)
	previous := Code(0)
	for _, i := range All() {
		require.Greater(t, i.Code, previous, "%s is out of order or assigned twice", i.Name)
		previous = i.Code
		require.NotContains(t, names, i.Name)
		names[i.Name] = i.Code
		require.Regexp(t, `^[A-Z][A-Z0-9_]+$`, i.Name)
		require.Equal(t, i, i.Code.Info())
		require.Equal(t, i.Name, i.Code.String())
		require.Contains(t, classNames, i.Class)
		require.NotContains(t, reserved, i.Code, "%s takes a reserved number", i.Name)
	}
	require.Len(t, byCode, len(table))
}

func TestEveryCodeLiesInASegment(t *testing.T) {
	for _, i := range All() {
		require.True(t, slices.ContainsFunc(segments, func(s struct {
			first, last Code
			title       string
		}) bool {
			return i.Code >= s.first && i.Code <= s.last
		}), "%s (0x%04x)", i.Name, uint16(i.Code))
	}
}

func TestInheritedNumbersKeepTheirMeaning(t *testing.T) {
	for number, c := range inherited {
		require.Equal(t, number, c, "%s", c)
		require.NotContains(t, reserved, number)
	}
}

// Of all 65,536 numbers those that nobody assigned read as what they are, never as a neighbour.
func TestUnassignedNumbersAreUnknown(t *testing.T) {
	for n := range math.MaxUint16 + 1 {
		c := Code(n)
		if _, assigned := byCode[c]; assigned {
			continue
		}
		require.Equal(t, fmt.Sprintf("UNKNOWN(0x%04x)", n), c.String())
		i := c.Info()
		require.Equal(t, c, i.Code)
		require.Equal(t, ClassPermanent, i.Class)
		require.Contains(t, i.Text, "upgrade")
	}
	require.NotContains(t, byCode, Code(0), "a result that was never set is no code")
}

// A text is "what is the matter: what to do", in one sentence without a full stop.
func TestEveryTextNamesAFix(t *testing.T) {
	for _, i := range All() {
		require.NotEmpty(t, i.Text, i.Name)
		require.NotRegexp(t, `[.!]$`, i.Text, i.Name)
		require.NotRegexp(t, `^[A-Z][a-z]`, i.Text, i.Name)
		require.NotContains(t, i.Text, "\n", i.Name)
		require.Less(t, len(i.Text), 200, i.Name)
		switch i.Class {
		case ClassOK, ClassNoop, ClassWarning:
			continue
		}
		require.Regexp(t, `: |^(send|check|names are) `, i.Text, "%s has no fix", i.Name)
	}
}

func TestError(t *testing.T) {
	cause := errors.New("disk")
	e := New(TooLarge, "%d bytes", 9)
	require.Equal(t, "TOO_LARGE (0x000d): 9 bytes", e.Error())
	require.Equal(t, EffectNone, e.Effect)
	m := Maybe(QuorumLost, cause, "")
	require.Equal(t, "QUORUM_LOST (0x6001): "+QuorumLost.Info().Text, m.Error())
	require.Equal(t, EffectMaybe, m.Effect)
	require.ErrorIs(t, m, cause)
	require.NotContains(t, m.Error(), "disk", "a cause is for logs only")
	var got *Error
	require.ErrorAs(t, fmt.Errorf("wrapped: %w", e), &got)
	require.Equal(t, TooLarge, got.Code)
}

func TestAllIsACopy(t *testing.T) {
	list := All()
	list[0].Name = "OTHER"
	require.NotEqual(t, "OTHER", All()[0].Name)
}

// docs/reference/errors.md is made from the table.
func TestErrorsPage(t *testing.T) {
	path := filepath.Join("..", "..", "docs", "reference", "errors.md")
	page := errorsPage()
	if *rewrite {
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(page), 0o644))
		return
	}
	got, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, page, string(got), "run `go test ./queue/code -rewrite`")
}

func errorsPage() string {
	var b strings.Builder
	b.WriteString(`# Errors

Made from the registry in ` + "`queue/code`" + ` by ` + "`go test ./queue/code -rewrite`" + `; do not edit.

Every refusal and failure carries one of these numbers, in every listener and client. Beside it stands the **effect** of the
call: *none* (nothing was stored or changed, now or later), *maybe* (the outcome is unknown: repeat with the same
idempotency key), or *done* (it took effect; the code is a warning).

| class | what a client does |
|---|---|
| ok | goes on |
| fatal | stops: the client or its configuration must be fixed or upgraded |
| renegotiate | asks again who serves, or registers again, then repeats |
| transient | repeats after a pause, with the same idempotency key |
| permanent | does not repeat: this request can never succeed as it is |
| noop | nothing: there is nothing left to do |
| operator | calls a person |
| warning | goes on; it stands beside an OK |

Numbers only grow: none is renumbered, reused, or given another meaning. A number that a client does not know reads
` + "`UNKNOWN(0x....)`" + ` and counts as permanent: a newer host has answered.
`)
	for _, s := range segments {
		fmt.Fprintf(&b, "\n## %s (0x%04x–0x%04x)\n\n| code | name | class | text |\n|---|---|---|---|\n", s.title, uint16(s.first), uint16(s.last))
		for _, i := range All() {
			if i.Code >= s.first && i.Code <= s.last {
				fmt.Fprintf(&b, "| 0x%04x | %s | %s | %s |\n", uint16(i.Code), i.Name, classNames[i.Class], strings.ReplaceAll(i.Text, "|", `\|`))
			}
		}
	}
	b.WriteString("\n## Reserved numbers\n\nThey had a meaning in the protocols before this one, and are never assigned.\n\n| code | was |\n|---|---|\n")
	var numbers []Code
	for c := range reserved {
		numbers = append(numbers, c)
	}
	slices.Sort(numbers)
	for _, c := range numbers {
		fmt.Fprintf(&b, "| 0x%04x | %s |\n", uint16(c), reserved[c])
	}
	return b.String()
}
