package home

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"hash"
	"sync"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// Receipt names one lease of one message for ever. Its text is opaque to consumers (docs/format/receipt.md).
type Receipt struct {
	Shard    uint64
	Recovery uint64 // the shard's recovery number
	Group    queue.GroupID
	Lease    queue.LeaseName
	Address  queue.Address
}

// The text form: base64url without padding of version, six big-endian u64, and the MAC. Part of the format; do not
// renumber.
const (
	receiptVersion = 1
	receiptFields  = 1 + 6*8
	receiptMAC     = 16
	receiptBytes   = receiptFields + receiptMAC
	receiptText    = (receiptBytes*8 + 5) / 6
)

// receiptContext separates the MAC key of receipts from other uses of the same secret.
const receiptContext = "tierq receipt 1"

// Receipts signs and checks receipts. Safe for concurrent use.
type Receipts struct {
	macs sync.Pool // hash.Hash keyed with the derived key
}

// NewReceipts keys receipts with a secret that every host of the fleet shares. The secret is not kept.
func NewReceipts(secret []byte) *Receipts {
	derive := hmac.New(sha256.New, secret)
	derive.Write([]byte(receiptContext))
	key := derive.Sum(nil)
	return &Receipts{macs: sync.Pool{New: func() any { return hmac.New(sha256.New, key) }}}
}

// Encode returns the text of a receipt, 87 characters.
func (s *Receipts) Encode(r Receipt) string {
	var raw [receiptBytes]byte
	b := append(raw[:0], receiptVersion)
	for _, v := range [...]uint64{r.Shard, r.Recovery, uint64(r.Group), uint64(r.Lease.Epoch), uint64(r.Address), r.Lease.Number} {
		b = binary.BigEndian.AppendUint64(b, v)
	}
	s.sign(b, raw[receiptFields:])
	return base64.RawURLEncoding.EncodeToString(raw[:])
}

// Decode checks and reads a receipt. Anything but the exact text that Encode made with the same secret is refused
// with InvalidReceipt.
func (s *Receipts) Decode(text string) (Receipt, error) {
	var raw [receiptBytes]byte
	if len(text) != receiptText {
		return Receipt{}, errReceipt
	}
	n, err := base64.RawURLEncoding.Strict().Decode(raw[:], []byte(text))
	if err != nil || n != receiptBytes || raw[0] != receiptVersion {
		return Receipt{}, errReceipt
	}
	var want [receiptMAC]byte
	s.sign(raw[:receiptFields], want[:])
	if !hmac.Equal(want[:], raw[receiptFields:]) {
		return Receipt{}, errReceipt
	}
	u := func(i int) uint64 { return binary.BigEndian.Uint64(raw[1+8*i:]) }
	return Receipt{
		Shard: u(0), Recovery: u(1), Group: queue.GroupID(u(2)),
		Lease:   queue.LeaseName{Epoch: queue.Epoch(u(3)), Number: u(5)},
		Address: queue.Address(u(4)),
	}, nil
}

// errReceipt tells nothing about which check failed.
var errReceipt = &code.Error{Code: code.InvalidReceipt, Effect: code.EffectNone}

// sign writes the truncated MAC of fields to out.
func (s *Receipts) sign(fields, out []byte) {
	m := s.macs.Get().(hash.Hash)
	m.Reset()
	m.Write(fields)
	var sum [sha256.Size]byte
	copy(out, m.Sum(sum[:0]))
	s.macs.Put(m)
}
