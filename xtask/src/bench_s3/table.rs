//! Prints the figures of all subjects side by side.

use std::fmt::Write;
use std::time::Duration;

use serde_json::{Value, json};

use super::measure::{Column, Figure};

/// Rates, latencies and costs, each with a column for every subject.
pub(super) fn text(columns: &[Column]) -> String {
    let mut text = String::new();
    let of_others = |text: &mut String, column: usize, figure: &Figure, value: fn(&Figure) -> f64| {
        let ours = columns.first().filter(|_| column > 0).and_then(|first| first.find(&figure.name));
        if let Some(ours) = ours.map(value).filter(|_| value(figure) > 0.0) {
            let _ = write!(text, " (x{:.2})", ours / value(figure));
        }
    };
    text += &rows(columns, "operations/s; of lists, keys/s", |column, figure| {
        let mut cell = format!("{:.0}", figure.rate());
        of_others(&mut cell, column, figure, Figure::rate);
        cell
    });
    text += &rows(columns, "MB/s", |_, figure| format!("{:.1}", figure.megabytes()));
    text += &rows(columns, "latency in ms: median / 99 %", |_, figure| {
        let ms = |part: f64| figure.tally.latencies.percentile(part).as_secs_f64() * 1e3;
        format!("{:.2} / {:.2}", ms(0.5), ms(0.99))
    });
    text += &rows(columns, "CPU per operation in us: server / client", |column, figure| {
        let mut cell = format!("{:.0}", figure.server_us());
        of_others(&mut cell, column, figure, Figure::server_us);
        format!("{cell} / {:.0}", figure.client_us())
    });
    for column in columns {
        if let Some(bytes) = column.peak_bytes {
            let _ = writeln!(text, "\nmost memory held by {}: {} MiB", column.subject, bytes >> 20);
        }
    }
    text
}

fn rows(columns: &[Column], title: &str, cell: impl Fn(usize, &Figure) -> String) -> String {
    let mut names: Vec<&str> = Vec::new();
    for figure in columns.iter().flat_map(|column| &column.figures) {
        if !names.contains(&figure.name.as_str()) {
            names.push(&figure.name);
        }
    }
    let mut text = format!("\n{title}\n{:<28}", "");
    for column in columns {
        let _ = write!(text, "{:>20}", column.subject);
    }
    for name in names {
        let _ = write!(text, "\n{name:<28}");
        for (index, column) in columns.iter().enumerate() {
            let cell = column.find(name).map_or_else(|| "-".to_owned(), |figure| cell(index, figure));
            let _ = write!(text, "{cell:>20}");
        }
    }
    text.push('\n');
    text
}

/// One object per figure.
pub(super) fn json(columns: &[Column]) -> Value {
    let figures = columns.iter().flat_map(|column| column.figures.iter().map(move |figure| (column, figure)));
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let figures: Value = figures
        .map(|(column, figure)| {
            json!({
                "subject": column.subject,
                "name": figure.name,
                "operations": figure.tally.operations,
                "bytes": figure.tally.bytes,
                "seconds": figure.time.as_secs_f64(),
                "rate": figure.rate(),
                "latency_p50_ms": ms(figure.tally.latencies.percentile(0.5)),
                "latency_p99_ms": ms(figure.tally.latencies.percentile(0.99)),
                "server_cpu_us_per_operation": figure.server_us(),
                "client_cpu_us_per_operation": figure.client_us(),
            })
        })
        .collect();
    let peaks: serde_json::Map<String, Value> =
        columns.iter().map(|column| (column.subject.clone(), json!(column.peak_bytes))).collect();
    json!({ "figures": figures, "peak_bytes": peaks })
}
