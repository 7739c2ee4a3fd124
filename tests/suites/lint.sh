#!/usr/bin/env bash
# Static checks of the sources.
source "$(dirname "$0")/../lib.sh"
LIMIT_S=3600
cd "$ROOT" || exit 1

check "clippy" cargo clippy --profile "$BUILD" --workspace --all-targets -- -D warnings
check "tidy" cargo run --profile "$BUILD" --quiet --package xtask -- tidy
# Checks of licences, sources and bans need no network; advisories need a database that must be present already.
if command -v cargo-deny >/dev/null; then
    check "licences, sources and bans of dependencies" cargo deny --offline check licenses sources bans
    if compgen -G "${CARGO_HOME:-$HOME/.cargo}/advisory-db*" >/dev/null; then
        check "known weaknesses of dependencies" cargo deny --offline check --disable-fetch advisories
    else
        skipped "known weaknesses of dependencies" "no database of them here"
    fi
else
    skipped "licences, sources and bans of dependencies" "cargo-deny is not installed"
fi
if command -v shellcheck >/dev/null; then
    # SC1090, SC1091: sourced files are found at run time. SC2034: lib.sh and the suites use each other's variables.
    # SC2164: a check ends with the first command that fails.
    check "shellcheck" shellcheck --shell=bash --severity=warning --exclude=SC1090,SC1091,SC2034,SC2164 tests/*.sh tests/suites/*.sh .ci/run
else
    skipped "shellcheck" "not installed"
fi
# make upgrade builds the program of the next format level with it.
check "tests/upgrade/next.patch fits the sources" git apply --check tests/upgrade/next.patch
exit 0
