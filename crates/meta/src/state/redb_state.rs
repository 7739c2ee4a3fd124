//! The store on disk: redb, a copy-on-write B-tree with page checksums.
//!
//! One table holds the ledger's keys, another the position in the log; both change in one transaction.

use std::path::Path;
use std::sync::Arc;

use base::env::{Caching, Env, File, OpenMode};
use base::{Epoch, Seq};
use redb::{Database, Durability, ReadableDatabase, StorageBackend, TableDefinition};

use super::{Applied, Pair, State, StateError, Visit};
use crate::keys::KeyRange;

const TABLE: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("ledger");
const POSITION: TableDefinition<'_, &str, u64> = TableDefinition::new("position");

const CREATE_CACHE_BYTES: usize = 1 << 20;

/// A store in one file.
pub struct RedbState {
    database: Database,
}

impl RedbState {
    /// Opens or creates the store at `path` with a page cache of `cache_bytes`.
    ///
    /// # Errors
    /// If the file cannot be used or is damaged. It can be removed if the log still holds everything.
    pub fn open(env: &Env, path: &Path, cache_bytes: usize) -> Result<Self, StateError> {
        if !env.files.exists(path) {
            create(env, path)?;
        }
        Self::open_file(env, path, cache_bytes)
    }

    fn open_file(env: &Env, path: &Path, cache_bytes: usize) -> Result<Self, StateError> {
        let file = env.files.open(path, OpenMode::Create, Caching::Buffered).map_err(text)?;
        file.try_lock()
            .map_err(|_| StateError(format!("in use by another process: path={}", path.display())))?;
        let backend = FileBackend { file };
        let database =
            Database::builder().set_cache_size(cache_bytes).create_with_backend(backend).map_err(text)?;
        let txn = database.begin_write().map_err(text)?;
        txn.open_table(TABLE).map_err(text)?;
        txn.open_table(POSITION).map_err(text)?;
        txn.commit().map_err(text)?;
        Ok(Self { database })
    }
}

/// Makes an empty store beside its place and moves it there: half a store could not be opened after a crash.
fn create(env: &Env, path: &Path) -> Result<(), StateError> {
    let mut staged = path.as_os_str().to_owned();
    staged.push(".new");
    let staged = Path::new(&staged);
    if env.files.exists(staged) {
        env.files.remove_file(staged).map_err(text)?;
    }
    drop(RedbState::open_file(env, staged, CREATE_CACHE_BYTES)?);
    env.files.open(staged, OpenMode::Existing, Caching::Buffered).map_err(text)?.sync_data().map_err(text)?;
    env.files.rename(staged, path).map_err(text)?;
    path.parent().map_or(Ok(()), |parent| env.files.sync_dir(parent)).map_err(text)
}

fn text(error: impl std::fmt::Display) -> StateError {
    StateError(error.to_string())
}

impl State for RedbState {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, StateError> {
        let txn = self.database.begin_read().map_err(text)?;
        let table = txn.open_table(TABLE).map_err(text)?;
        let value = table.get(key).map_err(text)?;
        Ok(value.map(|guard| guard.value().to_vec()))
    }

    fn scan(&self, (from, to): &KeyRange, visit: &mut Visit<'_>) -> Result<(), StateError> {
        let txn = self.database.begin_read().map_err(text)?;
        let table = txn.open_table(TABLE).map_err(text)?;
        for entry in table.range(from.as_slice()..to.as_slice()).map_err(text)? {
            let (key, value) = entry.map_err(text)?;
            if visit(key.value(), value.value()).is_break() {
                break;
            }
        }
        Ok(())
    }

    fn last(&self, (from, to): &KeyRange) -> Result<Option<Pair>, StateError> {
        let txn = self.database.begin_read().map_err(text)?;
        let table = txn.open_table(TABLE).map_err(text)?;
        let mut range = table.range(from.as_slice()..to.as_slice()).map_err(text)?;
        let last = range.next_back().transpose().map_err(text)?;
        Ok(last.map(|(key, value)| (key.value().to_vec(), value.value().to_vec())))
    }

    fn apply(
        &self,
        changes: &mut dyn Iterator<Item = (&[u8], Option<&[u8]>)>,
        applied: Applied,
    ) -> Result<(), StateError> {
        let mut txn = self.database.begin_write().map_err(text)?;
        txn.set_durability(Durability::Immediate).map_err(text)?;
        {
            let mut table = txn.open_table(TABLE).map_err(text)?;
            for (key, value) in changes {
                match value {
                    Some(value) => table.insert(key, value).map_err(text)?,
                    None => table.remove(key).map_err(text)?,
                };
            }
            let mut position = txn.open_table(POSITION).map_err(text)?;
            position.insert("seq", applied.seq.0).map_err(text)?;
            position.insert("epoch", applied.epoch.0).map_err(text)?;
        }
        txn.commit().map_err(text)
    }

    fn applied(&self) -> Result<Applied, StateError> {
        let txn = self.database.begin_read().map_err(text)?;
        let table = txn.open_table(POSITION).map_err(text)?;
        let get = |name: &str| Ok(table.get(name).map_err(text)?.map_or(0, |guard| guard.value()));
        Ok(Applied { seq: Seq(get("seq")?), epoch: Epoch(get("epoch")?) })
    }
}

/// redb's file, through the door that simulation can replace.
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
