//! `sim FIRST COUNT [JOBS]`: runs COUNT seeds from FIRST on and prints the failures. With FOREBAY_SIM_TRACE set, prints
//! the trace of each run.
#![allow(clippy::print_stdout, reason = "a program for people")]

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use base::env::{abort_on_panic, spawn_thread};
use sim::{Outcome, Scenario, run};

fn main() -> ExitCode {
    abort_on_panic();
    let numbers: Vec<u64> = std::env::args().skip(1).filter_map(|text| text.parse().ok()).collect();
    let first = numbers.first().copied().unwrap_or(1);
    let count = numbers.get(1).copied().unwrap_or(1);
    let jobs = numbers.get(2).copied().unwrap_or(1);
    let keep_lines = std::env::var_os("FOREBAY_SIM_TRACE").is_some();
    let next = Arc::new(AtomicU64::new(first));
    let failed = Arc::new(AtomicBool::new(false));
    let traces = Arc::new(Mutex::new(Vec::new()));
    let work = |job: u64| {
        let (next, failed, traces) = (next.clone(), failed.clone(), traces.clone());
        spawn_thread(&format!("seeds-{job}"), move || {
            loop {
                let seed = next.fetch_add(1, Ordering::Relaxed);
                if seed >= first + count {
                    return;
                }
                let outcome = run(Scenario::new(seed), keep_lines);
                report(seed, &outcome);
                failed.fetch_or(!outcome.failures.is_empty(), Ordering::Relaxed);
                traces.lock().expect("no holder of this lock panics").push((seed, outcome));
            }
        })
    };
    let threads: Vec<_> = (0..jobs).map(work).collect();
    for thread in threads {
        // A thread that panicked has ended the process already.
        let _ = thread.join();
    }
    summarize(&mut traces.lock().expect("no holder of this lock panics"));
    if failed.load(Ordering::Relaxed) { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn report(seed: u64, outcome: &Outcome) {
    for line in &outcome.lines {
        println!("{line}");
    }
    for failure in &outcome.failures {
        println!("{failure}");
    }
    if !outcome.failures.is_empty() {
        println!("repeat with: make sim FIRST={seed} SEEDS=1");
    }
}

fn summarize(outcomes: &mut [(u64, Outcome)]) {
    outcomes.sort_by_key(|(seed, _)| *seed);
    let sum = |of: fn(&Outcome) -> u64| outcomes.iter().map(|(_, outcome)| of(outcome)).sum::<u64>();
    let failed = sum(|outcome| u64::from(!outcome.failures.is_empty()));
    println!(
        "{} seeds, {} operations, {} crashes, {} events, {} checks given up, trace {:016x}: {failed} failed",
        outcomes.len(),
        sum(|outcome| outcome.operations),
        sum(|outcome| outcome.crashes),
        sum(|outcome| outcome.events),
        sum(|outcome| u64::from(outcome.given_up)),
        sim::mix(outcomes.iter().map(|(_, outcome)| outcome.trace)),
    );
}
