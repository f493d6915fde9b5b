#!/usr/bin/env bash
# A throw-away server with the extension, to try it out. One a clone.
#
#   try.sh          set-up, debug build, a fresh server, and the story in tools/try.sql
#   try.sh psql     psql on it
#   try.sh stop     stop and remove it
DEFAULT_PG=18
# shellcheck source=tools/build.sh
. "$(dirname "${BASH_SOURCE[0]}")/build.sh"

STATE=$CLONE/try # the cluster's directory and the server's bin directory, a line each

# client ARG ...: psql on the cluster.
client() { PGHOST=$DIR PGUSER=postgres PGDATABASE=try "$PGBIN/psql" "$@"; }

find_cluster() {
    [ -e "$STATE" ] && { read -r DIR && read -r PGBIN; } <"$STATE" && [ -d "$DIR/data" ]
}

stop() {
    if find_cluster; then
        tools/cluster.sh stop "$DIR"
        echo "The server of make try is stopped and removed."
    fi
    rm -f "$STATE"
}

# Waits until the session with this name is in this state.
wait_for() {
    local tries
    for ((tries = 0; tries < 100; tries++)); do
        [ "$(client -XAtc "SELECT count(*) FROM pg_stat_activity WHERE application_name = '$1' AND $2")" = 0 ] || return 0
        sleep 0.1
    done
    die "$1 did not get there: $2"
}

# Two sessions with the same new key. Session 1 holds its transaction open until session 2 waits. What session 2 answers is
# shown when session 1 has told its end, which is when it happens.
race() {
    local one first second call="SELECT debit_once(1, 'checkout-43', 100);"
    exec {one}> >(PGAPPNAME="session 1" client -Xqe -P footer=off 2>&1 | sed -u 's/^/    session 1 | /')
    first=$!
    echo "BEGIN;" >&"$one"
    echo "$call" >&"$one"
    wait_for "session 1" "state = 'idle in transaction'"
    PGAPPNAME="session 2" client -Xq -P footer=off -c "$call" >"$DIR/session2" 2>&1 &
    second=$!
    wait_for "session 2" "wait_event_type = 'Lock'"
    echo "    session 2 | $call"
    echo "    (session 2 waits: session 1 may still commit or roll back)"
    printf '%s\n' "COMMIT;" "\\q" >&"$one"
    wait "$first"
    wait "$second"
    sed 's/^/    session 2 | /' "$DIR/session2"
}

case ${1:-} in
"")
    setup
    major=${MAJORS##* }
    log=$CLONE/try.log
    echo "Building for PostgreSQL $major (a minute or two the first time) ..."
    build_and_install "$major" >"$log" 2>&1 || { tail -n 50 "$log" >&2; die "the build failed; all of it is in $log"; }
    save_seed
    stop
    DIR=$(mktemp -d "${TMPDIR:-/tmp}/ir.XXXXXX")
    PGBIN=$("$(clone_pg_config "$major")" --bindir)
    export PGBIN
    printf '%s\n' "$DIR" "$PGBIN" >"$STATE"
    tools/cluster.sh start "$DIR"
    PGHOST=$DIR "$PGBIN/createdb" -U postgres try
    RACE=$ROOT/tools/try.sh client -Xq -v ON_ERROR_STOP=1 -f tools/try.sql
    echo "
The server runs on. Look around in it:  make psql
Stop and remove it:                     make stop"
    ;;
psql)
    find_cluster || die "no server is running; start one: make try"
    PAGER=${PAGER:-cat} client
    ;;
race) find_cluster && race ;;
stop) stop ;;
*) die "usage: try.sh [psql | stop]" ;;
esac
