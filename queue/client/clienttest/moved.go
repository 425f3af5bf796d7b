package clienttest

import (
	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/code"
)

// takeReceipts takes the first n receipts out of a settle.
func takeReceipts(req connect.AnyRequest, n int) {
	m := req.Any().(proto.Message).ProtoReflect()
	list := m.Mutable(m.Descriptor().Fields().ByName("receipts")).List()
	for i := n; i < list.Len(); i++ {
		list.Set(i-n, list.Get(i))
	}
	list.Truncate(max(list.Len()-n, 0))
}

// tellMoved puts n refusals in front of a settle's results: the home of those leases has moved.
func tellMoved(res connect.AnyResponse, n int) {
	m, c := res.Any().(*tierqv1.SettleResponse), code.NotOwner
	moved := make([]*tierqv1.SettleResult, n)
	for i := range moved {
		moved[i] = &tierqv1.SettleResult{Code: uint32(c), Name: c.String(), Text: c.Info().Text, Effect: tierqv1.Effect_EFFECT_NONE}
	}
	m.Results = append(moved, m.Results...)
}
