package queue

// A dead letter with an export number waits for its group's dead-letter queue. The index by number leads to it, so the
// outbox finds the next ones whatever else lies dead; it holds exactly the numbered dead letters of a group.

// number gives a dead letter the group's next export number.
func (x *expirer) number(d *DeadLetter) {
	x.g.exported++
	d.ExportNumber, d.ExportState = x.g.exported, ExportPending
	x.g.exports++
	x.b.Set(appendKey2(x.key[:0], kindExport, uint64(x.g.id), d.ExportNumber), encodeExport(x.val[:0], d.Address))
	x.noteExport()
}

// noteExport tells the outbox; a command is about one group.
func (x *expirer) noteExport() {
	if len(x.event.Exports) == 0 {
		x.event.Exports = []GroupID{x.g.id}
	}
}

// dropExport takes a dead letter out of the index; the caller removes or rewrites its record.
func (t *tx) dropExport(g *group, d *DeadLetter) {
	if d.ExportNumber == 0 {
		return
	}
	g.exports--
	t.b.Delete(appendKey2(t.key[:0], kindExport, uint64(g.id), d.ExportNumber))
}

// dropExportAt is dropExport for the stored value of a dead letter.
func (t *tx) dropExportAt(g *group, a Address, value []byte) {
	if g.exports == 0 {
		return
	}
	d, err := readDead(a, value)
	check(err)
	t.dropExport(g, &d)
}

// dropDead removes a dead letter's record; the caller finishes the message.
func (t *tx) dropDead(g *group, a Address) {
	v, ok, err := t.r.Get(appendGroupAddressKey(t.key[:0], kindDead, g.id, a))
	check(err)
	if ok {
		t.dropExportAt(g, a, v)
		t.b.Delete(appendGroupAddressKey(t.key[:0], kindDead, g.id, a))
		g.c.Dead--
	}
}

// dropExportsTo empties the index of the dead letters at or below an address, which are about to be removed.
func (t *tx) dropExportsTo(g *group, to Address) {
	switch {
	case g.exports == 0:
		return
	case to >= t.meta.Last:
		t.b.DeleteRange(appendKey1(nil, kindExport, uint64(g.id)), appendKey1(nil, kindExport, uint64(g.id)+1))
		g.exports = 0
		return
	}
	it := openIter(t.r, appendGroupAddressKey(nil, kindDead, g.id, 0), appendGroupAddressKey(nil, kindDead, g.id, to+1))
	defer it.Close()
	for ok := it.First(); ok; ok = it.Next() {
		v, err := it.Value()
		check(err)
		t.dropExportAt(g, Address(lastU64(it.Key())), v)
	}
	check(it.Err())
}

// export moves a dead letter along its export. What is not one of these steps changes nothing:
//
//	none, pending -> exporting   the target is stored before the first attempt; one without a number gets it now
//	exporting -> done            to the same target: finished, exported
//	exporting -> pending         from the same target, which exists no more and never will: another one may be chosen
//	pending -> none              no target could ever take it: it stays here and waits for a person
func (x *expirer) export(c *ExpireEntry, e *entryState) bool {
	d := &e.dead
	switch {
	case c.ExportState == ExportExporting && d.ExportState <= ExportPending:
		if d.ExportState == ExportNone { // it died before the group had a dead-letter queue
			x.number(d)
		}
		d.ExportState, d.Target = ExportExporting, c.Target
	case c.ExportState == ExportDone && d.ExportState == ExportExporting && d.Target == c.Target:
		x.exported(c.Address, e)
		return true
	case c.ExportState == ExportPending && d.ExportState == ExportExporting && d.Target == c.Target:
		d.ExportState, d.Target = ExportPending, 0
	case c.ExportState == ExportNone && d.ExportState == ExportPending:
		x.dropExport(x.g, d)
		d.ExportNumber, d.ExportState = 0, ExportNone
	default:
		return false
	}
	x.putDeadLetter(e)
	x.noteExport()
	return true
}

// exported takes an exported dead letter away.
func (x *expirer) exported(a Address, e *entryState) {
	x.dropExport(x.g, &e.dead)
	x.b.Delete(appendGroupAddressKey(x.key[:0], kindDead, x.g.id, a))
	x.g.c.Dead--
	x.g.c.Exported++
	x.finish(x.g, a)
	if v, ok, err := x.r.Get(appendKey1(x.key[:0], kindParked, uint64(a))); ok {
		x.releaseParked(a, v)
	} else {
		check(err)
	}
	*e = entryState{finished: true} // nothing is stored any more, and later entries of the command are told so
}

// Exports lists a group's numbered dead letters in the order of their numbers, from one on: at most limit and, with
// bodies, little more than maxBytes of messages.
func (s *QueueStateMachine) Exports(id GroupID, from uint64, limit, maxBytes int, withBody bool) (list []DeadLetter, err error) {
	defer recoverFault(&err)
	v := s.view(id)
	defer v.close()
	if v.group == nil || v.group.exports == 0 {
		return nil, nil
	}
	it := openIter(v.snap, appendKey2(nil, kindExport, uint64(id), from), appendKey1(nil, kindExport, uint64(id)+1))
	defer it.Close()
	bytes := 0
	for ok := it.First(); ok && len(list) < limit && bytes <= maxBytes; ok = it.Next() {
		raw, err := it.Value()
		check(err)
		a, err := decodeExport(raw)
		check(err)
		d := v.deadLetter(a)
		if withBody {
			d.Message = v.parkedMessage(a)
			bytes += messageBytes(&d.Message)
		}
		list = append(list, d)
	}
	check(it.Err())
	return list, nil
}

func (v *view) deadLetter(a Address) (d DeadLetter) {
	ok, err := v.snap.View(appendGroupAddressKey(nil, kindDead, v.group.id, a), func(b []byte) (err error) {
		d, err = readDead(a, b)
		return err
	})
	check(err)
	if !ok {
		check(corruptf("numbered dead letter %s of group %d does not exist", a, v.group.id))
	}
	return d
}

func (v *view) parkedMessage(a Address) (m StoredMessage) {
	ok, err := v.snap.View(appendKey1(nil, kindParked, uint64(a)), func(b []byte) (err error) {
		m, err = readMessage(a, true, b)
		return err
	})
	check(err)
	if !ok {
		check(corruptf("dead letter %s has no message", a))
	}
	return m
}

// messageBytes is what a stored message counts for.
func messageBytes(m *StoredMessage) int {
	n := len(m.Body) + len(m.Key)
	for i := range m.Headers {
		n += len(m.Headers[i].Name) + len(m.Headers[i].Value)
	}
	return n
}
