# Functions for all suites in tests/suites. Sourced, not run.
#
# A suite is a script that calls `check NAME COMMAND…` once per result. `check` runs the command in a shell of its own
# under `set -e`, prints one line, and keeps the output in a log whose end is shown on failure. Nodes are started by
# `node_start`, which registers them, so that the trap at the end can stop them after any failure.
#
# Settings, all optional:
#   FOREBAY_BUILD      profile of cargo: release (default) or quick
#   FOREBAY_TEST_DIR   where temporary directories are made         (default: $TMPDIR or /tmp)
#   FOREBAY_TEST_LONG  1: larger trees, more operations
#   FOREBAY_TEST_SEED  first seed of the suites that take one       (default: 1)
#   FOREBAY_TEST_MEMORY  memory of each node, such as 2048MiB   (default: 512MiB, the least)
#   FOREBAY_MOUNT_OPTIONS  how nodes are mounted, e.g. transport=uring
#   FOREBAY_PLAIN      1: use a plain directory instead of a node, to test the suites themselves

set -uo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
SUITE=$(basename "$0" .sh)
LONG=${FOREBAY_TEST_LONG:-0}
PLAIN=${FOREBAY_PLAIN:-0}
SEED=${FOREBAY_TEST_SEED:-1}
TOOLS=$HOME/.cache/forebay/tools/bin
TARGET=${CARGO_TARGET_DIR:-$ROOT/target}
BUILD=${FOREBAY_BUILD:-release}
FOREBAY=${FOREBAY:-$TARGET/$BUILD/forebay}
XTASK=${FOREBAY_XTASK:-$TARGET/$BUILD/xtask}
RESULTS=${FOREBAY_RESULTS:-/dev/null}
LOGS=${FOREBAY_LOGS:-$(mktemp -d "${TMPDIR:-/tmp}/forebay-logs.XXXXXX")}
WORK=$(mktemp -d "${FOREBAY_TEST_DIR:-${TMPDIR:-/tmp}}/forebay-$SUITE.XXXXXX")
JOB=
TIMER=

# Memory of each node, in MiB: the least that is allowed.
MEMORY=${FOREBAY_TEST_MEMORY:-512MiB}

# Seconds after which one check counts as hanging.
LIMIT_S=${LIMIT_S:-300}

trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

cleanup() {
    local status=$? dir
    # A background process that ends before its exec is still this shell.
    [ "$BASHPID" = $$ ] || exit "$status"
    # A second signal, for instance to the whole process group, must not interrupt the clean-up.
    trap - EXIT
    trap '' INT TERM
    end_job
    if [ -e "$WORK/.nodes" ]; then
        while read -r dir; do node_end "$dir"; done <"$WORK/.nodes"
    fi
    # Mounts must be gone before directories are removed.
    while read -r dir; do umount -l "$dir" 2>/dev/null; done < <(mounts_below "$WORK")
    rm -rf --one-file-system "$WORK"
    exit "$status"
}

# Ends the running check and all its processes: they are one process group.
end_job() {
    [ -z "$TIMER" ] || kill "$TIMER" 2>/dev/null
    TIMER=
    [ -n "$JOB" ] || return 0
    kill -TERM -- "-$JOB" 2>/dev/null && sleep 0.2 && kill -KILL -- "-$JOB" 2>/dev/null
    JOB=
}

mounts_below() { awk -v below="$1/" 'index($2, below) == 1 { print $2 }' /proc/mounts | sort -r; }

passed() { report ok "$@"; }
failed() { report FAIL "$@"; }
skipped() { report skip "$@"; }

# report RESULT NAME [DETAIL]
report() {
    printf '%-4s %s: %s%s\n' "$1" "$SUITE" "$2" "${3:+ ($3)}"
    printf '%s\t%s\t%s\n' "$1" "$SUITE" "$2" >>"$RESULTS"
}

show_log() {
    echo "     log: $1"
    tail -n "${2:-25}" "$1" | sed 's/^/     | /'
}

# check NAME COMMAND…: one result. Returns whether it passed.
check() {
    local name=$1 log state first status start=$EPOCHREALTIME
    shift
    log=$LOGS/$SUITE-$(tr -c 'A-Za-z0-9\n' '-' <<<"$name" | cut -c1-80).log
    # A subshell would not do: in `check … && …` and `check … || …` bash ignores `set -e` in everything below, and only
    # the last command of a function would be tested.
    state=$WORK/.state
    { declare -p | grep -Ev '^declare -[A-Za-z]*r' && declare -f; } >"$state"
    set -m
    bash -c 'source "$0" 2>/dev/null; set -euo pipefail; "$@"' "$state" "$@" >"$log" 2>&1 </dev/null &
    JOB=$!
    set +m
    sleep "$LIMIT_S" &
    TIMER=$!
    wait -n -p first "$JOB" "$TIMER"
    status=$?
    if [ "$first" = "$TIMER" ]; then
        echo "ended after $LIMIT_S s" >>"$log"
        end_job
        status=124
    else
        kill "$TIMER" 2>/dev/null
        wait "$TIMER" 2>/dev/null
    fi
    JOB=
    TIMER=
    if [ "$status" = 0 ]; then
        passed "$name" "$(seconds_since "$start") s"
    else
        failed "$name" "status $status, $(seconds_since "$start") s"
        show_log "$log"
    fi
    return "$status"
}

seconds_since() { awk -v from="$1" -v to="$EPOCHREALTIME" 'BEGIN { printf "%.1f", to - from }'; }

# expect_fail PATTERN COMMAND…: the command must fail and say PATTERN (extended regular expression).
expect_fail() {
    local pattern=$1 output
    shift
    if output=$("$@" 2>&1); then
        echo "succeeded but must not: $*"
        return 1
    fi
    grep -qEi -- "$pattern" <<<"$output" || {
        echo "failed without saying '$pattern': $output"
        return 1
    }
}

# not COMMAND…: succeeds if the command fails. `!` would not end a function under `set -e`.
not() {
    if "$@"; then
        echo "must fail: $*"
        return 1
    fi
}

# wait_until SECONDS COMMAND…: repeats the command until it succeeds.
wait_until() {
    local deadline=$((SECONDS + $1))
    shift
    until "$@"; do
        if [ $SECONDS -ge $deadline ]; then
            echo "still not: $*"
            explain
            return 1
        fi
        sleep 0.2
    done
}
# A suite may say here what its nodes are like, for the log of a check that waited in vain.
explain() { true; }

# --- nodes ---------------------------------------------------------------------------------------------------------

# node_start NAME [options of the first start]: starts the node in $WORK/NAME, again without options if it exists.
node_start() {
    local dir=$WORK/$1
    shift
    if [ "$PLAIN" = 1 ]; then
        mkdir -p "$dir/mnt"
        return
    fi
    grep -qsxF "$dir" "$WORK/.nodes" || echo "$dir" >>"$WORK/.nodes"
    if [ -e "$dir" ]; then
        timeout 120 "$FOREBAY" start "$dir" </dev/null
    else
        # Any free port, and another one if it is taken at a later start: suites run in parallel.
        timeout 120 "$FOREBAY" start "$dir" --mount "$dir/mnt" --memory "$MEMORY" --s3 127.0.0.1:0 \
            ${FOREBAY_MOUNT_OPTIONS:+--mount-options "$FOREBAY_MOUNT_OPTIONS"} "$@" </dev/null
    fi
    mountpoint -q "$dir/mnt" || {
        echo "started but not mounted: $dir/mnt"
        return 1
    }
}

# strict_mounts: names are durable when a call returns on the mounts of nodes that start from now on.
strict_mounts() { export FOREBAY_MOUNT_OPTIONS=${FOREBAY_MOUNT_OPTIONS:+$FOREBAY_MOUNT_OPTIONS,}strict; }

node_stop() {
    local within=0
    [ "$PLAIN" = 1 ] && return
    node_within_memory "$1" || within=1
    timeout 120 "$FOREBAY" stop "$WORK/$1" </dev/null && [ "$within" = 0 ]
}
# The process has stayed within its memory budget since its start.
node_within_memory() {
    local peak_kib
    peak_kib=$(awk '/^VmHWM:/ { print $2 }' "/proc/$(node_pid "$1")/status")
    echo "memory: $((peak_kib >> 10)) MiB at most, budget $MEMORY"
    [ "$peak_kib" -le $((${MEMORY%MiB} << 10)) ]
}
# All data and metadata of a node are valid. The node may run.
node_fsck() { [ "$PLAIN" = 1 ] || timeout 300 "$FOREBAY" fsck "$WORK/$1" </dev/null; }
node_unmount() { [ "$PLAIN" = 1 ] || timeout 120 "$FOREBAY" umount "$WORK/$1" </dev/null; }
node_mount() { [ "$PLAIN" = 1 ] || timeout 120 "$FOREBAY" mount "$WORK/$1" </dev/null; }
# Makes the files below some paths durable: the kernel does not pass `syncfs` on to a mount.
sync_files() { find "$@" -xdev -type f -print0 | xargs -0 -r sync; }
node_pid() { jq -r .pid "$WORK/$1/node.json"; }

# A crash of the process: nothing is flushed, the mount stays.
node_kill() {
    local pid
    [ "$PLAIN" = 1 ] && return
    pid=$(node_pid "$1")
    kill -KILL "$pid"
    wait_until 30 process_is_gone "$pid"
}

# Whether the process is gone or a zombie without other threads: then all its resources are released.
process_is_gone() {
    kill -0 "$1" 2>/dev/null || return 0
    grep -qs '^State:[[:space:]]*Z' "/proc/$1/status" && [ "$(ls "/proc/$1/task" 2>/dev/null | wc -l)" -le 1 ]
}

# Ends a node in any state, by force if necessary.
node_end() {
    local dir=$1 pid
    pid=$(jq -r '.pid // empty' "$dir/node.json" 2>/dev/null)
    timeout 30 "$FOREBAY" stop "$dir" </dev/null >/dev/null 2>&1
    # The id may belong to another process by now.
    if [ -n "$pid" ] && [ "$(basename "$(readlink "/proc/$pid/exe")" 2>/dev/null)" = "$(basename "$FOREBAY")" ]; then
        kill -KILL "$pid" 2>/dev/null
    fi
    # Without a node, calls on such a mount wait for ever.
    pkill -KILL -f "mount-process.*$dir\"" 2>/dev/null
    ! mountpoint -q "$dir/mnt" 2>/dev/null || umount -l "$dir/mnt"
}

# --- trees ---------------------------------------------------------------------------------------------------------

# stage_tree COUNT DIR: a real tree of at most COUNT files and links, none larger than 16 MiB.
stage_tree() {
    local source=${FOREBAY_TEST_TREE:-}
    [ -n "$source" ] || source=$(rustc --print sysroot 2>/dev/null)
    # The toolchain without its documentation has too few files.
    if [ "$(find "$source" -type f 2>/dev/null | head -n 8000 | wc -l)" -lt 8000 ]; then source=/usr/share; fi
    mkdir -p "$2"
    (
        cd "$source"
        find . \( -type f -size -16M -o -type l \) -print0 | LC_ALL=C sort -z | sed -zn "1,$1p" |
            tar --create --null --no-recursion --files-from=- --file=- | tar --extract --file=- --directory="$2"
    )
    echo "tree: $source, $(find "$2" -type f | wc -l) files, $(du -sm "$2" | cut -f1) MiB"
}

# same_tree A B: contents, names, types, modes, owners, times, link counts and link targets are equal.
same_tree() {
    diff -r --no-dereference "$1" "$2" || return 1
    diff <(tree_attributes "$1") <(tree_attributes "$2") | head -n 40
    return "${PIPESTATUS[0]}"
}

# The size and link count of a directory differ between filesystems.
tree_attributes() {
    (cd "$1" && find . -type d -printf '%P %y %m %U:%G %T@\n' -o -printf '%P %y %m %U:%G %T@ %s %n %l\n') | LC_ALL=C sort
}
