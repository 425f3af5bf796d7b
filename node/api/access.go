package api

import (
	"context"

	"connectrpc.com/connect"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/code"
)

// Access is the part of a Backend with which operators keep tenants and tokens. Its rules are the Backend's.
type Access interface {
	ListTenants(ctx context.Context) ([]TenantInfo, error)
	PutTenant(ctx context.Context, t TenantInfo) error
	DeleteTenant(ctx context.Context, name string) error
	ListTokens(ctx context.Context) ([]TokenInfo, error)
	// CreateToken returns the token's id and text, which is not kept.
	CreateToken(ctx context.Context, t TokenInfo) (id uint64, text string, err error)
	RevokeToken(ctx context.Context, id uint64) error
}

// TenantInfo is a tenant, its quotas (0: none), and how many queues it has.
type TenantInfo struct {
	Name        string
	MaxQueues   uint32
	PublishRate uint32
	Queues      uint32
	MaxBytes    uint64
	StoredBytes uint64
}

// TokenInfo is a token without its secret.
type TokenInfo struct {
	ID     uint64
	Tenant string
	Roles  []string
	Name   string
}

// accessService implements tierq.v1.AccessService.
type accessService struct{ *Server }

func (s accessService) ListTenants(ctx context.Context, _ *connect.Request[tierqv1.ListTenantsRequest]) (*connect.Response[tierqv1.ListTenantsResponse], error) {
	ts, err := s.backend.ListTenants(ctx)
	if err != nil {
		return nil, err
	}
	out := &tierqv1.ListTenantsResponse{}
	for _, t := range ts {
		out.Tenants = append(out.Tenants, &tierqv1.Tenant{Name: t.Name, MaxQueues: t.MaxQueues, PublishRate: t.PublishRate, Queues: t.Queues, MaxBytes: t.MaxBytes, StoredBytes: t.StoredBytes})
	}
	return connect.NewResponse(out), nil
}

func (s accessService) PutTenant(ctx context.Context, req *connect.Request[tierqv1.PutTenantRequest]) (*connect.Response[tierqv1.PutTenantResponse], error) {
	t := req.Msg.GetTenant()
	if err := validName("tenant.name", t.GetName()); err != nil {
		return nil, err
	}
	err := s.backend.PutTenant(ctx, TenantInfo{Name: t.GetName(), MaxQueues: t.GetMaxQueues(), PublishRate: t.GetPublishRate(), MaxBytes: t.GetMaxBytes()})
	return connect.NewResponse(&tierqv1.PutTenantResponse{}), err
}

func (s accessService) DeleteTenant(ctx context.Context, req *connect.Request[tierqv1.DeleteTenantRequest]) (*connect.Response[tierqv1.DeleteTenantResponse], error) {
	if err := validName("name", req.Msg.GetName()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&tierqv1.DeleteTenantResponse{}), s.backend.DeleteTenant(ctx, req.Msg.GetName())
}

func (s accessService) ListTokens(ctx context.Context, _ *connect.Request[tierqv1.ListTokensRequest]) (*connect.Response[tierqv1.ListTokensResponse], error) {
	ts, err := s.backend.ListTokens(ctx)
	if err != nil {
		return nil, err
	}
	out := &tierqv1.ListTokensResponse{}
	for _, t := range ts {
		out.Tokens = append(out.Tokens, &tierqv1.Token{Id: t.ID, Tenant: t.Tenant, Roles: t.Roles, Name: t.Name})
	}
	return connect.NewResponse(out), nil
}

func (s accessService) CreateToken(ctx context.Context, req *connect.Request[tierqv1.CreateTokenRequest]) (*connect.Response[tierqv1.CreateTokenResponse], error) {
	t := req.Msg.GetToken()
	id, text, err := s.backend.CreateToken(ctx, TokenInfo{Tenant: t.GetTenant(), Roles: t.GetRoles(), Name: t.GetName()})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&tierqv1.CreateTokenResponse{Id: id, Token: text}), nil
}

func (s accessService) RevokeToken(ctx context.Context, req *connect.Request[tierqv1.RevokeTokenRequest]) (*connect.Response[tierqv1.RevokeTokenResponse], error) {
	if req.Msg.GetId() == 0 {
		return nil, code.New(code.InvalidArgument, "id: name the token, as `tierq token list` shows it")
	}
	return connect.NewResponse(&tierqv1.RevokeTokenResponse{}), s.backend.RevokeToken(ctx, req.Msg.GetId())
}
