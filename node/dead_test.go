package node

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
	"github.com/tierq/tierq/queue/home"
)

// Only what is no dead letter, or not free, is skipped: where nothing was decided, or it is not known what, the caller is told so, and
// goes on from there.
func TestDeadLettersLeftUndecided(t *testing.T) {
	one := func(c code.Code, e code.Effect) home.DeadResult {
		return home.DeadResult{ItemResult: home.ItemResult{Code: c, Effect: e}}
	}
	do := func(results ...home.DeadResult) (*deadTask, error) {
		task := &deadTask{d: &desk{}, call: func(*home.Keeper, context.Context, string, []queue.Address, int) ([]home.DeadResult, error) {
			return results, nil
		}}
		return task, task.do(t.Context(), make([]queue.Address, len(results)))
	}
	ok := one(code.OK, code.EffectDone)
	task, err := do(ok, one(code.UnknownMessage, code.EffectNone), one(code.DeadExporting, code.EffectNone), one(code.Skipped, code.EffectNone))
	require.NoError(t, err)
	require.Equal(t, 1, task.reply.Done)
	require.Equal(t, 3, task.reply.Skipped)

	task, err = do(ok, one(code.StaleOwner, code.EffectNone), one(code.QuorumLost, code.EffectMaybe))
	require.Equal(t, 1, task.reply.Done)
	require.Zero(t, task.reply.Skipped)
	var e *code.Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, code.EffectMaybe, e.Effect)
	_, err = do(one(code.StaleOwner, code.EffectNone))
	require.ErrorAs(t, err, &e)
	require.Equal(t, code.StaleOwner, e.Code)
}
