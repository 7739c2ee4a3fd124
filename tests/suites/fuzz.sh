#!/usr/bin/env bash
# A short run of every fuzz target: that they build, and that seeds and simple changes of them do no harm.
source "$(dirname "$0")/../lib.sh"
LIMIT_S=1200
SECONDS_EACH=$([ "$LONG" = 1 ] && echo 60 || echo 3)

check "every decoder takes any bytes, $SECONDS_EACH s each" "$ROOT/tests/fuzz.sh" "$SECONDS_EACH" &&
    grep '^ok' "$LOGS"/fuzz-every-decoder*.log | sed 's/^ok/    /'
exit 0
