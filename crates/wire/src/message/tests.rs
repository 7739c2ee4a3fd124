use std::collections::BTreeSet;
use std::fmt;

use base::program::Program;
use base::{DriveId, DriveUuid, Epoch, ExtentId, FsError, Ino, LeaseId, NodeId, PgId, Seq, ShardIndex};
use serde::de::{DeserializeOwned, Deserializer, Error as _, Visitor};

use super::*;
use crate::claim::HeldLease;
use crate::cluster::{
    CheckParts, ClusterReply, ClusterRequest, Declined, EngineMember, EngineSeat, Finding, Grade, HostReply,
    HostRequest, HostedDrive, JoinReply, JoinRequest, Joined, NewClient, NewNode, NodeAddresses,
    NodeCondition, RecordsNews, RepairOutcome, RestoreOrder, StoredLedger, UploadOrder,
};
use crate::damage::DamageRequest;
use crate::drive::{
    DriveHealth, DriveMark, Foreground, GetPurpose, IoPath, PutPurpose, ShardClass, ShardNote, ShardShape,
};
use crate::guard::Guard;
use crate::lock::{FileLock, LockSpace};
use crate::meta::*;
use crate::object::ObjectRequest;
use crate::replica::{CopyPart, ReplicaReply, ReplicaRequest};
use crate::store::{SeenBy, StoreError};
use crate::tier::{DueExtent, Origin, TierRequest};
use crate::view::{BlobPart, FilesystemView, ViewReply, ViewRequest};

/// Reads the names of an enum's variants, and nothing else.
struct Names<'a>(&'a mut &'static [&'static str]);

impl<'de> Deserializer<'de> for Names<'_> {
    type Error = serde::de::value::Error;

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Self::Error> {
        Err(Self::Error::custom("no enum"))
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        variants: &'static [&'static str],
        _: V,
    ) -> Result<V::Value, Self::Error> {
        *self.0 = variants;
        Err(Self::Error::custom("only the names are read"))
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit
        unit_struct newtype_struct seq tuple tuple_struct map struct identifier ignored_any
    }
}

fn names<T: DeserializeOwned>() -> &'static [&'static str] {
    let mut names: &'static [&'static str] = &[];
    let _ = T::deserialize(Names(&mut names));
    names
}

#[test]
fn every_operation_has_a_code_of_its_own() {
    let listed = |operations: Operations| operations.0.iter().map(|(name, _)| *name).collect::<Vec<_>>();
    assert_eq!(listed(GREET), names::<GreetRequest>());
    assert_eq!(listed(SESSION), names::<SessionRequest>());
    assert_eq!(listed(OWNER), names::<MetaRequest>());
    assert_eq!(listed(DRIVE), names::<DriveRequest>());
    assert_eq!(listed(REPLICA), names::<ReplicaRequest>());
    assert_eq!(listed(VIEW), names::<ViewRequest>());
    assert_eq!(listed(JOIN), names::<JoinRequest>());
    assert_eq!(listed(CLUSTER), names::<ClusterRequest>());
    assert_eq!(listed(HOST), names::<HostRequest>());
    let codes: Vec<u16> = [GREET, SESSION, OWNER, DRIVE, REPLICA, VIEW, JOIN, CLUSTER, HOST]
        .iter()
        .flat_map(|all| all.0)
        .map(|(_, code)| *code)
        .collect();
    assert_eq!(codes.iter().collect::<BTreeSet<_>>().len(), codes.len());
}

fn attr() -> Attr {
    Attr {
        ino: Ino(300),
        kind: FileKind::Regular,
        mode: 0o644,
        uid: 1000,
        gid: 100,
        nlink: 1,
        rdev: 0,
        size: 5000,
        stored_bytes: 4096,
        atime_ns: -1,
        mtime_ns: 2,
        ctime_ns: 3,
        btime_ns: 4,
        data_ver: 5,
        attr_ver: 6,
        guard: Guard { append_only: true, immutable: false },
    }
}

fn lease() -> LeaseGrant {
    LeaseGrant { ino: Ino(300), id: LeaseId(9), kind: LeaseKind::Exclusive, seq: 2 }
}

fn lock() -> FileLock {
    let space = LockSpace::Whole;
    FileLock { ino: Ino(300), owner: 77, space, exclusive: true, start: 0, last: 300, pid: 5 }
}

fn extent() -> ExtentRef {
    ExtentRef { id: ExtentId(70_000), pg: PgId(5), k: 4, n: 6, extent_len: 1 << 22, extent_off: 4096 }
}

fn key() -> ShardKey {
    ShardKey { ledger: LedgerId(2), extent: ExtentId(70_000), shard: ShardIndex(3) }
}

fn position() -> Position {
    Position { ledger: LedgerId(2), lineage: base::Lineage(77), seq: base::Seq(300) }
}

fn piece() -> MapPiece {
    MapPiece { off: 8192, len: 100, content: Content::Extent(extent()) }
}

fn owner_requests() -> Vec<MetaRequest> {
    use MetaRequest as R;
    let (ino, parent, name) = (Ino(300), Ino::ROOT, Bytes::from_static(b"name"));
    let set = SetAttr { mode: Some(0o600), mtime_ns: Some(-5), ..SetAttr::default() };
    let free = FreeExtent { free_ver: 8, id: ExtentId(70_000), pg: PgId(5), n: 6 };
    let make = MakeNode {
        parent,
        name: name.clone(),
        kind: FileKind::Symlink,
        mode: 0o777,
        umask: 0o22,
        uid: 1000,
        gid: 100,
        rdev: 0,
        target: Bytes::from_static(b"target"),
        open: OpenIntent::None,
    };
    let owed = OwedShard { shard: ShardIndex(3), drive: DriveId(1) };
    vec![
        R::CloseSession,
        R::Heartbeat { in_use_ver: 300 },
        R::Lookup { parent, name: name.clone() },
        R::GetAttr { ino },
        R::ReadDir {
            ino,
            after: Some(DirPosition { name: name.clone(), kind: FileKind::Directory }),
            limit: 100,
        },
        R::ReadLink { ino },
        R::Make(make.clone()),
        R::Open { ino, intent: OpenIntent::Truncate },
        R::Close { inos: vec![ino, parent] },
        R::SetAttr { ino, set: set.clone() },
        R::SetGuard { ino, guard: Guard { append_only: false, immutable: true } },
        R::NoteRead { ino, atime_ns: 7 },
        R::Unlink { parent, name: name.clone() },
        R::Rmdir { parent, name: name.clone() },
        R::Rename {
            parent,
            name: name.clone(),
            new_parent: ino,
            new_name: name.clone(),
            mode: RenameMode::Exchange,
            whiteout: Some(Whiteout { uid: 1, gid: 2 }),
        },
        R::Link { ino, parent, name: name.clone() },
        R::SetXattr { ino, name: name.clone(), value: Bytes::from_static(b"value"), mode: XattrMode::Create },
        R::GetXattr { ino, name: name.clone() },
        R::ListXattr { ino },
        R::RemoveXattr { ino, name: name.clone() },
        R::GetMap { ino, off: 4096, limit: 9 },
        R::Commit {
            ino,
            lease: LeaseId(9),
            pieces: vec![CommitPiece { piece: piece(), owed: vec![owed], placed: Epoch(4) }],
            size: 9000,
            mtime_ns: 1,
            set,
        },
        R::Punch { ino, off: 1, len: 2 },
        R::CloneRange { from: ino, from_off: 1, to: parent, to_off: 2, len: 3 },
        R::AllocExtents,
        R::StatFs,
        R::Acquire { ino, kind: LeaseKind::Shared },
        R::Release { lease: lease(), keep: Some(LeaseKind::Read) },
        R::ReleaseAll { leases: vec![lease()] },
        R::Forgot { dir: parent, names: vec![(name, 4)] },
        R::NextFree { after: Some((8, ExtentId(1))), limit: 5 },
        R::Freed { extents: vec![free], drives: vec![DriveId(1)] },
        R::Owed { after: None, limit: 5 },
        R::Repaired { shards: vec![(DriveId(1), ExtentId(2))] },
        R::PurgeStep,
        R::ScanMap { after: None, limit: 5 },
        R::Repack { extent: extent(), owed: vec![owed], moves: vec![], placed: Epoch(4) },
        R::ExtentRanges,
        R::RecheckRanges { ranges: vec![(ExtentId(1), 2)] },
        R::Doubt { in_doubt: true },
        R::ConfirmOrphans { ids: vec![ExtentId(1)] },
        R::RangeVerified { first: ExtentId(1) },
        R::Object(Box::new(ObjectRequest::Delete { keys: vec![], caller: Caller::root() })),
        R::Rehydrate(vec![]),
        R::Tier(TierRequest::Stat),
        R::Damage(DamageRequest::Repaired { shards: 3 }),
        R::Lock { lock: lock(), ticket: Some(3) },
        R::Unlock { lock: lock(), ticket: None },
        R::TestLock { lock: lock() },
        R::AdvanceGroups { groups: vec![(PgId(5), Epoch(4))] },
        R::MakeUnnamed(make),
    ]
}

fn drive_requests() -> Vec<DriveRequest> {
    use DriveRequest as R;
    let put = PutShard {
        key: key(),
        shape: ShardShape { pg: PgId(5), k: 4, m: 2, extent_len: 1 << 22 },
        note: ShardNote { ino: Ino(300), off: 4096, key_version: 1 },
        position: Some(position()),
        class: ShardClass::Bulk,
        purpose: PutPurpose::Repair,
        pg_epoch: Epoch(3),
        bytes: Bytes::from_static(&[7; 4096]),
        checksums: vec![0xdead_beef],
    };
    vec![
        R::Put(put),
        R::Get(GetShard { key: key(), first_block: 1, blocks: 2, purpose: GetPurpose::Move }),
        R::Delete(DeleteShards { keys: vec![key()], position: None, is_void: true }),
        R::KeepPositions { positions: vec![position()], replace: true },
        R::KnownLedgers,
        R::List { after: Some(key()), limit: 9 },
        R::Scrub { after: None, budget_bytes: 1 << 20 },
        R::MakeRoom,
        R::Stat,
    ]
}

fn replica_requests() -> Vec<ReplicaRequest> {
    vec![
        ReplicaRequest::Stored { replica: 2, seq: base::Seq(300), wait_ms: 60_000 },
        ReplicaRequest::Copy { replica: 2, wait_ms: 60_000, copy: 9, after: Bytes::from_static(b"key") },
    ]
}

fn view_requests() -> Vec<ViewRequest> {
    vec![
        ViewRequest::Filesystem { name: "main".to_owned(), known: 2, wait_ms: 30_000 },
        ViewRequest::Owner { known: Epoch(3), wait_ms: 30_000 },
        ViewRequest::Blob { filesystem: "main".to_owned(), serial: 9, term: Epoch(3), off: 4096, len: 8192 },
        ViewRequest::Reads { filesystem: "main".to_owned(), ino: base::Ino(300), off: 4096, len: 8192 },
    ]
}

fn view() -> ViewReply {
    let group = layout::PlacementGroup::new(PgId(0), vec![DriveId(1), DriveId(2)]);
    let drive = layout::MapDrive {
        id: DriveId(1),
        uuid: DriveUuid([7; 16]),
        place: layout::Place { zone: 1, rack: 2, node: 3 },
        state: layout::DriveState::Up,
    };
    ViewReply::Filesystem(Box::new(FilesystemView {
        number: 3,
        cluster: base::ClusterId([9; 16]),
        id: 1,
        ledger: base::LedgerId(1),
        profile: layout::Profile::SINGLE,
        map: layout::ClusterMap { epoch: Epoch(5), drives: vec![drive], groups: vec![group] },
        drives: vec![DriveId(1)],
        groups: vec![PgId(0)],
        write_profile: layout::Profile::SINGLE,
        narrow: vec![],
        provisioned_bytes: Some(1 << 40),
        ssd_bytes: None,
        store: Bytes::from_static(b"{}"),
        owner: NodeId(2),
        nodes: addresses(),
        away: vec![DriveId(4)],
        has_store: true,
        spare_millionths: 90_000,
        writes_near: true,
        for_nodes: BTreeSet::from([NodeId(2), NodeId(5)]),
        places: vec![layout::Place { zone: 1, rack: 2, node: 3 }],
    }))
}

fn copied() -> ReplicaReply {
    let pairs = vec![(Bytes::from_static(b"key"), Bytes::from_static(b"value"))];
    ReplicaReply::Copied(CopyPart {
        copy: 9,
        seq: base::Seq(300),
        epoch: Epoch(4),
        pairs,
        sum: 5,
        more: true,
    })
}

fn stat() -> DriveStat {
    DriveStat {
        uuid: DriveUuid([7; 16]),
        mark: DriveMark { incarnation: 2, seq: 9 },
        health: DriveHealth::Up,
        failure: None,
        io_path: IoPath::IoUring,
        capacity_bytes: 1 << 30,
        live_bytes: 1,
        garbage_bytes: 2,
        reserved_bytes: 3,
        free_bytes: 4,
        host_full: false,
        full: true,
        trimmed_bytes: 5,
        write_limit_bytes_per_s: Some(6),
        shards: 7,
        bad_shards: 8,
        age_ms: 0,
        cleanable_bytes: 9,
        foreground: Foreground { requests: 10, p99_us: 300 },
    }
}

fn sessions() -> Vec<SessionRequest> {
    let held = HeldLease { lease: lease(), data_ver: 1, attr_ver: 2 };
    let claim = Claim {
        in_use_ver: 5,
        leases: vec![held],
        opens: vec![Ino(300)],
        dirs: vec![Ino::ROOT],
        more: true,
        locks: vec![lock()],
        unanswered: vec![(3, 400)],
        begins: true,
    };
    vec![
        SessionRequest::Connect { stream: 1 },
        SessionRequest::Resume { stream: 2, session: SessionId(4), claim, proof: Bytes::new() },
        SessionRequest::Attach { stream: 1, seen: 300 },
    ]
}

fn new_client() -> NewClient {
    let (secret, request) = (Bytes::from_static(b"secret"), Bytes::from_static(b"csr"));
    NewClient { token: 2, secret, name: "c2".to_owned(), request }
}

fn new_node() -> NewNode {
    NewNode {
        token: 3,
        secret: Bytes::from_static(b"secret"),
        name: "n2".to_owned(),
        request: Bytes::from_static(b"request"),
        addresses: vec!["10.0.0.2:7740".to_owned()],
        zone: "z".to_owned(),
        rack: "r".to_owned(),
        format_level: 3,
    }
}

fn program() -> Program {
    Program { version: "1.2.3".to_owned(), format_level: 3 }
}

fn addresses() -> Vec<NodeAddresses> {
    vec![NodeAddresses { node: NodeId(2), addresses: vec!["10.0.0.2:7740".to_owned()] }]
}

fn cluster_requests() -> Vec<ClusterRequest> {
    vec![
        ClusterRequest::Records {
            known: Seq(300),
            epoch: Epoch(4),
            after: Bytes::from_static(b"key"),
            wait_ms: 500,
        },
        ClusterRequest::Manage {
            node: NodeId(2),
            id: 5,
            method: "POST".to_owned(),
            path: "/v1/drives".to_owned(),
            body: Bytes::from_static(b"{}"),
        },
        ClusterRequest::Renew {
            node: NodeId(2),
            request: Bytes::from_static(b"request"),
            addresses: vec!["10.0.0.2:7740".to_owned()],
            last_start: 8,
            this_start: 9,
        },
        ClusterRequest::IsOwner,
        ClusterRequest::Owns { node: NodeId(2), epoch: Epoch(4) },
        ClusterRequest::Probe { body: Bytes::from_static(b"body") },
    ]
}

fn host_requests() -> Vec<HostRequest> {
    vec![
        HostRequest::Format { drive: DriveId(7), path: Some("/d".to_owned()), size_bytes: Some(300) },
        HostRequest::Reopen { drive: DriveId(7) },
        HostRequest::Close { drive: DriveId(7) },
        HostRequest::Drives,
        HostRequest::StartEngine(EngineSeat {
            number: 300,
            name: "node-1".to_owned(),
            members: vec![EngineMember {
                name: "node-1".to_owned(),
                host: "a".to_owned(),
                client_port: 7741,
                peer_port: 7742,
            }],
            authority: "own".to_owned(),
            authority_key: "key".to_owned(),
            joins: true,
        }),
        HostRequest::EndEngine { number: 300 },
        HostRequest::Engine,
        HostRequest::Stored,
        HostRequest::TryLog { log: "etcd://10.0.0.9:2379".to_owned(), number: 300 },
        HostRequest::Locate { path: "/d".to_owned() },
        HostRequest::Condition,
        HostRequest::Check { what: CheckParts { drives: true, network: false } },
        HostRequest::Restore(RestoreOrder {
            filesystem: "main".to_owned(),
            ledger: LedgerId(2),
            map: Epoch(300),
            shards: vec![OwedEntry {
                drive: DriveId(1),
                id: ExtentId(300),
                pg: PgId(4),
                shard: ShardIndex(3),
                k: 4,
                n: 6,
                extent_len: 300,
            }],
        }),
        HostRequest::Upload(UploadOrder {
            filesystem: "main".to_owned(),
            ledger: LedgerId(2),
            map: Epoch(300),
            extents: vec![DueExtent {
                extent: crate::tier::whole(ExtentId(300), PgId(4), (4, 6), 300),
                written_s: 300,
                directory: Ino(5),
                origin: Origin { ino: Ino(6), map: base::MapId(7), off: 300 },
            }],
            blob_bytes: 4 << 20,
            bytes_per_s: 300,
        }),
    ]
}

/// Answers of nodes to each other.
fn answers_of_nodes() -> Vec<(&'static str, Vec<u8>)> {
    let text = str::to_owned;
    let joined = Joined {
        node: NodeId(2),
        certificate: text("own"),
        authorities: text("all"),
        cluster_key: Bytes::from_static(b"key"),
        nodes: addresses(),
        log: text("etcd://10.0.0.9:2379"),
        authority_key: text("secret"),
        witness: true,
    };
    let records = vec![(Bytes::from_static(b"k"), Bytes::from_static(b"v"))];
    let news = RecordsNews { seq: Seq(300), epoch: Epoch(4), is_copy: true, records, more: true };
    let drive = HostedDrive {
        drive: DriveId(7),
        path: text("/d"),
        problem: Some(text("gone")),
        older: Some(text("x")),
    };
    let body = Bytes::from_static(b"{}");
    vec![
        ("answer: joined", encoding::encode(&Ok::<_, Declined>(JoinReply::Joined(joined)))),
        (
            "answer: joined as a client",
            encoding::encode(&Ok::<_, Declined>(JoinReply::JoinedClient {
                client: 2,
                certificate: text("own"),
                authorities: text("all"),
                nodes: addresses(),
                read_only: true,
            })),
        ),
        ("answer: declined", encoding::encode(&Err::<JoinReply, _>(Declined(text("why"))))),
        ("answer: records", encoding::encode(&ClusterReply::Records(news))),
        (
            "answer: renewed",
            encoding::encode(&ClusterReply::Renewed {
                certificate: text("own"),
                authorities: text("all"),
                log: text("etcd://a:1"),
                authority_key: text("key"),
            }),
        ),
        (
            "answer: is a copy",
            encoding::encode(&ClusterReply::IsCopy { addresses: vec![text("a:1")], answers: true }),
        ),
        ("answer: owner", encoding::encode(&ClusterReply::Owner(Some(Epoch(4))))),
        ("answer: owner of the ledgers", encoding::encode(&ViewReply::Owner(NodeId(2), Epoch(4)))),
        ("answer: managed", encoding::encode(&ClusterReply::Managed { status: 200, body })),
        (
            "answer: formatted",
            encoding::encode(&HostReply::Formatted { uuid: DriveUuid([7; 16]), capacity_bytes: 300 }),
        ),
        ("answer: drives", encoding::encode(&HostReply::Drives(vec![drive]))),
        (
            "answer: stored",
            encoding::encode(&HostReply::Stored(vec![StoredLedger {
                ledger: LedgerId(2),
                seq: Seq(300),
                epoch: Epoch(4),
            }])),
        ),
        ("answer: located", encoding::encode(&HostReply::Located(Some(DriveUuid([7; 16]))))),
        (
            "answer: condition",
            encoding::encode(&HostReply::Condition(NodeCondition {
                version: text("1.2.3"),
                uptime_s: 300,
                wall_ns: -300,
                s3: Some(text("http://a:1")),
                format_level: 3,
                stores: vec![(
                    2,
                    SeenBy { node: 1, up: Some(false), since_s: 300, problem: Some(text("p")) },
                )],
            })),
        ),
        ("answer: probed", encoding::encode(&ClusterReply::Probed { wall_ns: -300 })),
        (
            "answer: checked",
            encoding::encode(&HostReply::Checked(vec![Finding {
                grade: Grade::Warning,
                code: text("clock"),
                found: text("f"),
                cost: text("c"),
                advice: text("a"),
            }])),
        ),
        (
            "answer: restored",
            encoding::encode(&HostReply::Restored(vec![
                RepairOutcome::Stored { bytes: 300 },
                RepairOutcome::Gone,
                RepairOutcome::NotNow,
                RepairOutcome::Unreadable,
            ])),
        ),
        ("answer: uploaded", encoding::encode(&HostReply::Uploaded { bytes: 300 })),
        ("answer: tried log", encoding::encode(&HostReply::TriedLog { system: text("etcd cluster 01") })),
    ]
}

/// Replies and events, by name.
fn others() -> Vec<(&'static str, Vec<u8>)> {
    let head = AnswerHead { position: Some(position()), ..AnswerHead::default() };
    let answer = |reply: Result<MetaReply, FsError>| pack_answer(0, head.clone(), &Ok(reply)).body.to_vec();
    let entry = MetaReply::Entry { attr: attr(), lease: Some(lease()), keep: true };
    let listed = DirEntry { name: Bytes::from_static(b"name"), cookie: 5, attr: attr(), lease: None };
    let dir = MetaReply::Dir { entries: vec![listed], parent: Ino::ROOT, end: true, keep: false };
    let blocks = ShardBlocks { bytes: Bytes::new(), checksums: vec![1, 2], note: None };
    let welcome = Welcome { incarnation: 5, ledgers: vec![(LedgerId(2), 1)] };
    let caller = Some(Caller { uid: 1000, gid: 100, groups: vec![4, 24] });
    let request = RequestId { session: SessionId(4), slot: 3, seq: 300 };
    let first = FirstTime { ino: Ino(300), wall_ns: 7 };
    let again = AnswerTime::Again(first);
    let reply = Box::new(Ok(MetaReply::Done));
    let early = MetaReply::Early { reply, after: Seq(300), count: 9, first: Some(first) };
    let event = |event| encoding::encode(&StreamEvent { number: 300, event });
    vec![
        (
            "envelope",
            encoding::encode(&Envelope {
                request,
                deadline_ms: 60_000,
                trace: 9,
                caller,
                answer: again,
                grant: None,
                refusable: true,
            }),
        ),
        ("answer: welcome", pack_answer(0, AnswerHead::default(), &Ok(welcome)).body.to_vec()),
        (
            "answer: refused",
            pack_answer(0, AnswerHead::default(), &Err::<bool, _>(Refusal::Elsewhere)).body.to_vec(),
        ),
        ("answer: done", answer(Ok(MetaReply::Done))),
        ("answer: failed", answer(Err(FsError::NotFound))),
        ("answer: entry", answer(Ok(entry))),
        ("answer: dir", answer(Ok(dir))),
        ("answer: map", answer(Ok(MetaReply::Map { pieces: vec![piece()], end: true }))),
        (
            "answer: beat",
            answer(Ok(MetaReply::Beat { version: 1, used_bytes: 2, drive_bytes: 3, events: 4 })),
        ),
        ("answer: early", answer(Ok(early))),
        (
            "answer: put",
            encoding::encode(&DriveReply::Put(Err(PutShardError::NoSpace { drive: DriveId(1) }))),
        ),
        ("answer: get", encoding::encode(&DriveReply::Get(Ok(blocks)))),
        ("answer: stat", encoding::encode(&DriveReply::Stat(stat()))),
        ("answer: copied", encoding::encode(&Ok::<_, FsError>(copied()))),
        ("answer: view", encoding::encode(&Ok::<_, FsError>(view()))),
        (
            "answer: blob",
            encoding::encode(&Ok::<_, FsError>(ViewReply::Blob(Ok(BlobPart { bytes: Bytes::new() })))),
        ),
        (
            "answer: no blob",
            encoding::encode(&Ok::<_, FsError>(ViewReply::Blob(Err(StoreError::NotFound("why".to_owned()))))),
        ),
        ("event: recall", event(OwnerEvent::Recall { lease: lease(), keep: Some(LeaseKind::Attr) })),
        (
            "event: forget",
            event(OwnerEvent::Forget { dir: Ino::ROOT, name: Bytes::from_static(b"n"), number: 6 }),
        ),
        ("event: lock granted", event(OwnerEvent::LockGranted { ticket: 5 })),
        ("event: lock lost", event(OwnerEvent::LockLost { lock: lock() })),
        ("event: revoked", event(OwnerEvent::Revoked { lease: lease() })),
    ]
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn lines<T: Serialize + Payload + DeserializeOwned + PartialEq + fmt::Debug>(
    operations: Operations,
    requests: Vec<T>,
) -> Vec<String> {
    assert_eq!(requests.len(), operations.0.len(), "there is one request of each kind");
    let line = |request: &T| {
        let Packed { code, body, payload } = pack_request(&operations, &Envelope::default(), request);
        let (envelope, fields) = open_envelope(&body).unwrap();
        assert_eq!(envelope, Envelope::default());
        assert_eq!(unpack_request::<T>(&operations, code, fields, payload).unwrap(), *request);
        let name = operations.name(code).unwrap();
        format!("{code:04x} {name} {}", hex(fields))
    };
    requests.iter().map(line).collect()
}

/// Bytes that programs of other versions send. Version 1 is frozen when machines join.
#[test]
fn messages_have_the_golden_bytes() {
    let hello = vec![GreetRequest::Hello { wants_facts: true, program: program() }];
    let mut all = lines(GREET, hello);
    all.extend(lines(SESSION, sessions()));
    all.extend(lines(OWNER, owner_requests()));
    all.extend(lines(REPLICA, replica_requests()));
    all.extend(lines(VIEW, view_requests()));
    let renew = JoinRequest::RenewClient { client: 7, request: Bytes::from_static(b"request") };
    let joins = vec![JoinRequest::Join(new_node()), JoinRequest::JoinClient(new_client()), renew];
    all.extend(lines(JOIN, joins));
    all.extend(lines(CLUSTER, cluster_requests()));
    all.extend(lines(HOST, host_requests()));
    all.extend(lines(DRIVE, drive_requests()));
    all.extend(answers_of_nodes().into_iter().map(|(name, bytes)| format!("{name} {}", hex(&bytes))));
    all.extend(others().into_iter().map(|(name, bytes)| format!("{name} {}", hex(&bytes))));
    let text = all.join("\n") + "\n";
    if text != include_str!("golden.txt") {
        panic!("the bytes of messages have changed; if that is wanted, golden.txt becomes:\n{text}");
    }
}

#[test]
fn payloads_travel_beside_the_message() {
    let put = drive_requests().remove(0);
    let packed = pack_request(&DRIVE, &Envelope::default(), &put);
    assert_eq!(packed.payload, Bytes::from_static(&[7; 4096]));
    assert!(packed.body.len() < 100, "{}", packed.body.len());
    let blocks = ShardBlocks { bytes: Bytes::from_static(&[7; 8192]), checksums: vec![1, 2], note: None };
    let packed = pack_answer(0x0202, AnswerHead::default(), &Ok(DriveReply::Get(Ok(blocks.clone()))));
    assert!(packed.payload.len() == 8192 && packed.body.len() < 100);
    let (_, answer) = unpack_answer::<DriveReply>(&packed.body, packed.payload).unwrap();
    assert_eq!(answer, Ok(DriveReply::Get(Ok(blocks))));
}
