#!/usr/bin/env bash
# check.sh [BASE]: format, tidy, clippy and tests of the crates that have changed since BASE (default: the uncommitted
# changes or, without any, the last commit). For quick checks during work; `make test` runs everything.
set -euo pipefail
cd "$(dirname "$0")/.."

base=${1:-}
if [ -z "$base" ]; then
    if [ -n "$(git status --porcelain)" ]; then base=HEAD; else base=HEAD~1; fi
fi
changed() { { git diff --name-only "$base"; git ls-files --others --exclude-standard; } | sort -u; }

packages=()
while read -r package; do packages+=(--package "$package"); done < <(changed | sed -n 's|^crates/\([^/]*\)/.*|\1|p; s|^\(xtask\)/.*|\1|p' | sort -u)
if changed | grep -qE '^(Cargo\.(toml|lock)|clippy\.toml|rustfmt\.toml)$'; then packages=(--workspace); fi

cargo fmt --check
cargo run --profile quick --quiet --package xtask -- tidy
for script in $(changed | grep -E '^(tests|\.ci)/.*\.sh$' || true); do
    [ ! -e "$script" ] || bash -n "$script"
done
if [ ${#packages[@]} = 0 ]; then
    echo "no crate has changed since $base"
    exit 0
fi
echo "changed since $base: ${packages[*]}"
cargo clippy --profile quick --quiet "${packages[@]}" --all-targets -- -D warnings
cargo test --profile quick --quiet "${packages[@]}"
