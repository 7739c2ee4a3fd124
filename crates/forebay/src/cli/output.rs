//! Printing: tables for people, JSON for programs.

use anyhow::Result;
use comfy_table::{Table, presets};
use serde::Serialize;

/// Output format of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    Text,
    Json,
}

impl From<bool> for Format {
    fn from(json: bool) -> Self {
        if json { Format::Json } else { Format::Text }
    }
}

/// Prints a value as JSON, or the text that `text` makes from it.
pub(super) fn print<T: Serialize>(format: Format, value: &T, text: impl FnOnce(&T) -> String) -> Result<()> {
    use std::io::Write;
    let out = match format {
        Format::Json => serde_json::to_string_pretty(value)?,
        Format::Text => text(value),
    };
    match writeln!(std::io::stdout(), "{}", out.trim_end()) {
        // The reader, such as `head`, has ended.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other?),
    }
}

/// A table without lines.
pub(super) fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(header.to_vec());
    table
}

pub(super) fn bytes(bytes: u64) -> String {
    base::units::format_size(bytes)
}
