package api

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/code"
)

// operatorsOnly are the calls that are meant to take an operator. A call that is neither here nor in needed was forgotten.
var operatorsOnly = map[string]bool{"/tierq.v1.StatusService/BenchPropose": true}

// Whole services for operators.
var operatorServices = map[protoreflect.FullName]bool{"tierq.v1.FleetService": true, "tierq.v1.SnapshotService": true, "tierq.v1.AccessService": true}

// Every call has a role, and each role lets through what it should, of every call there is.
func TestEveryCallHasARole(t *testing.T) {
	_ = tierqv1.File_tierq_v1_access_proto
	roles := map[string]Caller{
		"produce": {"acme", RoleProduce}, "consume": {"acme", RoleConsume}, "admin": {"acme", RoleAdmin}, "operator": {"default", RoleOperator},
	}
	calls := 0
	protoregistry.GlobalFiles.RangeFilesByPackage("tierq.v1", func(f protoreflect.FileDescriptor) bool {
		for i := range f.Services().Len() {
			s := f.Services().Get(i)
			for j := range s.Methods().Len() {
				procedure := "/" + string(s.FullName()) + "/" + string(s.Methods().Get(j).Name())
				calls++
				role := needed[procedure]
				require.NotEqual(t, role == 0, !operatorsOnly[procedure] && !operatorServices[s.FullName()], "%s has no role, or two", procedure)
				for name, caller := range roles {
					may := role&caller.Roles != 0 || caller.Roles == RoleOperator || caller.Roles == RoleAdmin && role != 0
					require.Equal(t, may, passes(t, caller, procedure), "%s with %s", procedure, name)
				}
			}
		}
		return true
	})
	require.Greater(t, calls, 50)
	for procedure := range needed {
		require.False(t, operatorsOnly[procedure], procedure)
	}
}

func passes(t *testing.T, caller Caller, procedure string) bool {
	t.Helper()
	passed := false
	h := Authorize(func(token string) (Caller, bool) { return caller, token == "good" }, func(code.Code) {}, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		passed = true
		require.Equal(t, caller.Tenant, TenantOf(r.Context()))
	}))
	r := httptest.NewRequest(http.MethodPost, procedure, nil)
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Authorization", "Bearer good")
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	if !passed {
		require.Equal(t, http.StatusForbidden, w.Code)
		require.Contains(t, w.Body.String(), "NOT_PERMITTED")
	}
	return passed
}

// What is no good token is told so, and never repeated.
func TestBadTokens(t *testing.T) {
	next := http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("it passed") })
	var seen []code.Code
	h := Authorize(func(token string) (Caller, bool) { return Caller{"acme", RoleAdmin}, token == "good" }, func(c code.Code) { seen = append(seen, c) }, next)
	for _, c := range []struct {
		header, tenant string
		want           code.Code
		status         int
	}{
		{"", "", code.NotAuthenticated, http.StatusUnauthorized},
		{"Basic c2VjcmV0", "", code.NotAuthenticated, http.StatusUnauthorized},
		{"Bearer secret", "", code.AuthFailed, http.StatusUnauthorized},
		{"Bearer good", "other", code.NotPermitted, http.StatusForbidden},
	} {
		seen = nil
		r := httptest.NewRequest(http.MethodPost, "/tierq.v1.QueueService/ListQueues", nil)
		r.Header.Set("Content-Type", "application/json")
		if c.header != "" {
			r.Header.Set("Authorization", c.header)
		}
		if c.tenant != "" {
			r.Header.Set(tenantHeader, c.tenant)
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		require.Equal(t, []code.Code{c.want}, seen, c.header)
		require.Equal(t, c.status, w.Code, c.header)
		require.NotContains(t, w.Body.String(), "secret")
	}
}

// Whoever asks in another protocol than those of the API gets the status alone.
func TestRefusalsOverPlainHTTP(t *testing.T) {
	h := Authorize(func(token string) (Caller, bool) { return Caller{"acme", RoleProduce}, token == "good" }, func(code.Code) {}, http.NotFoundHandler())
	for header, want := range map[string]int{"": http.StatusUnauthorized, "Bearer bad": http.StatusUnauthorized, "Bearer good": http.StatusForbidden} {
		r := httptest.NewRequest(http.MethodGet, "/metrics", nil)
		r.Header.Set("Authorization", header)
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		require.Equal(t, want, w.Code, header)
	}
}
