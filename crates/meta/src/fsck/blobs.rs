//! I20, I21: the tables of tiering agree, and the live bytes of each blob are right.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use base::ExtentId;
use wire::tier::{Stage, TierStat};

use super::{Check, FsckError, u64_at};
use crate::keys::Keys;
use crate::values::{Aged, BlobRecord, ExtentUse, LooseBlob, Residence, TierState, stage_in_key};

const DAMAGED: &str = "tiering may release or delete what is needed: detach the store and report this";

impl Check<'_> {
    pub(super) fn blobs(&mut self) -> Result<(), FsckError> {
        self.input.progress.begin("blobs");
        let said = self.get::<TierState>(&self.keys.value("tier"))?.unwrap_or_default().stat;
        let mut found = TierStat { mode: said.mode, queueing: said.queueing, ..TierStat::default() };
        let inside = self.residences(&mut found)?;
        self.ages(&found)?;
        self.blob_sums(&mut found, inside)?;
        if found != said {
            let what = format!("sums of tiering are {said:?}, a count gives {found:?}");
            self.find("tier_sums", what, "status is wrong; report this");
        }
        Ok(())
    }

    /// Every tiered extent has the entries that follow from its residence. Returns for each blob its number of extents
    /// and their live bytes.
    fn residences(&mut self, stat: &mut TierStat) -> Result<BTreeMap<u64, (u32, u64)>, FsckError> {
        let mut inside: BTreeMap<u64, (u32, u64)> = BTreeMap::new();
        let mut failed = Ok(());
        let range = self.keys.table(b'L');
        self.each::<Residence>(&range, 13..=13, |check, key, residence| {
            let id = ExtentId(Keys::number_in_key(key));
            failed = check.one_residence(id, &residence, stat, &mut inside);
            if failed.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        })?;
        failed.map(|()| inside)
    }

    fn one_residence(
        &mut self,
        id: ExtentId,
        residence: &Residence,
        stat: &mut TierStat,
        inside: &mut BTreeMap<u64, (u32, u64)>,
    ) -> Result<(), FsckError> {
        let Residence { stage, written_s, place, blob, .. } = *residence;
        let sum = match stage {
            Stage::Queued => &mut stat.queued,
            Stage::Both => &mut stat.both,
            Stage::Tiered => &mut stat.away,
        };
        sum.extents += 1;
        sum.bytes += u64::from(place.extent_len);
        let aged = self.keys.aged(stage_in_key(stage), written_s, id);
        if stage != Stage::Tiered && self.get::<Aged>(&aged)? != Some(residence.aged()) {
            self.find(
                "tier_age",
                format!("extent {id} is not in the order of ages"),
                "it is never tiered: report this",
            );
        }
        let Some((serial, off)) = blob else { return Ok(()) };
        if self.get::<u64>(&self.keys.in_blob(serial, id))? != Some(off.into()) {
            self.find("tier_place", format!("blob {serial} does not say that it has extent {id}"), DAMAGED);
        }
        let len = u64::from(place.extent_len);
        let used = self.get::<ExtentUse>(&self.keys.extent(id))?;
        let sum = inside.entry(serial).or_default();
        *sum = (sum.0 + 1, sum.1 + used.map_or(len, |used| used.live_bytes.min(len)));
        Ok(())
    }

    /// The order of ages has no other entries.
    fn ages(&mut self, stat: &TierStat) -> Result<(), FsckError> {
        let (range, mut count) = (self.keys.table(b'T'), 0);
        self.each::<Aged>(&range, 22..=22, |_, _, _| {
            count += 1;
            ControlFlow::Continue(())
        })?;
        let expected = stat.queued.extents + stat.both.extents;
        if count != expected {
            let what = format!("{count} extents are in the order of ages, and {expected} should be");
            self.find("tier_age", what, DAMAGED);
        }
        Ok(())
    }

    fn blob_sums(
        &mut self,
        stat: &mut TierStat,
        mut inside: BTreeMap<u64, (u32, u64)>,
    ) -> Result<(), FsckError> {
        let range = self.keys.table(b'B');
        self.each::<BlobRecord>(&range, 13..=13, |check, key, blob| {
            let serial = u64_at(key, 5);
            check.report.blobs += 1;
            stat.blobs += 1;
            stat.stored_bytes += u64::from(blob.bytes);
            stat.live_bytes += blob.live_bytes;
            let found = inside.remove(&serial).unwrap_or_default();
            if found != (blob.extents, blob.live_bytes) {
                let BlobRecord { extents, live_bytes, .. } = blob;
                let what = format!(
                    "blob {serial} is said to have {extents} extents with {live_bytes} bytes; it has {} with {}",
                    found.0, found.1
                );
                check.find("blob_use", what, DAMAGED);
            }
            ControlFlow::Continue(())
        })?;
        for serial in inside.into_keys() {
            let what = format!("blob {serial} has extents and is not known");
            self.find("unknown_blob", what, DAMAGED);
        }
        let range = self.keys.table(b'Z');
        let mut loose = Vec::new();
        self.each::<LooseBlob>(&range, 13..=13, |_, key, _| {
            loose.push(u64_at(key, 5));
            ControlFlow::Continue(())
        })?;
        for serial in loose {
            if self.get::<BlobRecord>(&self.keys.blob(serial))?.is_some() {
                self.find("live_blob_deleted", format!("blob {serial} is in use and to be deleted"), DAMAGED);
            }
        }
        Ok(())
    }
}
