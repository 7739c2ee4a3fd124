//! The scrub of the node's drives: its drives and filesystems, and its progress over restarts.

use std::collections::BTreeMap;

use admin::{AdminError, DriveInfo, ScrubInfo};
use anyhow::Result;
use base::DriveId;
use control::{DriveRecord, ScrubRecord};
use upkeep::{ScrubMark, ScrubTargets, Scrubber};

use super::filesystems::FilesystemEntry;
use super::{Node, State};

impl Node {
    pub(super) async fn start_scrub(&self) {
        let state = self.state.lock().await;
        let marks = state.drives.iter().map(|(id, entry)| {
            let ScrubRecord { started_ns, after, verified_ns } = entry.record.scrub;
            (*id, ScrubMark { started_ns, after, verified_ns })
        });
        let targets = self.scrub_targets.subscribe();
        let scrubber = Scrubber::start(self.env.clone(), marks, targets, self.pace.clone(), &self.runtime);
        *self.scrubber.lock().expect("no holder of this lock panics") = Some(scrubber);
        self.publish_scrub(&state);
    }

    /// Gives the scrub the present drives and filesystems.
    pub(super) fn publish_scrub(&self, state: &State) {
        let up = state.drives.iter().filter(|(_, entry)| entry.is_up());
        let drives = up.filter_map(|(id, entry)| Some((*id, entry.service.as_ref()?.service())));
        let clients =
            state.filesystems.values().map(|entry| (entry.record.ledger, entry.client.clone())).collect();
        self.scrub_targets.send_replace(ScrubTargets { drives: drives.collect(), clients });
    }

    /// Records the progress of the scrub for the next process.
    pub(super) async fn keep_scrub_marks(&self) -> Result<()> {
        self.settle_unnoted().await?;
        let stats = match &*self.scrubber.lock().expect("no holder of this lock panics") {
            Some(scrubber) => scrubber.stats(),
            None => return Ok(()),
        };
        self.change(|plan| {
            for (id, stat) in &stats {
                let ScrubMark { started_ns, after, verified_ns } = stat.mark;
                let scrub = ScrubRecord { started_ns, after, verified_ns };
                if let Some(record) = plan.next().drives.get(id).filter(|record| record.scrub != scrub) {
                    plan.set_drive(DriveRecord { scrub, ..record.clone() });
                }
            }
        })
        .await
    }

    /// Damage that once had no room to be noted is noted or gone after every drive was scrubbed since then.
    async fn settle_unnoted(&self) -> Result<()> {
        let unnoted = |entry: &&FilesystemEntry| entry.damage.stat().sums.unnoted > 0;
        let scrubs = self.scrub_infos();
        let now = self.env.clock.wall_ns() / 1_000_000_000;
        let state = self.state.lock().await;
        let ages = state.drives.iter().filter(|(_, entry)| entry.is_readable());
        let ages = ages.map(|(id, _)| scrubs.get(id).and_then(|scrub| scrub.oldest_s));
        // Requires that every drive was verified.
        let Some(ages) = ages.collect::<Option<Vec<u64>>>() else { return Ok(()) };
        let oldest_s = ages.into_iter().max().unwrap_or(u64::MAX);
        let clients: Vec<_> =
            state.filesystems.values().filter(unnoted).map(|entry| entry.client.clone()).collect();
        drop(state);
        for client in clients {
            client.looked_at_all((now.unsigned_abs()).saturating_sub(oldest_s)).await?;
        }
        Ok(())
    }

    pub(super) fn scrub_infos(&self) -> BTreeMap<DriveId, ScrubInfo> {
        let scrubber = self.scrubber.lock().expect("no holder of this lock panics");
        let stats = scrubber.as_ref().map(Scrubber::stats).unwrap_or_default();
        let now = self.env.clock.wall_ns();
        let info = |(id, stat): (DriveId, upkeep::ScrubStat)| {
            let age_s = |since_ns: i64| now.saturating_sub(since_ns).max(0) as u64 / 1_000_000_000;
            let oldest_s = stat.mark.verified_ns.map(age_s);
            (id, ScrubInfo { oldest_s, running: stat.now, bad_shards: stat.bad_shards })
        };
        stats.into_iter().map(info).collect()
    }

    pub(super) async fn scrub_drive_now(&self, id: Option<DriveId>) -> Result<Vec<DriveInfo>, AdminError> {
        let state = self.state.lock().await;
        let up = state.drives.iter().filter(|(_, entry)| entry.is_up()).map(|(id, _)| *id);
        let chosen: Vec<DriveId> = up.filter(|up| id.is_none_or(|id| id == *up)).collect();
        if let Some(id) = id.filter(|_| chosen.is_empty()) {
            return Err(match state.drives.get(&id) {
                Some(entry) => AdminError::conflict(format!("drive is {}: id={id}", entry.state())),
                None => AdminError::not_found(format!("no such drive: id={id} (see `forebay drive list`)")),
            });
        }
        if let Some(scrubber) = &*self.scrubber.lock().expect("no holder of this lock panics") {
            chosen.iter().for_each(|id| scrubber.scrub_now(*id));
        }
        let mut infos = self.drive_infos(&state);
        infos.retain(|info| chosen.contains(&DriveId(info.id)));
        Ok(infos)
    }
}
