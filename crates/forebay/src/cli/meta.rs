//! `meta`: the directories with metadata, and backups of it.

use std::path::Path;

use admin::{BackupInfo, BackupsInfo, MetaCopyInfo, MetaDir, NodeStatus, SetBackups};
use anyhow::Result;
use base::units::format_duration;
use serde::Serialize;

use super::args::{ExportArgs, ImportArgs, MetaCommand, ScheduleArgs};
use super::output::{Format, bytes, print, table};
use super::progress::Meter;
use super::{absolute, ask, env, picture, run_here};
use crate::backup::{self, Exported, Imported, LedgerInfo, Next};
use crate::node::NodeDir;

pub(super) fn meta(command: MetaCommand) -> Result<()> {
    match command {
        MetaCommand::List { dir, json } => list(&dir, json.into()),
        MetaCommand::AddDir { dir, path, json } => add(&dir, &path, json.into()),
        MetaCommand::Settle { dir, json } => settle(&dir, json.into()),
        MetaCommand::RemoveDir { dir, path, json } => remove(&dir, &path, json.into()),
        MetaCommand::Export(args) => export(&args),
        MetaCommand::Import(args) => import(&args),
        MetaCommand::Schedule(args) => schedule(args),
    }
}

fn schedule(args: ScheduleArgs) -> Result<()> {
    let ScheduleArgs { dir, to, every, keep, now, off, json } = args;
    let to = match to {
        Some(to) if !to.starts_with("store:") => Some(absolute(Path::new(&to))?),
        to => to,
    };
    let request = SetBackups { to, every_s: every, keep, off, now };
    let backups = ask(&dir, |client| async move {
        match request == SetBackups::default() {
            true => client.backups().await,
            false => client.set_backups(&request).await,
        }
    })?;
    print(json.into(), &backups, |backups| {
        backups.as_ref().map_or("the cluster makes no backups".to_owned(), schedule_text)
    })
}

fn schedule_text(backups: &BackupsInfo) -> String {
    let BackupsInfo { to, every_s, keep, off, due, made, problem, .. } = backups;
    let state = match (off, due) {
        (true, _) => ", off now",
        (_, true) => ", one is under way",
        _ => "",
    };
    let mut text = format!("to {to} every {}, the last {keep} are kept{state}\n", format_duration(*every_s));
    text.extend(problem.iter().map(|problem| format!("  ! {problem}\n")));
    let mut table = table(&["BACKUP", "SIZE", "AGE"]);
    for BackupInfo { name, age_s, size_bytes, .. } in made {
        table.add_row([name.clone(), bytes(*size_bytes), format_duration(*age_s)]);
    }
    format!("{text}\n{table}")
}

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

fn list(dir: &Path, format: Format) -> Result<()> {
    show(&picture(dir)?, format)
}

fn add(dir: &Path, path: &Path, format: Format) -> Result<()> {
    let request = MetaDir { path: absolute(path)? };
    show(&ask(dir, |client| async move { client.add_meta_dir(&request).await })?, format)
}

fn settle(dir: &Path, format: Format) -> Result<()> {
    show(&ask(dir, |client| async move { client.settle_metadata().await })?, format)
}

fn remove(dir: &Path, path: &Path, format: Format) -> Result<()> {
    let request = MetaDir { path: absolute(path)? };
    show(&ask(dir, |client| async move { client.remove_meta_dir(&request).await })?, format)
}

fn export(args: &ExportArgs) -> Result<()> {
    let (env, dir) = (env(), NodeDir::new(&args.dir));
    let mut meter = Meter::new("exporting");
    let mut tell = |done, of| meter.show(done, of);
    let exported = run_here(backup::export(&env, &dir, &args.file, args.force, &mut tell))?;
    drop(meter);
    print(args.json.into(), &exported, |exported| exported_text(exported, &args.file))
}

fn exported_text(exported: &Exported, file: &Path) -> String {
    let (ledgers, size) = (ledger_table(&exported.ledgers), bytes(exported.file_bytes));
    format!("{ledgers}\n\n{}: {size}, of cluster {}", file.display(), exported.cluster)
}

fn import(args: &ImportArgs) -> Result<()> {
    let (env, dir) = (env(), NodeDir::new(&args.dir));
    let mut meter = Meter::new(if args.yes { "importing" } else { "checking" });
    let mut tell = |done, of| meter.show(done, of);
    let imported = run_here(backup::import(&env, &dir, &args.file, args.yes, &mut tell))?;
    drop(meter);
    print(args.json.into(), &imported, |imported| imported_text(imported, &dir))
}

fn imported_text(imported: &Imported, dir: &NodeDir) -> String {
    let (mut text, dir) = (ledger_table(&imported.ledgers), dir.root().display());
    let age_s = (env().clock.wall_ns() / 1_000_000_000 - imported.made_s).max(0) as u64;
    let age = base::units::format_duration(age_s);
    text.push_str(&format!("\n\nof cluster {}, made {age} ago\n", imported.cluster));
    for lack in &imported.lacks {
        text.push_str(&format!(
            "  ! {lack} is missing, and no backup has it: without it all secrets are lost\n"
        ));
    }
    if !imported.done {
        text.push_str("it is whole; nothing was changed; with --yes, the metadata here is made anew from it");
        return text;
    }
    for aside in &imported.aside {
        text.push_str(&format!("what was there is in {}\n", aside.display()));
    }
    text.push_str(&match imported.next {
        Next::Start => format!("the metadata is that of the backup\n  start the node: forebay start {dir}\n"),
        Next::Recover => format!(
            "the stores are those of the backup; an engine had the logs\n  begin them anew: forebay cluster recover {dir}\n"
        ),
    });
    text.push_str(&format!(
        "  then look at what is there, and end the doubt about what is not: forebay meta settle {dir}"
    ));
    text
}

fn ledger_table(ledgers: &[LedgerInfo]) -> String {
    let mut table = table(&["LEDGER", "LAST", "KEYS", "SIZE"]);
    for ledger in ledgers {
        let LedgerInfo { name, seq, rows, bytes: size } = ledger;
        table.add_row([name.clone(), seq.to_string(), rows.to_string(), bytes(*size)]);
    }
    table.to_string()
}
