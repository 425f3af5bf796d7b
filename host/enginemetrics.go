package host

import (
	"bytes"
	"slices"
	"strings"

	"github.com/lni/dragonboat/v4"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// EngineGatherer returns the Raft engine's own series (dragonboat_*), which are one set for the process. All are
// untyped, and a counter of a removed replica stays.
func EngineGatherer() prometheus.Gatherer { return prometheus.GathererFunc(gatherEngine) }

func gatherEngine() ([]*dto.MetricFamily, error) {
	var text bytes.Buffer
	dragonboat.WriteHealthMetrics(&text)
	parser := expfmt.NewTextParser(model.LegacyValidation)
	byName, err := parser.TextToMetricFamilies(&text)
	if err != nil {
		return nil, err
	}
	families := make([]*dto.MetricFamily, 0, len(byName))
	for name, f := range byName {
		if strings.HasPrefix(name, "dragonboat_") {
			families = append(families, f)
		}
	}
	slices.SortFunc(families, func(a, b *dto.MetricFamily) int { return strings.Compare(a.GetName(), b.GetName()) })
	return families, nil
}
