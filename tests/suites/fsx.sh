#!/usr/bin/env bash
# fsx: random reads, writes, truncations and mapped accesses on one file, compared with a copy in memory. Also without the
# page cache, so that every read and write reaches the node unchanged.
#   FOREBAY_FSX_OPERATIONS   on each small file (default: 20000, long: 200000)
source "$(dirname "$0")/../lib.sh"
OPERATIONS=${FOREBAY_FSX_OPERATIONS:-$([ "$LONG" = 1 ] && echo 200000 || echo 20000)}
LARGE=$((OPERATIONS / 4))
LIMIT_S=$((400 + OPERATIONS / 100))

# Most operations of one process: it leaks mappings, and each makes later mappings and truncations slower.
AT_ONCE=20000

# run_fsx NAME OPERATIONS SEED [option]…
run_fsx() {
    local file=$WORK/n/mnt/$1-$3 left=$2 seed=$3
    shift 3
    while [ "$left" -gt 0 ]; do
        "$TOOLS/fsx" -N $((left < AT_ONCE ? left : AT_ONCE)) -S "$seed" -P "$WORK" "$@" "$file" || return 1
        left=$((left - AT_ONCE))
        seed=$((seed + 1000))
    done
    rm "$file"
}

check "the node starts" node_start n --drives 6 --drive-size 1G --profile 4+2 || exit 0
for seed in "$SEED" $((SEED + 1)) $((SEED + 2)); do
    check "$OPERATIONS operations on a small file, seed $seed" run_fsx small "$OPERATIONS" "$seed"
    check "$LARGE operations on a large file, seed $seed" run_fsx large $LARGE "$seed" -f "$ROOT/tests/fsx.toml"
done
past_the_cache() { node_unmount n && "$FOREBAY" mount "$WORK/n" --options direct </dev/null; }
if [ "$PLAIN" != 1 ]; then
    check "the node mounts with -o direct" past_the_cache &&
        check "$LARGE operations past the page cache, seed $SEED" run_fsx direct $LARGE "$SEED" -f "$ROOT/tests/fsx.toml"
fi
check "the node stops" node_stop n
exit 0
