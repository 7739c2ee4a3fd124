//! Space of the drives that stays free for a loss.

use admin::{AdminError, SetSpares, SpareInfo};
use base::units::format_size;
use control::{Cluster, Plan, Spare};
use layout::FailureDomain;

use super::management::failed;
use super::{Node, State};

fn info(cluster: &Cluster) -> Option<SpareInfo> {
    let domains = cluster.record.spare.domains;
    let Spare { all_bytes, kept_bytes, left_bytes, used_bytes, level } = cluster.spared()?;
    Some(SpareInfo { domains, level: level.to_string(), kept_bytes, left_bytes, used_bytes, all_bytes })
}

/// Why less stays free than was asked for.
fn problem(spare: &SpareInfo) -> Option<String> {
    (spare.used_bytes > 0).then(|| {
        let SpareInfo { domains, left_bytes, used_bytes, .. } = spare;
        format!(
            "drives with {} are lost, and spare space is used for what they held: {} are left for another loss; add drives of that size \
             (forebay drive add, forebay drive replace), or take the cluster as it is for whole (forebay cluster spares DIR {domains})",
            format_size(*used_bytes),
            format_size(*left_bytes)
        )
    })
}

impl State {
    /// What stays free, and what is wrong with it.
    pub(super) fn spare(&self) -> (Option<SpareInfo>, Vec<String>) {
        let no_use = self.cluster.filesystems.values().filter_map(|record| self.cluster.spare(record).err());
        let mut problems: Vec<String> = no_use.map(|error| error.to_string()).collect();
        let spare = info(&self.cluster);
        problems.extend(spare.as_ref().and_then(problem));
        (spare, problems)
    }

    /// Refuses to keep so much free that what is stored does not fit any more.
    fn check_room_beside(&self, next: &Cluster) -> Result<(), AdminError> {
        let Some(spare) = next.spared() else { return Ok(()) };
        let stats = self.drives.values().filter_map(|entry| entry.stat_if_readable());
        let (mut usable_bytes, mut live_bytes) = (0, 0);
        for stat in stats {
            usable_bytes += stat.capacity_bytes - stat.reserved_bytes;
            live_bytes += stat.live_bytes;
        }
        let kept = u128::from(usable_bytes) * u128::from(spare.millionths()) / 1_000_000;
        let left_bytes = usable_bytes - kept as u64;
        let leaves = |entry: &super::FilesystemEntry| entry.record.tier.is_some_and(|tier| !tier.detaching);
        if live_bytes <= left_bytes || self.filesystems.values().all(leaves) {
            return Ok(());
        }
        Err(AdminError::conflict(format!(
            "the drives hold {}, and {} would be left for that: add drives (forebay drive add), delete some files, or keep less free",
            format_size(live_bytes),
            format_size(left_bytes)
        )))
    }
}

impl Node {
    /// Changes how much of the drives stays free, durably and at once.
    pub(super) async fn set_spares_now(&self, request: SetSpares) -> Result<Option<SpareInfo>, AdminError> {
        let SetSpares { domains, level } = request;
        let level: Option<FailureDomain> = level
            .map(|level| {
                level
                    .parse()
                    .map_err(|error: layout::ParseFailureDomainError| AdminError::invalid(error.to_string()))
            })
            .transpose()?;
        let _one_at_a_time = self.drives_lock.lock().await;
        {
            let state = self.state.lock().await;
            let mut plan = Plan::new(state.cluster.clone());
            plan.set_spares(domains, level).map_err(|error| AdminError::conflict(error.to_string()))?;
            state.check_room_beside(plan.next())?;
        }
        self.plan(|plan| Ok(plan.set_spares(domains, level)?)).await.map_err(failed)?;
        tracing::info!(domains, "space that stays free for losses is changed");
        Ok(info(&self.state.lock().await.cluster))
    }
}
