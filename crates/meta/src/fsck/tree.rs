//! I14: the names of a filesystem form a tree, and its counts are right.

use std::collections::HashSet;
use std::ops::ControlFlow;

use base::Ino;
use wire::meta::FileKind;

use super::{Check, FsckError, u64_at};
use crate::keys::Keys;
use crate::values::{Dentry, Inode, Orphan};

/// Most directories remembered as connected to the root.
const ROOTED_MAX: usize = 1 << 20;

/// An inode's attributes, and the counted values.
struct Node {
    ino: u64,
    kind: FileKind,
    nlink: u32,
    size: u64,
    parent: u64,
    /// An implicit directory.
    implicit: bool,
    names: u32,
    entries: u64,
    subdirs: u32,
}

/// Inodes of one window: those with numbers in `[from, to)`.
struct Window {
    nodes: Vec<Node>,
    from: u64,
    to: u64,
}

impl Window {
    fn holds(&self, ino: u64) -> bool {
        (self.from..self.to).contains(&ino)
    }

    fn node(&mut self, ino: u64) -> Option<&mut Node> {
        let at = self.nodes.binary_search_by_key(&ino, |node| node.ino).ok()?;
        Some(&mut self.nodes[at])
    }
}

const INODE_KEY: std::ops::RangeInclusive<usize> = 17..=17;
const DENTRY_KEY: std::ops::RangeInclusive<usize> = 19..=274;

impl Check<'_> {
    pub(super) fn tree(&mut self) -> Result<(), FsckError> {
        let mut from = 0;
        let mut rooted = HashSet::new();
        loop {
            let mut window = self.inodes_from(from)?;
            self.input.progress.begin("names");
            self.names_into(&mut window)?;
            for node in &window.nodes {
                self.check_node(node)?;
                if node.kind == FileKind::Directory && node.nlink > 0 {
                    self.check_rooted(node, &mut rooted)?;
                }
            }
            if window.to == u64::MAX {
                break;
            }
            from = window.to;
        }
        if self.get::<Inode>(&self.keys.inode(Ino::ROOT))?.is_none() {
            self.find(
                "no_root",
                "the root directory is missing".to_owned(),
                "restart with another copy of the metadata",
            );
        }
        self.orphans()?;
        self.xattrs()
    }

    fn inodes_from(&mut self, from: u64) -> Result<Window, FsckError> {
        self.input.progress.begin("inodes");
        let mut window = Window { nodes: Vec::new(), from, to: u64::MAX };
        let limit = self.window;
        let next_ino = self.number("next_ino")?;
        let range = (self.keys.inode(Ino(from)), self.keys.table_end(b'I'));
        self.each::<Inode>(&range, INODE_KEY, |check, key, inode| {
            let ino = u64_at(key, 5);
            if window.nodes.len() >= limit {
                window.to = ino;
                return ControlFlow::Break(());
            }
            check.report.inodes += 1;
            if inode.attr.ino.0 != ino || ino >= next_ino {
                check.find(
                    "inode_number",
                    format!("inode {ino} says it is {} and the next number is {next_ino}", inode.attr.ino),
                    "the number may be given to a new file: copy the data away",
                );
            }
            let attr = &inode.attr;
            let (kind, nlink, size) = (attr.kind, attr.nlink, attr.size);
            let parent = inode.parent.0;
            let implicit = inode.is_implicit();
            window.nodes.push(Node {
                ino,
                kind,
                nlink,
                size,
                parent,
                implicit,
                names: 0,
                entries: 0,
                subdirs: 0,
            });
            ControlFlow::Continue(())
        })?;
        Ok(window)
    }

    /// Counts names and entries of the window's inodes.
    fn names_into(&mut self, window: &mut Window) -> Result<(), FsckError> {
        let range = self.keys.table(b'D');
        let first = window.from == 0;
        let mut twins = Vec::new();
        self.each::<Dentry>(&range, DENTRY_KEY, |check, key, dentry| {
            let dir = u64_at(key, 5);
            let name = || String::from_utf8_lossy(Keys::name_of_dentry(key)).into_owned();
            let is_dir = dentry.kind == FileKind::Directory;
            check.report.names += u64::from(first);
            if first && is_dir {
                twins.push(check.keys.dentry(Ino(dir), Keys::name_of_dentry(key), FileKind::Regular));
            }
            if window.holds(dentry.ino.0) {
                match window.node(dentry.ino.0) {
                    None => check.find(
                        "name_without_inode",
                        format!(
                            "name {:?} in directory {dir} leads to inode {}, which does not exist",
                            name(),
                            dentry.ino
                        ),
                        "the file is lost; remove the name",
                    ),
                    Some(node) => {
                        node.names += 1;
                        if node.kind != dentry.kind || (is_dir && node.parent != dir) {
                            check.find(
                                "wrong_name",
                                format!(
                                    "name {:?} in directory {dir} and inode {} contradict each other",
                                    name(),
                                    dentry.ino
                                ),
                                "copy the data away and remove the name",
                            );
                        }
                    }
                }
            }
            if window.holds(dir) {
                match window.node(dir).filter(|node| node.kind == FileKind::Directory) {
                    None => check.find(
                        "name_without_directory",
                        format!("name {:?} is in directory {dir}, which does not exist", name()),
                        "the file may be found under another name only",
                    ),
                    Some(node) => {
                        node.entries += 1;
                        node.subdirs += u32::from(is_dir);
                    }
                }
            }
            ControlFlow::Continue(())
        })?;
        for key in twins {
            if self.input.state.get(&key)?.is_some() {
                let (dir, name) =
                    (u64_at(&key, 5), String::from_utf8_lossy(Keys::name_of_dentry(&key)).into_owned());
                self.find(
                    "name_twice",
                    format!("name {name:?} is twice in directory {dir}"),
                    "rename one of them",
                );
            }
        }
        Ok(())
    }

    fn check_node(&mut self, node: &Node) -> Result<(), FsckError> {
        let orphan = self.input.state.get(&self.keys.orphan(Ino(node.ino)))?.is_some();
        let (ino, kind) = (node.ino, node.kind);
        if (node.nlink == 0) != orphan {
            self.find(
                "orphan",
                format!(
                    "inode {ino} has {} links and {} in the list of those kept open",
                    node.nlink,
                    if orphan { "is" } else { "is not" }
                ),
                "its space does not come back",
            );
        }
        let (links, names, entries) = match kind {
            FileKind::Directory if node.nlink == 0 => (0, 0, 0),
            FileKind::Directory => (2 + node.subdirs, u32::from(ino != Ino::ROOT.0), node.entries),
            _ => (node.names, node.names, node.size),
        };
        if node.nlink != links || node.names != names {
            self.find(
                "links",
                format!(
                    "inode {ino} ({kind:?}) says {} links and has {} names; expected {links} and {names}",
                    node.nlink, node.names
                ),
                "a file with too few links is lost when one name is removed: copy it first",
            );
        }
        let found = if kind == FileKind::Directory { node.entries } else { 0 };
        if kind == FileKind::Directory && (node.size != entries || found != entries) {
            self.find(
                "entries",
                format!("directory {ino} says {} entries and has {found}", node.size),
                "it may not be removable",
            );
        }
        if node.implicit && (kind != FileKind::Directory || found == 0) {
            self.find(
                "implicit",
                format!("inode {ino} is only there for the keys below it, and there are none"),
                "remove the directory if nobody uses it",
            );
        }
        Ok(())
    }

    /// Checks that the parents lead to the root. Remembers the directories that do.
    fn check_rooted(&mut self, node: &Node, rooted: &mut HashSet<u64>) -> Result<(), FsckError> {
        if rooted.len() > ROOTED_MAX {
            rooted.clear();
        }
        let mut path = HashSet::new();
        let mut at = (node.ino, node.parent);
        while at.0 != Ino::ROOT.0 && !rooted.contains(&at.0) {
            let parent = self.get::<Inode>(&self.keys.inode(Ino(at.1)))?;
            let parent =
                parent.filter(|parent| parent.attr.kind == FileKind::Directory && parent.attr.nlink > 0);
            let (true, Some(parent)) = (path.insert(at.0), parent) else {
                self.find(
                    "not_in_tree",
                    format!(
                        "directory {} does not hang on the root: its parents end or go round at {}",
                        node.ino, at.0
                    ),
                    "nobody reaches what is in it",
                );
                return Ok(());
            };
            at = (parent.attr.ino.0, parent.parent.0);
        }
        rooted.extend(path);
        Ok(())
    }

    fn orphans(&mut self) -> Result<(), FsckError> {
        let range = self.keys.orphans();
        let mut found = Vec::new();
        self.each::<Orphan>(&range, 13..=13, |_, key, orphan| {
            found.push((Keys::ino_of_orphan(key), orphan.sessions));
            ControlFlow::Continue(())
        })?;
        for (ino, sessions) in found {
            if self.get::<Inode>(&self.keys.inode(ino))?.is_none() {
                self.find(
                    "orphan",
                    format!("inode {ino} is kept open and does not exist"),
                    "it goes with its session",
                );
            }
            let mut known = !sessions.is_empty();
            for session in sessions {
                known &= self.input.state.get(&self.keys.session(session))?.is_some();
            }
            if !known {
                self.find(
                    "orphan",
                    format!("inode {ino} is kept open by no session that exists"),
                    "its space does not come back",
                );
            }
        }
        Ok(())
    }

    fn xattrs(&mut self) -> Result<(), FsckError> {
        let range = self.keys.table(b'X');
        let mut last = None;
        let mut lost = Vec::new();
        let input = self.input;
        let keys = self.keys;
        let mut failed = None;
        input.state.scan(&range, &mut |key, _| {
            input.progress.count();
            if key.len() < 18 || last == Some(u64_at(key, 5)) {
                return ControlFlow::Continue(());
            }
            last = Some(u64_at(key, 5));
            match input.state.get(&keys.inode(Ino(u64_at(key, 5)))) {
                Ok(Some(_)) => {}
                Ok(None) => lost.push(u64_at(key, 5)),
                Err(error) => failed = Some(error),
            }
            ControlFlow::Continue(())
        })?;
        if let Some(error) = failed {
            return Err(error.into());
        }
        for ino in lost {
            self.find(
                "attributes",
                format!("extended attributes belong to inode {ino}, which does not exist"),
                "they only cost space",
            );
        }
        Ok(())
    }
}
