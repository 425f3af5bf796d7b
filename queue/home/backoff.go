package home

import (
	"math/bits"
	"unicode/utf8"

	"github.com/tierq/tierq/queue"
)

// backoffMs is how long a message waits after its attempts-th failure (from 1): the group's list of delays, or
// base x factor^(attempts-1) up to the cap; then up to the policy's jitter on top.
func backoffMs(p *queue.GroupConfig, attempts uint32, random uint64) uint64 {
	ms := delayMs(p, attempts)
	if spread := permille(ms, p.JitterPermille); spread > 0 {
		extra, _ := bits.Mul64(random, spread+1)
		ms += extra
	}
	return ms
}

// permille is ms x p / 1000 without the intermediate product.
func permille(ms uint64, p uint32) uint64 {
	return ms/1000*uint64(p) + ms%1000*uint64(p)/1000
}

func delayMs(p *queue.GroupConfig, attempts uint32) uint64 {
	if n := len(p.DelaysMs); n > 0 {
		return p.DelaysMs[min(max(int(attempts), 1), n)-1]
	}
	ms := p.BackoffBaseMs
	for n := uint32(1); n < attempts && ms < p.BackoffCapMs; n++ {
		next := permille(ms, p.BackoffFactorPermille)
		if next <= ms { // a factor of at most 1 does not grow, and a great one does not wrap
			break
		}
		ms = next
	}
	return min(ms, p.BackoffCapMs)
}

// cutReason keeps a reason within MaxReason bytes of valid text.
func cutReason(s string) string {
	if len(s) <= MaxReason {
		return s
	}
	s = s[:MaxReason]
	for len(s) > 0 {
		if r, n := utf8.DecodeLastRuneInString(s); r != utf8.RuneError || n != 1 {
			return s
		}
		s = s[:len(s)-1]
	}
	return s
}
