package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"
)

// table is an answer in rows: columns in capitals for people, a JSON array of objects with the columns in lower case for
// scripts. Names and order of the columns are frozen: new ones come at the end.
type table struct {
	columns []string
	rows    [][]any
}

func newTable(columns ...string) *table { return &table{columns: columns} }

func (t *table) add(values ...any) { t.rows = append(t.rows, values) }

// print writes the table as --json asks.
func (a *app) print(t *table) error {
	if a.json {
		return t.writeJSON(a.out)
	}
	return t.writeText(a.out)
}

// printOne writes a table of one row; its JSON is one object.
func (a *app) printOne(t *table) error {
	if a.json {
		b, err := t.object(0)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(a.out, "%s\n", b)
		return err
	}
	return t.writeText(a.out)
}

func (t *table) writeText(w io.Writer) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, strings.Join(t.columns, "\t"))
	for _, row := range t.rows {
		for i, v := range row {
			if i > 0 {
				fmt.Fprint(tw, "\t")
			}
			fmt.Fprint(tw, cell(v))
		}
		fmt.Fprintln(tw)
	}
	return tw.Flush()
}

// cell prints a value in a line; nothing shows as a dash, so that columns can be counted.
func cell(v any) string {
	s := ""
	switch v := v.(type) {
	case float64:
		s = trimFloat(v)
	case bool:
		s = "no"
		if v {
			s = "yes"
		}
	case time.Time:
		if !v.IsZero() {
			s = v.UTC().Format(time.RFC3339)
		}
	default:
		s = fmt.Sprint(v)
	}
	if s = strings.Map(printable, s); s == "" {
		return "-"
	}
	return s
}

func printable(r rune) rune {
	if r < ' ' || r == 0x7f {
		return ' '
	}
	return r
}

func trimFloat(v float64) string {
	if v >= 100 {
		return fmt.Sprintf("%.0f", v)
	}
	return fmt.Sprintf("%.2f", v)
}

func (t *table) writeJSON(w io.Writer) error {
	b, err := t.array()
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(w, "%s\n", b)
	return err
}

// array is the rows as JSON.
func (t *table) array() (json.RawMessage, error) {
	var b strings.Builder
	b.WriteByte('[')
	for i := range t.rows {
		o, err := t.object(i)
		if err != nil {
			return nil, err
		}
		if i > 0 {
			b.WriteByte(',')
		}
		b.Write(o)
	}
	b.WriteByte(']')
	return json.RawMessage(b.String()), nil
}

// object is one row as JSON, its keys in the columns' order.
func (t *table) object(i int) (json.RawMessage, error) {
	var b strings.Builder
	b.WriteByte('{')
	for k, c := range t.columns {
		v, err := json.Marshal(t.rows[i][k])
		if err != nil {
			return nil, err
		}
		if k > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, "%q:%s", strings.ToLower(c), v)
	}
	b.WriteByte('}')
	return json.RawMessage(b.String()), nil
}
