#!/usr/bin/env bash
# run-node.sh start DIR DRIVES DRIVE_SIZE PROFILE | run-node.sh stop DIR: the node of `make run`.
set -euo pipefail
action=$1
dir=$2

case "$action" in
start)
    if [ -e "$dir/node.json" ] || [ -e "$dir/drives" ]; then
        "$FOREBAY" start "$dir" </dev/null
    else
        mkdir -p "$dir/mnt"
        "$FOREBAY" start "$dir" --drives "$3" --drive-size "$4" --profile "$5" --mount "$dir/mnt" </dev/null
    fi
    echo
    echo "node       $dir"
    echo "mounted at $(jq -r .mount "$dir/node.json")"
    echo "process    $(jq -r .pid "$dir/node.json")"
    echo "addresses  $(jq -c .addresses "$dir/node.json")"
    echo "status     $FOREBAY status $dir"
    echo "stop       make stop"
    ;;
stop)
    exec "$FOREBAY" stop "$dir" </dev/null
    ;;
*)
    echo "usage: run-node.sh start DIR DRIVES DRIVE_SIZE PROFILE | run-node.sh stop DIR" >&2
    exit 2
    ;;
esac
