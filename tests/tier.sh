#!/usr/bin/env bash
# tier.sh [STORE:FAULTS...]: the suites `tier` and `tier-storm` with each of these stores; FAULTS is the number of
# harmed requests in a hundred. Ends with a table of the results for each store. FOREBAY_TIER_SUITES: only these suites.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
if [ $# = 0 ]; then set -- forebay:0 forebay-https:0 minio:0 versitygw:0 garage:0 minio:10 versitygw:10; fi
SAID=$(mktemp -d "${TMPDIR:-/tmp}/forebay-tier.XXXXXX")
trap 'rm -rf "$SAID"' EXIT
status=0
for one in "$@"; do
    # shellcheck disable=SC2086
    FOREBAY_TIER_STORE=${one%:*} FOREBAY_TIER_FAULTS=${one#*:} tests/run.sh ${FOREBAY_TIER_SUITES:-tier tier-storm} |
        tee "$SAID/$one" || status=1
done

# works STORE CHECK…: whether checks with these names ran, and all of them passed.
works() {
    local store=$1 name lines found=no
    shift
    ! grep -q 'ended early' "$SAID/$store" || set -- 'ended early'
    for name in "$@"; do
        lines=$(grep -E "^(ok  |FAIL) [a-z-]+: $name \(" "$SAID/$store")
        [ -z "$lines" ] || found=yes
        ! grep -q '^FAIL' <<<"$lines" || { found=no && break; }
    done
    echo "$found"
}
row() {
    local name=$1 store
    shift
    printf '%-14s' "$name"
    for store in "${stores[@]}"; do printf ' %-16s' "$(works "$store" "$@")"; done
    echo
}
stores=("$@")
echo
printf '%-14s' ''
printf ' %-16s' "${stores[@]}"
echo
row tiering 'aged content is uploaded.*' 'more is written than.*' 'ten times what the drives hold is written'
row fetch 'released content is read.*' 'a file is fetched.*' 'ten times what the drives hold is read.*'
row 'file access' 'tiered content is overwritten.*' 'a store that is down.*' 'every byte is as it was written.*'
row reclamation 'the bucket shrinks.*' 'detaching brings.*' 'the store holds less.*' 'nothing is left.*'
exit "$status"
