#!/usr/bin/env bash
# deps.sh [packages|long]: installs what building and testing need and is missing; with `packages`, what running needs;
# with `long`, also what the conformance suites and the fuzzers need.
# Quick when nothing is missing.
set -euo pipefail

# Package, and a file that shows that it is there.
PACKAGES=(
    "fuse3 /usr/bin/fusermount3"
    "libacl1-dev /usr/include/sys/acl.h"
    "acl /usr/bin/setfacl"
    "attr /usr/bin/setfattr"
    "git /usr/bin/git"
    "sqlite3 /usr/bin/sqlite3"
    "jq /usr/bin/jq"
    "pkg-config /usr/bin/pkg-config"
    "gcc /usr/bin/cc"
    "g++ /usr/bin/c++"
    "procps /usr/bin/ps"
    "xfsprogs /usr/sbin/mkfs.xfs"
    "e2fsprogs /usr/sbin/mkfs.ext4"
    "util-linux /usr/sbin/losetup"
    "ca-certificates /etc/ssl/certs/ca-certificates.crt"
)
LONG_PACKAGES=(
    "fio /usr/bin/fio"
    "rsync /usr/bin/rsync"
    "stress-ng /usr/bin/stress-ng"
    "postgresql /usr/share/postgresql-common"
    "dpkg-dev /usr/bin/dpkg-source"
    "make /usr/bin/make"
    "libisal-dev /usr/include/isa-l.h"
)
TOOLS=("pjdfstest 0.2.2" "fsx 0.3.2")
TOOLS_DIR="$HOME/.cache/forebay/tools"

[ "${1:-}" = long ] && PACKAGES+=("${LONG_PACKAGES[@]}")
missing=()
for line in "${PACKAGES[@]}"; do
    read -r package file <<<"$line"
    [ -e "$file" ] || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
    echo "installing packages: ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -q </dev/null
    apt-get install -q -y --no-install-recommends "${missing[@]}" </dev/null
fi

command -v cargo >/dev/null || {
    echo "cargo is missing: install Rust, see https://rustup.rs" >&2
    exit 1
}
[ "${1:-}" = packages ] && exit 0
for line in "${TOOLS[@]}"; do
    read -r tool version <<<"$line"
    # The file in which cargo records what it installed.
    if ! grep -qs "\"$tool $version " "$TOOLS_DIR/.crates.toml"; then
        echo "installing $tool $version"
        cargo install --locked --root "$TOOLS_DIR" "$tool@$version" </dev/null
    fi
done
