//! `log`: where the logs of the metadata are.

use std::path::Path;
use std::time::Duration;

use admin::{AdminClient, AdminError, CallError, LogInfo, LogMove};
use anyhow::{Result, bail};
use tokio::time::Instant;

use super::args::LogCommand;
use super::output::{Format, print, table};
use super::progress::while_shown;
use super::{ask, picture};
use crate::node::{FILES, NodeDir};

/// How long a move may take: the node that owns the metadata stops and begins anew.
const PATIENCE: Duration = Duration::from_secs(120);
/// How long it may take to show after no answer came.
const LOST_PATIENCE: Duration = Duration::from_secs(20);
/// How long a process that begins anew may take until it answers: it stops before, and writes to the engine.
const GONE_PATIENCE: Duration = Duration::from_secs(75);
const LOOK: Duration = Duration::from_millis(300);

pub(super) fn log(command: LogCommand) -> Result<()> {
    match command {
        LogCommand::Show { dir, json } => print(json.into(), &picture(&dir)?.log, text),
        LogCommand::Move { dir, to, remount, json } => move_to(&dir, LogMove { to, remount }, json.into()),
    }
}

fn text(log: &LogInfo) -> String {
    let mut standbys = table(&["LEDGER", "LAST", "FOLLOWED BY", "HAS", "HEARD OF"]);
    for ledger in &log.ledgers {
        let last = ledger.last_seq.to_string();
        if ledger.standbys.is_empty() {
            standbys.add_row([&ledger.ledger, &last, "-", "-", "-"]);
        }
        for standby in &ledger.standbys {
            let has = match standby.stored_seq {
                0 => "copies all".to_owned(),
                seq => seq.to_string(),
            };
            let (node, age) = (format!("node {}", standby.node), format!("{} s ago", standby.age_s));
            standbys.add_row([&ledger.ledger, &last, &node, &has, &age]);
        }
    }
    let problem =
        log.problem.as_ref().map(|problem| format!("  ! the last attempt to move failed: {problem}\n"));
    let at = match log.at.as_str() {
        "files" => {
            format!("files of node {}; while it is away, everything waits (forebay log move)", log.owner)
        }
        engine => format!("{engine}, owned by node {}", log.owner),
    };
    let away = log.members.iter().filter(|member| !member.answers);
    let away: String = away.map(|member| format!("  ! {} does not answer\n", member.address)).collect();
    format!("logs    {at}\n{}{away}\n{standbys}", problem.unwrap_or_default())
}

fn move_to(dir: &Path, request: LogMove, format: Format) -> Result<()> {
    let before = picture(dir)?.log;
    // The process that is asked ends soon after that, perhaps before its answer has come.
    let asked = ask(dir, |client| async move {
        match client.move_log(&request).await {
            Err(error @ CallError::NotRunning { .. }) => Err(error),
            answer => Ok(answer),
        }
    });
    let lost = match asked? {
        Ok(()) => None,
        Err(CallError::Refused(refused)) if refused.code != AdminError::failed("").code => bail!(refused),
        Err(error) => Some(error),
    };
    let socket = NodeDir::new(dir).socket();
    let client = AdminClient::new(socket.as_path());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let patience = if lost.is_some() { LOST_PATIENCE } else { PATIENCE };
    let moved = async { tokio::time::timeout(patience, while_shown("moving", wait(&client, &before))).await };
    let log = match (runtime.block_on(moved), lost) {
        (Ok(log), _) => log?,
        (Err(_), Some(error)) => return Err(error.into()),
        (Err(_), None) => bail!(
            "the metadata has no owner after {PATIENCE:?}: see `forebay status` and the log of node {}",
            before.owner
        ),
    };
    if log.at == before.at {
        let interrupted = || format!("the process of node {} has ended in between", before.owner);
        bail!("the logs stay where they are: {}", log.problem.clone().unwrap_or_else(interrupted));
    }
    print(format, &log, |log| format!("the logs have moved\n{}", text(log)))
}

/// Waits for the end of a move. `before` is how the logs were before it.
async fn wait(client: &AdminClient, before: &LogInfo) -> Result<LogInfo> {
    let mut gone: Option<Instant> = None;
    loop {
        // While it moves, nobody answers, or the node answers alone.
        match client.status().await {
            Ok(status) if is_at(&status.log) && status.log.at != before.at => return Ok(status.log),
            // An owner of an engine notes first that its predecessor has moved nothing.
            Ok(status) if is_at(&status.log) && status.log.tries > before.tries && !status.log.moves => {
                return Ok(status.log);
            }
            Err(error @ CallError::NotRunning { .. }) => {
                if gone.get_or_insert_with(Instant::now).elapsed() > GONE_PATIENCE {
                    return Err(anyhow::Error::new(error).context("the node has ended; start it again"));
                }
            }
            _ => gone = None,
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Whether an owner of the metadata says where the logs are: a node answers alone while it reaches none.
fn is_at(log: &LogInfo) -> bool {
    log.at == FILES || log.at.contains("://")
}
