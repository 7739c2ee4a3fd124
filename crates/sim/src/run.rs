//! One seed from beginning to end: boots, crashes, and the checks.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;

use crate::faults;
use crate::history::History;
use crate::node::{self, Node};
use crate::reads::Reads;
use crate::scenario::Scenario;
use crate::trace::Fnv;
use crate::workload::Process;
use crate::world::World;
use crate::{check, cluster, linear, net, store};

/// Longest boot, in simulated time.
const BOOT_MAX: Duration = Duration::from_secs(7200);
/// Long enough for every background task to have had several turns.
const REST: Duration = Duration::from_secs(20);

/// Longer than any background task pauses.
const LONG_REST: Duration = Duration::from_secs(130);

/// Most extra rests, if changes of drives or profile need them.
const RESTS_MAX: u32 = 10;

/// The outcome of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// The hash of everything that happened.
    pub trace: u64,
    /// Number of events.
    pub events: u64,
    /// Operations of processes that got an answer.
    pub operations: u64,
    /// Crashes that hit a node at work.
    pub crashes: u64,
    /// Whether the check of the history was given up because too many states were possible.
    pub given_up: bool,
    /// The violations, with the seed; empty if there are none.
    pub failures: Vec<String>,
    /// The last lines of the trace, if they were requested.
    pub lines: Vec<String>,
}

/// How a boot ended.
enum Ended {
    PowerLost,
    AtRest,
    Wrong(String),
}

/// Runs a scenario. Must not be called on a runtime.
pub fn run(scenario: Scenario, keep_lines: bool) -> Outcome {
    play(&World::new(scenario, keep_lines))
}

fn play(world: &Arc<World>) -> Outcome {
    let history = Arc::new(History::new(world));
    let mut failures = Vec::new();
    let mut crashes = 0;
    if let Err(error) = node::format(world) {
        failures.push(format!("drives cannot be formatted: {error}"));
    }
    let latency_us = [0, 50, 500, 5000][world.dice(0x1a7).below(4) as usize];
    world.files.set_latency(Duration::from_micros(10), Duration::from_micros(20 + latency_us));
    let mut boot = 0;
    let mut copy = None;
    while failures.is_empty() && boot < world.scenario.boots {
        match run_boot(world, &history, boot) {
            Ended::PowerLost => crashes += 1,
            Ended::AtRest => {}
            Ended::Wrong(what) => failures.push(what),
        }
        failures.extend(world.violations());
        if world.scenario.copies_return {
            swap_copy(world, boot, &mut copy);
        }
        boot += 1;
    }
    // The states without what a client lost while it was away are not followed.
    let names_lost_ns = world.promises().names_lost_ns;
    let history = history.take(names_lost_ns.unwrap_or(u64::MAX));
    let lost = world.promises().revoked.clone();
    let checked = match linear::check(&history, &lost, world.scenario.early) {
        Ok(checked) => checked,
        Err(why) => {
            failures.push(why);
            linear::Checked::default()
        }
    };
    let (trace, events) = world.trace.position();
    let seed = world.scenario.seed;
    let failures = failures
        .into_iter()
        .map(|what| format!("seed={seed} boot={}: {what}", boot.saturating_sub(1)))
        .collect();
    Outcome {
        trace,
        events,
        operations: checked.operations,
        crashes,
        given_up: checked.given_up || names_lost_ns.is_some(),
        failures,
        lines: world.trace.lines(),
    }
}

/// Keeps a copy of the victim drive, or replaces the drive by the kept copy. Not while the drive still lacks shards:
/// together they would amount to two lost drives.
fn swap_copy(world: &World, boot: u64, copy: &mut Option<Vec<u8>>) {
    let path = node::drive_path(world.scenario.victim());
    let dice = world.dice(0xc0_0b1e + (boot << 32));
    let image = world.env().files.read(&path).unwrap_or_default();
    match copy {
        Some(older) if dice.once_in(2) => {
            world.trace.event(format_args!("an older copy takes the place of {}", path.display()));
            world.files.put_image(&path, older);
            *copy = None;
        }
        Some(_) => {}
        None => *copy = Some(image),
    }
}

fn run_boot(world: &Arc<World>, history: &Arc<History>, boot: u64) -> Ended {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime = builder
        .enable_time()
        .start_paused(true)
        .build()
        .expect("the system has descriptors left for a runtime");
    let dice = world.dice(0xb007 + (boot << 32));
    let is_last = boot + 1 == world.scenario.boots;
    let cut_after = match dice.below(8) {
        _ if is_last => None,
        // Power is cut early, during recovery.
        0 => Some(dice.below(60)),
        1..3 => Some(dice.below(800)),
        _ => Some(dice.below(8000)),
    };
    let ended = runtime.block_on(async {
        world.clock.start(dice.below(10_000_000_000));
        world.trace.event(format_args!("boot {boot}"));
        world.promises().reads = Reads::default();
        {
            let mut promises = world.promises();
            promises.cut_until_ns.clear();
            promises.dead_clients.clear();
            promises.written.clear();
        }
        world.trace.cut_after(cut_after);
        let life = live(world, history, boot, is_last);
        let ended = tokio::select! {
            biased;
            () = world.trace.cut.notified() => Ended::PowerLost,
            ended = tokio::time::timeout(BOOT_MAX, life) => {
                ended.unwrap_or_else(|_| Ended::Wrong("the boot hangs".to_owned()))
            }
        };
        world.clock.stop();
        ended
    });
    world.files.crash();
    history.crash();
    drop(runtime);
    ended
}

async fn live(world: &Arc<World>, history: &Arc<History>, boot: u64, is_last: bool) -> Ended {
    let node = match Node::start(world, boot).await {
        Ok(node) => node,
        // An operation that begins while power fails does not start.
        Err(_) if world.trace.is_cut() => return Ended::PowerLost,
        Err(error) => return Ended::Wrong(format!("node does not start: {error}")),
    };
    let process = |number: u32| {
        let client = number % world.scenario.clients;
        let dice = world.dice(0x9_0000 + (boot << 32) + u64::from(number));
        Process::new(world, history, node.clients[client as usize].clone(), client, dice)
    };
    process(0).survey().await;
    let faults = tokio::spawn(faults::inject(world.clone(), node.drives.clone(), boot));
    let store_fails = world.scenario.store_fails;
    let trouble = store_fails.then(|| tokio::spawn(store::trouble(world.clone(), boot)));
    let cuts = world.scenario.cuts.then(|| tokio::spawn(net::cut(world.clone(), boot)));
    let (peace, until) = tokio::sync::watch::channel(false);
    let fight = || tokio::spawn(node.owners.clone().fight(node.drives.clone(), until));
    let fight = world.scenario.rivals.then(fight);
    let working = work(world, boot, &process);
    tokio::select! {
        biased;
        () = working => {}
        () = node.tend(world) => {}
        () = cluster::change(world, &node, boot) => {}
    }
    peace.send_replace(true);
    if let Some(fight) = fight {
        let _ = fight.await;
    }
    faults.abort();
    if let Some(cuts) = cuts {
        cuts.abort();
        world.promises().cut_until_ns.clear();
    }
    if let Some(trouble) = trouble {
        trouble.abort();
        world.bucket.set_down(world, false);
    }
    faults::mend(&node.drives);
    node.control.take_back(world).await;
    // Also what was decided just before the work ended.
    node.publish(world).await;
    if world.trace.is_cut() {
        return Ended::PowerLost;
    }
    if node.owners.owner().is_some_and(|owner| owner.stat().halted) {
        // The owner refuses all requests until it is restarted.
        return if world.scenario.syncs_fail {
            Ended::AtRest
        } else {
            Ended::Wrong("the owner halted".to_owned())
        };
    }
    // A packer whose scan waited for the owner rests for eight times as long. Until then it does not know what has got
    // another shape since.
    let Scenario { rivals, cuts, narrows, converts, .. } = world.scenario;
    node.rest(world, if rivals || cuts || narrows || converts { LONG_REST } else { REST }).await;
    let dead = world.promises().dead_clients.clone();
    let alive = (1..world.scenario.clients).find(|client| !dead.contains(client));
    process(alive.unwrap_or(0)).survey().await;
    if !is_last || world.trace.is_cut() {
        return Ended::PowerLost;
    }
    come_to_rest(world, node).await
}

/// Lets the processes work until all are done. In some runs the machine of client 1 dies before that.
async fn work(world: &Arc<World>, boot: u64, process: &impl Fn(u32) -> Process) {
    let mut work = JoinSet::new();
    let mut victims = Vec::new();
    for number in 0..world.scenario.processes {
        let handle = work.spawn(process(number).work(world.scenario.operations));
        if number % world.scenario.clients == 1 {
            victims.push(handle);
        }
    }
    let death = async {
        tokio::time::sleep(Duration::from_millis(world.dice(0xdead + (boot << 32)).below(20_000))).await;
        victims.iter().for_each(tokio::task::AbortHandle::abort);
        world.kill_client(1);
        std::future::pending().await
    };
    let ended = async { while work.join_next().await.is_some() {} };
    tokio::select! {
        biased;
        () = ended => {}
        () = death, if world.scenario.client_dies => {}
    }
}

async fn come_to_rest(world: &Arc<World>, mut node: Node) -> Ended {
    let mut unfinished = node.unfinished(world);
    for _ in 0..RESTS_MAX {
        if unfinished.is_some() {
            node.rest(world, REST).await;
            unfinished = node.unfinished(world);
        }
    }
    if let Some(what) = unfinished.filter(|_| !world.is_faulty()) {
        return Ended::Wrong(what);
    }
    for _ in 0..RESTS_MAX {
        if cluster::move_home(world, &node).await {
            node.rest(world, REST).await;
        }
    }
    if let Some(what) = cluster::left_elsewhere(world).filter(|_| !world.is_faulty()) {
        return Ended::Wrong(what);
    }
    if let Some(what) = node.verify(world, (REST, RESTS_MAX)).await.filter(|_| !world.is_faulty()) {
        return Ended::Wrong(what);
    }
    node.stop_packing().await;
    if world.scenario.detaches {
        node.detach(world).await;
    }
    node.rest(world, REST).await;
    let mut untiered = node.untiered(world).await;
    for _ in 0..RESTS_MAX {
        if untiered.is_some() {
            node.rest(world, REST).await;
            untiered = node.untiered(world).await;
        }
    }
    if let Some(what) = untiered.filter(|_| !world.is_faulty()) {
        return Ended::Wrong(what);
    }
    let (state, drives) = match node.stop(world).await {
        Ok(stopped) => stopped,
        Err(_) if world.is_faulty() => return Ended::AtRest,
        Err(error) => return Ended::Wrong(error),
    };
    let wrong = check::check(world, state, &drives).await;
    if wrong.is_empty() { Ended::AtRest } else { Ended::Wrong(wrong.join("\n  ")) }
}

/// Mixes the outcomes of many seeds into one number.
pub fn mix(outcomes: impl IntoIterator<Item = u64>) -> u64 {
    let mut hash = Fnv::default();
    outcomes.into_iter().for_each(|trace| hash.add(&trace.to_le_bytes()));
    hash.0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ten thousand of them would not fit in memory.
    #[test]
    fn a_run_leaves_no_disk_behind() {
        for seed in 1..6 {
            let world = World::new(Scenario::new(seed), false);
            assert!(play(&world).failures.is_empty());
            let files = Arc::downgrade(&world.files);
            drop(world);
            assert_eq!(files.strong_count(), 0, "seed {seed}");
        }
    }
}
