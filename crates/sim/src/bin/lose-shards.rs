//! `lose-shards CLUSTER DRIVE-FILE LEDGER COUNT`: takes shards from a drive of a node that does not run, without a trace in the metadata.

#![allow(clippy::print_stdout, reason = "a program for people")]

use std::error::Error;
use std::path::Path;

use base::env::Env;
use base::{ClusterId, DriveId, LedgerId};
use drive::{Drive, OpenOptions};
use wire::drive::{DriveService, ShardKey};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [cluster, path, ledger, count] = &arguments[..] else {
        return Err("usage: lose-shards CLUSTER DRIVE-FILE LEDGER COUNT".into());
    };
    let cluster: ClusterId = cluster.parse().map_err(|_| "no id of a cluster")?;
    let (ledger, count) = (LedgerId(ledger.parse()?), count.parse()?);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let drive = Drive::open(&Env::real(), DriveId(0), Path::new(path), &OpenOptions::new(cluster))?;
        let listed = drive.list(Some(ShardKey::first_of(ledger)), count).await?;
        let keys: Vec<ShardKey> =
            listed.iter().map(|entry| entry.key).filter(|key| key.ledger == ledger).collect();
        println!("{}", keys.len());
        drive.delete(keys.into()).await?;
        Ok(drive.close().await?)
    })
}
