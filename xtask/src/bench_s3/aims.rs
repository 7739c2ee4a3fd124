//! Compares results with their aims.

use std::fmt::Write;

use super::load::TURNS;
use super::measure::{Column, Figure};

/// For two cores that the load shares. Figure, least rate as a multiple of MinIO's.
const RATES: &[(&str, f64)] = &[
    ("GET 1 KiB, 16 workers", 2.5),
    ("GET 4 KiB, 16 workers", 2.5),
    ("PUT 1 KiB, 16 workers", 5.0),
    ("PUT 4 KiB, 16 workers", 5.0),
    ("GET 1 MiB, 1 worker", 1.5),
    ("GET 1 MiB, 16 workers", 1.5),
    ("PUT 1 MiB, 1 worker", 1.5),
    ("PUT 1 MiB, 16 workers", 1.5),
    ("GET 8 MiB, 1 worker", 1.5),
    ("GET 8 MiB, 16 workers", 1.5),
    ("PUT 8 MiB, 1 worker", 1.5),
    ("PUT 8 MiB, 16 workers", 1.5),
];
/// Figure, least part of MinIO's CPU time per operation, as its reciprocal.
const COSTS: &[(&str, f64)] = &[
    ("GET 1 KiB, 16 workers", 6.0),
    ("GET 4 KiB, 16 workers", 6.0),
    ("PUT 1 KiB, 16 workers", 4.0),
    ("PUT 4 KiB, 16 workers", 4.0),
];
const LIST_KEYS_PER_S: f64 = 200_000.0;
const BUCKETS_RATIO: f64 = 0.95;
/// A rate below this part of the rate with 64 workers has collapsed.
const COLLAPSE: f64 = 0.9;
const PEAK_BYTES: u64 = 512 << 20;

/// One line per aim whose figures were measured.
pub(super) fn text(columns: &[Column]) -> String {
    let column = |subject: &str| columns.iter().find(|column| column.subject == subject);
    let Some(ours) = column("forebay") else { return String::new() };
    let mut text = String::from("aims, for two cores that the load shares\n");
    let mut line = |reached: f64, aim: f64, what: &str| {
        let verdict = if reached >= aim { "reached" } else { "MISSED" };
        let _ = writeln!(text, "{verdict:<8} {what:<48} {reached:.2}, aim {aim:.2}");
    };
    if let Some(theirs) = column("minio") {
        let both = |name: &str| Some((ours.find(name)?, theirs.find(name)?));
        for (name, aim) in RATES {
            if let Some((ours, theirs)) = both(name) {
                line(ours.rate() / theirs.rate(), *aim, &format!("{name}: rate, times MinIO's"));
            }
        }
        for (name, aim) in COSTS {
            if let Some((ours, theirs)) = both(name) {
                let ratio = theirs.server_us() / ours.server_us().max(0.1);
                line(ratio, *aim, &format!("{name}: MinIO's CPU, times ours"));
            }
        }
    }
    for figure in ours.figures.iter().filter(|figure| figure.name.starts_with("LIST")) {
        line(figure.rate(), LIST_KEYS_PER_S, &format!("{}: keys/s", figure.name));
    }
    for verb in ["PUT", "GET"] {
        if let (Some(one), Some(many)) = (turns(ours, verb, "1 bucket"), turns(ours, verb, "100 buckets")) {
            line(one / many, BUCKETS_RATIO, &format!("{verb} in 1 bucket, times 100 buckets"));
        }
    }
    for more in ours.figures.iter().filter(|figure| figure.name.ends_with(", 512 workers")) {
        let fewer = ours.find(&more.name.replace(", 512", ", 64"));
        if let Some(fewer) = fewer {
            line(more.rate() / fewer.rate(), COLLAPSE, &format!("{}, times 64 workers", more.name));
        }
    }
    if let Some(peak) = ours.peak_bytes {
        let part = PEAK_BYTES as f64 / peak as f64;
        line(part, 1.0, &format!("512 MiB, times the {} MiB that were held", peak >> 20));
    }
    text
}

/// The best rate of several turns: other work on the machine only slows them down.
fn turns(column: &Column, verb: &str, what: &str) -> Option<f64> {
    let rates = (0..TURNS).map(|turn| column.find(&format!("{verb} {what}, turn {turn}")).map(Figure::rate));
    rates.collect::<Option<Vec<f64>>>()?.into_iter().max_by(f64::total_cmp)
}
