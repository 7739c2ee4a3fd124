//! `cluster`: what is of the cluster as a whole.

use admin::{SetSpares, SpareInfo};
use anyhow::Result;
use base::NodeId;

use super::args::{ClusterCommand, RecoverArgs, SparesArgs};
use super::output::{print, table};
use super::progress::while_shown;
use super::{ask, env, run_here};
use crate::member::{OtherNode, RecoverOptions, Recovery, recover as recover_logs};
use crate::node::NodeDir;

pub(super) fn cluster(command: ClusterCommand) -> Result<()> {
    match command {
        ClusterCommand::Recover(args) => recover(args),
        ClusterCommand::Spares(args) => spares(args),
    }
}

fn spares(SparesArgs { dir, count, level, json }: SparesArgs) -> Result<()> {
    let spare: Option<SpareInfo> = ask(&dir, |client| async move {
        match count {
            None => Ok(client.status().await?.spare),
            Some(domains) => {
                let level = level.map(|level| level.to_string());
                client.set_spares(&SetSpares { domains, level }).await
            }
        }
    })?;
    print(json.into(), &spare, |spare| match spare {
        None => "nothing stays free for a loss".to_owned(),
        Some(_) => super::status::spare(spare.as_ref()).trim_end().to_owned(),
    })
}

fn recover(args: RecoverArgs) -> Result<()> {
    let options = RecoverOptions {
        log: args.log,
        without: args.without.into_iter().map(NodeId).collect(),
        force: args.force,
        yes: args.yes,
    };
    let (env, dir) = (env(), NodeDir::new(&args.dir));
    let recovery = run_here(while_shown("looking at all copies", recover_logs(&env, &dir, options)))?;
    print(args.json.into(), &recovery, |recovery| text(recovery, &dir))
}

fn text(recovery: &Recovery, dir: &NodeDir) -> String {
    let mut copies = table(&["NODE", "LEDGER", "LAST"]);
    let here = OtherNode { node: recovery.node, ledgers: Some(recovery.ledgers.clone()) };
    for node in std::iter::once(&here).chain(&recovery.others) {
        let shown = match node.node == recovery.node {
            true => format!("{} (here)", node.node),
            false => node.node.to_string(),
        };
        match &node.ledgers {
            None => drop(copies.add_row([shown.as_str(), "does not answer", "-"])),
            Some(ledgers) if ledgers.is_empty() => drop(copies.add_row([shown.as_str(), "no copy", "-"])),
            Some(ledgers) => {
                for ledger in ledgers {
                    copies.add_row([shown.as_str(), &ledger.name, &ledger.seq.to_string()]);
                }
            }
        }
    }
    let dir = dir.root().display();
    let next = match &recovery.log {
        None => {
            "nothing was changed; with --yes, the logs begin anew behind what this node has, and what came later is lost"
                .to_owned()
        }
        Some(log) => format!(
            "the logs begin anew behind what this node has: {log}\n  start it: forebay start {dir}\n  other nodes that run follow by \
             themselves; start those that do not\n  then look at what is there, and end the doubt about what is not: forebay meta settle {dir}"
        ),
    };
    format!("logs    {}\n  ! {}\n\n{copies}\n\n{next}", recovery.lost, recovery.why)
}
