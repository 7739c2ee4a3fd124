use proptest::prelude::*;

use super::*;

const HEADING: Heading = Heading { cluster: ClusterId([0xc1; 16]), made_s: 1_700_000_000 };

fn row(key: &'static str, value: &'static str) -> (Bytes, Bytes) {
    (Bytes::from_static(key.as_bytes()), Bytes::from_static(value.as_bytes()))
}

/// A backup of two ledgers, as sections.
fn sections() -> Vec<Section> {
    let totals = |ledgers, rows, bytes| Totals { ledgers, rows, bytes };
    vec![
        Section::Ledger(LedgerId(1), Applied { seq: Seq(300), epoch: Epoch(2) }),
        Section::Rows(vec![row("a", "one"), row("b", "")]),
        Section::Rows(vec![row("c", "three")]),
        Section::LedgerEnd(totals(1, 3, 11)),
        Section::Ledger(LedgerId(0), Applied { seq: Seq(9), epoch: Epoch(2) }),
        Section::LedgerEnd(totals(1, 0, 0)),
        Section::End(totals(2, 3, 11)),
    ]
}

fn encode(sections: &[Section]) -> Vec<u8> {
    let mut bytes = HEADING.encode();
    for (number, section) in (0..).zip(sections) {
        bytes.extend(section.encode(number));
    }
    bytes
}

fn decode(bytes: &[u8]) -> Result<Vec<Section>, BackupError> {
    let mut reader = BackupReader::new(bytes)?;
    assert_eq!(reader.heading(), HEADING);
    let mut found = Vec::new();
    while let Some(section) = reader.next()? {
        found.push(section);
    }
    assert_eq!(reader.at(), bytes.len() as u64);
    Ok(found)
}

/// The sections are refused, although each is what was written.
#[track_caller]
fn misplaced(change: impl FnOnce(&mut Vec<Section>)) {
    let mut changed = sections();
    change(&mut changed);
    assert!(matches!(decode(&encode(&changed)), Err(BackupError::Damaged { .. } | BackupError::Cut(_))));
}

#[test]
fn a_backup_reads_as_it_was_written() {
    assert_eq!(decode(&encode(&sections())).unwrap(), sections());
}

#[test]
fn the_bytes_are_those_of_the_format() {
    let hex: String = encode(&sections()[..2]).iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(hex, GOLDEN);
}

const GOLDEN: &str = concat!(
    "46424241434b555001000000c1c1c1c1c1c1c1c1c1c1c1c1c1c1c1c100f1536500000000bb41d7be",
    "0100000000140000000100000002000000000000002c01000000000000eaaffb0b02010000001500",
    "00000100000061030000006f6e65010000006200000000e9b1495c",
);

#[test]
fn a_backup_that_was_cut_anywhere_is_noticed() {
    let bytes = encode(&sections());
    for len in 1..bytes.len() {
        assert!(matches!(decode(&bytes[..len]), Err(BackupError::Cut(at)) if at == len as u64), "{len}");
    }
    assert!(matches!(decode(&[]), Err(BackupError::Other)));
}

#[test]
fn a_changed_bit_anywhere_is_noticed() {
    let bytes = encode(&sections());
    for bit in 0..bytes.len() * 8 {
        let mut changed = bytes.clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        assert!(decode(&changed).is_err(), "bit {bit}");
    }
}

#[test]
fn something_else_and_what_newer_versions_write_are_told_apart() {
    assert!(matches!(decode(&[b'x'; 100]), Err(BackupError::Other)));
    let mut newer = encode(&sections());
    newer[8] = 2;
    assert!(matches!(decode(&newer), Err(BackupError::Newer(2))));
    newer[8] = 0;
    assert!(matches!(decode(&newer), Err(BackupError::Damaged { at: 0, .. })));
}

#[test]
fn what_is_lost_doubled_or_misplaced_is_noticed() {
    for index in 0..sections().len() {
        misplaced(|sections| drop(sections.remove(index)));
        misplaced(|sections| sections.insert(index, sections[index].clone()));
    }
    misplaced(|sections| sections.swap(1, 2));
    misplaced(|sections| sections[4] = Section::Ledger(LedgerId(1), Applied::default()));
    misplaced(|sections| sections[2] = Section::Rows(vec![row("d", "3"), row("c", "four")]));
    misplaced(|sections| sections[2] = Section::Rows(Vec::new()));
    misplaced(|sections| sections.push(Section::End(Totals::default())));
    // Sections with numbers that do not follow each other.
    let (mut bytes, section) = (HEADING.encode(), sections());
    bytes.extend(section[0].encode(1));
    assert!(matches!(decode(&bytes), Err(BackupError::Damaged { .. })));
}

#[test]
fn a_length_takes_no_memory_that_the_file_has_not() {
    let mut bytes = HEADING.encode();
    bytes.extend([ROWS, 0, 0, 0, 0]);
    bytes.extend(BODY_BYTES_MAX.to_le_bytes());
    assert!(matches!(decode(&bytes), Err(BackupError::Cut(_))));
    let end = bytes.len();
    bytes[end - 4..].copy_from_slice(&(BODY_BYTES_MAX + 1).to_le_bytes());
    assert!(matches!(decode(&bytes), Err(BackupError::Damaged { .. })));
}

#[test]
fn a_writer_leaves_a_backup_or_nothing() {
    let (dir, env) = (tempfile::tempdir().unwrap(), Env::real());
    let path = dir.path().join("backup");
    let begin = || BackupWriter::begin(&env, &path, HEADING).unwrap();
    let mut writer = begin();
    assert!(BackupWriter::begin(&env, &path, HEADING).is_err(), "another one writes");
    let start = writer.mark();
    // The first attempt at a ledger is given up.
    writer.begin_ledger(LedgerId(1), Applied::default()).unwrap();
    writer.rows(vec![row("x", "an attempt that is given up, and is longer than all that comes in its place: it must leave nothing, also at the end of the file, where there is nothing else in its place; so it has a few words more than it needs, and these are the last ones of them")]).unwrap();
    writer.rewind(start);
    for section in sections() {
        match section {
            Section::Ledger(ledger, at) => writer.begin_ledger(ledger, at).unwrap(),
            Section::Rows(rows) => writer.rows(rows).unwrap(),
            Section::LedgerEnd(totals) => assert_eq!(writer.end_ledger().unwrap(), totals),
            Section::End(_) => {}
        }
    }
    writer.rows(Rows::new()).unwrap();
    assert!(!env.files.exists(&path));
    let (total, bytes) = writer.finish().unwrap();
    assert_eq!((total.rows, bytes), (3, encode(&sections()).len() as u64));
    assert_eq!(env.files.read(&path).unwrap(), encode(&sections()));
    let mode = rustix::fs::stat(&path).unwrap().st_mode & 0o777;
    assert_eq!(mode, 0o600);
    // A further one that does not end leaves the earlier.
    begin().begin_ledger(LedgerId(1), Applied::default()).unwrap();
    assert_eq!(env.files.list(dir.path()).unwrap(), std::slice::from_ref(&path));
    let from_file = FromFile::open(&env, &path).unwrap();
    assert_eq!(from_file.len(), bytes);
    let mut reader = BackupReader::new(from_file).unwrap();
    while reader.next().unwrap().is_some() {}
}

proptest! {
    #[test]
    fn any_bytes_are_decoded_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let mut whole = HEADING.encode();
        whole.extend(&bytes);
        prop_assert!(decode(&whole).is_err());
        drop(BackupReader::new(&bytes[..]).map(|mut reader| while let Ok(Some(_)) = reader.next() {}));
    }

    #[test]
    fn any_bodies_with_right_checksums_are_decoded_or_refused(
        bodies in prop::collection::vec((0..6u8, prop::collection::vec(0..4u8, 0..40)), 0..5),
    ) {
        let mut whole = HEADING.encode();
        for (number, (kind, body)) in (0..).zip(&bodies) {
            let mut section = Writer::new();
            section.u8(*kind).u32(number).blob(body);
            whole.extend(with_sum(section.finish()));
        }
        // Nobody meets the totals by chance, except those of an empty backup.
        if let Ok(found) = decode(&whole) {
            prop_assert!(matches!(found.last(), Some(Section::End(_))));
        }
    }
}
