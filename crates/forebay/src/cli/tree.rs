//! The files of a `tier` command: files on the command line, and all files below directories on it.
//!
//! Trees change during the command. A file that disappears before its turn is left out, unless it was on the command
//! line.

use std::ffi::OsString;
use std::fs::FileType;
use std::io::ErrorKind;
use std::os::unix::fs::{DirEntryExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::filesystems::{Mounted, Mounts};

/// Number of checks whether a file is gone, with growing pauses between them.
const LOOKS: u32 = 5;
const LOOK_PAUSE: Duration = Duration::from_millis(20);

/// A file on a Forebay mount.
pub(super) struct TreeFile {
    pub(super) path: PathBuf,
    pub(super) mounted: Mounted,
    /// Inode of a file found below a directory; `None` for a file on the command line.
    inode: Option<u64>,
}

/// Files, and errors of files that cannot be used.
#[derive(Default)]
pub(super) struct Tree {
    pub(super) files: Vec<TreeFile>,
    pub(super) problems: Vec<String>,
}

pub(super) fn shown(path: &Path) -> String {
    path.display().to_string()
}

impl TreeFile {
    pub(super) fn shown(&self) -> String {
        shown(&self.path)
    }

    /// Whether a file found below a directory has disappeared; another file may have its name now.
    pub(super) fn is_gone(&self) -> bool {
        let Some(inode) = self.inode else { return false };
        let is_gone = || match std::fs::symlink_metadata(&self.path) {
            Ok(found) => found.ino() != inode,
            Err(error) => error.kind() == ErrorKind::NotFound,
        };
        // The kernel keeps a name until the node has answered the client that removed it.
        (0..LOOKS).any(|look| {
            std::thread::park_timeout(LOOK_PAUSE * look);
            is_gone()
        })
    }
}

impl Tree {
    /// Files on the command line, and those below directories in the order of their names.
    pub(super) fn of(paths: &[PathBuf]) -> Result<Self> {
        let mounts = Mounts::read()?;
        let mut tree = Self::default();
        for path in paths {
            let mounted = mounts.find(path)?;
            if !path.is_dir() {
                tree.files.push(TreeFile { path: path.clone(), mounted, inode: None });
                continue;
            }
            std::fs::read_dir(path).with_context(|| shown(path))?;
            tree.walk(path, &mounts)?;
        }
        Ok(tree)
    }

    fn walk(&mut self, directory: &Path, mounts: &Mounts) -> Result<()> {
        let mut left = vec![directory.to_owned()];
        while let Some(directory) = left.pop() {
            for (name, kind, inode) in inside(&directory).with_context(|| shown(&directory))? {
                let path = directory.join(name);
                if kind.is_dir() {
                    left.push(path);
                } else if kind.is_file() {
                    match mounts.find(&path) {
                        Ok(mounted) => self.files.push(TreeFile { path, mounted, inode: Some(inode) }),
                        Err(problem) => self.problems.push(format!("{problem:#}")),
                    }
                }
            }
        }
        Ok(())
    }

    /// Calls `work` with each file; the first error ends the loop.
    pub(super) fn each<T>(&self, work: impl Fn(&TreeFile) -> Result<T>) -> Result<Vec<T>> {
        let mut done = Vec::with_capacity(self.files.len());
        for file in &self.files {
            match work(file) {
                Ok(one) => done.push(one),
                Err(_) if file.is_gone() => {}
                Err(error) => return Err(error.context(file.shown())),
            }
        }
        Ok(done)
    }

    /// Prints the files that could not be used, and fails if there are any.
    pub(super) fn end(&self) -> Result<()> {
        self.problems.iter().for_each(|problem| eprintln!("{problem}"));
        match self.problems.len() {
            0 => Ok(()),
            count => bail!("files that were left out: {count} of {}", count + self.files.len()),
        }
    }
}

/// Entries of a directory, by name; none if the directory is gone.
fn inside(directory: &Path) -> std::io::Result<Vec<(OsString, FileType, u64)>> {
    let is_gone = |error: &std::io::Error| error.kind() == ErrorKind::NotFound;
    let entries = match std::fs::read_dir(directory) {
        Err(error) if is_gone(&error) => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut inside = Vec::new();
    for entry in entries {
        let entry = entry?;
        match entry.file_type() {
            Err(error) if is_gone(&error) => {}
            kind => inside.push((entry.file_name(), kind?, entry.ino())),
        }
    }
    inside.sort_by(|(one, ..), (other, ..)| one.cmp(other));
    Ok(inside)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    /// Whether an unusable file is an error that ends the command.
    fn is_missed(name: &str, inode: Option<u64>) -> bool {
        let mounted = Mounted { dir: PathBuf::new(), filesystem: String::new(), inside: String::new() };
        let path = std::path::absolute(name).unwrap();
        let tree = Tree { files: vec![TreeFile { path, mounted, inode }], problems: Vec::new() };
        tree.each(|_| -> Result<()> { bail!("no such file") }).is_err()
    }

    #[test]
    fn what_is_gone_is_missed_only_if_it_was_named() {
        let here = inside(Path::new(".")).unwrap();
        let inode = here.into_iter().find(|(name, ..)| name == "Cargo.toml").map(|(_, _, inode)| inode);
        assert!(is_missed("gone", None) && !is_missed("gone", inode));
        assert!(is_missed("Cargo.toml", None) && is_missed("Cargo.toml", inode));
        assert!(!is_missed("src", inode), "something else is there now");
        assert!(inside(Path::new("gone")).unwrap().is_empty());
    }
}
