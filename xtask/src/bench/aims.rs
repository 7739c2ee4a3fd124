//! Compares results with their aims.

use std::fmt::Write;

use super::meter::Figure;

/// The least rate of an aim.
enum Least {
    /// A multiple of the figure of another subject.
    Times(f64, &'static str),
    /// Operations per second.
    PerSecond(f64),
}
use Least::{PerSecond, Times};

/// For two cores. Profile, figure, least.
const AIMS: &[(&str, &str, Least)] = &[
    ("1+0", "write 1 MiB, 1 job", Times(0.7, "ext4")),
    ("4+2", "write 1 MiB, 1 job", Times(0.7 * 4.0 / 6.0, "ext4")),
    ("1+0", "read 1 MiB, 1 job", Times(0.8, "ext4")),
    ("4+2", "read 1 MiB, 1 job", Times(0.8, "ext4")),
    ("1+0", "read 4 KiB random, QD32", Times(0.7, "null")),
    ("4+2", "read 4 KiB random, QD32", Times(0.7, "null")),
    ("4+2", "write 4 KiB random, QD32", Times(0.6, "r2")),
    ("4+2", "write 4 KiB random, QD32", PerSecond(20_000.0)),
    ("4+2", "write 4 KiB + fsync, 16 jobs", PerSecond(8_000.0)),
    ("4+2", "stat uncached, 1 job", Times(0.8, "null")),
    ("4+2", "stat cached, 1 job", Times(1.0, "ext4")),
    ("4+2", "create + close, 1 job", PerSecond(3_000.0)),
    ("4+2", "create + close, 4 jobs", PerSecond(8_000.0)),
    ("4+2", "create + close, 16 jobs", PerSecond(15_000.0)),
];

/// A rate below this part of the rate with fewer jobs has collapsed.
const COLLAPSE: f64 = 0.9;

/// One line per aim whose figures were measured.
pub(crate) fn text(columns: &[(String, Vec<Figure>)]) -> String {
    let find = |subject: &str, name: &str| {
        let (_, figures) = columns.iter().find(|(column, _)| column == subject)?;
        figures.iter().find(|figure| figure.name == name)
    };
    let mut text = String::new();
    for (profile, name, least) in AIMS {
        let Some(figure) = find(profile, name) else { continue };
        let (wanted, of) = match least {
            PerSecond(rate) => (*rate, String::new()),
            Times(factor, subject) => {
                let Some(reference) = find(subject, name) else { continue };
                (factor * reference.rate(), format!(" ({factor:.2} x {subject})"))
            }
        };
        let verdict = if figure.rate() >= wanted { "reached" } else { "MISSED" };
        let bound = if figure.rate() >= wanted {
            String::new()
        } else {
            format!(", bound by {}", figure.saturated())
        };
        let unit = figure.unit();
        let _ = writeln!(
            text,
            "{verdict:<8} {profile:<4} {name:<30} {:.0}{unit}, aim {wanted:.0}{unit}{of}{bound}",
            figure.rate()
        );
    }
    text
}

/// Figures that are slower with more jobs than with fewer.
pub(crate) fn collapses(columns: &[(String, Vec<Figure>)]) -> String {
    let stem = |figure: &Figure| figure.name.rsplit_once(", ").map(|(stem, _)| stem.to_owned());
    let mut text = String::new();
    for (subject, figures) in columns {
        for (at, more) in figures.iter().enumerate() {
            let fewer = figures[..at].iter().filter(|fewer| {
                stem(fewer).is_some() && stem(fewer) == stem(more) && fewer.done.jobs < more.done.jobs
            });
            let Some(best) = fewer.max_by(|a, b| a.rate().total_cmp(&b.rate())) else { continue };
            if more.rate() < COLLAPSE * best.rate() {
                let (name, rate, unit) = (&more.name, more.rate(), more.unit());
                let (before, jobs) = (best.rate(), best.done.jobs);
                let _ =
                    writeln!(text, "{subject}: {name} {rate:.0}{unit} falls from {before:.0} with {jobs}");
            }
        }
    }
    text
}
