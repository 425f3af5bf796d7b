package api

import (
	"net/http"
	"strings"

	"connectrpc.com/connect"

	"github.com/tierq/tierq/queue/api/tierq/v1/tierqv1connect"
	"github.com/tierq/tierq/queue/code"
)

// Role is what a caller may do; a set of bits, of which admin includes produce and consume, and operator everything.
type Role uint8

const (
	RoleProduce  Role = 1
	RoleConsume  Role = 2
	RoleAdmin    Role = 4
	RoleOperator Role = 8
)

// Caller is the bearer of a token.
type Caller struct {
	Tenant string
	Roles  Role
}

// needed says which of the roles each call takes; any of them will do. A call that is not here takes an operator.
var needed = map[string]Role{
	tierqv1connect.QueueServicePublishProcedure:        RoleProduce,
	tierqv1connect.StreamServicePublishStreamProcedure: RoleProduce,
	tierqv1connect.AdminServiceLookupPublishProcedure:  RoleProduce,

	tierqv1connect.QueueServiceListQueuesProcedure:    RoleProduce | RoleConsume,
	tierqv1connect.QueueServiceDescribeQueueProcedure: RoleProduce | RoleConsume,
	tierqv1connect.QueueServiceLocateQueueProcedure:   RoleProduce | RoleConsume,
	tierqv1connect.StatusServiceFleetStatusProcedure:  RoleProduce | RoleConsume,

	tierqv1connect.StreamServiceConsumeProcedure:        RoleConsume,
	tierqv1connect.GroupServiceReceiveProcedure:         RoleConsume,
	tierqv1connect.GroupServiceAckProcedure:             RoleConsume,
	tierqv1connect.GroupServiceNackProcedure:            RoleConsume,
	tierqv1connect.GroupServiceReleaseProcedure:         RoleConsume,
	tierqv1connect.GroupServiceRejectProcedure:          RoleConsume,
	tierqv1connect.GroupServiceExtendProcedure:          RoleConsume,
	tierqv1connect.GroupServiceClaimIdleProcedure:       RoleConsume,
	tierqv1connect.GroupServiceListGroupsProcedure:      RoleConsume,
	tierqv1connect.GroupServiceListDeadLettersProcedure: RoleConsume,
	tierqv1connect.AdminServiceListConsumersProcedure:   RoleConsume,
	tierqv1connect.AdminServiceExplainGroupProcedure:    RoleConsume,
	tierqv1connect.AdminServiceListGrowthsProcedure:     RoleProduce | RoleConsume,
	tierqv1connect.AdminServiceListDelayedProcedure:     RoleConsume,
	tierqv1connect.AdminServiceBrowseProcedure:          RoleConsume,

	tierqv1connect.QueueServiceCreateQueueProcedure:        RoleAdmin,
	tierqv1connect.QueueServiceDeleteQueueProcedure:        RoleAdmin,
	tierqv1connect.GroupServiceCreateGroupProcedure:        RoleAdmin,
	tierqv1connect.GroupServiceDeleteGroupProcedure:        RoleAdmin,
	tierqv1connect.GroupServiceResetGroupProcedure:         RoleAdmin,
	tierqv1connect.GroupServiceMoveGroupProcedure:          RoleAdmin,
	tierqv1connect.GroupServiceRedriveDeadLettersProcedure: RoleAdmin,
	tierqv1connect.GroupServicePurgeDeadLettersProcedure:   RoleAdmin,
	tierqv1connect.AdminServicePurgeQueueProcedure:         RoleAdmin,
	tierqv1connect.AdminServiceConfigureQueueProcedure:     RoleAdmin,
	tierqv1connect.AdminServiceGrowQueueProcedure:          RoleAdmin,
	tierqv1connect.AdminServicePauseQueueProcedure:         RoleAdmin,
	tierqv1connect.AdminServiceResumeQueueProcedure:        RoleAdmin,
	tierqv1connect.AdminServiceConfigureGroupProcedure:     RoleAdmin,
	tierqv1connect.AdminServicePauseGroupProcedure:         RoleAdmin,
	tierqv1connect.AdminServiceResumeGroupProcedure:        RoleAdmin,
	tierqv1connect.AdminServiceCancelDelayedProcedure:      RoleAdmin,
	tierqv1connect.AdminServiceRescheduleDelayedProcedure:  RoleAdmin,
	tierqv1connect.StatusServiceShardDigestProcedure:       RoleAdmin,
}

// neededBy returns the role that a call takes, and its name.
func neededBy(procedure string) (Role, string) {
	switch r := needed[procedure]; r {
	case RoleProduce:
		return r, "produce"
	case RoleConsume:
		return r, "consume"
	case RoleProduce | RoleConsume:
		return r, "produce or consume"
	case RoleAdmin:
		return r, "admin"
	}
	return RoleOperator, "operator"
}

// Bearers finds who bears a token. The text is whatever a caller sent; it must not be logged.
type Bearers func(token string) (Caller, bool)

// Authorize lets pass to next what the bearer of the call's token may do, as a call of the bearer's tenant. An operator names another
// tenant with the header Tierq-Tenant. Nothing of a request is read before that.
func Authorize(bearers Bearers, onRefusal func(code.Code), next http.Handler) http.Handler {
	errs := connect.NewErrorWriter()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		caller, refused := authorize(bearers, r)
		if refused != nil {
			onRefusal(refused.Code)
			if errs.IsSupported(r) {
				_ = errs.Write(w, r, toConnect(refused))
				return
			}
			status := http.StatusUnauthorized
			if refused.Code == code.NotPermitted {
				status = http.StatusForbidden
			}
			http.Error(w, refused.Error(), status)
			return
		}
		next.ServeHTTP(w, r.WithContext(WithTenant(r.Context(), caller.Tenant)))
	})
}

func authorize(bearers Bearers, r *http.Request) (Caller, *code.Error) {
	scheme, token, ok := strings.Cut(r.Header.Get("Authorization"), " ")
	if !ok || !strings.EqualFold(scheme, "Bearer") {
		return Caller{}, code.New(code.NotAuthenticated, "this fleet wants a token: send it as `Authorization: Bearer TOKEN`, or give it to tierq with --token-file or TIERQ_TOKEN")
	}
	caller, ok := bearers(token)
	if !ok {
		return Caller{}, code.New(code.AuthFailed, "the token is unknown or was revoked: `tierq token create` makes another one")
	}
	role, name := neededBy(r.URL.Path)
	if caller.Roles&RoleAdmin != 0 {
		caller.Roles |= RoleProduce | RoleConsume
	}
	operator := caller.Roles&RoleOperator != 0
	if caller.Roles&role == 0 && !operator {
		return Caller{}, code.New(code.NotPermitted, "the token lacks the role for this: %s", name)
	}
	if tenant := r.Header.Get(tenantHeader); tenant != "" && tenant != caller.Tenant {
		if !operator {
			return Caller{}, code.New(code.NotPermitted, "the token is for another tenant: only an operator's names one")
		}
		caller.Tenant = tenant
	}
	return caller, nil
}
