//! What a newer version has added to values outlasts the changes of this one.

use super::*;
use crate::values::{IdRange, RangeState};

const TAIL: [u8; 4] = [7, 1, 0, 9];
const KIB: u64 = 1 << 10;

/// Adds a tail to the values of these tables.
fn extend(ledger: &mut Ledger, tables: &[u8]) {
    let values = ledger.dump().into_iter().filter(|(key, _)| tables.contains(&key[4]));
    let longer: Vec<_> = values.map(|(key, value)| (key, [&value[..], &TAIL].concat())).collect();
    assert!(tables.iter().all(|table| longer.iter().any(|(key, _)| key[4] == *table)));
    let put = |op: &mut Op<'_>| {
        longer.into_iter().for_each(|(key, value)| op.txn.put_bytes(key, value));
        Ok(())
    };
    ledger.core.internal(ledger.now, put).unwrap();
    ledger.commit();
}

fn has_tail(ledger: &Ledger, key: &[u8]) -> bool {
    ledger.dump()[key].ends_with(&TAIL)
}

fn open(ledger: &mut Ledger, session: SessionId, ino: Ino) {
    ledger.ask(session, MetaRequest::Open { ino, intent: OpenIntent::Read }).unwrap();
}

#[test]
fn changed_inodes_pieces_and_sums_keep_their_tails() {
    let mut ledger = Ledger::new();
    let keys = ledger.core.keys;
    let me = ledger.session();
    let file = ledger.make(me, Ino::ROOT, "file", FileKind::Regular);
    let id = ledger.extents(me);
    ledger.write(me, file, &[piece(0, 64 * KIB, id, 0, 65_536)]).unwrap();
    extend(&mut ledger, b"IMV");
    ledger.write(me, file, &[piece(16 * KIB, 16 * KIB, id + 1, 0, 16_384)]).unwrap();
    ledger.make(me, Ino::ROOT, "other", FileKind::Regular);
    let map =
        ledger.dump().into_keys().find(|key| key[4] == b'M').map(|key| Keys::map_of_piece(&key)).unwrap();
    assert!(has_tail(&ledger, &keys.inode(file)) && has_tail(&ledger, &keys.inode(Ino::ROOT)));
    assert!(has_tail(&ledger, &keys.value("usage")) && has_tail(&ledger, &keys.value("next_ino")));
    let pieces = [0, 16, 32].map(|off| has_tail(&ledger, &keys.piece(map, off * KIB)));
    assert_eq!(pieces, [true, false, true], "both parts of the piece that was cut, and not the new one");
    // The extent is shared by both parts now.
    extend(&mut ledger, b"E");
    ledger.write(me, file, &[piece(0, 4 * KIB, id + 2, 0, 4096)]).unwrap();
    assert!(has_tail(&ledger, &keys.extent(ExtentId(id))));
}

#[test]
fn ranges_that_are_closed_keep_their_tails() {
    let mut ledger = Ledger::new();
    let keys = ledger.core.keys;
    let me = ledger.session();
    let first = ExtentId(ledger.extents(me));
    extend(&mut ledger, b"R");
    for _ in 0..super::super::space::OPEN_RANGES_MAX {
        ledger.extents(me);
    }
    let range = IdRange::decode(&ledger.dump()[&keys.range(first)]).unwrap();
    assert_eq!(range.open, RangeState::Closed);
    assert!(has_tail(&ledger, &keys.range(first)));
}

#[test]
fn records_of_open_inodes_without_a_name_keep_their_tails() {
    let mut ledger = Ledger::new();
    let key = |ledger: &Ledger, ino| ledger.core.keys.orphan(ino);
    let (one, two) = (ledger.session(), ledger.session());
    let file = ledger.make(one, Ino::ROOT, "file", FileKind::Regular);
    open(&mut ledger, one, file);
    ledger.attr(two, MetaRequest::Unlink { parent: Ino::ROOT, name: name("file") });
    extend(&mut ledger, b"O");
    open(&mut ledger, two, file);
    assert!(has_tail(&ledger, &key(&ledger, file)), "another session opens it");
    ledger.ask(one, MetaRequest::Close { inos: vec![file] }).unwrap();
    assert!(has_tail(&ledger, &key(&ledger, file)), "the first session closes it");
}
