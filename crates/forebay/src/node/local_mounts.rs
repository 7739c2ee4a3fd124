//! `DIR/mounts.json`: where this machine mounts filesystems; drawn in `docs/formats/node.md`.

use std::collections::BTreeMap;

use anyhow::Result;
use base::env::Env;
use control::FormerMount;
use serde::{Deserialize, Serialize};

use super::NodeDir;
use super::local_file::LocalFile;

/// Mounts of filesystems, by number.
pub(crate) struct LocalMounts(LocalFile<Content>);

/// Where and how a filesystem is mounted.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MountPlace {
    /// The mount point, once there was one.
    pub(crate) path: Option<String>,
    /// Mount options.
    pub(crate) options: String,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Content {
    mounts: BTreeMap<u32, MountPlace>,
}

impl LocalMounts {
    /// Reads the file. A node of an earlier version has none: its control ledger has the `former` mounts. Writes nothing.
    pub(crate) fn load(env: &Env, dir: &NodeDir, former: Vec<FormerMount>) -> Result<Self> {
        let place = |FormerMount { id, path, options }| (id, MountPlace { path, options });
        let content = Content { mounts: former.into_iter().map(place).collect() };
        Ok(Self(LocalFile::load(env, dir.mounts_json(), content)?))
    }

    /// Writes the file, unless it is there. Must come before any record is written, because that loses its former mount.
    pub(super) fn make(&self) -> Result<()> {
        self.0.make()
    }

    /// Where and how a filesystem was mounted last; nowhere and without options if it never was.
    pub(crate) fn of(&self, filesystem: u32) -> MountPlace {
        self.0.read(|content| content.mounts.get(&filesystem).cloned().unwrap_or_default())
    }

    /// All mounts.
    pub(crate) fn all(&self) -> BTreeMap<u32, MountPlace> {
        self.0.read(|content| content.mounts.clone())
    }

    /// Remembers where and how a filesystem is mounted.
    pub(crate) fn set(&self, filesystem: u32, place: MountPlace) -> Result<()> {
        self.0.change(|content| drop(content.mounts.insert(filesystem, place)))
    }

    /// Forgets the mounts of all other filesystems.
    pub(super) fn keep_only(&self, is_known: impl Fn(u32) -> bool) -> Result<()> {
        self.0.change(|content| content.mounts.retain(|id, _| is_known(*id)))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    fn place(path: Option<&str>, options: &str) -> MountPlace {
        MountPlace { path: path.map(str::to_owned), options: options.to_owned() }
    }

    #[test]
    fn mounts_are_what_the_format_says() {
        let content =
            Content { mounts: BTreeMap::from([(1, place(Some("/mnt"), "strict")), (4, place(None, ""))]) };
        let text = r#"{"mounts":{"1":{"path":"/mnt","options":"strict"},"4":{"path":null,"options":""}}}"#;
        assert_eq!(serde_json::to_string(&content).unwrap(), text);
        assert_eq!(serde_json::from_str::<Content>(text).unwrap(), content);
        assert!(serde_json::from_str::<Content>(r#"{"mounts":{},"more":1}"#).is_err());
        let more = r#"{"mounts":{"1":{"path":null,"options":"","more":1}}}"#;
        assert!(serde_json::from_str::<Content>(more).is_err());
    }

    #[test]
    fn former_mounts_count_until_there_is_a_file() {
        let root = tempfile::tempdir().unwrap();
        let dir = NodeDir::new(root.path());
        let former = |path: &str| {
            vec![FormerMount { id: 1, path: Some(path.to_owned()), options: "strict".to_owned() }]
        };
        let mounts = LocalMounts::load(&Env::real(), &dir, former("/mnt")).unwrap();
        assert!(!dir.mounts_json().exists(), "reading writes nothing");
        mounts.make().unwrap();
        let again = LocalMounts::load(&Env::real(), &dir, former("/other")).unwrap();
        assert_eq!(again.of(1), place(Some("/mnt"), "strict"));
        assert_eq!(again.of(2), MountPlace::default());
        again.set(2, place(Some("/two"), "")).unwrap();
        again.keep_only(|id| id == 2).unwrap();
        let last = LocalMounts::load(&Env::real(), &dir, Vec::new()).unwrap();
        assert_eq!((last.of(1), last.of(2)), (MountPlace::default(), place(Some("/two"), "")));
        Env::real().files.write_atomic(&dir.mounts_json(), b"{").unwrap();
        let error = format!("{:#}", LocalMounts::load(&Env::real(), &dir, Vec::new()).err().unwrap());
        assert!(error.contains("mounts.json"), "{error}");
    }
}
