//! Every decoder accepts any bytes without a panic: sample inputs, and random changes of them. `make fuzz` looks
//! further, guided by coverage.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use base::env::sim::SimRandom;
use base::env::{Env, Random};

#[path = "../../../../fuzz/src/targets.rs"]
mod targets;

/// Changed inputs for each target.
const INPUTS: u32 = 20_000;
/// Changed inputs for requests, each of which takes a connection and waits for the end of the answer.
const REQUESTS: u32 = 1000;
const INPUT_BYTES_MAX: usize = 16 << 10;
/// Longest time for one input.
const SLOW: Duration = Duration::from_secs(5);
/// Byte values at which decoders branch.
const EDGES: [u8; 8] = [0, 1, 0x7f, 0x80, 0xff, b'\n', b'"', b'/'];

/// Changes inputs at random.
struct Mutator(SimRandom);

impl Mutator {
    fn below(&self, limit: usize) -> usize {
        (self.0.next_u64() % limit.max(1) as u64) as usize
    }

    /// One of the inputs with a few changes.
    fn input(&self, inputs: &[Vec<u8>]) -> Vec<u8> {
        let mut input = inputs[self.below(inputs.len())].clone();
        for _ in 0..1 + self.below(4) {
            self.change(&mut input, &inputs[self.below(inputs.len())]);
        }
        input.truncate(INPUT_BYTES_MAX);
        input
    }

    fn change(&self, input: &mut Vec<u8>, other: &[u8]) {
        let at = self.below(input.len() + 1);
        let end = (at + 1 + self.below(8)).min(input.len());
        match self.below(8) {
            0 | 1 if at < input.len() => input[at] ^= 1 << self.below(8),
            2 if at < input.len() => input[at] = EDGES[self.below(EDGES.len())],
            3 if at < input.len() => input[at..end].fill(EDGES[self.below(EDGES.len())]),
            4 => input.insert(at, self.below(256) as u8),
            5 if at < end => drop(input.drain(at..end)),
            6 if at < end => {
                let again = input[at..end].to_vec();
                drop(input.splice(at..at, again));
            }
            7 => {
                input.truncate(at);
                input.extend_from_slice(&other[self.below(other.len() + 1)..]);
            }
            _ => input.truncate(at),
        }
    }
}

/// Passes the bytes to the decoder. A panic message includes them.
fn give(name: &str, decode: targets::Target, input: &[u8]) {
    let begun = Instant::now();
    let result = catch_unwind(AssertUnwindSafe(|| decode(input)));
    let hex = || input.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    assert!(result.is_ok(), "target={name} input={}", hex());
    assert!(begun.elapsed() < SLOW, "target={name} took {:?}, input={}", begun.elapsed(), hex());
}

fn check(names: impl Fn(&str) -> bool, count: u32) {
    // Other inputs every day.
    let day = Env::real().clock.wall_ns().unsigned_abs() / (24 * 3600 * 1_000_000_000);
    let seeds = targets::seeds();
    for (name, decode) in targets::TARGETS.iter().filter(|(name, _)| names(name)) {
        let first = seeds.iter().filter(|seed| seed.target == *name);
        first.clone().for_each(|seed| give(&format!("{name} {}", seed.name), *decode, &seed.bytes));
        let inputs: Vec<Vec<u8>> = first.map(|seed| seed.bytes.clone()).collect();
        assert!(!inputs.is_empty(), "there is an input for {name}");
        for seed in [1, day] {
            let mutator = Mutator(SimRandom::new(seed));
            (0..count / 2).for_each(|_| give(name, *decode, &mutator.input(&inputs)));
        }
    }
}

#[test]
fn every_decoder_takes_any_bytes() {
    check(|name| name != "http", INPUTS);
}

#[test]
fn the_gate_answers_any_request() {
    check(|name| name == "http", REQUESTS);
}
