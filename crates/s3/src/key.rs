//! Object keys as paths: a bucket is a directory, a key is the path of a file below it.
//!
//! A key's components are names of directory entries, so they obey the filesystem's rules. A key that ends in `/`
//! is a directory object. Listing a tree depth first, with each directory sorted as if its name ended in `/`,
//! gives exactly the byte order of full keys that S3 promises; [`sort_name`] is that rule.

/// Longest key, in bytes.
const KEY_BYTES_MAX: usize = 1024;
/// Longest component, in bytes: the filesystem's limit on names.
const NAME_BYTES_MAX: usize = 255;

/// Why a key cannot be a path. S3 answers 400 with this text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// The key is empty.
    #[error("key is empty")]
    Empty,
    /// The key exceeds 1024 bytes.
    #[error("key is too long: bytes={0} most=1024")]
    TooLong(usize),
    /// A component exceeds 255 bytes.
    #[error("a part of the key between slashes is too long: bytes={0} most=255")]
    NameTooLong(usize),
    /// An empty component: two slashes in a row, or one at the beginning.
    #[error("a part of the key between slashes is empty")]
    EmptyName,
    /// A component is `.` or `..`.
    #[error("a part of the key is . or ..")]
    DotName,
    /// The key contains a zero byte.
    #[error("key contains a zero byte")]
    Zero,
}

/// A key that is a valid path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ObjectKey<'a> {
    path: &'a str,
    is_directory: bool,
}

impl<'a> ObjectKey<'a> {
    /// Checks a key.
    pub fn parse(key: &'a str) -> Result<Self, KeyError> {
        if key.is_empty() {
            return Err(KeyError::Empty);
        }
        if key.len() > KEY_BYTES_MAX {
            return Err(KeyError::TooLong(key.len()));
        }
        let (path, is_directory) = match key.strip_suffix('/') {
            Some(path) => (path, true),
            None => (key, false),
        };
        for name in path.split('/') {
            match name {
                "" => return Err(KeyError::EmptyName),
                "." | ".." => return Err(KeyError::DotName),
                _ if name.len() > NAME_BYTES_MAX => return Err(KeyError::NameTooLong(name.len())),
                _ if name.contains('\0') => return Err(KeyError::Zero),
                _ => {}
            }
        }
        Ok(Self { path, is_directory })
    }

    /// Whether the key names a directory object.
    pub fn is_directory(&self) -> bool {
        self.is_directory
    }

    /// The directories above the object, from the bucket down.
    pub fn parents(&self) -> impl Iterator<Item = &'a str> {
        let parents = self.path.rsplit_once('/').map(|(parents, _)| parents);
        parents.into_iter().flat_map(|parents| parents.split('/'))
    }

    /// The last component.
    pub fn name(&self) -> &'a str {
        self.path.rsplit_once('/').map_or(self.path, |(_, name)| name)
    }
}

/// The name by which a directory entry sorts.
pub fn sort_name(name: &str, entry: EntryIs) -> String {
    match entry {
        EntryIs::Directory => format!("{name}/"),
        EntryIs::File => name.to_owned(),
    }
}

/// Kind of a directory entry, for its place in a listing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EntryIs {
    /// A directory: its contents are listed at its place.
    Directory,
    /// Anything else.
    File,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[track_caller]
    fn check(key: &str, expected: Result<(Vec<&str>, &str, bool), KeyError>) {
        let parsed = ObjectKey::parse(key);
        let parts = parsed.map(|key| (key.parents().collect::<Vec<_>>(), key.name(), key.is_directory()));
        assert_eq!(parts, expected);
    }

    #[test]
    fn keys_become_paths() {
        check("a", Ok((vec![], "a", false)));
        check("a/b/c.txt", Ok((vec!["a", "b"], "c.txt", false)));
        check("a/b/", Ok((vec!["a"], "b", true)));
        check("größe/数", Ok((vec!["größe"], "数", false)));
    }

    #[test]
    fn keys_that_are_no_paths_are_refused_with_a_reason() {
        check("", Err(KeyError::Empty));
        check("/", Err(KeyError::EmptyName));
        check("/a", Err(KeyError::EmptyName));
        check("a//b", Err(KeyError::EmptyName));
        check("a/./b", Err(KeyError::DotName));
        check("..", Err(KeyError::DotName));
        check("a\0b", Err(KeyError::Zero));
        let (long, longest) = ("x".repeat(256), "x/".repeat(513));
        check(&long, Err(KeyError::NameTooLong(256)));
        check(&longest, Err(KeyError::TooLong(1026)));
        assert!(ObjectKey::parse(&"x".repeat(255)).is_ok());
    }

    #[derive(Default)]
    struct Tree {
        entries: BTreeMap<String, Option<Tree>>,
    }

    impl Tree {
        /// Adds a key; a name is a file or a directory, never both.
        fn add(&mut self, parents: &[&str], name: &str) {
            let Some((first, rest)) = parents.split_first() else {
                if !self.entries.contains_key(&sort_name(name, EntryIs::Directory)) {
                    self.entries.insert(sort_name(name, EntryIs::File), None);
                }
                return;
            };
            if self.entries.contains_key(*first) {
                return;
            }
            let entry = self.entries.entry(sort_name(first, EntryIs::Directory));
            entry.or_insert_with(|| Some(Tree::default())).as_mut().unwrap().add(rest, name);
        }

        fn list(&self, prefix: &str, out: &mut Vec<String>) {
            for (sort_name, child) in &self.entries {
                match child {
                    Some(tree) => tree.list(&format!("{prefix}{sort_name}"), out),
                    None => out.push(format!("{prefix}{sort_name}")),
                }
            }
        }
    }

    proptest! {
        #[test]
        fn walking_the_tree_gives_keys_in_byte_order(keys in prop::collection::vec("[a-b.!0/-]{1,8}", 0..60)) {
            let mut tree = Tree::default();
            for key in &keys {
                if let Ok(key) = ObjectKey::parse(key) && !key.is_directory() {
                    tree.add(&key.parents().collect::<Vec<_>>(), key.name());
                }
            }
            let mut listed = Vec::new();
            tree.list("", &mut listed);
            let mut sorted = listed.clone();
            sorted.sort_by(|a, b| a.as_bytes().cmp(b.as_bytes()));
            prop_assert_eq!(listed, sorted);
        }
    }
}
