//! Recounts a whole ledger: the tree, links, sums, and references to extents.

use std::collections::{BTreeMap, BTreeSet};

use wire::meta::{Content, FileKind};
use wire::tier::{Stage, StageStat, TierMode, TierStat};

use super::*;
use crate::values::{
    Aged, BlobRecord, Dentry, ExtentUse, LooseBlob, Orphan, Part, Piece, PieceContent, Residence, TierState,
    Usage, Value, stage_in_key,
};

#[derive(Default)]
struct Tables {
    inodes: BTreeMap<u64, Inode>,
    dentries: Vec<(u64, Vec<u8>, Dentry)>,
    /// By map and offset.
    pieces: BTreeMap<(u64, u64), Piece>,
    uses: BTreeMap<u64, ExtentUse>,
    frees: Vec<u64>,
    purges: BTreeSet<u64>,
    orphans: BTreeMap<u64, Orphan>,
    sessions: BTreeSet<u64>,
    xattr_owners: BTreeSet<u64>,
    /// By upload and number.
    parts: BTreeMap<(u64, u16), Part>,
    uploads: BTreeSet<u64>,
    usage: Usage,
    residences: BTreeMap<u64, Residence>,
    /// By stage, time and extent.
    aged: BTreeMap<(u8, u64, u64), Aged>,
    blobs: BTreeMap<u64, BlobRecord>,
    /// By blob and extent.
    in_blobs: BTreeMap<(u64, u64), u64>,
    loose: BTreeMap<u64, LooseBlob>,
    tier: TierState,
}

fn first(key: &[u8]) -> u64 {
    u64::from_be_bytes(key[5..13].try_into().unwrap())
}

fn tables(dump: &Dump) -> Tables {
    let mut tables = Tables::default();
    for (key, value) in dump {
        match key[4] {
            b'I' => drop(tables.inodes.insert(first(key), Inode::decode(value).unwrap())),
            b'D' => {
                let name = Keys::name_of_dentry(key).to_vec();
                tables.dentries.push((first(key), name, Dentry::decode(value).unwrap()));
            }
            b'M' => {
                let at = (first(key), Keys::off_of_piece(key));
                tables.pieces.insert(at, Piece::decode(value).unwrap());
            }
            b'E' => drop(tables.uses.insert(first(key), ExtentUse::decode(value).unwrap())),
            b'F' => tables.frees.push(Keys::free_of_key(key).1.0),
            b'P' => drop(tables.purges.insert(first(key))),
            b'O' => drop(tables.orphans.insert(first(key), Orphan::decode(value).unwrap())),
            b'C' => drop(tables.sessions.insert(first(key))),
            b'A' => drop(tables.uploads.insert(Keys::upload_of_key(key).1)),
            b'G' => {
                let at = (first(key), Keys::number_of_part(key));
                tables.parts.insert(at, Part::decode(value).unwrap());
            }
            b'X' => drop(tables.xattr_owners.insert(first(key))),
            b'L' => drop(tables.residences.insert(first(key), Residence::decode(value).unwrap())),
            b'T' => {
                let (written_s, id) = Keys::aged_of_key(key);
                let at = (key[5], written_s, id.0);
                tables.aged.insert(at, Aged::decode(value).unwrap());
            }
            b'B' => drop(tables.blobs.insert(first(key), BlobRecord::decode(value).unwrap())),
            b'Y' => {
                let at = (first(key), Keys::extent_in_blob(key).0);
                tables.in_blobs.insert(at, u64::decode(value).unwrap());
            }
            b'Z' => drop(tables.loose.insert(first(key), LooseBlob::decode(value).unwrap())),
            b'V' if key.ends_with(b"tier") => tables.tier = TierState::decode(value).unwrap(),
            b'V' if key.ends_with(b"usage") => tables.usage = Usage::decode(value).unwrap(),
            _ => {}
        }
    }
    tables
}

/// Checks all invariants that hold between batches. `issued` are the extents that were ever committed and not reported
/// as deleted.
pub(super) fn audit(dump: &Dump, issued: &BTreeSet<u64>) {
    let tables = tables(dump);
    audit_tree(&tables);
    audit_orphans(&tables);
    audit_maps(&tables);
    audit_extents(&tables, issued);
    audit_tiers(&tables);
}

/// I14: one rooted tree; link counts and directory sizes are right.
fn audit_tree(tables: &Tables) {
    let mut names: BTreeMap<u64, u32> = BTreeMap::new();
    let mut entries: BTreeMap<u64, (u64, u32)> = BTreeMap::new();
    let mut seen = BTreeSet::new();
    for (dir, name, dentry) in &tables.dentries {
        let target = &tables.inodes[&dentry.ino.0];
        assert_eq!(target.attr.kind, dentry.kind);
        assert_eq!(tables.inodes[dir].attr.kind, FileKind::Directory);
        assert!(seen.insert((*dir, name.clone())), "one name twice: {dir} {name:?}");
        *names.entry(dentry.ino.0).or_default() += 1;
        let count = entries.entry(*dir).or_default();
        count.0 += 1;
        if dentry.kind == FileKind::Directory {
            count.1 += 1;
            assert_eq!(target.parent.0, *dir, "parent of {}", dentry.ino);
        }
    }
    for (ino, inode) in &tables.inodes {
        let found = names.get(ino).copied().unwrap_or(0);
        if inode.attr.kind != FileKind::Directory {
            assert_eq!(inode.attr.nlink, found, "links of {ino}");
            continue;
        }
        let (count, subdirs) = entries.get(ino).copied().unwrap_or_default();
        assert_eq!(inode.attr.size, count, "entries of {ino}");
        assert!(!inode.is_implicit() || count > 0, "implicit directory {ino} is empty");
        assert!(!inode.is_implicit() || inode.object.is_none(), "directory object {ino} is implicit");
        if inode.attr.nlink == 0 {
            assert_eq!((found, count), (0, 0), "removed directory {ino}");
            continue;
        }
        assert_eq!(inode.attr.nlink, 2 + subdirs, "links of directory {ino}");
        assert_eq!(found, u32::from(*ino != Ino::ROOT.0), "names of directory {ino}");
        let mut at = *ino;
        for _ in 0..tables.inodes.len() {
            at = tables.inodes[&at].parent.0;
        }
        assert_eq!(at, Ino::ROOT.0, "directory {ino} hangs on the root");
    }
}

fn audit_orphans(tables: &Tables) {
    for (ino, inode) in &tables.inodes {
        assert_eq!(inode.attr.nlink == 0, tables.orphans.contains_key(ino), "orphan {ino}");
    }
    for (ino, orphan) in &tables.orphans {
        assert!(tables.inodes.contains_key(ino), "orphan {ino} has an inode");
        let known = orphan.sessions.iter().all(|session| tables.sessions.contains(&session.0));
        assert!(known && !orphan.sessions.is_empty(), "orphan {ino} is kept by living sessions");
    }
    for ino in &tables.xattr_owners {
        assert!(tables.inodes.contains_key(ino), "attributes of {ino} outlived it");
    }
}

/// Bytes of data pieces of a map in a range, and of the maps to which it refers. Notes the latter as owned.
fn stored_in(tables: &Tables, map: u64, (from, to): (u64, u64), owned: &mut BTreeSet<u64>) -> u64 {
    let mut stored = 0;
    for ((_, off), piece) in tables.pieces.range((map, from)..(map, to)) {
        assert!(off + piece.len <= to, "a piece of map {map} at {off} belongs to two");
        match piece.content {
            PieceContent::Data(_) => stored += piece.len,
            PieceContent::Map { map, off } => {
                owned.insert(map.0);
                stored += stored_in(tables, map.0, (off, off + piece.len), owned);
            }
        }
    }
    stored
}

/// Every piece belongs to a file or a part, or waits for its purge; stored bytes are their sum.
fn audit_maps(tables: &Tables) {
    let mut ends: BTreeMap<u64, u64> = BTreeMap::new();
    for ((map, off), piece) in &tables.pieces {
        let end = ends.insert(*map, off + piece.len).unwrap_or(0);
        assert!(end <= *off, "pieces overlap: map={map} off={off}");
    }
    let mut total = Usage::default();
    let mut owned = BTreeSet::new();
    let all = (0, u64::MAX);
    for (ino, inode) in &tables.inodes {
        total.inodes += 1;
        total.stored_bytes += inode.attr.stored_bytes;
        let Some(map) = inode.map() else {
            assert_eq!(inode.attr.stored_bytes, 0);
            continue;
        };
        assert!(owned.insert(map.0), "map {map} has two owners");
        let stored = stored_in(tables, map.0, all, &mut owned);
        assert_eq!(inode.attr.stored_bytes, stored, "stored bytes of {ino}");
        let end = ends.get(&map.0).copied().unwrap_or(0);
        assert!(end <= inode.attr.size, "content of {ino} ends with the file");
    }
    for ((upload, number), part) in &tables.parts {
        assert!(tables.uploads.contains(upload), "part {number} of upload {upload}, which is gone");
        assert!(owned.insert(part.map.0), "map {} of a part has two owners", part.map);
        assert_eq!(part.stored_bytes, stored_in(tables, part.map.0, all, &mut owned), "part {number}");
        total.stored_bytes += part.stored_bytes;
    }
    assert_eq!(tables.usage, total);
    for map in &tables.purges {
        assert!(!owned.contains(map), "map {map} in use is to be removed");
        stored_in(tables, *map, all, &mut owned);
    }
    for map in ends.keys() {
        assert!(owned.contains(map) || tables.purges.contains(map), "map {map} belongs to nobody");
    }
}

/// Reference counts of extents are right, and extents without a reference are in table F exactly once.
fn audit_extents(tables: &Tables, issued: &BTreeSet<u64>) {
    let mut uses: BTreeMap<u64, (ExtentUse, u64)> = BTreeMap::new();
    for piece in tables.pieces.values() {
        if let PieceContent::Data(Content::Extent(extent)) = &piece.content {
            let none = (ExtentUse { refs: 0, live_bytes: 0 }, u64::from(extent.extent_len));
            let (count, _) = uses.entry(extent.id.0).or_insert(none);
            count.refs += 1;
            count.live_bytes += piece.len;
        }
    }
    for (id, (count, extent_len)) in &uses {
        let whole = ExtentUse { refs: 1, live_bytes: *extent_len };
        assert_eq!(tables.uses.get(id).copied().unwrap_or(whole), *count, "uses of extent {id}");
    }
    for id in tables.uses.keys() {
        assert!(uses.contains_key(id), "extent {id} is counted but not used");
    }
    // An extent that only a blob holds is in use, and its shards may wait for deletion.
    let away = |id: &u64| tables.residences.get(id).is_some_and(|found| found.stage == Stage::Tiered);
    let on_drives = uses.keys().filter(|id| !away(id));
    let mut accounted: Vec<u64> = on_drives.chain(&tables.frees).copied().collect();
    accounted.sort_unstable();
    assert_eq!(accounted, issued.iter().copied().collect::<Vec<_>>(), "each extent is in use or free, once");
}

/// I20, I21: the tables of tiering agree, and their sums are right.
fn audit_tiers(tables: &Tables) {
    let used: BTreeMap<u64, u64> = tables
        .pieces
        .values()
        .filter_map(|piece| match &piece.content {
            PieceContent::Data(Content::Extent(extent)) => Some((extent.id.0, u64::from(extent.extent_len))),
            _ => None,
        })
        .collect();
    let mut stat =
        TierStat { mode: tables.tier.stat.mode, queueing: tables.tier.stat.queueing, ..TierStat::default() };
    let (mut aged, mut blobs) = (0, BTreeMap::<u64, (u32, u64)>::new());
    for (id, residence) in &tables.residences {
        let Residence { stage, written_s, place, blob, .. } = *residence;
        assert_eq!(
            used.get(id),
            Some(&u64::from(place.extent_len)),
            "residence of extent {id}, which nothing refers to"
        );
        let sum = match stage {
            Stage::Queued => &mut stat.queued,
            Stage::Both => &mut stat.both,
            Stage::Tiered => &mut stat.away,
        };
        *sum = StageStat { extents: sum.extents + 1, bytes: sum.bytes + u64::from(place.extent_len) };
        if stage != Stage::Tiered {
            aged += 1;
            assert_eq!(
                tables.aged.get(&(stage_in_key(stage), written_s, *id)),
                Some(&residence.aged()),
                "age of extent {id}"
            );
        }
        assert_eq!(blob.is_some(), stage != Stage::Queued);
        let Some((serial, off)) = blob else { continue };
        assert_eq!(
            tables.in_blobs.get(&(serial, *id)),
            Some(&u64::from(off)),
            "extent {id} in blob {serial}"
        );
        assert!(off < tables.blobs[&serial].bytes);
        let live =
            tables.uses.get(id).map_or(u64::MAX, |used| used.live_bytes).min(u64::from(place.extent_len));
        let sum = blobs.entry(serial).or_default();
        *sum = (sum.0 + 1, sum.1 + live);
    }
    assert_eq!(aged, tables.aged.len());
    assert_eq!(blobs.values().map(|sum| sum.0 as usize).sum::<usize>(), tables.in_blobs.len());
    for (serial, blob) in &tables.blobs {
        assert_eq!(
            blobs.get(serial),
            Some(&(blob.extents, blob.live_bytes)),
            "what is alive of blob {serial}"
        );
        assert!(!tables.loose.contains_key(serial), "blob {serial} is in use and to be deleted");
        stat.blobs += 1;
        stat.stored_bytes += u64::from(blob.bytes);
        stat.live_bytes += blob.live_bytes;
    }
    for loose in tables.loose.values().filter(|loose| loose.session != SessionId(0)) {
        assert!(tables.sessions.contains(&loose.session.0), "a blob is being stored by nobody");
    }
    assert_eq!(tables.tier.stat, stat);
    assert!(stat.mode != TierMode::Off || tables.residences.is_empty());
}
