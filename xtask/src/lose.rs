//! `cargo xtask lose`: takes shards from a drive of a node that does not run, without a trace in the metadata.

use std::path::Path;

use anyhow::{Context, Result};
use base::env::Env;
use base::{ClusterId, DriveId, LedgerId};
use drive::{Drive, OpenOptions};
use wire::drive::{DriveService, ShardKey};

pub(crate) const USAGE: &str = "lose CLUSTER DRIVE-FILE LEDGER COUNT";

/// Takes the first shards of a ledger.
pub(crate) fn run(cluster: &str, path: &str, ledger: &str, count: &str) -> Result<()> {
    let cluster: ClusterId = cluster.parse().context("the id of the cluster")?;
    let (ledger, count): (u32, usize) = (ledger.parse()?, count.parse()?);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let drive = Drive::open(&Env::real(), DriveId(0), Path::new(path), &OpenOptions::new(cluster))?;
        let listed = drive.list(Some(ShardKey::first_of(LedgerId(ledger))), count).await?;
        let keys: Vec<ShardKey> =
            listed.iter().map(|entry| entry.key).filter(|key| key.ledger == LedgerId(ledger)).collect();
        println!("{}", keys.len());
        drive.delete(keys.into()).await?;
        Ok(drive.close().await?)
    })
}
