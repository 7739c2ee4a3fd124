#!/usr/bin/env bash
# stress-ng: every stressor of its class "filesystem" on the mount, one after another.
source "$(dirname "$0")/../lib.sh"
LIMIT_S=120
TIME_S=$([ "$LONG" = 1 ] && echo 5 || echo 1)
EXPECTED=$ROOT/tests/stress.expected
# stress-ng's own list. It reports stressors that need another kernel or filesystem as skipped.
mapfile -t STRESSORS < <(stress-ng --class 'filesystem?' 2>&1 | sed -n "s/^class 'filesystem' stressors: //p" | tr ' ' '\n')

run_one() {
    local status=0
    mkdir -p "$WORK/n/mnt/stress"
    stress-ng --"$1" 2 --timeout "$TIME_S" --temp-path "$WORK/n/mnt/stress" --verify --metrics-brief || status=$?
    # 3: not supported here, 4: the same for all instances.
    if [ "$status" = 3 ] || [ "$status" = 4 ]; then touch "$WORK/skipped-$1"; return 0; fi
    return "$status"
}

[ ${#STRESSORS[@]} -gt 30 ] || { failed "stress-ng lists its stressors"; exit 0; }
check "the node starts" node_start n --drives 6 --drive-size 1G --profile 4+2 || exit 0
for stressor in "${STRESSORS[@]}"; do
    if reason=$(grep "^$stressor  " "$EXPECTED"); then
        skipped "$stressor" "${reason#*  }"
    else
        check "$stressor" run_one "$stressor"
        if [ -e "$WORK/skipped-$stressor" ]; then skipped "$stressor" "stress-ng finds it unsupported here"; fi
    fi
done
all_gone() {
    rm -rf "$WORK/n/mnt/stress"
    [ -z "$(ls -A "$WORK/n/mnt")" ]
}
check "everything can be deleted" all_gone
check "the node stops" node_stop n
exit 0
