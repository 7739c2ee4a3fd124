#!/usr/bin/env bash
# git: many small files, renames into place, mapped packs, and its own check of every object.
source "$(dirname "$0")/../lib.sh"
FILES=$([ "$LONG" = 1 ] && echo 20000 || echo 800)
REPO=$WORK/n/mnt/repo

# Only the settings below, not those of the user.
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1 GIT_AUTHOR_NAME=t GIT_AUTHOR_EMAIL=t@t
export GIT_COMMITTER_NAME=t GIT_COMMITTER_EMAIL=t@t

commit_tree() {
    local i
    git init -q -b main "$REPO"
    stage_tree "$FILES" "$REPO/tree"
    cd "$REPO"
    # Every object is fsynced, as in production.
    git config core.fsync all
    # Automatic maintenance would start in the background and overlap with later steps.
    git config gc.auto 0
    git add -A
    git commit -q -m first
    for i in 1 2 3; do
        echo "$i" >"file$i"
        git mv "tree" "moved" 2>/dev/null || git mv "moved" "tree"
        git add -A
        git commit -q -m "change $i"
    done
}

collect_and_check() {
    cd "$REPO"
    git gc -q --prune=now
    git fsck --full --strict
    [ -z "$(git status --porcelain)" ]
}

clone_and_compare() {
    git clone -q --no-local "$REPO" "$WORK/n/mnt/clone"
    git -C "$WORK/n/mnt/clone" fsck --full
    diff -r --no-dereference --exclude=.git "$REPO" "$WORK/n/mnt/clone"
}

check_after_restart() {
    cd "$WORK"
    node_stop n
    node_start n
    git -C "$REPO" fsck --full
    [ -z "$(git -C "$REPO" status --porcelain)" ]
}

check "the node starts" node_start n --drives 6 --drive-size 1G --profile 4+2 || exit 0
check "a tree of $FILES files is committed four times" commit_tree &&
    check "gc and fsck" collect_and_check &&
    check "a clone equals the original" clone_and_compare &&
    check "fsck after a restart" check_after_restart
check "the node stops" node_stop n
exit 0
