#!/usr/bin/env bash
# build.sh COMMIT: builds the programs that suite upgrade needs beside the present one, and prints where they are: one of an earlier
# commit, and one of the present sources with next.patch, which has another format level, field, message and error.
set -euo pipefail
ROOT=$(cd "$(dirname "$0")/../.." && pwd)
WORK=$HOME/.cache/forebay/upgrade
export CARGO_TARGET_DIR=$WORK/target CARGO_INCREMENTAL=0
# Earlier commits do not have this profile, and later ones have more of it.
PROFILE=(--profile quick)
for setting in 'inherits="release"' 'opt-level=1' 'codegen-units=64' 'lto="off"' 'debug=false' 'package.forebay.opt-level=0' \
    'package.s3s.overflow-checks=false'; do
    PROFILE+=(--config "profile.quick.$setting")
done

# program NAME: the sources in WORK/NAME become WORK/forebay-NAME.
program() {
    (cd "$WORK/$1" && cargo build "${PROFILE[@]}" --package forebay --bin forebay) >&2
    cp --remove-destination "$CARGO_TARGET_DIR/quick/forebay" "$WORK/forebay-$1"
    echo "$WORK/forebay-$1"
}

mkdir -p "$WORK"
rm -rf "$WORK/old" "$WORK/next"
mkdir "$WORK/old"
git -C "$ROOT" archive "$1" | tar -x -C "$WORK/old"
program old
# The present state, also if it is not committed.
mkdir "$WORK/next"
(cd "$ROOT" && git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents --no-dereference -t "$WORK/next")
patch --directory "$WORK/next" --strip 1 --forward --silent <"$ROOT/tests/upgrade/next.patch" >&2
program next
