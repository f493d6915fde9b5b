#!/usr/bin/env bash
# The tests, a rung a line, on every major that is asked for (PG="14 18", default all; or PG_CONFIG).
#
#   test.sh [unit] [pg] [regress] [isolation] [client] [upgrade] [bench]      default: all of them
#
#   unit       plain #[test]s under src/, no server; once, built for the newest major
#   pg         #[pg_test]s, inside a server
#   regress    tests/pg_regress: SQL and what it must print, run by PostgreSQL's own pg_regress
#   isolation  tests/isolation: several sessions, run by PostgreSQL's own pg_isolation_regress
#   client     tests/*.rs and chaos/tests: programs that start clusters of their own (see tests/cluster.rs)
#   upgrade    tests/pg_upgrade.rs: pg_upgrade to the newest of these majors from each of the others; once
#   bench      a short run of bench/performance.py, that all contestants compute the same; once, on the newest of these majors
#
# Full logs are in target/test-log. The last line is the sum: N passed, N failed, N skipped.
# shellcheck source=tools/build.sh
. "$(dirname "${BASH_SOURCE[0]}")/build.sh"

LOGS=$TARGET/test-log
WORK=$(mktemp -d "${TMPDIR:-/tmp}/ir.XXXXXX") # everything that runs lies in here; a short name, for the sockets in it
chmod 755 "$WORK"
LIMIT=1200 # seconds for a rung, so that a test that waits for ever fails instead of everything hanging
PASSED=0 FAILED=0 SKIPPED=0
CHILD=

clean_up() {
    trap '' INT TERM
    set +e # whatever fails, the rest has to go too
    if [ -n "$CHILD" ]; then kill -TERM -- "-$CHILD" 2>/dev/null && wait "$CHILD" 2>/dev/null; fi
    for data in "$WORK"/pgrx/*/; do # pgrx puts its socket elsewhere, under the name of its data directory
        [ ! -d "$data" ] || rm -rf "/tmp/pgrx-test-sockets-$(basename "$data")"
    done
    tools/cluster.sh stop "$WORK" immediate
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# logged LOG CMD ...: runs CMD as a process group of its own, so that clean_up can end all of it.
logged() {
    local log=$1 status=0
    shift
    set -m
    "$@" >>"$log" 2>&1 </dev/null &
    CHILD=$!
    set +m
    wait "$CHILD" || status=$?
    CHILD=
    return $status
}

# report MAJOR RUNG PASSED FAILED SKIPPED LOG: one line, and what went wrong.
report() {
    local passed=$3 failed=$4 skipped=$5 note=
    if [ $((passed + failed)) = 0 ]; then
        failed=1 note=": NO TEST RAN"
    fi
    PASSED=$((PASSED + passed)) FAILED=$((FAILED + failed)) SKIPPED=$((SKIPPED + skipped))
    printf 'PostgreSQL %-3s %-10s %3d passed %3d failed %3d skipped %5d s%s\n' \
        "$1" "$2" "$passed" "$failed" "$skipped" $((SECONDS - STARTED)) "$note"
    if [ "$failed" != 0 ]; then
        echo "---- the end of $6"
        tail -n 100 "$6" 2>/dev/null || true
        echo "----"
    fi
}

# cargo_rung MAJOR RUNG CMD ...: runs CMD and adds up the "test result:" lines that libtest printed.
cargo_rung() {
    local major=$1 rung=$2 log=$LOGS/$1-$2.log status=0 passed failed skipped
    shift 2
    STARTED=$SECONDS
    : >"$log"
    logged "$log" "$@" || status=$?
    read -r passed failed skipped < <(
        awk '/^test result:/ { p += $4; f += $6; s += $8 } END { print p + 0, f + 0, s + 0 }' "$log"
    )
    if [ $status = 124 ]; then echo "stopped after $LIMIT s" >>"$log"; fi
    if [ $status != 0 ] && [ "$failed" = 0 ]; then failed=1; fi # it did not compile, or a test took the process down
    report "$major" "$rung" "$passed" "$failed" "$skipped" "$log"
}

# build MAJOR [test]: makes this clone's server carry the build that the next rung needs.
declare -A BUILT=()
build() {
    local log=$LOGS/$1-build.log
    [ "${BUILT[$1]:-}" != "$*" ] || return 0
    STARTED=$SECONDS
    : >"$log"
    if logged "$log" build_and_install "$@"; then
        BUILT[$1]="$*"
        printf 'PostgreSQL %-3s %-42s %5d s\n' "$1" "build${2:+ with #[pg_test]s}" $((SECONDS - STARTED))
    else
        BUILT[$1]=
        report "$1" build 0 1 0 "$log"
        return 1
    fi
}

unit() {
    cargo_rung "$1" unit for_major "$1" timeout $LIMIT cargo test --lib --no-default-features --features "pg$1 pg_test" -- --skip tests::pg_
}

# What `cargo pgrx test` does, less its installation (CARGO_PGRX), because it would install for all clones. The test
# program starts the server: this clone's, and from / because PostgreSQL before 16 does not start in a directory that
# its user cannot enter.
pg() {
    build "$1" test || return 0
    local runner settings
    mkdir -p "$WORK/pgrx"
    runner=CARGO_TARGET_$(rustc -vV | sed -n 's/^host: //p' | tr 'a-z-' 'A-Z_')_RUNNER
    settings=(
        "$runner=env -C / PGRX_PG_CONFIG_PATH=$(clone_pg_config "$1")"
        CARGO_PGRX_TEST_PGDATA="$WORK/pgrx" CARGO_PGRX=/bin/true CARGO_TARGET_DIR="$TARGET" USER="${USER:-$(id -un)}"
    )
    if [ "$(id -u)" = 0 ]; then
        chown nobody "$WORK/pgrx"
        settings+=(CARGO_PGRX_TEST_RUNAS=nobody)
    fi
    cargo_rung "$1" pg for_major "$1" env "${settings[@]}" \
        timeout $LIMIT cargo test --lib --no-default-features --features "pg$1 pg_test" -- tests::pg_
}

# golden MAJOR RUNG FOLDER SUBFOLDER SUFFIX PROGRAM: each file in a database of its own, so that none needs another.
golden() {
    local major=$1 rung=$2 inputs=$ROOT/tests/$3 log=$LOGS/$1-$2.log cluster=$WORK/$1 file name passed=0 failed=0
    local program pg_config expected=()
    build "$major" || return 0
    STARTED=$SECONDS
    pg_config=$(clone_pg_config "$major")
    program=$(dirname "$("$pg_config" --pgxs)")/../test/$6
    PGBIN=$("$pg_config" --bindir)
    export PGBIN
    rm -rf "${log%.log}"
    mkdir -p "${log%.log}"
    : >"$log"
    if [ "$major" -ge 16 ]; then expected=(--expecteddir="$inputs"); fi
    if [ ! -x "$program" ]; then
        echo "$program is missing: this server was packaged without its test programs" >>"$log"
        report "$major" "$rung" 0 1 0 "$log"
        return 0
    fi
    if ! logged "$log" tools/cluster.sh start "$cluster" max_prepared_transactions=10; then
        report "$major" "$rung" 0 1 0 "$log"
        return 0
    fi
    for file in "$inputs/$4"/*"$5"; do
        [ -e "$file" ] || continue
        name=$(basename "$file" "$5")
        if logged "$log" tools/cluster.sh run "$cluster" createdb "$rung.$name" &&
            logged "$log" timeout $LIMIT "$program" --use-existing --bindir="$PGBIN" --host="$cluster" --port=5432 --user=postgres \
                --dbname="$rung.$name" --inputdir="$inputs" "${expected[@]}" --outputdir="${log%.log}" "$name"; then
            passed=$((passed + 1))
        else
            failed=$((failed + 1))
            cat "${log%.log}/regression.diffs" >>"$log" 2>/dev/null || true
        fi
    done
    tools/cluster.sh stop "$cluster" immediate
    report "$major" "$rung" "$passed" "$failed" 0 "$log"
}

regress() { golden "$1" regress pg_regress sql .sql regress/pg_regress; }
isolation() { golden "$1" isolation isolation specs .spec isolation/pg_isolation_regress; }

client() {
    build "$1" || return 0
    mkdir -p "$WORK/t"
    chmod 755 "$WORK/t"
    # Where the packages cannot be had, the tests of the examples say so by failing, and the others run.
    local packages=() arguments=()
    if [ -z "${EXAMPLES:-}" ]; then EXAMPLES=$(example_packages) || EXAMPLES=; fi
    readarray -t packages < <([ -z "$EXAMPLES" ] || echo "$EXAMPLES")
    # The test of pg_cron is ignored, hence counted as skipped, but where there is a pg_cron.
    if [ "$1" = "$PG_CRON_MAJOR" ]; then arguments=(-- --include-ignored); fi
    PGBIN=$("$(clone_pg_config "$1")" --bindir) PG_MAJOR=$1 CLUSTER_SH=$ROOT/tools/cluster.sh PG_CRON=$PG_CRON PGBOUNCER=$(pgbouncer) TMPDIR=$WORK/t \
        cargo_rung "$1" client env "${packages[@]}" timeout $LIMIT cargo test -p client_tests -p chaos --no-fail-fast "${arguments[@]}"
}

# upgrade NEWEST: a run for one major has nothing to upgrade from.
upgrade() {
    local major older=()
    for major in $MAJORS; do
        [ "$major" != "$1" ] || continue
        build "$major" || return 0
        older+=("$major=$("$(clone_pg_config "$major")" --bindir)")
    done
    if [ ${#older[@]} = 0 ]; then
        SKIPPED=$((SKIPPED + 1))
        printf 'PostgreSQL %-3s %-10s skipped: no older major to upgrade from in this run\n' "$1" upgrade
        return 0
    fi
    build "$1" || return 0
    mkdir -p "$WORK/t"
    chmod 755 "$WORK/t"
    PGBIN=$("$(clone_pg_config "$1")" --bindir) PG_MAJOR=$1 OLDER_SERVERS="${older[*]}" CLUSTER_SH=$ROOT/tools/cluster.sh \
        TMPDIR=$WORK/t cargo_rung "$1" upgrade timeout $LIMIT cargo test -p client_tests --test pg_upgrade
}

# Its checks count as tests. No time is asserted.
bench() {
    build "$1" || return 0
    local log=$LOGS/$1-bench.log status=0 passed failed=0
    STARTED=$SECONDS
    : >"$log"
    logged "$log" env PG="$1" QUICK=1 BUILD=debug TMPDIR="$WORK" timeout $LIMIT tools/bench.sh performance || status=$?
    if [ $status = 77 ]; then # not where its packages cannot be had
        SKIPPED=$((SKIPPED + 1))
        printf 'PostgreSQL %-3s %-10s skipped: the packages of bench/requirements.txt could not be had\n' "$1" bench
        return 0
    fi
    if [ $status = 124 ]; then echo "stopped after $LIMIT s" >>"$log"; fi
    if [ $status != 0 ]; then failed=1; fi
    passed=$(sed -n 's/^checks: \([0-9]*\) passed$/\1/p' "$log")
    report "$1" bench "${passed:-0}" "$failed" 0 "$log"
}

mkdir -p "$LOGS"
rungs=" ${*:-unit pg regress isolation client upgrade bench} "
for rung in $rungs; do
    case $rung in unit | pg | regress | isolation | client | upgrade | bench) ;; *) die "no such rung: $rung" ;; esac
done
if [[ $rungs = *" client "* ]]; then setup install_pgbouncer install_pg_cron; else setup; fi
newest=${MAJORS##* }
plant_seed
if [[ $rungs = *" unit "* ]]; then
    # The build first: it is what finds out whether the results of another clone are of use.
    if build "$newest" test; then unit "$newest"; fi
fi
for major in $MAJORS; do
    for rung in pg regress isolation client; do
        if [[ $rungs = *" $rung "* ]]; then "$rung" "$major"; fi
    done
    save_seed
done
if [[ $rungs = *" upgrade "* ]]; then upgrade "$newest"; fi
if [[ $rungs = *" bench "* ]]; then bench "$newest"; fi
echo "$PASSED passed, $FAILED failed, $SKIPPED skipped"
[ "$FAILED" = 0 ]
