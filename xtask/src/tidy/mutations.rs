//! `tests/mutations.txt`: each breakage must find the text that it replaces, exactly once. Otherwise it plays nothing.

use std::path::Path;

use anyhow::{Context, Result};

use super::Finding;

const TABLE: &str = "tests/mutations.txt";

/// Checks each entry.
pub fn check(root: &Path) -> Result<Vec<Finding>> {
    let table = std::fs::read_to_string(root.join(TABLE)).with_context(|| format!("read {TABLE}"))?;
    let source = |path: &str| std::fs::read_to_string(root.join(path)).unwrap_or_default();
    Ok(check_table(&table, source))
}

/// An entry: its line, name, file and text.
#[derive(Default)]
struct Entry<'a> {
    line: usize,
    name: &'a str,
    file: &'a str,
    old: String,
}

fn check_table(table: &str, source: impl Fn(&str) -> String) -> Vec<Finding> {
    let mut entries: Vec<Entry<'_>> = Vec::new();
    for (line, text) in (1..).zip(table.lines()) {
        if let Some(name) = text.strip_prefix("= ") {
            entries.push(Entry { line, name, ..Entry::default() });
            continue;
        }
        let Some(entry) = entries.last_mut() else { continue };
        match text.as_bytes().first() {
            Some(b'-') => entry.old += &format!("{}\n", text.get(2..).unwrap_or("")),
            Some(b'+' | b'#') | None => {}
            Some(_) => entry.file = text,
        }
    }
    let finding = |entry: &Entry<'_>| {
        let found = source(entry.file).matches(entry.old.trim_end_matches('\n')).count();
        let message = format!("text is there {found} times, not once: {} in {}", entry.name, entry.file);
        (found != 1).then(|| Finding { path: TABLE.into(), line: entry.line, message })
    };
    entries.iter().filter_map(finding).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_that_is_not_there_once_is_reported() {
        let table = "# About.\n= one\na.rs\n- let a = 1;\n-\n- let b = 2;\n+ let a = 3;\n\n= two\na.rs\n- let c\n+ let d\n";
        let source = |text: &'static str| move |_: &str| text.to_owned();
        assert!(check_table(table, source("let a = 1;\n\nlet b = 2;\nlet c")).is_empty());
        let findings = check_table(table, source("let a = 1;\nlet b = 2;\nlet c; let c;"));
        let lines: Vec<usize> = findings.iter().map(|finding| finding.line).collect();
        assert_eq!(lines, [2, 9]);
    }
}
