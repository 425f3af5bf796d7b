package queue

import "github.com/tierq/tierq/queue/code"

// Home gives a group to a replica: epoch + 1. Recorded leases stay: the new home honours them.
//
// Refused: UnknownGroup; MutationFenced, with the stored home and epoch, unless both are the expected ones, so a late
// or repeated copy changes nothing.
//
// Version 1: as above.
func (t *tx) homeCommand(c *Home, r *Result) {
	g := t.group(c.Group)
	if g == nil {
		r.Code = code.UnknownGroup
		return
	}
	if g.home != c.ExpectedHome || g.epoch != c.ExpectedEpoch {
		r.Code = code.MutationFenced
		r.describe(g)
		return
	}
	g = t.edit(c.Group)
	g.home, g.homeIndex, g.released = c.NewHome, t.index, c.Released
	g.epoch++
	t.event.Groups = append(t.event.Groups, g.id)
	r.describe(g)
}

// describe fills in a group's id, epoch, home and config version.
func (r *Result) describe(g *group) {
	r.Group, r.Epoch, r.Home, r.Version = g.id, g.epoch, g.home, g.configVersion
}
