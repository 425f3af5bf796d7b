# Targets of TierQ. `make` alone lists them.
.DEFAULT_GOAL := help

GO ?= go
# The packages whose races would lose messages; their tests run under the race detector too.
CORE := ./queue ./queue/store ./queue/replica ./queue/home ./queue/client ./wal ./witness ./swarm ./host/catalog ./host/peer ./host/event ./host/faultnet ./host/raftnet ./node/api ./node/outbox

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

.PHONY: build
build: ## build ./tierq
	$(GO) build -o tierq ./cmd/tierq

.PHONY: test
test: ## all tests, as CI runs them
	$(GO) test ./...

.PHONY: check
check: fmt vet staticcheck generated tidy arch race ## what must hold for every commit (tests included)
	$(GO) test -short ./...

.PHONY: fmt
fmt: ## fail on files that gofmt would change
	@bad=$$(gofmt -l $$(git ls-files '*.go')); test -z "$$bad" || { echo "not gofmt-clean:"; echo "$$bad"; exit 1; }

.PHONY: vet
vet: ## go vet
	$(GO) vet ./...
	$(GO) vet -tags generate ./queue/api/gen

.PHONY: staticcheck
staticcheck: ## staticcheck, at the version of go.mod
	$(GO) tool staticcheck ./...
	$(GO) tool staticcheck -tags generate ./queue/api/gen

.PHONY: generated
generated: ## fail unless the generated code is fresh
	$(GO) run -tags generate ./queue/api/gen -check

.PHONY: tidy
tidy: ## fail unless go.mod and go.sum are tidy
	$(GO) mod tidy -diff

.PHONY: arch
arch: ## the arrows between the packages
	$(GO) test ./test/arch

.PHONY: race
race: ## the core packages' short tests under the race detector
	$(GO) test -race -short $(CORE)

# The programs that tests build and start are built so too; one in which a race is found ends, and its test with it.
.PHONY: race-all
race-all: ## all tests, the fault scenarios and drills among them, under the race detector; half an hour, never in CI
	GOFLAGS=-race GORACE=halt_on_error=1 $(GO) test -count=1 -timeout=1h ./...
	GOFLAGS=-race GORACE=halt_on_error=1 $(GO) test -count=1 -timeout=1h -run Fault ./test/fault -args -rounds=2 -drills

.PHONY: fault-quick
fault-quick: ## kill -9 scenarios with fixed seeds and the drills of the runbook, on real processes
	$(GO) test -count=1 -run Fault ./test/fault -args -rounds=2 -drills

.PHONY: fault
fault: ## every fault scenario, the drills and the measurements, with a table of their accounts; an hour. SEED=… repeats one
	$(GO) test -count=1 -timeout=3h -run Fault -v ./test/fault -args -rounds=20 -drills -failover=20 -rolling=200 -idle=1000 -seed=$(SEED)
	$(MAKE) histories

# A seed of its own for each run of fault; it is printed with the accounts.
SEED ?= $(shell date +%s)

.PHONY: failover
failover: ## what 20 kills and planned moves cost a publisher and a consumer
	$(GO) test -count=1 -timeout=1h -run TestFaultFailover -v ./test/fault -args -failover=20

.PHONY: idle
idle: ## memory and CPU of a thousand idle partitions, in both profiles; on a quiet machine
	$(GO) test -count=1 -timeout=1h -run TestFaultIdleShards -v ./test/fault -args -idle=1000

.PHONY: rolling
rolling: ## a rolling restart of a fleet of 200 partitions under load; on a quiet machine
	$(GO) test -count=1 -timeout=1h -run TestFaultRollingMany -v ./test/fault -args -rolling=200

.PHONY: soak
soak: ## long fault runs with fresh seeds; never in CI
	$(GO) test -count=1 -timeout=4h -run Fault ./test/fault -args -rounds=100

.PHONY: histories
histories: ## a minute of a broken network with a fresh seed; publishes and acks are checked for linearizability
	$(GO) test -count=1 -run TestHistories -v ./node -args -history=60s -history-seed=0

.PHONY: scale
scale: ## ten million messages of backlog, a thousand groups, a thousand consumers; minutes, on a quiet machine
	$(GO) test -count=1 -timeout=1h -run Scale -v ./test/fault -args -scale=10000000

.PHONY: bench
bench: ## the benchmarks; prints ratios within one run
	$(GO) test -run '^$$' -bench . -benchmem ./queue ./queue/home ./wal ./node

.PHONY: bench-peers
bench-peers: ## TierQ beside JetStream, and beside RabbitMQ and Redis if installed (Debian: rabbitmq-server, redis-server), in one run
	cd test/bench && $(GO) run . -rounds 3

.PHONY: fuzz
fuzz: ## every decoder for 20 s each
	@for p in $$($(GO) list ./...); do for f in $$($(GO) test -list '^Fuzz' $$p | grep '^Fuzz'); do \
		$(GO) test -run '^$$' -fuzz "^$$f$$" -fuzztime 20s $$p || exit 1; done; done
