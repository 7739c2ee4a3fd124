//! The owner's view of its ledger: the local store, with all newer changes laid over it.
//!
//! [`Store`] keeps recent changes in memory (the *active* table), hands them to the local store now and then
//! (the *frozen* table), and reads through all three. [`Txn`] lays the writes of one operation on top: an
//! operation that fails leaves nothing behind.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::collections::btree_map::Range;
use std::iter::Peekable;
use std::ops::ControlFlow;
use std::sync::Arc;

use base::codec::DecodeError;
use base::{FsError, Seq, SessionId};

use crate::keys::KeyRange;
use crate::state::{Pair, State, StateError};
use crate::values::Value;

/// A change in memory, the batch that carries it, and the session that has the answer already; 0: none has.
#[derive(Debug, Clone)]
struct Change {
    seq: Seq,
    known_to: SessionId,
    value: Option<Vec<u8>>,
}

/// Changes in key order.
#[derive(Debug, Clone, Default)]
pub struct ChangeTable {
    changes: BTreeMap<Vec<u8>, Change>,
    bytes: usize,
}

impl ChangeTable {
    /// The newest value of every changed key.
    pub fn iter(&self) -> impl Iterator<Item = (&[u8], Option<&[u8]>)> {
        self.changes.iter().map(|(key, change)| (key.as_slice(), change.value.as_deref()))
    }

    /// Bytes of the keys and values put in.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    fn insert(&mut self, key: Vec<u8>, change: Change) {
        self.bytes += key.len() + change.value.as_ref().map_or(0, Vec::len);
        self.changes.insert(key, change);
    }
}

/// The local store and the changes above it.
pub struct Store {
    bottom: Arc<dyn State>,
    frozen: Option<Arc<ChangeTable>>,
    active: ChangeTable,
}

impl Store {
    /// A view of `bottom` without changes.
    pub fn new(bottom: Arc<dyn State>) -> Self {
        Self { bottom, frozen: None, active: ChangeTable::default() }
    }

    /// The local store.
    pub fn bottom(&self) -> Arc<dyn State> {
        self.bottom.clone()
    }

    /// Lays changes of batch `seq` on top. `known_to` is the session that gets the answer before they are durable, or 0.
    pub fn apply(
        &mut self,
        seq: Seq,
        known_to: SessionId,
        changes: impl IntoIterator<Item = (Vec<u8>, Option<Vec<u8>>)>,
    ) {
        for (key, value) in changes {
            self.active.insert(key, Change { seq, known_to, value });
        }
    }

    /// Bytes of changes that are neither in the local store nor being written to it.
    pub fn active_bytes(&self) -> usize {
        self.active.bytes
    }

    /// Takes the active changes to be written to the local store; they stay visible until [`Store::thaw`]. `None` while
    /// an earlier table is being written, or if there are no changes.
    pub fn freeze(&mut self) -> Option<Arc<ChangeTable>> {
        if self.frozen.is_some() || self.active.changes.is_empty() {
            return None;
        }
        let table = Arc::new(std::mem::take(&mut self.active));
        self.frozen = Some(table.clone());
        Some(table)
    }

    /// Drops the frozen changes, which the local store now has.
    pub fn thaw(&mut self) {
        self.frozen = None;
    }

    /// Starts an operation of nobody.
    pub fn begin(&self) -> Txn<'_> {
        self.begin_for(SessionId(0))
    }

    /// Starts an operation of a session.
    pub fn begin_for(&self, session: SessionId) -> Txn<'_> {
        let (writes, seen, tails) = (BTreeMap::new(), Cell::default(), RefCell::default());
        Txn { store: self, session, writes, seen, tails }
    }
}

/// Changes of keys: new values, or deletions.
pub type Writes = BTreeMap<Vec<u8>, Option<Vec<u8>>>;

/// The newest batches from which an operation read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Seen {
    /// Of all.
    pub newest: Seq,
    /// Of those with a change that the session of the operation does not know yet.
    pub unknown: Seq,
}

impl Seen {
    fn note(&mut self, change: &Change, session: SessionId) {
        self.newest = self.newest.max(change.seq);
        if session == SessionId(0) || change.known_to != session {
            self.unknown = self.unknown.max(change.seq);
        }
    }
}

/// The reads and writes of one operation.
pub struct Txn<'a> {
    store: &'a Store,
    session: SessionId,
    writes: Writes,
    seen: Cell<Seen>,
    /// The tails of values that were read, unless they are empty.
    tails: RefCell<BTreeMap<Vec<u8>, Vec<u8>>>,
}

impl Txn<'_> {
    /// Ends the operation: returns its writes, for a batch, and the newest batches from which it read.
    pub fn finish(self) -> (Writes, Seen) {
        (self.writes, self.seen.get())
    }

    fn saw(&self, change: &Change) {
        let mut seen = self.seen.get();
        seen.note(change, self.session);
        self.seen.set(seen);
    }

    /// Reads that the operation does not depend on: its answer does not wait for the batches that they saw.
    pub fn aside<T>(&self, read: impl FnOnce() -> T) -> T {
        let seen = self.seen.get();
        let result = read();
        self.seen.set(seen);
        result
    }

    /// The bytes of a key.
    pub fn get_bytes(&self, key: &[u8]) -> Result<Option<Vec<u8>>, FsError> {
        if let Some(value) = self.writes.get(key) {
            return Ok(value.clone());
        }
        let tables = [Some(&self.store.active), self.store.frozen.as_deref()];
        for table in tables.into_iter().flatten() {
            if let Some(change) = table.changes.get(key) {
                self.saw(change);
                return Ok(change.value.clone());
            }
        }
        self.store.bottom.get(key).map_err(broken)
    }

    /// The value of a key.
    pub fn get<V: Value>(&self, key: &[u8]) -> Result<Option<V>, FsError> {
        self.get_bytes(key)?.map(|bytes| self.decode(key, &bytes)).transpose()
    }

    /// The value in the bytes of a key.
    pub fn decode<V: Value>(&self, key: &[u8], bytes: &[u8]) -> Result<V, FsError> {
        let (value, tail) = V::decode_with_tail(bytes).map_err(|error| damaged(key, &error))?;
        if !tail.is_empty() {
            self.tails.borrow_mut().insert(key.to_vec(), tail.to_vec());
        }
        Ok(value)
    }

    /// Puts a value, in place of any other one.
    pub fn put<V: Value>(&mut self, key: Vec<u8>, value: &V) {
        self.writes.insert(key, Some(value.encode()));
    }

    /// Puts a value that this operation has read and changed. What a newer version has added to it stays.
    pub fn update<V: Value>(&mut self, key: Vec<u8>, value: &V) {
        let bytes = self.with_tail(&key, value);
        self.writes.insert(key, Some(bytes));
    }

    /// Puts a value that this operation has made of the value of `source`, which may be deleted by now. It keeps what a
    /// newer version has added to that.
    pub fn update_part<V: Value>(&mut self, source: &[u8], key: Vec<u8>, value: &V) {
        let bytes = self.with_tail(source, value);
        self.writes.insert(key, Some(bytes));
    }

    fn with_tail<V: Value>(&mut self, source: &[u8], value: &V) -> Vec<u8> {
        let mut bytes = value.encode();
        if let Some(tail) = self.tails.get_mut().get(source) {
            bytes.extend_from_slice(tail);
        }
        bytes
    }

    /// Puts bytes.
    pub fn put_bytes(&mut self, key: Vec<u8>, value: Vec<u8>) {
        self.writes.insert(key, Some(value));
    }

    /// Deletes a key.
    pub fn delete(&mut self, key: Vec<u8>) {
        self.writes.insert(key, None);
    }

    /// The last key of a range with its bytes.
    pub fn last(&self, range: &KeyRange) -> Result<Option<Pair>, FsError> {
        let (from, mut to) = range.clone();
        while from < to {
            let bounds = || from.clone()..to.clone();
            let active = &self.store.active.changes;
            let frozen = self.store.frozen.as_ref().map(|table| &table.changes);
            let bottom = self.store.bottom.last(&(from.clone(), to.clone())).map_err(broken)?;
            let heads = [
                self.writes.range(bounds()).next_back().map(|(key, _)| key),
                active.range(bounds()).next_back().map(|(key, _)| key),
                frozen.and_then(|frozen| frozen.range(bounds()).next_back()).map(|(key, _)| key),
                bottom.as_ref().map(|(key, _)| key),
            ];
            let Some(key) = heads.into_iter().flatten().max().cloned() else { return Ok(None) };
            if let Some(value) = self.get_bytes(&key)? {
                return Ok(Some((key, value)));
            }
            to = key;
        }
        Ok(None)
    }

    /// The first `limit` keys of a range with their bytes.
    pub fn scan(&self, range: &KeyRange, limit: usize) -> Result<Vec<Pair>, FsError> {
        let mut out = Vec::new();
        if limit == 0 || range.0 >= range.1 {
            return Ok(out);
        }
        let mut overlay = Overlay::new(self, range);
        let visited = self.store.bottom.scan(range, &mut |key, value| {
            while let Some(above) = overlay.next_below(key) {
                out.extend(above);
                if out.len() >= limit {
                    return ControlFlow::Break(());
                }
            }
            match overlay.take(key) {
                Some(replaced) => out.extend(replaced.map(|value| (key.to_vec(), value))),
                None => out.push((key.to_vec(), value.to_vec())),
            }
            if out.len() >= limit { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        visited.map_err(broken)?;
        while out.len() < limit {
            let Some(above) = overlay.next() else { break };
            out.extend(above);
        }
        self.seen.set(overlay.seen);
        Ok(out)
    }
}

/// The answer if a value cannot be decoded: the ledger is damaged, or a newer version has written it.
fn damaged(key: &[u8], error: &DecodeError) -> FsError {
    tracing::error!(?key, %error, "metadata value is damaged");
    FsError::Io
}

fn broken(error: StateError) -> FsError {
    tracing::error!(%error, "metadata store cannot be read");
    FsError::Io
}

/// The tables above the local store, merged; upper ones win.
struct Overlay<'a> {
    writes: Peekable<Range<'a, Vec<u8>, Option<Vec<u8>>>>,
    active: Peekable<Range<'a, Vec<u8>, Change>>,
    frozen: Option<Peekable<Range<'a, Vec<u8>, Change>>>,
    session: SessionId,
    seen: Seen,
}

type Entry = Option<Pair>;

impl<'a> Overlay<'a> {
    fn new(txn: &'a Txn<'_>, (from, to): &KeyRange) -> Self {
        let bounds = || from.clone()..to.clone();
        Self {
            writes: txn.writes.range(bounds()).peekable(),
            active: txn.store.active.changes.range(bounds()).peekable(),
            frozen: txn.store.frozen.as_ref().map(|table| table.changes.range(bounds()).peekable()),
            session: txn.session,
            seen: txn.seen.get(),
        }
    }

    fn head(&mut self) -> Option<&'a [u8]> {
        let writes = self.writes.peek().map(|(key, _)| key.as_slice());
        let active = self.active.peek().map(|(key, _)| key.as_slice());
        let frozen = self.frozen.as_mut().and_then(|frozen| frozen.peek().map(|(key, _)| key.as_slice()));
        [writes, active, frozen].into_iter().flatten().min()
    }

    /// Takes the change of `key`, if a table has one; `Some(None)` is a deletion.
    fn take(&mut self, key: &[u8]) -> Option<Option<Vec<u8>>> {
        let mut found = None;
        if let Some(frozen) = &mut self.frozen
            && let Some((_, change)) = frozen.next_if(|(head, _)| head.as_slice() == key)
        {
            self.seen.note(change, self.session);
            found = Some(change.value.clone());
        }
        if let Some((_, change)) = self.active.next_if(|(head, _)| head.as_slice() == key) {
            self.seen.note(change, self.session);
            found = Some(change.value.clone());
        }
        if let Some((_, value)) = self.writes.next_if(|(head, _)| head.as_slice() == key) {
            found = Some(value.clone());
        }
        found
    }

    fn next_below(&mut self, bound: &[u8]) -> Option<Entry> {
        let head = self.head().filter(|head| *head < bound)?;
        self.take_head(head)
    }

    fn next(&mut self) -> Option<Entry> {
        let head = self.head()?;
        self.take_head(head)
    }

    fn take_head(&mut self, head: &[u8]) -> Option<Entry> {
        let value = self.take(head).expect("the head is the key of one of the tables");
        Some(value.map(|value| (head.to_vec(), value)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::{Applied, MemState};
    use proptest::prelude::*;

    #[derive(Debug, Clone)]
    enum Step {
        Write(u8, Option<u8>),
        Freeze,
        Flush,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            8 => (0..20u8, proptest::option::of(any::<u8>())).prop_map(|(key, value)| Step::Write(key, value)),
            1 => Just(Step::Freeze),
            1 => Just(Step::Flush),
        ]
    }

    proptest! {
        /// Reads see the same as in a plain map, in whichever table a change is.
        #[test]
        fn reads_see_through_all_tables(
            steps in proptest::collection::vec(step(), 0..60),
            own in proptest::collection::vec((0..20u8, proptest::option::of(any::<u8>())), 0..6),
            from in 0..20u8, to in 0..21u8, limit in 0..25usize,
        ) {
            let mut store = Store::new(Arc::new(MemState::default()));
            let mut model: BTreeMap<Vec<u8>, Vec<u8>> = BTreeMap::new();
            let mut frozen = None;
            for step in steps {
                match step {
                    Step::Write(key, value) => {
                        store.apply(Seq(1), SessionId(0), [(vec![key], value.map(|value| vec![value]))]);
                        match value {
                            Some(value) => model.insert(vec![key], vec![value]),
                            None => model.remove(&vec![key]),
                        };
                    }
                    Step::Freeze => frozen = store.freeze().or(frozen),
                    Step::Flush => if let Some(table) = frozen.take() {
                        store.bottom().apply(&mut table.iter(), Applied::default()).unwrap();
                        store.thaw();
                    }
                }
            }
            let mut txn = store.begin();
            for (key, value) in own {
                match value {
                    Some(value) => { txn.put_bytes(vec![key], vec![value]); model.insert(vec![key], vec![value]); }
                    None => { txn.delete(vec![key]); model.remove(&vec![key]); }
                }
            }
            for key in 0..20u8 {
                prop_assert_eq!(txn.get_bytes(&[key]).unwrap(), model.get(&vec![key]).cloned());
            }
            let found = txn.scan(&(vec![from], vec![to]), limit).unwrap();
            let mut in_range: Vec<_> =
                model.into_iter().filter(|(key, _)| *key >= vec![from] && *key < vec![to]).collect();
            let expected: Vec<_> = in_range.iter().take(limit).cloned().collect();
            prop_assert_eq!(found, expected);
            let last = txn.last(&(vec![from], vec![to])).unwrap();
            prop_assert_eq!(last, in_range.pop());
        }
    }

    #[test]
    fn what_a_newer_version_has_added_to_a_value_stays() {
        let mut store = Store::new(Arc::new(MemState::default()));
        let tail = [7, 2, 0, b'h', b'i'];
        let with_tail = |value: u64| [&value.encode()[..], &tail].concat();
        store.apply(
            Seq(1),
            SessionId(0),
            [(b"a".to_vec(), Some(with_tail(1))), (b"b".to_vec(), Some(with_tail(1)))],
        );
        let mut txn = store.begin();
        assert_eq!(txn.get::<u64>(b"a"), Ok(Some(1)));
        txn.update(b"a".to_vec(), &2u64);
        let scanned = txn.scan(&(b"b".to_vec(), b"c".to_vec()), 1).unwrap();
        assert_eq!(txn.decode::<u64>(b"b", &scanned[0].1), Ok(1));
        txn.put(b"b".to_vec(), &3u64);
        txn.update_part(b"b", b"c".to_vec(), &4u64);
        txn.update(b"d".to_vec(), &5u64);
        let writes = txn.finish().0;
        let expected = [with_tail(2), 3u64.encode(), with_tail(4), 5u64.encode()].map(Some);
        assert_eq!(writes.into_values().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn a_read_knows_the_batch_it_depends_on() {
        let mut store = Store::new(Arc::new(MemState::default()));
        store.apply(Seq(3), SessionId(7), [(b"a".to_vec(), Some(b"1".to_vec()))]);
        store.apply(Seq(5), SessionId(8), [(b"b".to_vec(), None)]);
        let txn = store.begin();
        txn.get_bytes(b"a").unwrap();
        assert_eq!(txn.finish().1, Seen { newest: Seq(3), unknown: Seq(3) });
        let scan = |session: u64| {
            let txn = store.begin_for(SessionId(session));
            txn.scan(&(b"a".to_vec(), b"z".to_vec()), 10).unwrap();
            txn.finish().1
        };
        assert_eq!(scan(0), Seen { newest: Seq(5), unknown: Seq(5) });
        assert_eq!(scan(7), Seen { newest: Seq(5), unknown: Seq(5) });
        assert_eq!(scan(8), Seen { newest: Seq(5), unknown: Seq(3) });
    }
}
