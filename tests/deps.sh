#!/usr/bin/env bash
# deps.sh [packages|long|bench|tier]: installs missing tools for builds and tests. With `packages`: only those that
# a running node needs. With `long`: also the tools of the conformance suites and the fuzzers; with `bench`: those of
# `make bench-s3`; with `tier`: those of `make tier`. Quick if nothing is missing.
set -euo pipefail

# Package, and a file that exists if it is installed.
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
    "iproute2 /usr/sbin/ip"
    "nftables /usr/sbin/nft"
    "openssl /usr/bin/openssl"
    "python3-venv /usr/share/doc/python3-venv"
    "etcd-server /usr/bin/etcd"
    "curl /usr/bin/curl"
    "ca-certificates /etc/ssl/certs/ca-certificates.crt"
)
# A node runs without them.
TEST_PACKAGES=("postgresql /usr/share/doc/postgresql")
LONG_PACKAGES=(
    "fio /usr/bin/fio"
    "rsync /usr/bin/rsync"
    "stress-ng /usr/bin/stress-ng"
    "dpkg-dev /usr/bin/dpkg-source"
    "make /usr/bin/make"
    "libisal-dev /usr/include/isa-l.h"
    "s3cmd /usr/bin/s3cmd"
    "rclone /usr/bin/rclone"
    "restic /usr/bin/restic"
    "s3fs /usr/bin/s3fs"
)
TOOLS=("pjdfstest 0.2.2" "fsx 0.3.2")
# Tools that take minutes to build.
LONG_TOOLS=("s3s-e2e 0.14.1")
TIER_TOOLS=("garage 2.5.0")
# S3 clients, in virtual environments.
CLIENTS=("boto3==1.43.11" "awscli==1.45.11" "prometheus_client==0.26.0")
LONG_CLIENTS=("pyarrow" "pandas" "s3fs" "deltalake")
TOOLS_DIR="$HOME/.cache/forebay/tools"

[ "${1:-}" = packages ] || PACKAGES+=("${TEST_PACKAGES[@]}")
[ "${1:-}" = long ] && PACKAGES+=("${LONG_PACKAGES[@]}") && TOOLS+=("${LONG_TOOLS[@]}")
[ "${1:-}" = tier ] && TOOLS+=("${TIER_TOOLS[@]}")
missing=()
for line in "${PACKAGES[@]}"; do
    read -r package file <<<"$line"
    [ -e "$file" ] || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
    echo "installing packages: ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    # The tests make databases themselves: Debian's package must not.
    if [[ " ${missing[*]} " == *" postgresql "* ]]; then
        mkdir -p /etc/postgresql-common/createcluster.d
        echo "create_main_cluster = false" >/etc/postgresql-common/createcluster.d/tests.conf
    fi
    apt-get update -q </dev/null
    apt-get install -q -y --no-install-recommends "${missing[@]}" </dev/null
fi
# The tests start members of etcd themselves. That of the package must not stay, nor come back at the next boot.
if [[ " ${missing[*]} " == *" etcd-server "* ]]; then
    update-rc.d etcd disable &>/dev/null || true
    service etcd stop &>/dev/null || true
    for _ in {1..10}; do pgrep -u etcd -x etcd >/dev/null || break; sleep 1; done
    if pgrep -u etcd -x etcd >/dev/null; then
        echo "etcd runs as a service since its package is installed: stop it" >&2
        exit 1
    fi
fi

command -v cargo >/dev/null || {
    echo "cargo is missing: install Rust, see https://rustup.rs" >&2
    exit 1
}
[ "${1:-}" = packages ] && exit 0
# S3 servers and clients, by their Go modules.
MODULES=()
[ "${1:-}" = bench ] && MODULES=("github.com/minio/minio")
[ "${1:-}" = tier ] && MODULES=("github.com/minio/minio" "github.com/versity/versitygw/cmd/versitygw")
[ "${1:-}" = long ] && MODULES=("github.com/minio/mc")
# tests/minio-go.expected lists the tests of this version that do not pass.
MINIO_GO=github.com/minio/minio-go/v7@v7.4.1
needs_go() {
    command -v go >/dev/null || {
        echo "go is missing, which $1 is built with: see https://go.dev/dl" >&2
        exit 1
    }
    echo "installing $1"
}
for module in "${MODULES[@]}"; do
    [ ! -x "$TOOLS_DIR/bin/$(basename "$module")" ] || continue
    needs_go "$module"
    GOBIN="$TOOLS_DIR/bin" go install "$module@latest" </dev/null
done
# Builds the tests for S3 servers in minio-go, a program in one file; its name has the version.
tests_of_minio_go() {
    local source work program=$TOOLS_DIR/bin/minio-go-${MINIO_GO##*@}
    [ ! -x "$program" ] || return 0
    needs_go "$MINIO_GO"
    work=$(mktemp -d)
    # Outside any module.
    source=$(cd "$work" && go mod download -json "$MINIO_GO" </dev/null | jq -er .Dir)
    cp -r "$source" "$work/source"
    chmod -R u+w "$work/source"
    (cd "$work/source" && go build -o "$program" functional_tests.go </dev/null)
    rm -rf "$work"
}
[ "${1:-}" != long ] || tests_of_minio_go
[ "${1:-}" = bench ] && exit 0
for line in "${TOOLS[@]}"; do
    read -r tool version <<<"$line"
    # The file in which cargo records what it installed.
    if ! grep -qs "\"$tool $version " "$TOOLS_DIR/.crates.toml"; then
        echo "installing $tool $version"
        cargo install --locked --root "$TOOLS_DIR" "$tool@$version" </dev/null
    fi
done
# clients DIR PACKAGE…: makes a virtual environment. A file in it lists its packages.
clients() {
    local dir=$1
    shift
    [ "$(cat "$dir/clients" 2>/dev/null)" != "$*" ] || return 0
    echo "installing $*"
    python3 -m venv --clear "$dir"
    "$dir/bin/pip" install --quiet --disable-pip-version-check "$@" </dev/null
    echo "$*" >"$dir/clients"
}
clients "$HOME/.cache/forebay/venv" "${CLIENTS[@]}"
[ "${1:-}" != long ] || clients "$HOME/.cache/forebay/venv-clients" "${LONG_CLIENTS[@]}"
