package clienttest

import (
	"context"
	"reflect"

	"connectrpc.com/connect"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/code"
)

// Answer sets what every host answers to one administrative call, which its request's type names.
func Answer[Req, Res any](f *Fleet, answer func(*Req) (*Res, error)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.answers == nil {
		f.answers = map[reflect.Type]any{}
	}
	f.answers[reflect.TypeFor[Req]()] = answer
}

// adminView is the administrative service of one host: it answers as the test has said.
type adminView struct{ f *Fleet }

func answer[Req, Res any](f *Fleet, r *connect.Request[Req]) (*connect.Response[Res], error) {
	f.mu.Lock()
	set, ok := f.answers[reflect.TypeFor[Req]()].(func(*Req) (*Res, error))
	f.mu.Unlock()
	if !ok {
		return nil, refuse(code.Internal, "the test has set no answer to this")
	}
	res, err := set(r.Msg)
	if e, ok := err.(*code.Error); ok {
		return nil, refuse(e.Code, "%s", e.Text)
	}
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(res), nil
}

func (v adminView) PurgeQueue(_ context.Context, r *connect.Request[tierqv1.PurgeQueueRequest]) (*connect.Response[tierqv1.PurgeQueueResponse], error) {
	return answer[tierqv1.PurgeQueueRequest, tierqv1.PurgeQueueResponse](v.f, r)
}

func (v adminView) ConfigureQueue(_ context.Context, r *connect.Request[tierqv1.ConfigureQueueRequest]) (*connect.Response[tierqv1.ConfigureQueueResponse], error) {
	return answer[tierqv1.ConfigureQueueRequest, tierqv1.ConfigureQueueResponse](v.f, r)
}

func (v adminView) GrowQueue(_ context.Context, r *connect.Request[tierqv1.GrowQueueRequest]) (*connect.Response[tierqv1.GrowQueueResponse], error) {
	return answer[tierqv1.GrowQueueRequest, tierqv1.GrowQueueResponse](v.f, r)
}

func (v adminView) ListGrowths(_ context.Context, r *connect.Request[tierqv1.ListGrowthsRequest]) (*connect.Response[tierqv1.ListGrowthsResponse], error) {
	v.f.mu.Lock()
	_, set := v.f.answers[reflect.TypeFor[tierqv1.ListGrowthsRequest]()]
	v.f.mu.Unlock()
	if !set { // nothing grows
		return connect.NewResponse(&tierqv1.ListGrowthsResponse{}), nil
	}
	return answer[tierqv1.ListGrowthsRequest, tierqv1.ListGrowthsResponse](v.f, r)
}

func (v adminView) PauseQueue(_ context.Context, r *connect.Request[tierqv1.PauseQueueRequest]) (*connect.Response[tierqv1.PauseQueueResponse], error) {
	return answer[tierqv1.PauseQueueRequest, tierqv1.PauseQueueResponse](v.f, r)
}

func (v adminView) ResumeQueue(_ context.Context, r *connect.Request[tierqv1.ResumeQueueRequest]) (*connect.Response[tierqv1.ResumeQueueResponse], error) {
	return answer[tierqv1.ResumeQueueRequest, tierqv1.ResumeQueueResponse](v.f, r)
}

func (v adminView) ConfigureGroup(_ context.Context, r *connect.Request[tierqv1.ConfigureGroupRequest]) (*connect.Response[tierqv1.ConfigureGroupResponse], error) {
	return answer[tierqv1.ConfigureGroupRequest, tierqv1.ConfigureGroupResponse](v.f, r)
}

func (v adminView) PauseGroup(_ context.Context, r *connect.Request[tierqv1.PauseGroupRequest]) (*connect.Response[tierqv1.PauseGroupResponse], error) {
	return answer[tierqv1.PauseGroupRequest, tierqv1.PauseGroupResponse](v.f, r)
}

func (v adminView) ResumeGroup(_ context.Context, r *connect.Request[tierqv1.ResumeGroupRequest]) (*connect.Response[tierqv1.ResumeGroupResponse], error) {
	return answer[tierqv1.ResumeGroupRequest, tierqv1.ResumeGroupResponse](v.f, r)
}

func (v adminView) ListConsumers(_ context.Context, r *connect.Request[tierqv1.ListConsumersRequest]) (*connect.Response[tierqv1.ListConsumersResponse], error) {
	return answer[tierqv1.ListConsumersRequest, tierqv1.ListConsumersResponse](v.f, r)
}

func (v adminView) ExplainGroup(_ context.Context, r *connect.Request[tierqv1.ExplainGroupRequest]) (*connect.Response[tierqv1.ExplainGroupResponse], error) {
	return answer[tierqv1.ExplainGroupRequest, tierqv1.ExplainGroupResponse](v.f, r)
}

func (v adminView) ListDelayed(_ context.Context, r *connect.Request[tierqv1.ListDelayedRequest]) (*connect.Response[tierqv1.ListDelayedResponse], error) {
	return answer[tierqv1.ListDelayedRequest, tierqv1.ListDelayedResponse](v.f, r)
}

func (v adminView) CancelDelayed(_ context.Context, r *connect.Request[tierqv1.CancelDelayedRequest]) (*connect.Response[tierqv1.ChangeDelayedResponse], error) {
	return answer[tierqv1.CancelDelayedRequest, tierqv1.ChangeDelayedResponse](v.f, r)
}

func (v adminView) RescheduleDelayed(_ context.Context, r *connect.Request[tierqv1.RescheduleDelayedRequest]) (*connect.Response[tierqv1.ChangeDelayedResponse], error) {
	return answer[tierqv1.RescheduleDelayedRequest, tierqv1.ChangeDelayedResponse](v.f, r)
}

func (v adminView) Browse(_ context.Context, r *connect.Request[tierqv1.BrowseRequest]) (*connect.Response[tierqv1.BrowseResponse], error) {
	return answer[tierqv1.BrowseRequest, tierqv1.BrowseResponse](v.f, r)
}

func (v adminView) LookupPublish(_ context.Context, r *connect.Request[tierqv1.LookupPublishRequest]) (*connect.Response[tierqv1.LookupPublishResponse], error) {
	return answer[tierqv1.LookupPublishRequest, tierqv1.LookupPublishResponse](v.f, r)
}
