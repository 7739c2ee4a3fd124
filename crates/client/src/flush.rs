//! Making dirty bytes durable: inline in the commit, as copies, or erasure coded.
//!
//! One flush of a file runs at a time. It takes runs out of the dirty buffer and writes some of their extents in
//! parallel while earlier ones are committed; until then reads find the runs in `flushing`. If a step fails, the
//! remaining runs go back below newer writes, and the next fsync or close returns the error.

use std::collections::BTreeMap;
use std::sync::Arc;

use base::units::BLOCK_BYTES;
use base::{FsError, Ino, LeaseId};
use bytes::{Bytes, BytesMut};
use futures_util::future::{join, join_all};
use wire::drive::{PutPurpose, ShardNote};
use wire::meta::{
    CommitPiece, Content, ExtentRef, INLINE_BYTES_MAX, LeaseGrant, LeaseKind, MapPiece, MetaReply,
    MetaRequest, SetAttr,
};

use crate::Client;
use crate::dirty::Flushing;
use crate::extents::{Protection, WriteExtentError, WriteHow};
use crate::node::{AttrChanges, Node, NodeState, Remapping};
use crate::rebuild::NewerMap;
use crate::room::RoomWait;
use crate::topology::Beside;

const COPIES_BYTES_MAX: usize = crate::extents::COPIES_BYTES_MAX as usize;
/// Extents written in parallel before one commit.
const EXTENTS_PER_COMMIT: usize = 8;
/// Inline bytes that a client puts into the log per second. They are written there and again to the ledger's store,
/// about three times in all. On most profiles, m + 1 copies with their frame headers are more, with one sync each. The
/// limit keeps the store and its log from growing faster than they are worked off.
const INLINE_BYTES_PER_S: u64 = 32 << 20;
/// Inline bytes of one commit.
const INLINE_BYTES_PER_COMMIT: usize = 64 << 10;

/// A token bucket of bytes.
#[derive(Debug)]
pub(crate) struct InlineBudget {
    tokens: u64,
    filled_ns: u64,
}

impl InlineBudget {
    pub(crate) fn new(now_ns: u64) -> Self {
        Self { tokens: INLINE_BYTES_PER_S, filled_ns: now_ns }
    }

    fn take(&mut self, bytes: u64, now_ns: u64) -> bool {
        let elapsed_ms = now_ns.saturating_sub(self.filled_ns) / 1_000_000;
        if elapsed_ms > 0 {
            self.tokens = (self.tokens + elapsed_ms * INLINE_BYTES_PER_S / 1000).min(INLINE_BYTES_PER_S);
            self.filled_ns = now_ns;
        }
        let enough = self.tokens >= bytes;
        if enough {
            self.tokens -= bytes;
        }
        enough
    }
}

/// Whether there was data to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wrote {
    Nothing,
    Something,
}

/// Bytes that become one extent, and the parts of the file that they belong to.
#[derive(Debug, Clone, PartialEq, Eq)]
struct NewExtent {
    data: Bytes,
    /// File offset, offset in `data`, length.
    parts: Vec<(u64, u32, u32)>,
}

/// Gathers runs into new extents of at most `window` bytes. A long run gets an extent of its own, so that sequential
/// data lies together; short runs share.
fn new_extents(runs: &BTreeMap<u64, Bytes>, window: usize) -> Vec<NewExtent> {
    let mut new_extents = Vec::new();
    let mut shared = BytesMut::new();
    let mut parts = Vec::new();
    for (off, run) in runs {
        if run.len() > COPIES_BYTES_MAX || runs.len() == 1 {
            new_extents.push(NewExtent { data: run.clone(), parts: vec![(*off, 0, run.len() as u32)] });
            continue;
        }
        // Aligned pages of the file stay aligned in the extent: reading one touches one block.
        let phase = (*off % BLOCK_BYTES) as usize;
        let misaligned = (shared.len() + BLOCK_BYTES as usize - phase) % BLOCK_BYTES as usize;
        let padding = match misaligned {
            0 => 0,
            _ if run.len() < BLOCK_BYTES as usize => 0,
            ahead => BLOCK_BYTES as usize - ahead,
        };
        if shared.len() + padding + run.len() > window {
            new_extents.push(NewExtent { data: shared.split().freeze(), parts: std::mem::take(&mut parts) });
        }
        if !shared.is_empty() {
            shared.resize(shared.len() + padding, 0);
        }
        parts.push((*off, shared.len() as u32, run.len() as u32));
        shared.extend_from_slice(run);
    }
    if !parts.is_empty() {
        new_extents.push(NewExtent { data: shared.freeze(), parts });
    }
    new_extents
}

/// Splits a new extent into several of at most `bytes_max` bytes.
fn split(new_extent: &NewExtent, bytes_max: u32) -> Vec<NewExtent> {
    let len = new_extent.data.len() as u32;
    let cuts = (0..len).step_by(bytes_max as usize).map(|from| (from, len.min(from + bytes_max)));
    let cut = |(from, to): (u32, u32)| {
        let parts = new_extent.parts.iter().filter_map(|(off, at, len)| {
            let (start, end) = ((*at).max(from), (at + len).min(to));
            (start < end).then(|| (off + u64::from(start - at), start - from, end - start))
        });
        NewExtent { data: new_extent.data.slice(from as usize..to as usize), parts: parts.collect() }
    };
    cuts.map(cut).filter(|new_extent| !new_extent.parts.is_empty()).collect()
}

pub(crate) fn extents_of(pieces: &[CommitPiece]) -> impl Iterator<Item = ExtentRef> {
    pieces.iter().filter_map(|commit| match commit.piece.content {
        Content::Extent(extent) => Some(extent),
        Content::Inline(_) | Content::Tiered(..) => None,
    })
}

impl Client {
    /// Flushes in the background; the caller has set `flush_scheduled`.
    pub(crate) fn schedule_flush(&self, node: Arc<Node>) {
        let client = self.clone();
        self.inner.runtime.spawn(async move {
            let _flush = node.flush.lock().await;
            // While this flag is set, no second flush is scheduled.
            node.lock().flush_scheduled = false;
            if let Err(error) = client.flush_all_locked(&node).await {
                tracing::error!(ino = %node.ino, %error, "data could not be written; trying again");
            }
        });
    }

    /// Flushes full windows in the background; the caller has set `flush_scheduled`. A writer that never pauses always
    /// has another full window, so other flushes (for a recall or an fsync) get a turn between two windows.
    pub(crate) fn schedule_full_windows(&self, node: Arc<Node>) {
        let client = self.clone();
        self.inner.runtime.spawn(async move {
            loop {
                match client.flush_full_windows(&node).await {
                    Ok(Wrote::Something) => {}
                    Ok(Wrote::Nothing) => {
                        // Waiting writers took this for a flush of everything.
                        client.inner.drained.notify_waiters();
                        return;
                    }
                    Err(error) => {
                        tracing::error!(ino = %node.ino, %error, "data could not be written; trying again");
                        return;
                    }
                }
                if std::mem::replace(&mut node.lock().flush_scheduled, true) {
                    // A newer task continues.
                    return;
                }
            }
        });
    }

    /// Writes the windows that are full now.
    async fn flush_full_windows(&self, node: &Node) -> Result<Wrote, FsError> {
        let _flush = node.flush.lock().await;
        node.lock().flush_scheduled = false;
        let window = self.inner.window;
        self.write_runs(node, |state| state.dirty.take_full(window)).await
    }

    /// Starts to flush the file that has been dirty for longest.
    pub(crate) fn flush_oldest(&self) {
        let dirty = self.inner.nodes.select(|state| state.dirty.bytes() > 0 && !state.flush_scheduled);
        let oldest = dirty.into_iter().min_by_key(|node| node.lock().dirty_since_ns.unwrap_or(u64::MAX));
        if let Some(node) = oldest {
            node.lock().flush_scheduled = true;
            self.schedule_flush(node);
        }
    }

    /// Makes everything written to the file so far durable.
    pub(crate) async fn flush(&self, node: &Arc<Node>) -> Result<(), FsError> {
        let _flush = node.flush.lock().await;
        self.flush_all_locked(node).await
    }

    /// As [`Client::flush`], for a caller that holds the flush lock.
    async fn flush_all_locked(&self, node: &Node) -> Result<(), FsError> {
        self.flush_locked(node).await?;
        let atime_ns = node.lock().atime_ns.take();
        if let Some(atime_ns) = atime_ns {
            let asked = self.asking();
            // Losing an access time is not worth an error: the inode may be gone, or the owner busy.
            if let Ok(reply) = self.call(MetaRequest::NoteRead { ino: node.ino, atime_ns }).await {
                self.learned(node.ino, reply, asked)?;
            }
        }
        Ok(())
    }

    /// Makes content and size durable, for a caller that holds the flush lock.
    pub(crate) async fn flush_locked(&self, node: &Node) -> Result<(), FsError> {
        let everything = |state: &mut NodeState| {
            state.dirty_since_ns = None;
            state.dirty.take_all()
        };
        match self.write_runs(node, everything).await? {
            Wrote::Something => Ok(()),
            Wrote::Nothing => self.send_held(node).await,
        }
    }

    /// Begins a change of size and map by the owner, for a caller that holds the flush lock. If `is_kept`, earlier
    /// writes are durable on return.
    pub(crate) async fn remap<'a>(
        &self,
        node: &'a Node,
        is_kept: impl Fn() -> bool,
    ) -> Result<Remapping<'a>, FsError> {
        if is_kept() {
            self.flush_locked(node).await?;
        }
        let remapping = Remapping::new(node);
        // Flushes data written during the first flush: it is less, so reads and writes wait for less time.
        if is_kept() {
            self.flush_locked(node).await?;
        }
        Ok(remapping)
    }

    /// Drops dirty data of a file that is gone for good. Its bytes can be read no more, so a failure to write them no
    /// longer makes writers wait.
    pub(crate) async fn discard_dirty(&self, node: &Node) {
        let _flush = node.flush.lock().await;
        let discarded = node.lock().discard_dirty();
        if discarded > 0 {
            *self.inner.stalled.lock().expect("no holder of this lock panics") = None;
            self.dirty_gone(discarded);
        }
    }

    /// Writes the runs that `take` takes from the dirty buffer. On an error it puts them back.
    async fn write_runs(
        &self,
        node: &Node,
        take: impl FnOnce(&mut NodeState) -> BTreeMap<u64, Bytes>,
    ) -> Result<Wrote, FsError> {
        let (held, lease) = {
            // In one step: a read in between must find the bytes in one place or the other.
            let mut state = node.lock();
            state.flushing = Flushing::new(take(&mut state));
            if state.flushing.bytes() == 0 {
                return Ok(Wrote::Nothing);
            }
            // A commit sets the time of the last write, so held attributes go with the last of the content, not before.
            let held = if state.dirty.bytes() == 0 { state.held.clone() } else { AttrChanges::default() };
            (held, state.lease.map(|lease| lease.id))
        };
        let result = self.write_patiently(node, lease, &held.request()).await;
        let mut stalled = self.inner.stalled.lock().expect("no holder of this lock panics");
        let mut state = node.lock();
        let left = std::mem::take(&mut state.flushing);
        let bytes = left.bytes();
        match result {
            Ok(()) => {
                *stalled = None;
                state.settle_held(&held);
                Ok(Wrote::Something)
            }
            Err(FsError::Stale) if state.opens == 0 => {
                // The file was removed with its last handle, so its bytes can be read no more.
                *stalled = None;
                let newer = state.discard_dirty();
                drop(state);
                drop(stalled);
                self.dirty_gone(bytes + newer);
                Ok(Wrote::Something)
            }
            Err(error) => {
                // Others may have written since the lease ended. Data written under a newer lease stays.
                let is_held = state.lease.map(|held| held.id) == lease;
                let error = if is_held { error } else { FsError::StaleLease };
                let lost = matches!(error, FsError::StaleLease | FsError::Stale);
                let gone = if lost {
                    *stalled = None;
                    bytes + if is_held { state.lose_lease() } else { 0 }
                } else {
                    if error == FsError::NoSpace {
                        self.note_refused_by_drives(bytes);
                    }
                    let before = state.dirty.bytes();
                    state.dirty.put_back(left.runs(), self.inner.window);
                    state.dirty_since_ns.get_or_insert(self.inner.env.clock.boot_ns());
                    *stalled = Some(error);
                    bytes - (state.dirty.bytes() - before)
                };
                state.error = Some(if lost { FsError::Io } else { error });
                drop(state);
                drop(stalled);
                self.dirty_gone(gone);
                Err(error)
            }
        }
    }

    /// As [`Client::write_and_commit`], again when there is room, or by a newer cluster map.
    async fn write_patiently(
        &self,
        node: &Node,
        lease: Option<LeaseId>,
        set: &SetAttr,
    ) -> Result<(), FsError> {
        let (mut wait, mut maps) = (RoomWait::default(), NewerMap::new(self));
        loop {
            let result = self.write_and_commit(node, lease, set).await;
            let again = match result {
                Err(FsError::NoSpace) => wait.step(self).await.unwrap_or(false),
                Err(FsError::StaleMap) => maps.step().await,
                _ => false,
            };
            if !again {
                return result;
            }
        }
    }

    /// Sends changes of attributes when there is no content to commit.
    async fn send_held(&self, node: &Node) -> Result<(), FsError> {
        let held = node.lock().held.clone();
        if held.set.is_empty() {
            return Ok(());
        }
        let result = self.call(MetaRequest::SetAttr { ino: node.ino, set: held.request() }).await;
        let mut state = node.lock();
        match result {
            Ok(MetaReply::Attr(attr)) => {
                state.settle_held(&held);
                state.learn(attr);
                Ok(())
            }
            Ok(_) => Err(FsError::Io),
            Err(FsError::Stale) if state.opens == 0 => {
                state.drop_held();
                Ok(())
            }
            Err(error) => {
                state.error = Some(error);
                if error == FsError::Stale {
                    state.drop_held();
                } else {
                    state.dirty_since_ns.get_or_insert(self.inner.env.clock.boot_ns());
                }
                Err(error)
            }
        }
    }

    /// Makes the data in `flushing` durable and removes each part once it is. The attributes in `set` change with the
    /// last of the content. All data was written under `lease`.
    async fn write_and_commit(
        &self,
        node: &Node,
        lease: Option<LeaseId>,
        set: &SetAttr,
    ) -> Result<(), FsError> {
        let (inline, new_extents) = {
            let runs = node.lock().flushing.runs().clone();
            let (inline, rest) = self.split_inline(&runs);
            (inline, new_extents(&rest, self.inner.window as usize))
        };
        if !inline.is_empty() {
            let pieces = inline.into_iter().map(|(off, run)| CommitPiece::inline(off, run));
            return self.commit(node, lease, pieces.collect(), set.clone()).await;
        }
        // Committed data need not stay in memory until all is committed.
        let mut new_extents = new_extents.into_iter();
        let mut next_group = || new_extents.by_ref().take(EXTENTS_PER_COMMIT).collect::<Vec<_>>();
        let mut pieces = self.write_group(node.ino, next_group()).await?;
        while !pieces.is_empty() {
            let group = next_group();
            if group.is_empty() {
                return self.commit(node, lease, pieces, set.clone()).await;
            }
            let committed = self.commit(node, lease, pieces, SetAttr::default());
            let (committed, written) = join(committed, self.write_group(node.ino, group)).await;
            if let Err(error) = committed {
                // No request named these.
                let written = written.unwrap_or_default();
                self.discard_uncommitted(&written).await;
                return Err(error);
            }
            pieces = written?;
        }
        Ok(())
    }

    /// Writes new extents in parallel: either all of them, or none stays on drives.
    async fn write_group(&self, ino: Ino, group: Vec<NewExtent>) -> Result<Vec<CommitPiece>, FsError> {
        let mut pieces = Vec::new();
        let written = join_all(group.iter().map(|new_extent| self.write_new_extent(ino, new_extent))).await;
        let failed = written.into_iter().filter_map(|(written, result)| {
            pieces.extend(written);
            result.err()
        });
        match failed.reduce(|first, _| first) {
            None => Ok(pieces),
            Some(error) => {
                self.discard_uncommitted(&pieces).await;
                Err(error)
            }
        }
    }

    /// Makes bytes durable that belong to no file yet: on drives, or inline in the request that names them if they are
    /// few.
    pub(crate) async fn write_body(&self, body: &Bytes) -> Result<Vec<CommitPiece>, FsError> {
        if body.is_empty() {
            return Ok(Vec::new());
        }
        if !self.has_room(body.len() as u64) {
            self.wait_for_room(body.len() as u64).await?;
        }
        self.inner.room.stored(body.len() as u64);
        let (inline, rest) = self.split_inline(&BTreeMap::from([(0, body.clone())]));
        if let Some((off, run)) = inline.into_iter().next() {
            return Ok(vec![CommitPiece::inline(off, run)]);
        }
        let mut wait = RoomWait::default();
        loop {
            let written = self.write_whole(&rest).await;
            match written {
                Err(FsError::NoSpace) if wait.step(self).await.unwrap_or(false) => continue,
                Err(FsError::NoSpace) => self.note_refused_by_drives(body.len() as u64),
                _ => {}
            }
            return written;
        }
    }

    async fn write_whole(&self, runs: &BTreeMap<u64, Bytes>) -> Result<Vec<CommitPiece>, FsError> {
        let window = self.inner.window as usize;
        let cut = |(off, run): (&u64, &Bytes)| {
            let whole = NewExtent { data: run.clone(), parts: vec![(*off, 0, run.len() as u32)] };
            split(&whole, window as u32)
        };
        // The object has no inode yet.
        let cuts: Vec<NewExtent> = runs.iter().flat_map(cut).collect();
        let mut pieces = Vec::new();
        for group in cuts.chunks(EXTENTS_PER_COMMIT) {
            match self.write_group(Ino(0), group.to_vec()).await {
                Ok(written) => pieces.extend(written),
                Err(error) => {
                    self.discard_uncommitted(&pieces).await;
                    return Err(error);
                }
            }
        }
        Ok(pieces)
    }

    /// Deletes extents on drives that no commit names. A request without a definite answer may be such a commit.
    pub(crate) async fn discard_uncommitted(&self, pieces: &[CommitPiece]) {
        // Several pieces may be in one extent.
        let extents: BTreeMap<_, _> = extents_of(pieces).map(|extent| (extent.id, extent)).collect();
        self.inner.extents.discard_refused(extents.into_values()).await;
    }

    /// Splits the runs into those that go into the commit itself and the rest.
    fn split_inline(&self, runs: &BTreeMap<u64, Bytes>) -> (BTreeMap<u64, Bytes>, BTreeMap<u64, Bytes>) {
        let total: usize = runs.values().map(Bytes::len).sum();
        let small =
            total <= INLINE_BYTES_PER_COMMIT && runs.values().all(|run| run.len() <= INLINE_BYTES_MAX);
        let now = self.inner.env.clock.boot_ns();
        let mut budget = self.inner.inline.lock().expect("no holder of this lock panics");
        if small && budget.take(total as u64, now) {
            (runs.clone(), BTreeMap::new())
        } else {
            (BTreeMap::new(), runs.clone())
        }
    }

    /// Writes a new extent. Returns the pieces that are on drives, and the error that stopped the rest.
    async fn write_new_extent(
        &self,
        ino: Ino,
        new_extent: &NewExtent,
    ) -> (Vec<CommitPiece>, Result<(), FsError>) {
        let mut rest = vec![new_extent.clone()];
        let mut pieces = Vec::new();
        while let Some(new_extent) = rest.pop() {
            let coded = new_extent.data.len() > COPIES_BYTES_MAX;
            let protection = if coded { Protection::Coded } else { Protection::Copies };
            let next_id = || self.inner.session.next_extent();
            let data = new_extent.data.clone();
            let note =
                ShardNote { ino, off: new_extent.parts.first().map_or(0, |part| part.0), key_version: 0 };
            let how = WriteHow { protection, purpose: PutPurpose::Write, beside: Beside::Here, note };
            let mut written = match self.inner.extents.write(data, how, next_id).await {
                Ok(written) => written,
                // Extents are narrow while drives are missing.
                Err(WriteExtentError::TooLong { bytes_max }) => {
                    rest.extend(split(&new_extent, bytes_max));
                    continue;
                }
                Err(WriteExtentError::Failed(error)) => return (pieces, Err(error)),
            };
            let mut owed = std::mem::take(&mut written.owed);
            pieces.extend(new_extent.parts.iter().map(|(off, extent_off, len)| {
                let extent = ExtentRef { extent_off: *extent_off, ..written.extent };
                let piece = MapPiece { off: *off, len: u64::from(*len), content: Content::Extent(extent) };
                CommitPiece { piece, owed: std::mem::take(&mut owed), placed: written.placed }
            }));
        }
        (pieces, Ok(()))
    }

    async fn commit(
        &self,
        node: &Node,
        lease: Option<LeaseId>,
        pieces: Vec<CommitPiece>,
        set: SetAttr,
    ) -> Result<(), FsError> {
        let held = {
            let state = node.lock();
            // Under a newer lease, others may have written in the meantime.
            let same = |held: &LeaseGrant| held.kind >= LeaseKind::Shared && Some(held.id) == lease;
            state.lease.filter(same).map(|held| (held.id, state.written_ns))
        };
        let Some((lease, mtime_ns)) = held else {
            self.discard_uncommitted(&pieces).await;
            return Err(FsError::StaleLease);
        };
        let size = pieces.iter().map(|commit| commit.piece.end()).max().unwrap_or(0);
        let request =
            MetaRequest::Commit { ino: node.ino, lease, pieces: pieces.clone(), size, mtime_ns, set };
        let sent_ns = self.inner.session.term.now_ns();
        let attr = match self.call(request).await {
            Ok(MetaReply::Attr(attr)) => attr,
            Ok(_) => return Err(FsError::Io),
            Err(error) => {
                // Only a definite refusal makes the extents garbage: without an answer they may be committed.
                if !matches!(error, FsError::Unknown | FsError::Io) {
                    self.discard_uncommitted(&pieces).await;
                }
                return Err(error);
            }
        };
        let mut state = node.lock();
        let mut bytes = 0;
        // The map under a newer lease is newer.
        let is_held = state.lease.is_some_and(|held| held.id == lease);
        if let Some(notice) = state.notice.as_mut().filter(|_| is_held) {
            notice.prolong(sent_ns);
        }
        for commit in &pieces {
            if is_held {
                state.map.replace(&commit.piece);
            }
            // A run is committed as a whole.
            bytes += state.flushing.arrived(commit.piece.off);
        }
        state.learn(attr);
        drop(state);
        self.inner.room.stored(bytes);
        self.dirty_gone(bytes);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_runs_share_an_extent_and_pages_stay_aligned() {
        let page = |byte| Bytes::from(vec![byte; 4096]);
        let runs =
            BTreeMap::from([(8192, page(1)), (40960, page(2)), (100_000, Bytes::from_static(b"tail"))]);
        let new_extents = new_extents(&runs, 1 << 20);
        assert_eq!(new_extents.len(), 1);
        assert_eq!(new_extents[0].parts, [(8192, 0, 4096), (40960, 4096, 4096), (100_000, 8192, 4)]);
        assert_eq!(new_extents[0].data.len(), 8196);
    }

    #[test]
    fn a_new_extent_too_long_for_narrow_ones_is_cut_and_every_byte_keeps_its_place() {
        let data: Bytes = (0..2_500_000u32).map(|at| (at % 251) as u8).collect();
        let parts = vec![(0, 0, 900_000), (5_000_000, 900_096, 400_000), (9_000_000, 1_300_480, 1_199_520)];
        let whole = NewExtent { data: data.clone(), parts: parts.clone() };
        let cut = split(&whole, 1 << 20);
        assert_eq!(
            cut.iter().map(|new_extent| new_extent.data.len()).collect::<Vec<_>>(),
            [1 << 20, 1 << 20, 402_848]
        );
        let mut file = BTreeMap::new();
        for new_extent in &cut {
            for (off, at, len) in &new_extent.parts {
                file.insert(*off, new_extent.data.slice(*at as usize..(at + len) as usize));
            }
        }
        for (off, at, len) in parts {
            let pieces: Vec<u8> =
                file.range(off..off + u64::from(len)).flat_map(|(_, bytes)| bytes.to_vec()).collect();
            assert!(pieces == data[at as usize..(at + len) as usize], "off={off}");
        }
    }

    #[test]
    fn long_runs_go_alone_and_new_extents_fit_the_window() {
        let long = Bytes::from(vec![1; COPIES_BYTES_MAX + 1]);
        let mut runs = BTreeMap::from([(0, long)]);
        runs.extend((0..9u64).map(|at| (1_000_000 + at * 200_000, Bytes::from(vec![2; 100_000]))));
        let new_extents = new_extents(&runs, 500_000);
        assert_eq!(new_extents[0].parts.len(), 1);
        let mut lens = new_extents.iter().map(|new_extent| new_extent.data.len());
        assert!(lens.all(|len| len <= 500_000));
        let total: u32 = new_extents.iter().flat_map(|new_extent| &new_extent.parts).map(|part| part.2).sum();
        assert_eq!(total as usize, COPIES_BYTES_MAX + 1 + 900_000);
        for new_extent in &new_extents {
            for (off, at, len) in &new_extent.parts {
                let expected = if *off == 0 { 1 } else { 2 };
                assert!(
                    new_extent.data[*at as usize..(at + len) as usize].iter().all(|byte| *byte == expected)
                );
            }
        }
    }

    #[test]
    fn the_inline_budget_refills_with_time() {
        let mut budget = InlineBudget::new(0);
        assert!(budget.take(INLINE_BYTES_PER_S, 0));
        assert!(!budget.take(1, 0));
        assert!(budget.take(INLINE_BYTES_PER_S / 10, 100_000_000));
        assert!(!budget.take(INLINE_BYTES_PER_S / 10, 100_000_000));
    }
}
