//! The components of an owner, and its status.

use std::sync::Arc;
use std::time::Duration;

use base::LedgerId;
use base::env::Env;

use super::EarlierSessions;
use crate::history::Evidence;
use crate::log::{LedgerLog, Vacancy};
use crate::state::State;

/// The components of an owner.
pub struct OwnerOptions {
    /// The ledger.
    pub ledger: LedgerId,
    /// Its log.
    pub log: Arc<dyn LedgerLog>,
    /// Its local store.
    pub state: Arc<dyn State>,
    /// Clock and random numbers.
    pub env: Env,
    /// Take the ledger only if it is still vacant as it was seen: its owner may have come back, or another node may have taken
    /// it. `None`: take it in any case. Then an owner on another node may go on answering until its lease ends.
    pub vacant: Option<Vacancy>,
    /// The drives' knowledge of the ledger.
    pub evidence: Evidence,
    /// What becomes of the sessions of earlier owners.
    pub earlier_sessions: EarlierSessions,
    /// Most bytes of changes in memory. Above that no new request is executed until the local store has caught up.
    /// Changes that are being written to the store come on top.
    pub unstored_bytes_max: usize,
    /// For how long nothing is trimmed from the log, because standbys of an earlier owner may still need it:
    /// [`STANDBY_WAIT_MAX`](wire::replica::STANDBY_WAIT_MAX) where several nodes reach the log.
    pub standby_grace: Duration,
}

/// Status of an owner, for people.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct OwnerStat {
    /// Its epoch.
    pub epoch: u64,
    /// The newest durable batch.
    pub committed_seq: u64,
    /// The newest batch in the local store.
    pub stored_seq: u64,
    /// Requests since the start.
    pub requests: u64,
    /// Executions of requests since the start: more than requests, because some wait for other sessions.
    pub executions: u64,
    /// Whether the log failed; then every request is refused until a restart.
    pub halted: bool,
    /// Whether the disk is full; until it has room again, only requests that free space are executed.
    pub no_space: bool,
    /// How often the disk has become full since the start.
    pub no_space_count: u64,
    /// Whether drives may hold shards to which only a newer ledger refers; then no extent counts as an orphan.
    pub in_doubt: bool,
}
