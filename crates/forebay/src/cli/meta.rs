//! `meta`: the directories with metadata.

use std::path::Path;

use admin::{MetaCopyInfo, MetaDir, NodeStatus};
use anyhow::Result;
use serde::Serialize;

use super::output::{Format, print, table};
use super::{absolute, ask, picture};

/// A ledger and its copies.
#[derive(Debug, Serialize)]
struct LedgerCopies<'a> {
    ledger: &'a str,
    copies: &'a [MetaCopyInfo],
}

fn show(status: &NodeStatus, format: Format) -> Result<()> {
    let control = LedgerCopies { ledger: "cluster", copies: &status.control };
    let filesystems = status
        .filesystems
        .iter()
        .map(|filesystem| LedgerCopies { ledger: &filesystem.name, copies: &filesystem.ledger.copies });
    let ledgers: Vec<LedgerCopies<'_>> = std::iter::once(control).chain(filesystems).collect();
    print(format, &ledgers, |ledgers| {
        let mut table = table(&["LEDGER", "DIRECTORY", "LOG", "STORE", "PROBLEM"]);
        for ledger in ledgers {
            for copy in ledger.copies {
                table.add_row([
                    ledger.ledger.to_owned(),
                    copy.dir.clone(),
                    if copy.log_complete { "complete" } else { "lost" }.to_owned(),
                    copy.stored_seq.map_or("-".to_owned(), |seq| seq.to_string()),
                    copy.problem.clone().unwrap_or_default(),
                ]);
            }
        }
        table.to_string()
    })
}

pub(super) fn list(dir: &Path, format: Format) -> Result<()> {
    show(&picture(dir)?, format)
}

pub(super) fn add(dir: &Path, path: &Path, format: Format) -> Result<()> {
    let request = MetaDir { path: absolute(path)? };
    show(&ask(dir, |client| async move { client.add_meta_dir(&request).await })?, format)
}

pub(super) fn settle(dir: &Path, format: Format) -> Result<()> {
    show(&ask(dir, |client| async move { client.settle_metadata().await })?, format)
}

pub(super) fn remove(dir: &Path, path: &Path, format: Format) -> Result<()> {
    let request = MetaDir { path: absolute(path)? };
    show(&ask(dir, |client| async move { client.remove_meta_dir(&request).await })?, format)
}
