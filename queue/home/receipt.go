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
	signers sync.Pool // *signer
}

// signer is what one call works with: the keyed hash and room for what it writes.
type signer struct {
	mac  hash.Hash
	raw  [receiptBytes]byte
	sum  [sha256.Size]byte
	text [receiptText]byte
}

// NewReceipts keys receipts with a secret that every host of the fleet shares. The secret is not kept.
func NewReceipts(secret []byte) *Receipts {
	derive := hmac.New(sha256.New, secret)
	derive.Write([]byte(receiptContext))
	key := derive.Sum(nil)
	return &Receipts{signers: sync.Pool{New: func() any { return &signer{mac: hmac.New(sha256.New, key)} }}}
}

// Encode returns the text of a receipt, 87 characters.
func (s *Receipts) Encode(r Receipt) string {
	g := s.signers.Get().(*signer)
	defer s.signers.Put(g)
	b := append(g.raw[:0], receiptVersion)
	for _, v := range [...]uint64{r.Shard, r.Recovery, uint64(r.Group), uint64(r.Lease.Epoch), uint64(r.Address), r.Lease.Number} {
		b = binary.BigEndian.AppendUint64(b, v)
	}
	copy(g.raw[receiptFields:], g.sign())
	base64.RawURLEncoding.Encode(g.text[:], g.raw[:])
	return string(g.text[:])
}

// Decode checks and reads a receipt. Anything but the exact text that Encode made with the same secret is refused
// with InvalidReceipt.
func (s *Receipts) Decode(text string) (Receipt, error) {
	if len(text) != receiptText {
		return Receipt{}, errReceipt
	}
	g := s.signers.Get().(*signer)
	defer s.signers.Put(g)
	copy(g.text[:], text)
	n, err := strictBase64.Decode(g.raw[:], g.text[:])
	if err != nil || n != receiptBytes || g.raw[0] != receiptVersion || !hmac.Equal(g.sign(), g.raw[receiptFields:]) {
		return Receipt{}, errReceipt
	}
	u := func(i int) uint64 { return binary.BigEndian.Uint64(g.raw[1+8*i:]) }
	return Receipt{
		Shard: u(0), Recovery: u(1), Group: queue.GroupID(u(2)),
		Lease:   queue.LeaseName{Epoch: queue.Epoch(u(3)), Number: u(5)},
		Address: queue.Address(u(4)),
	}, nil
}

// strictBase64 refuses bits beyond the last byte.
var strictBase64 = base64.RawURLEncoding.Strict()

// errReceipt tells nothing about which check failed.
var errReceipt = &code.Error{Code: code.InvalidReceipt, Effect: code.EffectNone}

// sign returns the truncated MAC of the fields.
func (g *signer) sign() []byte {
	g.mac.Reset()
	g.mac.Write(g.raw[:receiptFields])
	return g.mac.Sum(g.sum[:0])[:receiptMAC]
}
