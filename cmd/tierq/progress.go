package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"
)

// progress draws one line on a terminal, over itself, until it is stopped.
type progress struct {
	w    io.Writer
	line func() (done, total int64, text string)
	stop chan struct{}
	gone sync.WaitGroup
}

const progressEvery = 200 * time.Millisecond

// startProgress draws on w if w is a terminal, or if force is set; the returned function ends it and cleans the line.
func startProgress(w io.Writer, force bool, line func() (done, total int64, text string)) func() {
	if !force && !isTerminal(w) {
		return func() {}
	}
	p := &progress{w: w, line: line, stop: make(chan struct{})}
	p.gone.Add(1)
	go p.run()
	return func() {
		close(p.stop)
		p.gone.Wait()
	}
}

func (p *progress) run() {
	defer p.gone.Done()
	tick := time.NewTicker(progressEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			p.draw()
		case <-p.stop:
			p.draw()
			fmt.Fprintln(p.w)
			return
		}
	}
}

func (p *progress) draw() {
	done, total, text := p.line()
	fmt.Fprintf(p.w, "\r\x1b[K%s%s", bar(done, total), text)
}

// bar draws how much of total is done; without a total, nothing.
func bar(done, total int64) string {
	const width = 30
	if total <= 0 {
		return ""
	}
	n := int(min(done, total) * width / total)
	return fmt.Sprintf("[%s%s] %3d%% ", strings.Repeat("=", n), strings.Repeat(" ", width-n), min(done, total)*100/total)
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// inputSize is how much r will give, if that can be known.
func inputSize(r io.Reader) int64 {
	f, ok := r.(*os.File)
	if !ok {
		return 0
	}
	info, err := f.Stat()
	if err != nil || !info.Mode().IsRegular() {
		return 0
	}
	return info.Size()
}
