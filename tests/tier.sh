#!/usr/bin/env bash
# tier.sh [STORE:FAULTS…]: the suite `tier` with each of these stores, of which so many of a hundred requests are harmed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
if [ $# = 0 ]; then set -- forebay:0 forebay-https:0 minio:0 versitygw:0 minio:10 versitygw:10; fi
status=0
for one in "$@"; do
    FOREBAY_TIER_STORE=${one%:*} FOREBAY_TIER_FAULTS=${one#*:} tests/run.sh tier || status=1
done
exit "$status"
