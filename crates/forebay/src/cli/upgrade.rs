//! `upgrade`: the programs of the nodes, and the formats that they may write.

use admin::{ProgramInfo, UpgradeInfo};
use anyhow::Result;

use super::args::UpgradeCommand;
use super::ask;
use super::output::{print, table};

pub(super) fn upgrade(command: UpgradeCommand) -> Result<()> {
    match command {
        UpgradeCommand::Status { dir, json } => {
            let info = ask(&dir, |client| async move { client.upgrade().await })?;
            print(json.into(), &info, text)
        }
        UpgradeCommand::Finalize { dir, json } => {
            let info = ask(&dir, |client| async move { client.finalize_upgrade().await })?;
            print(json.into(), &info, |info| {
                format!("all nodes write formats of level {}\n{}", info.format_level, text(info))
            })
        }
    }
}

fn text(info: &UpgradeInfo) -> String {
    let mut table = table(&["", "NUMBER", "NAME", "VERSION", "KNOWS LEVEL", ""]);
    let mut add = |kind: &str, program: &ProgramInfo, note: &str| {
        let level = program.format_level.map(|level| level.to_string());
        table.add_row([
            kind,
            &program.id.to_string(),
            &program.name,
            program.version.as_deref().filter(|version| !version.is_empty()).unwrap_or("-"),
            level.as_deref().unwrap_or("-"),
            note,
        ]);
    };
    for node in &info.nodes {
        let note = match (info.behind.contains(&node.id), &node.version) {
            (false, _) => "",
            (true, Some(_)) => "older",
            (true, None) => "does not answer",
        };
        add("node", node, note);
    }
    for client in &info.clients {
        let note = match client.format_level {
            Some(level) if level < info.format_level => "older; it may go on",
            Some(_) => "",
            None => "not connected to the owner of the metadata",
        };
        add("client", client, note);
    }
    let next = match info.finalize_to {
        Some(level) => format!(
            "level {level} may be written after `forebay upgrade finalize`; then there is no way back"
        ),
        None if info.newest_level > info.format_level => {
            format!("level {} waits for the nodes that are behind", info.newest_level)
        }
        None => "there is no newer one".to_owned(),
    };
    format!("{table}\nformats of level {} are written; {next}", info.format_level)
}
