//! Compares a mount with the models of its workers.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::{Context, Result};

use super::content::FileId;
use super::file::FileState;
use super::model::{DIRECTORY_MODE, Entry, Model, Operation};

/// A name as it was found.
#[derive(Debug)]
struct Found {
    kind: Kind,
    inode: u64,
    links: u64,
    mode: u32,
}

#[derive(Debug)]
enum Kind {
    File,
    Directory,
    Symlink(String),
    Other,
}

/// Names below a mount, relative to it.
type Tree = BTreeMap<String, Found>;

/// Everything below `root`.
fn walk(root: &Path) -> Result<Tree> {
    let mut tree = Tree::new();
    let mut directories = vec![String::new()];
    while let Some(directory) = directories.pop() {
        let path = root.join(&directory);
        for item in std::fs::read_dir(&path).with_context(|| format!("list {}", path.display()))? {
            let name = item?.file_name().into_string().unwrap_or_else(|name| name.to_string_lossy().into());
            let relative = if directory.is_empty() { name } else { format!("{directory}/{name}") };
            let path = root.join(&relative);
            let metadata = path.symlink_metadata().with_context(|| format!("stat {relative}"))?;
            let kind = if metadata.is_dir() {
                directories.push(relative.clone());
                Kind::Directory
            } else if metadata.is_file() {
                Kind::File
            } else if metadata.is_symlink() {
                Kind::Symlink(path.read_link()?.to_string_lossy().into())
            } else {
                Kind::Other
            };
            let found = Found {
                kind,
                inode: metadata.ino(),
                links: metadata.nlink(),
                mode: metadata.mode() & 0o7777,
            };
            tree.insert(relative, found);
        }
    }
    Ok(tree)
}

/// The model and names of one worker.
pub(crate) struct Claim<'a> {
    pub(crate) model: &'a Model,
    pub(crate) in_flight: Option<&'a Operation>,
    /// Its names begin with one of these.
    pub(crate) prefixes: Vec<String>,
}

/// The result for all claims.
pub(crate) struct Verdict {
    /// For each claim, the model that was found, or its problems, one line each.
    pub(crate) workers: Vec<Result<Model, Vec<String>>>,
    /// Names without a claim, and missing shared directories.
    pub(crate) problems: Vec<String>,
}

/// Compares everything below `root` with the claims. `shared` are directories of no single worker.
pub(crate) fn verify(root: &Path, claims: &[Claim<'_>], shared: &[&str]) -> Result<Verdict> {
    let mut tree = walk(root)?;
    let mut problems: Vec<String> = Vec::new();
    for path in shared {
        if tree.remove(*path).is_none() {
            problems.push(format!("shared directory is gone: {path}"));
        }
    }
    let workers = claims.iter().map(|claim| judge_worker(root, &mut tree, claim)).collect();
    problems.extend(tree.keys().map(|path| format!("unexplained: {path}")));
    Ok(Verdict { workers, problems })
}

/// Compares the worker's names, and removes them from the tree.
fn judge_worker(root: &Path, tree: &mut Tree, claim: &Claim<'_>) -> Result<Model, Vec<String>> {
    let is_own = |path: &str| claim.prefixes.iter().any(|prefix| path.starts_with(prefix.as_str()));
    let (own, others): (Tree, Tree) = std::mem::take(tree).into_iter().partition(|(path, _)| is_own(path));
    *tree = others;
    let mut fewest: Option<Vec<String>> = None;
    for possible in claim.model.possible(claim.in_flight) {
        match judge_model(root, &own, &possible) {
            Ok(model) => return Ok(model),
            Err(problems) if fewest.as_ref().is_none_or(|fewest| problems.len() < fewest.len()) => {
                fewest = Some(problems);
            }
            Err(_) => {}
        }
    }
    let mut problems = fewest.unwrap_or_default();
    if let Some(operation) = claim.in_flight {
        problems.push(format!("(in flight at the crash: {operation})"));
    }
    Err(problems)
}

fn judge_model(root: &Path, tree: &Tree, model: &Model) -> Result<Model, Vec<String>> {
    let mut problems = Vec::new();
    let missing = model.entries.keys().filter(|path| !tree.contains_key(*path));
    problems.extend(missing.map(|path| format!("lost: {path}: {:?}", model.entries[path])));
    let extra = tree.keys().filter(|path| !model.entries.contains_key(*path));
    problems.extend(extra.map(|path| explain_extra(root, path, model)));
    let mut inodes: BTreeMap<FileId, u64> = BTreeMap::new();
    for (path, entry) in &model.entries {
        if let Some(found) = tree.get(path) {
            problems.extend(
                compare(entry, found, model, &mut inodes).map(|problem| format!("{path}: {problem}")),
            );
        }
    }
    if !problems.is_empty() {
        return Err(problems);
    }
    let mut judged = model.clone();
    judged.settle();
    for path in inodes.keys().filter_map(|file| {
        model.entries.iter().find(|(_, entry)| **entry == Entry::File(*file)).map(|(path, _)| path)
    }) {
        let file = model.file(path).expect("taken from the model");
        match judge_content(root, path, file) {
            Ok(mut state) => {
                state.has_mode(tree[path].mode);
                judged.files.insert(file.id, state);
            }
            Err(problem) => problems.push(format!("{path}: file={:#x}: {problem}", file.id.0)),
        }
    }
    if problems.is_empty() { Ok(judged) } else { Err(problems) }
}

fn judge_content(root: &Path, path: &str, file: &FileState) -> Result<FileState, String> {
    let data = std::fs::read(root.join(path)).map_err(|error| format!("cannot be read: {error}"))?;
    file.judge(&data)
}

fn compare(
    entry: &Entry,
    found: &Found,
    model: &Model,
    inodes: &mut BTreeMap<FileId, u64>,
) -> Option<String> {
    match (entry, &found.kind) {
        (Entry::Directory, Kind::Directory) if found.mode == DIRECTORY_MODE => None,
        (Entry::Symlink(expected), Kind::Symlink(text)) if expected == text => None,
        (Entry::File(id), Kind::File) => {
            let file = &model.files[id];
            let links = model.links(*id) as u64;
            let inode = *inodes.entry(*id).or_insert(found.inode);
            if !file.may_have_mode(found.mode) {
                let expected: Vec<String> = file.modes().iter().map(|mode| format!("{mode:o}")).collect();
                Some(format!("mode={:o} expected={}", found.mode, expected.join(" or ")))
            } else if found.links != links {
                Some(format!("links={} expected={links}", found.links))
            } else if found.inode != inode {
                Some(format!("two names of one file have two inodes: {} {inode}", found.inode))
            } else {
                None
            }
        }
        _ => Some(format!("expected {entry:?}, found {found:?}")),
    }
}

/// Describes a name that must not exist. The bytes of a file tell which file it is.
fn explain_extra(root: &Path, path: &str, model: &Model) -> String {
    let content = std::fs::read(root.join(path)).unwrap_or_default();
    let back = model.deleted.iter().find(|file| {
        let mark = file.0.to_le_bytes();
        content.get(8..16) == Some(&mark[..])
    });
    match back {
        Some(file) => format!("deleted file is back: {path} file={:#x}", file.0),
        None => format!("unexplained: {path}"),
    }
}
