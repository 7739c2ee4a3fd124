//! Notes of unreadable pieces: they stay bound to their pieces through every change.

use wire::damage::{DamageReply, DamageRequest, DamageSums, LOST_PIECES_MAX, LossCause, NameSearch};
use wire::meta::{PiecePosition, SetAttr};

use super::*;

use FileKind::Regular;

const CAUSE: LossCause = LossCause::Shards { damaged: 0b111, missing: 0 };
const KIB: u64 = 1024;

struct Files {
    ledger: Ledger,
    me: SessionId,
    file: Ino,
    id: u64,
}

/// A file of two extents.
fn files() -> Files {
    let mut ledger = Ledger::new();
    let me = ledger.session();
    let dir = ledger.make(me, Ino::ROOT, "dir", FileKind::Directory);
    let file = ledger.make(me, dir, "file", Regular);
    let id = ledger.extents(me);
    let pieces = [piece(0, 64 * KIB, id, 0, 65_536), piece(64 * KIB, 64 * KIB, id + 1, 0, 65_536)];
    ledger.write(me, file, &pieces).unwrap();
    Files { ledger, me, file, id }
}

impl Files {
    fn ask(&mut self, request: DamageRequest) -> DamageReply {
        match self.ledger.ask(self.me, MetaRequest::Damage(request)) {
            Ok(MetaReply::Damage(reply)) => reply,
            other => panic!("{other:?}"),
        }
    }

    fn at(&mut self, off: u64) -> (PiecePosition, MapPiece) {
        match self.ask(DamageRequest::PieceAt { ino: self.file, off }) {
            DamageReply::Piece(Some(found)) => found,
            other => panic!("{other:?}"),
        }
    }

    fn note(&mut self, off: u64) -> bool {
        let (position, piece) = self.at(off);
        let ino = self.file;
        self.ask(DamageRequest::Note { position, piece, ino, cause: CAUSE }) == DamageReply::Noted(true)
    }

    /// Offset and length of the noted pieces; also checks the sums.
    fn lost(&mut self) -> (Vec<(u64, u64)>, DamageSums) {
        let DamageReply::Lost { pieces, sums } = self.ask(DamageRequest::List { after: None, limit: 100 })
        else {
            panic!("another answer")
        };
        assert_eq!(pieces.len() as u64, sums.pieces);
        let range = |lost: &wire::damage::LostPiece| {
            let piece = lost.piece.as_ref().unwrap();
            assert_eq!((lost.cause, lost.position.off), (CAUSE, piece.off));
            (piece.off, piece.len)
        };
        (pieces.iter().map(range).collect(), sums)
    }

    #[track_caller]
    fn check(&mut self, lost: &[(u64, u64)]) {
        assert_eq!(self.lost().0, lost);
    }
}

#[test]
fn what_is_lost_stays_noted_over_restarts_and_goes_with_the_file() {
    let mut files = files();
    files.check(&[]);
    assert!(files.note(70 * KIB) && files.note(70 * KIB));
    files.check(&[(64 * KIB, 64 * KIB)]);
    assert_eq!(files.lost().1, DamageSums { pieces: 1, unrepairable: 3, ..DamageSums::default() });
    files.ledger.commit();
    files.ledger = files.ledger.restart();
    files.me = files.ledger.session();
    files.check(&[(64 * KIB, 64 * KIB)]);
    let (me, size) = (files.me, Some(0));
    files
        .ledger
        .attr(me, MetaRequest::SetAttr { ino: files.file, set: SetAttr { size, ..SetAttr::default() } });
    files.ledger.purge(me);
    files.check(&[]);
    assert_eq!(files.lost().1.unrepairable, 3, "that was found stays counted");
}

#[test]
fn what_is_left_of_a_lost_piece_that_was_cut_is_noted_until_somebody_has_read_it() {
    let mut files = files();
    assert!(files.note(0));
    let id = files.ledger.extents(files.me);
    files.ledger.write(files.me, files.file, &[piece(16 * KIB, 16 * KIB, id, 0, 16_384)]).unwrap();
    files.check(&[(0, 16 * KIB), (32 * KIB, 32 * KIB)]);
    let map = files.at(0).0.map;
    files.ask(DamageRequest::Settle { positions: vec![PiecePosition { map, off: 32 * KIB }] });
    files.check(&[(0, 16 * KIB)]);
    files.ledger.write(files.me, files.file, &[piece(0, 16 * KIB, id + 1, 0, 16_384)]).unwrap();
    files.check(&[]);
}

#[test]
fn what_is_not_there_any_more_is_not_noted() {
    let mut files = files();
    let (position, old) = files.at(0);
    files.ledger.write(files.me, files.file, &[piece(0, 64 * KIB, files.id + 9, 0, 65_536)]).unwrap();
    let request = DamageRequest::Note { position, piece: old, ino: files.file, cause: CAUSE };
    assert_eq!(files.ask(request), DamageReply::Noted(false));
    files.check(&[]);
}

#[test]
fn beyond_what_fits_losses_are_counted_until_everything_was_looked_at_again() {
    let mut files = files();
    let key = files.ledger.core.keys.value("damage");
    let full = DamageSums { pieces: LOST_PIECES_MAX, ..DamageSums::default() };
    files
        .ledger
        .core
        .internal(files.ledger.now, |op| {
            op.txn.put(key, &full);
            Ok(())
        })
        .unwrap();
    files.ledger.now.wall_ns = 50_000_000_000;
    assert!(!files.note(0) && !files.note(0));
    let sums = |files: &mut Files| match files.ask(DamageRequest::List { after: None, limit: 1 }) {
        DamageReply::Lost { sums, .. } => (sums.unnoted, sums.unnoted_s),
        other => panic!("{other:?}"),
    };
    assert_eq!(sums(&mut files), (2, 50));
    files.ask(DamageRequest::LookedAtAll { since_s: 50 });
    assert_eq!(sums(&mut files), (2, 50), "it began before");
    files.ask(DamageRequest::LookedAtAll { since_s: 51 });
    assert_eq!(sums(&mut files), (0, 0));
}

#[test]
fn a_piece_leads_to_its_file_and_that_to_its_names() {
    let mut files = files();
    let map = files.at(0).0.map;
    let found = files.ask(DamageRequest::FilesOf { maps: vec![map], after: Ino(0) });
    assert_eq!(found, DamageReply::Files { files: vec![(map, files.file)], next: None });
    let name_of =
        |files: &mut Files, search| match files.ask(DamageRequest::NameOf { ino: files.file, search }) {
            DamageReply::Name { found, next: None } => found,
            other => panic!("{other:?}"),
        };
    let parent = || NameSearch::Parent { after: None };
    let (dir, found) = name_of(&mut files, parent()).unwrap();
    assert_eq!(found, name("file"));
    let (ino, me) = (files.file, files.me);
    files.ledger.attr(me, MetaRequest::Link { ino, parent: Ino::ROOT, name: name("other") });
    files.ledger.attr(me, MetaRequest::Unlink { parent: dir, name: name("file") });
    assert_eq!(name_of(&mut files, parent()), None, "the name by which it was made is gone");
    assert_eq!(name_of(&mut files, NameSearch::All { after: None }), Some((Ino::ROOT, name("other"))));
}

#[test]
fn a_name_is_found_in_steps() {
    let mut files = files();
    let me = files.me;
    for number in 0..10_000 {
        files.ledger.make(me, Ino::ROOT, &format!("a{number:05}"), Regular);
    }
    let last = files.ledger.make(me, Ino::ROOT, "z", Regular);
    let (mut after, mut steps) = (None, 0);
    loop {
        steps += 1;
        match files.ask(DamageRequest::NameOf { ino: last, search: NameSearch::Parent { after } }) {
            DamageReply::Name { found: Some(found), .. } => break assert_eq!(found, (Ino::ROOT, name("z"))),
            DamageReply::Name { next: Some(next), .. } => after = Some(next),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(steps, 2);
}
