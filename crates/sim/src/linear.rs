//! Linearizability: is there an order of all operations, one after another, in which each gives the result that its
//! process saw?
//!
//! The question is that of Wing and Gong, the method that of Lowe: go through the history and keep every possible state
//! of the filesystem, each with the running operations that have already happened in it. An operation happens between
//! its beginning and its end. An operation without an answer when power is lost happened before that or never; so did
//! one with a doubtful answer.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use base::FsError::NoSpace;

use crate::history::{Cut, Moment, Op, OpId, Ret, show};
use crate::model::{Model, Promise};

/// Most states that are kept. More mean that the history is too wide to be checked, not that it is wrong.
const STATES_MAX: usize = 20_000;

/// A possible state of the filesystem, and the running operations that have happened in it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Possible {
    model: Model,
    happened: BTreeMap<OpId, Promise>,
    /// The states before changes that are perhaps not durable, oldest first. Empty if all changes are when they return.
    behind: Vec<Before>,
}

/// The state before a change of names or attributes.
#[derive(Debug, Clone)]
struct Before {
    id: OpId,
    client: u32,
    model: Model,
    print: u64,
}

impl PartialEq for Before {
    fn eq(&self, other: &Self) -> bool {
        (self.id, self.print) == (other.id, other.print)
    }
}

impl Eq for Before {}

impl std::hash::Hash for Before {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        (self.id, self.print).hash(state);
    }
}

impl Possible {
    /// Notes an operation that `model` does not show yet; `after` is the state with it.
    fn happens(&mut self, id: OpId, client: u32, op: &Op, after: Model) {
        let model = std::mem::replace(&mut self.model, after);
        let durable = match op {
            Op::Copy { from, len, .. } if !model.copies(*from, *len) => None,
            // The changes of a client before its `fsync`, or before a change that returns when it is durable.
            Op::Fsync { .. } | Op::Punch { .. } | Op::Copy { .. } => {
                self.behind.iter().rposition(|before| before.client == client)
            }
            // What another client sees.
            Op::Lookup { parent, name }
            | Op::Make { parent, name, .. }
            | Op::Unlink { parent, name }
            | Op::Rmdir { parent, name }
            | Op::Link { parent, name, .. } => self.seen_change(&model, client, *parent, Some(name)),
            Op::Rename { from, to, .. } => {
                let seen = [from, to].map(|(dir, name)| self.seen_change(&model, client, *dir, Some(name)));
                seen.into_iter().max().flatten()
            }
            Op::ReadDir { dir } | Op::GetAttr { ino: dir } => self.seen_change(&model, client, *dir, None),
            _ => None,
        };
        self.behind.drain(..durable.map_or(0, |last| last + 1));
        if op.may_be_early() {
            let print = fingerprint(&model);
            self.behind.push(Before { id, client, model, print });
        }
    }

    /// The last change by another client of a name, or of any name, in a directory.
    fn seen_change(&self, now: &Model, client: u32, dir: base::Ino, name: Option<&str>) -> Option<usize> {
        let mut after = now;
        for (at, before) in self.behind.iter().enumerate().rev() {
            if before.client != client && before.model.names(dir, name) != after.names(dir, name) {
                return Some(at);
            }
            after = &before.model;
        }
        None
    }

    /// The states after a loss of power.
    fn after_crash(mut self, is_early: bool) -> Vec<Model> {
        let mut models = Vec::new();
        if is_early {
            let mut newest = self.model.clone();
            for before in self.behind.iter().rev() {
                newest.complete(&before.model);
                models.push(before.model.with_contents(&newest));
            }
        }
        models.push(std::mem::replace(&mut self.model, Model::new()));
        models.iter_mut().for_each(Model::crash);
        models
    }
}

/// An operation under way.
struct Open {
    client: u32,
    op: Op,
    /// The result that its process will see; `None` if that is lost or doubtful.
    ret: Option<Ret>,
}

/// Statistics of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Checked {
    /// Operations whose process got a result.
    pub(crate) operations: u64,
    /// The most states kept at once.
    pub(crate) states_max: usize,
    /// The check was given up: too many states.
    pub(crate) given_up: bool,
}

struct Checker {
    /// Changes of names and attributes return before they are durable.
    is_early: bool,
    open: BTreeMap<OpId, Open>,
    possible: Vec<Possible>,
    checked: Checked,
}

/// Checks a history, except for the contents of inodes in `lost`, which lost writes.
///
/// # Errors
/// The operation whose result has no explanation, with the events before it.
pub(crate) fn check(history: &[Moment], lost: &BTreeSet<u64>, is_early: bool) -> Result<Checked, String> {
    let mut rets: BTreeMap<OpId, &Ret> = BTreeMap::new();
    for moment in history {
        if let Moment::End { id, ret } = moment {
            rets.insert(*id, ret);
        }
    }
    let first = Possible { model: Model::new(), happened: BTreeMap::new(), behind: Vec::new() };
    let (open, checked) = (BTreeMap::new(), Checked::default());
    let mut checker = Checker { is_early, open, possible: vec![first], checked };
    for (at, moment) in history.iter().enumerate() {
        match moment {
            Moment::Begin { id, client, op } => {
                let ret = rets.get(id).filter(|ret| !is_doubtful(op, ret)).map(|ret| (*ret).clone());
                checker.open.insert(*id, Open { client: *client, op: op.clone(), ret });
            }
            Moment::End { id, ret } => {
                checker.end(*id, ret);
                if let Ret::Found { ino, .. } = ret
                    && lost.contains(&ino.0)
                {
                    checker.taint(*ino);
                }
            }
            Moment::Crash => checker.crash(),
        }
        checker.checked.states_max = checker.checked.states_max.max(checker.possible.len());
        if checker.possible.is_empty() {
            return Err(explain(history, at));
        }
        if checker.possible.len() > STATES_MAX {
            checker.checked.given_up = true;
            return Ok(checker.checked);
        }
    }
    Ok(checker.checked)
}

/// Whether the result leaves open what happened.
fn is_doubtful(op: &Op, ret: &Ret) -> bool {
    let flushes = matches!(
        op,
        Op::Truncate { .. } | Op::Punch { .. } | Op::Copy { .. } | Op::Fsync { .. } | Op::Open { .. }
    );
    ret.is_doubtful() || flushes && *ret == Ret::Failed(NoSpace)
}

/// The file whose content is unknown after this result.
fn tainted_by(op: &Op, ret: &Ret) -> Option<base::Ino> {
    match (op, ret) {
        (Op::Write { .. } | Op::Fsync { .. }, Ret::Failed(NoSpace)) => None,
        (Op::Open { cut: Cut::Keep, .. }, _) => None,
        (
            Op::Write { ino, .. }
            | Op::Truncate { ino, .. }
            | Op::Punch { ino, .. }
            | Op::Copy { to: (ino, _), .. }
            | Op::Fsync { ino }
            | Op::Open { ino, .. },
            ret,
        ) if is_doubtful(op, ret) => Some(*ino),
        _ => None,
    }
}

impl Checker {
    fn taint(&mut self, ino: base::Ino) {
        self.possible.iter_mut().for_each(|possible| possible.model.taint(ino));
        let behind = self.possible.iter_mut().flat_map(|possible| &mut possible.behind);
        behind.for_each(|before| before.model.taint(ino));
    }

    fn end(&mut self, id: OpId, ret: &Ret) {
        let Some(open) = self.open.get(&id) else { return };
        self.checked.operations += 1;
        let is_certain = open.ret.is_some();
        let changes_names = open.op.changes_names();
        if let Some(ino) = tainted_by(&open.op, ret) {
            self.taint(ino);
        }
        if !is_certain {
            // A name may have changed, or may change later. The content is unknown, which `taint` has noted.
            if !changes_names {
                self.open.remove(&id);
            }
            return;
        }
        let (mut seen, mut seen_ended) = (HashSet::new(), HashSet::new());
        let mut ended = Vec::new();
        let mut todo = std::mem::take(&mut self.possible);
        while let Some(mut possible) = todo.pop() {
            if let Some(promise) = possible.happened.remove(&id) {
                possible.model.keep_promise(&promise);
                if seen_ended.insert(possible.clone()) {
                    ended.push(possible);
                }
                continue;
            }
            for next in self.nexts(&possible) {
                if seen.insert(next.clone()) && seen.len() < 4 * STATES_MAX {
                    todo.push(next);
                }
            }
        }
        self.possible = ended;
        self.open.remove(&id);
    }

    /// Every state that one more operation can lead to.
    fn nexts(&self, possible: &Possible) -> Vec<Possible> {
        let mut nexts = Vec::new();
        for (id, open) in &self.open {
            if possible.happened.contains_key(id) {
                continue;
            }
            let mut model = possible.model.clone();
            let Some(mut promise) = model.apply(*id, open.client, &open.op, open.ret.as_ref()) else {
                continue;
            };
            let mut next = possible.clone();
            if self.is_early {
                next.happens(*id, open.client, &open.op, model);
                promise.retain(|_| !open.op.may_be_early());
            } else {
                next.model = model;
            }
            next.happened.insert(*id, promise);
            nexts.push(next);
        }
        nexts
    }

    /// A crash: running operations may have happened, in any order, or not. After that, content that was not durable is
    /// in doubt.
    fn crash(&mut self) {
        let mut seen: HashSet<Possible> = self.possible.iter().cloned().collect();
        let mut todo = std::mem::take(&mut self.possible);
        let mut after = BTreeSet::new();
        let mut left = Vec::new();
        while let Some(possible) = todo.pop() {
            for next in self.nexts(&possible) {
                if seen.len() < 4 * STATES_MAX && seen.insert(next.clone()) {
                    todo.push(next);
                }
            }
            for model in possible.after_crash(self.is_early) {
                if after.insert(fingerprint(&model)) {
                    left.push(Possible { model, happened: BTreeMap::new(), behind: Vec::new() });
                }
            }
        }
        self.possible = left;
        self.open.clear();
    }
}

fn fingerprint(model: &Model) -> u64 {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    model.hash(&mut hasher);
    hasher.finish()
}

fn explain(history: &[Moment], at: usize) -> String {
    let mut lines = vec!["no order of operations explains the last answer:".to_owned()];
    let from = at.saturating_sub(60);
    if let Moment::End { id, .. } = &history[at]
        && let Some(begin) = history.get(*id).filter(|_| *id < from)
    {
        lines.push(show(begin));
        lines.push("...".to_owned());
    }
    lines.extend(history[from..=at].iter().map(show));
    lines.join("\n  ")
}

#[cfg(test)]
mod tests;
