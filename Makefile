# Everything a person or a build machine does with this repository. Settings may be given as VARIABLE=value.

SHELL := /bin/bash

# Where `make run` puts the node, and what it is made of.
RUN ?= $(CURDIR)/run
DRIVES ?= 6
DRIVE_SIZE ?= 2G
PROFILE ?= 4+2

# What `make sim` plays.
SEEDS ?= 1000
FIRST ?= 1
JOBS ?= $(shell nproc)

# Build machines keep caches below the home directory between jobs.
ifeq ($(CI),true)
export CARGO_TARGET_DIR ?= $(HOME)/.cache/forebay/target
export CARGO_INCREMENTAL ?= 0
endif
TARGET := $(abspath $(or $(CARGO_TARGET_DIR),target))

# What users run and what is measured is a release. `make test` builds everything in half the time: `make test
# BUILD=release` does not.
BUILD ?= release
test lint: BUILD = quick
export FOREBAY_BUILD = $(BUILD)
export FOREBAY ?= $(TARGET)/$(BUILD)/forebay
export FOREBAY_XTASK ?= $(TARGET)/$(BUILD)/xtask

.PHONY: help run stop build check test nightly test-long crash conformance sim mutations fuzz soak cluster cluster-faults takeovers upgrade planner bench bench-s3 bench-cluster bench-placement bench-tier tier lint deps packages

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

run: packages build ## build and start a node in ./run, mounted at ./run/mnt
	@tests/run-node.sh start "$(RUN)" "$(DRIVES)" "$(DRIVE_SIZE)" "$(PROFILE)"

stop: ## stop the node of `make run`
	@tests/run-node.sh stop "$(RUN)"

build: ## build the binaries, as users run them
	cargo build --release --package forebay --package xtask

check: ## format, tidy, clippy and tests of the crates that changed; BASE=main to compare with
	@tests/check.sh $(BASE)

test: deps ## the default suite; the last line counts what passed and failed. JOBS=4 suites at a time
	@tests/run.sh

nightly: ## everything at full length, many hours; ends with one table
	@tests/nightly.sh

test-long: deps ## the same with larger trees, more operations and more crashes
	@tests/run.sh --long

crash: deps build ## SIGKILL, power cuts, bad and full disks: ROUNDS=240 in all, SEED=1
	@FOREBAY_CRASH_ROUNDS=$(or $(ROUNDS),240) FOREBAY_TEST_SEED=$(or $(SEED),1) tests/run.sh crash s3-crash full

conformance: build ## real programs at full length, about 40 minutes; PARTS="fsx fio" for some of them
	@tests/deps.sh long
	@tests/run.sh --conformance $(PARTS)

fuzz: ## every decoder under libFuzzer: SECONDS=600 each, two at a time; TARGETS="log batch" for some of them
	@tests/deps.sh long
	@tests/fuzz.sh $(or $(SECONDS),600) $(TARGETS)

soak: deps build ## mixed load and what drifts: MINUTES=60
	@tests/soak.sh $(or $(MINUTES),60)

sim: ## simulated nodes with crashes and faults, by the hundred; SEEDS=10000 FIRST=1 JOBS=2
	cargo build --release --package sim
	@$(TARGET)/release/sim $(FIRST) $(SEEDS) $(JOBS)

cluster: deps build ## three machines at full length: each loss beside two minutes of work
	@tests/run.sh --long cluster

cluster-faults: deps build ## random faults of machines, processes, drives and the network under mixed load: ROUNDS=50 SEED=1
	@FOREBAY_FAULT_ROUNDS=$(or $(ROUNDS),50) FOREBAY_TEST_SEED=$(or $(SEED),1) FOREBAY_SUITE_LIMIT_S=36000 tests/run.sh cluster-faults

takeovers: deps build ## how long others wait when the machine with the metadata stops or dies, as a table, half an hour: ROUNDS=20
	@FOREBAY_TAKEOVERS=$(or $(ROUNDS),20) FOREBAY_SUITE_LIMIT_S=14400 tests/run.sh takeovers

upgrade: deps build ## node after node gets another program under load, and goes back: from FROM=commit to this one, and on to a next format level
	@programs=$$(tests/upgrade/build.sh $(or $(FROM),035707d)) && set -- $$programs && \
		FOREBAY_OLD=$$1 FOREBAY_NEXT=$$2 FOREBAY_SUITE_LIMIT_S=3600 tests/run.sh upgrade

planner: ## placement: clusters that grow, shrink and break, with the times for 10,000 drives; CLUSTERS=1000
	@FOREBAY_PLANNER_CLUSTERS=$(or $(CLUSTERS),1000) FOREBAY_PLANNER_LARGE=1 cargo test --release -p layout --test suite planner -- --nocapture

mutations: ## breaks the code on purpose in many ways, which the simulation must find: about an hour; WORD=I10 for some
	@tests/mutations.sh $(WORD)

bench: build ## speed beside ext4 and an empty FUSE filesystem; BENCH="--quick" for a short one
	@tests/deps.sh long
	@tests/bench.sh $(BENCH)

bench-s3: build ## the S3 endpoint beside MinIO and plain files, about ten minutes; BENCH="--quick" for two
	@tests/deps.sh bench
	@tests/bench-s3.sh $(BENCH)

bench-cluster: deps build ## three machines with drives and one without beside a single node, costs per operation, about ten minutes; BENCH="--quick" for three
	@tests/bench-cluster.sh $(BENCH)

bench-placement: deps build ## what `--placement local` changes where the network is slower than the drives, two minutes; BENCH="--quick" for one
	@tests/bench-placement.sh $(BENCH)

bench-tier: build ## tiering beside what its store can do, some 25 minutes; BENCH="--quick" for four
	@tests/deps.sh bench
	@tests/bench-tier.sh $(BENCH)

tier: deps build ## tiering to several S3 servers, and through a proxy that harms requests, over an hour; STORES="minio:0 minio:10" for some
	@tests/deps.sh tier
	@tests/tier.sh $(STORES)

lint: ## formatting, clippy, the rules of STYLE.md
	@tests/run.sh format lint

packages:
	@tests/deps.sh packages

deps: ## install what the tests need, if it is missing
	@tests/deps.sh
