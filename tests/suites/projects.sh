#!/usr/bin/env bash
# Builds real projects on the mount: one in C (GNU hello, from Debian's sources) and one in Rust (this one).
source "$(dirname "$0")/../lib.sh"
LIMIT_S=2400
MNT=$WORK/n/mnt
JOBS=$(nproc)

fetch_c() {
    cat >"$WORK/sources.list" <<<"deb-src [trusted=yes] http://deb.debian.org/debian bookworm main"
    mkdir -p "$WORK/lists"
    local options=(-o Dir::Etc::sourcelist="$WORK/sources.list" -o Dir::Etc::sourceparts=/dev/null)
    options+=(-o Dir::State::lists="$WORK/lists" -o APT::Sandbox::User=root)
    apt-get "${options[@]}" update -q
    mkdir "$MNT/c"
    cd "$MNT/c"
    apt-get "${options[@]}" source -q "$1"
    find . -maxdepth 1 -mindepth 1 -type d | grep -q .
}

build_c() {
    cd "$MNT/c"/*/
    ./configure --quiet
    make -j"$JOBS" >/dev/null
    make -j"$JOBS" check >"$WORK/check.log" 2>&1 || { tail -n 30 "$WORK/check.log"; return 1; }
    make install DESTDIR="$MNT/c/installed" >/dev/null
    [ "$("$MNT/c/installed/usr/local/bin/hello")" = "Hello, world!" ]
}

build_rust() {
    git -C "$ROOT" ls-files -z | (cd "$ROOT" && tar --create --null --files-from=- --file=-) | {
        mkdir "$MNT/rust" && tar --extract --file=- --directory="$MNT/rust"
    }
    cd "$MNT/rust"
    CARGO_TARGET_DIR=$MNT/rust/target cargo build --release --quiet --package layout --package meta
    CARGO_TARGET_DIR=$MNT/rust/target cargo test --release --quiet --package layout
    # A second build finds nothing to do: times and contents are unchanged.
    CARGO_TARGET_DIR=$MNT/rust/target cargo build --release --package layout --package meta 2>&1 | tee "$WORK/again"
    not grep -q Compiling "$WORK/again"
}

check "the node starts" node_start n --drives 6 --drive-size 1G --profile 4+2 || exit 0
check "sources of GNU hello are unpacked" fetch_c hello && check "configure, make, make check and install" build_c
check "this project builds and tests itself, and is up to date then" build_rust
check "the node stops" node_stop n
exit 0
