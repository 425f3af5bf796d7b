package clienttest

import (
	"context"

	"connectrpc.com/connect"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
)

// ClaimIdle answers as the test has said.
func (v *view) ClaimIdle(_ context.Context, r *connect.Request[tierqv1.ClaimIdleRequest]) (*connect.Response[tierqv1.ClaimIdleResponse], error) {
	return answer[tierqv1.ClaimIdleRequest, tierqv1.ClaimIdleResponse](v.h.f, r)
}
