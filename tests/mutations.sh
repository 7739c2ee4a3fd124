#!/usr/bin/env bash
# mutations.sh [WORD]: breaks a copy of the code in each way of mutations.txt (those with WORD in their name), and plays the simulation
# until it finds one. Prints a table; exit status 1 if a breakage is not found within SEEDS=3000 seeds. About two minutes each.
set -euo pipefail
cd "$(dirname "$0")/.."

SEEDS=${SEEDS:-3000}
JOBS=${JOBS:-$(nproc)}
WORD=${1:-}
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}/mutations
copy=$CARGO_TARGET_DIR/tree
rm -rf "$copy"
mkdir -p "$copy"
# Old times: what is the same as in the last run is not compiled again.
git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents --preserve=timestamps -t "$copy"

rows=()
failed=0
# replace FILE OLD NEW: replaces text that is in the file exactly once.
replace() {
    OLD=$2 NEW=$3 perl -0pi -e 'my $found = s/\Q$ENV{OLD}\E/$ENV{NEW}/g; die "found $found times\n" unless $found == 1' "$1"
}
# find_it: plays until a seed fails.
find_it() {
    local first found
    for ((first = 1; first <= SEEDS; first += 300)); do
        "$CARGO_TARGET_DIR/release/sim" "$first" 300 "$JOBS" >"$copy/out" 2>&1 || true
        found=$(sed -n 's/^seed=\([0-9]*\) boot=[0-9]*: \(.*\)/seed \1: \2/p' "$copy/out" | head -n 1 | cut -c1-70)
        if [ -n "$found" ]; then echo "found by $found" && return; fi
    done
}
play() {
    local name=$1 file=$2 old=$3 new=$4 result started=$SECONDS
    cp "$copy/$file" "$copy/original"
    if ! replace "$copy/$file" "$old" "$new" 2>"$copy/error"; then
        result="cannot be made: $(cat "$copy/error")"
    elif ! (cd "$copy" && cargo build --quiet --release --package sim) 2>"$copy/error"; then
        result="does not compile: $(grep -m1 '^error' "$copy/error")"
    else
        result=$(find_it)
    fi
    mv "$copy/original" "$copy/$file"
    touch "$copy/$file"
    case $result in "found by"*) ;; *) failed=1 ;; esac
    rows+=("$(printf '%-75s %4d s  %s' "$name" $((SECONDS - started)) "${result:-NOT FOUND}")")
    echo "${rows[-1]}"
}

name='' file='' old='' new=''
end_entry() {
    if [ -n "$name" ] && [[ $name == *"$WORD"* ]]; then play "$name" "$file" "${old%$'\n'}" "${new%$'\n'}"; fi
    name='' file='' old='' new=''
}
while IFS= read -r line; do
    case $line in
        '#'*) ;;
        '= '*) end_entry && name=${line#= } ;;
        '- '*) old+=${line#- }$'\n' ;;
        '+ '*) new+=${line#+ }$'\n' ;;
        ?*) file=$line ;;
    esac
done <tests/mutations.txt
end_entry
echo "${#rows[@]} breakages, $failed of them not found"
exit "$failed"
