package fault

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// expectation is what a comment behind a command of the runbook says to wait for. The zero value expects nothing but success.
type expectation struct {
	text  string // as the page has it, without the kind
	kind  string // every row, some row, no row, every value, exit
	cells [][2]string
	sign  string // of every value: < or >
	bound float64
	exit  int
}

var (
	expectationLine = regexp.MustCompile(`^(every row|some row|no row|every value|exit):? (.+)$`)
	cellLine        = regexp.MustCompile(`^([A-Z_]+) (.+)$`)
	valueLine       = regexp.MustCompile(`^([<>]) (\d+)$`)
)

func parseExpectation(comment string) (expectation, error) {
	m := expectationLine.FindStringSubmatch(comment)
	if m == nil {
		return expectation{}, fmt.Errorf("%q is nothing that can be expected", comment)
	}
	e := expectation{text: comment, kind: m[1]}
	switch e.kind {
	case "exit":
		var err error
		e.exit, err = strconv.Atoi(m[2])
		return e, err
	case "every value":
		v := valueLine.FindStringSubmatch(m[2])
		if v == nil {
			return e, fmt.Errorf("%q: a value is above (>) or below (<) a number", comment)
		}
		e.sign = v[1]
		var err error
		e.bound, err = strconv.ParseFloat(v[2], 64)
		return e, err
	}
	for part := range strings.SplitSeq(m[2], ", ") {
		c := cellLine.FindStringSubmatch(part)
		if c == nil {
			return e, fmt.Errorf("%q: a row is told by COLUMN VALUE", comment)
		}
		e.cells = append(e.cells, [2]string{c[1], c[2]})
	}
	return e, nil
}

// check says whether a command's end and what it printed are as expected. Variables are replaced by vars.
func (e expectation) check(exit int, stdout string, vars map[string]string) error {
	if rows := strings.HasSuffix(e.kind, "row"); e.kind != "exit" && exit != 0 && (!rows || exit != exitRefused) || e.kind == "exit" && exit != e.exit {
		return fmt.Errorf("exit %d", exit)
	}
	switch e.kind {
	case "", "exit":
		return nil
	case "every value":
		return e.checkValues(stdout)
	}
	rows, err := e.rows(stdout)
	if err != nil {
		return err
	}
	matching := 0
	for _, row := range rows {
		if !slices.ContainsFunc(e.cells, func(c [2]string) bool { return row[c[0]] != expand(c[1], vars) }) {
			matching++
		}
	}
	switch {
	case e.kind == "every row" && (matching != len(rows) || len(rows) == 0),
		e.kind == "some row" && matching == 0,
		e.kind == "no row" && matching > 0:
		return fmt.Errorf("%d of %d rows are so", matching, len(rows))
	}
	return nil
}

func (e expectation) checkValues(stdout string) error {
	lines := strings.Split(strings.TrimSpace(stdout), "\n")
	for _, line := range lines {
		words := strings.Fields(line)
		if len(words) == 0 {
			return fmt.Errorf("nothing was printed")
		}
		v, err := strconv.ParseFloat(words[len(words)-1], 64)
		if err != nil {
			return err
		}
		if e.sign == "<" && v >= e.bound || e.sign == ">" && v <= e.bound {
			return fmt.Errorf("%v is not %s %v", v, e.sign, e.bound)
		}
	}
	return nil
}

// rows returns the rows of the printed table that has the columns which are expected.
func (e expectation) rows(stdout string) ([]map[string]string, error) {
	for text := range strings.SplitSeq(stdout, "\n\n") {
		lines := strings.Split(strings.Trim(text, "\n"), "\n")
		columns := strings.Fields(lines[0])
		if slices.ContainsFunc(e.cells, func(c [2]string) bool { return !slices.Contains(columns, c[0]) }) {
			continue
		}
		var rows []map[string]string
		for _, line := range lines[1:] {
			rows = append(rows, cellsOf(lines[0], line))
		}
		return rows, nil
	}
	return nil, fmt.Errorf("no table has the columns of %q", e.text)
}

// cellsOf cuts a line of a table where the names of its columns begin.
func cellsOf(header, line string) map[string]string {
	row := map[string]string{}
	starts := regexp.MustCompile(`\S+`).FindAllStringIndex(header, -1)
	runes := []rune(line)
	for i, s := range starts {
		end := len(runes)
		if i+1 < len(starts) {
			end = min(end, starts[i+1][0])
		}
		if s[0] < end {
			row[header[s[0]:s[1]]] = strings.TrimSpace(string(runes[s[0]:end]))
		}
	}
	return row
}

func expand(s string, vars map[string]string) string {
	return os.Expand(s, func(name string) string { return vars[name] })
}

func TestExpectation(t *testing.T) {
	const status = "FLEET  HOST\nf      9\n\nHOST  ROLE     ALIVE\n1     full     yes\n2     witness  no\n"
	vars := map[string]string{"HOST": "2"}
	for _, c := range []struct {
		comment, stdout string
		exit            int
		holds           bool
	}{
		{"every row: ALIVE yes", status, 0, false},
		{"some row: HOST $HOST, ALIVE no", status, 0, true},
		{"some row: HOST $HOST, ALIVE no", status, 4, true},
		{"some row: HOST $HOST, ALIVE no", status, 3, false},
		{"some row: HOST 1, ALIVE no", status, 0, false},
		{"no row: HOST 1, ALIVE no", status, 4, true},
		{"no row: ROLE full", status, 0, false},
		{"every row: NOSUCH x", status, 0, false},
		{"every row: HOST 1", "HOST\n", 0, false},
		{"no row: HOST 1", "HOST\n", 0, true},
		{"exit 4", "", 4, true},
		{"exit 4", "", 0, false},
		{"every value: > 5", "a 6\nb 7.5e+03\n", 0, true},
		{"every value: < 1", "a 0\nb 1\n", 0, false},
		{"every value: < 1", "", 0, false},
	} {
		e, err := parseExpectation(c.comment)
		require.NoError(t, err)
		err = e.check(c.exit, c.stdout, vars)
		require.Equal(t, c.holds, err == nil, "%s: %v", c.comment, err)
	}
	for _, bad := range []string{"every row", "every row: alive yes", "every value: 7", "soon", "exit soon"} {
		_, err := parseExpectation(bad)
		require.Error(t, err, bad)
	}
}
