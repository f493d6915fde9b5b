#!/usr/bin/env bash
# A benchmark of bench/, on a throw-away server of its own that has a release build.
#
#   bench.sh performance     see bench/performance.py
#   bench.sh purge           see bench/purge.py
#
#   QUICK=1            a smoke run: smaller numbers, which mean nothing; its files go to target/bench
#   BUILD=debug        the build of the tests, in their server, instead of a release build: for a smoke run
#   NAME=VALUE ...     what else a benchmark can be told is in its file
DEFAULT_PG=18
# shellcheck source=tools/build.sh
. "$(dirname "${BASH_SOURCE[0]}")/build.sh"

# What the programs import, at versions that are fixed by hash. A folder and no venv, since Debian packages venv apart.
install_libraries() {
    LIBRARIES=$CACHE/bench-$(cat bench/requirements.txt <(python3 -VV) | sha256sum | cut -c 1-12)
    [ ! -d "$LIBRARIES" ] || return 0
    say "installing what bench/requirements.txt names"
    python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --require-hashes --no-deps --only-binary=:all: \
        --target "$LIBRARIES.$$" -r bench/requirements.txt || {
        echo "error: they could not be installed; Python 3.11 or newer is needed, and access to PyPI" >&2
        exit 77 # as tests do that cannot run
    }
    mv -T "$LIBRARIES.$$" "$LIBRARIES"
}

# A release build, in a server apart, so that the tests never meet it; or in PG_CONFIG's.
build_release() {
    local version log=$OUTPUT/build.log
    version=postgresql-$(pinned "$MAJORS")
    SERVER=${PG_CONFIG:-$CLONE/bench/$version/bin/pg_config}
    if [ ! -e "$SERVER" ]; then
        rm -rf "$CLONE/bench" "$CLONE/bench.tmp"
        mkdir "$CLONE/bench.tmp"
        cp -al "$CACHE/$version" "$CLONE/bench.tmp"
        mv "$CLONE/bench.tmp" "$CLONE/bench"
    fi
    check_writable "$SERVER"
    say "release build for PostgreSQL $MAJORS (some minutes the first time; log in $log)"
    cargo_pgrx "$MAJORS" install --release --pg-config "$SERVER" --no-default-features --features "pg$MAJORS" >"$log" 2>&1 ||
        { tail -n 50 "$log" >&2; die "the build failed"; }
}

case ${1:-} in performance | purge) ;; *) die "usage: bench.sh performance | purge" ;; esac
[[ $MAJORS != *" "* ]] || die "one major at a time: PG=18"
OUTPUT=$TARGET/bench
mkdir -p "$OUTPUT"
setup
install_libraries
case ${BUILD:=release} in
release) build_release ;;
debug)
    SERVER=$(clone_pg_config "$MAJORS")
    build_and_install "$MAJORS" >"$OUTPUT/build.log" 2>&1 || { tail -n 50 "$OUTPUT/build.log" >&2; die "the build failed"; }
    ;;
*) die "no such build: $BUILD" ;;
esac
export BUILD

DIR=$(mktemp -d "${TMPDIR:-/tmp}/ir.XXXXXX")
PGBIN=$("$SERVER" --bindir)
export PGBIN
CHILD=
clean_up() {
    trap '' INT TERM
    set +e # whatever fails, the rest has to go too
    if [ -n "$CHILD" ]; then kill -TERM "$CHILD" 2>/dev/null && wait "$CHILD" 2>/dev/null; fi
    tools/cluster.sh stop "$DIR" immediate
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
PYTHONPATH=$LIBRARIES PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 python3 "bench/$1.py" "$DIR" "$OUTPUT" &
CHILD=$!
status=0
wait "$CHILD" || status=$?
CHILD=
exit $status
