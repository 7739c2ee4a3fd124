//! Listings: a walk through the tree in key order, with memory for one page.
//!
//! Entries of a directory are stored in the order of keys, so a depth-first walk meets keys in byte order. To begin a
//! listing, and to pass a group of keys, the walk seeks: it goes down to the place directly.

use std::collections::VecDeque;

use base::{FsError, Ino};
use bytes::Bytes;
use wire::meta::FileKind;
use wire::object::{
    Caller, LIST_ENTRIES_MAX, ListEntry, ListFrom, ListQuery, ListedObject, ObjectPage, ObjectReply,
};

use super::super::access::{EXECUTE, READ};
use super::super::{Intent, Op, Stop};
use super::{ObjectOutcome, record};
use crate::keys::Keys;
use crate::state::Pair;
use crate::values::{Dentry, Inode};

/// Entries read from a directory at a time.
const READ_ENTRIES_MAX: usize = 512;
const READ_ENTRIES_FIRST: usize = 16;
/// Most entries that one request visits without listing them.
const LOOKS_MAX: usize = 20_000;

/// A directory on the path to the walk's position.
struct Level {
    dir: Ino,
    /// Length in bytes of the path of the directory, with the final `/`.
    path_len: usize,
    /// Entries that were read but not visited yet.
    ahead: VecDeque<Pair>,
    /// The sort name behind the last entry that was read; `None` at the end of the directory.
    rest: Option<Vec<u8>>,
    /// Number of entries for the next read.
    count: usize,
}

impl Level {
    fn new(dir: Ino, path_len: usize, from: Vec<u8>) -> Self {
        Self { dir, path_len, ahead: VecDeque::new(), rest: Some(from), count: READ_ENTRIES_FIRST }
    }
}

struct Walker<'a> {
    query: &'a ListQuery,
    caller: &'a Caller,
    /// The path of the current directory, with a final `/`; empty for the bucket.
    path: Vec<u8>,
    levels: Vec<Level>,
    entries: Vec<ListEntry>,
    limit: usize,
    /// The page begins behind this key.
    after: Bytes,
    looks: usize,
    /// Start of the next page, set when this page is full.
    next: Option<ListFrom>,
    /// Files that sessions are writing.
    written: Vec<Ino>,
}

/// The first bytes that sort behind all bytes with this prefix; `None` if there are none.
pub(super) fn behind(prefix: &[u8]) -> Option<Vec<u8>> {
    let mut next = prefix.to_vec();
    while let Some(last) = next.pop() {
        if last < u8::MAX {
            next.push(last + 1);
            return Some(next);
        }
    }
    None
}

fn find(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    match wanted {
        [byte] => bytes.iter().position(|found| found == byte),
        _ => bytes.windows(wanted.len()).position(|window| window == wanted),
    }
}

/// The group of keys that begin with `key`, which may be the path of a directory.
pub(super) fn group_of<'a>(key: &'a [u8], prefix: &[u8], delimiter: &[u8]) -> Option<&'a [u8]> {
    if delimiter.is_empty() {
        return None;
    }
    let tail = key.strip_prefix(prefix)?;
    Some(&key[..prefix.len() + find(tail, delimiter)? + delimiter.len()])
}

/// Start of the names behind this one: no name continues with 0.
fn behind_name(sort_name: &[u8]) -> Vec<u8> {
    [sort_name, &[1]].concat()
}

/// The next step after an entry.
enum Step {
    Next,
    Down(Ino),
    Done,
}

impl Op<'_> {
    pub(super) fn list_objects(&mut self, query: &ListQuery, caller: &Caller) -> ObjectOutcome {
        let bucket = self.living_directory(query.bucket)?;
        self.demand(&bucket, caller, READ | EXECUTE)?;
        let (from, after) = match &query.from {
            ListFrom::Start => (Some(query.prefix.to_vec()), Bytes::new()),
            ListFrom::After(key) => (Some(query.prefix.to_vec().max(key.to_vec())), key.clone()),
            ListFrom::Past(prefix) => {
                (behind(prefix).map(|key| key.max(query.prefix.to_vec())), Bytes::new())
            }
        };
        let limit = query.limit.min(LIST_ENTRIES_MAX) as usize;
        let mut walker = Walker {
            query,
            caller,
            path: Vec::new(),
            levels: Vec::new(),
            entries: Vec::with_capacity(limit.min(1000)),
            limit,
            after,
            looks: 0,
            next: None,
            written: Vec::new(),
        };
        if let Some(from) = from.filter(|_| limit > 0) {
            self.seek(&mut walker, &from)?;
            self.walk_keys(&mut walker)?;
        }
        // Dirty files are committed before they are listed. All recalls go out at once, so that their waits overlap.
        let mut stop = Ok(());
        for ino in walker.written {
            stop = stop.and(self.clear(ino, Intent::Read));
        }
        stop?;
        Ok(ObjectReply::Listed(ObjectPage { entries: walker.entries, next: walker.next }))
    }

    /// Descends to the first key at or behind `from`.
    fn seek(&self, walker: &mut Walker<'_>, from: &[u8]) -> Result<(), FsError> {
        let mut dir = walker.query.bucket;
        let mut rest = from;
        loop {
            let Some(slash) = find(rest, b"/") else {
                walker.levels.push(Level::new(dir, walker.path.len(), rest.to_vec()));
                return Ok(());
            };
            let (name, tail) = (&rest[..slash], &rest[slash + 1..]);
            let below = if name.is_empty() { None } else { self.find_directory(dir, name)? };
            let below = match below {
                // The directory itself may be an object, so the walk visits it as an entry.
                Some(inode) if !tail.is_empty() && self.may(&inode, walker.caller, READ | EXECUTE)? => inode,
                _ => {
                    walker.levels.push(Level::new(dir, walker.path.len(), rest[..=slash].to_vec()));
                    return Ok(());
                }
            };
            walker.levels.push(Level::new(dir, walker.path.len(), behind_name(&rest[..=slash])));
            walker.path.extend_from_slice(&rest[..=slash]);
            dir = below.attr.ino;
            rest = tail;
        }
    }

    pub(super) fn find_directory(&self, dir: Ino, name: &[u8]) -> Result<Option<Inode>, FsError> {
        let key = self.keys.dentry(dir, name, FileKind::Directory);
        match self.txn.get::<Dentry>(&key)? {
            Some(dentry) => self.inode(dentry.ino).map(Some),
            None => Ok(None),
        }
    }

    fn walk_keys(&self, walker: &mut Walker<'_>) -> Result<(), Stop> {
        while let Some(level) = walker.levels.last_mut() {
            walker.path.truncate(level.path_len);
            if level.ahead.is_empty() && !self.read_ahead(level)? {
                walker.levels.pop();
                continue;
            }
            let Some((key, value)) = level.ahead.pop_front() else { continue };
            let dentry: Dentry = self.txn.decode(&key, &value)?;
            walker.path.extend_from_slice(Keys::sort_name_of_dentry(&key));
            let step = self.look(walker, dentry)?;
            if !walker.goes_on(&step) {
                return Ok(());
            }
            if let Step::Down(dir) = step {
                walker.levels.push(Level::new(dir, walker.path.len(), Vec::new()));
            }
        }
        Ok(())
    }

    /// Reads more entries of a directory. Returns whether there were any.
    fn read_ahead(&self, level: &mut Level) -> Result<bool, FsError> {
        let Some(from) = level.rest.take() else { return Ok(false) };
        let found = self.txn.scan(&self.keys.dentries_from(level.dir, &from), level.count)?;
        if found.len() == level.count
            && let Some((key, _)) = found.last()
        {
            level.rest = Some(behind_name(Keys::sort_name_of_dentry(key)));
        }
        level.count = READ_ENTRIES_MAX;
        level.ahead = found.into();
        Ok(!level.ahead.is_empty())
    }

    /// Visits the entry that `walker.path` names.
    fn look(&self, walker: &mut Walker<'_>, dentry: Dentry) -> Result<Step, Stop> {
        let query = walker.query;
        let key = walker.path.as_slice();
        let inside = key.starts_with(&query.prefix);
        let directory = dentry.kind == FileKind::Directory;
        let leads_inside = directory && query.prefix.starts_with(key);
        if !inside && !leads_inside {
            return Ok(if key > query.prefix.as_ref() { Step::Done } else { Step::Next });
        }
        walker.looks += 1;
        let later = inside && key > walker.after.as_ref();
        let wanted = directory || (dentry.kind == FileKind::Regular && later);
        if !wanted {
            return Ok(Step::Next);
        }
        if inside && let Some(group) = group_of(key, &query.prefix, &query.delimiter) {
            let group = Bytes::copy_from_slice(group);
            return self.look_at_group(walker, group, dentry, later);
        }
        let inode = self.inode(dentry.ino)?;
        if later && (!directory || inode.object.is_some()) {
            if walker.is_full() {
                return Ok(Step::Done);
            }
            let key = Bytes::copy_from_slice(&walker.path);
            walker.entries.push(ListEntry::Object(listed_object(&inode, key)));
            if !directory && self.volatile.leases.is_written(dentry.ino, self.session) {
                walker.written.push(dentry.ino);
            }
        }
        let open = directory && inode.attr.size > 0 && self.may(&inode, walker.caller, READ | EXECUTE)?;
        Ok(if open { Step::Down(dentry.ino) } else { Step::Next })
    }

    /// Visits a key, or a directory all of whose keys are in one group: lists the group once and skips its other keys.
    fn look_at_group(
        &self,
        walker: &mut Walker<'_>,
        group: Bytes,
        dentry: Dentry,
        later: bool,
    ) -> Result<Step, Stop> {
        if dentry.kind == FileKind::Directory {
            let inode = self.inode(dentry.ino)?;
            if inode.attr.size == 0 && !(later && inode.object.is_some()) {
                return Ok(Step::Next);
            }
        }
        if walker.is_full() {
            return Ok(Step::Done);
        }
        walker.skip(&group);
        walker.entries.push(ListEntry::Prefix(group));
        Ok(Step::Next)
    }
}

impl Walker<'_> {
    /// Whether the page has no room for another entry.
    fn is_full(&mut self) -> bool {
        if self.entries.len() < self.limit {
            return false;
        }
        self.next = self.entries.last().map(|last| match last {
            ListEntry::Object(object) => ListFrom::After(object.key.clone()),
            ListEntry::Prefix(group) => ListFrom::Past(group.clone()),
        });
        true
    }

    /// Whether the walk continues after the entry at `path`. Bounded, even if no visited entry is listed.
    fn goes_on(&mut self, step: &Step) -> bool {
        if matches!(step, Step::Done) {
            return false;
        }
        if self.looks <= LOOKS_MAX + self.limit {
            return true;
        }
        self.next = Some(match self.entries.last() {
            Some(ListEntry::Prefix(group)) if self.path.starts_with(group) => ListFrom::Past(group.clone()),
            _ => ListFrom::After(Bytes::copy_from_slice(&self.path)),
        });
        false
    }

    /// Continues behind all keys of a group.
    fn skip(&mut self, group: &[u8]) {
        while self.levels.last().is_some_and(|level| level.path_len >= group.len()) {
            self.levels.pop();
        }
        let Some(level) = self.levels.last_mut() else { return };
        let rest = &group[level.path_len..];
        if rest.ends_with(b"/") {
            // The walk has left this directory.
            return;
        }
        let in_group = |(key, _): &Pair| Keys::sort_name_of_dentry(key).starts_with(rest);
        while level.ahead.front().is_some_and(in_group) {
            level.ahead.pop_front();
        }
        if level.ahead.is_empty() && level.rest.is_some() {
            level.rest = behind(rest);
        }
    }
}

fn listed_object(inode: &Inode, key: Bytes) -> ListedObject {
    let tag = inode.object.as_ref().filter(|_| record::is_current(inode));
    ListedObject {
        key,
        ino: inode.attr.ino,
        uid: inode.attr.uid,
        size: record::size_of(inode),
        mtime_ns: inode.attr.mtime_ns,
        etag: record::etag_of(inode),
        checksum: tag.and_then(|tag| tag.checksum),
    }
}
