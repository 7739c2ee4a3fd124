//! Keys of a ledger's state. Order-preserving: integers are big-endian, names end in a byte below any in them.
//!
//! `docs/formats/ledger.md` draws every key. Each starts with `ledger:u32 | table:u8`. The tables of versioned
//! things end in `!layer:u32`, newest layer first; this version of Forebay writes layer 1 only.

use base::{DriveId, ExtentId, Ino, LedgerId, MapId, PgId, Seq, SessionId};
use wire::meta::FileKind;

/// The layer of everything that is not in a snapshot.
pub const LIVE_LAYER: u32 = 1;

/// A key under construction.
#[derive(Debug, Clone, Copy)]
pub struct Keys {
    ledger: LedgerId,
}

/// Bounds of a range of keys: from (included), to (excluded).
pub type KeyRange = (Vec<u8>, Vec<u8>);

impl Keys {
    /// Keys of one ledger.
    pub const fn new(ledger: LedgerId) -> Self {
        Self { ledger }
    }

    fn start(&self, table: u8, tail_len: usize) -> Vec<u8> {
        let mut key = Vec::with_capacity(5 + tail_len);
        key.extend_from_slice(&self.ledger.0.to_be_bytes());
        key.push(table);
        key
    }

    /// All keys of a table.
    pub fn table(&self, table: u8) -> KeyRange {
        (self.start(table, 0), self.table_end(table))
    }

    /// The end of a table.
    pub fn table_end(&self, table: u8) -> Vec<u8> {
        self.start(table + 1, 0)
    }

    fn with_u64(&self, table: u8, first: u64) -> Vec<u8> {
        let mut key = self.start(table, 24);
        key.extend_from_slice(&first.to_be_bytes());
        key
    }

    fn layered(mut key: Vec<u8>) -> Vec<u8> {
        key.extend_from_slice(&(!LIVE_LAYER).to_be_bytes());
        key
    }

    /// Table I: an inode.
    pub fn inode(&self, ino: Ino) -> Vec<u8> {
        Self::layered(self.with_u64(b'I', ino.0))
    }

    /// Table D: a directory entry. A directory sorts as if its name ended in `/`, which gives S3's key order.
    pub fn dentry(&self, dir: Ino, name: &[u8], kind: FileKind) -> Vec<u8> {
        let mut key = self.with_u64(b'D', dir.0);
        key.extend_from_slice(name);
        if kind == FileKind::Directory {
            key.push(b'/');
        }
        key.push(0);
        Self::layered(key)
    }

    /// All entries of a directory.
    pub fn dentries(&self, dir: Ino) -> KeyRange {
        (self.with_u64(b'D', dir.0), self.with_u64(b'D', dir.0 + 1))
    }

    /// The directory in a key of table D.
    pub fn dir_of_dentry(key: &[u8]) -> Ino {
        Ino(u64_at(key, 5))
    }

    /// The name in a key of table D.
    pub fn name_of_dentry(key: &[u8]) -> &[u8] {
        let tail = &key[13..key.len() - 5];
        tail.strip_suffix(b"/").unwrap_or(tail)
    }

    /// Table M: the piece of a map that begins at `off`.
    pub fn piece(&self, map: MapId, off: u64) -> Vec<u8> {
        let mut key = self.with_u64(b'M', map.0);
        key.extend_from_slice(&off.to_be_bytes());
        Self::layered(key)
    }

    /// The pieces of a map that begin in `[from, to)`.
    pub fn pieces(&self, map: MapId, from: u64, to: u64) -> KeyRange {
        let mut first = self.with_u64(b'M', map.0);
        first.extend_from_slice(&from.to_be_bytes());
        let mut last = self.with_u64(b'M', map.0);
        last.extend_from_slice(&to.to_be_bytes());
        (first, last)
    }

    /// The pieces of all maps, after the given one.
    pub fn all_pieces(&self, after: Option<(MapId, u64)>) -> KeyRange {
        let first = match after {
            Some((map, off)) => {
                let mut key = self.piece(map, off);
                key.push(0);
                key
            }
            None => self.start(b'M', 0),
        };
        (first, self.start(b'M' + 1, 0))
    }

    /// The map in a key of table M.
    pub fn map_of_piece(key: &[u8]) -> MapId {
        MapId(u64_at(key, 5))
    }

    /// The offset in a key of table M.
    pub fn off_of_piece(key: &[u8]) -> u64 {
        u64_at(key, 13)
    }

    /// Table X: an extended attribute.
    pub fn xattr(&self, ino: Ino, name: &[u8]) -> Vec<u8> {
        let mut key = self.with_u64(b'X', ino.0);
        key.extend_from_slice(name);
        key.push(0);
        Self::layered(key)
    }

    /// All extended attributes of an inode.
    pub fn xattrs(&self, ino: Ino) -> KeyRange {
        (self.with_u64(b'X', ino.0), self.with_u64(b'X', ino.0 + 1))
    }

    /// The name in a key of table X.
    pub fn name_of_xattr(key: &[u8]) -> &[u8] {
        &key[13..key.len() - 5]
    }

    /// Table E: an extent that is shared or partly dead.
    pub fn extent(&self, extent: ExtentId) -> Vec<u8> {
        self.with_u64(b'E', extent.0)
    }

    /// Table R: a range of extent ids handed to a session, by its first id.
    pub fn range(&self, first: ExtentId) -> Vec<u8> {
        self.with_u64(b'R', first.0)
    }

    /// The first id in a key of table R.
    pub fn first_of_range(key: &[u8]) -> ExtentId {
        ExtentId(u64_at(key, 5))
    }

    /// All ranges.
    pub fn ranges(&self) -> KeyRange {
        (self.start(b'R', 0), self.start(b'R' + 1, 0))
    }

    /// Table W: a shard that a drive is owed.
    pub fn owed(&self, drive: DriveId, extent: ExtentId) -> Vec<u8> {
        let mut key = self.start(b'W', 12);
        key.extend_from_slice(&drive.0.to_be_bytes());
        key.extend_from_slice(&extent.0.to_be_bytes());
        key
    }

    /// The drive and extent in a key of table W.
    pub fn owed_of_key(key: &[u8]) -> (DriveId, ExtentId) {
        let drive = u32::from_be_bytes(key[5..9].try_into().expect("keys of this table are this long"));
        (DriveId(drive), ExtentId(u64_at(key, 9)))
    }

    /// All owed shards.
    pub fn all_owed(&self) -> KeyRange {
        (self.start(b'W', 0), self.start(b'W' + 1, 0))
    }

    /// Table F: an extent waiting for deletion since ledger version `free_ver`.
    pub fn free(&self, free_ver: u64, extent: ExtentId) -> Vec<u8> {
        let mut key = self.with_u64(b'F', free_ver);
        key.extend_from_slice(&extent.0.to_be_bytes());
        key
    }

    /// Extents that became free before ledger version `before`.
    pub fn frees(&self, before: u64) -> KeyRange {
        (self.start(b'F', 0), self.with_u64(b'F', before))
    }

    /// Extents that became free in ledger version `first` or later.
    pub fn frees_from(&self, first: u64) -> KeyRange {
        (self.with_u64(b'F', first), self.table_end(b'F'))
    }

    /// The version and extent in a key of table F.
    pub fn free_of_key(key: &[u8]) -> (u64, ExtentId) {
        (u64_at(key, 5), ExtentId(u64_at(key, 13)))
    }

    /// Table P: a map whose pieces nothing refers to any more.
    pub fn purge(&self, map: MapId) -> Vec<u8> {
        self.with_u64(b'P', map.0)
    }

    /// All maps to purge.
    pub fn purges(&self) -> KeyRange {
        (self.start(b'P', 0), self.start(b'P' + 1, 0))
    }

    /// The map in a key of table P.
    pub fn map_of_purge(key: &[u8]) -> MapId {
        MapId(u64_at(key, 5))
    }

    /// Table O: an inode without a name that sessions still have open.
    pub fn orphan(&self, ino: Ino) -> Vec<u8> {
        self.with_u64(b'O', ino.0)
    }

    /// All orphans.
    pub fn orphans(&self) -> KeyRange {
        (self.start(b'O', 0), self.start(b'O' + 1, 0))
    }

    /// The inode in a key of table O.
    pub fn ino_of_orphan(key: &[u8]) -> Ino {
        Ino(u64_at(key, 5))
    }

    /// Table A: an upload.
    pub fn upload(&self, bucket: Ino, key: &[u8], upload: u64) -> Vec<u8> {
        let mut whole = self.with_u64(b'A', bucket.0);
        whole.extend_from_slice(key);
        whole.push(0);
        whole.extend_from_slice(&upload.to_be_bytes());
        whole
    }

    /// Uploads to a bucket whose keys are at least `from`.
    pub fn uploads(&self, bucket: Ino, from: &[u8]) -> KeyRange {
        let mut first = self.with_u64(b'A', bucket.0);
        first.extend_from_slice(from);
        (first, self.with_u64(b'A', bucket.0 + 1))
    }

    /// The object's key and the upload in a key of table A.
    pub fn upload_of_key(key: &[u8]) -> (&[u8], u64) {
        (&key[13..key.len() - 9], u64_at(key, key.len() - 8))
    }

    /// Table G: a part of an upload.
    pub fn part(&self, upload: u64, number: u16) -> Vec<u8> {
        let mut key = self.with_u64(b'G', upload);
        key.extend_from_slice(&number.to_be_bytes());
        key
    }

    /// All parts of an upload.
    pub fn parts(&self, upload: u64) -> KeyRange {
        (self.with_u64(b'G', upload), self.with_u64(b'G', upload + 1))
    }

    /// The number in a key of table G.
    pub fn number_of_part(key: &[u8]) -> u16 {
        u16::from_be_bytes(key[13..15].try_into().expect("keys of this table are this long"))
    }

    /// Table K: a deleted bucket that still has uploads.
    pub fn gone_bucket(&self, bucket: Ino) -> Vec<u8> {
        self.with_u64(b'K', bucket.0)
    }

    /// The least epoch of a placement group by which extents may be committed.
    pub fn group(&self, pg: PgId) -> Vec<u8> {
        let mut key = self.start(b'g', 4);
        key.extend_from_slice(&pg.0.to_be_bytes());
        key
    }

    /// All such epochs.
    pub fn groups(&self) -> KeyRange {
        self.table(b'g')
    }

    /// The group in a key of table g.
    pub fn pg_of_group(key: &[u8]) -> PgId {
        PgId(u32::from_be_bytes(key[5..9].try_into().expect("a key of table g has 9 bytes")))
    }

    /// All deleted buckets that still have uploads.
    pub fn gone_buckets(&self) -> KeyRange {
        self.table(b'K')
    }

    /// The bucket in a key of table K.
    pub fn bucket_of_gone(key: &[u8]) -> Ino {
        Ino(u64_at(key, 5))
    }

    /// Entries of a directory that sort at or behind these bytes, which may end in `/`.
    pub fn dentries_from(&self, dir: Ino, sort_name: &[u8]) -> KeyRange {
        let mut first = self.with_u64(b'D', dir.0);
        first.extend_from_slice(sort_name);
        (first, self.with_u64(b'D', dir.0 + 1))
    }

    /// The sort name of an entry: its name, and `/` if it is a directory.
    pub fn sort_name_of_dentry(key: &[u8]) -> &[u8] {
        &key[13..key.len() - 5]
    }

    /// Table C: a session.
    pub fn session(&self, session: SessionId) -> Vec<u8> {
        self.with_u64(b'C', session.0)
    }

    /// All sessions.
    pub fn sessions(&self) -> KeyRange {
        (self.start(b'C', 0), self.start(b'C' + 1, 0))
    }

    /// The session in a key of table C.
    pub fn session_of_key(key: &[u8]) -> SessionId {
        SessionId(u64_at(key, 5))
    }

    /// Table U: the last request in a session's slot.
    pub fn slot(&self, session: SessionId, slot: u32) -> Vec<u8> {
        let mut key = self.with_u64(b'U', session.0);
        key.extend_from_slice(&slot.to_be_bytes());
        key
    }

    /// The number in a key of table U.
    pub fn slot_of_key(key: &[u8]) -> u32 {
        u32::from_be_bytes(key[13..17].try_into().expect("keys of slots have 17 bytes"))
    }

    /// All slots of a session.
    pub fn slots(&self, session: SessionId) -> KeyRange {
        (self.with_u64(b'U', session.0), self.with_u64(b'U', session.0 + 1))
    }

    /// Table L: where a tiered extent lies.
    pub fn residence(&self, extent: ExtentId) -> Vec<u8> {
        self.with_u64(b'L', extent.0)
    }

    /// Extent in a key of table L.
    pub fn extent_of_residence(key: &[u8]) -> ExtentId {
        ExtentId(u64_at(key, 5))
    }

    /// Table T: an extent by its stage and age.
    pub fn aged(&self, stage: u8, written_s: u64, extent: ExtentId) -> Vec<u8> {
        let mut key = self.start(b'T', 17);
        key.push(stage);
        key.extend_from_slice(&written_s.to_be_bytes());
        key.extend_from_slice(&extent.0.to_be_bytes());
        key
    }

    /// Extents of a stage that were written at or before `before_s`.
    pub fn aged_before(&self, stage: u8, before_s: u64) -> KeyRange {
        let first = self.aged(stage, 0, ExtentId(0));
        (first, self.aged(stage, before_s.saturating_add(1), ExtentId(0)))
    }

    /// Time of writing and extent in a key of table T.
    pub fn aged_of_key(key: &[u8]) -> (u64, ExtentId) {
        (u64_at(key, 6), ExtentId(u64_at(key, 14)))
    }

    /// Table B: a blob in use.
    pub fn blob(&self, serial: u64) -> Vec<u8> {
        self.with_u64(b'B', serial)
    }

    /// Table Y: an extent in a blob.
    pub fn in_blob(&self, serial: u64, extent: ExtentId) -> Vec<u8> {
        let mut key = self.with_u64(b'Y', serial);
        key.extend_from_slice(&extent.0.to_be_bytes());
        key
    }

    /// All extents in a blob.
    pub fn all_in_blob(&self, serial: u64) -> KeyRange {
        (self.with_u64(b'Y', serial), self.with_u64(b'Y', serial + 1))
    }

    /// Table Z: a blob that is being stored, or is to be deleted.
    pub fn loose_blob(&self, serial: u64) -> Vec<u8> {
        self.with_u64(b'Z', serial)
    }

    /// The number at the front of a key of tables B, L, Y and Z.
    pub fn number_in_key(key: &[u8]) -> u64 {
        u64_at(key, 5)
    }

    /// The extent in a key of table Y.
    pub fn extent_in_blob(key: &[u8]) -> ExtentId {
        ExtentId(u64_at(key, 13))
    }

    /// Table H: a piece that cannot be read.
    pub fn lost(&self, map: MapId, off: u64) -> Vec<u8> {
        let mut key = self.with_u64(b'H', map.0);
        key.extend_from_slice(&off.to_be_bytes());
        key
    }

    /// Pieces that cannot be read, after the given one.
    pub fn all_lost(&self, after: Option<(MapId, u64)>) -> KeyRange {
        let first = match after {
            Some((map, off)) => {
                let mut key = self.lost(map, off);
                key.push(0);
                key
            }
            None => self.start(b'H', 0),
        };
        (first, self.table_end(b'H'))
    }

    /// The map and the offset in a key of table H.
    pub fn piece_of_lost(key: &[u8]) -> (MapId, u64) {
        (MapId(u64_at(key, 5)), u64_at(key, 13))
    }

    /// Table V: a single value of the ledger.
    pub fn value(&self, name: &str) -> Vec<u8> {
        let mut key = self.start(b'V', name.len());
        key.extend_from_slice(name.as_bytes());
        key
    }

    /// Table S: the stretch of the ledger's history that begins with a batch.
    pub fn lineage(&self, first: Seq) -> Vec<u8> {
        self.with_u64(b'S', first.0)
    }

    /// All stretches, in order.
    pub fn lineages(&self) -> KeyRange {
        self.table(b'S')
    }

    /// The first batch in a key of table S.
    pub fn seq_of_lineage(key: &[u8]) -> Seq {
        Seq(u64_at(key, 5))
    }

    /// A record of the control ledger: node, drive, placement group, filesystem.
    pub fn control(&self, table: u8, id: u32) -> Vec<u8> {
        let mut key = self.start(table, 4);
        key.extend_from_slice(&id.to_be_bytes());
        key
    }

    /// A record of the control ledger that has a name instead of a number: access key, role.
    pub fn control_named(&self, table: u8, name: &str) -> Vec<u8> {
        let mut key = self.start(table, name.len());
        key.extend_from_slice(name.as_bytes());
        key
    }

    /// All records of a table of the control ledger.
    pub fn controls(&self, table: u8) -> KeyRange {
        (self.start(table, 0), self.start(table + 1, 0))
    }
}

fn u64_at(key: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(key[at..at + 8].try_into().expect("keys of this table are this long"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_sorts_as_s3_orders_its_keys() {
        let keys = Keys::new(LedgerId(1));
        let dentry = |name: &str, kind| keys.dentry(Ino(1), name.as_bytes(), kind);
        let order = [
            dentry("a", FileKind::Regular),
            dentry("a-b", FileKind::Regular),
            dentry("a", FileKind::Directory),
            dentry("a0", FileKind::Regular),
        ];
        assert!(order.is_sorted());
        assert_eq!(Keys::name_of_dentry(&order[2]), b"a");
        assert_eq!(Keys::name_of_dentry(&order[1]), b"a-b");
    }

    #[test]
    fn a_range_holds_its_table_and_nothing_else() {
        let keys = Keys::new(LedgerId(1));
        let (from, to) = keys.dentries(Ino(7));
        let inside = keys.dentry(Ino(7), &[255; 255], FileKind::Directory);
        assert!(from <= inside && inside < to);
        assert!(keys.dentry(Ino(8), b"a", FileKind::Regular) >= to);
        let (from, to) = keys.pieces(MapId(3), 10, 20);
        assert!(keys.piece(MapId(3), 9) < from && from <= keys.piece(MapId(3), 10));
        assert!(keys.piece(MapId(3), 19) < to && to <= keys.piece(MapId(3), 20));
    }
}
