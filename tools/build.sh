#!/usr/bin/env bash
# Builds: the debug build that the tests and `make try` use (functions, for scripts that source this file), and
#
#   build.sh lint | format | install | package | clean       see `make help`
# shellcheck source=tools/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

TARGET=$(realpath -m "${CARGO_TARGET_DIR:-target}")

# ---- seeds -----------------------------------------------------------------------------------------------------
# Building pgrx for five majors takes minutes, and the result is the same for every clone. So what cargo built of other
# people's crates is kept in the cache, and an empty target directory starts with a copy of it. Cargo itself decides
# what of it is usable: its fingerprints cover compiler, features, profile and dependencies, and it follows a target
# directory that moves. Our own crates must stay out: cargo judges those by the age of their source files alone.
seed_dir() { echo "$CACHE/seed/$(cat <(rustc -vV) Cargo.lock | sha256sum | cut -c 1-16)"; }

# The names, as they begin files under target/, of what is built from this repository.
own_names() {
    cargo metadata --format-version 1 --no-deps | python3 -c '
import json, sys
names = {n for p in json.load(sys.stdin)["packages"] for n in [p["name"]] + [t["name"] for t in p["targets"]]}
print("\n".join(sorted(names | {n.replace("-", "_") for n in names})))'
}

# The paths under target/debug of what other people's crates left there, one a line.
foreign_paths() {
    local own
    own=$(own_names | paste -sd '|')
    (cd "$1" && find .fingerprint build deps -mindepth 1 -maxdepth 1) |
        grep -vE "^[^/]+/(lib)?($own)-[0-9a-f]{16}(\..*)?$|^deps/rustc|\.rcgu\." || true
}

plant_seed() {
    local seed
    [ ! -e "$TARGET/debug/.fingerprint" ] || return 0
    seed=$(seed_dir)
    mkdir -p "$CACHE/seed"
    # After a change of Cargo.lock most of what the last one left is still of use.
    [ -d "$seed" ] || seed=$(find "$CACHE/seed" -mindepth 1 -maxdepth 1 -printf '%T@ %p\n' | sort -rn | sed -n '1s/^[^ ]* //p')
    [ -n "$seed" ] || return 0
    say "starting with the build results of another clone"
    mkdir -p "$TARGET"
    rm -rf "$TARGET/debug.tmp"
    (
        flock -s 9
        touch "$seed"
        cp -a "$seed" "$TARGET/debug.tmp" # with the modification times, which cargo compares
    ) 9>"$CACHE/seed.lock"
    if [ -d "$TARGET/debug" ]; then cp -an "$TARGET/debug/." "$TARGET/debug.tmp/" && rm -rf "$TARGET/debug"; fi
    mv "$TARGET/debug.tmp" "$TARGET/debug"
    echo "$seed" >"$TARGET/planted"
}

save_seed() {
    local seed ours theirs
    [ -z "${PG_CONFIG:-}" ] || return 0 # built with headers that other clones do not use
    seed=$(seed_dir)
    ours=$(foreign_paths "$TARGET/debug" | sort)
    (
        flock 9
        # A seed is what one clone built, never a mixture: files of two clones can have the same name and not fit together,
        # since paths of the clone are compiled in. So ours replaces one that has nothing else.
        if [ -d "$seed" ]; then
            theirs=$(cd "$seed" && find .fingerprint build deps -mindepth 1 -maxdepth 1 | sort)
            [ -z "$(comm -13 <(echo "$ours") <(echo "$theirs"))" ] || exit 0
            [ "$ours" != "$theirs" ] || exit 0
        fi
        rm -rf "$CACHE"/seed/*.new
        mkdir -p "$seed.new"
        (cd "$TARGET/debug" && tr '\n' '\0' <<<"$ours" | xargs -0 cp -a --parents -t "$seed.new")
        # Next to the old one and then renamed, so that no seed is ever half of one.
        rm -rf "$seed"
        mv "$seed.new" "$seed"
        # Each compiler and each Cargo.lock has its own; keep the three used last.
        find "$CACHE/seed" -mindepth 1 -maxdepth 1 -printf '%T@ %p\n' | sort -rn | tail -n +4 | cut -d ' ' -f 2- | xargs -r rm -rf
    ) 9>"$CACHE/seed.lock"
}

# uproot_seed: forgets a seed that this clone started with, and what grew from it. Fails where there was none.
uproot_seed() {
    [ -s "$TARGET/planted" ] || return 1
    say "the build results of another clone do not fit; building anew"
    rm -rf "$TARGET/debug" "$(cat "$TARGET/planted")" "$TARGET/planted"
}

# ---- the debug build -------------------------------------------------------------------------------------------
# build_and_install MAJOR [test]: into this clone's server (or PG_CONFIG's); with `test`, the #[pg_test]s too.
build_and_install() {
    local major=$1 features=pg$1 pg_config
    pg_config=$(clone_pg_config "$major")
    shift
    if [ $# -gt 0 ]; then features+=" pg_test"; fi
    check_writable "$pg_config"
    plant_seed
    local install=(cargo_pgrx "$major" install ${1:+--test} --pg-config "$pg_config" --no-default-features --features "$features")
    "${install[@]}" || { uproot_seed && "${install[@]}"; }
}

check_writable() { # check_writable PG_CONFIG
    local directory
    for directory in "$("$1" --pkglibdir)" "$("$1" --sharedir)/extension"; do
        [ -w "$directory" ] || die "$directory is not writable for $(id -un). Either run this as a user who may write there, or:
  make package PG_CONFIG=$1        and copy as root what it made"
    done
}

# ---- the rest --------------------------------------------------------------------------------------------------
need_pg_config() { [ -n "${PG_CONFIG:-}" ] || die "say for which server: PG_CONFIG=/path/to/pg_config"; }

[ "$0" = "${BASH_SOURCE[0]}" ] || return 0
case ${1:-} in
lint | install | package) setup ;;
format) choose_rust ;;
esac
case ${1:-} in
lint)
    for tool in fmt clippy; do
        cargo "$tool" --version >/dev/null 2>&1 || die "cargo $tool is missing. Run: rustup component add rustfmt clippy"
    done
    plant_seed
    cargo fmt --all --check
    major=${MAJORS##* }
    clippy=(for_major "$major" cargo clippy --quiet --workspace --all-targets
        --no-default-features --features "idempotency_record/pg$major idempotency_record/pg_test" -- -D warnings)
    "${clippy[@]}" || { uproot_seed && "${clippy[@]}"; }
    save_seed
    ;;
format) cargo fmt --all ;;
install)
    need_pg_config
    check_writable "$PG_CONFIG"
    cargo_pgrx "$MAJORS" install --release --pg-config "$PG_CONFIG" --no-default-features --features "pg$MAJORS"
    echo "Installed. In each database that shall have it: CREATE EXTENSION idempotency_record;"
    ;;
package)
    need_pg_config
    rm -rf "$TARGET/package/pg$MAJORS"
    cargo_pgrx "$MAJORS" package --pg-config "$PG_CONFIG" --out-dir "$TARGET/package/pg$MAJORS" \
        --no-default-features --features "pg$MAJORS"
    echo "Made $TARGET/package/pg$MAJORS. To install it: sudo cp -r $TARGET/package/pg$MAJORS/. /"
    ;;
clean)
    tools/try.sh stop
    rm -rf "$TARGET" "$CLONE"
    ;;
*) die "usage: build.sh lint | format | install | package | clean" ;;
esac
