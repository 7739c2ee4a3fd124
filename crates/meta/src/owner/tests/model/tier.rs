//! The requests of upkeep for tiering, mixed with all others: upload, release, move to other blobs, bring back, leave.

use wire::meta::Rehydrated;
use wire::tier::{Stage, StageStat, TierMode, TierReply, TierRequest, Uploaded};

use super::*;

impl Run {
    pub(super) fn tier(&mut self, session: SessionId, request: TierRequest) -> TierReply {
        match self.ledger.ask(session, MetaRequest::Tier(request.clone())) {
            Ok(MetaReply::Tier(reply)) => reply,
            other => panic!("seed={} {request:?}: {other:?}", self.seed),
        }
    }

    fn due(&mut self, session: SessionId, stage: Stage) -> Vec<ExtentId> {
        let request = TierRequest::Due { stage, before_s: u64::MAX, after: None, limit: 1000 };
        let TierReply::Due(due) = self.tier(session, request) else { panic!() };
        let some = due.iter().map(|due| due.extent.id).filter(|_| self.below(3) > 0);
        some.collect()
    }

    /// Stores a blob, or is interrupted before.
    fn store_blob(&mut self, session: SessionId, extents: Vec<Uploaded>) {
        let TierReply::Reserved { serial, .. } = self.tier(session, TierRequest::Reserve) else { panic!() };
        // A blob is only stored under a durable number.
        self.commit();
        self.stored.insert(serial);
        match self.below(6) {
            0 => drop(self.tier(session, TierRequest::Abandon { keep: self.storing.clone() })),
            1 => {}
            _ => {
                // Other requests run in between.
                self.storing.push(serial);
                (0..self.below(4)).for_each(|_| self.step());
                self.storing.pop();
                if self.sessions.iter().any(|(known, _)| *known == session) {
                    self.tier(session, TierRequest::Commit { serial, bytes: 1 << 20, extents, place: 0 });
                }
            }
        }
    }

    /// One random request of upkeep for tiering.
    pub(super) fn tier_step(&mut self) {
        let at = self.below(self.sessions.len() as u64) as usize;
        let session = self.sessions[at].0;
        if self.tier_mode(session) == TierMode::Off {
            self.tier(session, TierRequest::Attach);
        }
        match self.below(12) {
            0 => drop(self.tier(session, TierRequest::QueueStep)),
            1..4 => {
                let due = self.due(session, Stage::Queued);
                let extents = (0..).zip(due).map(|(off, id)| Uploaded { id, off: off * 4096, from: None });
                let extents = extents.collect();
                self.store_blob(session, extents);
            }
            4..6 => {
                let ids = self.due(session, Stage::Both);
                self.tier(session, TierRequest::Release { ids });
            }
            6 => {
                let request = TierRequest::Blobs { after: None, limit: 1000 };
                let TierReply::Blobs(blobs) = self.tier(session, request) else { panic!() };
                if blobs.is_empty() {
                    return;
                }
                let serial = blobs[self.below(blobs.len() as u64) as usize].serial;
                let request = TierRequest::Inside { serial, after: None, limit: 1000 };
                let TierReply::Inside(inside) = self.tier(session, request) else { panic!() };
                let extents = (0..).zip(inside).map(|(off, one)| {
                    assert_eq!(one.place.serial, serial);
                    Uploaded { id: one.extent.id, off: off * 4096, from: Some(serial) }
                });
                let extents = extents.collect();
                self.store_blob(session, extents);
            }
            7 => self.delete_blobs(session),
            8 if self.below(6) == 0 => drop(self.tier(session, TierRequest::Leave)),
            // Perhaps while the ledger is leaving the store.
            8 if self.below(6) == 0 => drop(self.tier(session, TierRequest::Attach)),
            8 => drop(self.tier(session, TierRequest::LeaveStep)),
            _ => self.rehydrate(at),
        }
    }

    fn tier_mode(&mut self, session: SessionId) -> TierMode {
        let TierReply::Stat(stat) = self.tier(session, TierRequest::Stat) else { panic!() };
        stat.mode
    }

    fn delete_blobs(&mut self, session: SessionId) {
        self.commit();
        self.sessions.clone().iter().for_each(|(session, _)| self.ledger.beat(*session));
        self.look_at_ages(session);
        let TierReply::Dead(dead) = self.tier(session, TierRequest::Dead { limit: 1000 }) else { panic!() };
        let serials: Vec<u64> = dead.iter().map(|(serial, _)| *serial).collect();
        // After a crash perhaps a second time.
        self.stored.retain(|serial| !serials.contains(serial));
        self.tier(session, TierRequest::Deleted { serials });
    }

    /// Every tiered extent has exactly one age.
    fn look_at_ages(&mut self, session: SessionId) {
        let TierReply::Stat(stat) = self.tier(session, TierRequest::Stat) else { panic!() };
        let (mut found, mut after) = (StageStat::default(), None);
        loop {
            let reply = self.tier(session, TierRequest::Ages { after, limit: 3 });
            let TierReply::Ages { ages, next } = reply else { panic!("{reply:?}") };
            found.extents += ages.len() as u64;
            found.bytes += ages.iter().map(|extent| u64::from(extent.bytes)).sum::<u64>();
            after = next;
            if after.is_none() {
                break;
            }
        }
        let stages = [stat.queued, stat.both, stat.away];
        let (extents, bytes) =
            stages.iter().fold((0, 0), |sum, one| (sum.0 + one.extents, sum.1 + one.bytes));
        assert_eq!(found, StageStat { extents, bytes }, "seed={}", self.seed);
    }

    /// Brings a piece of a file back, in its present form or an earlier one.
    fn rehydrate(&mut self, at: usize) {
        let (session, id) = self.sessions[at];
        let files: Vec<u64> =
            self.model.nodes.iter().filter(|(_, node)| node.kind == Regular).map(|(ino, _)| *ino).collect();
        if files.is_empty() {
            return;
        }
        let ino = Ino(files[self.below(files.len() as u64) as usize]);
        let away = |piece: &MapPiece| matches!(piece.content, Content::Tiered(..));
        let Some(piece) = self.ledger.map(session, ino).into_iter().find(away) else { return };
        self.sessions[at].1 = id + 1;
        self.on_drives.insert(id);
        let extent_len = piece.len as u32;
        let cells = cells_of(&[MapPiece { off: 0, ..piece.clone() }], piece.len);
        for (at, cell) in (0..).zip(cells) {
            self.packed.insert((id, at), self.unpacked(cell));
        }
        if self.below(4) == 0 {
            self.step();
        }
        if !self.sessions.iter().any(|(known, _)| *known == session) {
            return;
        }
        let extent = ExtentRef { id: ExtentId(id), pg: PgId(0), k: 4, n: 6, extent_len, extent_off: 0 };
        let piece = Rehydrated { ino, piece, extent, owed: Vec::new(), placed: Epoch(0) };
        // The second is refused with all the others: two pieces cannot each be all of one extent.
        let twice = MetaRequest::Rehydrate(vec![piece.clone(), piece.clone()]);
        assert_eq!(self.ledger.ask(session, twice), Err(FsError::Invalid));
        match self.ledger.ask(session, MetaRequest::Rehydrate(vec![piece])) {
            Ok(MetaReply::Rehydrated { moved }) if moved == [true] => drop(self.model.issued.insert(id)),
            Ok(MetaReply::Rehydrated { moved }) if moved == [false] => {}
            other => panic!("{other:?}"),
        }
    }

    /// Brings all extents back to drives; after that no trace of tiering is left.
    pub(super) fn leave(&mut self) {
        let session = self.sessions[0].0;
        self.tier(session, TierRequest::Leave);
        self.scanned.clear();
        for _ in 0..1000 {
            let TierReply::Stat(stat) = self.tier(session, TierRequest::Stat) else { panic!() };
            if stat.mode == TierMode::Off {
                assert_eq!(stat, wire::tier::TierStat::default());
                assert!(self.stored.is_empty(), "seed={} left: {:?}", self.seed, self.stored);
                return;
            }
            self.pack();
            self.ledger.purge(session);
            self.tier(session, TierRequest::LeaveStep);
            self.delete_blobs(session);
        }
        panic!("seed={} does not end", self.seed);
    }
}
