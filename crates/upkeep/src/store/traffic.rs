//! What is asked of a store: which requests there are and were, how fast bytes may go, and whether it answers.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Mutex;
use std::time::Duration;

use base::env::Env;
use wire::store::{OpState, StoreError, StoreHealth, StoreOp};

/// Requests that are remembered after their end.
const RECENT_MAX: usize = 256;
/// What may go at once after a rest.
const BURST_MS: u64 = 250;

/// All of it, for one store.
pub(super) struct Traffic {
    env: Env,
    bytes_per_s: Option<u64>,
    /// Bytes that may go, below zero after a large body, and when that was reckoned.
    tokens: Mutex<(i64, u64)>,
    ops: Mutex<Ops>,
    health: Mutex<StoreHealth>,
}

#[derive(Default)]
struct Ops {
    last: u64,
    /// With the time of their beginning, on the clock of deadlines.
    live: BTreeMap<u64, (StoreOp, u64)>,
    recent: VecDeque<StoreOp>,
}

/// A request, from when it is asked for to its end.
pub(super) struct Op<'a> {
    traffic: &'a Traffic,
    id: u64,
}

impl Traffic {
    pub(super) fn new(env: Env, bandwidth_mbps: Option<u32>) -> Self {
        let bytes_per_s = bandwidth_mbps.map(|mbps| u64::from(mbps) * 1_000_000 / 8);
        let tokens = Mutex::new((0, env.clock.boot_ns()));
        Self { env, bytes_per_s, tokens, ops: Mutex::default(), health: Mutex::default() }
    }

    fn now_s(&self) -> i64 {
        self.env.clock.wall_ns() / 1_000_000_000
    }

    /// A request is asked for.
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

    /// Requests under way, then those that ended, the newest first.
    pub(super) fn ops(&self) -> Vec<StoreOp> {
        let now = self.env.clock.boot_ns();
        let ops = self.ops.lock().expect("no holder of this lock panics");
        let live =
            ops.live.values().rev().map(|(op, began)| StoreOp { took_ms: ms(now, *began), ..op.clone() });
        live.chain(ops.recent.iter().rev().cloned()).collect()
    }

    /// How long `bytes` must wait; from then on they count.
    fn wait_for(&self, bytes: u64, now_ns: u64) -> Duration {
        let Some(rate) = self.bytes_per_s.filter(|_| bytes > 0) else { return Duration::ZERO };
        let mut guard = self.tokens.lock().expect("no holder of this lock panics");
        let (tokens, reckoned_ns) = &mut *guard;
        let earned = u128::from(now_ns.saturating_sub(*reckoned_ns)) * u128::from(rate) / 1_000_000_000;
        let burst = (rate * BURST_MS / 1000) as i64;
        *tokens = tokens.saturating_add(i64::try_from(earned).unwrap_or(i64::MAX)).min(burst);
        *reckoned_ns = now_ns;
        // Who comes later waits for what is taken here.
        let debt = (*tokens).min(0).unsigned_abs();
        *tokens = tokens.saturating_sub_unsigned(bytes);
        Duration::from_nanos((u128::from(debt) * 1_000_000_000 / u128::from(rate)) as u64)
    }

    /// Waits until `bytes` may go.
    pub(super) async fn pace(&self, bytes: u64) {
        let wait = self.wait_for(bytes, self.env.clock.boot_ns());
        if wait > Duration::ZERO {
            tokio::time::sleep(wait).await;
        }
    }

    /// Whether the store answers, as of the last look.
    pub(super) fn health(&self) -> StoreHealth {
        self.health.lock().expect("no holder of this lock panics").clone()
    }

    /// Notes what a look at the store found.
    pub(super) fn looked(&self, found: Result<(), StoreError>) {
        let mut health = self.health.lock().expect("no holder of this lock panics");
        let up = found.is_ok();
        if health.up != Some(up) {
            if health.up.is_some() || !up {
                tracing::warn!(up, problem = ?found.as_ref().err().map(ToString::to_string), "object store");
            }
            (health.up, health.since_s) = (Some(up), self.now_s());
        }
        health.problem = found.err().map(|error| error.to_string());
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

    /// It is sent.
    pub(super) fn attempt(&self) {
        self.change(|op| {
            op.attempts += 1;
            op.state = OpState::Running;
        });
    }

    /// An attempt was answered.
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
            // Given up by whoever asked, if nothing else.
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
        let traffic = Traffic::new(sim.env(), Some(80));
        // 10 MB/s: the first goes at once, the others behind each other.
        let waits: Vec<u64> =
            (0..4).map(|_| traffic.wait_for(5_000_000, 1_000_000_000).as_millis() as u64).collect();
        assert_eq!(waits[0], 0);
        assert!(
            (200..=300).contains(&waits[1]) && waits[2] == waits[1] + 500 && waits[3] == waits[2] + 500,
            "{waits:?}"
        );
        assert_eq!(Traffic::new(sim.env(), None).wait_for(u64::MAX, 5), Duration::ZERO);
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
    fn health_says_since_when() {
        let sim = Sim::new(1);
        let traffic = Traffic::new(sim.env(), None);
        assert_eq!(traffic.health().up, None);
        traffic.looked(Ok(()));
        let up = traffic.health();
        sim.clock.advance_ns(9_000_000_000);
        traffic.looked(Ok(()));
        assert_eq!(traffic.health(), up);
        traffic.looked(Err(StoreError::Denied("why".to_owned())));
        let down = traffic.health();
        assert_eq!((down.up, down.problem.as_deref()), (Some(false), Some("refused: why")));
        assert!(down.since_s > up.since_s);
    }
}
