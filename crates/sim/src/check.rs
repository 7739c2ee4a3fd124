//! Checks of a node at rest: the state of the ledger, and the drives against the ledger.

mod blobs;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::sync::Arc;

use base::{DriveId, ExtentId, Ino, ShardIndex};
use layout::DriveState;
use meta::keys::Keys;
use meta::state::State;
use meta::values::{BlobRecord, Dentry, ExtentUse, Inode, Piece, PieceContent, Residence, Usage, Value};
use wire::drive::DriveService;
use wire::meta::{Content, ExtentRef, FileKind};
use wire::tier::Stage;

use crate::disks::SimDrive;
use crate::node::{Drives, LEDGER};
use crate::scenario::Scenario;
use crate::world::World;

use blobs::{Shards, TierTables, run_fsck};

const TABLE_AT: usize = 4;
/// Extent ids that a session gets per request.
const EXTENT_RANGE: u64 = 65_536;
/// Longest extent that is stored as copies.
const COPIES_BYTES_MAX: u32 = 256 << 10;

/// All tables of the ledger's state.
#[derive(Default)]
struct Tables {
    inodes: BTreeMap<Ino, Inode>,
    dentries: Vec<(Ino, Vec<u8>, Dentry)>,
    /// Pieces by map id.
    pieces: BTreeMap<u64, Vec<(u64, Piece)>>,
    uses: BTreeMap<ExtentId, ExtentUse>,
    owed: BTreeSet<(DriveId, ExtentId)>,
    free: BTreeSet<ExtentId>,
    /// First ids of the ranges that may hold orphans.
    ranges: BTreeSet<ExtentId>,
    purges: BTreeSet<u64>,
    orphans: BTreeSet<Ino>,
    usage: Usage,
    tier: TierTables,
    damaged: Vec<String>,
}

fn u64_at(key: &[u8], at: usize) -> u64 {
    key.get(at..at + 8).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_be_bytes)
}

impl Tables {
    fn read(state: &dyn State) -> Result<Self, String> {
        let mut tables = Self::default();
        let all = (LEDGER.0.to_be_bytes().to_vec(), (LEDGER.0 + 1).to_be_bytes().to_vec());
        let visited = state.scan(&all, &mut |key, value| {
            if tables.take(key, value).is_none() {
                tables.damaged.push(format!("table {} key {key:?}", char::from(key[TABLE_AT])));
            }
            ControlFlow::Continue(())
        });
        visited.map_err(|error| error.to_string())?;
        Ok(tables)
    }

    fn take(&mut self, key: &[u8], value: &[u8]) -> Option<()> {
        match key[TABLE_AT] {
            b'I' => {
                let inode = Inode::decode(value).ok()?;
                self.inodes.insert(inode.attr.ino, inode);
            }
            b'D' => {
                let dentry = Dentry::decode(value).ok()?;
                self.dentries.push((Ino(u64_at(key, 5)), Keys::name_of_dentry(key).to_vec(), dentry));
            }
            b'M' => {
                let piece = Piece::decode(value).ok()?;
                self.pieces.entry(u64_at(key, 5)).or_default().push((Keys::off_of_piece(key), piece));
            }
            b'E' => drop(self.uses.insert(ExtentId(u64_at(key, 5)), ExtentUse::decode(value).ok()?)),
            b'W' => drop(self.owed.insert(Keys::owed_of_key(key))),
            b'R' => drop(self.ranges.insert(ExtentId(Keys::number_in_key(key)))),
            b'F' => drop(self.free.insert(Keys::free_of_key(key).1)),
            b'P' => drop(self.purges.insert(Keys::map_of_purge(key).0)),
            b'O' => drop(self.orphans.insert(Keys::ino_of_orphan(key))),
            b'L' => {
                let id = ExtentId(Keys::number_in_key(key));
                self.tier.residences.insert(id, Residence::decode(value).ok()?);
            }
            b'B' => {
                let blob = BlobRecord::decode(value).ok()?;
                self.tier.blobs.insert(Keys::number_in_key(key), blob);
            }
            b'Z' => drop(self.tier.loose.insert(Keys::number_in_key(key))),
            b'V' if key.ends_with(b"usage") => self.usage = Usage::decode(value).ok()?,
            _ => {}
        }
        Some(())
    }

    /// Whether the extent may be an orphan that no search has covered yet.
    fn is_in_range(&self, id: ExtentId) -> bool {
        let first = self.ranges.range(..=id).next_back();
        first.is_some_and(|first| id.0 - first.0 < EXTENT_RANGE)
    }

    /// Whether the extent is in a blob only.
    fn is_away(&self, id: ExtentId) -> bool {
        self.tier.residences.get(&id).is_some_and(|residence| residence.stage == Stage::Tiered)
    }

    /// I14: the directories form a tree, and link counts are right.
    fn check_tree(&self, wrong: &mut Vec<String>) {
        let mut names: BTreeMap<Ino, u32> = BTreeMap::new();
        let (mut subdirs, mut sizes): (BTreeMap<Ino, u32>, BTreeMap<Ino, u64>) = Default::default();
        for (dir, name, dentry) in &self.dentries {
            let name = String::from_utf8_lossy(name);
            *names.entry(dentry.ino).or_default() += 1;
            *sizes.entry(*dir).or_default() += 1;
            let Some(inode) = self.inodes.get(&dentry.ino) else {
                wrong.push(format!("I14: {dir}/{name} names {}, which does not exist", dentry.ino));
                continue;
            };
            if inode.attr.kind != dentry.kind {
                wrong.push(format!("I14: {dir}/{name} has another kind than {}", dentry.ino));
            }
            if inode.attr.kind == FileKind::Directory {
                *subdirs.entry(*dir).or_default() += 1;
                if inode.parent != *dir {
                    wrong.push(format!("I14: {} is in {dir} but its parent is {}", dentry.ino, inode.parent));
                }
            }
            if self.inodes.get(dir).is_none_or(|dir| dir.attr.kind != FileKind::Directory) {
                wrong.push(format!("I14: {dir}/{name} is in no directory"));
            }
        }
        for (ino, inode) in &self.inodes {
            let named = names.get(ino).copied().unwrap_or(0);
            let attr = &inode.attr;
            let nlink = match attr.kind {
                FileKind::Directory => 2 + subdirs.get(ino).copied().unwrap_or(0),
                _ => named,
            };
            if attr.nlink != nlink {
                wrong.push(format!("I14: inode {ino} has nlink {} and not {nlink}", attr.nlink));
            }
            if named == 0 && *ino != Ino::ROOT && !self.orphans.contains(ino) {
                wrong.push(format!("I14: inode {ino} has no name"));
            }
            if attr.kind == FileKind::Directory && attr.size != sizes.get(ino).copied().unwrap_or(0) {
                wrong.push(format!("I14: directory {ino} counts {} entries", attr.size));
            }
            if !self.reaches_root(*ino) {
                wrong.push(format!("I14: directory {ino} is not below the root"));
            }
        }
    }

    fn reaches_root(&self, ino: Ino) -> bool {
        let mut at = ino;
        for _ in 0..=self.inodes.len() {
            match self.inodes.get(&at) {
                Some(inode) if at != Ino::ROOT && inode.attr.kind == FileKind::Directory => at = inode.parent,
                _ => return at == Ino::ROOT || at == ino,
            }
        }
        false
    }

    /// I16: sums equal the sums of their parts. Returns the extents in use, with their references.
    fn check_maps(&self, wrong: &mut Vec<String>) -> BTreeMap<ExtentId, ExtentRef> {
        let (mut stored, mut owned) = (0, BTreeSet::new());
        let mut live: BTreeMap<ExtentId, (ExtentRef, ExtentUse)> = BTreeMap::new();
        for (ino, inode) in &self.inodes {
            let Some(map) = inode.map() else { continue };
            owned.insert(map.0);
            let pieces = self.pieces.get(&map.0).map(Vec::as_slice).unwrap_or_default();
            let sum: u64 = pieces.iter().map(|(_, piece)| piece.len).sum();
            stored += sum;
            if sum != inode.attr.stored_bytes {
                wrong.push(format!(
                    "I16: inode {ino} counts {} stored bytes of {sum}",
                    inode.attr.stored_bytes
                ));
            }
            if pieces.windows(2).any(|pair| pair[0].0 + pair[0].1.len > pair[1].0) {
                wrong.push(format!("I16: pieces of inode {ino} overlap"));
            }
            if pieces.last().is_some_and(|(off, piece)| off + piece.len > inode.attr.size) {
                wrong.push(format!("I16: inode {ino} has pieces behind its end"));
            }
            for (_, piece) in pieces {
                if let PieceContent::Data(Content::Extent(extent)) = &piece.content {
                    let none = ExtentUse { refs: 0, live_bytes: 0 };
                    let (_, used) = live.entry(extent.id).or_insert((*extent, none));
                    used.refs += 1;
                    used.live_bytes += piece.len;
                }
            }
        }
        for map in self.pieces.keys().filter(|map| !owned.contains(map) && !self.purges.contains(map)) {
            wrong.push(format!("I6: map {map} belongs to no inode"));
        }
        let expected = Usage { stored_bytes: stored, inodes: self.inodes.len() as u64 };
        if self.usage != expected {
            wrong.push(format!("I16: usage is {:?} and not {expected:?}", self.usage));
        }
        for (id, (extent, used)) in &live {
            let whole = ExtentUse { refs: 1, live_bytes: u64::from(extent.extent_len) };
            let counted = self.uses.get(id).copied().unwrap_or(whole);
            if counted != *used {
                wrong.push(format!("I5: extent {id} is counted as {counted:?} and used as {used:?}"));
            }
            if self.free.contains(id) && !self.is_away(*id) {
                wrong.push(format!("I5: extent {id} is in use and to be deleted"));
            }
        }
        live.into_iter().map(|(id, (extent, _))| (id, extent)).collect()
    }
}

/// Checks the state of a node at rest. Returns the violations.
pub(crate) async fn check(world: &World, state: Arc<dyn State>, drives: &Drives) -> Vec<String> {
    let tables = match Tables::read(&*state) {
        Ok(tables) => tables,
        Err(error) => return vec![format!("state cannot be read: {error}")],
    };
    let mut wrong: Vec<String> =
        tables.damaged.iter().map(|what| format!("state is damaged: {what}")).collect();
    tables.check_tree(&mut wrong);
    let live = tables.check_maps(&mut wrong);
    // The session of a client that died lasts for a day.
    let orphans =
        if world.promises().dead_clients.is_empty() { tables.orphans.clone() } else { BTreeSet::new() };
    for ino in &orphans {
        wrong.push(format!("I6: inode {ino} is kept though nobody has it open"));
    }
    for map in &tables.purges {
        wrong.push(format!("I6: map {map} is not purged"));
    }
    if tables.free.iter().next().is_some() && !world.is_faulty() {
        wrong.push(format!("I6: extents are not deleted: {:?}", tables.free));
    }
    let mut inventory = Shards::new();
    for (number, drive) in drives {
        if world.cluster().state(DriveId(*number)) == DriveState::Out {
            continue;
        }
        if world.scenario.scrubs {
            check_scrubbed(*number, drive, &live, &mut wrong).await;
        }
        let Ok(entries) = drive.list(None, usize::MAX).await else { continue };
        let entries = entries.into_iter().map(|entry| ((entry.key.extent, entry.key.shard.0), entry));
        inventory.insert(DriveId(*number), entries.collect());
    }
    tables.tier.check(world, &mut wrong);
    run_fsck(world, &*state, &inventory, &mut wrong);
    check_shards(world, &tables, &live, &inventory, &mut wrong);
    check_leaks(world, &tables, &live, &inventory, &mut wrong);
    wrong.truncate(20);
    wrong
}

/// I4: each shard of every live extent is on its drive, or owed.
fn check_shards(
    world: &World,
    tables: &Tables,
    live: &BTreeMap<ExtentId, ExtentRef>,
    inventory: &Shards,
    wrong: &mut Vec<String>,
) {
    let cluster = world.cluster();
    let map = cluster.map();
    let hurt = world.promises().hurt_drives.clone();
    let is_out = |id: &DriveId| cluster.state(*id) == DriveState::Out;
    for (id, extent) in live.iter().filter(|(id, _)| !tables.is_away(**id)) {
        let is_copies = extent.k == 1 && extent.extent_len <= COPIES_BYTES_MAX;
        if world.scenario.packs && !world.is_faulty() && !cluster.fits((extent.k, extent.n), is_copies) {
            wrong.push(format!(
                "extent {id} of {}/{} shards has another shape than new ones",
                extent.k, extent.n
            ));
        }
        let Some(group) = map.group(extent.pg) else {
            wrong.push(format!("I9: extent {id} is in group {}, which does not exist", extent.pg));
            continue;
        };
        for (shard, drive) in (0..extent.n).zip(group.members.iter().copied()) {
            if map.drives.iter().any(|out| is_out(&out.id) && tables.owed.contains(&(out.id, *id))) {
                continue;
            }
            let Some(entries) = inventory.get(&drive).filter(|_| !hurt.contains(&drive.0)) else { continue };
            if !cluster.may_use(drive) && !world.is_faulty() {
                wrong.push(format!("shard {shard} of extent {id} is on drive {drive} of a node that is not for the filesystem"));
            }
            if !entries.contains_key(&(*id, shard)) && !tables.owed.contains(&(drive, *id)) {
                wrong.push(format!("I4: shard {shard} of extent {id} is neither on drive {drive} nor owed"));
            }
        }
    }
}

/// No drive has a damaged shard: the scrub has found all of them, and repair has rewritten them.
async fn check_scrubbed(
    number: u32,
    drive: &SimDrive,
    live: &BTreeMap<ExtentId, ExtentRef>,
    wrong: &mut Vec<String>,
) {
    let mut after = None;
    // A drive that failed is not queried any more.
    while let Ok(step) = drive.scrub(after, u64::MAX).await {
        for key in step.bad.iter().filter(|key| live.contains_key(&key.extent)) {
            wrong.push(format!("drive {number} has damaged {key:?}"));
        }
        after = step.next;
        if after.is_none() {
            break;
        }
    }
}

/// I6: every shard on a drive belongs to a live extent. The remains of a crash were collected from closed ranges. A
/// drive that was away is skipped until it is back.
fn check_leaks(
    world: &World,
    tables: &Tables,
    live: &BTreeMap<ExtentId, ExtentRef>,
    inventory: &Shards,
    wrong: &mut Vec<String>,
) {
    if world.is_faulty() {
        return;
    }
    let hurt = world.promises().hurt_drives.clone();
    let victims_shards = world.promises().victims_shards.clone();
    // A flipped bit in a tombstone undoes the deletion on that drive.
    for (drive, entries) in inventory.iter().filter(|(drive, _)| !hurt.contains(&drive.0)) {
        for (id, shard) in entries.keys() {
            // Shards that a writer gives up while a drive is set aside stay until their range is closed: there, or where a
            // drain has moved them.
            let is_given_up = world.scenario.narrows && victims_shards.contains(&(*id, ShardIndex(*shard)));
            // So do those of a commit that was never answered.
            let Scenario { cuts, client_dies, .. } = world.scenario;
            if (is_given_up || cuts || client_dies) && tables.is_in_range(*id) {
                continue;
            }
            if (!live.contains_key(id) || tables.is_away(*id)) && !tables.free.contains(id) {
                wrong
                    .push(format!("I6: drive {drive} holds shard {shard} of extent {id}, which nobody uses"));
            }
        }
    }
}
