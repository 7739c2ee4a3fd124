//! `mount`, `umount`, `fs` and `why`.

use std::path::{Path, PathBuf};

use admin::{
    CreateFilesystem, FilesystemInfo, MountRequest, MoveFilesystem, Placement, SetLimits, SetPlacement,
    SetProfile, WhyInfo,
};
use anyhow::{Context, Result, bail};
use comfy_table::Table;
use layout::Profile;
use posix::fuse::MountedFilesystem;
use serde::Serialize;

use super::args::{LimitArgs, PlacementArg};
use super::output::{Format, bytes, print, table};
use super::progress::while_shown;
use super::{absolute, ask, env, picture, run_here};
use crate::guest::Guest;
use crate::node::NodeDir;

pub(super) fn filesystem_table(filesystems: &[FilesystemInfo]) -> Table {
    let mut table = table(&[
        "FILESYSTEM",
        "GROUP",
        "PROFILE",
        "USED",
        "FREE",
        "TOTAL",
        "ON SSD",
        "INODES",
        "MOUNT",
        "PROTECTION",
    ]);
    for filesystem in filesystems {
        table.add_row([
            filesystem.name.clone(),
            filesystem.group.clone(),
            profile(filesystem),
            bytes(filesystem.used_bytes),
            bytes(filesystem.free_bytes),
            bytes(filesystem.total_bytes),
            on_ssd(filesystem),
            filesystem.inodes.to_string(),
            filesystem.mount.clone().unwrap_or_else(|| "-".to_owned()),
            filesystem.protection.clone(),
        ]);
    }
    table
}

/// How new data is protected, and where it goes if not everywhere.
fn profile(filesystem: &FilesystemInfo) -> String {
    let mut text = filesystem.profile.clone();
    if filesystem.placement == Placement::Local {
        text += ", local";
    }
    if !filesystem.nodes.is_empty() {
        let nodes: Vec<String> = filesystem.nodes.iter().map(u32::to_string).collect();
        text += &format!(", nodes {}", nodes.join(" "));
    }
    text
}

/// Content on drives, and its limit.
fn on_ssd(filesystem: &FilesystemInfo) -> String {
    let used = bytes(filesystem.ssd_used_bytes);
    filesystem.ssd_bytes.map_or(used.clone(), |quota| format!("{used} of {}", bytes(quota)))
}

/// Table of filesystems, and lines about those with an object store.
fn listing(filesystems: &[FilesystemInfo]) -> String {
    let tiers = filesystems.iter().filter_map(|filesystem| filesystem.tier.as_ref());
    format!("{}\n{}", filesystem_table(filesystems), tiers.map(super::tiers::line).collect::<String>())
}

fn show_one(format: Format, info: &FilesystemInfo) -> Result<()> {
    print(format, info, |info| listing(std::slice::from_ref(info)))
}

pub(super) fn mount(
    dir: &Path,
    path: Option<PathBuf>,
    options: Option<String>,
    name: &str,
    format: Format,
) -> Result<()> {
    let path = path.as_deref().map(absolute).transpose()?;
    if let Some(guest) = Guest::load(&env(), &NodeDir::new(dir))? {
        let (env, dir) = (env(), NodeDir::new(dir));
        let place = (path.map(PathBuf::from), options);
        let mounted = run_here(while_shown("mounting", guest.mount(&env, &dir, name, place)))?;
        let shown = MountedHere { name, mount: &mounted };
        return print(format, &shown, |shown| {
            format!("{} is mounted at {}", shown.name, shown.mount.display())
        });
    }
    let info = ask(dir, |client| async move { client.mount(name, &MountRequest { path, options }).await })?;
    print(format, &info, |info| {
        format!("{} is mounted at {}", info.name, info.mount.as_deref().unwrap_or("-"))
    })
}

/// What `mount --json` prints at a client.
#[derive(Serialize)]
struct MountedHere<'a> {
    name: &'a str,
    mount: &'a Path,
}

pub(super) fn unmount(dir: &Path, name: &str, format: Format) -> Result<()> {
    if let Some(guest) = Guest::load(&env(), &NodeDir::new(dir))? {
        let (env, dir) = (env(), NodeDir::new(dir));
        run_here(while_shown("unmounting", guest.unmount(&env, &dir, name)))?;
        return print(format, &name, |name| format!("{name} is unmounted"));
    }
    let info = ask(dir, |client| async move { client.unmount(name).await })?;
    print(format, &info, |info| format!("{} is unmounted", info.name))
}

pub(super) fn create(dir: &Path, request: &CreateFilesystem, format: Format) -> Result<()> {
    let info = ask(dir, |client| async move { client.create_filesystem(request).await })?;
    show_one(format, &info)
}

/// Changes of a filesystem.
pub(super) struct Changes {
    pub(super) limits: LimitArgs,
    pub(super) group: Option<String>,
    pub(super) placement: Option<PlacementArg>,
    pub(super) profile: Option<Profile>,
}

/// Applies the changes, the more likely refusals first. If one is refused, the earlier ones stay.
pub(super) fn set(dir: &Path, name: &str, changes: Changes, format: Format) -> Result<()> {
    let Changes { limits: LimitArgs { size, ssd }, group, placement, profile } = changes;
    let mut info = None;
    if size.is_some() || ssd.is_some() {
        let request = SetLimits { size_bytes: size, ssd_bytes: ssd };
        info = Some(ask(dir, |client| async move { client.set_limits(name, &request).await })?);
    }
    if let Some(group) = group {
        let request = MoveFilesystem { group };
        let moved = ask(dir, |client| async move { client.move_filesystem(name, &request).await });
        info = Some(if info.is_some() {
            moved.context("limits are changed, the group is not")?
        } else {
            moved?
        });
    }
    if let Some(placement) = placement {
        let request = SetPlacement { placement: placement.into() };
        let set = ask(dir, |client| async move { client.set_placement(name, &request).await });
        info = Some(if info.is_some() { set.context("the placement is not changed")? } else { set? });
    }
    if let Some(profile) = profile {
        let request = SetProfile { profile: profile.to_string() };
        let set = ask(dir, |client| async move { client.set_profile(name, &request).await });
        info = Some(if info.is_some() { set.context("all but the profile is changed")? } else { set? });
    }
    let info = info.context("nothing to change: give --size, --ssd, --group, --placement or --profile")?;
    show_one(format, &info)
}

pub(super) fn list(dir: &Path, format: Format) -> Result<()> {
    let status = picture(dir)?;
    print(format, &status.filesystems, |filesystems| listing(filesystems))
}

pub(super) fn show(dir: &Path, name: &str, format: Format) -> Result<()> {
    let status = picture(dir)?;
    match status.filesystems.iter().find(|filesystem| filesystem.name == name) {
        Some(info) => show_one(format, info),
        None => bail!("no such filesystem: name={name} (see `forebay fs list {}`)", dir.display()),
    }
}

/// A Forebay mount: the node's directory, the filesystem, and the path below the mount point.
pub(super) struct Mounted {
    pub(super) dir: PathBuf,
    pub(super) filesystem: String,
    pub(super) inside: String,
}

/// All Forebay mounts.
pub(super) struct Mounts(Vec<MountedFilesystem>);

impl Mounts {
    pub(super) fn read() -> Result<Self> {
        posix::fuse::forebay_mounts().map(Self).context("reading the mount table")
    }

    /// Finds the mount that holds a path. Its source in the mount table is `DIR#FILESYSTEM`.
    pub(super) fn find(&self, path: &Path) -> Result<Mounted> {
        let path = PathBuf::from(absolute(path)?);
        let holding = self.0.iter().filter(|mount| path.starts_with(&mount.path));
        // Of nested mounts the innermost counts; of mounts at one place the last.
        let best = holding.max_by_key(|mount| mount.path.as_os_str().len());
        let found = best.and_then(|mount| {
            let (dir, filesystem) = mount.source.rsplit_once('#')?;
            let inside = path.strip_prefix(&mount.path).ok()?.to_str()?;
            Some(Mounted {
                dir: PathBuf::from(dir),
                filesystem: filesystem.to_owned(),
                inside: format!("/{inside}"),
            })
        });
        found.with_context(|| format!("{} is not on a mounted Forebay filesystem", path.display()))
    }
}

/// Makes all that was written to the filesystem durable: first what the kernel has of mapped files, then what the node has.
pub(super) fn sync(path: &Path) -> Result<()> {
    let mounted = Mounts::read()?.find(path)?;
    let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::NONBLOCK;
    let file = rustix::fs::open(path, flags, rustix::fs::Mode::empty())
        .with_context(|| format!("opening {}", path.display()))?;
    rustix::fs::syncfs(&file).with_context(|| format!("writing out {}", path.display()))?;
    let name = mounted.filesystem.as_str();
    let dir = NodeDir::new(&mounted.dir);
    if let Some(guest) = Guest::load(&env(), &dir)? {
        return run_here(while_shown("writing out", guest.sync(&env(), &dir, name)));
    }
    ask(&mounted.dir, |client| async move { client.sync(name).await })
}

pub(super) fn why(path: &Path, format: Format) -> Result<()> {
    let mounted = Mounts::read()?.find(path)?;
    let (name, inside) = (mounted.filesystem.as_str(), mounted.inside.as_str());
    let why = ask(&mounted.dir, |client| async move { client.why(name, inside).await })?;
    print(format, &why, explain)
}

fn explain(why: &WhyInfo) -> String {
    let mut table =
        table(&["OFFSET", "LENGTH", "KIND", "EXTENT", "N/K", "GROUP", "DRIVES (shard order)", "STATE"]);
    let number = |number: Option<u64>| number.map_or("-".to_owned(), |number| number.to_string());
    for extent in &why.extents {
        let drives: Vec<String> = extent
            .shards
            .iter()
            .map(|shard| {
                if shard.state == "up" {
                    shard.drive.to_string()
                } else {
                    format!("{}({})", shard.drive, shard.state)
                }
            })
            .collect();
        table.add_row([
            extent.offset.to_string(),
            extent.len.to_string(),
            extent.kind.clone(),
            number(extent.extent),
            extent.shape.clone().unwrap_or_else(|| "-".to_owned()),
            number(extent.group.map(u64::from)),
            match extent.kind.as_str() {
                "object_store" => "in the object store".to_owned(),
                _ if drives.is_empty() => "in the ledger".to_owned(),
                _ => drives.join(" "),
            },
            extent.state.clone(),
        ]);
    }
    let mut more = if why.truncated { "\n(more pieces follow)" } else { "" }.to_owned();
    for extent in &why.extents {
        if let Some(reason) = &extent.reason {
            more.push_str(&format!("\n  ! offset {}: cannot be read: {reason}", extent.offset));
        }
    }
    if why.extents.iter().any(|extent| extent.reason.is_some()) {
        more.push_str("\n  restore the file from a copy, or delete it");
    }
    format!(
        "{}  filesystem={} inode={} kind={} size={} profile={} state={}\n\n{table}{more}",
        why.path, why.filesystem, why.inode, why.kind, why.size, why.profile, why.state
    )
}
