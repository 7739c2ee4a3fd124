use proptest::prelude::*;

use super::*;

fn put(extent: u64, blocks: u32, payload_block: u32) -> Record {
    Record {
        op: RecordOp::Put,
        key: ShardKey { ledger: LedgerId(1), extent: ExtentId(extent), shard: ShardIndex(2) },
        shape: ShardShape { pg: PgId(3), k: 8, m: 2, extent_len: 99 },
        note: ShardNote { ino: Ino(extent + 7), off: 1 << 40, key_version: 3 },
        blocks,
        payload_block,
        sums_at: 0,
        sums: (0..blocks).collect(),
    }
}

fn tombstone(extent: u64) -> Record {
    let shape = ShardShape { pg: PgId(0), k: 0, m: 0, extent_len: 0 };
    Record {
        op: RecordOp::Tombstone,
        blocks: 0,
        payload_block: 0,
        sums: Vec::new(),
        shape,
        note: ShardNote::default(),
        ..put(extent, 1, 0)
    }
}

fn position(ledger: u32) -> Position {
    Position { ledger: LedgerId(ledger), lineage: Lineage(u64::MAX), seq: Seq(u64::from(ledger) << 33) }
}

fn frame(records: &[Record], header_blocks: u32, payload_blocks: u32) -> Vec<u8> {
    frame_with(records, &[position(1), position(9)], header_blocks, payload_blocks)
}

fn frame_with(
    records: &[Record],
    positions: &[Position],
    header_blocks: u32,
    payload_blocks: u32,
) -> Vec<u8> {
    let header = FrameHeader {
        generation: 5,
        seq: 6,
        prev_seq: 4,
        durable_seq: 3,
        segment: 1,
        start_block: 9,
        header_blocks,
        payload_blocks,
        records: records.len() as u32,
        positions: positions.len() as u32,
    };
    let mut bytes = vec![0; header_blocks as usize * BLOCK];
    header.encode_into(records, positions, &mut bytes);
    bytes
}

#[test]
fn a_frame_comes_back_and_says_where_its_checksums_lie() {
    let records = [put(1, 300, 1), tombstone(2), put(3, 2, 301)];
    let bytes = frame(&records, 1, 302);
    let Header { fields: header, records: read, positions } = FrameHeader::decode(&bytes).unwrap();
    assert_eq!(positions, [position(1), position(9)]);
    assert_eq!((header.seq, header.prev_seq, header.durable_seq, header.start_block), (6, 4, 3, 9));
    assert_eq!(read.len(), 3);
    for (read, written) in read.iter().zip(&records) {
        assert_eq!(read, &Record { sums_at: read.sums_at, ..written.clone() });
        for (index, sum) in written.sums.iter().enumerate() {
            let at = read.sums_at as usize + index * 4;
            assert_eq!(bytes[at..at + 4], sum.to_le_bytes());
        }
        let note = &bytes[read.sums_at as usize - NOTE_BYTES..read.sums_at as usize];
        assert_eq!(decode_note(note), Some(written.note), "it is found in front of the checksums");
    }
}

#[test]
fn a_frame_may_have_nothing_but_positions() {
    let header = FrameHeader::decode(&frame_with(&[], &[position(4)], 1, 0)).unwrap();
    assert_eq!((header.records.len(), header.positions), (0, vec![position(4)]));
}

#[test]
fn a_damaged_note_is_none() {
    let note = encode_note(&ShardNote { ino: Ino(5), off: 6, key_version: 7 });
    for bit in 0..NOTE_BYTES * 8 {
        let mut damaged = note;
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(decode_note(&damaged), None, "bit {bit}");
    }
}

#[test]
fn a_payload_outside_the_frame_is_refused() {
    assert!(FrameHeader::decode(&frame(&[put(1, 2, 1)], 1, 1)).is_err());
    assert!(FrameHeader::decode(&frame(&[put(1, 2, 0)], 1, 2)).is_err());
    assert!(FrameHeader::decode(&frame(&[put(1, 2, u32::MAX)], 1, 2)).is_err());
}

proptest! {
    #[test]
    fn a_changed_header_is_refused_and_never_panics(at in 0usize..BLOCK, xor in 1u8..) {
        let mut bytes = frame(&[put(1, 3, 1), tombstone(2)], 1, 3);
        bytes[at] ^= xor;
        prop_assert!(FrameHeader::decode(&bytes).is_err());
    }

    #[test]
    fn a_wrong_header_with_a_good_checksum_never_panics(
        changes in prop::collection::vec((0usize..400, any::<u8>()), 1..8),
    ) {
        let mut bytes = frame(&[put(1, 3, 1), tombstone(2)], 1, 3);
        for (at, value) in changes {
            bytes[at] = value;
        }
        bytes[CRC_AT..CRC_AT + 4].fill(0);
        seal_crc(&mut bytes, CRC_AT);
        let _ = FrameHeader::decode(&bytes);
    }

    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..9000)) {
        let _ = FrameHeader::peek(&bytes);
        let _ = FrameHeader::decode(&bytes);
        let _ = crate::format::superblock::Superblock::decode(&bytes);
        let _ = crate::format::segment::SegmentHeader::decode(&bytes);
        let _ = crate::format::checkpoint::Run::decode(&bytes);
    }
}
