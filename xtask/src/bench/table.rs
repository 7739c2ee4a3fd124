//! Prints the figures of all subjects side by side.

use std::fmt::Write;
use std::time::Duration;

use serde_json::{Value, json};

use super::aims;
use super::meter::Figure;

type Columns = [(String, Vec<Figure>)];

/// Two tables: rates with their ratios to the first two columns, and costs.
pub(crate) fn text(columns: &Columns) -> String {
    let mut text = String::from("rates; in parentheses: times ext4, times null\n");
    text += &rows(columns, |column, figure| {
        let reference = |index: usize| {
            let (_, figures) = columns.get(index).filter(|_| index < column)?;
            let reference = figures.iter().find(|reference| reference.name == figure.name)?;
            Some(format!("{:.2}", figure.rate() / reference.rate()))
        };
        let ratios: Vec<String> = (0..2).filter_map(reference).collect();
        let ratios = if ratios.is_empty() { String::new() } else { format!(" ({})", ratios.join(" ")) };
        format!("{}{}{ratios}", short(figure.rate()), figure.unit())
    });
    text += "\nlatency: mean / 99 %; Little's law: jobs under way, `!` if that is not their number\n";
    text += &rows(columns, |_, figure| match &figure.done.latencies {
        Some(latencies) => {
            let us = |time: Duration| format!("{}us", short(time.as_secs_f64() * 1e6));
            let mark = if figure.obeys_littles_law() == Some(false) { "!" } else { "" };
            let under_way = figure.under_way().unwrap_or_default();
            format!("{} / {}, {under_way:.1}{mark}", us(latencies.mean()), us(latencies.percentile(0.99)))
        }
        None => "-".to_owned(),
    });
    text += "\ncosts: CPU per operation of the process behind the mount / of the whole machine; CPU / disk / flush busy; \
             what was saturated\n";
    text += &rows(columns, |_, figure| {
        let busy = format!(
            "{:.0}/{:.0}/{:.0}%",
            figure.cpu_busy_percent, figure.disk_busy_percent, figure.flush_busy_percent
        );
        let (own, all) = (short(figure.cpu_us()), short(figure.cpu_total_us()));
        format!("{own}/{all}us {busy} {}", figure.saturated())
    });
    for (title, more) in
        [("aims, for two cores", aims::text(columns)), ("slower with more jobs", aims::collapses(columns))]
    {
        if !more.is_empty() {
            let _ = write!(text, "\n{title}\n{more}");
        }
    }
    text
}

/// One object per figure.
pub(crate) fn json(columns: &Columns) -> Value {
    let figures =
        columns.iter().flat_map(|(subject, figures)| figures.iter().map(move |figure| (subject, figure)));
    figures
        .map(|(subject, figure)| {
            json!({
                "subject": subject,
                "name": figure.name,
                "rate": figure.rate(),
                "unit": figure.unit().trim_start_matches('/'),
                "operations": figure.done.operations,
                "bytes": figure.done.bytes,
                "seconds": figure.time.as_secs_f64(),
                "jobs": figure.done.jobs,
                "latency_mean_us": figure.done.latencies.as_ref().map(|all| all.mean().as_secs_f64() * 1e6),
                "latency_p99_us": figure.done.latencies.as_ref().map(|all| all.percentile(0.99).as_secs_f64() * 1e6),
                "obeys_littles_law": figure.obeys_littles_law(),
                "cpu_seconds": figure.cpu.as_secs_f64(),
                "cpu_total_us_per_operation": figure.cpu_total_us(),
                "cpu_us_per_operation": figure.cpu_us(),
                "cpu_busy_percent": figure.cpu_busy_percent,
                "disk_busy_percent": figure.disk_busy_percent,
                "flush_busy_percent": figure.flush_busy_percent,
                "saturated": figure.saturated(),
            })
        })
        .collect()
}

fn rows(columns: &Columns, cell: impl Fn(usize, &Figure) -> String) -> String {
    let names: Vec<&String> = columns
        .first()
        .map_or(Vec::new(), |(_, figures)| figures.iter().map(|figure| &figure.name).collect());
    let mut table: Vec<Vec<String>> =
        vec![std::iter::once(String::new()).chain(columns.iter().map(|(name, _)| name.clone())).collect()];
    for name in names {
        let cells = columns.iter().enumerate().map(|(index, (_, figures))| {
            figures
                .iter()
                .find(|figure| figure.name == *name)
                .map_or("-".to_owned(), |figure| cell(index, figure))
        });
        table.push(std::iter::once(name.clone()).chain(cells).collect());
    }
    let width = |index: usize| table.iter().map(|row| row[index].len()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..=columns.len()).map(width).collect();
    table.iter().fold(String::new(), |mut text, row| {
        for (cell, width) in row.iter().zip(&widths) {
            let _ = write!(text, "{cell:<width$}  ");
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
        text
    })
}

/// Three digits are enough.
fn short(value: f64) -> String {
    match value {
        value if value >= 1e6 => format!("{:.2}M", value / 1e6),
        value if value >= 1e5 => format!("{:.0}k", value / 1e3),
        value if value >= 1e4 => format!("{:.1}k", value / 1e3),
        value if value >= 100.0 => format!("{value:.0}"),
        value => format!("{value:.1}"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::meter::Done;
    use super::*;

    fn figure(name: &str, operations: u64) -> Figure {
        Figure {
            name: name.to_owned(),
            done: Done::whole(operations, 0),
            time: Duration::from_secs(2),
            cpu: Duration::from_secs(1),
            cpu_total: Duration::from_secs(2),
            cpu_busy_percent: 90.0,
            disk_busy_percent: 10.0,
            flush_busy_percent: 0.0,
        }
    }

    #[test]
    fn figures_stand_beside_their_ratios() {
        let columns = [
            ("ext4".to_owned(), vec![figure("create", 4000), figure("stat", 400_000)]),
            ("null".to_owned(), vec![figure("create", 2000)]),
            ("4+2".to_owned(), vec![figure("create", 1000)]),
        ];
        let text = text(&columns);
        assert!(text.contains("create  2000/s  1000/s (0.50)  500/s (0.25 0.50)\n"), "{text}");
        assert!(text.contains("stat    200k/s  -              -\n"), "{text}");
        assert!(text.contains("1000/2000us 90/10/0% cpu"), "{text}");
        assert_eq!(json(&columns)[3]["rate"], 500.0);
    }

    #[test]
    fn aims_and_collapses_are_named() {
        let more = |jobs: u64, operations: u64| {
            let mut figure = figure(&super::super::workload::named("create + close", jobs), operations);
            figure.done.jobs = jobs;
            figure
        };
        let columns = [("4+2".to_owned(), vec![more(1, 8000), more(4, 20_000), more(16, 6000)])];
        let text = text(&columns);
        assert!(text.contains("reached  4+2  create + close, 1 job          4000/s, aim 3000/s\n"), "{text}");
        assert!(
            text.contains("create + close, 16 jobs        3000/s, aim 15000/s, bound by cpu\n"),
            "{text}"
        );
        assert!(text.contains("4+2: create + close, 16 jobs 3000/s falls from 10000 with 4\n"), "{text}");
    }
}
