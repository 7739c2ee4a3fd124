//! Bringing data back from blobs to drives: files on request, and data behind a reader.
//!
//! Pieces that are adjacent in a blob are fetched and committed together, also if they belong to different files.

use std::ops::Range;

use base::{Epoch, FsError, Ino};
use bytes::{Bytes, BytesMut};
use futures_util::future::join_all;
use futures_util::{StreamExt, stream};
use wire::drive::{PutPurpose, ShardNote};
use wire::meta::{Content, MapPiece, MetaReply, MetaRequest, REHYDRATED_MAX, Rehydrated};
use wire::store::{MovePace, StoreError};
use wire::tier::BlobPlace;

use crate::Client;
use crate::blobs::{LONG, Reach};
use crate::extents::{
    COPIES_BYTES_MAX, Protection, ReadExtentError, WriteExtentError, WriteHow, WrittenExtent,
};
use crate::node::Node;
use crate::topology::Beside;

/// Runs of adjacent pieces that are fetched at a time, if memory permits.
const FETCHES: usize = 32;
/// Maps that are requested at a time.
const MAPS: usize = 16;
/// Pieces with a smaller gap between them are fetched together.
const GAP: u64 = 64 << 10;
/// Pieces of a file that one step asks for.
const COMING_BACK: usize = 256;
/// A step takes no further file once the pieces to bring back reach this size ...
const STEP_BYTES: u64 = 256 << 20;
/// ... or this one while the filesystem is in use.
const GENTLE_STEP_BYTES: u64 = 16 << 20;
/// How far ahead of a sequential reader data is brought back.
const AHEAD_BYTES: u64 = 8 << 20;
/// Reads of at least this many bytes count as sequential.
const AHEAD_FROM: u64 = 128 << 10;
/// Pieces that wait to be brought back. A piece beyond that stays away until it is read again.
const WAITING_MAX: usize = 4096;

/// Progress of one step on a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fetched {
    /// Bytes that are on drives now.
    pub bytes: u64,
    /// Where to continue, if there may be more.
    pub next: Option<u64>,
}

/// A piece that only a blob has, and the index of its file in the step.
#[derive(Debug, Clone)]
struct Wanted {
    file: usize,
    ino: Ino,
    piece: MapPiece,
}

/// The result for a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FetchOutcome {
    /// This many bytes are on drives.
    Bytes(u64),
    /// The file has changed, from this offset on.
    Changed(u64),
}

/// Why a piece was not written to drives.
enum WriteBackError {
    Blob(ReadExtentError),
    Drives(FsError),
}

/// The source of pieces that go back to drives.
enum PieceSource {
    /// Fetched bytes, and their offset in the blob.
    Fetched(u64, Bytes),
    /// They have yet to be fetched.
    Blob(Reach),
}

/// How far a read of these bytes brings back.
fn reach_of(off: u64, len: u64) -> u64 {
    let ahead = if len >= AHEAD_FROM { AHEAD_BYTES } else { 0 };
    off.saturating_add(len).saturating_add(ahead)
}

impl Client {
    /// Brings data of these files back to drives, of each file from an offset on. Returns one result for each, in
    /// order. A step is bounded: for the last files it may bring nothing and return the offset where they began. While
    /// the filesystem is in use it keeps to `pace`.
    pub async fn fetch_files(
        &self,
        files: &[(Ino, u64)],
        pace: Option<&dyn MovePace>,
    ) -> Vec<Result<Fetched, FsError>> {
        let away = &self.inner.blobs;
        let (step_bytes, load_bytes) = match self.is_in_use() {
            true => (GENTLE_STEP_BYTES, away.gentle_load_bytes()),
            false => (STEP_BYTES, away.load_bytes()),
        };
        let (mut wanted, mut fetched, mut bytes) = (Vec::new(), Vec::new(), 0);
        let mut maps =
            stream::iter(files.to_vec()).map(|(ino, off)| self.away_pieces(ino, off)).buffered(MAPS);
        while bytes < step_bytes
            && let Some(found) = maps.next().await
        {
            let file = fetched.len();
            fetched.push(found.map(|(pieces, next)| {
                bytes += pieces.iter().map(|piece| piece.len).sum::<u64>();
                wanted.extend(pieces.into_iter().map(|piece| Wanted { file, ino: files[file].0, piece }));
                Fetched { bytes: 0, next }
            }));
        }
        drop(maps);
        let loads = loads(wanted, load_bytes).into_iter().map(|load| self.fetch_load(load, pace));
        // Every load runs to its end, even if others fail: a cancelled one would leave shards behind.
        let loads: Vec<_> = stream::iter(loads).buffer_unordered(FETCHES).collect().await;
        for (file, moved) in loads.into_iter().flatten() {
            match (&mut fetched[file], moved) {
                (Ok(fetched), Ok(FetchOutcome::Bytes(moved))) => fetched.bytes += moved,
                // The next step handles the new content.
                (Ok(fetched), Ok(FetchOutcome::Changed(off))) => {
                    fetched.next = Some(fetched.next.map_or(off, |next| next.min(off)));
                }
                (failed @ Ok(_), Err(error)) => *failed = Err(error),
                (Err(_), _) => {}
            }
        }
        for (ino, _) in &files[..fetched.len()] {
            if let Some(node) = self.inner.nodes.find(*ino) {
                node.lock().map.forget();
            }
        }
        fetched
            .extend(files[fetched.len()..].iter().map(|(_, off)| Ok(Fetched { bytes: 0, next: Some(*off) })));
        fetched
    }

    /// The next pieces of a file from `off` on that only blobs have, and where to continue.
    pub(crate) async fn away_pieces(
        &self,
        ino: Ino,
        off: u64,
    ) -> Result<(Vec<MapPiece>, Option<u64>), FsError> {
        let request = MetaRequest::GetMap { ino, off, limit: COMING_BACK as u32 };
        let MetaReply::Map { mut pieces, end } = self.call(request).await? else { return Err(FsError::Io) };
        let next = pieces.last().filter(|_| !end).map(MapPiece::end);
        pieces.retain(|piece| matches!(piece.content, Content::Tiered(..)));
        Ok((pieces, next))
    }

    /// Stores adjacent pieces of one blob on drives. Returns a result for each. It reads no drives and so takes no read
    /// guard: space that is deleted there in the meantime may be reused.
    async fn fetch_load(
        &self,
        load: Vec<Wanted>,
        pace: Option<&dyn MovePace>,
    ) -> Vec<(usize, Result<FetchOutcome, FsError>)> {
        let Some((place, span)) = span_of(&load) else { return Vec::new() };
        let len = span.end - span.start;
        let away = &self.inner.blobs;
        let gentle = if self.is_in_use() { Some(away.gentle_turn(len).await) } else { None };
        let _turn = away.load_turn(len).await;
        // For a short range whole windows are fetched, because neighbouring bytes may be asked for, too.
        let source = if len > LONG {
            match away.read(&place, span.clone()).await {
                Ok(bytes) => PieceSource::Fetched(span.start, bytes),
                // The pieces are fetched one by one, so that the damaged one does not keep the others away.
                Err(ReadExtentError::Damaged) if load.len() > 1 => PieceSource::Blob(Reach::Usual),
                Err(error) => {
                    let failed = load.iter().map(async |wanted| {
                        (wanted.file, self.why_not_back(wanted.ino, &wanted.piece, error).await)
                    });
                    return join_all(failed).await;
                }
            }
        } else {
            PieceSource::Blob(Reach::Windows)
        };
        let written = join_all(load.iter().map(|wanted| self.write_back(wanted.ino, &wanted.piece, &source)));
        let (mut outcomes, mut parts, mut of) = (Vec::new(), Vec::new(), Vec::new());
        for (wanted, (written, failed)) in load.iter().zip(written.await) {
            outcomes.extend(failed.map(|failed| (wanted.file, failed)));
            of.extend(written.iter().map(|_| wanted.file));
            parts.extend(written);
        }
        outcomes.extend(of.into_iter().zip(self.commit_back(parts).await));
        if let (Some(_), Some(pace)) = (gentle, pace) {
            away.pause_in_turn(pace.rest_after(len)).await;
        }
        outcomes
    }

    /// Brings the pieces of a read, and those that follow, back to drives in the background.
    pub(crate) fn bring_back(&self, node: &Node, off: u64, len: u64) {
        let Some(store) = self.inner.blobs.store() else { return };
        if let Some(other) = store.brings_back() {
            other.was_read(node.ino, off, len);
            return;
        }
        if self.inner.blobs.is_paused(self.inner.env.clock.boot_ns()) {
            return;
        }
        let pieces = node.lock().map.whole_pieces(off, reach_of(off, len));
        self.bring_pieces_back(node.ino, pieces);
    }

    /// Bytes of a blob as the object store has them, not verified, for a client that does not reach it.
    ///
    /// # Errors
    /// Those of the store.
    pub async fn read_blob(&self, serial: u64, term: Epoch, range: Range<u64>) -> Result<Bytes, StoreError> {
        self.inner.blobs.unverified((serial, term), range).await
    }

    /// Brings back what another client has read of a file.
    ///
    /// # Errors
    /// If the owner does not tell where it is.
    pub async fn bring_back_for(&self, ino: Ino, off: u64, len: u64) -> Result<(), FsError> {
        if self.inner.blobs.is_paused(self.inner.env.clock.boot_ns()) {
            return Ok(());
        }
        let (pieces, _) = self.away_pieces(ino, off).await?;
        let end = reach_of(off, len);
        self.bring_pieces_back(ino, pieces.into_iter().filter(|piece| piece.off < end).collect());
        Ok(())
    }

    fn bring_pieces_back(&self, ino: Ino, pieces: Vec<MapPiece>) {
        let away = pieces.into_iter().filter(|piece| matches!(piece.content, Content::Tiered(..)));
        for piece in away {
            let key = (ino, piece.off);
            if !self.inner.room.fits_on_drives(2 * piece.len) {
                return;
            }
            {
                let mut waiting = self.inner.blobs.pieces.lock().expect("no holder of this lock panics");
                if waiting.len() >= WAITING_MAX {
                    return;
                }
                if !waiting.insert(key) {
                    continue;
                }
            }
            let client = self.clone();
            self.inner.runtime.spawn(async move {
                let turn = client.inner.blobs.turn(piece.len).await;
                client.bring_piece_back(ino, piece).await;
                client.inner.blobs.pieces.lock().expect("no holder of this lock panics").remove(&key);
                drop(turn);
            });
        }
    }

    async fn bring_piece_back(&self, ino: Ino, piece: MapPiece) {
        if self.inner.blobs.is_paused(self.inner.env.clock.boot_ns()) {
            return;
        }
        let (written, failed) = self.write_back(ino, &piece, &PieceSource::Blob(Reach::Usual)).await;
        let mut error = failed.and_then(Result::err);
        for moved in self.commit_back(written).await {
            error = error.or(moved.err());
        }
        if let Some(error) = error {
            tracing::debug!(%ino, %error, "data that was read was not brought back");
            self.inner.blobs.pause(self.inner.env.clock.boot_ns());
        }
        if let Some(node) = self.inner.nodes.find(ino) {
            node.lock().map.forget();
        }
    }

    /// The reason why a piece did not come. It is no error if the blob is gone and the ledger does not name it any
    /// more.
    async fn why_not_back(
        &self,
        ino: Ino,
        piece: &MapPiece,
        error: ReadExtentError,
    ) -> Result<FetchOutcome, FsError> {
        if error != ReadExtentError::Doubtful {
            self.suspect_pieces(ino, std::slice::from_ref(piece));
            return Err(FsError::Io);
        }
        let (now, _) = self.away_pieces(ino, piece.off).await?;
        let serial = |piece: &MapPiece| match &piece.content {
            Content::Tiered(_, place) => Some(place.serial),
            _ => None,
        };
        let is_named = now.iter().any(|now| now.off < piece.end() && serial(now) == serial(piece));
        if !is_named {
            return Ok(FetchOutcome::Changed(piece.off));
        }
        self.suspect_pieces(ino, std::slice::from_ref(piece));
        Err(FsError::Io)
    }

    /// Writes a piece to drives, in parts of the present extent size. Returns the durable parts, and the result for the
    /// rest.
    async fn write_back(
        &self,
        ino: Ino,
        piece: &MapPiece,
        source: &PieceSource,
    ) -> (Vec<Rehydrated>, Option<Result<FetchOutcome, FsError>>) {
        let step = u64::from(self.pack_target().extent_bytes);
        let mut written = Vec::new();
        for at in (piece.off..piece.end()).step_by(step as usize) {
            let Some(part) = piece.clip(at, at + step) else { continue };
            match self.write_part_back(ino, part, source).await {
                Ok(part) => written.push(part),
                Err(WriteBackError::Drives(error)) => return (written, Some(Err(error))),
                Err(WriteBackError::Blob(error)) => {
                    return (written, Some(self.why_not_back(ino, piece, error).await));
                }
            }
        }
        (written, None)
    }

    async fn write_part_back(
        &self,
        ino: Ino,
        piece: MapPiece,
        source: &PieceSource,
    ) -> Result<Rehydrated, WriteBackError> {
        let Content::Tiered(extent, place) = &piece.content else {
            return Err(WriteBackError::Drives(FsError::Io));
        };
        let out = match source {
            PieceSource::Fetched(start, bytes) => {
                let from = (u64::from(place.off) + u64::from(extent.extent_off) - start) as usize;
                bytes.slice(from..from + piece.len as usize)
            }
            PieceSource::Blob(reach) => {
                let mut out = BytesMut::zeroed(piece.len as usize);
                let away = &self.inner.blobs;
                let read = away.read_into(*place, extent.extent_len, extent.extent_off, &mut out, *reach);
                read.await.map_err(WriteBackError::Blob)?;
                out.freeze()
            }
        };
        let coded = out.len() > COPIES_BYTES_MAX as usize;
        let protection = if coded { Protection::Coded } else { Protection::Copies };
        let next_id = || self.inner.session.next_extent();
        let note = ShardNote { ino, off: piece.off, key_version: 0 };
        let how = WriteHow { protection, purpose: PutPurpose::Write, beside: Beside::Here, note };
        let written = self.inner.extents.write(out, how, next_id).await;
        let written = written.map_err(|error| {
            WriteBackError::Drives(match error {
                WriteExtentError::Failed(error) => error,
                WriteExtentError::TooLong { .. } => FsError::Io,
            })
        })?;
        let WrittenExtent { extent, owed, placed } = written;
        Ok(Rehydrated { ino, piece, extent, owed, placed })
    }

    /// Commits the parts to the ledger. Returns a result for each.
    async fn commit_back(&self, written: Vec<Rehydrated>) -> Vec<Result<FetchOutcome, FsError>> {
        let mut outcomes = Vec::with_capacity(written.len());
        for some in written.chunks(REHYDRATED_MAX) {
            let answer = self.call(MetaRequest::Rehydrate(some.to_vec())).await;
            let moved = match answer {
                Ok(MetaReply::Rehydrated { moved }) if moved.len() == some.len() => moved,
                answer => {
                    let error = answer.err().unwrap_or(FsError::Io);
                    // Without an answer they may be committed.
                    if !matches!(error, FsError::Unknown | FsError::Io) {
                        self.inner.extents.discard_refused(some.iter().map(|part| part.extent)).await;
                    }
                    outcomes.extend(some.iter().map(|_| Err(error)));
                    continue;
                }
            };
            let refused = some.iter().zip(&moved).filter(|(_, moved)| !**moved);
            self.inner.extents.discard_refused(refused.map(|(part, _)| part.extent)).await;
            outcomes.extend(some.iter().zip(&moved).map(|(part, moved)| {
                Ok(if *moved {
                    FetchOutcome::Bytes(part.piece.len)
                } else {
                    FetchOutcome::Changed(part.piece.off)
                })
            }));
        }
        outcomes
    }
}

/// Groups pieces into runs that are adjacent in one blob, of about `bytes` at most.
fn loads(mut wanted: Vec<Wanted>, bytes: u64) -> Vec<Vec<Wanted>> {
    let place = |wanted: &Wanted| part_of(&wanted.piece).map(|(place, range)| (place.serial, range.start));
    wanted.sort_by_key(place);
    let mut loads: Vec<Vec<Wanted>> = Vec::new();
    for one in wanted {
        let Some((place, range)) = part_of(&one.piece) else { continue };
        let joins = loads.last().and_then(|load| span_of(load)).is_some_and(|(first, span)| {
            let is_within = || range.end <= span.end;
            let is_beside = || range.start < span.end + GAP && range.end - span.start <= bytes;
            first.serial == place.serial && (is_within() || is_beside())
        });
        match loads.last_mut() {
            Some(load) if joins => load.push(one),
            _ => loads.push(vec![one]),
        }
    }
    loads
}

/// The blob of a piece, and its range in that blob.
fn part_of(piece: &MapPiece) -> Option<(BlobPlace, Range<u64>)> {
    let Content::Tiered(extent, place) = &piece.content else { return None };
    let start = u64::from(place.off) + u64::from(extent.extent_off);
    Some((*place, start..start + piece.len))
}

/// The blob of adjacent pieces, and their range in it.
fn span_of(load: &[Wanted]) -> Option<(BlobPlace, Range<u64>)> {
    let mut span: Option<(BlobPlace, Range<u64>)> = None;
    for (place, range) in load.iter().filter_map(|wanted| part_of(&wanted.piece)) {
        let (first, known) = span.get_or_insert((place, range.clone()));
        debug_assert_eq!(first.serial, place.serial, "one blob");
        *known = known.start.min(range.start)..known.end.max(range.end);
    }
    span
}

#[cfg(test)]
mod tests {
    use base::{Epoch, ExtentId, PgId};
    use wire::meta::ExtentRef;

    use super::*;

    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;

    /// A piece of `len` bytes at `at` of a blob, in an extent that begins at `extent_at`.
    fn wanted(serial: u64, extent_at: u64, at: u64, len: u64) -> Wanted {
        let extent_off = (at - extent_at) as u32;
        let extent = ExtentRef { id: ExtentId(7), pg: PgId(0), k: 4, n: 6, extent_len: 4 << 20, extent_off };
        let place = BlobPlace { serial, term: Epoch(1), off: extent_at as u32, blob_bytes: 64 << 20 };
        Wanted {
            file: 0,
            ino: Ino(1),
            piece: MapPiece { off: 0, len, content: Content::Tiered(extent, place) },
        }
    }

    /// Blob and range of each load.
    #[track_caller]
    fn check(wanted: Vec<Wanted>, bytes: u64, expected: &[(u64, Range<u64>)]) {
        let loads = loads(wanted, bytes);
        let spans: Vec<_> = loads.iter().filter_map(|load| span_of(load)).collect();
        let spans: Vec<_> = spans.into_iter().map(|(place, span)| (place.serial, span)).collect();
        assert_eq!(spans, expected);
    }

    #[test]
    fn adjacent_pieces_are_one_load() {
        check(Vec::new(), MIB, &[]);
        // One extent, with gaps and not all of it.
        let pieces = (0..8).map(|index| wanted(1, 0, index * 32 * KIB, 28 * KIB)).collect();
        check(pieces, MIB, &[(1, 0..252 * KIB)]);
        // More than a load, or too far away.
        check(
            vec![wanted(1, 0, 0, 700 * KIB), wanted(1, 0, 700 * KIB, 400 * KIB)],
            MIB,
            &[(1, 0..700 * KIB), (1, 700 * KIB..1100 * KIB)],
        );
        check(
            vec![wanted(1, 0, 0, KIB), wanted(1, 0, 65 * KIB, KIB)],
            MIB,
            &[(1, 0..KIB), (1, 65 * KIB..66 * KIB)],
        );
        // Clones of a piece that is longer than a load.
        check(vec![wanted(1, 0, 0, 4 * MIB), wanted(1, 0, 0, 4 * MIB)], MIB, &[(1, 0..4 * MIB)]);
        // Offsets in different blobs do not make pieces adjacent.
        check(
            vec![wanted(2, 0, 0, KIB), wanted(1, 0, 2 * MIB, KIB)],
            MIB,
            &[(1, 2 * MIB..2 * MIB + KIB), (2, 0..KIB)],
        );
    }
}
