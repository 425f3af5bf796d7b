package wal

// batchCache keeps the newest batches as they were written, oldest out first, so that entries that
// a slower replica still wants are not read back from disk. Buffers are never reused: what was
// decoded from one may alias it for ever.
type batchCache struct {
	limit   int64
	bytes   int64
	low     uint64 // id of batches[0]; ids grow by one
	batches []cachedBatch
}

type cachedBatch struct {
	off uint32 // segment offset of buf[0]
	buf []byte
}

// nextID is the id that the next add will use.
func (c *batchCache) nextID() uint64 { return c.low + uint64(len(c.batches)) }

// add keeps a copy of buf, which begins at segment offset off, and drops what is above the limit.
func (c *batchCache) add(off int64, buf []byte) {
	if int64(len(buf)) > c.limit {
		buf = nil
	}
	c.batches = append(c.batches, cachedBatch{off: uint32(off), buf: append([]byte(nil), buf...)})
	c.bytes += int64(len(buf))
	n := 0
	for n < len(c.batches) && (c.bytes > c.limit || c.batches[n].buf == nil) {
		c.bytes -= int64(len(c.batches[n].buf))
		c.batches[n].buf = nil
		n++
	}
	c.low += uint64(n)
	c.batches = c.batches[n:]
}

// get returns the record of length n at segment offset off of batch id, or nil.
func (c *batchCache) get(id uint64, off, n uint32) []byte {
	if id < c.low || id >= c.nextID() {
		return nil
	}
	b := c.batches[id-c.low]
	if b.buf == nil {
		return nil
	}
	return b.buf[off-b.off : off-b.off+n]
}
