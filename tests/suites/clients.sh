#!/usr/bin/env bash
# Machines that only mount: no process of a node, and no rights but those of their token. They outlive the machines of the cluster.
LIMIT_S=$([ "${FOREBAY_TEST_LONG:-0}" = 1 ] && echo 900 || echo 300)
source "$(dirname "$0")/../lib.sh"
[ "$PLAIN" = 1 ] && exit 0
source "$(dirname "$0")/../machines.sh"
NODES=(1 2 3 4)

# Directories of clients on the fourth machine: all rights, users without root, one filesystem, only reading.
CLIENTS=(all users one reads)
clients_end() {
    local name
    [ "$BASHPID" = $$ ] || return
    for name in "${CLIENTS[@]}"; do umount -l "$WORK/$name/mnt" 2>/dev/null || true; done
}
trap 'machines_end; clients_end; cleanup' EXIT

token() { on 1 "$FOREBAY" token create "$WORK/1" "$@"; }
# as_user USER CLIENT COMMAND…: in the mount of a client; the directories above are private.
as_user() { (cd "$WORK/$2/mnt" && exec setpriv --reuid "$1" --regid "$1" --clear-groups "${@:3}"); }
mount_client() { on 4 timeout 60 "$FOREBAY" mount "$WORK/$1" "$WORK/$1/mnt" "${@:2}" </dev/null; }

begin() {
    local node token
    for node in 1 2 3; do wait_until 30 etcd_answers "$node"; done
    for node in 1 2 3; do echo "$WORK/$node" >>"$WORK/.nodes"; done
    on 1 timeout 120 "$FOREBAY" start "$WORK/1" --log "$ENGINE?prefix=test" --drives 2 --drive-size 512MiB --profile r2 \
        --memory "$MEMORY" --address "$(address 1)" </dev/null
    token=$(token --uses 2)
    for node in 2 3; do
        on "$node" timeout 120 "$FOREBAY" join "$token" "$WORK/$node" --drives 2 --drive-size 512MiB --name "n$node" </dev/null
    done
    on 2 "$FOREBAY" fs set "$WORK/2" main --profile 4+2
    on 2 "$FOREBAY" fs create "$WORK/2" other --profile 4+2
    on 2 "$FOREBAY" mount "$WORK/2" "$WORK/2/mnt"
    wait_until 60 healthy 3
    stage_tree 200 "$WORK/tree"
    cp -a "$WORK/tree" "$WORK/1/mnt/tree"
    sync_files "$WORK/1/mnt/tree"
    mkdir -m 1777 "$WORK/1/mnt/open"
    echo secret >"$WORK/1/mnt/secret"
    chmod 600 "$WORK/1/mnt/secret"
}

joins() {
    local client
    expect_fail "give --role client" token --ro
    expect_fail "no such filesystem" token --role client --fs nowhere
    client=$(token --role client --squash none --uses 1)
    expect_fail "leave options for nodes out" on 4 "$FOREBAY" join "$client" "$WORK/all" --drives 1
    on 4 "$FOREBAY" join "$client" "$WORK/all" --name all | grep -q "client 0 has joined"
    # The same client, whose answer got lost.
    on 4 "$FOREBAY" join "$client" "$WORK/all" --name all | grep -q "client 0 has joined"
    expect_fail "used already" on 4 "$FOREBAY" join "$client" "$WORK/users" --name users
    on 4 "$FOREBAY" join "$(token --role client)" "$WORK/users" --name users
    on 4 "$FOREBAY" join "$(token --role client --fs other --squash none)" "$WORK/one" --name one
    on 4 "$FOREBAY" join "$(token --role client --ro --squash none)" "$WORK/reads" --name reads --json | jq -e '.client == 3'
    on 3 "$FOREBAY" client list "$WORK/3" --json |
        jq -e 'length == 4 and .[2].filesystem == "other" and .[3].read_only and .[1].squash == "root"'
    on 1 "$FOREBAY" token list "$WORK/1" --json | jq -e 'map(.role) | sort | unique == ["client", "node"]'
    expect_fail "there is a client" on 4 "$FOREBAY" join "$(token)" "$WORK/all" --name n4
    # It is no node.
    not on 4 "$FOREBAY" status "$WORK/all"
}

mounts() {
    mount_client all
    same_tree "$WORK/tree" "$WORK/all/mnt/tree"
    cp -a "$WORK/tree" "$WORK/all/mnt/copy"
    sync_files "$WORK/all/mnt/copy"
    on 4 timeout 60 "$FOREBAY" sync "$WORK/all/mnt"
    same_tree "$WORK/tree" "$WORK/2/mnt/copy"
    [ "$(cat "$WORK/all/mnt/secret")" = secret ]
    expect_fail "mounted already" mount_client all
    # Programs on both see each other.
    echo one >"$WORK/all/mnt/open/shared"
    [ "$(cat "$WORK/2/mnt/open/shared")" = one ]
    echo two >"$WORK/2/mnt/open/shared"
    [ "$(cat "$WORK/all/mnt/open/shared")" = two ]
}

rights() {
    mount_client users
    not cat "$WORK/users/mnt/secret"
    not touch "$WORK/users/mnt/by-root"
    not rm -f "$WORK/users/mnt/open/shared"
    as_user 1000 users sh -c 'echo mine >open/mine && chmod 640 open/mine && sync open/mine'
    [ "$(stat -c '%u %a' "$WORK/1/mnt/open/mine")" = "1000 640" ]
    not as_user 1001 users cat open/mine
    [ "$(as_user 1000 users cat open/mine)" = mine ]
    expect_fail "no right to filesystem main" mount_client one
    mount_client one --fs other
    echo other >"$WORK/one/mnt/file"
    mount_client reads
    same_tree "$WORK/tree" "$WORK/reads/mnt/tree"
    expect_fail "read-only" touch "$WORK/reads/mnt/open/not"
    # It asks for a mount with which it may write, and the nodes refuse that.
    on 4 timeout 60 "$FOREBAY" umount "$WORK/reads"
    jq '.read_only = false | .mounts = []' "$WORK/reads/client.json" >"$WORK/forged"
    cp "$WORK/forged" "$WORK/reads/client.json"
    mount_client reads
    not touch "$WORK/reads/mnt/open/not"
    not test -e "$WORK/1/mnt/open/not"
    not rm "$WORK/reads/mnt/open/shared"
    [ "$(cat "$WORK/reads/mnt/open/shared")" = two ]
}

store_key() { awk -F' = ' "/$1/ { print \$2 }" "$WORK/store/admin-credentials"; }
# Content moves to a store that the fourth machine serves, and leaves the drives.
cold() {
    on 4 timeout 120 "$FOREBAY" start "$WORK/store" --drives 1 --drive-size 512MiB --profile 1+0 --memory "$MEMORY" \
        --s3 "$(address 4):9000" </dev/null
    mkdir "$WORK/store/mnt/cold"
    on 1 "$FOREBAY" store add "$WORK/1" cold --hostname "$(address 4)" --port 9000 --protocol HTTP --bucket cold \
        --access-key-id "$(store_key access_key_id)" --secret-key "$(store_key secret)"
    head -c 9000000 /dev/urandom >"$WORK/cold"
    cp "$WORK/cold" "$WORK/2/mnt/cold"
    sync_files "$WORK/2/mnt/cold"
    on 2 "$FOREBAY" fs attach "$WORK/2" main cold --retention 1h --tiering-cue 10s
    wait_until 90 is_stored "$WORK/2/mnt/cold"
    on 2 "$FOREBAY" tier release "$WORK/2/mnt/cold"
    is_away "$WORK/2/mnt/cold"
    # By parts, and from the middle.
    [ "$(dd if="$WORK/reads/mnt/cold" bs=1000 skip=5000 count=1 status=none | sha256sum)" = \
        "$(dd if="$WORK/cold" bs=1000 skip=5000 count=1 status=none | sha256sum)" ]
    cmp "$WORK/cold" "$WORK/all/mnt/cold"
    wait_until 60 is_back "$WORK/2/mnt/cold"
    cmp "$WORK/cold" "$WORK/reads/mnt/cold"
    # The keys of the store are not for clients.
    not grep -rq "$(store_key secret)" "$WORK/all" --exclude-dir=mnt
}
located() { on 2 "$FOREBAY" tier location "$1" --json | jq -e ".[0] | $2" >/dev/null; }
is_stored() { located "$1" '.ssd_read_cache_bytes == 9000000'; }
is_away() { located "$1" '.object_store_bytes == 9000000'; }
is_back() { located "$1" '.object_store_bytes == 0'; }

# A certificate that has expired is no obstacle: the key gets another one.
renewed() {
    local dir=$WORK/one/identity
    on 4 timeout 60 "$FOREBAY" umount "$WORK/one" --fs other
    openssl x509 -in "$dir/certificate.pem" -noout -ext subjectAltName | tail -1 | sed 's/^ */subjectAltName=/' >"$WORK/names"
    echo "extendedKeyUsage=serverAuth,clientAuth" >>"$WORK/names"
    openssl req -new -key "$dir/key.pem" -subj / -out "$WORK/request"
    openssl x509 -req -in "$WORK/request" -CA "$dir/authorities.pem" -CAkey "$WORK/1/identity/authority-key.pem" \
        -CAcreateserial -days 0 -extfile "$WORK/names" -out "$WORK/expired"
    sleep 1
    not openssl x509 -in "$WORK/expired" -noout -checkend 0
    cp "$WORK/expired" "$dir/certificate.pem"
    mount_client one --fs other
    [ "$(cat "$WORK/one/mnt/file")" = other ]
    openssl x509 -in "$dir/certificate.pem" -noout -checkend $((300 * 86400))
}

# Each machine of the cluster dies in turn, the owner of the metadata first.
outlives() {
    local here other
    here=$(owner 1)
    other=$(printf '%s\n' 1 2 3 | grep -vx "$here" | head -1)
    beside all machine_kill "$here"
    owner_is_not "$other" "$here"
    etcd_start "$here"
    machine_returns "$here"
    same_tree "$WORK/tree" "$WORK/all/mnt/copy"
}

removed() {
    on 2 "$FOREBAY" client remove "$WORK/2" 1 | grep -q "name=users"
    expect_fail "no such client" on 2 "$FOREBAY" client remove "$WORK/2" 1
    wait_until 20 is_refused
    on 4 timeout 60 "$FOREBAY" umount "$WORK/users" || umount -l "$WORK/users/mnt"
    # Others have noticed nothing.
    same_tree "$WORK/tree" "$WORK/all/mnt/tree"
    on 4 "$FOREBAY" join "$(token --role client)" "$WORK/users" --name users | grep -q "client 4 has joined"
    on 4 pkill -KILL -f "mount-process.*$WORK/users" || true
}
is_refused() { ! timeout 5 ls "$WORK/users/mnt/tree" >/dev/null 2>&1; }

whole() {
    local node
    on 4 timeout 60 "$FOREBAY" umount "$WORK/one" --fs other
    on 4 timeout 60 "$FOREBAY" stop "$WORK/reads"
    on 4 timeout 60 "$FOREBAY" stop "$WORK/all"
    not mountpoint -q "$WORK/all/mnt"
    wait_until 90 healthy 1
    on 1 timeout 200 "$FOREBAY" fsck "$WORK/1" </dev/null
    for node in 3 2 1; do on "$node" timeout 120 "$FOREBAY" stop "$WORK/$node" </dev/null; done
    on 4 timeout 60 "$FOREBAY" stop "$WORK/store" </dev/null
}

machines_begin
for node in 1 2 3; do etcd_start "$node"; done
check "three machines, their metadata in etcd" begin || exit 1
check "clients join with their own tokens" joins || exit 1
check "a client mounts, and sees what nodes see" mounts
check "clients have the rights of their token" rights
check "a client reads what only an object store has, and it comes back" cold
check "an expired certificate is renewed" renewed
check "a client outlives the machine that owns the metadata" outlives
check "a client is removed" removed
check "all is whole" whole
