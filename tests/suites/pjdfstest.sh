#!/usr/bin/env bash
# pjdfstest: the rules of POSIX for system calls on files, about 400 cases. Each case is a result.
source "$(dirname "$0")/../lib.sh"

run_cases() {
    mkdir "$WORK/n/mnt/pjd"
    chmod 755 "$WORK" "$WORK/n" "$WORK/n/mnt"
    local options=()
    # Another filesystem, for renames and links across filesystems. A plain directory is on the same one.
    [ "$PLAIN" = 1 ] || { mkdir "$WORK/other" && options=(--secondary-fs "$WORK/other"); }
    # It fails if a case fails; the loop below judges each case.
    "$TOOLS/pjdfstest" --configuration-file "$ROOT/tests/pjdfstest.toml" --path "$WORK/n/mnt/pjd" \
        "${options[@]}" >"$WORK/out" 2>&1 || true
    cp "$WORK/out" "$LOGS/pjdfstest-cases.log"
    tail -n 3 "$WORK/out"
    grep -q '^Summary: ' "$WORK/out"
}

check "the node starts" node_start n --drives 6 --drive-size 256M --profile 4+2 || exit 0
check "pjdfstest runs to its end" run_cases || exit 0

expected() { grep -v '^#' "$ROOT/tests/pjdfstest.expected" | awk 'NF { print $1 }' | grep -qxF "$1"; }
count=0
while read -r name result; do
    if expected "$name"; then
        if [ "$result" = ok ]; then failed "$name is listed as failing but passes"; else skipped "$name" "expected failure"; fi
    elif [ "$result" = ok ]; then
        printf 'ok\t%s\t%s\n' "$SUITE" "$name" >>"$RESULTS"
        count=$((count + 1))
    elif [ "$result" = skipped ]; then
        printf 'skip\t%s\t%s\n' "$SUITE" "$name" >>"$RESULTS"
    else
        failed "$name"
        grep -A 6 "^$name " "$WORK/out" | sed -n '2,7p' | grep -E '^[[:space:]]' | sed 's/^/     | /'
    fi
done < <(awk '/^[a-z_0-9]+(::[a-z_0-9]+)+ +[A-Za-z]/ { print $1, $2 }' "$WORK/out")
echo "     $count cases passed"
check "the node stops" node_stop n
exit 0
