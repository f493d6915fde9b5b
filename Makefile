# Every target is a script under tools/ that can be run by itself; `make help` says what there is.
SHELL := /bin/bash
export PG PG_CONFIG REQUESTS FAULTS CLIENTS SEED FSYNC NAIVE

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo '  PG="14 18"             the PostgreSQL majors (default: all that are supported; try and lint: the newest)'
	@echo '  PG_CONFIG=FILE         an installed server instead of the downloaded one; try and test install a debug build into it'

setup: ## get this machine ready (the other targets do it too)
	@tools/setup.sh

try: ## a throw-away server with the extension, and what the extension does, told in psql
	@tools/try.sh
psql: ## psql on the server of `make try`
	@tools/try.sh psql
stop: ## stop and remove the server of `make try`
	@tools/try.sh stop

test: ## all tests on all majors
	@tools/test.sh
test-unit: ## plain Rust tests, without a server
	@tools/test.sh unit
test-pg: ## #[pg_test]s, inside a server
	@tools/test.sh pg
test-regress: ## tests/pg_regress, SQL and its expected output
	@tools/test.sh regress
test-isolation: ## tests/isolation, concurrent sessions
	@tools/test.sh isolation
test-client: ## tests/*.rs and chaos/tests, programs with clusters of their own
	@tools/test.sh client
test-upgrade: ## pg_upgrade to the newest of the majors from each of the others
	@tools/test.sh upgrade
test-bench: ## that the contestants of `make bench` compute the same, in a short run of it
	@tools/test.sh bench
chaos: ## clients that retry while everything breaks: REQUESTS=1000000 FAULTS=1000 SEED=1 (see tools/chaos.sh)
	@tools/chaos.sh

bench: ## this extension beside what one would use instead: docs/performance.md; half an hour, QUICK=1 for a smoke run
	@tools/bench.sh performance
bench-purge: ## what a purge costs, and what it costs the debits meanwhile: docs/purge.md; QUICK=1 for a smoke run
	@tools/bench.sh purge

format: ## format the source
	@tools/build.sh format
lint: ## formatting and clippy
	@tools/build.sh lint

install: ## release build into an existing server: PG_CONFIG=...
	@tools/build.sh install
package: ## release build as a tree to copy to a server: PG_CONFIG=...
	@tools/build.sh package

clean: ## remove this clone's builds, servers and `make try`
	@tools/build.sh clean

.PHONY: help setup try psql stop test test-unit test-pg test-regress test-isolation test-client test-upgrade test-bench chaos bench bench-purge format lint install package clean
