//! A file in the node's directory with what only this machine knows of the cluster.
//!
//! It is read once, at the start, and replaced as a whole at each change, before anything relies on that.

use std::path::PathBuf;
use std::sync::Mutex;

use anyhow::{Context, Result};
use base::env::Env;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The file and its content.
pub(super) struct LocalFile<T> {
    env: Env,
    path: PathBuf,
    content: Mutex<T>,
}

impl<T: Clone + PartialEq + Serialize + DeserializeOwned> LocalFile<T> {
    /// Reads the file; without one, the content is `former`. Writes nothing.
    pub(super) fn load(env: &Env, path: PathBuf, former: T) -> Result<Self> {
        let content = if env.files.exists(&path) {
            let bytes = env.files.read(&path).with_context(|| format!("cannot read {}", path.display()))?;
            serde_json::from_slice(&bytes).with_context(|| format!("not understood: {}", path.display()))?
        } else {
            former
        };
        Ok(Self { env: env.clone(), path, content: Mutex::new(content) })
    }

    /// Writes the file, unless it is there.
    pub(super) fn make(&self) -> Result<()> {
        if self.env.files.exists(&self.path) { Ok(()) } else { self.read(|content| self.write(content)) }
    }

    /// Looks at the content.
    pub(super) fn read<R>(&self, look: impl FnOnce(&T) -> R) -> R {
        look(&self.content.lock().expect("no holder of this lock panics"))
    }

    /// Changes the content, durably once it returns. After an error it is as before.
    pub(super) fn change(&self, change: impl FnOnce(&mut T)) -> Result<()> {
        let mut content = self.content.lock().expect("no holder of this lock panics");
        let mut next = content.clone();
        change(&mut next);
        if next != *content {
            self.write(&next)?;
            *content = next;
        }
        Ok(())
    }

    fn write(&self, content: &T) -> Result<()> {
        let cannot = || format!("cannot write {}", self.path.display());
        let bytes = serde_json::to_vec_pretty(content).with_context(cannot)?;
        self.env.files.write_atomic(&self.path, &bytes).with_context(cannot)
    }
}
