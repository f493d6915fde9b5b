#!/usr/bin/env bash
# A throw-away PostgreSQL cluster in one directory. `make try`, the test rungs and the client tests all use this file.
#
#   cluster.sh start DIR [name=value ...]   initdb (unless DIR/data is there), settings, start; log in DIR/log
#   cluster.sh run DIR CMD [ARG ...]        run CMD as the cluster's user, in DIR, with its programs first in PATH
#   cluster.sh stop DIR [smart|fast|immediate]   stop every server whose data lies in DIR, and remove DIR
#
# `start` and `run` need PGBIN, the server's bin directory. The caller makes DIR: mktemp -d "${TMPDIR:-/tmp}/ir.XXXXXX"
# (a socket's path has 107 bytes at most). The server listens on a socket in DIR and on no TCP port, so clusters
# cannot meet. PostgreSQL refuses to run as root: root runs it, and whatever `run` runs, as nobody.
set -euo pipefail

for name in $(compgen -e PG || true); do # whatever libpq would take from the caller's environment
    case $name in PG | PG_* | PGBIN) ;; *) unset "$name" ;; esac
done

die() { echo "cluster.sh: $*" >&2; exit 1; }

# as_owner CMD ...: as the user that owns the cluster. From DIR, because PostgreSQL before 16 does not start in a
# directory that its user cannot enter, and the clone may lie in root's home.
as_owner() (
    cd "$DIR"
    export PATH="$PGBIN:$PATH" PGHOST="$DIR" PGUSER=postgres HOME="$DIR"
    if [ "$(id -u)" = 0 ]; then
        exec setpriv --reuid=nobody --regid=nogroup --clear-groups -- "$@"
    fi
    exec "$@"
)

start() {
    [ "${#DIR}" -le 90 ] || die "$DIR is too long for a socket's path"
    mkdir -p "$DIR"
    if [ "$(id -u)" = 0 ]; then
        chown nobody:nogroup "$DIR"
        as_owner test -x "$PGBIN/postgres" || die "nobody, who runs the server for root, cannot reach $DIR or $PGBIN"
    fi
    if [ ! -e "$DIR/data/PG_VERSION" ]; then
        as_owner initdb -D "$DIR/data" -U postgres -A trust -N --encoding=UTF8 --locale=C.UTF-8 >"$DIR/initdb.log" 2>&1 || {
            tail -n 20 "$DIR/initdb.log" >&2
            die "initdb failed"
        }
    fi
    local setting
    {
        # Where two lines set the same name the last one counts, so the caller may override each of these.
        printf "listen_addresses = ''\nunix_socket_directories = '%s'\nport = 5432\n" "$DIR"
        printf "fsync = off\n" # nothing here has to survive the machine
        for setting in "$@"; do
            printf "%s = '%s'\n" "${setting%%=*}" "$(sed "s/'/''/g" <<<"${setting#*=}")"
        done
    } | as_owner tee -a "$DIR/data/postgresql.conf" >/dev/null
    as_owner pg_ctl start -s -w -t 60 -D "$DIR/data" -l "$DIR/log" </dev/null >/dev/null || {
        tail -n 30 "$DIR/log" >&2
        die "the server did not start"
    }
}

# Only a process that has the data directory as its working directory is that cluster's postmaster: the pid in a
# file that a crash left behind may be somebody else's by now.
stop() {
    local signal pid file data tries
    case $1 in
    smart) signal=TERM ;; fast) signal=INT ;; immediate) signal=QUIT ;;
    *) die "no such mode: $1" ;;
    esac
    [ -d "$DIR" ] || return 0
    while read -r file; do
        data=$(dirname "$file")
        pid=$(head -n 1 "$file" 2>/dev/null) || continue
        kill -s "$signal" "$pid" 2>/dev/null || continue
        for ((tries = 0; tries < 300; tries++)); do
            [ "$(readlink "/proc/$pid/cwd")" = "$data" ] || continue 2
            sleep 0.1
        done
        die "the server of $data (process $pid) does not stop"
    done < <(find "$DIR" -maxdepth 4 -name postmaster.pid)
    rm -rf "$DIR"
}

[ $# -ge 2 ] || die "usage: cluster.sh start|run|stop DIR ..."
command=$1 DIR=$(realpath -m "$2")
shift 2
case $command in
start) : "${PGBIN:?the bin directory of the server}"; start "$@" ;;
run) : "${PGBIN:?the bin directory of the server}"; as_owner "$@" ;;
stop) stop "${1:-fast}" ;;
*) die "no such command: $command" ;;
esac
