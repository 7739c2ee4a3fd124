use wire::damage::{DamageSums, LossCause};

use super::*;
use base::{Epoch, MapId};
use proptest::prelude::*;
use wire::object::{
    Caller, Checksum, ChecksumAlgorithm, ChecksumKind, ChecksumType, ObjectHeaders, ObjectPart,
};
use wire::tier::{Origin, Stage, StageStat, TierMode, TierStat};

fn sample_inode() -> Inode {
    Inode {
        attr: Attr {
            ino: Ino(0x0102),
            kind: FileKind::Regular,
            mode: 0o644,
            uid: 1000,
            gid: 100,
            nlink: 2,
            rdev: 0,
            size: 4097,
            stored_bytes: 4096,
            atime_ns: 1,
            mtime_ns: 2,
            ctime_ns: -3,
            btime_ns: 4,
            data_ver: 5,
            attr_ver: 6,
            guard: Guard::default(),
        },
        flags: 0,
        quotas: [7, 8, 9],
        tier_policy: 0,
        parent: Ino(1),
        next_cookie: 10,
        segments: vec![MapSegment { file_off: 0, len: 1 << 60, map: MapId(11), map_off: 0 }],
        target: Bytes::new(),
        object: None,
    }
}

fn sample_extent() -> Piece {
    let content = PieceContent::Data(Content::Extent(ExtentRef {
        id: ExtentId(3),
        pg: PgId(4),
        k: 4,
        n: 6,
        extent_len: 8192,
        extent_off: 4096,
    }));
    Piece { len: 4096, birth_layer: 1, content }
}

#[track_caller]
fn unhex(text: &str) -> Vec<u8> {
    let digits = text.replace(' ', "");
    let byte = |at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap();
    (0..digits.len()).step_by(2).map(byte).collect()
}

fn check<V: Value + PartialEq + std::fmt::Debug>(value: V, golden: &str) {
    let bytes = value.encode();
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(hex, golden.replace([' ', '\n'], ""));
    assert_eq!(V::decode(&bytes).unwrap(), value);
    for cut in 0..bytes.len() {
        assert!(V::decode(&bytes[..cut]).is_err(), "a value cut at {cut} was accepted");
    }
    let mut longer = bytes.clone();
    longer.push(0);
    assert!(V::decode(&longer).is_err(), "a longer value was accepted");
    check_tails::<V>(&bytes, &value);
    let mut newer = bytes;
    newer[0] = 99;
    assert!(V::decode(&newer).is_err(), "an unknown format was accepted");
}

/// Tails of newer versions are accepted if they are well-formed and not essential.
#[track_caller]
fn check_tails<V: Value + PartialEq + std::fmt::Debug>(bytes: &[u8], value: &V) {
    let with = |tail: &[u8]| [bytes, tail].concat();
    for tail in [&[1, 0, 0][..], &[1, 1, 0, 9, 127, 2, 0, 8, 8]] {
        let longer = with(tail);
        assert_eq!(V::decode_with_tail(&longer).unwrap(), (V::decode(bytes).unwrap(), tail));
        assert_eq!(V::decode(&longer).unwrap(), *value);
    }
    let refused =
        [&[0, 0, 0][..], &[128, 0, 0], &[2, 0, 0, 1, 0, 0], &[1, 0, 0, 1, 0, 0], &[1, 2, 0, 9], &[1, 0]];
    for tail in refused {
        assert!(V::decode(&with(tail)).is_err(), "the tail {tail:?} was accepted");
    }
}

#[test]
fn inodes_keep_their_bytes() {
    check(
        sample_inode(),
        "01 01 0000 0201000000000000 a4010000 e8030000 64000000 02000000 00000000
         0110000000000000 0010000000000000
         0100000000000000 0200000000000000 fdffffffffffffff 0400000000000000
         0500000000000000 0600000000000000 07000000 08000000 09000000 00000000
         0100000000000000 0a00000000000000
         0100 0000000000000000 0000000000000010 0b00000000000000 0000000000000000 00000000",
    );
}

#[test]
fn pieces_keep_their_bytes() {
    check(
        sample_extent(),
        "01 02 0010000000000000 01000000 0300000000000000 04000000 04 06 00200000 00100000",
    );
    let content = PieceContent::Data(Content::Inline(Bytes::from_static(b"abc")));
    let inline = Piece { len: 3, birth_layer: 1, content };
    check(inline, "01 01 0300000000000000 01000000 03000000 616263");
}

#[test]
fn ranges_of_maps_keep_their_bytes() {
    check(
        Piece::of_map(MapId(5), 16, 4096),
        "01 03 0010000000000000 01000000 0500000000000000 1000000000000000",
    );
    let composed = Piece::of_map(MapId(COMPOSED_MAP | 5), 0, 1);
    assert!(Piece::decode(&composed.encode()).is_err(), "composed maps refer to plain ones only");
}

fn sample_checksum() -> Checksum {
    let of = ChecksumType { algorithm: ChecksumAlgorithm::Crc32c, kind: ChecksumKind::Composite };
    Checksum { of, value: Bytes::from_static(&[0xaa, 0xbb]) }
}

fn sample_record() -> ObjectRecord {
    let headers = ObjectHeaders {
        content_type: Some("t".into()),
        website_redirect: Some("/".into()),
        ..ObjectHeaders::default()
    };
    ObjectRecord { headers, user: vec![("k".into(), "v".into())], checksum: Some(sample_checksum()) }
}

#[test]
fn objects_keep_their_bytes() {
    let tag = ObjectTag { etag: "e".into(), data_ver: 5, checksum: Some(sample_checksum().of), body_len: 7 };
    let inode = Inode { object: Some(tag), flags: Inode::IMPLICIT, ..sample_inode() };
    let plain = sample_inode().encode();
    let (bytes, tail) = (inode.encode(), "01000000 65 0500000000000000 02 01 07000000");
    assert_eq!((bytes[0], &bytes[2..4], &bytes[4..plain.len()]), (2, &[1, 0][..], &plain[4..]));
    let hex: String = bytes[plain.len()..].iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(hex, tail.replace(' ', ""));
    assert_eq!(Inode::decode(&bytes).unwrap(), inode);
    for cut in 0..bytes.len() {
        assert!(Inode::decode(&bytes[..cut]).is_err(), "an inode cut at {cut} was accepted");
    }
    check(
        sample_record(),
        "01 02 01 01000000 74 07 01000000 2f 01000000 01000000 6b 01000000 76 02 01 02000000 aabb",
    );
    check(ObjectTags(vec![("k".into(), "v".into())]), "01 01000000 01000000 6b 01000000 76");
    check(
        ObjectParts(vec![
            ObjectPart { number: 3, len: 9, checksum: Some(Bytes::from_static(&[0xcc])) },
            ObjectPart { number: 4, len: 1, checksum: None },
        ]),
        "01 0200 0300 0900000000000000 01000000 cc 0400 0100000000000000 00000000",
    );
}

#[test]
fn uploads_and_parts_keep_their_bytes() {
    check(
        Upload {
            started_ns: 9,
            caller: Caller { uid: 1, gid: 2, groups: vec![3] },
            record: ObjectRecord::default(),
            tags: vec![("k".into(), "v".into())],
        },
        "01 0900000000000000 01000000 02000000 01000000 03000000
         08000000 01 00 00000000 00 00 01000000 01000000 6b 01000000 76",
    );
    check(
        Part {
            map: MapId(5),
            len: 6,
            stored_bytes: 7,
            mtime_ns: 8,
            etag: "e".into(),
            checksum: Some(sample_checksum()),
        },
        "01 0500000000000000 0600000000000000 0700000000000000 0800000000000000 01000000 65
         02 01 02000000 aabb",
    );
}

#[test]
fn small_values_keep_their_bytes() {
    check(
        Dentry { ino: Ino(5), kind: FileKind::Directory, cookie: 9 },
        "01 02 0500000000000000 0900000000000000",
    );
    let session = |is_elsewhere, is_silent| SessionRecord { began_ns: 3, is_silent, is_elsewhere };
    check(session(false, false), "01 0300000000000000");
    check(session(false, true), "02 0300000000000000");
    check(session(true, false), "03 0300000000000000");
    check(session(true, true), "04 0300000000000000");
    check(ExtentUse { refs: 2, live_bytes: 300 }, "01 02000000 2c01000000000000");
    check(
        IdRange { session: SessionId(1), count: 65536, open: RangeState::Open },
        "01 0100000000000000 0000010000000000 01",
    );
    check(
        ExtentPlace { pg: PgId(1), n: 6, k: 4, shard: 5, extent_len: 4096 },
        "01 01000000 06 04 05 00100000",
    );
    check(Slot { seq: 7, reply: Some(b"ok".to_vec()) }, "02 0700000000000000 02000000 6f6b");
    let slot = Slot::new(7, &MetaReply::Done);
    assert_eq!(Slot::decode(&slot.encode()).unwrap().reply(), Ok(MetaReply::Done));
    let earlier = Slot::decode(&unhex("01 0700000000000000 02000000 6f6b")).unwrap();
    assert_eq!((earlier.seq, earlier.reply()), (7, Err(FsError::Unknown)));
    let orphan = Orphan { sessions: vec![SessionId(3)], may_be_named: false };
    check(orphan.clone(), "01 01000000 0300000000000000");
    check(Orphan { may_be_named: true, ..orphan }, "02 01000000 0300000000000000");
    check(Usage { stored_bytes: 10, inodes: 2 }, "01 0a00000000000000 0200000000000000");
    check(
        LostRecord {
            extent: ExtentId(5),
            ino: Ino(3),
            found_s: 9,
            cause: LossCause::BlobMissing { serial: 7 },
        },
        "01 0500000000000000 0300000000000000 0900000000000000 02 0700000000000000",
    );
    check(
        DamageSums { pieces: 1, repaired: 2, unrepairable: 3, unnoted: 4, unnoted_s: 5 },
        "01 0100000000000000 0200000000000000 0300000000000000 0400000000000000 0500000000000000",
    );
    check(42u64, "01 2a00000000000000");
    let place = ExtentPlace { pg: PgId(1), n: 6, k: 4, shard: 0, extent_len: 4096 };
    let origin = Origin { ino: Ino(5), map: MapId(6), off: 4096 };
    check(
        Residence {
            stage: Stage::Both,
            written_s: 9,
            place,
            directory: Ino(3),
            origin,
            blob: Some((7, 8192)),
        },
        "03 02 0900000000000000 0700000000000000 00200000 0300000000000000 \
         0500000000000000 0600000000000000 0010000000000000 01 01000000 06 04 00 00100000",
    );
    check(
        Aged { place, directory: Ino(3), origin },
        "03 0300000000000000 0500000000000000 0600000000000000 0010000000000000 01 01000000 06 04 00 00100000",
    );
    check(
        BlobRecord { term: Epoch(3), bytes: 65536, extents: 2, live_bytes: 300 },
        "01 0300000000000000 00000100 02000000 2c01000000000000",
    );
    check(
        LooseBlob { term: Epoch(3), session: SessionId(0), free_ver: 5 },
        "01 0300000000000000 0000000000000000 0500000000000000",
    );
    let queued = StageStat { extents: 1, bytes: 4096 };
    let stat = TierStat { mode: TierMode::On, queueing: true, queued, ..TierStat::default() };
    check(
        TierState { since_s: 2, queue_from: Some((1, 0)), stat },
        &format!(
            "01 01 01 0200000000000000 0100000000000000 {} 0100000000000000 0010000000000000 {}",
            "00".repeat(8),
            "00".repeat(56)
        ),
    );
}

#[test]
fn residences_from_before_directories_were_noted_are_read() {
    let place = ExtentPlace { pg: PgId(1), n: 6, k: 4, shard: 0, extent_len: 4096 };
    let old = "01 02 0900000000000000 0700000000000000 00200000 01 01000000 06 04 00 00100000";
    let (blob, origin) = (Some((7, 8192)), Origin::default());
    let residence = Residence { stage: Stage::Both, written_s: 9, place, directory: Ino(0), origin, blob };
    assert_eq!(Residence::decode(&unhex(old)), Ok(residence));
    let of_2 =
        "02 02 0900000000000000 0700000000000000 00200000 0300000000000000 01 01000000 06 04 00 00100000";
    let in_directory = Residence { directory: Ino(3), ..residence };
    assert_eq!(Residence::decode(&unhex(of_2)), Ok(in_directory));
    let of_2 = "02 0300000000000000 01 01000000 06 04 00 00100000";
    assert_eq!(Aged::decode(&unhex(of_2)), Ok(in_directory.aged()));
    assert_eq!(Aged::decode(&unhex("01 01000000 06 04 00 00100000")), Ok(residence.aged()));
    for damaged in ["", "02", "03 0300000000000000 01 01000000 06 04 00 00100000"] {
        assert!(Aged::decode(&unhex(damaged)).is_err() && Residence::decode(&unhex(damaged)).is_err());
    }
}

#[test]
fn an_extent_piece_outside_its_extent_is_refused() {
    let mut piece = sample_extent();
    piece.len = 4097;
    assert!(Piece::decode(&piece.encode()).is_err());
}

proptest! {
    #[test]
    fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let mut bytes = bytes;
        for force in [false, true] {
            if force && !bytes.is_empty() {
                bytes[0] = FORMAT;
            }
            let _ = Inode::decode(&bytes);
            let _ = Dentry::decode(&bytes);
            let _ = Piece::decode(&bytes);
            let _ = IdRange::decode(&bytes);
            let _ = Slot::decode(&bytes);
            let _ = Orphan::decode(&bytes);
            let _ = ObjectRecord::decode(&bytes);
            let _ = ObjectTags::decode(&bytes);
            let _ = ObjectParts::decode(&bytes);
            let _ = Upload::decode(&bytes);
            let _ = Part::decode(&bytes);
        }
    }
}

#[test]
fn a_piece_beyond_its_extent_is_refused() {
    let piece = |len| Piece { len, ..sample_extent() }.encode();
    assert!(Piece::decode(&piece(4096)).is_ok());
    assert!(Piece::decode(&piece(4097)).is_err());
    assert!(Piece::decode(&piece(u64::MAX)).is_err());
}

#[test]
fn a_guard_is_in_the_flags_of_an_inode() {
    for (append_only, immutable, flags) in [(true, false, 2 + 1), (false, true, 4 + 1), (true, true, 6 + 1)] {
        let mut inode = Inode { flags: Inode::IMPLICIT, ..sample_inode() };
        inode.attr.guard = Guard { append_only, immutable };
        let bytes = inode.encode();
        assert_eq!(bytes[2..4], [flags, 0]);
        assert_eq!(Inode::decode(&bytes), Ok(inode));
    }
}
