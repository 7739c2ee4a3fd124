//! Prints the results and compares them with their aims.

use std::fmt::Write;
use std::time::Duration;

use serde_json::{Value, json};

use super::Results;
use super::moves::Move;
use super::uses::Foreground;

/// Foreground latencies may grow by this factor while content moves.
const FOREGROUND_AIM: f64 = 1.2;
/// A read of a few bytes from the store takes at most the time of the store's answer plus this.
const TAIL_AIM_MS: f64 = 5.0;
/// The part of the rate without TLS to reach with TLS.
const TLS_AIM: f64 = 0.8;

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Milliseconds of CPU per megabyte.
fn cost(moved: &Move, cpu: Duration) -> f64 {
    ms(cpu) / (moved.bytes as f64 / 1e6)
}

fn mark(reached: bool) -> &'static str {
    if reached { "reached" } else { "missed" }
}

pub(super) fn text(results: &Results) -> String {
    let mut text = String::new();
    for (is_out, title) in [(true, "to the store"), (false, "from the store")] {
        let _ = writeln!(
            text,
            "\n{title:<42}{:>9}{:>9}{:>9}{:>9}{:>17}",
            "MB/s", "limit", "part", "aim", "CPU ms/MB"
        );
        for moved in results.moves.iter().filter(|moved| moved.is_out == is_out) {
            let (part, aim) = (100.0 * moved.part(), 100.0 * moved.aim);
            let cpu = format!("{:.2} + {:.2}", cost(moved, moved.node_cpu), cost(moved, moved.store_cpu));
            let _ = writeln!(
                text,
                "{:<42}{:>9.0}{:>9.0}{part:>8.0}%{aim:>8.0}%{cpu:>17}  {}",
                moved.name,
                moved.mb_s(),
                moved.limit_mb_s,
                mark(moved.part() >= moved.aim)
            );
        }
    }
    text += "limit: blobs of random bytes, as many at a time as tiering makes, by the same process, before and after;\nCPU: node + store\n";
    for moved in results.moves.iter().filter(|moved| moved.name.starts_with("HTTPS")) {
        let plain = moved.name.replacen("HTTPS", "HTTP", 1);
        let same = |other: &&Move| other.name == plain && other.is_out == moved.is_out;
        if let Some(plain) = results.moves.iter().find(same) {
            let part = moved.mb_s() / plain.mb_s();
            let way = if moved.is_out { "out" } else { "in" };
            let _ = writeln!(
                text,
                "{} {way}: {:.0} % of HTTP, {}",
                moved.name,
                100.0 * part,
                mark(part >= TLS_AIM)
            );
        }
    }
    if !results.uses.is_empty() {
        let _ = writeln!(
            text,
            "\n{:<42}{:>14}{:>14}{:>14}   (warm: {:.2} ms)",
            "ms", "on drives", "in the store", "its answer", results.round_trip_ms
        );
    }
    for used in &results.uses {
        let (in_store, answer) = (ms(used.in_store), ms(used.answer));
        let aim = if used.is_tail { mark(in_store <= answer + TAIL_AIM_MS) } else { "" };
        let on_drives = ms(used.on_drives);
        let _ = writeln!(text, "{:<42}{on_drives:>14.2}{in_store:>14.2}{answer:>14.0}  {aim}", used.name);
    }
    foreground(&mut text, &results.foreground);
    text
}

fn foreground(text: &mut String, all: &[Foreground]) {
    let Some(alone) = all.first() else { return };
    let _ = writeln!(
        text,
        "\n{:<42}{:>9}{:>12}{:>12}{:>12}",
        "80/20 mix of 4 KiB, 2 jobs", "/s", "median ms", "99 % ms", "moved MB/s"
    );
    for one in all {
        let p99 = |of: &Foreground| ms(of.latencies.percentile(0.99));
        let ratio = p99(one) / p99(alone);
        let _ = writeln!(
            text,
            "{:<42}{:>9.0}{:>12.2}{:>12.2}{:>12.0}  x{ratio:.2} {}",
            one.name,
            one.operations_per_s,
            ms(one.latencies.percentile(0.5)),
            p99(one),
            one.moved_mb_s,
            mark(ratio <= FOREGROUND_AIM)
        );
    }
}

pub(super) fn json(results: &Results) -> Value {
    let moved = |moved: &Move| {
        json!({
            "name": moved.name,
            "way": if moved.is_out { "out" } else { "in" },
            "bytes": moved.bytes,
            "seconds": moved.time.as_secs_f64(),
            "mb_per_s": moved.mb_s(),
            "limit_mb_per_s": moved.limit_mb_s,
            "aim": moved.aim,
            "node_cpu_s": moved.node_cpu.as_secs_f64(),
            "store_cpu_s": moved.store_cpu.as_secs_f64(),
        })
    };
    let used = results.uses.iter().map(|used| {
        json!({
            "name": used.name,
            "on_drives_ms": ms(used.on_drives),
            "in_store_ms": ms(used.in_store),
            "answer_ms": ms(used.answer),
        })
    });
    let foreground = results.foreground.iter().map(|one| {
        json!({
            "name": one.name,
            "operations_per_s": one.operations_per_s,
            "latency_p50_ms": ms(one.latencies.percentile(0.5)),
            "latency_p99_ms": ms(one.latencies.percentile(0.99)),
            "moved_mb_per_s": one.moved_mb_s,
        })
    });
    json!({
        "moves": results.moves.iter().map(moved).collect::<Vec<Value>>(),
        "uses": used.collect::<Vec<Value>>(),
        "round_trip_ms": results.round_trip_ms,
        "foreground": foreground.collect::<Vec<Value>>(),
    })
}
