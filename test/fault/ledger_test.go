package fault

import (
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
	"text/tabwriter"
)

// ledger collects the line of account of every scenario of a run, and what the measurements found.
var ledger struct {
	mu       sync.Mutex
	accounts []accountLine
	measured []string
}

// accountLine is what one scenario's account adds up to.
type accountLine struct {
	t      *testing.T
	name   string
	totals totals
}

// noteAccount prints the line of account of t's scenario, and keeps it for the table at the end of the run. Each scenario has one
// line, or one for each of its queues, which part names.
func noteAccount(t *testing.T, part string, s totals) {
	t.Helper()
	name := strings.TrimPrefix(t.Name(), "TestFault")
	if part != "" {
		name += "/" + part
	}
	line := accountLine{t: t, name: name, totals: s}
	t.Log(line)
	ledger.mu.Lock()
	defer ledger.mu.Unlock()
	ledger.accounts = append(ledger.accounts, line)
}

// noteGroups is noteAccount for scenarios whose messages are few and looked at one by one: what became of those that were acknowledged is
// taken from the counters of each group, which must have every one of them.
func (f *fleet) noteGroups(t *testing.T, queue string, s totals, groups ...string) {
	t.Helper()
	for _, group := range groups {
		s.lost += f.lost(queue, group, s.acknowledged)
	}
	noteAccount(t, "", s)
	if s.lost != 0 {
		t.Errorf("%d acknowledged messages are lost", s.lost)
	}
}

// lost is how many of so many messages a group does not know of.
func (f *fleet) lost(queue, group string, acknowledged int) int {
	f.t.Helper()
	g := f.groupStatsOf(f.leaderHost(queue), queue, group)
	if err := g.balanced(); err != nil {
		f.t.Error(err)
	}
	return max(acknowledged-int(g.Counters.Assigned), 0)
}

// String is the line that `make fault` shows for each scenario.
func (l accountLine) String() string {
	s := l.totals
	return fmt.Sprintf("account %s sent=%d acknowledged=%d delivered=%d duplicates=%d lost=%d (seed %d)", l.name, s.sent, s.acknowledged, s.deliveries, s.duplicates, s.lost, *seedFlag)
}

// measured prints a number of the run, and keeps it for the end.
func measured(t *testing.T, format string, args ...any) {
	t.Helper()
	line := fmt.Sprintf(format, args...)
	t.Log(line)
	ledger.mu.Lock()
	defer ledger.mu.Unlock()
	ledger.measured = append(ledger.measured, line)
}

// printLedger writes the table of all accounts of the run, and the measurements.
func printLedger(w io.Writer) {
	ledger.mu.Lock()
	defer ledger.mu.Unlock()
	if len(ledger.accounts) > 0 {
		fmt.Fprintf(w, "\nseed %d\n", *seedFlag)
		tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
		fmt.Fprintln(tw, "SENT\tACKNOWLEDGED\tDELIVERED\tDUPLICATES\tLOST\tRESULT\t ACCOUNT")
		for _, l := range ledger.accounts {
			result := "ok"
			if l.t.Failed() {
				result = "FAILED"
			}
			s := l.totals
			fmt.Fprintf(tw, "%d\t%d\t%d\t%d\t%d\t%s\t %s\n", s.sent, s.acknowledged, s.deliveries, s.duplicates, s.lost, result, l.name)
		}
		_ = tw.Flush()
	}
	for _, m := range ledger.measured {
		fmt.Fprintln(w, m)
	}
}
