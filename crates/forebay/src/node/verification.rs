//! Whether the drives have all shards that the ledger of a filesystem expects, for operators.

use admin::{
    AdminError, FilesystemVerification, GroupVerification, ShardCounts, VerifiedInfo, VerifyFilesystem,
};
use base::env::Env;
use client::ShardCount;
use upkeep::{Sweep, VerifyOptions};

use super::filesystems::{FilesystemEntry, haste};
use super::tiers::entry_of;
use super::{Node, State};

/// When filesystems are verified.
pub(super) fn verify_options() -> VerifyOptions {
    let VerifyOptions { begin, pause } = VerifyOptions::default();
    VerifyOptions { begin: begin / haste(), pause: pause / haste() }
}

fn counts(count: ShardCount) -> ShardCounts {
    let ShardCount { expected, owed, unknown, missing } = count;
    ShardCounts {
        expected_shards: expected,
        owed_shards: owed,
        unknown_shards: unknown,
        missing_shards: missing,
    }
}

fn verified(env: &Env, sweep: &Sweep) -> VerifiedInfo {
    VerifiedInfo {
        number: sweep.number,
        age_s: env.clock.boot_ns().saturating_sub(sweep.ended_ns) / 1_000_000_000,
        took_ms: sweep.took.as_millis() as u64,
        shards: counts(sweep.total),
    }
}

impl FilesystemEntry {
    /// The last comparison of its shards.
    pub(super) fn verified(&self, env: &Env) -> Option<VerifiedInfo> {
        self.verifier.stat().last.map(|sweep| verified(env, &sweep))
    }
}

impl Node {
    pub(super) async fn verify_now(
        &self,
        name: String,
        VerifyFilesystem { now }: VerifyFilesystem,
    ) -> Result<FilesystemVerification, AdminError> {
        if now && self.pace.is_paused() {
            return Err(AdminError::conflict(
                "background work is paused, and this with it (forebay upkeep --resume)",
            ));
        }
        let mut state = self.state.lock().await;
        let entry = entry_of(&mut state, &name)?;
        let asked = now.then(|| entry.verifier.verify_now());
        let stat = entry.verifier.stat();
        let last = stat.last.as_ref().map_or(0, |sweep| sweep.number);
        let groups = stat.last.iter().flat_map(|sweep| sweep.groups.iter());
        let group = |(pg, count): (&base::PgId, &ShardCount)| {
            let members = state.cluster.groups.get(pg).map(|group| group.members.clone()).unwrap_or_default();
            GroupVerification {
                group: pg.0,
                drives: members.iter().map(|drive| drive.0).collect(),
                shards: counts(*count),
                read_s: self.oldest_read_s(&state, &members),
            }
        };
        Ok(FilesystemVerification {
            filesystem: name,
            last: stat.last.as_ref().map(|sweep| verified(&self.env, sweep)),
            running: stat.now.map(|(number, _)| number),
            looked_shards: stat.now.map_or(0, |(_, looked)| looked),
            next: asked.unwrap_or_else(|| stat.now.map_or(last, |(number, _)| number) + 1),
            found_shards: stat.found,
            groups: groups.map(group).collect(),
        })
    }

    /// Seconds since the oldest verification of a shard on these drives; `None`: a drive was not verified completely yet.
    fn oldest_read_s(&self, state: &State, drives: &[base::DriveId]) -> Option<u64> {
        let now_ns = self.env.clock.wall_ns();
        let ages = drives.iter().map(|id| {
            let verified_ns = state.drives.get(id)?.record.scrub.verified_ns?;
            u64::try_from((now_ns - verified_ns) / 1_000_000_000).ok()
        });
        ages.collect::<Option<Vec<u64>>>()?.into_iter().max()
    }
}
