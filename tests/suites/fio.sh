#!/usr/bin/env bash
# fio writes blocks with checksums and reads them back, at once and after a remount and a restart.
source "$(dirname "$0")/../lib.sh"
MIB=$([ "$LONG" = 1 ] && echo 64 || echo 16)
MNT=$WORK/n/mnt

# run_fio NAME BLOCK_SIZE PATTERN JOBS DIRECT write|verify
run_fio() {
    local options=(--name="$1" --directory="$MNT" --bs="$2" --rw="$3" --numjobs="$4" --direct="$5")
    options+=(--size="$((MIB / $4))M" --ioengine=psync --verify=crc32c --verify_fatal=1 --randseed="$SEED")
    # Without state files: fio would leave them in its working directory.
    options+=(--verify_state_save=0 --allow_file_create=1 --fallocate=none --group_reporting --output-format=terse)
    case "$6" in
    # Writes every block once, in the order of the pattern; verified after everything is written.
    write) options+=(--do_verify=1 --end_fsync=1) ;;
    verify) options+=(--verify_only) ;;
    esac
    fio "${options[@]}" | cut -d';' -f1-5
}

each() {
    local size pattern jobs direct
    for size in 512 4k 16k 64k 1M; do
        for pattern in write randwrite; do
            for jobs in 1 4; do
                for direct in 0 1; do
                    # FUSE passes blocks of 512 bytes on unchanged; O_DIRECT on a plain directory may not allow them.
                    [ "$PLAIN" = 1 ] && [ "$direct" = 1 ] && [ "$size" = 512 ] && continue
                    "$@" "$size-$pattern-$jobs-$direct" "$size" "$pattern" "$jobs" "$direct"
                done
            done
        done
    done
}

write_one() { check "$2 blocks, $3, $4 jobs, direct=$5" run_fio "$@" write; }
verify_one() { run_fio "$@" verify || return 1; }

verify_all() {
    each verify_one
}

check "the node starts" node_start n --drives 6 --drive-size 1G --profile 4+2 || exit 0
each write_one
remount() { node_unmount n && node_mount n; }
restart() { node_stop n && node_start n; }
check "the node unmounts and mounts" remount && check "all is verified after a remount" verify_all
check "the node restarts" restart && check "all is verified after a restart" verify_all
check "the node stops" node_stop n
exit 0
