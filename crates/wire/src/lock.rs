//! Locks that programs take on files: ranges by fcntl(2), whole files by flock(2).

use base::Ino;
use serde::{Deserialize, Serialize};

/// The two kinds of locks do not see each other, as on Linux.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum LockSpace {
    /// fcntl(2), also lockf(3). A request that would close a circle of waits fails.
    Range,
    /// flock(2).
    Whole,
}

/// A lock on a range of a file, or a wish for one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct FileLock {
    /// The file.
    pub ino: Ino,
    /// Its holder within the session: a process, or an open file. The session chooses the number.
    pub owner: u64,
    /// The kind of lock.
    pub space: LockSpace,
    /// Whether it excludes all others, not only exclusive ones.
    pub exclusive: bool,
    /// First byte.
    pub start: u64,
    /// Last byte; `u64::MAX`: to the end of the file, however long it becomes.
    pub last: u64,
    /// The process, for those who ask who holds it.
    pub pid: u32,
}

impl FileLock {
    /// Whether both cannot be held by different holders.
    pub fn conflicts(&self, other: &Self) -> bool {
        self.ino == other.ino
            && self.space == other.space
            && (self.exclusive || other.exclusive)
            && self.overlaps(other)
    }

    /// Whether both are of one kind and one holder on one file.
    pub fn has_holder_of(&self, other: &Self) -> bool {
        (self.ino, self.space, self.owner) == (other.ino, other.space, other.owner)
    }

    /// Whether both ranges have bytes in common.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.start <= other.last && other.start <= self.last
    }
}

/// Adds a lock to those that a session holds on the file, in place of what its holder has in the range. Equal neighbours become
/// one.
pub fn hold(held: &mut Vec<FileLock>, mut lock: FileLock) {
    give_up(held, &lock);
    let touches = |other: &FileLock, lock: &FileLock| {
        other.last.checked_add(1) == Some(lock.start) || lock.last.checked_add(1) == Some(other.start)
    };
    let is_neighbour = |other: &mut FileLock| {
        (other.owner, other.space, other.exclusive) == (lock.owner, lock.space, lock.exclusive)
            && touches(other, &lock)
    };
    let neighbours: Vec<FileLock> = held.extract_if(.., is_neighbour).collect();
    for other in neighbours {
        (lock.start, lock.last) = (lock.start.min(other.start), lock.last.max(other.last));
    }
    held.push(lock);
}

/// Removes a range from the locks that its holder has on the file.
pub fn give_up(held: &mut Vec<FileLock>, range: &FileLock) {
    let is_touched = |other: &mut FileLock| {
        (other.owner, other.space) == (range.owner, range.space) && other.overlaps(range)
    };
    let touched: Vec<FileLock> = held.extract_if(.., is_touched).collect();
    for other in touched {
        if other.start < range.start {
            held.push(FileLock { last: range.start - 1, ..other });
        }
        if other.last > range.last {
            held.push(FileLock { start: range.last + 1, ..other });
        }
    }
}
