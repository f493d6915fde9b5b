#!/usr/bin/env bash
# The exactly-once harness (chaos/): clients that retry, a gremlin that breaks connections, sessions and the server, and
# a checker. The last line is the verdict; the status is not 0 where it is not "HOLDS".
#
#   REQUESTS=20000   intentions of the clients          FAULTS=100   how often something breaks
#   CLIENTS=16       how many at once                   SEED=N       repeats a run's intentions and faults
#   FSYNC=1          clients flush their journal to the disk before they send
#   NAIVE=1          debits by a function that does not claim the key: to see what the checker finds
#
# The clients' journals and the server's log are left in target/chaos until the next run.
# A seed fixes what the clients want, what breaks, and after how many answers; not how the operating system interleaves it.
DEFAULT_PG=18
# shellcheck source=tools/build.sh
. "$(dirname "${BASH_SOURCE[0]}")/build.sh"

setup
major=${MAJORS##* }
mkdir -p "$TARGET/test-log"
log=$TARGET/test-log/$major-chaos-build.log
build_and_install "$major" >"$log" 2>&1 || { tail -n 50 "$log"; die "the extension could not be built"; }
cargo build --quiet -p chaos
WORK=$(mktemp -d "${TMPDIR:-/tmp}/ir.XXXXXX")
chmod 755 "$WORK"
trap 'trap "" INT TERM; tools/cluster.sh stop "$WORK" immediate' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
PGBIN=$("$(clone_pg_config "$major")" --bindir) PG_MAJOR=$major CLUSTER_SH=$ROOT/tools/cluster.sh TMPDIR=$WORK KEEP=$TARGET/chaos \
    "$TARGET/debug/chaos"
