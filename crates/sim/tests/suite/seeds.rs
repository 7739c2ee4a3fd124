//! One seed gives one run, and many seeds give no finding.

use std::ops::Range;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use base::env::{Env, spawn_thread};
use sim::{Scenario, run};

/// Seeds of every test run, besides [`FOUND`] and those of the day.
const SEEDS: Range<u64> = 1..41;
/// Number of seeds of the day.
const FRESH: u64 = 80;

/// Seeds that once found an error, see docs/develop/simulation.md.
const FOUND: [u64; 25] = [
    3415, 363, 403, 435, 459, 482, 617, 691, 983, 1085, 1338, 1395, 2, 53, 74, 118, 283, 957, 1274, 1406,
    2516, 2751, 6182, 9710, 11602,
];
/// The same, since reads can be slow.
const FOUND_SLOW: [u64; 7] = [32_176, 33_879, 35_358, 36_661, 61_448, 81_030, 4_000_661];

/// The seeds of this day, which no earlier day had. One that finds an error joins [`FOUND_SLOW`].
fn of_today() -> Range<u64> {
    let day = Env::real().clock.wall_ns().unsigned_abs() / (24 * 3600 * 1_000_000_000);
    let first = day * 1000;
    first..first + FRESH
}

/// Plays scenarios on two threads. Returns all failures.
fn failures(scenarios: Vec<Scenario>) -> Vec<String> {
    let (scenarios, next) = (Arc::new(scenarios), Arc::new(AtomicU64::new(0)));
    let work = |number: u32| {
        let (scenarios, next) = (scenarios.clone(), next.clone());
        spawn_thread(&format!("seeds-{number}"), move || {
            let mut failures = Vec::new();
            while let Some(scenario) = scenarios.get(next.fetch_add(1, Ordering::Relaxed) as usize) {
                failures.extend(run(scenario.clone(), false).failures);
            }
            failures
        })
    };
    let threads: Vec<_> = (0..2).map(work).collect();
    threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
}

#[test]
fn many_seeds_are_without_a_finding() {
    let failures = failures(SEEDS.chain(of_today()).map(Scenario::new).collect());
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn what_was_found_once_is_found_no_more() {
    // These seeds found their errors before reads could be slow.
    let as_found = |seed| Scenario { dawdles: false, ..Scenario::new(seed) };
    let slow = FOUND_SLOW.into_iter().map(Scenario::new);
    let failures = failures(FOUND.into_iter().map(as_found).chain(slow).collect());
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn a_seed_gives_the_same_trace_twice_in_one_process() {
    for seed in (400..410).chain([9710]) {
        let (first, second) = (run(Scenario::new(seed), false), run(Scenario::new(seed), false));
        assert_eq!((first.trace, first.events), (second.trace, second.events), "seed={seed}");
        assert_eq!(first.failures, second.failures, "seed={seed}");
        assert!(first.events > 20, "seed={seed}: nothing happened");
    }
}

#[test]
fn a_seed_gives_the_same_trace_in_another_process() {
    let last_line = || {
        let output = Command::new(env!("CARGO_BIN_EXE_sim")).args(["500", "10", "2"]).output().unwrap();
        String::from_utf8(output.stdout).unwrap().lines().last().unwrap_or_default().to_owned()
    };
    let here = sim::mix((500..510).map(|seed| run(Scenario::new(seed), false).trace));
    let (first, second) = (last_line(), last_line());
    assert_eq!(first, second);
    assert!(first.contains(&format!("{here:016x}")), "{first} has not {here:016x}");
}

#[test]
fn other_seeds_are_other_runs() {
    let mut traces: Vec<u64> = (600..606).map(|seed| run(Scenario::new(seed), false).trace).collect();
    traces.sort_unstable();
    traces.dedup();
    assert_eq!(traces.len(), 6);
}
