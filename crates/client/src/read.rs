//! Reading: dirty data here, over the pieces of the map, over zeros.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Duration;

use base::{FsError, Ino, LeaseId, PgId};
use bytes::{Bytes, BytesMut};
use futures_util::FutureExt;
use futures_util::future::{join, join_all};
use wire::drive::GetPurpose;
use wire::meta::{Content, MapPiece, MetaReply, MetaRequest};
use wire::object::ObjectInfo;

use crate::Client;
use crate::blobs::Reach;
use crate::extents::ReadExtentError;
use crate::node::{Node, Waiting};
use crate::session::ReadGuard;

/// Pieces per request, for a reader that continues where the known map ends.
const MAP_PAGE: u32 = 2048;
/// Pieces per request for other readers.
const MAP_PAGE_RANDOM: u32 = 64;
/// How often a read starts again because the map it used was old.
const ATTEMPTS: u32 = 5;
/// The same if the map may have been old or the content cannot be read.
const ATTEMPTS_DOUBTFUL: u32 = 2;
/// Pause between two maps, while it is not known whether a piece was deleted.
const DOUBT_PAUSE: Duration = Duration::from_millis(500);
/// The age after which an access time is updated even if the content has not changed (relatime).
const ATIME_AGE_NS: i64 = 24 * 3600 * 1_000_000_000;

fn attempts(error: ReadExtentError) -> u32 {
    match error {
        ReadExtentError::Gone => ATTEMPTS,
        ReadExtentError::Doubtful => ATTEMPTS_DOUBTFUL,
        ReadExtentError::Unreadable | ReadExtentError::StoreFailed | ReadExtentError::Damaged => 0,
    }
}

/// The state in memory for a read, all of one moment.
enum Lookup {
    /// The file ends before it.
    End(Moment),
    /// The map at the offset is not known here.
    NoMap { generation: u64 },
    /// The lease is just being given up.
    Held,
    /// The next bytes, as far as the map is known.
    Known(Snapshot),
}

/// A range of a file at one moment: pieces below, not yet durable bytes above.
struct Snapshot {
    len: usize,
    pieces: Vec<MapPiece>,
    above: Vec<(u64, Bytes)>,
    moment: Moment,
}

/// Tells whether two parts of a read are of one content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Moment {
    /// While it is held, no other client changes the content.
    lease: Option<LeaseId>,
    /// Changes made here.
    changes: u64,
    /// Whether the part ends where the file ended.
    is_last: bool,
}

/// Whether a read moves the access time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadAccess {
    /// It does, as the mount's options say.
    Noted,
    /// It does not.
    Quiet,
}

impl Client {
    /// Reads up to `len` bytes; fewer only at the end of the file.
    pub async fn read(&self, ino: Ino, off: u64, len: usize) -> Result<Bytes, FsError> {
        self.read_parts(ino, off, len, ReadAccess::Noted).await.map(joined)
    }

    /// As [`Client::read`], but returns several parts if that saves copying.
    pub async fn read_parts(
        &self,
        ino: Ino,
        off: u64,
        len: usize,
        access: ReadAccess,
    ) -> Result<Vec<Bytes>, FsError> {
        let node = self.inner.nodes.get(ino);
        let mut parts: Vec<Bytes> = Vec::new();
        let (mut done, mut first, mut restarts) = (0, None, 0);
        while done < len {
            let (more, moment) = self.read_some(&node, off + done as u64, len - done, access).await?;
            let now = (moment.lease, moment.changes);
            let before = *first.get_or_insert(now);
            if !parts.is_empty() && (now.0.is_none() || before != now) && restarts < ATTEMPTS {
                // The file may have changed in between: a read never mixes two contents.
                (done, first, restarts) = (0, None, restarts + 1);
                parts.clear();
                continue;
            }
            done += len_of(&more);
            parts.extend(more);
            if moment.is_last {
                break;
            }
        }
        Ok(parts)
    }

    /// Reads some bytes at `off`; none only at the end of the file.
    async fn read_some(
        &self,
        node: &Node,
        off: u64,
        len: usize,
        access: ReadAccess,
    ) -> Result<(Vec<Bytes>, Moment), FsError> {
        let mut retries = 0;
        // Pieces that the store did not deliver. Content may have come back since: then a fresh map names other pieces.
        let mut refused: Option<Vec<MapPiece>> = None;
        let begun = tokio::time::Instant::now();
        loop {
            let reading = self.inner.session.reading();
            let snapshot = match self.look(node, off, len, access) {
                Lookup::End(moment) => return Ok((Vec::new(), moment)),
                Lookup::Known(snapshot) => snapshot,
                Lookup::NoMap { generation } => {
                    drop(reading);
                    let _waits = Waiting::new(node, off..off.saturating_add(len as u64));
                    self.fetch_map(node, off, generation).await?;
                    continue;
                }
                Lookup::Held => {
                    drop(reading);
                    let _waits = Waiting::new(node, off..off.saturating_add(len as u64));
                    node.may_read().await;
                    continue;
                }
            };
            let moment = snapshot.moment;
            let away = snapshot.pieces.iter().any(|piece| matches!(piece.content, Content::Tiered(..)));
            if away && refused.as_ref() == Some(&snapshot.pieces) {
                self.suspect_pieces(node.ino, &snapshot.pieces);
                tracing::error!(ino = %node.ino, off, len, "read failed: only the object store has this");
                return Err(FsError::Io);
            }
            let asked = away.then(|| snapshot.pieces.clone());
            let Snapshot { len, pieces, above, .. } = snapshot;
            match self.fetch(off, len, &pieces, above, Some(reading)).await {
                Ok(parts) => {
                    if away {
                        self.bring_back(node, off, len_of(&parts) as u64);
                    }
                    return Ok((parts, moment));
                }
                // Upkeep moves content without telling clients. While drives are silent, a deleted extent looks like an
                // unreadable one: a fresh map tells which it is.
                Err(error) if retries < attempts(error) => {
                    retries += 1;
                    node.lock().map.forget();
                }
                // The map is not old: the machines with the other shards are waited for, while the map is asked for again and again.
                Err(ReadExtentError::Doubtful)
                    if begun.elapsed() < self.inner.extents.waits_for(groups_of(&pieces)) =>
                {
                    tokio::time::sleep(DOUBT_PAUSE).await;
                    node.lock().map.forget();
                }
                Err(ReadExtentError::StoreFailed | ReadExtentError::Damaged) if refused.is_none() => {
                    refused = asked;
                    node.lock().map.forget();
                }
                Err(error) => {
                    self.suspect_pieces(node.ino, &pieces);
                    tracing::error!(ino = %node.ino, off, len, ?error, "read failed");
                    return Err(FsError::Io);
                }
            }
        }
    }

    fn look(&self, node: &Node, off: u64, len: usize, access: ReadAccess) -> Lookup {
        let mut state = node.lock();
        if state.holds_reads {
            return Lookup::Held;
        }
        let Some(attr) = state.attr() else { return Lookup::NoMap { generation: state.map.generation() } };
        state.reads += 1;
        let (lease, changes) = (state.lease.map(|lease| lease.id), state.dirty.changes());
        if off >= attr.size {
            return Lookup::End(Moment { lease, changes, is_last: true });
        }
        let now = self.inner.env.clock.wall_ns();
        let notes = access == ReadAccess::Noted && self.inner.notes_reads.load(Ordering::Relaxed);
        if notes && (attr.atime_ns <= attr.mtime_ns.max(attr.ctime_ns) || now - attr.atime_ns > ATIME_AGE_NS)
        {
            state.atime_ns = Some(now);
        }
        let end = (off + (len as u64).min(attr.size - off)).min(state.map.known_end(off));
        if end <= off {
            return Lookup::NoMap { generation: state.map.generation() };
        }
        let pieces = state.map.pieces(off, end);
        let moment = Moment { lease, changes, is_last: end == attr.size };
        Lookup::Known(Snapshot {
            len: (end - off) as usize,
            pieces,
            above: Node::above(&state, off, end),
            moment,
        })
    }

    /// Asks for the map from `off` on. The answer is dropped if the map changed in the meantime; the caller checks
    /// again.
    pub(crate) async fn fetch_map(&self, node: &Node, off: u64, generation: u64) -> Result<(), FsError> {
        node.remapped().await;
        node.recall_settled().await;
        if node.lock().attr().is_none() {
            self.getattr(node.ino).await?;
        }
        let in_sequence = off == 0 || node.lock().map.ends_at(off);
        let limit = if in_sequence { MAP_PAGE } else { MAP_PAGE_RANDOM };
        let reply = self.call(MetaRequest::GetMap { ino: node.ino, off, limit }).await?;
        let MetaReply::Map { pieces, end } = reply else { return Err(FsError::Io) };
        let known_to = match pieces.last() {
            Some(last) if !end => last.end(),
            _ => u64::MAX,
        };
        node.lock().map.learn(generation, off, known_to, pieces);
        Ok(())
    }

    /// Reads bytes of a small object that [`Client::read_object`] returned without opening it; `range` lies in it.
    ///
    /// # Errors
    /// `Stale` if the bytes are not where they were then: use [`Client::get_object`].
    pub async fn read_small(&self, info: &ObjectInfo, range: Range<u64>) -> Result<Bytes, FsError> {
        let pieces = info.pieces.iter().flatten().filter_map(|piece| piece.clip(range.start, range.end));
        let len = (range.end - range.start) as usize;
        let pieces: Vec<MapPiece> = pieces.collect();
        let parts = self.fetch(range.start, len, &pieces, Vec::new(), None).await;
        parts.map(joined).map_err(|error| {
            tracing::debug!(ino = %info.attr.ino, ?range, ?error, "small object is not where it was");
            FsError::Stale
        })
    }

    /// Reads `len` bytes from `off` on: `above`, over the pieces of the map, over zeros. A single piece is not copied
    /// and comes as its drives have it. Deleted extents stay on drives while they are read, but not while a store is
    /// waited for: a blob that is deleted in the meantime is `Doubtful`, and its name is never used again.
    async fn fetch(
        &self,
        off: u64,
        len: usize,
        pieces: &[MapPiece],
        above: Vec<(u64, Bytes)>,
        reading: Option<ReadGuard<'_>>,
    ) -> Result<Vec<Bytes>, ReadExtentError> {
        if let [piece] = pieces
            && above.is_empty()
            && piece.off == off
            && piece.len == len as u64
        {
            match &piece.content {
                Content::Inline(bytes) => return Ok(vec![bytes.clone()]),
                Content::Extent(extent) => {
                    return self
                        .inner
                        .extents
                        .read_parts(extent, extent.extent_off, len as u32, GetPurpose::Read)
                        .await;
                }
                Content::Tiered(..) => {}
            }
        }
        let mut out = BytesMut::zeroed(len);
        let (mut reads, mut fetches) = (Vec::new(), Vec::new());
        let mut rest = &mut out[..];
        let mut at = off;
        for piece in pieces {
            if piece.off < at {
                tracing::error!(off, at, piece = piece.off, "pieces of a known map overlap, asking again");
                return Err(ReadExtentError::Gone);
            }
            let (_hole, from_piece) = rest.split_at_mut((piece.off - at) as usize);
            let (part, later) = from_piece.split_at_mut(piece.len as usize);
            rest = later;
            at = piece.end();
            match &piece.content {
                Content::Inline(bytes) => part.copy_from_slice(bytes),
                Content::Extent(extent) => {
                    reads.push(self.inner.extents.read_into(
                        extent,
                        extent.extent_off,
                        part,
                        GetPurpose::Read,
                    ));
                }
                Content::Tiered(extent, place) => {
                    fetches.push(self.inner.blobs.read_into(
                        *place,
                        extent.extent_len,
                        extent.extent_off,
                        part,
                        Reach::Usual,
                    ));
                }
            }
        }
        let reads = join_all(reads).inspect(move |_| drop(reading));
        let (reads, fetches) = join(reads, join_all(fetches)).await;
        reads.into_iter().chain(fetches).collect::<Result<(), _>>()?;
        for (run_off, run) in above {
            let start = (run_off - off) as usize;
            out[start..start + run.len()].copy_from_slice(&run);
        }
        Ok(vec![out.freeze()])
    }
}

fn groups_of(pieces: &[MapPiece]) -> impl Iterator<Item = PgId> {
    pieces.iter().filter_map(|piece| match &piece.content {
        Content::Extent(extent) => Some(extent.pg),
        Content::Inline(_) | Content::Tiered(..) => None,
    })
}

fn len_of(parts: &[Bytes]) -> usize {
    parts.iter().map(Bytes::len).sum()
}

fn joined(mut parts: Vec<Bytes>) -> Bytes {
    match parts.len() {
        0 | 1 => parts.pop().unwrap_or_default(),
        _ => parts.concat().into(),
    }
}
