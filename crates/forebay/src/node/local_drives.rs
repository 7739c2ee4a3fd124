//! `DIR/drives.json`: where the drives of this machine are; drawn in `docs/formats/node.md`.
//!
//! A drive is found by the UUID that is written on it. Its path is noted before its record is committed: after a crash in between
//! there is a path too many, which goes at the next start.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Result;
use base::DriveUuid;
use base::env::Env;
use serde::{Deserialize, Serialize};

use super::NodeDir;
use super::local_file::LocalFile;

/// Why a drive without a path is missing, and what to do.
pub(super) const NO_PATH: &str =
    "its path is not known on this machine: name it at the next start (forebay start DIR --drive PATH)";

/// Paths of drives, by UUID.
pub(crate) struct LocalDrives(LocalFile<Content>);

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Content {
    drives: BTreeMap<DriveUuid, PathBuf>,
}

impl Content {
    /// A path leads to one drive: another that was there is elsewhere now, or gone.
    fn set(&mut self, uuid: DriveUuid, path: PathBuf) {
        self.drives.retain(|_, other| *other != path);
        self.drives.insert(uuid, path);
    }
}

impl LocalDrives {
    /// Reads the file. A node of an earlier version has none: its control ledger has the `former` paths. Writes nothing.
    pub(crate) fn load(env: &Env, dir: &NodeDir, former: Vec<(DriveUuid, String)>) -> Result<Self> {
        let mut content = Content::default();
        former.into_iter().for_each(|(uuid, path)| content.set(uuid, path.into()));
        Ok(Self(LocalFile::load(env, dir.drives_json(), content)?))
    }

    /// Writes the file, unless it is there. Must come before any record is written, because that loses its former path.
    pub(super) fn make(&self) -> Result<()> {
        self.0.make()
    }

    /// Where a drive is.
    pub(crate) fn path_of(&self, uuid: DriveUuid) -> Option<PathBuf> {
        self.0.read(|content| content.drives.get(&uuid).cloned())
    }

    /// The number of paths.
    pub(crate) fn count(&self) -> usize {
        self.0.read(|content| content.drives.len())
    }

    /// Where drives are, in the order of their UUIDs.
    pub(crate) fn paths(&self) -> Vec<PathBuf> {
        self.0.read(|content| content.drives.values().cloned().collect())
    }

    /// The drive that is at a path.
    pub(super) fn drive_at(&self, path: &Path) -> Option<DriveUuid> {
        let at = |content: &Content| {
            content.drives.iter().find(|(_, known)| *known == path).map(|(uuid, _)| *uuid)
        };
        self.0.read(at)
    }

    /// Notes where drives are now.
    pub(crate) fn set(&self, drives: impl IntoIterator<Item = (DriveUuid, PathBuf)>) -> Result<()> {
        self.0.change(|content| drives.into_iter().for_each(|(uuid, path)| content.set(uuid, path)))
    }

    /// Forgets the paths of all other drives.
    pub(crate) fn keep_only(&self, is_known: impl Fn(DriveUuid) -> bool) -> Result<()> {
        self.0.change(|content| content.drives.retain(|uuid, _| is_known(*uuid)))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    const ONE: DriveUuid = DriveUuid(*b"0123456789abcdef");
    const TWO: DriveUuid = DriveUuid([2; 16]);

    fn load(dir: &NodeDir, former: &[(DriveUuid, &str)]) -> Result<LocalDrives> {
        let former = former.iter().map(|(uuid, path)| (*uuid, (*path).to_owned()));
        LocalDrives::load(&Env::real(), dir, former.collect())
    }

    #[test]
    fn paths_are_what_the_format_says() {
        let content = Content { drives: BTreeMap::from([(ONE, PathBuf::from("/dev/sdb"))]) };
        let text = r#"{"drives":{"30313233-3435-3637-3839-616263646566":"/dev/sdb"}}"#;
        assert_eq!(serde_json::to_string(&content).unwrap(), text);
        assert_eq!(serde_json::from_str::<Content>(text).unwrap(), content);
        assert!(serde_json::from_str::<Content>(r#"{"drives":{},"more":1}"#).is_err());
        assert!(serde_json::from_str::<Content>("{}").is_err());
    }

    #[test]
    fn former_paths_count_until_there_is_a_file() {
        let root = tempfile::tempdir().unwrap();
        let dir = NodeDir::new(root.path());
        let drives = load(&dir, &[(ONE, "/dev/sdb")]).unwrap();
        assert!(!dir.drives_json().exists(), "reading writes nothing");
        drives.make().unwrap();
        let again = load(&dir, &[(ONE, "/dev/other"), (TWO, "/dev/sdc")]).unwrap();
        assert_eq!(again.path_of(ONE), Some(PathBuf::from("/dev/sdb")));
        assert_eq!(again.path_of(TWO), None);
    }

    #[test]
    fn a_path_leads_to_the_last_drive_that_was_there() {
        let root = tempfile::tempdir().unwrap();
        let dir = NodeDir::new(root.path());
        let drives = load(&dir, &[]).unwrap();
        drives.set([(ONE, "/dev/sdb".into())]).unwrap();
        drives.set([(TWO, "/dev/sdb".into())]).unwrap();
        let check = |one: Option<&str>, two: Option<&str>| {
            for drives in [&drives, &load(&dir, &[]).unwrap()] {
                assert_eq!(drives.path_of(ONE), one.map(PathBuf::from));
                assert_eq!(drives.path_of(TWO), two.map(PathBuf::from));
            }
        };
        check(None, Some("/dev/sdb"));
        drives.set([(ONE, "/dev/sdb".into()), (TWO, "/dev/sdc".into())]).unwrap();
        check(Some("/dev/sdb"), Some("/dev/sdc"));
        assert_eq!(drives.drive_at(Path::new("/dev/sdc")), Some(TWO));
        drives.keep_only(|uuid| uuid == ONE).unwrap();
        check(Some("/dev/sdb"), None);
    }

    #[test]
    fn a_damaged_file_is_an_error_that_names_it() {
        let root = tempfile::tempdir().unwrap();
        let dir = NodeDir::new(root.path());
        for text in ["", "{\"drives\":{\"x\":\"/dev/sdb\"}}", "{\"drives\":{},\"more\":1}"] {
            Env::real().files.write_atomic(&dir.drives_json(), text.as_bytes()).unwrap();
            let error = format!("{:#}", load(&dir, &[]).err().unwrap());
            assert!(error.contains("drives.json"), "{error}");
        }
    }
}
