//! The rules of STYLE.md and ARCHITECTURE.md that a machine can check, one line per finding.

mod crates;
mod lexer;
mod mutations;
mod sources;

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// A broken rule and where.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    path: PathBuf,
    line: usize,
    message: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path.display(), self.line, self.message)
    }
}

/// Checks the repository at `root`. Paths in findings are relative to it.
pub fn check(root: &Path) -> Result<Vec<Finding>> {
    let mut findings = crates::check(root)?;
    for path in rust_files(root)? {
        let source =
            fs::read_to_string(root.join(&path)).with_context(|| format!("read {}", path.display()))?;
        findings.extend(sources::check(&path, &source));
    }
    findings.extend(mutations::check(root)?);
    findings.sort();
    Ok(findings)
}

/// Our Rust sources, relative to `root`, without build output and hidden directories.
fn rust_files(root: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut directories = vec![root.to_path_buf()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(&directory).with_context(|| format!("list {}", directory.display()))? {
            let path = entry?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if path.is_dir() && !name.starts_with('.') && !matches!(name, "target" | "node_modules" | "run") {
                directories.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files.push(path.strip_prefix(root).context("walked from the root")?.to_path_buf());
            }
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_is_one_line_that_editors_understand() {
        let finding = Finding { path: "crates/drive/src/lib.rs".into(), line: 7, message: "too long".into() };
        assert_eq!(finding.to_string(), "crates/drive/src/lib.rs:7: too long");
    }

    #[test]
    fn own_sources_are_found() {
        let root = Path::new("..");
        let files = rust_files(root).unwrap();
        assert!(files.contains(&PathBuf::from("xtask/src/tidy.rs")));
        assert!(files.iter().all(|path| !path.starts_with("target")));
    }
}
