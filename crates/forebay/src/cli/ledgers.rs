//! `ledger`: which node owns the metadata.

use std::path::Path;
use std::time::Duration;

use admin::{AdminClient, LedgerLog, LogInfo, MoveLedgers};
use anyhow::{Result, bail};
use comfy_table::Table;
use serde::Serialize;

use super::args::LedgerCommand;
use super::output::{Format, print, table};
use super::progress::while_shown;
use super::{ask, picture};
use crate::node::NodeDir;

/// How long another node may take until it owns the metadata.
const PATIENCE: Duration = Duration::from_secs(30);
const LOOK: Duration = Duration::from_millis(300);

/// A ledger, as `ledger list --json` prints it.
#[derive(Serialize)]
struct OwnedLedger {
    /// The node that owns it.
    owner: u32,
    #[serde(flatten)]
    log: LedgerLog,
}

pub(super) fn ledger(command: LedgerCommand) -> Result<()> {
    match command {
        LedgerCommand::List { dir, json } => show(picture(&dir)?.log, json.into()),
        LedgerCommand::Move { dir, node, json } => move_to(&dir, node, json.into()),
    }
}

fn show(log: LogInfo, format: Format) -> Result<()> {
    let owner = log.owner;
    let ledgers: Vec<OwnedLedger> = log.ledgers.into_iter().map(|log| OwnedLedger { owner, log }).collect();
    print(format, &ledgers, |ledgers| ledger_table(ledgers).to_string())
}

fn ledger_table(ledgers: &[OwnedLedger]) -> Table {
    let mut table = table(&["LEDGER", "OWNER", "LAST ENTRY", "FOLLOWED BY"]);
    for OwnedLedger { owner, log } in ledgers {
        let standbys = log.standbys.iter().map(|standby| match standby.stored_seq {
            0 => format!("node {} (copies all)", standby.node),
            seq => format!("node {} (has {seq}, {} s ago)", standby.node, standby.age_s),
        });
        let standbys = standbys.collect::<Vec<_>>().join(", ");
        let standbys = if standbys.is_empty() { "nobody".to_owned() } else { standbys };
        table.add_row([log.ledger.clone(), format!("node {owner}"), log.last_seq.to_string(), standbys]);
    }
    table
}

fn move_to(dir: &Path, node: u32, format: Format) -> Result<()> {
    ask(dir, |client| async move { client.move_ledgers(&MoveLedgers { node }).await })?;
    let socket = NodeDir::new(dir).socket();
    let client = AdminClient::new(socket.as_path());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let moved = while_shown("moving", owned_by(&client, node));
    match runtime.block_on(async { tokio::time::timeout(PATIENCE, moved).await }) {
        Ok(log) => show(log, format),
        Err(_) => bail!(
            "node {node} does not own the metadata after {PATIENCE:?}: see its log, and `forebay node list`"
        ),
    }
}

/// Waits until a node owns the metadata.
async fn owned_by(client: &AdminClient, node: u32) -> LogInfo {
    loop {
        // While the owner changes, no node answers, or this one answers without an owner.
        if let Ok(status) = client.status().await
            && status.log.owner == node
            && !status.log.ledgers.is_empty()
        {
            return status.log;
        }
        tokio::time::sleep(LOOK).await;
    }
}
