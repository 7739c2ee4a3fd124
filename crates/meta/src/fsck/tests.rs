//! Damages a sound ledger in every way and expects the right finding.

use std::collections::BTreeMap;

use base::{DriveUuid, Epoch, ExtentId, Ino, MapId, PgId, Seq, SessionId, ShardIndex};
use layout::{DriveState, MapDrive, Place, PlacementGroup, Rebuilding};
use proptest::prelude::*;
use wire::damage::{DamageSums, LossCause};
use wire::drive::{ShardKey, ShardShape};
use wire::meta::{Attr, Content, ExtentRef, FileKind};
use wire::tier::{Origin, Stage, StageStat, TierMode, TierStat};

use super::*;
use crate::batch::Batch;
use crate::log::{LedgerLog, MemLog};
use crate::state::{Applied, MemState, Overlaid};
use crate::values::{
    BlobRecord, COMPOSED_MAP, Dentry, ExtentPlace, ExtentUse, IdRange, Inode, LooseBlob, LostRecord,
    MapSegment, ObjectRecord, Orphan, Part, Piece, PieceContent, RangeState, Residence, TierState, Upload,
    Usage, stage_in_key,
};

const LEDGER: LedgerId = LedgerId(1);
const KEYS: fn() -> Keys = || Keys::new(LEDGER);

/// A ledger and drives that a test can damage.
#[derive(Default)]
struct World {
    pairs: BTreeMap<Vec<u8>, Vec<u8>>,
    shards: BTreeMap<DriveId, Vec<(u64, u8)>>,
    down: Vec<DriveId>,
    rebuilding: Option<Rebuilding>,
}

impl Inventory for World {
    fn drives(&self) -> Vec<DriveId> {
        self.shards.keys().copied().filter(|drive| !self.down.contains(drive)).collect()
    }

    fn visit(
        &self,
        drive: DriveId,
        ledger: LedgerId,
        (from, to): (u64, u64),
        visit: &mut dyn FnMut(ShardEntry),
    ) -> Result<(), String> {
        for (extent, shard) in self.shards.get(&drive).into_iter().flatten().copied() {
            if (from..to).contains(&extent) {
                let key = ShardKey { ledger, extent: ExtentId(extent), shard: ShardIndex(shard) };
                let shape = ShardShape { pg: PgId(0), k: 2, m: 1, extent_len: 8192 };
                visit(ShardEntry { key, shape, len_bytes: 4096 });
            }
        }
        Ok(())
    }
}

fn inode(
    ino: u64,
    kind: FileKind,
    nlink: u32,
    size: u64,
    parent: u64,
    map: Option<u64>,
    stored: u64,
) -> Inode {
    let attr = Attr {
        ino: Ino(ino),
        kind,
        mode: 0o755,
        uid: 0,
        gid: 0,
        nlink,
        rdev: 0,
        size,
        stored_bytes: stored,
        atime_ns: 0,
        mtime_ns: 0,
        ctime_ns: 0,
        btime_ns: 0,
        data_ver: 1,
        attr_ver: 1,
        guard: wire::guard::Guard::default(),
    };
    let segment = |map| MapSegment { file_off: 0, len: 1 << 60, map: MapId(map), map_off: 0 };
    Inode {
        attr,
        flags: 0,
        quotas: [0; 3],
        tier_policy: 0,
        parent: Ino(parent),
        next_cookie: 9,
        segments: map.map(segment).into_iter().collect(),
        target: bytes::Bytes::new(),
        object: None,
    }
}

fn piece(extent: u64, len: u64, extent_off: u32) -> Piece {
    let content = PieceContent::Data(Content::Extent(ExtentRef {
        id: ExtentId(extent),
        pg: PgId(0),
        k: 2,
        n: 3,
        extent_len: 8192,
        extent_off,
    }));
    Piece { len, birth_layer: 1, content }
}

const PLACE: ExtentPlace = ExtentPlace { pg: PgId(0), n: 3, k: 2, shard: 0, extent_len: 0 };

impl World {
    fn put<V: Value>(&mut self, key: Vec<u8>, value: V) {
        self.pairs.insert(key, value.encode());
    }

    fn remove(&mut self, key: Vec<u8>) {
        assert!(self.pairs.remove(&key).is_some(), "the damage must hit something");
    }

    fn lose(&mut self, drive: u32, extent: u64) {
        let shards = self.shards.get_mut(&DriveId(drive)).unwrap();
        let before = shards.len();
        shards.retain(|(id, _)| *id != extent);
        assert!(shards.len() < before);
    }

    /// Directories 1 (root), 2 and 3; files 4 and 5; 6 is kept open; extents 10 and 11 in use, 12 free.
    fn sound() -> Self {
        let (mut world, keys) = (Self::default(), KEYS());
        for (name, next) in [("next_ino", 7), ("next_map", 50), ("next_extent", 65_537), ("format", 1)] {
            world.put(keys.value(name), next);
        }
        let dir = FileKind::Directory;
        world.put(keys.inode(Ino(1)), inode(1, dir, 3, 2, 1, None, 0));
        world.put(keys.inode(Ino(2)), inode(2, dir, 3, 2, 1, None, 0));
        world.put(keys.inode(Ino(3)), inode(3, dir, 2, 0, 2, None, 0));
        world.put(keys.inode(Ino(4)), inode(4, FileKind::Regular, 2, 20_000, 0, Some(20), 12_288));
        world.put(keys.inode(Ino(5)), inode(5, FileKind::Symlink, 1, 0, 0, None, 0));
        world.put(keys.inode(Ino(6)), inode(6, FileKind::Regular, 0, 8192, 0, Some(21), 8192));
        let dentry = |ino, kind| Dentry { ino: Ino(ino), kind, cookie: 3 };
        world.put(keys.dentry(Ino(1), b"a", dir), dentry(2, dir));
        world.put(keys.dentry(Ino(1), b"file", FileKind::Regular), dentry(4, FileKind::Regular));
        world.put(keys.dentry(Ino(2), b"b", dir), dentry(3, dir));
        world.put(keys.dentry(Ino(2), b"link", FileKind::Regular), dentry(4, FileKind::Regular));
        let root = inode(1, dir, 3, 3, 1, None, 0);
        world.put(keys.inode(Ino(1)), root);
        world.put(keys.dentry(Ino(1), b"soft", FileKind::Symlink), dentry(5, FileKind::Symlink));
        world.put(keys.orphan(Ino(6)), Orphan { sessions: vec![SessionId(1)], may_be_named: false });
        world.put(keys.session(SessionId(1)), 0u64);
        world.put(keys.xattr(Ino(4), b"user.x"), 1u64);
        world.put(keys.piece(MapId(20), 0), piece(10, 8192, 0));
        world.put(keys.piece(MapId(20), 8192), piece(11, 4096, 0));
        world.put(keys.piece(MapId(21), 0), piece(13, 8192, 0));
        world.put(keys.piece(MapId(22), 0), piece(14, 8192, 0));
        world.put(keys.purge(MapId(22)), 0u64);
        world.put(keys.extent(ExtentId(11)), ExtentUse { refs: 1, live_bytes: 4096 });
        world.put(keys.free(3, ExtentId(12)), PLACE);
        world.put(keys.owed(DriveId(2), ExtentId(11)), ExtentPlace { shard: 2, ..PLACE });
        let session = SessionId(1);
        world.put(keys.range(ExtentId(1)), IdRange { session, count: 65_536, open: RangeState::Closed });
        world.put(keys.value("usage"), Usage { stored_bytes: 20_480, inodes: 6 });
        for drive in 0..3 {
            let held: Vec<u64> = if drive == 2 { vec![10, 12, 13, 14, 99] } else { vec![10, 11, 12, 13, 14] };
            let shards = held.into_iter().map(|extent| (extent, drive as u8)).collect();
            world.shards.insert(DriveId(drive), shards);
        }
        world
    }

    /// As [`World::sound`]; file 6 is composed of map 21, directory 2 is implicit, and a part of 5 bytes belongs to an
    /// upload.
    fn with_objects() -> Self {
        let (mut world, keys) = (Self::sound(), KEYS());
        let composed = COMPOSED_MAP | 30;
        world.put(keys.inode(Ino(6)), inode(6, FileKind::Regular, 0, 8192, 0, Some(composed), 8192));
        world.put(keys.piece(MapId(composed), 0), Piece::of_map(MapId(21), 0, 8192));
        let implied = Inode { flags: Inode::IMPLICIT, ..inode(2, FileKind::Directory, 3, 2, 1, None, 0) };
        world.put(keys.inode(Ino(2)), implied);
        world.put(keys.upload(Ino(2), b"a/key", 1), sample_upload());
        world.put(keys.part(1, 7), sample_part(5));
        let content = PieceContent::Data(Content::Inline(bytes::Bytes::from_static(b"bytes")));
        world.put(keys.piece(MapId(31), 0), Piece { len: 5, birth_layer: 1, content });
        world.put(keys.value("usage"), Usage { stored_bytes: 20_485, inodes: 6 });
        world
    }

    /// As [`World::sound`], but a piece of file 4 cannot be read.
    fn with_a_loss() -> Self {
        let (mut world, keys) = (Self::sound(), KEYS());
        let cause = LossCause::Shards { damaged: 3, missing: 0 };
        let record = LostRecord { extent: ExtentId(11), ino: Ino(4), found_s: 1, cause };
        world.put(keys.lost(MapId(20), 8192), record);
        world.put(keys.value("damage"), DamageSums { pieces: 1, ..DamageSums::default() });
        world
    }

    fn check(&self, window: usize) -> FsckReport {
        let state = MemState::default();
        let mut pairs = self.pairs.iter().map(|(key, value)| (key.as_slice(), Some(value.as_slice())));
        state.apply(&mut pairs, Applied::default()).unwrap();
        let drives = (0..3).map(|id| MapDrive {
            id: DriveId(id),
            uuid: DriveUuid([0; 16]),
            place: Place { node: id, ..Place::default() },
            state: DriveState::Up,
        });
        let mut group = PlacementGroup::new(PgId(0), (0..3).map(DriveId).collect());
        if let Some(rebuilding) = self.rebuilding {
            group.members[usize::from(rebuilding.position)] = DriveId(7);
            group.rebuilding.push(rebuilding);
        }
        let map = ClusterMap { epoch: Epoch(1), drives: drives.collect(), groups: vec![group] };
        let progress = FsckProgress::default();
        let fsck = Fsck { ledger: LEDGER, state: &state, map: &map, inventory: self, progress: &progress };
        fsck.run_windowed(window, None).unwrap().0
    }
}

fn codes(report: &FsckReport) -> BTreeSet<&str> {
    report.findings.iter().map(|finding| finding.code.as_str()).collect()
}

#[test]
fn nothing_is_found_in_a_sound_ledger_however_small_the_windows() {
    let whole = World::sound().check(WINDOW);
    assert!(whole.is_clean(), "{:#?}", whole.findings);
    assert_eq!((whole.inodes, whole.names, whole.pieces, whole.extents), (6, 5, 4, 4));
    assert_eq!((whole.free_extents, whole.shards, whole.owed_shards), (1, 15, 1));
    assert_eq!((whole.unreferenced_shards, whole.unreferenced_bytes), (1, 4096));
    for window in [1, 2, 3] {
        assert_eq!(World::sound().check(window), whole, "window={window}");
    }
}

/// The damage is found under its code, with windows of any size.
#[track_caller]
fn check(code: &str, damage: impl Fn(&mut World)) {
    for window in [1, 2, WINDOW] {
        let mut world = World::sound();
        damage(&mut world);
        let report = world.check(window);
        assert!(codes(&report).contains(code), "window={window}: {:#?}", report.findings);
        let said =
            report.findings.iter().all(|finding| !finding.what.is_empty() && !finding.advice.is_empty());
        assert!(said && report.findings_count >= 1);
    }
}

#[test]
fn damage_of_the_tree_is_found() {
    let keys = KEYS();
    let file = FileKind::Regular;
    check("name_without_inode", |world| world.remove(keys.inode(Ino(5))));
    check("links", |world| world.remove(keys.dentry(Ino(2), b"link", file)));
    check("links", |world| world.put(keys.inode(Ino(5)), inode(5, FileKind::Symlink, 2, 0, 0, None, 0)));
    check("entries", |world| world.put(keys.inode(Ino(3)), inode(3, FileKind::Directory, 2, 1, 2, None, 0)));
    check("wrong_name", |world| {
        world
            .put(keys.dentry(Ino(1), b"file", file), Dentry { ino: Ino(4), kind: FileKind::Fifo, cookie: 3 });
    });
    check("name_without_directory", |world| {
        world.put(keys.dentry(Ino(77), b"x", file), Dentry { ino: Ino(4), kind: file, cookie: 3 });
    });
    check("name_twice", |world| {
        world.put(keys.dentry(Ino(1), b"a", file), Dentry { ino: Ino(4), kind: file, cookie: 8 });
    });
    check("not_in_tree", |world| {
        // Two directories that contain each other.
        let dir = FileKind::Directory;
        world.remove(keys.dentry(Ino(1), b"a", dir));
        world.put(keys.dentry(Ino(3), b"a", dir), Dentry { ino: Ino(2), kind: dir, cookie: 3 });
        world.put(keys.inode(Ino(2)), inode(2, dir, 3, 2, 3, None, 0));
        world.put(keys.inode(Ino(3)), inode(3, dir, 3, 1, 2, None, 0));
        world.put(keys.inode(Ino(1)), inode(1, dir, 2, 2, 1, None, 0));
    });
    check("no_root", |world| world.remove(keys.inode(Ino(1))));
    check("orphan", |world| world.remove(keys.orphan(Ino(6))));
    check("orphan", |world| world.remove(keys.session(SessionId(1))));
    check("orphan", |world| {
        world.put(keys.orphan(Ino(9)), Orphan { sessions: vec![SessionId(1)], may_be_named: false })
    });
    check("attributes", |world| world.put(keys.xattr(Ino(9), b"user.x"), 1u64));
    check("inode_number", |world| world.put(keys.value("next_ino"), 6u64));
    check("damaged_value", |world| drop(world.pairs.insert(keys.inode(Ino(5)), b"\x01\x07".to_vec())));
}

#[test]
fn damage_of_maps_and_sums_is_found() {
    let keys = KEYS();
    check("overlap", |world| world.put(keys.piece(MapId(20), 4096), piece(11, 4096, 0)));
    check("stored_bytes", |world| world.put(keys.piece(MapId(20), 8192), piece(11, 2048, 0)));
    check("stored_bytes", |world| {
        world.put(keys.inode(Ino(4)), inode(4, FileKind::Regular, 2, 100, 0, Some(20), 12_288));
    });
    check("usage", |world| world.put(keys.value("usage"), Usage { stored_bytes: 1, inodes: 6 }));
    check("map_owner", |world| world.remove(keys.purge(MapId(22))));
    check("map_owner", |world| world.put(keys.purge(MapId(20)), 0u64));
    check("map_owner", |world| {
        world.put(keys.inode(Ino(6)), inode(6, FileKind::Regular, 0, 20_000, 0, Some(20), 12_288));
    });
    check("map_number", |world| world.put(keys.value("next_map"), 22u64));
}

#[test]
fn notes_of_what_cannot_be_read_belong_to_pieces() {
    let keys = KEYS();
    let report = World::with_a_loss().check(WINDOW);
    assert!(report.is_clean(), "{:#?}", report.findings);
    let check = |code: &str, damage: &dyn Fn(&mut World)| {
        let mut world = World::with_a_loss();
        damage(&mut world);
        let report = world.check(WINDOW);
        assert!(codes(&report).contains(code), "{code} {:#?}", report.findings);
    };
    check("lost_sums", &|world| world.remove(keys.value("damage")));
    check("lost_piece", &|world| world.put(keys.piece(MapId(20), 8192), piece(10, 4096, 0)));
    check("lost_piece", &|world| {
        let record = world.pairs.remove(&keys.lost(MapId(20), 8192)).unwrap();
        world.pairs.insert(keys.lost(MapId(20), 4096), record);
    });
}

fn sample_upload() -> Upload {
    let caller = wire::object::Caller::root();
    Upload { started_ns: 0, caller, record: ObjectRecord::default(), tags: vec![] }
}

fn sample_part(stored_bytes: u64) -> Part {
    Part { map: MapId(31), len: 5, stored_bytes, mtime_ns: 0, etag: "e".into(), checksum: None }
}

#[test]
fn objects_uploads_and_parts_are_sound_and_damage_of_them_is_found() {
    let keys = KEYS();
    for window in [1, 2, WINDOW] {
        let report = World::with_objects().check(window);
        assert!(report.is_clean(), "window={window} {:#?}", report.findings);
    }
    let check = |code: &str, damage: &dyn Fn(&mut World)| {
        for window in [1, 2, WINDOW] {
            let mut world = World::with_objects();
            damage(&mut world);
            let report = world.check(window);
            assert!(codes(&report).contains(code), "{code} window={window} {:#?}", report.findings);
        }
    };
    let composed = MapId(COMPOSED_MAP | 30);
    check("map_owner", &|world| world.remove(keys.piece(composed, 0)));
    check("stored_bytes", &|world| world.put(keys.piece(composed, 0), Piece::of_map(MapId(21), 0, 4096)));
    check("map_owner", &|world| world.put(keys.piece(composed, 0), Piece::of_map(MapId(20), 0, 8192)));
    check("map_owner", &|world| world.remove(keys.part(1, 7)));
    check("map_owner", &|world| world.put(keys.purge(MapId(31)), 0u64));
    check("stored_bytes", &|world| world.put(keys.part(1, 7), sample_part(6)));
    check("usage", &|world| world.put(keys.part(1, 7), sample_part(6)));
    check("part_without_upload", &|world| world.remove(keys.upload(Ino(2), b"a/key", 1)));
    check("implicit", &|world| {
        let implied = Inode { flags: Inode::IMPLICIT, ..inode(3, FileKind::Directory, 2, 0, 2, None, 0) };
        world.put(keys.inode(Ino(3)), implied);
    });
}

#[test]
fn damage_of_extents_and_shards_is_found() {
    let keys = KEYS();
    check("extent_use", |world| world.remove(keys.extent(ExtentId(11))));
    check("extent_use", |world| {
        world.put(keys.extent(ExtentId(10)), ExtentUse { refs: 2, live_bytes: 8192 })
    });
    check("extent_use", |world| world.put(keys.extent(ExtentId(40)), ExtentUse { refs: 1, live_bytes: 1 }));
    check("extent_number", |world| world.put(keys.value("next_extent"), 14u64));
    check("extent_shape", |world| {
        let mut other = piece(10, 4096, 0);
        if let PieceContent::Data(Content::Extent(extent)) = &mut other.content {
            extent.k = 1;
        }
        world.put(keys.piece(MapId(20), 8192), other);
    });
    check("live_extent_freed", |world| world.put(keys.free(9, ExtentId(10)), PLACE));
    check("freed_twice", |world| world.put(keys.free(9, ExtentId(12)), PLACE));
    check("missing_shard", |world| world.lose(1, 10));
    check("missing_shard", |world| world.remove(keys.owed(DriveId(2), ExtentId(11))));
    check("unreadable", |world| (0..2).for_each(|drive| world.lose(drive, 13)));
    check("unreadable", |world| world.down = vec![DriveId(0), DriveId(1)]);
    check("owed_shape", |world| {
        world.put(keys.owed(DriveId(1), ExtentId(11)), ExtentPlace { shard: 3, ..PLACE });
    });
    check("unknown_shard", |world| world.shards.get_mut(&DriveId(0)).unwrap().push((70_000, 0)));
    check("leaked_shard", |world| world.remove(keys.range(ExtentId(1))));
    check("no_group", |world| {
        let mut other = piece(13, 8192, 0);
        if let PieceContent::Data(Content::Extent(extent)) = &mut other.content {
            extent.pg = PgId(7);
        }
        world.put(keys.piece(MapId(21), 0), other);
    });
}

#[test]
fn what_is_being_rebuilt_is_no_damage() {
    for from_is_up in [true, false] {
        let mut world = World::sound();
        world.rebuilding = Some(Rebuilding { position: 1, from: DriveId(1) });
        world.shards.insert(DriveId(7), vec![(10, 1)]);
        if !from_is_up {
            world.down = vec![DriveId(1)];
        }
        let report = world.check(WINDOW);
        // Extents 11, 13 and 14 are on the drive that had the position before, or on none yet.
        assert_eq!(report.rebuilding_shards, if from_is_up { 0 } else { 3 });
        // Another shard of extent 11 is owed: with one drive less the extent cannot be read.
        assert_eq!(report.is_clean(), from_is_up, "{:#?}", report.findings);
        assert!(!codes(&report).contains("missing_shard"));
    }
}

#[test]
fn an_owed_shard_of_an_extent_that_is_gone_is_counted_only() {
    let mut world = World::sound();
    world.put(KEYS().owed(DriveId(1), ExtentId(40)), PLACE);
    let report = world.check(WINDOW);
    assert!(report.is_clean());
    assert_eq!(report.stale_owed, 1);
}

#[test]
fn one_drive_less_is_no_damage() {
    let mut world = World::sound();
    world.down = vec![DriveId(2)];
    let report = world.check(WINDOW);
    assert!(report.is_clean(), "{:#?}", report.findings);
    assert_eq!(report.unreachable_shards, 3);
}

#[test]
fn what_only_looked_wrong_because_it_was_deleted_meanwhile_is_not_reported() {
    let mut world = World::sound();
    // The file was removed after the snapshot, and its shards were deleted. Extent 13 is really damaged.
    (0..3).for_each(|drive| world.lose(drive, 10));
    (0..2).for_each(|drive| world.lose(drive, 13));
    let make = |pairs: &BTreeMap<Vec<u8>, Vec<u8>>| {
        let state = MemState::default();
        let mut pairs = pairs.iter().map(|(key, value)| (key.as_slice(), Some(value.as_slice())));
        state.apply(&mut pairs, Applied::default()).unwrap();
        state
    };
    let old = make(&world.pairs);
    world.remove(KEYS().piece(MapId(20), 0));
    let new: Arc<dyn State> = Arc::new(make(&world.pairs));
    let groups = vec![PlacementGroup::new(PgId(0), (0..3).map(DriveId).collect())];
    let map = ClusterMap { epoch: Epoch(1), drives: Vec::new(), groups };
    let progress = FsckProgress::default();
    let fsck = Fsck { ledger: LEDGER, state: &old, map: &map, inventory: &world, progress: &progress };
    let report = fsck.run_again(|| Ok(new.clone())).unwrap();
    assert_eq!(codes(&report), BTreeSet::from(["missing_shard", "unreadable"]));
    assert_eq!(report.findings_count, 2, "{:#?}", report.findings);
    assert!(report.findings.iter().all(|finding| finding.what.contains("extent 13 ")));
}

proptest! {
    /// With any bytes in the store, the check ends and does not panic.
    #[test]
    fn hostile_bytes_are_findings(
        damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), any::<u8>()), 1..6),
        keys in any::<bool>(),
    ) {
        let mut world = World::sound();
        for (pair, at, byte) in damage {
            let (mut key, mut value) = {
                let (key, value) = world.pairs.iter().nth(pair.index(world.pairs.len())).unwrap();
                (key.clone(), value.clone())
            };
            let bytes = if keys { &mut key } else { &mut value };
            let at = at.index(bytes.len());
            // The ledger and the table stay the same; otherwise no scan would find the key.
            if !keys || at > 4 {
                bytes[at] = byte;
            }
            world.pairs.insert(key, value);
        }
        let small = world.check(2);
        prop_assert_eq!(small.findings_count == 0, world.check(WINDOW).findings_count == 0);
    }

    #[test]
    fn a_store_with_a_log_over_it_reads_like_one_map(
        below in proptest::collection::btree_map(0..30u8, any::<u8>(), 0..20),
        above in proptest::collection::vec((0..30u8, proptest::option::of(any::<u8>())), 0..20),
        from in 0..30u8, to in 0..31u8,
    ) {
        let bottom = MemState::default();
        let below: BTreeMap<Vec<u8>, Vec<u8>> = below.into_iter().map(|(key, value)| (vec![key], vec![value])).collect();
        let mut pairs = below.iter().map(|(key, value)| (key.as_slice(), Some(value.as_slice())));
        bottom.apply(&mut pairs, Applied::default()).unwrap();
        let mut model = below.clone();
        let log = MemLog::new();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(log.seal(Epoch(1), 0)).unwrap();
        for (seq, (key, value)) in (1..).zip(above) {
            let (key, value) = (vec![key], value.map(|value| vec![value]));
            match &value {
                Some(value) => model.insert(key.clone(), value.clone()),
                None => model.remove(&key),
            };
            let batch = Batch { changes: vec![(key, value)] }.encode();
            runtime.block_on(log.append(Epoch(1), Seq(seq), vec![batch])).unwrap();
        }
        let state = runtime.block_on(Overlaid::replay(&log, Arc::new(bottom))).unwrap();
        for limit in [1, 3, usize::MAX] {
            let mut found = Vec::new();
            state.scan(&(vec![from], vec![to]), &mut |key, value| {
                found.push((key.to_vec(), value.to_vec()));
                if found.len() >= limit { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            }).unwrap();
            let range: Vec<_> = model.clone().into_iter().filter(|(key, _)| *key >= vec![from] && *key < vec![to]).take(limit).collect();
            prop_assert_eq!(found, range);
        }
    }
}

/// Extent 13 is in a blob only, 10 in both places, 14 waits.
fn tiered() -> World {
    let (mut world, keys) = (World::sound(), KEYS());
    let place = ExtentPlace { extent_len: 8192, ..PLACE };
    let mut stat = TierStat { mode: TierMode::On, blobs: 1, stored_bytes: 40_960, ..TierStat::default() };
    for (id, stage, off) in [(13, Stage::Tiered, 8192), (10, Stage::Both, 16_384), (14, Stage::Queued, 0)] {
        let id = ExtentId(id);
        let blob = if stage == Stage::Queued { None } else { Some((7, off)) };
        let residence =
            Residence { stage, written_s: 5, place, directory: Ino(1), origin: Origin::default(), blob };
        world.put(keys.residence(id), residence);
        let sum = match stage {
            Stage::Queued => &mut stat.queued,
            Stage::Both => &mut stat.both,
            Stage::Tiered => &mut stat.away,
        };
        *sum = StageStat { extents: 1, bytes: 8192 };
        if stage != Stage::Tiered {
            world.put(keys.aged(stage_in_key(stage), 5, id), residence.aged());
        }
        if blob.is_some() {
            world.put(keys.in_blob(7, id), u64::from(off));
            stat.live_bytes += 8192;
        }
    }
    let live_bytes = stat.live_bytes;
    world.put(keys.blob(7), BlobRecord { term: Epoch(1), bytes: 40_960, extents: 2, live_bytes });
    world.put(keys.value("tier"), TierState { stat, ..TierState::default() });
    (0..3).for_each(|drive| world.lose(drive, 13));
    world
}

#[test]
fn what_is_in_blobs_need_not_be_on_drives() {
    let report = tiered().check(WINDOW);
    assert_eq!(report.findings, []);
    assert_eq!((report.away_extents, report.blobs), (1, 1));
}

#[test]
fn damage_of_tiers_is_found() {
    let keys = KEYS();
    type Damage = fn(&mut World, Keys);
    let damages: [(&str, Damage); 9] = [
        ("unreadable", |world, keys| world.remove(keys.residence(ExtentId(13)))),
        ("residence_of_nothing", |world, keys| {
            let residence = world.pairs[&keys.residence(ExtentId(10))].clone();
            world.pairs.insert(keys.residence(ExtentId(99)), residence);
        }),
        ("tier_sums", |world, keys| world.put(keys.value("tier"), TierState::default())),
        ("tier_age", |world, keys| world.remove(keys.aged(2, 5, ExtentId(10)))),
        ("tier_age", |world, keys| world.put(keys.aged(1, 5, ExtentId(10)), PLACE)),
        ("tier_place", |world, keys| world.remove(keys.in_blob(7, ExtentId(13)))),
        ("blob_use", |world, keys| {
            let blob = BlobRecord { term: Epoch(1), bytes: 40_960, extents: 2, live_bytes: 1 };
            world.put(keys.blob(7), blob);
        }),
        ("unknown_blob", |world, keys| world.remove(keys.blob(7))),
        ("live_blob_deleted", |world, keys| {
            let loose = LooseBlob { term: Epoch(1), session: SessionId(0), free_ver: 3 };
            world.put(keys.loose_blob(7), loose);
        }),
    ];
    for (code, damage) in damages {
        let mut world = tiered();
        damage(&mut world, keys);
        let report = world.check(WINDOW);
        assert!(report.findings.iter().any(|found| found.code == code), "{code}: {:?}", report.findings);
    }
}
