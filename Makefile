# Two commands do all the set-up on a fresh machine with Rust, Go and make: `make demo` and `make test`.

WASM_DIR := target/wasm32-wasip2/guest
GUESTS := hello probe report-job-v2
PLUGINS := email-request report-job
CARGO_DENY_VERSION := 0.20.2

.DEFAULT_GOAL := help
.PHONY: help setup build plugins guests control-plane crds test unit fuzz integration test-faults soak bench bench-size peers demo clippy format deny

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: ## Install what rust-toolchain.toml names
	@rustup show active-toolchain >/dev/null 2>&1 || rustup toolchain install
	@rustup target list --installed | grep -qx wasm32-wasip2 || rustup target add wasm32-wasip2

build: ## Build host, tests and demo back ends (the first time: about 8 minutes)
	cargo build --workspace --all-targets --locked

plugins: setup ## Build the shipped plugins into deploy/plugins
	cargo build --locked --profile guest --target wasm32-wasip2 $(PLUGINS:%=-p %)
	@for plugin in $(PLUGINS); do \
		cp "$(WASM_DIR)/$$(echo $$plugin | tr - _).wasm" "deploy/plugins/$$plugin.wasm"; \
		printf '%-28s %7d bytes\n' "deploy/plugins/$$plugin.wasm" "$$(wc -c < deploy/plugins/$$plugin.wasm)"; \
	done

guests: plugins ## Build the components that the tests use
	cargo build --locked --profile guest --target wasm32-wasip2 $(GUESTS:%=-p %)

control-plane: build ## Find or build etcd, kube-apiserver and kube-controller-manager (the first time: about 8 minutes)
	target/debug/berth dev --prepare

# The templates that plugins begin with, and what ships. Sizes in bytes.
bench-size: guests ## Print the size of each guest, raw and compressed
	@for guest in $(GUESTS) $(PLUGINS); do \
		file="$(WASM_DIR)/$$(echo $$guest | tr - _).wasm"; \
		printf '%-16s %8d raw %8d gzip\n' "$$guest" "$$(wc -c < $$file)" "$$(gzip -9 -c $$file | wc -c)"; \
	done

crds: ## Write the CRDs of the shipped plugins to deploy/crds
	UPDATE_CRDS=1 cargo test --locked -p email-request -p report-job crd

test: guests unit integration ## Run the short set of tests

# Always the whole workspace: with other packages selected, Cargo would build the dependencies once more with other features.
unit: guests build
	cargo test --workspace --locked --lib --bins --examples
	cargo test --workspace --locked --doc
	cargo test --workspace --locked --test plugin --test allocations

FUZZ_SECONDS ?= 600

# The end of the time is a success; whatever is found is written to proptest-regressions and fails.
fuzz: build ## Try made-up packages, claims and outcomes for FUZZ_SECONDS
	PROPTEST_CASES=100000000 timeout $(FUZZ_SECONDS) cargo test --workspace --locked --lib boundary || [ $$? -eq 124 ]

# Modules whose tests keep a core and more busy: one at a time, as beside others they would cost hosts their Lease.
HEAVY := explore:: malformed:: outage:: scale:: soak::

# The tests of a running host wait more than they compute, so more of them run at once than there are cores; not so many that an API
# server without a core to run on costs a host its Lease.
integration: guests control-plane
	cargo test --workspace --locked --test controlplane
	cargo test --workspace --locked --test integration -- --test-threads=4 $(HEAVY:%=--skip %)
	cargo test --workspace --locked --test integration -- --test-threads=1 $(HEAVY)

# All scenarios at once; they share the four runs that there are at a time. Then the tests whose times and numbers the short set scales down.
test-faults: guests control-plane ## Try every fault at every effect of a host, and all other faults at full length
	BERTH_FAULTS=all cargo test --workspace --locked --test integration -- --test-threads=8 --nocapture explore::
	BERTH_TEST_FULL=1 cargo test --workspace --locked --test integration -- --test-threads=4 --skip explore:: --skip soak::

SOAK_SECONDS ?= 1200

soak: guests control-plane ## Churn objects, plugins, leaders and back ends for SOAK_SECONDS; nothing may be lost or grow
	BERTH_SOAK_SECONDS=$(SOAK_SECONDS) cargo test --workspace --locked --test integration -- --nocapture soak

PEERS := tests/bench/peers
BENCH := target/bench

# What operators would ship: optimised, and each peer by its own tools.
peers: ## Build what Berth is measured beside
	cargo build --release --locked --manifest-path $(PEERS)/kube-rs/Cargo.toml --target-dir $(BENCH)/kube-rs
	cd $(PEERS)/controller-runtime && go build -trimpath -ldflags '-s -w' -o ../../../../$(BENCH)/controller-runtime .
	@test -x $(BENCH)/kopf/bin/python || python3 -m venv $(BENCH)/kopf
	$(BENCH)/kopf/bin/pip install --quiet --disable-pip-version-check --requirement $(PEERS)/kopf/requirements.txt

bench: guests control-plane peers ## Measure Berth beside its peers, part by part (ONLY=P3 for one, QUICK=1 for a look)
	cargo build --release --locked --package berth-host --package berth-tests --bin berth --bin bench
	BENCH_QUICK=$(QUICK) target/release/bench $(if $(ONLY),--only $(ONLY))

demo: guests build ## Show the main job on a local cluster; KEEP=1 leaves it up
	@target/debug/demo $(if $(KEEP),--keep)

# As the compiler's wrapper, clippy needs no second build of the dependencies, which `cargo clippy` would make in check mode.
clippy: ## Lint, with warnings denied
	RUSTC_WORKSPACE_WRAPPER="$$(rustup which clippy-driver)" CLIPPY_ARGS="-Dwarnings__CLIPPY_HACKERY__" \
		cargo build --workspace --all-targets --locked

format: ## Format everything
	cargo fmt --all

deny: ## Check licences, bans and sources of the dependencies
	@cargo deny --version 2>/dev/null | grep -q '$(CARGO_DENY_VERSION)' || cargo install --locked cargo-deny@$(CARGO_DENY_VERSION)
	cargo deny --locked check bans licenses sources
