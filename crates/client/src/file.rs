//! Writing: bytes go into memory here, and `flush` writes them to drives.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use base::{FsError, Ino};
use wire::meta::{FILE_BYTES_MAX, LeaseKind, MetaReply, MetaRequest, SetAttr};

use crate::Client;
use crate::node::{Node, Waiting};

/// Scattered data of a file is written out once it is more than this part of the limit for dirty bytes.
const EARLY: u64 = 4;

/// Why a write was not taken at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotTaken {
    /// It has to wait: use [`Client::write`].
    WouldWait,
    /// It failed.
    Failed(FsError),
}

/// Where bytes are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// At this offset.
    At(u64),
    /// Where the file ends when they are written: clients on several machines may append to it.
    End,
}

impl Client {
    /// Takes a write if that needs no waiting. Returns its offset.
    pub fn try_write(&self, ino: Ino, place: Place, bytes: &[u8]) -> Result<u64, NotTaken> {
        self.take(ino, place, bytes).map_err(|not_taken| match not_taken {
            // Deleted space may be on its way back.
            NotTaken::Failed(FsError::NoSpace) => NotTaken::WouldWait,
            other => other,
        })
    }

    fn take(&self, ino: Ino, place: Place, bytes: &[u8]) -> Result<u64, NotTaken> {
        let is_small =
            |off: &u64| off.checked_add(bytes.len() as u64).is_some_and(|end| end <= FILE_BYTES_MAX);
        if let Place::At(off) = place
            && !is_small(&off)
        {
            return Err(NotTaken::Failed(FsError::TooLarge));
        }
        if let Some(error) = self.stalled() {
            return Err(NotTaken::Failed(error));
        }
        if self.is_above_limit(bytes.len() as u64) || !self.has_room(bytes.len() as u64) {
            return Err(NotTaken::WouldWait);
        }
        let node = self.inner.nodes.get(ino);
        let (off, full, early) = {
            let mut state = node.lock();
            if !Node::is_regular(&state) {
                return Err(NotTaken::Failed(FsError::Invalid));
            }
            let Some(attr) = state.attr().filter(|_| state.may_write()) else {
                return Err(NotTaken::WouldWait);
            };
            let off = match place {
                Place::At(off) => off,
                Place::End => Some(attr.size).filter(is_small).ok_or(NotTaken::Failed(FsError::TooLarge))?,
            };
            if attr.guard.immutable || attr.guard.append_only && off < attr.size {
                return Err(NotTaken::Failed(FsError::NotPermitted));
            }
            let before = state.dirty.bytes();
            let full = state.dirty.write(off, bytes, self.inner.window);
            self.inner.dirty_bytes.fetch_add(state.dirty.bytes() - before, Ordering::Relaxed);
            state.wrote(self.inner.env.clock.wall_ns());
            state.dirty_since_ns.get_or_insert(self.inner.env.clock.boot_ns());
            // Writes scattered data out before there is so much of it that a writer has to wait.
            let much = state.dirty.bytes() > self.inner.dirty_bytes_max / EARLY;
            let early = !full && much && state.dirty.is_scattered(self.inner.window);
            let flush = (full || early) && !std::mem::replace(&mut state.flush_scheduled, true);
            (off, flush && full, flush && early)
        };
        if full {
            self.schedule_full_windows(node);
        } else if early {
            self.schedule_flush(node);
        }
        Ok(off)
    }

    /// Whether `bytes` more would exceed the limit for dirty bytes.
    fn is_above_limit(&self, bytes: u64) -> bool {
        self.inner.dirty_bytes.load(Ordering::Relaxed) + bytes > self.inner.dirty_bytes_max
    }

    /// The reason why no more writes are taken: dirty data could not be written. It ends once no data is dirty.
    fn stalled(&self) -> Option<FsError> {
        let mut stalled = self.inner.stalled.lock().expect("no holder of this lock panics");
        if stalled.is_some() && self.inner.dirty_bytes.load(Ordering::Relaxed) == 0 {
            *stalled = None;
        }
        *stalled
    }

    /// Writes at an offset. Waits for the lease, and while too much data is dirty.
    pub async fn write(&self, ino: Ino, off: u64, bytes: &[u8]) -> Result<(), FsError> {
        self.write_to(ino, Place::At(off), bytes).await.map(|_| ())
    }

    /// As [`Client::write`]. Returns the offset.
    pub async fn write_to(&self, ino: Ino, place: Place, bytes: &[u8]) -> Result<u64, FsError> {
        let mut waited = false;
        loop {
            let drained = self.inner.drained.notified();
            match self.take(ino, place, bytes) {
                Ok(off) => return Ok(off),
                Err(NotTaken::Failed(FsError::NoSpace)) if !waited => {
                    waited = true;
                    self.flush_oldest();
                    let dirty = self.inner.dirty_bytes.load(Ordering::Relaxed);
                    self.wait_for_room(dirty + bytes.len() as u64).await?;
                    continue;
                }
                Err(NotTaken::Failed(error)) => return Err(error),
                Err(NotTaken::WouldWait) => {}
            }
            let node = self.inner.nodes.get(ino);
            let (exclusive, known, remapping) = {
                let state = node.lock();
                let exclusive = state.holds(LeaseKind::Exclusive);
                (exclusive, state.attr().is_some(), exclusive && !state.may_write())
            };
            if !self.has_room(bytes.len() as u64) {
                self.flush_oldest();
                self.wait_for_room(bytes.len() as u64).await?;
            } else if !exclusive {
                // Appends pass the cache above by. Its pages past the end must be dropped in any case, or they would be read as zeros.
                let _waits = match place {
                    Place::At(off) => Some(Waiting::new(&node, off..off.saturating_add(bytes.len() as u64))),
                    Place::End => None,
                };
                self.acquire(&node, LeaseKind::Exclusive).await?;
            } else if !known {
                self.getattr(ino).await?;
            } else if remapping {
                node.remapped().await;
            } else if self.is_above_limit(bytes.len() as u64) {
                self.flush_oldest();
                drained.await;
            }
            // Another condition may hold by now, so all are checked again.
        }
    }

    async fn acquire(&self, node: &Arc<Node>, kind: LeaseKind) -> Result<(), FsError> {
        let asked = self.asking();
        match self.call(MetaRequest::Acquire { ino: node.ino, kind }).await? {
            MetaReply::Lease(lease) => {
                let mut state = node.lock();
                if state.lease.is_none() {
                    // Attributes from an earlier lease, or from a grant that was given up, may be old.
                    state.forget_attr();
                }
                state.learn_lease(
                    Some(lease).filter(|lease| self.is_answered_in_time(asked) && !self.is_void(*lease)),
                );
                Ok(())
            }
            _ => Err(FsError::Io),
        }
    }

    /// Subtracts bytes that are dirty no longer, and wakes waiting writers.
    pub(crate) fn dirty_gone(&self, bytes: u64) {
        self.inner.dirty_bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.inner.drained.notify_waiters();
    }

    /// Makes the data written to a file durable, with its size and names; of a directory, the names in it.
    pub async fn fsync(&self, ino: Ino) -> Result<(), FsError> {
        let node = self.inner.nodes.find(ino);
        let flushed = match &node {
            Some(node) => self.flush(node).await,
            None => Ok(()),
        };
        let flushed = flushed.and(self.sync_names().await);
        let Some(node) = node else { return flushed };
        // A failure is reported once, whether it happened just now or earlier.
        match node.lock().error.take() {
            Some(error) => Err(error),
            None => flushed,
        }
    }

    /// Returns the error of an earlier flush that was not reported yet.
    pub fn take_error(&self, ino: Ino) -> Result<(), FsError> {
        let error = self.inner.nodes.find(ino).and_then(|node| node.lock().error.take());
        error.map_or(Ok(()), Err)
    }

    /// Changes the size of a file, together with other attributes.
    pub(crate) async fn set_size(&self, node: &Arc<Node>, set: SetAttr) -> Result<wire::meta::Attr, FsError> {
        let size = set.size.ok_or(FsError::Invalid)?;
        let _flush = node.flush.lock().await;
        // A truncation to zero needs no flush: until it happens the old content stays visible.
        let is_kept = || size > 0 || !node.lock().held.set.is_empty();
        let _remapping = self.remap(node, is_kept).await?;
        loop {
            let asked = self.asking();
            let reply = self.call(MetaRequest::SetAttr { ino: node.ino, set: set.clone() }).await?;
            let MetaReply::Attr(attr) = reply else { return Err(FsError::Io) };
            if attr.size > size {
                continue;
            }
            let mut state = node.lock();
            let before = state.dirty.bytes();
            state.dirty.truncate(size);
            let cut = before - state.dirty.bytes();
            if state.dirty.bytes() == 0 {
                state.dirty_since_ns = None;
            }
            state.map.remove(size, u64::MAX);
            state.learn(attr);
            drop(state);
            self.dirty_gone(cut);
            return self.learned(node.ino, MetaReply::Attr(attr), asked);
        }
    }
}
