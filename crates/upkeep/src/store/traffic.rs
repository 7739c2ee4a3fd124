//! The traffic with a store: present and recent requests, the pace of bytes, and whether the store answers.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Mutex;
use std::time::Duration;

use base::env::Env;
use wire::store::{OpState, SeenBy, StoreError, StoreOp};

use crate::bucket::Bucket;

/// Ended requests that are remembered.
const RECENT_MAX: usize = 256;
/// The time whose bytes may go at once after a rest.
const BURST_MS: u64 = 250;
/// Failed checks in a row after which the store counts as down: one alone may be bad luck.
const FAILED_CHECKS: u32 = 3;
/// After this time the store is not expected back in a moment: a gateway restarts within seconds.
const LONG_DOWN_NS: u64 = 20_000_000_000;

/// The traffic with one store.
pub(super) struct Traffic {
    env: Env,
    bytes_per_s: Option<u64>,
    tokens: Bucket,
    ops: Mutex<Ops>,
    health: Mutex<Health>,
}

#[derive(Default)]
struct Health {
    seen: SeenBy,
    /// Failed checks since the last success.
    failed: u32,
    /// When the store went down.
    down_ns: u64,
}

#[derive(Default)]
struct Ops {
    last: u64,
    /// Requests under way, with the time of their beginning (clock of deadlines).
    live: BTreeMap<u64, (StoreOp, u64)>,
    recent: VecDeque<StoreOp>,
}

/// A request, from when the caller asks for it to its end.
pub(super) struct Op<'a> {
    traffic: &'a Traffic,
    id: u64,
}

impl Traffic {
    pub(super) fn new(env: Env, bandwidth_mbps: Option<u32>) -> Self {
        let bytes_per_s = bandwidth_mbps.map(|mbps| u64::from(mbps) * 1_000_000 / 8);
        let tokens = Bucket::new(env.clock.boot_ns());
        Self { env, bytes_per_s, tokens, ops: Mutex::default(), health: Mutex::default() }
    }

    fn now_s(&self) -> i64 {
        self.env.clock.wall_ns() / 1_000_000_000
    }

    /// Begins a request.
    pub(super) fn begin(&self, verb: &str, key: &str, bytes: u64) -> Op<'_> {
        let mut ops = self.ops.lock().expect("no holder of this lock panics");
        ops.last += 1;
        let id = ops.last;
        let op = StoreOp {
            id,
            verb: verb.to_owned(),
            key: key.to_owned(),
            bytes,
            began_s: self.now_s(),
            took_ms: 0,
            attempts: 0,
            state: OpState::Waiting,
            problem: None,
        };
        ops.live.insert(id, (op, self.env.clock.boot_ns()));
        Op { traffic: self, id }
    }

    /// Requests under way, then those that ended, newest first.
    pub(super) fn ops(&self) -> Vec<StoreOp> {
        let now = self.env.clock.boot_ns();
        let ops = self.ops.lock().expect("no holder of this lock panics");
        let live =
            ops.live.values().rev().map(|(op, began)| StoreOp { took_ms: ms(now, *began), ..op.clone() });
        live.chain(ops.recent.iter().rev().cloned()).collect()
    }

    /// Takes `bytes` if they may go now; otherwise returns how long to wait.
    fn take(&self, bytes: u64, now_ns: u64) -> Result<(), Duration> {
        match self.bytes_per_s {
            Some(rate) if bytes > 0 => self.tokens.take(bytes, rate, rate * BURST_MS / 1000, now_ns),
            _ => Ok(()),
        }
    }

    /// Waits until `bytes` may go.
    pub(super) async fn pace(&self, bytes: u64) {
        while let Err(wait) = self.take(bytes, self.env.clock.boot_ns()) {
            tokio::time::sleep(wait).await;
        }
    }

    /// Whether the store answers.
    pub(super) fn health(&self) -> SeenBy {
        self.health.lock().expect("no holder of this lock panics").seen.clone()
    }

    /// Whether the store has been down for so long that readers no longer wait for it.
    pub(super) fn is_long_down(&self) -> bool {
        let health = self.health.lock().expect("no holder of this lock panics");
        health.seen.up == Some(false) && self.env.clock.boot_ns() >= health.down_ns + LONG_DOWN_NS
    }

    /// Notes that the store fulfilled a request.
    pub(super) fn succeeded(&self) {
        self.checked(Ok(()));
    }

    /// Makes it look as if the store had gone down long ago.
    #[cfg(test)]
    pub(super) fn went_down_long_ago(&self) {
        self.health.lock().expect("no holder of this lock panics").down_ns = 0;
    }

    /// Notes the result of a check of the store.
    pub(super) fn checked(&self, found: Result<(), StoreError>) {
        let mut health = self.health.lock().expect("no holder of this lock panics");
        let up = found.is_ok();
        health.failed = if up { 0 } else { health.failed + 1 };
        if !up && health.failed < FAILED_CHECKS {
            return;
        }
        if !up && health.seen.up != Some(false) {
            health.down_ns = self.env.clock.boot_ns();
        }
        let seen = &mut health.seen;
        if seen.up != Some(up) {
            if seen.up.is_some() || !up {
                tracing::warn!(up, problem = ?found.as_ref().err().map(ToString::to_string), "object store");
            }
            (seen.up, seen.since_s) = (Some(up), self.now_s());
        }
        seen.problem = found.err().map(|error| error.explained());
    }
}

fn ms(now_ns: u64, began_ns: u64) -> u64 {
    now_ns.saturating_sub(began_ns) / 1_000_000
}

impl Op<'_> {
    fn change(&self, change: impl FnOnce(&mut StoreOp)) {
        let mut ops = self.traffic.ops.lock().expect("no holder of this lock panics");
        if let Some((op, _)) = ops.live.get_mut(&self.id) {
            change(op);
        }
    }

    /// Notes that the request is sent.
    pub(super) fn attempt(&self) {
        self.change(|op| {
            op.attempts += 1;
            op.state = OpState::Running;
        });
    }

    /// Notes the result of an attempt.
    pub(super) fn answered<T>(&self, result: &Result<T, StoreError>) {
        self.change(|op| match result {
            Ok(_) => (op.state, op.problem) = (OpState::Done, None),
            Err(error) => (op.state, op.problem) = (OpState::Failed, Some(error.to_string())),
        });
    }
}

impl Drop for Op<'_> {
    fn drop(&mut self) {
        let now = self.traffic.env.clock.boot_ns();
        let mut ops = self.traffic.ops.lock().expect("no holder of this lock panics");
        let Some((mut op, began)) = ops.live.remove(&self.id) else { return };
        op.took_ms = ms(now, began);
        if op.state != OpState::Done {
            // The caller may have given it up.
            op.state = OpState::Failed;
        }
        if ops.recent.len() >= RECENT_MAX {
            ops.recent.pop_front();
        }
        ops.recent.push_back(op);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::env::sim::Sim;

    #[test]
    fn bodies_go_as_fast_as_the_bandwidth_allows() {
        let sim = Sim::new(1);
        // 10 MB/s.
        let traffic = Traffic::new(sim.env(), Some(80));
        let (mut now_ns, mut bytes) = (1_000_000_000, 0);
        while now_ns < 11_000_000_000 {
            match traffic.take(5_000_000, now_ns) {
                Ok(()) => bytes += 5_000_000u64,
                Err(wait) => now_ns += (wait.as_nanos() as u64).max(1000),
            }
        }
        assert!((100_000_000..=110_000_000).contains(&bytes), "{bytes}");
        assert_eq!(Traffic::new(sim.env(), None).take(u64::MAX, 5), Ok(()));
    }

    #[test]
    fn requests_are_listed_while_they_run_and_for_a_while_after() {
        let sim = Sim::new(1);
        let traffic = Traffic::new(sim.env(), None);
        let first = traffic.begin("PUT", "a", 5);
        assert_eq!(traffic.ops()[0].state, OpState::Waiting);
        first.attempt();
        first.answered::<()>(&Err(StoreError::Busy("slow down".to_owned())));
        first.attempt();
        sim.clock.advance_ns(3_000_000);
        let second = traffic.begin("GET", "b", 7);
        let found = traffic.ops();
        assert_eq!((found[0].key.as_str(), found[1].attempts, found[1].took_ms), ("b", 2, 3));
        first.answered(&Ok(()));
        drop(first);
        drop(second);
        let states: Vec<_> = traffic.ops().into_iter().map(|op| (op.key, op.state)).collect();
        assert_eq!(states, [("b".to_owned(), OpState::Failed), ("a".to_owned(), OpState::Done)]);
        (0..2 * RECENT_MAX).for_each(|_| drop(traffic.begin("GET", "c", 1)));
        assert_eq!(traffic.ops().len(), RECENT_MAX);
    }

    #[test]
    fn health_tells_since_when_it_holds() {
        let sim = Sim::new(1);
        let traffic = Traffic::new(sim.env(), None);
        assert_eq!(traffic.health().up, None);
        traffic.checked(Ok(()));
        let up = traffic.health();
        sim.clock.advance_ns(9_000_000_000);
        traffic.checked(Ok(()));
        let failed = || traffic.checked(Err(StoreError::Denied("why".to_owned())));
        // A few failures in a row are not enough.
        for _ in 0..3 {
            (1..FAILED_CHECKS).for_each(|_| failed());
            traffic.checked(Ok(()));
        }
        (1..FAILED_CHECKS).for_each(|_| failed());
        assert_eq!(traffic.health(), up);
        failed();
        let down = traffic.health();
        assert_eq!(down.up, Some(false));
        assert!(down.problem.as_ref().unwrap().starts_with("refused: why (the key needs"));
        assert!(down.since_s > up.since_s && !traffic.is_long_down());
        sim.clock.advance_ns(LONG_DOWN_NS - 1);
        failed();
        assert!(!traffic.is_long_down());
        sim.clock.advance_ns(1);
        assert!(traffic.is_long_down());
        traffic.succeeded();
        assert_eq!((traffic.health().up, traffic.health().problem), (Some(true), None));
    }
}
