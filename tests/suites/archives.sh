#!/usr/bin/env bash
# rsync and tar there and back: extended attributes, ACLs, hard links, sparse files, times, special files.
source "$(dirname "$0")/../lib.sh"
FILES=$([ "$LONG" = 1 ] && echo 20000 || echo 1500)
MNT=$WORK/n/mnt
SOURCE=$WORK/source

make_source() {
    local i
    stage_tree "$FILES" "$SOURCE/tree"
    mkdir "$SOURCE/special"
    cd "$SOURCE/special"
    for i in 1 2 3 4 5; do
        head -c $((i * 70000)) /dev/urandom >"file$i"
        setfattr -n user.note -v "value $i" "file$i"
        setfattr -n user.bytes -v 0x00ff00 "file$i"
        ln "file$i" "hard$i"
        ln "file$i" "second$i"
    done
    setfattr -n user.long -v "$(head -c 2000 /dev/zero | tr '\0' x)" file1
    setfacl -m u:nobody:rw,g:daemon:r file2
    mkdir inherits
    setfacl -d -m u:nobody:rwx inherits
    # A file with data at both ends and in the middle, and a file with only a hole.
    dd if=/dev/urandom of=sparse bs=64k count=1 status=none
    dd if=/dev/urandom of=sparse bs=64k count=1 seek=500 conv=notrunc status=none
    dd if=/dev/urandom of=sparse bs=64k count=1 seek=1000 conv=notrunc status=none
    truncate -s 100M hole
    mkfifo fifo
    mknod null c 1 3
    ln -s nowhere/at/all dangling
    touch -h -d '1999-12-31 23:59:59.123456789' dangling file3
    touch -d '2040-01-01' file4
    chmod 4711 file5
    chown nobody:daemon file3
    mkdir -m 1777 sticky
}

# Attributes that same_tree does not compare, sorted by name because the order of directory listings differs.
attributes_and_lists() {
    (cd "$1" && find . -print0 | LC_ALL=C sort -z | xargs -0 getfattr -h -d -m - --absolute-names --)
    (cd "$1" && find . -not -type l -print0 | LC_ALL=C sort -z | xargs -0 getfacl -p --)
}

same_attributes() { diff <(attributes_and_lists "$1") <(attributes_and_lists "$2"); }

same_special() {
    [ "$(stat -c %F:%t:%T "$2/special/null")" = "$(stat -c %F:%t:%T "$1/special/null")" ]
    [ -p "$2/special/fifo" ]
    # Three names of each file are one inode.
    [ "$(stat -c %i "$2/special/file1" "$2/special/hard1" "$2/special/second1" | sort -u | wc -l)" = 1 ]
}

# Devices and pipes are not read by diff.
same() {
    diff -r --no-dereference --exclude=fifo --exclude=null "$1" "$2"
    diff <(tree_attributes "$1") <(tree_attributes "$2")
    same_attributes "$1" "$2"
    same_special "$1" "$2"
}

# A sparse file takes about the space of its data: 192 KiB of 64 MiB, and none for the hole of 100 MiB.
is_sparse() {
    du -k "$1/special/sparse" "$1/special/hole"
    [ "$(du -k "$1/special/sparse" | cut -f1)" -lt 2048 ]
    [ "$(du -k "$1/special/hole" | cut -f1)" -lt 1024 ]
}

by_rsync() {
    rsync -aHAXS --modify-window=-1 --devices --specials "$SOURCE/" "$MNT/rsync/"
    same "$SOURCE" "$MNT/rsync"
    is_sparse "$MNT/rsync"
    # A second run, by checksums, finds no difference, in either direction.
    [ -z "$(rsync -aHAXSn --modify-window=-1 --devices --specials --checksum --delete --itemize-changes "$SOURCE/" "$MNT/rsync/")" ]
    rsync -aHAXS --modify-window=-1 --devices --specials "$MNT/rsync/" "$WORK/back/"
    same "$SOURCE" "$WORK/back"
}

rsync_update() {
    echo more >>"$SOURCE/special/file1"
    rm "$SOURCE/special/dangling"
    rsync -aHAXS --modify-window=-1 --devices --specials --delete --inplace --no-whole-file "$SOURCE/" "$MNT/rsync/"
    same "$SOURCE" "$MNT/rsync"
}

TAR=(tar --acls --xattrs --xattrs-include='*' --sparse --numeric-owner)

by_tar() {
    mkdir "$MNT/tar" "$WORK/untar"
    "${TAR[@]}" --create --file="$MNT/archive.tar" --directory="$SOURCE" .
    "${TAR[@]}" --extract --preserve-permissions --file="$MNT/archive.tar" --directory="$MNT/tar"
    same "$SOURCE" "$MNT/tar"
    is_sparse "$MNT/tar"
    "${TAR[@]}" --create --file="$WORK/second.tar" --directory="$MNT/tar" .
    "${TAR[@]}" --extract --preserve-permissions --file="$WORK/second.tar" --directory="$WORK/untar"
    same "$SOURCE" "$WORK/untar"
}

after_restart() {
    node_stop n
    node_start n
    same "$SOURCE" "$MNT/tar"
    is_sparse "$MNT/tar"
}

check "the node starts" node_start n --drives 6 --drive-size 1G --profile 4+2 || exit 0
check "a tree with attributes, ACLs, links and holes is made" make_source || exit 0
check "rsync there and back" by_rsync && check "rsync --inplace brings changes" rsync_update
check "tar there and back" by_tar && check "all is the same after a restart" after_restart
check "the node stops" node_stop n
exit 0
