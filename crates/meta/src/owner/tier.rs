//! The residence of extents: on drives, in blobs of an object store, or both.
//!
//! Table L lists every tiered extent, T the same by stage and age, B the blobs in use, Y the extents in them, and Z
//! blobs that are being stored or are to be deleted. Only [`Op::reside`] and [`Op::note_live`] change these tables and
//! their sums, so that they always agree. An extent leaves the drives only when a blob has it. A blob is deleted only
//! when no extent is in it and no reader knows it.

use std::collections::HashSet;

use base::{ExtentId, FsError, Ino, MapId, SessionId};
use wire::meta::{
    Content, ExtentRef, FILE_BYTES_MAX, FileKind, MapPiece, MetaReply, REHYDRATED_MAX, Rehydrated,
};
use wire::tier::{
    AgedExtent, BlobPlace, BlobStat, DueExtent, FilePart, InBlob, Origin, Stage, StageStat, TIER_EXTENTS_MAX,
    TierMode, TierReply, TierRequest, Uploaded,
};

use super::data::inconsistent;
use super::{Op, Outcome, Stop};
use crate::keys::Keys;
use crate::values::{
    Aged, BlobRecord, ExtentPlace, ExtentUse, LooseBlob, Piece, PieceContent, Residence, TierState, place_of,
    stage_in_key,
};

/// Pieces or extents visited by one step.
const STEP: usize = 2048;
/// Most entries in one page of a list.
const PAGE_MAX: u32 = 4096;

/// The reply to a request about tiering.
type TierOutcome = Result<TierReply, Stop>;

fn page(limit: u32) -> usize {
    limit.clamp(1, PAGE_MAX) as usize
}

/// The directory and origin of a new extent, for its [`Residence`].
#[derive(Clone, Copy, Default)]
pub(super) struct Written {
    pub(super) directory: Ino,
    pub(super) origin: Origin,
}

/// The origin of an extent with a piece at `off` of a map. If `ino` is 0, the map may tell the file.
pub(super) fn origin_at(ino: Ino, map: MapId, off: u64, extent: &ExtentRef) -> Origin {
    let ino = if ino == Ino(0) { map.file().unwrap_or_default() } else { ino };
    match off.checked_sub(u64::from(extent.extent_off)) {
        Some(off) => Origin { ino, map, off },
        None => Origin { ino, map: MapId(0), off: 0 },
    }
}

impl Op<'_> {
    pub(super) fn tier(&mut self, request: &TierRequest) -> Outcome {
        let reply = match request {
            TierRequest::Attach => self.attach(),
            TierRequest::QueueStep => self.queue_step(),
            TierRequest::Leave => self.leave(),
            TierRequest::LeaveStep => self.leave_step(),
            TierRequest::Due { stage, before_s, after, limit } => {
                self.due(*stage, *before_s, *after, page(*limit))
            }
            TierRequest::Ages { after, limit } => self.ages(*after, page(*limit)),
            TierRequest::Reserve => self.reserve(),
            TierRequest::Commit { serial, bytes, extents, place } => {
                self.commit_blob(*serial, *bytes, extents, *place)
            }
            TierRequest::Place { place } => {
                self.volatile.store_place = *place;
                Ok(TierReply::Done)
            }

            TierRequest::Abandon { keep } => {
                self.abandon_blobs(self.session, keep).map(|()| TierReply::Done).map_err(Stop::Fail)
            }
            TierRequest::Release { ids } => self.release_extents(ids),
            TierRequest::Blobs { after, limit } => self.blobs(*after, page(*limit)),
            TierRequest::Inside { serial, after, limit } => self.inside(*serial, *after, page(*limit)),
            TierRequest::Dead { limit } => self.dead_blobs(page(*limit)),
            TierRequest::Deleted { serials } => self.deleted_blobs(serials),
            TierRequest::Parts { ino, off, limit } => self.parts_of(*ino, *off, page(*limit)),
            TierRequest::Stat => {
                self.tier_state().map(|state| TierReply::Stat(state.stat)).map_err(Stop::Fail)
            }
        };
        reply.map(MetaReply::Tier)
    }

    pub(super) fn tier_state(&self) -> Result<TierState, FsError> {
        if !self.volatile.tiers {
            return Ok(TierState::default());
        }
        Ok(self.txn.get(&self.keys.value("tier"))?.unwrap_or_default())
    }

    fn put_tier_state(&mut self, state: &TierState) {
        self.txn.update(self.keys.value("tier"), state);
    }

    pub(super) fn residence(&self, id: ExtentId) -> Result<Option<Residence>, FsError> {
        if !self.volatile.tiers {
            return Ok(None);
        }
        self.txn.get(&self.keys.residence(id))
    }

    /// Whether an extent is both on drives and in a blob.
    pub(super) fn is_in_both(&self, id: ExtentId) -> Result<bool, FsError> {
        Ok(self.residence(id)?.is_some_and(|residence| residence.stage == Stage::Both))
    }

    pub(super) fn now_s(&self) -> u64 {
        u64::try_from(self.now.wall_ns / 1_000_000_000).unwrap_or(0)
    }

    // --- attaching and leaving ---------------------------------------------------------------------------------------

    fn attach(&mut self) -> TierOutcome {
        self.volatile.tiers = true;
        let mut state = self.tier_state()?;
        if state.stat.mode == TierMode::On {
            return Ok(TierReply::Done);
        }
        // A detach is cancelled. Extents in blobs only stay there; extents that came back are queued like all other
        // extents.
        (state.since_s, state.queue_from) = (self.now_s(), None);
        (state.stat.mode, state.stat.queueing) = (TierMode::On, true);
        self.put_tier_state(&state);
        Ok(TierReply::Done)
    }

    fn queue_step(&mut self) -> TierOutcome {
        let mut state = self.tier_state()?;
        if state.stat.mode != TierMode::On || !state.stat.queueing {
            return Ok(TierReply::More(false));
        }
        let after = state.queue_from.map(|(map, off)| (MapId(map), off));
        let found = self.txn.scan(&self.keys.all_pieces(after), STEP)?;
        for (key, bytes) in &found {
            if let PieceContent::Data(Content::Extent(extent)) = self.txn.decode::<Piece>(key, bytes)?.content
                && self.residence(extent.id)?.is_none()
            {
                let (map, off) = (Keys::map_of_piece(key), Keys::off_of_piece(key));
                let origin = origin_at(Ino(0), map, off, &extent);
                self.enqueue(&extent, state.since_s, Written { directory: Ino(0), origin })?;
            }
        }
        state = self.tier_state()?;
        match found.last() {
            Some((key, _)) if found.len() == STEP => {
                state.queue_from = Some((Keys::map_of_piece(key).0, Keys::off_of_piece(key)));
            }
            _ => state.stat.queueing = false,
        }
        self.put_tier_state(&state);
        Ok(TierReply::More(state.stat.queueing))
    }

    fn leave(&mut self) -> TierOutcome {
        let mut state = self.tier_state()?;
        if state.stat.mode == TierMode::On {
            (state.stat.mode, state.stat.queueing) = (TierMode::Leaving, false);
            self.put_tier_state(&state);
        }
        Ok(TierReply::Done)
    }

    fn leave_step(&mut self) -> TierOutcome {
        if self.tier_state()?.stat.mode != TierMode::Leaving {
            return Ok(TierReply::More(false));
        }
        for stage in [Stage::Queued, Stage::Both] {
            let range = self.keys.aged_before(stage_in_key(stage), u64::MAX - 1);
            let found = self.txn.scan(&range, STEP)?;
            for (key, _) in &found {
                self.reside(Keys::aged_of_key(key).1, None)?;
            }
            if !found.is_empty() {
                return Ok(TierReply::More(true));
            }
        }
        let state = self.tier_state()?;
        let loose = !self.txn.scan(&self.keys.table(b'Z'), 1)?.is_empty();
        if state.stat.away.extents == 0 && !loose {
            self.put_tier_state(&TierState::default());
        }
        Ok(TierReply::More(false))
    }

    // --- where an extent lies ----------------------------------------------------------------------------------------

    /// Queues a new extent for upload, if the ledger tiers.
    pub(super) fn enqueue_new(&mut self, extent: &ExtentRef, written: Written) -> Result<(), FsError> {
        self.enqueue_aged(extent, self.now_s(), written)
    }

    /// As `enqueue_new`, for an extent whose bytes were written earlier.
    pub(super) fn enqueue_aged(
        &mut self,
        extent: &ExtentRef,
        written_s: u64,
        written: Written,
    ) -> Result<(), FsError> {
        let state = self.tier_state()?;
        if state.stat.mode != TierMode::On || self.residence(extent.id)?.is_some() {
            return Ok(());
        }
        self.enqueue(extent, written_s.max(state.since_s), written)
    }

    fn enqueue(&mut self, extent: &ExtentRef, written_s: u64, written: Written) -> Result<(), FsError> {
        let (place, Written { directory, origin }) = (place_of(extent), written);
        self.reside(
            extent.id,
            Some(Residence { stage: Stage::Queued, written_s, place, directory, origin, blob: None }),
        )
    }

    /// When and for which file the extent was written; `None` if it is not tiered.
    pub(super) fn written(&self, id: ExtentId) -> Result<Option<(u64, Written)>, FsError> {
        let written =
            |Residence { written_s, directory, origin, .. }| (written_s, Written { directory, origin });
        Ok(self.residence(id)?.map(written))
    }

    /// Changes the residence of an extent; with `None` it is not tiered any more.
    fn reside(&mut self, id: ExtentId, new: Option<Residence>) -> Result<(), FsError> {
        let old = self.residence(id)?;
        let mut state = self.tier_state()?;
        let wrong = || inconsistent("sums of tiering");
        let blob_of = |residence: Option<Residence>| residence.and_then(|residence| residence.blob);
        let moves = blob_of(old) != blob_of(new);
        for (residence, adds) in [(old, false), (new, true)] {
            let Some(residence) = residence else { continue };
            let Residence { stage, written_s, place, blob, .. } = residence;
            let sum = match stage {
                Stage::Queued => &mut state.stat.queued,
                Stage::Both => &mut state.stat.both,
                Stage::Tiered => &mut state.stat.away,
            };
            let (extents, bytes) =
                if adds { (1, i64::from(place.extent_len)) } else { (-1, -i64::from(place.extent_len)) };
            sum.extents = sum.extents.checked_add_signed(extents).ok_or_else(wrong)?;
            sum.bytes = sum.bytes.checked_add_signed(bytes).ok_or_else(wrong)?;
            let aged = self.keys.aged(stage_in_key(stage), written_s, id);
            match (adds, stage) {
                (_, Stage::Tiered) => {}
                (true, _) => self.txn.update_part(&self.keys.residence(id), aged, &residence.aged()),
                (false, _) => self.txn.delete(aged),
            }
            let Some((serial, off)) = blob.filter(|_| moves) else { continue };
            let in_blob = self.keys.in_blob(serial, id);
            if adds {
                self.txn.put(in_blob, &u64::from(off))
            } else {
                self.txn.delete(in_blob)
            }
            let live = self.live_of(id, place.extent_len)?;
            let change = if adds { live as i64 } else { -(live as i64) };
            self.change_blob(&mut state, serial, extents, change)?;
        }
        match &new {
            Some(new) => self.txn.update(self.keys.residence(id), new),
            None => self.txn.delete(self.keys.residence(id)),
        }
        self.put_tier_state(&state);
        Ok(())
    }

    /// Bytes of an extent to which pieces refer, limited to its length.
    fn live_of(&self, id: ExtentId, extent_len: u32) -> Result<u64, FsError> {
        let len = u64::from(extent_len);
        let used = self.txn.get::<ExtentUse>(&self.keys.extent(id))?;
        Ok(used.map_or(len, |used| used.live_bytes.min(len)))
    }

    fn change_blob(
        &mut self,
        state: &mut TierState,
        serial: u64,
        extents: i64,
        live: i64,
    ) -> Result<(), FsError> {
        let wrong = || inconsistent("what is alive of a blob");
        let key = self.keys.blob(serial);
        let mut blob = self.txn.get::<BlobRecord>(&key)?.ok_or_else(wrong)?;
        blob.extents = blob.extents.checked_add_signed(extents as i32).ok_or_else(wrong)?;
        blob.live_bytes = blob.live_bytes.checked_add_signed(live).ok_or_else(wrong)?;
        state.stat.live_bytes = state.stat.live_bytes.checked_add_signed(live).ok_or_else(wrong)?;
        if blob.extents > 0 {
            self.txn.update(key, &blob);
            return Ok(());
        }
        self.txn.delete(key);
        state.stat.blobs -= 1;
        state.stat.stored_bytes -= u64::from(blob.bytes);
        self.put_loose(serial, LooseBlob { term: blob.term, session: SessionId(0), free_ver: self.seq.0 });
        Ok(())
    }

    fn put_loose(&mut self, serial: u64, loose: LooseBlob) {
        self.txn.update(self.keys.loose_blob(serial), &loose);
    }

    /// The live bytes of an extent before a change, for [`Op::note_live`]. `None` if no blob has the extent.
    pub(super) fn live_before(&self, extent: &ExtentRef) -> Result<Option<(u64, u64)>, FsError> {
        let Some((serial, _)) = self.residence(extent.id)?.and_then(|residence| residence.blob) else {
            return Ok(None);
        };
        Ok(Some((serial, self.live_of(extent.id, extent.extent_len)?)))
    }

    /// Notes that the references to an extent have changed.
    pub(super) fn note_live(
        &mut self,
        extent: &ExtentRef,
        before: Option<(u64, u64)>,
    ) -> Result<(), FsError> {
        let Some((serial, before)) = before else { return Ok(()) };
        let now = self.live_of(extent.id, extent.extent_len)?;
        if now == before {
            return Ok(());
        }
        let mut state = self.tier_state()?;
        self.change_blob(&mut state, serial, 0, now as i64 - before as i64)?;
        self.put_tier_state(&state);
        Ok(())
    }

    /// Removes an extent without references. Returns whether drives may still have it and must be told to delete it.
    pub(super) fn forget_extent(&mut self, id: ExtentId) -> Result<bool, FsError> {
        let Some(residence) = self.residence(id)? else { return Ok(true) };
        self.reside(id, None)?;
        Ok(residence.stage != Stage::Tiered)
    }

    /// Adds the blob to a piece, if no drive has its bytes.
    pub(super) fn resolve(&self, mut piece: MapPiece) -> Result<MapPiece, FsError> {
        if let Content::Extent(extent) = &piece.content
            && let Some(place) = self.away_place(extent.id)?
        {
            piece.content = Content::Tiered(*extent, place);
        }
        Ok(piece)
    }

    fn away_place(&self, id: ExtentId) -> Result<Option<BlobPlace>, FsError> {
        match self.residence(id)? {
            Some(Residence { stage: Stage::Tiered, blob: Some(blob), .. }) => self.blob_place(blob).map(Some),
            _ => Ok(None),
        }
    }

    fn blob_place(&self, (serial, off): (u64, u32)) -> Result<BlobPlace, FsError> {
        let blob = self.txn.get::<BlobRecord>(&self.keys.blob(serial))?;
        let blob = blob.ok_or_else(|| inconsistent("an extent's blob"))?;
        Ok(BlobPlace { serial, term: blob.term, off, blob_bytes: blob.bytes })
    }

    // --- blobs -------------------------------------------------------------------------------------------------------

    fn due(
        &mut self,
        stage: Stage,
        before_s: u64,
        after: Option<(u64, ExtentId)>,
        limit: usize,
    ) -> TierOutcome {
        if stage == Stage::Tiered || !self.volatile.tiers {
            return Ok(TierReply::Due(Vec::new()));
        }
        let mut range = self.keys.aged_before(stage_in_key(stage), before_s.min(u64::MAX - 1));
        if let Some((written_s, id)) = after {
            range.0 = self.keys.aged(stage_in_key(stage), written_s, id);
            range.0.push(0);
        }
        let mut due = Vec::new();
        for (key, bytes) in self.txn.scan(&range, limit)? {
            let (written_s, id) = Keys::aged_of_key(&key);
            let Aged { place, directory, origin } = self.txn.decode(&key, &bytes)?;
            let ExtentPlace { pg, n, k, extent_len, .. } = place;
            due.push(DueExtent {
                extent: wire::tier::whole(id, pg, (k, n), extent_len),
                written_s,
                directory,
                origin,
            });
        }
        Ok(TierReply::Due(due))
    }

    fn ages(&mut self, after: Option<ExtentId>, limit: usize) -> TierOutcome {
        let mut range = self.keys.table(b'L');
        if let Some(after) = after {
            range.0 = self.keys.residence(after);
            range.0.push(0);
        }
        let (mut ages, mut last) = (Vec::new(), None);
        for (key, bytes) in self.txn.scan(&range, limit)? {
            let Residence { written_s, place, .. } = self.txn.decode(&key, &bytes)?;
            let ExtentPlace { n, k, extent_len, .. } = place;
            let raw_bytes = extent_len.div_ceil(u32::from(k).max(1)) * u32::from(n);
            ages.push(AgedExtent { written_s, bytes: extent_len, raw_bytes });
            last = Some(Keys::extent_of_residence(&key));
        }
        let next = last.filter(|_| ages.len() >= limit);
        Ok(TierReply::Ages { ages, next })
    }

    fn reserve(&mut self) -> TierOutcome {
        if self.tier_state()?.stat.mode == TierMode::Off {
            return Err(FsError::Invalid.into());
        }
        let (serial, term) = (self.advance("next_blob", 1)?, self.epoch);
        self.put_loose(serial, LooseBlob { term, session: self.session, free_ver: 0 });
        Ok(TierReply::Reserved { serial, term })
    }

    /// The record of a blob that this session is storing.
    fn reserved(&self, serial: u64) -> Result<LooseBlob, FsError> {
        let loose = self.txn.get::<LooseBlob>(&self.keys.loose_blob(serial))?;
        loose.filter(|loose| loose.session == self.session).ok_or(FsError::Invalid)
    }

    fn commit_blob(&mut self, serial: u64, bytes: u32, extents: &[Uploaded], place: u64) -> TierOutcome {
        let loose = self.reserved(serial)?;
        // A client may not know yet that the store has moved.
        if extents.len() > TIER_EXTENTS_MAX || place != self.volatile.store_place {
            return Err(FsError::Invalid.into());
        }
        let mut taken = Vec::new();
        for uploaded in extents {
            let Some(residence) = self.residence(uploaded.id)? else { continue };
            // If the extent has changed otherwise, its bytes in the new blob are dead.
            if residence.blob.map(|(serial, _)| serial) == uploaded.from && uploaded.off < bytes {
                let stage = if residence.stage == Stage::Queued { Stage::Both } else { residence.stage };
                taken.push((
                    uploaded.id,
                    Residence { stage, blob: Some((serial, uploaded.off)), ..residence },
                ));
            }
        }
        self.txn.delete(self.keys.loose_blob(serial));
        if taken.is_empty() {
            self.put_loose(serial, LooseBlob { session: SessionId(0), free_ver: self.seq.0, ..loose });
            return Ok(TierReply::Committed { bytes: 0 });
        }
        let mut state = self.tier_state()?;
        state.stat.blobs += 1;
        state.stat.stored_bytes += u64::from(bytes);
        self.put_tier_state(&state);
        let blob = BlobRecord { term: loose.term, bytes, extents: 0, live_bytes: 0 };
        self.txn.put(self.keys.blob(serial), &blob);
        let bytes = taken.iter().map(|(_, residence)| u64::from(residence.place.extent_len)).sum();
        for (id, residence) in taken {
            self.reside(id, Some(residence))?;
        }
        Ok(TierReply::Committed { bytes })
    }

    /// Abandons the blobs that a session has reserved, but some: they may or may not be in the store.
    pub(super) fn abandon_blobs(&mut self, session: SessionId, keep: &[u64]) -> Result<(), FsError> {
        if !self.volatile.tiers {
            return Ok(());
        }
        for (key, bytes) in self.txn.scan(&self.keys.table(b'Z'), usize::MAX)? {
            let loose: LooseBlob = self.txn.decode(&key, &bytes)?;
            if loose.session == session && !keep.contains(&Keys::number_in_key(&key)) {
                self.txn.update(key, &LooseBlob { session: SessionId(0), free_ver: self.seq.0, ..loose });
            }
        }
        Ok(())
    }

    fn release_extents(&mut self, ids: &[ExtentId]) -> TierOutcome {
        if ids.len() > TIER_EXTENTS_MAX {
            return Err(FsError::Invalid.into());
        }
        let mut released = StageStat::default();
        // The ledger leaves the store: extents that come back stay on the drives.
        if self.tier_state()?.stat.mode != TierMode::On {
            return Ok(TierReply::Released(released));
        }
        for id in ids {
            let Some(residence) = self.residence(*id)?.filter(|found| found.stage == Stage::Both) else {
                continue;
            };
            self.reside(*id, Some(Residence { stage: Stage::Tiered, ..residence }))?;
            let place = ExtentPlace { extent_len: 0, ..residence.place };
            self.txn.put(self.keys.free(self.seq.0, *id), &place);
            released.extents += 1;
            released.bytes += u64::from(residence.place.extent_len);
        }
        Ok(TierReply::Released(released))
    }

    fn blobs(&mut self, after: Option<u64>, limit: usize) -> TierOutcome {
        let mut range = self.keys.table(b'B');
        if let Some(serial) = after {
            range.0 = self.keys.blob(serial + 1);
        }
        let mut blobs = Vec::new();
        for (key, bytes) in self.txn.scan(&range, limit)? {
            let BlobRecord { term, bytes, live_bytes, .. } = self.txn.decode(&key, &bytes)?;
            blobs.push(BlobStat { serial: Keys::number_in_key(&key), term, bytes, live_bytes });
        }
        Ok(TierReply::Blobs(blobs))
    }

    fn inside(&mut self, serial: u64, after: Option<ExtentId>, limit: usize) -> TierOutcome {
        let mut range = self.keys.all_in_blob(serial);
        if let Some(id) = after {
            range.0 = self.keys.in_blob(serial, ExtentId(id.0 + 1));
        }
        let mut inside = Vec::new();
        for (key, _) in self.txn.scan(&range, limit)? {
            let id = Keys::extent_in_blob(&key);
            let residence = self.residence(id)?.ok_or_else(|| inconsistent("an extent in a blob"))?;
            let blob = residence.blob.ok_or_else(|| inconsistent("an extent in a blob"))?;
            let (extent, stage, origin) = (residence.extent(id), residence.stage, residence.origin);
            inside.push(InBlob { extent, place: self.blob_place(blob)?, stage, origin });
        }
        Ok(TierReply::Inside(inside))
    }

    fn dead_blobs(&mut self, limit: usize) -> TierOutcome {
        let in_use = self.oldest_in_use();
        let before = in_use.min(self.committed.0 + 1);
        let mut dead = Vec::new();
        for (key, bytes) in self.txn.scan(&self.keys.table(b'Z'), usize::MAX)? {
            let loose: LooseBlob = self.txn.decode(&key, &bytes)?;
            if loose.session == SessionId(0) && loose.free_ver < before {
                dead.push((Keys::number_in_key(&key), loose.term));
            }
            if dead.len() == limit {
                break;
            }
        }
        Ok(TierReply::Dead(dead))
    }

    fn deleted_blobs(&mut self, serials: &[u64]) -> TierOutcome {
        for serial in serials {
            let key = self.keys.loose_blob(*serial);
            let dead = |loose: &LooseBlob| loose.session == SessionId(0);
            if self.txn.get::<LooseBlob>(&key)?.as_ref().is_some_and(dead) {
                self.txn.delete(key);
            }
        }
        Ok(TierReply::Done)
    }

    fn parts_of(&mut self, ino: Ino, off: u64, limit: usize) -> TierOutcome {
        let inode = self.inode(ino)?;
        let (Some(map), FileKind::Regular) = (inode.map(), inode.attr.kind) else {
            return Ok(TierReply::Parts { parts: Vec::new(), next: None });
        };
        let pieces = self.pieces(map, off, FILE_BYTES_MAX, limit)?;
        let next = pieces.last().filter(|_| pieces.len() == limit).map(MapPiece::end);
        let parts = pieces.iter().map(|piece| {
            let extent = piece.content.extent().map(|extent| extent.id);
            let stage = match extent {
                Some(id) => self.residence(id)?.map(|residence| residence.stage),
                None => None,
            };
            Ok(FilePart { bytes: piece.len, extent, stage })
        });
        let parts = parts.collect::<Result<_, FsError>>()?;
        Ok(TierReply::Parts { parts, next })
    }

    // --- coming back -------------------------------------------------------------------------------------------------

    pub(super) fn rehydrate(&mut self, pieces: &[Rehydrated]) -> Outcome {
        let ids: HashSet<ExtentId> = pieces.iter().map(|piece| piece.extent.id).collect();
        if pieces.len() > REHYDRATED_MAX || ids.len() < pieces.len() {
            return Err(FsError::Invalid.into());
        }
        for piece in pieces {
            self.check_rehydrated(piece)?;
        }
        let moved = pieces.iter().map(|piece| self.rehydrate_one(piece));
        Ok(MetaReply::Rehydrated { moved: moved.collect::<Result<_, _>>()? })
    }

    /// Checks that this session may commit the new extent, and that it is as long as the piece.
    fn check_rehydrated(&self, rehydrated: &Rehydrated) -> Result<(), FsError> {
        let Rehydrated { piece, extent, .. } = rehydrated;
        let new = self.may_commit(extent.id) && self.txn.get_bytes(&self.keys.extent(extent.id))?.is_none();
        let shaped = extent.k >= 1 && extent.k <= extent.n && extent.n <= layout::SHARDS_MAX;
        let same_len = u64::from(extent.extent_len) == piece.len && extent.extent_off == 0;
        let is_away = matches!(piece.content, Content::Tiered(..));
        if new && shaped && same_len && is_away { Ok(()) } else { Err(FsError::Invalid) }
    }

    /// Replaces a piece by its new extent. Returns whether the piece was still the one that was read.
    fn rehydrate_one(&mut self, rehydrated: &Rehydrated) -> Result<bool, FsError> {
        let Rehydrated { ino, piece, extent, owed, placed } = rehydrated;
        let inode = match self.inode(*ino) {
            Err(FsError::Stale) => return Ok(false),
            inode => inode?,
        };
        let (Some(map), Content::Tiered(from, _)) = (inode.map(), &piece.content) else { return Ok(false) };
        let (start, end) = (piece.off, piece.end());
        let now = self.pieces(map, start, end, 1)?.pop().and_then(|now| now.clip(start, end));
        let residence = self.residence(from.id)?.filter(|residence| residence.stage == Stage::Tiered);
        let (Some(residence), true) = (residence, now == Some(piece.stored())) else {
            return Ok(false);
        };
        // The blob holds the bytes, also under the new extent's id.
        let blob = residence.blob.map(|(serial, off)| (serial, off + from.extent_off));
        let mode = self.tier_state()?.stat.mode;
        if mode == TierMode::On {
            let (place, written_s) = (place_of(extent), self.now_s());
            let (directory, origin) = (inode.packed_with(), origin_at(*ino, map, start, extent));
            self.reside(
                extent.id,
                Some(Residence { stage: Stage::Both, written_s, place, directory, origin, blob }),
            )?;
        }
        self.remove_range(map, start, end, usize::MAX)?;
        let moved = MapPiece { content: Content::Extent(*extent), ..*piece };
        self.txn.put(self.keys.piece(map, start), &Piece::of(&moved));
        self.note_extent(extent, owed, *placed)?;
        Ok(true)
    }
}
