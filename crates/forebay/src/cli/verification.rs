//! `fs verify`.

use std::path::Path;
use std::time::Duration;

use admin::{AdminClient, CallError, FilesystemVerification, ShardCounts, VerifyFilesystem};
use anyhow::{Result, bail};
use base::units::format_duration;

use super::ask;
use super::output::{Format, print, table};
use super::progress::Progress;

/// Pause between two looks whether a comparison has ended.
const LOOK: Duration = Duration::from_millis(200);

pub(super) fn verify(dir: &Path, name: &str, now: bool, format: Format) -> Result<()> {
    let found = ask(dir, |client| async move {
        let found = client.verify(name, VerifyFilesystem { now }).await?;
        if now { wait(&client, name, found).await } else { Ok(found) }
    })?;
    print(format, &found, shown)?;
    match found.last.map_or(0, |last| last.shards.missing_shards) {
        0 => Ok(()),
        missing => bail!(
            "{missing} shards of {name} were missing: they are restored where enough others are there; verify again (forebay fs verify --now)"
        ),
    }
}

/// Waits until a comparison that was asked for has ended.
async fn wait(
    client: &AdminClient,
    name: &str,
    asked: FilesystemVerification,
) -> Result<FilesystemVerification, CallError> {
    let (mut progress, mut number) = (Progress::new(), asked.next);
    loop {
        let found = client.verify(name, VerifyFilesystem::default()).await?;
        if found.last.is_some_and(|last| last.number >= number) {
            return Ok(found);
        }
        if found.next < number {
            // Another node owns the metadata by now, and counts anew.
            number = client.verify(name, VerifyFilesystem { now: true }).await?.next;
        }
        progress.show(&format!("verifying {name}: {} shards", found.looked_shards));
        tokio::time::sleep(LOOK).await;
    }
}

fn shown(found: &FilesystemVerification) -> String {
    let Some(last) = found.last else {
        return format!(
            "{} was not verified since the node that owns the metadata began to own it: --now does that, or it happens by itself",
            found.filesystem
        );
    };
    let mut table = table(&["GROUP", "SHARDS", "OWED", "UNKNOWN", "MISSING", "ALL READ WITHIN", "DRIVES"]);
    for group in &found.groups {
        let ShardCounts { expected_shards, owed_shards, unknown_shards, missing_shards } = group.shards;
        let drives: Vec<String> = group.drives.iter().map(u32::to_string).collect();
        table.add_row([
            group.group.to_string(),
            expected_shards.to_string(),
            owed_shards.to_string(),
            unknown_shards.to_string(),
            missing_shards.to_string(),
            group.read_s.map_or_else(|| "-".to_owned(), format_duration),
            drives.join(" "),
        ]);
    }
    let ShardCounts { expected_shards, owed_shards, unknown_shards, missing_shards } = last.shards;
    format!(
        "{}: {expected_shards} shards are expected; {owed_shards} owed, {unknown_shards} unknown, {missing_shards} missing; compared {} \
         ago, in {} ms\n\n{table}",
        found.filesystem,
        format_duration(last.age_s),
        last.took_ms
    )
}
