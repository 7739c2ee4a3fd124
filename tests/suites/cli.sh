#!/usr/bin/env bash
# The command line: every command, and its error messages. One `row` per case.
source "$(dirname "$0")/../lib.sh"
LIMIT_S=120

if [ "$PLAIN" = 1 ]; then
    skipped "all" "needs the binary"
    exit 0
fi

RUNNING=$WORK/running
STOPPED=$WORK/stopped
EMPTY=$WORK/empty

# run_row STATUS PATTERN ARGUMENT…: STATUS is `ok`, `fails` or a number. The output, both streams, must match PATTERN
# (extended regular expression, any case). The command must not panic, and a refusal must have a message.
run_row() {
    local expected=$1 pattern=$2 status output
    shift 2
    echo "forebay $*"
    output=$(timeout 60 "$FOREBAY" "$@" 2>&1) && status=0 || status=$?
    echo "$output"
    echo "status $status, expected $expected, pattern '$pattern'"
    case "$expected" in
    ok) [ "$status" = 0 ] ;;
    fails) [ "$status" != 0 ] && [ "$status" -lt 124 ] ;;
    *) [ "$status" = "$expected" ] ;;
    esac
    if grep -qE "panicked at|RUST_BACKTRACE" <<<"$output"; then
        echo "it panicked"
        return 1
    fi
    [ "$expected" = ok ] || [ -n "$output" ]
    grep -qEi -- "$pattern" <<<"$output"
}

# row NAME STATUS PATTERN ARGUMENT…
row() {
    local name=$1
    shift
    check "$name" run_row "$@"
}

# refused NAME PATTERN ARGUMENT…: a start that must fail and leave no process, no mount, and nothing else that prevents
# the corrected command.
refused() {
    local name=$1
    shift
    check "$name" run_refused "$@"
    forget_empty
}

forget_empty() {
    node_end "$EMPTY"
    rm -rf --one-file-system "$EMPTY"
}

run_refused() {
    local pattern=$1
    shift
    # A node that starts despite the error must not outlive this suite.
    echo "$EMPTY" >>"$WORK/.nodes"
    run_row fails "$pattern" start "$EMPTY" "$@"
    [ ! -e "$EMPTY/node.json" ]
    not mountpoint -q "$EMPTY/mnt"
    echo "now without the mistake:"
    run_row ok '' start "$EMPTY" --drives 1 --drive-size 64M --profile 1+0 --mount "$EMPTY/mnt"
    mountpoint -q "$EMPTY/mnt"
    run_row ok '' stop "$EMPTY"
}

# json NAME FILTER ARGUMENT…: the command succeeds and prints only JSON, for which the jq filter is true.
json() {
    local name=$1
    shift
    check "$name" run_json "$@"
}

run_json() {
    local filter=$1
    shift
    timeout 60 "$FOREBAY" "$@" >"$WORK/json"
    cat "$WORK/json"
    jq -e "$filter" "$WORK/json"
}

# --- without a node ------------------------------------------------------------------------------------------------

row "help lists the commands" ok 'start.*|stop|status' --help
row "help of a command" ok 'drives' start --help
row "version" ok 'forebay [0-9]+\.[0-9]+' --version
row "no command" fails 'usage'
row "an unknown command" fails 'unrecognized|unknown|invalid' frobnicate
row "an unknown option" fails 'unexpected|unknown' start "$EMPTY" --frobnicate
row "start without a directory" fails 'required|missing|usage' start
row "stop of a directory that does not exist" fails 'forebay|no such|not .*(exist|found|running)|no node' stop "$WORK/nowhere"
row "status of a directory that does not exist" fails 'no such|not .*(exist|found|running)|no node' status "$WORK/nowhere"
row "mount of a directory that does not exist" fails 'no such|not .*(exist|found|running)|no node' mount "$WORK/nowhere"
row "umount of a directory that does not exist" fails 'no such|not .*(exist|found|running)|no node' umount "$WORK/nowhere"
row "drive list of a directory that does not exist" fails 'no such|not .*(exist|found|running)|no node' drive list "$WORK/nowhere"

# --- starts that are refused ---------------------------------------------------------------------------------------

refused "too little memory" 'too little: memory=100.00 MiB least=512.00 MiB' --memory 100M
refused "more memory than there is" 'machine has less memory' --memory 900TiB
refused "memory that is no size" 'memory' --memory much
refused "drives that give back what they do not know" 'trim' --trim sometimes
refused "a profile that is none" 'profile' --drives 6 --drive-size 64M --profile four
refused "an empty profile" 'profile|value' --drives 6 --drive-size 64M --profile ''
refused "a profile with k = 0" 'profile|k' --drives 6 --drive-size 64M --profile 0+2
refused "a profile with too large a k" 'profile|k' --drives 6 --drive-size 64M --profile 400+2
refused "a profile with too large an m" 'profile|m' --drives 6 --drive-size 64M --profile 4+400
refused "a profile with a negative m" 'profile|value|unexpected' --drives 6 --drive-size 64M --profile 4+-1
refused "a write threshold below k" 'profile|w' --drives 12 --drive-size 64M --profile 12/7/6
refused "a write threshold above n" 'profile|w' --drives 12 --drive-size 64M --profile 12/7/13
refused "k above n" 'profile|k' --drives 12 --drive-size 64M --profile 7/12/9
refused "no copies" 'profile' --drives 3 --drive-size 64M --profile r0
refused "more domains than drives" 'drive' --drives 3 --drive-size 64M --profile 4+2
refused "no drives" 'drive' --drives 0 --drive-size 64M --profile 1+0
refused "drives that are no number" 'drives|invalid' --drives six --drive-size 64M --profile 4+2
refused "a size that is none" 'size' --drives 6 --drive-size big --profile 4+2
refused "a size of zero" 'size|small|least' --drives 6 --drive-size 0 --profile 4+2
refused "drives that are too small" 'size|small|least' --drives 6 --drive-size 4K --profile 4+2
truncate -s 48M "$WORK/small.img"
refused "a file that is too small for a drive" 'too small.*least' --drive "$WORK/small.img" --profile 1+0
rm -f "$WORK/small.img"
refused "drives larger than the disk" 'space|size' --drives 6 --drive-size 4T --profile 4+2
refused "a device that does not exist" 'drive|device|no such' --drive /dev/forebay-no-such-device --drive-size 64M --profile 1+0
rm -f /dev/forebay-no-such-device
refused "a drive that is a directory" 'drive|directory' --drive "$WORK" --profile 1+0
refused "the same drive twice" 'drive|twice|same' --drive "$WORK/same" --drive "$WORK/same" --drive-size 64M --profile 1+1
touch "$WORK/a-file"
refused "a mount point that is a file" 'mount|directory' --drives 1 --drive-size 64M --profile 1+0 --mount "$WORK/a-file"
row "a check where no node runs" ok 'ok +room ' check "$WORK/nowhere"
row "a check of all nodes where none runs" fails 'no node runs' check "$WORK/nowhere" --all
row "a check of a place where nothing can be written" fails 'PROBLEM +sync ' check /proc/forebay
row "a node's directory that is a file" fails 'directory|file' start "$WORK/a-file" --drives 1 --drive-size 64M --profile 1+0
row "a directory that cannot be written" fails 'read-only|permitted|denied|no such|cannot|not supported' \
    start /proc/forebay --drives 1 --drive-size 64M --profile 1+0

mkdir -p "$WORK/busy"
mount -t tmpfs tmpfs "$WORK/busy" && {
    refused "a mount point in use" 'busy|mount' --drives 1 --drive-size 64M --profile 1+0 --mount "$WORK/busy"
    umount "$WORK/busy"
}

# A separate mount namespace without /dev/fuse.
without_fuse() {
    echo "$EMPTY" >>"$WORK/.nodes"
    # shellcheck disable=SC2016 # expanded inside
    unshare --mount sh -c 'mount -t tmpfs tmpfs /dev && mknod -m 666 /dev/null c 1 3 && mknod -m 666 /dev/urandom c 1 9 && "$@"' sh \
        "$FOREBAY" start "$EMPTY" --drives 1 --drive-size 64M --profile 1+0 >"$WORK/out" 2>&1 </dev/null && {
        cat "$WORK/out"
        echo "started without /dev/fuse"
        return 1
    }
    cat "$WORK/out"
    grep -q '/dev/fuse' "$WORK/out"
    not grep -q 'panicked' "$WORK/out"
}
if unshare --mount true 2>/dev/null; then
    check "/dev/fuse is missing" without_fuse
else
    skipped "/dev/fuse is missing" "no mount namespaces here"
fi
forget_empty

# --- a node that runs ----------------------------------------------------------------------------------------------

check "start returns when the filesystem can be used" node_start running --drives 6 --drive-size 64M --profile 4+2 || exit 0
node_json_is_complete() { jq -e '.pid and .mount and .addresses and .filesystem' "$RUNNING/node.json"; }
check "node.json has process, mount, addresses and filesystem" node_json_is_complete
pid_is_the_node() { [ "$(basename "$(readlink "/proc/$(node_pid running)/exe")")" = "$(basename "$FOREBAY")" ]; }
check "node.json names the running process" pid_is_the_node

json "status as JSON" 'type == "object"' status "$RUNNING" --json
json "drive list as JSON has six drives" '[.. | arrays | select(length == 6)] | length > 0' drive list "$RUNNING" --json
row "status for people" ok '[a-z]' status "$RUNNING"
json "status has the memory that was given" '.memory.budget_bytes == 536870912 and .memory.resident_bytes > 0' status "$RUNNING" --json
row "a check of a running node" ok '(ok|WARNING) +sync ' check "$RUNNING"
json "a check as JSON" '.[0].findings | map(.code) | contains(["kernel", "clock", "memory", "room", "sync"])' check "$RUNNING" --json
row "drive list for people" ok '[a-z]' drive list "$RUNNING"

row "a second start says that it runs" fails 'already|running' start "$RUNNING"
still_mounted() { mountpoint -q "$RUNNING/mnt" && echo x >"$RUNNING/mnt/x" && grep -q x "$RUNNING/mnt/x"; }
check "the second start did no harm" still_mounted
row "mount when mounted" fails 'already|mounted|busy' mount "$RUNNING"
check "that did no harm either" still_mounted

busy_umount() {
    exec 9>"$RUNNING/mnt/held"
    run_row fails 'busy|use' umount "$RUNNING"
    exec 9>&-
    still_mounted
}
check "umount while a file is open is refused" busy_umount
row "umount" ok '' umount "$RUNNING"
unmounted() { not mountpoint -q "$RUNNING/mnt"; }
check "umount unmounts" unmounted
row "umount when not mounted" fails 'not mounted' umount "$RUNNING"
json "status while not mounted" 'type == "object"' status "$RUNNING" --json
row "mount with an option that is not known" fails 'unknown mount option.*readahead' mount "$RUNNING" -o fast
row "mount with a read-ahead that is none" fails 'readahead.*64MiB' mount "$RUNNING" -o readahead=1TiB
row "mount with a read-ahead" ok '' mount "$RUNNING" -o readahead=16MiB
reads_ahead() { [ "$(cat "/sys/class/bdi/$(mountpoint -d "$RUNNING/mnt")/read_ahead_kb")" = "$1" ]; }
check "the kernel reads so far ahead" reads_ahead 16384
row "umount after that" ok '' umount "$RUNNING"
row "mount with the default read-ahead" ok '' mount "$RUNNING" -o rw
check "the kernel reads 4 MiB ahead" reads_ahead 4096
row "umount again" ok '' umount "$RUNNING"
row "mount" ok '' mount "$RUNNING"
check "mount mounts, with the data" still_mounted

mkdir -p "$WORK/elsewhere"
mount_elsewhere() {
    "$FOREBAY" umount "$RUNNING"
    "$FOREBAY" mount "$RUNNING" "$WORK/elsewhere"
    grep -q x "$WORK/elsewhere/x"
    "$FOREBAY" umount "$RUNNING"
    not mountpoint -q "$WORK/elsewhere"
    "$FOREBAY" mount "$RUNNING" "$RUNNING/mnt"
}
check "mount at another place" mount_elsewhere

# umount removes the mount from the tree before the threads of the node notice; with an open file, long before.
mount_after_umount() {
    local i
    sleep 0.5 9>"$RUNNING/mnt/held" &
    umount -l "$RUNNING/mnt"
    timeout 60 "$FOREBAY" mount "$RUNNING"
    for ((i = 0; i < 30; i++)); do
        umount "$RUNNING/mnt"
        timeout 60 "$FOREBAY" mount "$RUNNING" >"$WORK/out" || return 1
    done
    still_mounted
}
check "mount right after umount of the system" mount_after_umount
mount_while_detached_files_are_open() {
    exec 9>"$RUNNING/mnt/held"
    umount -l "$RUNNING/mnt"
    run_row fails 'files on it were open' mount "$RUNNING"
    exec 9>&-
    run_row ok '' mount "$RUNNING"
    still_mounted
}
check "mount while a detached mount has open files" mount_while_detached_files_are_open
mount_makes_the_directory() {
    "$FOREBAY" umount "$RUNNING"
    "$FOREBAY" mount "$RUNNING" "$WORK/not/there/yet"
    grep -q x "$WORK/not/there/yet/x"
    "$FOREBAY" umount "$RUNNING"
    : >"$WORK/a-file"
    expect_fail 'cannot make the mount point|not a directory' "$FOREBAY" mount "$RUNNING" "$WORK/a-file/below"
    expect_fail 'not a directory' "$FOREBAY" mount "$RUNNING" "$WORK/a-file"
    "$FOREBAY" mount "$RUNNING" "$RUNNING/mnt"
}
check "mount makes the directory" mount_makes_the_directory

row "stop" ok '' stop "$RUNNING"
stopped_well() {
    unmounted
    [ ! -e "$RUNNING/node.json" ] || process_is_gone "$(node_pid running)"
}
check "stop leaves neither mount nor process" stopped_well
row "stop of a node that does not run" fails 'not running|no node' stop "$RUNNING"
row "status of a node that does not run" fails 'not running|no node' status "$RUNNING" --json
row "mount of a node that does not run" fails 'not running|no node' mount "$RUNNING"
check "a second start needs no options" node_start running
check "and has the data" still_mounted
json "and the memory that was given" '.memory.budget_bytes == 536870912' status "$RUNNING" --json

upkeep_helps() {
    local text
    text=$("$FOREBAY" upkeep --help | tr -s ' \n' ' ')
    grep -qF 'Settings last until they are changed' <<<"$text"
    grep -qF 'half of that while foreground requests take twice as long as usual' <<<"$text"
    grep -qF 'Settings last until they are changed' <(tr '\n' ' ' <"$ROOT/docs/operate/running.md")
    grep -qF 'The rate is halved while requests to drives take twice as long as usual' <(tr '\n' ' ' <"$ROOT/docs/operate/running.md")
}
check "upkeep --help says what the documentation says" upkeep_helps
row "a limit of what users wait for that is none" fails 'such as 500us' upkeep "$RUNNING" --keep-p99-below fast
row "a limit of what users wait for that is too short" fails 'between 100 us and 60 s' upkeep "$RUNNING" --keep-p99-below 99us
json "without a word, users wait 100 ms" '.keep_p99_below_us == 100000 and .held_to_bytes_per_s == null' upkeep "$RUNNING" --json
# A sync takes longer than the shortest limit.
held_back() {
    local least users
    "$FOREBAY" upkeep "$RUNNING" --rate 64MiB --keep-p99-below 100us --json | jq -e '.keep_p99_below_us == 100'
    # Many a second, of which little stays.
    for at in {1..1500}; do
        dd if=/dev/zero of="$RUNNING/mnt/users" bs=64k count=1 seek=$((at % 100)) conv=notrunc oflag=dsync status=none
        sleep 0.01
    done &
    users=$!
    least=$((64 * 1024 * 1024 / 8))
    wait_until 60 held_to ". != null and . >= $least - 1048576 and . <= $least"
    "$FOREBAY" status "$RUNNING" | grep 'held back when that is more than 100 us, now to'
    "$FOREBAY" upkeep "$RUNNING" --keep-p99-below none --json | jq -e '.held_to_bytes_per_s == null'
    kill "$users"
    wait "$users" || true
    rm "$RUNNING/mnt/users"
    "$FOREBAY" upkeep "$RUNNING" --rate 256MiB --keep-p99-below 100ms
}
held_to() { "$FOREBAY" status "$RUNNING" --json | jq -e ".upkeep.held_to_bytes_per_s | $1"; }
check "background work is held back while users wait" held_back
json "no event that matters" 'length == 0' events "$RUNNING" --severity warning --since 1h --json
row "events of a severity that is none" fails 'none of info, warning, error' events "$RUNNING" --severity bad
row "events of a node that does not run" fails 'not running|no node' events "$WORK/nowhere"

restart_with_other_profile() {
    "$FOREBAY" stop "$RUNNING"
    run_row fails 'profile|exist' start "$RUNNING" --profile r3
    node_start running
}
mounts_are_remembered() {
    "$FOREBAY" umount "$RUNNING"
    "$FOREBAY" mount "$RUNNING" "$WORK/elsewhere" -o strict
    jq -e --arg path "$WORK/elsewhere" '.mounts == {"1": {path: $path, options: "strict"}}' "$RUNNING/mounts.json"
    "$FOREBAY" stop "$RUNNING"
    timeout 60 "$FOREBAY" start "$RUNNING" </dev/null
    mountpoint -q "$WORK/elsewhere"
    grep -q x "$WORK/elsewhere/x"
    "$FOREBAY" umount "$RUNNING"
    "$FOREBAY" mount "$RUNNING" "$RUNNING/mnt" -o rw
    still_mounted
}
check "the next start mounts at the same place" mounts_are_remembered
check "options that contradict the node are refused" restart_with_other_profile
check "and it still starts" still_mounted

after_kill() {
    node_kill running
    node_start running
    still_mounted
}
check "start after a crash replaces the dead mount" after_kill

stop_after_kill() {
    node_kill running
    run_row fails 'not running|no node' stop "$RUNNING"
    node_start running
}
check "stop after a crash says that it does not run" stop_after_kill

# --- users, access keys and policies -------------------------------------------------------------------------------

admin_credentials() {
    [ "$(stat -c %a "$RUNNING/admin-credentials")" = 600 ] && [ "$(stat -c %a "$RUNNING/node.key")" = 600 ]
    grep -Pzq '^\[default\]\naws_access_key_id = AKIA[A-Z2-7]{16}\naws_secret_access_key = [A-Za-z0-9]{40}\n$' \
        "$RUNNING/admin-credentials"
}
check "the first start makes an administrator's key" admin_credentials
json "the first user is the administrator" 'length == 1 and .[0].name == "admin" and .[0].admin and .[0].keys == 1' \
    user list "$RUNNING" --json
row "user add" ok 'added' user add "$RUNNING" ann --uid 1000 --gid 1000 --groups 4,5 --policy readwrite
row "a user twice" fails 'exists: name=ann' user add "$RUNNING" ann
row "a bad name of a user" fails 'bad name' user add "$RUNNING" 'a/b'
row "user list for people" ok 'ann .*4,5' user list "$RUNNING"
row "key add for an unknown user" fails 'no such user: name=bob' key add "$RUNNING" bob
row "key add shows the secret" ok 'secret key +[A-Za-z0-9]{40}' key add "$RUNNING" ann
secret_is_shown_once() {
    local secret
    "$FOREBAY" key add "$RUNNING" ann --expires 1h --json >"$WORK/key"
    secret=$(jq -r .secret_key "$WORK/key")
    [ "${#secret}" = 40 ]
    jq -e '.expires_s > now + 3500 and .expires_s < now + 3700' "$WORK/key"
    not grep -rqF "$secret" "$RUNNING/meta" "$RUNNING/log" "$RUNNING/audit"
    "$FOREBAY" key list "$RUNNING" --json >"$WORK/keys"
    not grep -qF "$secret" "$WORK/keys"
    jq -e 'map(select(.user == "ann")) | length == 2 and all(.state == "active")' "$WORK/keys"
}
check "the secret is nowhere else" secret_is_shown_once
row "a time that is none" fails 'not a duration' key add "$RUNNING" ann --expires soon
take_over() {
    echo 'minio-secret!' | "$FOREBAY" key add "$RUNNING" ann --access-key minioadmin --secret-stdin >"$WORK/out"
    not grep -q 'minio-secret' "$WORK/out"
    echo 'minio-secret!' | expect_fail 'access key exists' "$FOREBAY" key add "$RUNNING" ann --access-key minioadmin --secret-stdin
    echo 'short' | expect_fail 'bad secret' "$FOREBAY" key add "$RUNNING" ann --access-key other --secret-stdin
    echo 'minio-secret!' | expect_fail 'short-lived' "$FOREBAY" key add "$RUNNING" ann --access-key ASIAX --secret-stdin
}
check "a key of another system is taken over" take_over
row "key disable" ok 'disabled' key disable "$RUNNING" minioadmin
json "a disabled key is shown as such" 'map(select(.access_key == "minioadmin"))[0].state == "disabled"' key list "$RUNNING" --json
row "key enable" ok 'active' key enable "$RUNNING" minioadmin
row "user disable" ok 'disabled' user disable "$RUNNING" ann
json "a disabled user's keys are, too" 'map(select(.user == "ann")) | all(.state == "disabled")' key list "$RUNNING" --json
row "user enable" ok 'enabled' user enable "$RUNNING" ann
row "key list of one user" ok 'minioadmin' key list "$RUNNING" --user ann
row "key list of an unknown user" fails 'no such user' key list "$RUNNING" --user bob
row "key remove" ok 'removed' key remove "$RUNNING" minioadmin
row "key remove of what is not there" fails 'no such access key' key remove "$RUNNING" minioadmin
policies() {
    echo '{"Statement":{"Effect":"Allow","Action":"s3:Get*","Resource":"arn:aws:s3:::b/*"}}' >"$WORK/policy"
    "$FOREBAY" policy set "$RUNNING" --user ann "$WORK/policy"
    "$FOREBAY" policy show "$RUNNING" --user ann | diff - "$WORK/policy"
    "$FOREBAY" policy set "$RUNNING" --role reader - <"$WORK/policy"
    "$FOREBAY" policy list "$RUNNING" --json | jq -e 'map(.target) == [{"user":"ann"},{"role":"reader"}]'
    sed 's/Effect/Effekt/' "$WORK/policy" >"$WORK/wrong"
    expect_fail 'Statement\[0\].Effekt: element is not known' "$FOREBAY" policy set "$RUNNING" --user ann "$WORK/wrong"
    expect_fail 'Principal is missing' "$FOREBAY" policy set "$RUNNING" --bucket b "$WORK/policy"
    expect_fail 'no such bucket' "$FOREBAY" policy show "$RUNNING" --bucket b
    expect_fail 'no such role' "$FOREBAY" policy show "$RUNNING" --role writer
    expect_fail 'required' "$FOREBAY" policy show "$RUNNING"
    expect_fail 'cannot be used' "$FOREBAY" policy show "$RUNNING" --role reader --user ann
    "$FOREBAY" policy remove "$RUNNING" --role reader
    "$FOREBAY" policy remove "$RUNNING" --user ann
    expect_fail 'user has no policy' "$FOREBAY" policy show "$RUNNING" --user ann
}
check "policies are set, shown, listed and removed" policies
names_are_free_again() {
    local before
    before=$("$FOREBAY" user list "$RUNNING" --json | jq '.[] | select(.name == "ann").id')
    "$FOREBAY" user remove "$RUNNING" ann
    "$FOREBAY" key list "$RUNNING" --json | jq -e 'all(.user == "admin")'
    "$FOREBAY" user add "$RUNNING" ann
    "$FOREBAY" user list "$RUNNING" --json | jq -e ".[] | select(.name == \"ann\") | .id > $before and .keys == 0"
}
check "a name is free again at once, without the keys" names_are_free_again
json "the audit log is well" '.audit.lost == 0 and .audit.problem == null' status "$RUNNING" --json
lost_node_key() {
    "$FOREBAY" stop "$RUNNING"
    mv "$RUNNING/node.key" "$WORK/node.key"
    node_start running
    "$FOREBAY" status "$RUNNING" --json | jq -e '.problems | any(test("1 access keys.*node.key"))'
    "$FOREBAY" key list "$RUNNING" --json | jq -e '.[0].state == "unreadable"'
    "$FOREBAY" stop "$RUNNING"
    mv "$WORK/node.key" "$RUNNING/node.key"
    node_start running
    "$FOREBAY" key list "$RUNNING" --json | jq -e '.[0].state == "active"'
}
check "a lost node.key is reported, and the right one works again" lost_node_key

check "drives given by path" node_start stopped --drive "$WORK/da" --drive "$WORK/db" --drive "$WORK/dc" --drive-size 64M --profile r3
drives_are_there() { [ "$(find "$WORK" -maxdepth 1 -name 'd[abc]' -size +60M | wc -l)" = 3 ]; }
check "the drives are at these paths" drives_are_there
row "drives of a node that runs are refused" fails 'in use' \
    start "$WORK/thief" --drive "$WORK/da" --drive "$WORK/db" --drive "$WORK/dc" --profile r3
check "that node stops" node_stop stopped
row "drives of another cluster are refused" fails 'cluster' \
    start "$WORK/thief" --drive "$WORK/da" --drive "$WORK/db" --drive "$WORK/dc" --profile r3
missing_drive() {
    mv "$WORK/da" "$WORK/away"
    # r3 can be read from any copy: the node either starts and reports the drive, or refuses and names it.
    if timeout 60 "$FOREBAY" start "$STOPPED" >"$WORK/out" 2>&1; then "$FOREBAY" stop "$STOPPED"; else grep -q 'da' "$WORK/out"; fi
    cat "$WORK/out"
    mv "$WORK/away" "$WORK/da"
    node_start stopped
    node_stop stopped
}
check "a missing drive is reported or survived" missing_drive

path_of() { "$FOREBAY" drive list "$STOPPED" --json | jq -r ".[$1].path"; }
# A device may get another name. The drive is known by what is written on it.
renamed_drive() {
    node_start stopped
    head -c 3000000 /dev/urandom >"$STOPPED/mnt/file"
    sync "$STOPPED/mnt/file"
    sha256sum <"$STOPPED/mnt/file" >"$WORK/sum"
    node_stop stopped
    jq -e '.drives | length == 3' "$STOPPED/drives.json"
    mv "$WORK/da" "$WORK/renamed"
    mv "$WORK/db" "$WORK/da"
    mv "$WORK/dc" "$WORK/other"
    # Two are copies of one: which is meant?
    cp --sparse=always "$WORK/renamed" "$WORK/copy"
    expect_fail 'are the same drive of this cluster' "$FOREBAY" start "$STOPPED" --drive "$WORK/renamed" --drive "$WORK/copy"
    rm "$WORK/copy"
    expect_fail 'is not a drive of this cluster: add it with' "$FOREBAY" start "$STOPPED" --drive "$WORK/other" --drive "$WORK/a-file"
    timeout 60 "$FOREBAY" start "$STOPPED" --drive "$WORK/renamed" --drive "$WORK/other" --drive "$WORK/da" </dev/null
    "$FOREBAY" status "$STOPPED" --json | jq -e '.state == "healthy"'
    [ "$(path_of 0) $(path_of 1) $(path_of 2)" = "$WORK/renamed $WORK/da $WORK/other" ]
    echo 3 >/proc/sys/vm/drop_caches
    sha256sum <"$STOPPED/mnt/file" | cmp - "$WORK/sum"
    node_stop stopped
    node_fsck stopped
    # It is remembered.
    node_start stopped
    "$FOREBAY" status "$STOPPED" --json | jq -e '.state == "healthy"'
    node_stop stopped
}
check "drives with other names are found when they are named, with their data" renamed_drive

# What is known of no drive any more goes; without the file, drives are named again.
paths_lost() {
    rm "$STOPPED/drives.json"
    expect_fail 'its path is not known on this machine: .*start DIR --drive PATH' timeout 60 "$FOREBAY" start "$STOPPED"
    expect_fail 'its path is not known on this machine' node_fsck stopped
    timeout 60 "$FOREBAY" start "$STOPPED" --drive "$WORK/renamed" </dev/null
    [ "$(path_of 0) $(path_of 1)" = "$WORK/renamed -" ]
    "$FOREBAY" status "$STOPPED" --json | jq -r '.problems[]' | grep -E '^drive 1 is missing: .*--drive PATH.*drive replace DIR 1'
    node_stop stopped
    jq '.drives["00000000-0000-0000-0000-000000000001"] = "/nowhere"' "$STOPPED/drives.json" >"$WORK/json"
    cp "$WORK/json" "$STOPPED/drives.json"
    timeout 60 "$FOREBAY" start "$STOPPED" --drive "$WORK/da" --drive "$WORK/other" </dev/null
    jq -e '.drives | length == 3' "$STOPPED/drives.json"
    sha256sum <"$STOPPED/mnt/file" | cmp - "$WORK/sum"
    node_stop stopped
    echo '{"drives":{},"more":1}' >"$WORK/json"
    cp "$STOPPED/drives.json" "$WORK/drives.json"
    cp "$WORK/json" "$STOPPED/drives.json"
    expect_fail "not understood: $STOPPED/drives.json" timeout 60 "$FOREBAY" start "$STOPPED"
    cp "$WORK/drives.json" "$STOPPED/drives.json"
    node_start stopped
    node_stop stopped
}
check "paths that are lost are asked for" paths_lost

# disk SIZE: an empty filesystem of its own. The file below it has only what was written.
disk() {
    mkdir -p "$WORK/disk"
    truncate -s "$1" "$WORK/disk.img"
    mkfs.ext4 -q -m 0 "$WORK/disk.img"
    mount -o loop "$WORK/disk.img" "$WORK/disk"
    grep -qsxF "$WORK/disk/node" "$WORK/.nodes" || echo "$WORK/disk/node" >>"$WORK/.nodes"
}
start_on_disk() { timeout 60 "$FOREBAY" start "$WORK/disk/node" --memory "$MEMORY" --s3 127.0.0.1:0 "$@" </dev/null; }
stop_on_disk() { timeout 60 "$FOREBAY" stop "$WORK/disk/node" </dev/null; }
no_disk() {
    stop_on_disk
    umount "$WORK/disk"
    rm "$WORK/disk.img"
}
allocated_bytes() { [ ! -e "$WORK/disk/node" ] && echo 0 || du -s -B 1 "$WORK/disk/node/drives" | cut -f1; }
# Bytes that reached the disk: space that is only reserved does not count.
written_bytes() { sync -f "$WORK/disk" && du -B 1 "$WORK/disk.img" | cut -f1; }

# Without options for drives, on a disk with 20 GB free: a tenth of it, metadata included.
small_disk_is_not_filled() {
    local free taken
    disk 19500M
    free=$(df --output=avail -B 1 "$WORK/disk" | tail -n 1)
    start_on_disk | tee "$WORK/out"
    taken=$(du -s -B 1 "$WORK/disk/node" | cut -f1)
    no_disk
    echo "took $taken bytes of $free"
    [ "$free" -gt 19000000000 ]
    [ "$taken" -le 2000000000 ]
    grep -qE "drives +1 in .*GiB each \(--drive-size; for more room later: forebay drive add $WORK/disk/node\)" "$WORK/out"
}
check "a start without sizes takes at most 2 GB of a disk with 20 GB free, and says how to get more" small_disk_is_not_filled

# Below 20 GB: smaller drive files, then fewer, as far as the profile allows.
smaller_then_fewer() {
    disk 4000M
    start_on_disk --profile 4+2 | tee "$WORK/out"
    grep -qE 'drives +6 in .*, 64.00 MiB each' "$WORK/out"
    grep -qE 'only 3\.[0-9]+ GiB are free, so each drive file has 64.00 MiB' "$WORK/out"
    no_disk
    disk 600M
    expect_fail 'not enough space for 6 drives of at least 64.00 MiB: free=.*dir=' start_on_disk --drives 6 --profile 4+2
    rm -r "$WORK/disk/node"
    start_on_disk --drives 6 | tee "$WORK/out"
    grep -qE 'so there are [34] drive files of 64.00 MiB instead of 6' "$WORK/out"
    "$FOREBAY" status "$WORK/disk/node" --json |
        jq -e '(.drives | length) as $n | ($n == 3 or $n == 4) and .filesystems[0].profile == "r2"'
    head -c 3000000 /dev/urandom >"$WORK/disk/node/mnt/file"
    sync "$WORK/disk/node/mnt/file"
    stop_on_disk
    start_on_disk >"$WORK/out"
    not grep -q 'only ' "$WORK/out"
    no_disk
}
check "on a small disk drive files are smaller, then fewer, and the output says so" smaller_then_fewer

# written_ahead MEASURE BEFORE USED: since the measure was BEFORE, two drives have at most 64 MiB each more than was used,
# now and some seconds later.
written_ahead() {
    local bytes
    for _ in 1 2 3; do
        bytes=$(($("$1") - $2))
        echo "$1: $bytes, used $3"
        [ "$bytes" -le $(($3 + 2 * (64 << 20))) ]
        sleep 3
    done
}
# With two drives, every byte of a file is on both.
nothing_is_written_ahead() {
    local trim measure before
    for trim in always devices; do
        measure=$([ "$trim" = always ] && echo allocated_bytes || echo written_bytes)
        disk 6000M
        before=$("$measure")
        start_on_disk --drives 2 --drive-size 1GiB --trim "$trim" >"$WORK/out"
        [ "$trim" = devices ] || [ "$(allocated_bytes)" -le $((16 << 20)) ]
        written_ahead "$measure" "$before" 0
        head -c $((200 << 20)) /dev/urandom >"$WORK/disk/node/mnt/file"
        sync "$WORK/disk/node/mnt/file"
        written_ahead "$measure" "$before" $((2 * (200 << 20)))
        no_disk
    done
}
check "drive files are not written ahead of use, and with --trim always not allocated" nothing_is_written_ahead

# --- where S3 is served --------------------------------------------------------------------------------------------

s3_of() { "$FOREBAY" status "$WORK/$1" --json | jq -r .s3; }
# s3_node NAME ARGUMENT…: starts a node in the way of a user.
s3_node() {
    local dir=$WORK/$1
    shift
    grep -qsxF "$dir" "$WORK/.nodes" || echo "$dir" >>"$WORK/.nodes"
    timeout 120 "$FOREBAY" start "$dir" --drives 1 --drive-size 64M --memory "$MEMORY" "$@" </dev/null
}
ports_of_new_nodes() {
    local first second both=()
    # Two starts at the same time: each gets its own port.
    s3_node port-one >"$WORK/one.out" &
    both+=($!)
    s3_node port-two >"$WORK/two.out" &
    both+=($!)
    wait "${both[0]}"
    wait "${both[1]}"
    first=$(s3_of port-one)
    second=$(s3_of port-two)
    echo "$first $second"
    [ "$first" != "$second" ]
    grep -qE '^http://127.0.0.1:9[0-9]{3}$' <<<"$first"
    grep -qE '^http://127.0.0.1:9[0-9]{3}$' <<<"$second"
    "$FOREBAY" stop "$WORK/port-one"
    s3_node port-one
    [ "$(s3_of port-one)" = "$first" ]
}
check "new nodes take port 9000 or the next, and keep it" ports_of_new_nodes
# fresh_network COMMAND…: runs a function of this suite where no port is taken.
fresh_network() {
    unshare --net bash -c 'source "$0" 2>/dev/null; set -euo pipefail; ip link set lo up; "$@"' "$WORK/.state" "$@"
}
first_port_is_9000() {
    s3_node port-three | tee "$WORK/out"
    s3_node port-four
    echo "$(s3_of port-three) $(s3_of port-four)" | tee "$WORK/ports"
    "$FOREBAY" stop "$WORK/port-three"
    "$FOREBAY" stop "$WORK/port-four"
    grep -qx 'http://127.0.0.1:9000 http://127.0.0.1:9001' "$WORK/ports"
    grep -q 's3 .*http://127.0.0.1:9000$' "$WORK/out"
}
check "a new node takes port 9000 if it is free, the second 9001" fresh_network first_port_is_9000
port_that_is_taken() {
    local first port
    first=$(s3_of port-one)
    port=${first##*:}
    "$FOREBAY" stop "$WORK/port-one"
    perl -MIO::Socket::INET -e '
        my $s = IO::Socket::INET->new(LocalAddr => "127.0.0.1", LocalPort => $ARGV[0], Listen => 1, ReuseAddr => 1)
            or die $!;
        sleep 60' "$port" &
    wait_until 10 bash -c "exec 3<>/dev/tcp/127.0.0.1/$port"
    expect_fail "served at 127.0.0.1:$port; end what listens there.*--s3 ADDRESS:PORT" s3_node port-one
    kill $!
    wait $! || true
    s3_node port-one
    [ "$(s3_of port-one)" = "$first" ]
    "$FOREBAY" stop "$WORK/port-one"
    s3_node port-one --s3 127.0.0.1:0
    [ "$(s3_of port-one)" != "$first" ]
}
check "a start whose port is taken says what to do" port_that_is_taken
no_s3_is_remembered() {
    "$FOREBAY" stop "$WORK/port-two"
    s3_node port-two --no-s3
    [ "$(s3_of port-two)" = null ]
    "$FOREBAY" stop "$WORK/port-two"
    s3_node port-two
    [ "$(s3_of port-two)" = null ]
    "$FOREBAY" stop "$WORK/port-two"
    s3_node port-two --s3 127.0.0.1:0
    [ "$(s3_of port-two)" != null ]
    "$FOREBAY" stop "$WORK/port-two"
    "$FOREBAY" stop "$WORK/port-one"
}
check "--no-s3 is remembered until a start with --s3" no_s3_is_remembered
PYTHON=$HOME/.cache/forebay/venv/bin/python
# Metrics, as the parser of Prometheus' own library reads them.
parse_metrics() {
    "$PYTHON" -c '
import sys
from prometheus_client.openmetrics.parser import text_string_to_metric_families
found = {}
for family in text_string_to_metric_families(sys.stdin.read()):
    assert family.documentation, family.name
    for sample in family.samples:
        found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
names = {name for name, _ in found}
assert found["forebay_healthy", ()] == 1, found
assert found["forebay_filesystem_serving", (("filesystem", "main"),)] == 1, found
assert found["forebay_node_up", (("name", found and [dict(l)["name"] for n, l in found if n == "forebay_node_up"][0]), ("node", "0"))] == 1
for drive in {dict(labels)["drive"] for name, labels in found if name == "forebay_drive_space_bytes"}:
    kinds = {dict(labels)["kind"]: value for (name, labels), value in found.items()
             if name == "forebay_drive_space_bytes" and dict(labels)["drive"] == drive}
    assert kinds.pop("capacity") == sum(kinds.values()), kinds
for name in ("forebay_owed_shards", "forebay_repaired_bytes_total", "forebay_log_last_entry", "forebay_uptime_seconds"):
    assert name in names, names
'
}
metrics_are_told() {
    local port
    port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    "$FOREBAY" metrics "$WORK/running" | parse_metrics
    "$FOREBAY" stop "$WORK/running"
    expect_fail "ADDRESS:PORT" "$FOREBAY" start "$WORK/running" --metrics 9
    "$FOREBAY" start "$WORK/running" --metrics "127.0.0.1:$port" </dev/null
    curl -sf "http://127.0.0.1:$port/metrics" | parse_metrics
    # Nothing else is there.
    [ "$(curl -s -o /dev/null -w '%{http_code}' "http://127.0.0.1:$port/v1/status")" = 404 ]
    # It is kept.
    "$FOREBAY" stop "$WORK/running"
    expect_fail "metrics cannot be told at 127.0.0.1:$port.*--metrics" held "$port" "$FOREBAY" start "$WORK/running"
    node_start running
    curl -sf "http://127.0.0.1:$port/metrics" | parse_metrics
    # A connection that says nothing does not keep others out, nor do many.
    for ((i = 0; i < 40; i++)); do exec {silent}<>"/dev/tcp/127.0.0.1/$port"; done
    wait_until 20 curl -sf "http://127.0.0.1:$port/metrics" -o /dev/null
    "$FOREBAY" stop "$WORK/running"
    "$FOREBAY" start "$WORK/running" --metrics off </dev/null
    ! curl -sf "http://127.0.0.1:$port/metrics"
}
# held PORT COMMAND…: while another program listens at the port.
held() {
    local holder status=0
    python3 -c 'import socket, sys, time
s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind(("127.0.0.1", int(sys.argv[1]))); s.listen(); time.sleep(60)' "$1" &
    holder=$!
    wait_until 10 bash -c "exec 3<>/dev/tcp/127.0.0.1/$1"
    "${@:2}" || status=$?
    kill "$holder"
    return "$status"
}
check "metrics are what Prometheus reads, and say what status says" metrics_are_told
# The unit of systemd brings a node back: what it starts is started here, after each end that systemd would answer with a start.
unit_brings_it_back() {
    local unit="$ROOT/packaging/systemd/forebay@.service" start pid
    sed "s|/usr/local/bin/forebay|$FOREBAY|; s|%f|$WORK/running|g" "$unit" >"$WORK/forebay-test.service"
    if command -v systemd-analyze >/dev/null; then systemd-analyze verify "$WORK/forebay-test.service"; fi
    "$FOREBAY" stop "$WORK/running"
    start=$(sed -n 's/^ExecStart=//p' "$WORK/forebay-test.service")
    for _ in 1 2; do
        # shellcheck disable=SC2086
        $start >"$WORK/unit.log" 2>&1 &
        wait_until 60 mountpoint -q "$WORK/running/mnt"
        wait_until 20 "$FOREBAY" status "$WORK/running"
        pid=$(node_pid running)
        kill -KILL "$pid"
        wait "$pid" || true
    done
    $start >"$WORK/unit.log" 2>&1 &
    wait_until 60 "$FOREBAY" status "$WORK/running"
    $(sed -n 's/^ExecStop=//p' "$WORK/forebay-test.service")
    wait
    node_start running
}
check "the unit of systemd brings a node back" unit_brings_it_back
check "the node stops" node_stop running
exit 0
