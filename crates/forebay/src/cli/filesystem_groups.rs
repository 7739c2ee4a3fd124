//! `fs group`.

use admin::{FilesystemGroupInfo, SetFilesystemGroup};
use anyhow::{Result, bail};
use base::units::format_duration;
use comfy_table::Table;

use super::args::{FsGroupCommand, OneFsGroupArgs};
use super::ask;
use super::output::{print, table};

pub(super) fn group(command: FsGroupCommand) -> Result<()> {
    match command {
        FsGroupCommand::Create { dir, name, retention, tiering_cue, json } => {
            let settings = SetFilesystemGroup { retention_s: retention, cue_s: tiering_cue };
            let group =
                ask(&dir, |client| async move { client.add_filesystem_group(&name, &settings).await })?;
            print(json.into(), &group, |group| {
                format!("filesystem group {} is created: {}", group.name, times(group))
            })
        }
        FsGroupCommand::List { dir, json } => {
            let groups = ask(&dir, |client| async move { client.filesystem_groups().await })?;
            print(json.into(), &groups, |groups| group_table(groups).to_string())
        }
        FsGroupCommand::Show(OneFsGroupArgs { dir, name, json }) => {
            let groups = ask(&dir, |client| async move { client.filesystem_groups().await })?;
            let Some(group) = groups.into_iter().find(|group| group.name == name) else {
                bail!(
                    "no such filesystem group: name={name} (see `forebay fs group list {}`)",
                    dir.display()
                );
            };
            print(json.into(), &group, |group| group_table(std::slice::from_ref(group)).to_string())
        }
        FsGroupCommand::Update { dir, name, retention, tiering_cue, json } => {
            let settings = SetFilesystemGroup { retention_s: retention, cue_s: tiering_cue };
            let group =
                ask(&dir, |client| async move { client.update_filesystem_group(&name, &settings).await })?;
            print(json.into(), &group, |group| {
                format!("filesystem group {} is changed: {}", group.name, times(group))
            })
        }
        FsGroupCommand::Remove(OneFsGroupArgs { dir, name, json }) => {
            let group = ask(&dir, |client| async move { client.remove_filesystem_group(&name).await })?;
            print(json.into(), &group, |group| format!("filesystem group {} is removed", group.name))
        }
    }
}

fn times(group: &FilesystemGroupInfo) -> String {
    format!(
        "copied after {}, from the drives after {}",
        format_duration(group.cue_s),
        format_duration(group.retention_s)
    )
}

fn group_table(groups: &[FilesystemGroupInfo]) -> Table {
    let mut table = table(&["GROUP", "RETENTION", "CUE", "FILESYSTEMS"]);
    for group in groups {
        let filesystems =
            if group.filesystems.is_empty() { "-".to_owned() } else { group.filesystems.join(" ") };
        table.add_row([
            group.name.clone(),
            format_duration(group.retention_s),
            format_duration(group.cue_s),
            filesystems,
        ]);
    }
    table
}
