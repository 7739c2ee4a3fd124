#!/usr/bin/env bash
# bench.sh [--quick] [--json] [--parts LIST] [--only WORD]: `cargo xtask bench` in a temporary directory that is removed
# afterwards, and the erasure code beside ISA-L.
source "$(dirname "$0")/lib.sh"
"$XTASK" bench --dir "$WORK" --forebay "$FOREBAY" "$@" || exit $?
case " $* " in
*" --only "* | *" --parts "* | *" --json "*) ;;
*)
    echo
    echo "erasure code"
    cargo bench --quiet --package layout --features isal --bench isal </dev/null 2>&1 | grep -v '^$'
    ;;
esac
exit 0
