//! The store on disk: redb, a copy-on-write B-tree with page checksums.
//!
//! One table holds the ledger's keys, another one the position in the log; one transaction changes both. Every checksum
//! is verified when the store is opened. A full disk is no failure: the transaction is given up, and the database is
//! opened again, because redb refuses everything after an error.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, RwLock};

use base::env::{Caching, Env, File, OpenMode};
use base::units::MIB;
use base::{Epoch, Seq};
use redb::{
    Database, DatabaseError, Durability, ReadOnlyTable, ReadableDatabase, StorageBackend, TableDefinition,
};

use super::{Applied, Pair, State, StateError, Visit};
use crate::keys::KeyRange;

const TABLE: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("ledger");
const POSITION: TableDefinition<'_, &str, u64> = TableDefinition::new("position");
/// With less free space no transaction is begun: running out in the middle of one costs a recovery.
const FREE_BYTES_MIN: u64 = 4 * MIB;

/// A store in one file.
pub struct RedbState {
    env: Env,
    dir: PathBuf,
    file: Arc<dyn File>,
    cache_bytes: usize,
    /// `None` if it could not be opened again.
    opened: RwLock<Option<Opened>>,
}

/// A database and its last read transaction, which is kept: beginning a transaction and finding its table for every
/// read takes several times as long as the read. Dropped in this order.
struct Opened {
    newest: Snapshot,
    database: Database,
}

impl Opened {
    fn new(database: Database) -> Result<Self, StateError> {
        Ok(Self { newest: Snapshot::of(&database)?, database })
    }
}

fn closed() -> StateError {
    StateError::Failed("it is closed".to_owned())
}

impl RedbState {
    /// Opens or creates the store at `path` with a page cache of `cache_bytes`, and verifies all of it.
    ///
    /// # Errors
    /// `InUse`, `Failed`, or `Damaged`. A damaged store can be removed if the log, or another replica, holds
    /// everything.
    pub fn open(env: &Env, path: &Path, cache_bytes: usize) -> Result<Self, StateError> {
        if !env.files.exists(path) {
            create(env, path, cache_bytes)?;
        }
        let file = env.files.open(path, OpenMode::Existing, Caching::Buffered).map_err(failed_io)?;
        crate::lock::lock(&*file).map_err(|error| match error.kind() {
            std::io::ErrorKind::WouldBlock => StateError::InUse(format!("path={}", path.display())),
            _ => failed_io(error),
        })?;
        let opened = Opened::new(open_database(&file, cache_bytes)?)?;
        // The log is trimmed up to this store's position, so a crash must not lose the file's name.
        if let Some(parent) = path.parent() {
            env.files.sync_dir(parent).map_err(failed_io)?;
        }
        let (env, dir) = (env.clone(), path.parent().unwrap_or(Path::new("")).to_owned());
        Ok(Self { env, dir, file, cache_bytes, opened: RwLock::new(Some(opened)) })
    }

    fn read<T>(&self, read: impl FnOnce(&Snapshot) -> Result<T, StateError>) -> Result<T, StateError> {
        let opened = self.opened.read().expect("no holder of this lock panics");
        read(&opened.as_ref().ok_or_else(closed)?.newest)
    }

    fn write(
        &self,
        changes: &mut dyn Iterator<Item = (&[u8], Option<&[u8]>)>,
        applied: Applied,
    ) -> Result<(), StateError> {
        let opened = self.opened.read().expect("no holder of this lock panics");
        let database = &opened.as_ref().ok_or_else(closed)?.database;
        let mut txn = database.begin_write().map_err(failed)?;
        txn.set_durability(Durability::Immediate).map_err(failed)?;
        {
            let mut table = txn.open_table(TABLE).map_err(failed)?;
            for (key, value) in changes {
                match value {
                    Some(value) => table.insert(key, value).map_err(failed)?,
                    None => table.remove(key).map_err(failed)?,
                };
            }
            let mut position = txn.open_table(POSITION).map_err(failed)?;
            position.insert("seq", applied.seq.0).map_err(failed)?;
            position.insert("epoch", applied.epoch.0).map_err(failed)?;
        }
        txn.commit().map_err(failed)?;
        let newest = Snapshot::of(database)?;
        drop(opened);
        // Writers run one after another, so no newer transaction is there.
        if let Some(opened) = self.opened.write().expect("no holder of this lock panics").as_mut() {
            opened.newest = newest;
        }
        Ok(())
    }

    /// Opens the database again at its last durable transaction.
    fn open_again(&self) {
        let mut opened = self.opened.write().expect("no holder of this lock panics");
        drop(opened.take());
        match open_database(&self.file, self.cache_bytes).and_then(Opened::new) {
            Ok(again) => *opened = Some(again),
            Err(error) => {
                tracing::error!(dir = %self.dir.display(), %error, "store cannot be opened again")
            }
        }
    }
}

/// Makes an empty store beside its place and moves it there: after a crash a half-written store could not be opened.
fn create(env: &Env, path: &Path, cache_bytes: usize) -> Result<(), StateError> {
    let mut staged = path.as_os_str().to_owned();
    staged.push(".new");
    let staged = Path::new(&staged);
    if env.files.exists(staged) {
        env.files.remove_file(staged).map_err(failed_io)?;
    }
    let file = env.files.open(staged, OpenMode::CreateNew, Caching::Buffered).map_err(failed_io)?;
    drop(open_database(&file, cache_bytes)?);
    file.sync_data().map_err(failed_io)?;
    env.files.rename(staged, path).map_err(failed_io)
}

fn open_database(file: &Arc<dyn File>, cache_bytes: usize) -> Result<Database, StateError> {
    let backend = FileBackend { file: file.clone() };
    let mut builder = Database::builder();
    builder.set_cache_size(cache_bytes).set_check_integrity_on_open(true);
    let database = builder.create_with_backend(backend).map_err(|error| match error {
        DatabaseError::Storage(error) => failed(error),
        error => StateError::Damaged(error.to_string()),
    })?;
    let txn = database.begin_write().map_err(failed)?;
    txn.open_table(TABLE).map_err(failed)?;
    txn.open_table(POSITION).map_err(failed)?;
    txn.commit().map_err(failed)?;
    Ok(database)
}

fn failed(error: impl Into<redb::Error>) -> StateError {
    match error.into() {
        redb::Error::Io(error) => failed_io(error),
        error @ (redb::Error::PreviousIo | redb::Error::DatabaseClosed) => {
            StateError::Failed(error.to_string())
        }
        error => StateError::Damaged(error.to_string()),
    }
}

fn failed_io(error: std::io::Error) -> StateError {
    use std::io::ErrorKind as Kind;
    match error.kind() {
        Kind::StorageFull | Kind::QuotaExceeded => StateError::NoSpace(error.to_string()),
        Kind::InvalidData | Kind::UnexpectedEof => StateError::Damaged(error.to_string()),
        _ => StateError::Failed(error.to_string()),
    }
}

impl State for RedbState {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, StateError> {
        self.read(|newest| newest.get(key))
    }

    fn scan(&self, range: &KeyRange, visit: &mut Visit<'_>) -> Result<(), StateError> {
        self.read(|newest| newest.scan(range, visit))
    }

    fn last(&self, range: &KeyRange) -> Result<Option<Pair>, StateError> {
        self.read(|newest| newest.last(range))
    }

    fn apply(
        &self,
        changes: &mut dyn Iterator<Item = (&[u8], Option<&[u8]>)>,
        applied: Applied,
    ) -> Result<(), StateError> {
        let free = self.env.files.free_bytes(&self.dir).map_err(failed_io)?;
        if free < FREE_BYTES_MIN {
            return Err(StateError::NoSpace(format!("dir={} free={free}", self.dir.display())));
        }
        let result = self.write(changes, applied);
        if let Err(StateError::NoSpace(_)) = result {
            self.open_again();
        }
        result
    }

    fn applied(&self) -> Result<Applied, StateError> {
        self.read(Snapshot::applied)
    }

    fn snapshot(&self) -> Result<Arc<dyn State>, StateError> {
        let opened = self.opened.read().expect("no holder of this lock panics");
        Ok(Arc::new(Snapshot::of(&opened.as_ref().ok_or_else(closed)?.database)?))
    }
}

/// The store at one point in time.
struct Snapshot {
    table: ReadOnlyTable<&'static [u8], &'static [u8]>,
    position: ReadOnlyTable<&'static str, u64>,
}

impl Snapshot {
    fn of(database: &Database) -> Result<Self, StateError> {
        let txn = database.begin_read().map_err(failed)?;
        let table = txn.open_table(TABLE).map_err(failed)?;
        Ok(Self { table, position: txn.open_table(POSITION).map_err(failed)? })
    }
}

impl State for Snapshot {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, StateError> {
        let value = self.table.get(key).map_err(failed)?;
        Ok(value.map(|guard| guard.value().to_vec()))
    }

    fn scan(&self, (from, to): &KeyRange, visit: &mut Visit<'_>) -> Result<(), StateError> {
        for entry in self.table.range(from.as_slice()..to.as_slice()).map_err(failed)? {
            let (key, value) = entry.map_err(failed)?;
            if let ControlFlow::Break(()) = visit(key.value(), value.value()) {
                break;
            }
        }
        Ok(())
    }

    fn last(&self, (from, to): &KeyRange) -> Result<Option<Pair>, StateError> {
        let mut range = self.table.range(from.as_slice()..to.as_slice()).map_err(failed)?;
        let last = range.next_back().transpose().map_err(failed)?;
        Ok(last.map(|(key, value)| (key.value().to_vec(), value.value().to_vec())))
    }

    fn apply(
        &self,
        _changes: &mut dyn Iterator<Item = (&[u8], Option<&[u8]>)>,
        _applied: Applied,
    ) -> Result<(), StateError> {
        Err(StateError::Failed("a snapshot is not changed".to_owned()))
    }

    fn applied(&self) -> Result<Applied, StateError> {
        let get = |name: &str| Ok(self.position.get(name).map_err(failed)?.map_or(0, |guard| guard.value()));
        Ok(Applied { seq: Seq(get("seq")?), epoch: Epoch(get("epoch")?) })
    }

    fn snapshot(&self) -> Result<Arc<dyn State>, StateError> {
        Err(StateError::Failed("a snapshot is taken of the store itself".to_owned()))
    }
}

/// redb's file, on top of the file interface that simulation replaces.
struct FileBackend {
    file: Arc<dyn File>,
}

impl std::fmt::Debug for FileBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FileBackend")
    }
}

impl StorageBackend for FileBackend {
    fn len(&self) -> Result<u64, std::io::Error> {
        self.file.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), std::io::Error> {
        self.file.read_at(out, offset)
    }

    fn set_len(&self, len: u64) -> Result<(), std::io::Error> {
        self.file.set_len(len)
    }

    fn sync_data(&self) -> Result<(), std::io::Error> {
        self.file.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), std::io::Error> {
        self.file.write_at(data, offset)
    }
}
