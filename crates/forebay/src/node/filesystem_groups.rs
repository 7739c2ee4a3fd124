//! Filesystem groups: filesystems that share times of tiering. Placement groups are in `groups`.
//!
//! A filesystem has the times of its group where its own record has none. Code that changes times or groups holds
//! `stores_lock`. Adding a filesystem to a group, and removing a group, also need the lock of the node's state, so that
//! a group is not removed while a new filesystem joins it.

use admin::{
    AdminError, FilesystemGroupControl, FilesystemGroupInfo, FilesystemInfo, MoveFilesystem,
    SetFilesystemGroup,
};
use base::units::format_duration;
use control::{FilesystemGroupRecord, FilesystemRecord, TierRecord};
use futures_util::future::join_all;
use wire::BoxFuture;

use super::filesystems::FilesystemEntry;
use super::management::failed;
use super::tiers::end;
use super::tiers::entry_of;
use super::users::check_name;
use super::{Node, State};

/// Limit of filesystem groups.
const FILESYSTEM_GROUPS_MAX: usize = 2048;
/// Bounds of the cue: this many seconds at least, and this part of the retention at most.
const CUE_S_MIN: u64 = 10;
const CUE_PART: u64 = 3;

/// When content is copied to a store, and when it leaves the drives, in seconds after it was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Times {
    pub(super) retention_s: u64,
    pub(super) cue_s: u64,
}

impl Times {
    /// Times of the filesystem; those that it does not have are its group's.
    pub(super) fn of(tier: TierRecord, group: &FilesystemGroupRecord) -> Self {
        let retention_s = tier.retention_s.unwrap_or(group.retention_s);
        Self { retention_s, cue_s: tier.cue_s.unwrap_or_else(|| suiting(group.cue_s, retention_s)) }
    }

    /// The contradiction in the times, if there is one.
    fn problem(self) -> Option<String> {
        let Self { retention_s, cue_s } = self;
        if (CUE_S_MIN..=retention_s / CUE_PART).contains(&cue_s) {
            return None;
        }
        Some(format!(
            "the cue must be between 10s and a third of the retention: cue={} retention={}",
            format_duration(cue_s),
            format_duration(retention_s)
        ))
    }
}

/// The default cue: shorter where the retention requires it.
fn suiting(cue_s: u64, retention_s: u64) -> u64 {
    cue_s.min(retention_s / CUE_PART)
}

/// Refuses times of a filesystem that contradict those of its group.
pub(super) fn check_own_times(tier: TierRecord, group: &FilesystemGroupRecord) -> Result<(), AdminError> {
    let Some(problem) = Times::of(tier, group).problem() else { return Ok(()) };
    let name = &group.name;
    let advice = match (tier.retention_s, tier.cue_s) {
        (None, Some(_)) => {
            format!(" (the retention is that of filesystem group {name}: give --retention too)")
        }
        _ => String::new(),
    };
    Err(AdminError::invalid(problem + &advice))
}

/// The group's settings, or defaults, with the requested changes.
fn changed(
    old: FilesystemGroupRecord,
    settings: SetFilesystemGroup,
) -> Result<FilesystemGroupRecord, AdminError> {
    let group = FilesystemGroupRecord {
        retention_s: settings.retention_s.unwrap_or(old.retention_s),
        cue_s: settings.cue_s.unwrap_or(old.cue_s),
        ..old
    };
    match (Times { retention_s: group.retention_s, cue_s: group.cue_s }).problem() {
        None => Ok(group),
        Some(problem) => Err(AdminError::invalid(problem)),
    }
}

/// A new group with this name and these settings.
fn new_group(id: u32, name: &str, settings: SetFilesystemGroup) -> Result<FilesystemGroupRecord, AdminError> {
    let usual = FilesystemGroupRecord::default();
    let retention_s = settings.retention_s.unwrap_or(usual.retention_s);
    let cue_s = suiting(usual.cue_s, retention_s);
    changed(FilesystemGroupRecord { id, name: name.to_owned(), retention_s, cue_s }, settings)
}

fn no_filesystem_group(name: &str) -> AdminError {
    AdminError::not_found(format!("no such filesystem group: name={name} (see `forebay fs group list`)"))
}

fn info(group: &FilesystemGroupRecord, filesystems: &[FilesystemRecord]) -> FilesystemGroupInfo {
    let members = filesystems.iter().filter(|record| group.has(record));
    FilesystemGroupInfo {
        name: group.name.clone(),
        retention_s: group.retention_s,
        cue_s: group.cue_s,
        filesystems: members.map(|record| record.name.clone()).collect(),
    }
}

/// The filesystems that a change of group or times affects.
#[derive(Clone, Copy)]
enum Followers<'a> {
    /// All members of the group.
    Members,
    /// This filesystem, which joins the group.
    Newcomer(&'a str),
}

impl Followers<'_> {
    fn among<'a>(
        self,
        state: &'a mut State,
        group: &FilesystemGroupRecord,
    ) -> impl Iterator<Item = &'a mut FilesystemEntry> {
        state.filesystems.values_mut().filter(move |entry| match self {
            Followers::Members => group.has(&entry.record),
            Followers::Newcomer(name) => entry.record.name == name,
        })
    }
}

impl FilesystemEntry {
    /// Refuses a group whose times contradict the filesystem's own times. Times do not count while a store is being
    /// detached.
    fn check_fits(&self, group: &FilesystemGroupRecord) -> Result<(), AdminError> {
        let tier = self.record.tier.filter(|tier| !tier.detaching);
        match tier.and_then(|tier| Times::of(tier, group).problem()) {
            None => Ok(()),
            Some(problem) => Err(AdminError::conflict(format!(
                "filesystem {} has times of its own that do not fit those of filesystem group {}: {problem} (change them with \
                 `forebay fs attach`, or give them up with --group-times)",
                self.record.name, group.name
            ))),
        }
    }

    /// Whether this group changes the times of tiering.
    fn is_retimed_by(&self, group: &FilesystemGroupRecord) -> bool {
        let differs = |tier: TierRecord| Times::of(tier, group) != self.tier.times(tier);
        self.record.tier.is_some_and(|tier| !tier.detaching && differs(tier))
    }
}

impl Node {
    fn filesystem_groups_now(&self) -> Result<Vec<FilesystemGroupRecord>, AdminError> {
        self.view()?.filesystem_groups().map_err(AdminError::failed)
    }

    pub(super) fn filesystem_group(&self, name: &str) -> Result<FilesystemGroupRecord, AdminError> {
        self.filesystem_groups_now()?
            .into_iter()
            .find(|group| group.name == name)
            .ok_or_else(|| no_filesystem_group(name))
    }

    /// The group of a new filesystem.
    pub(super) fn filesystem_group_or_default(
        &self,
        name: Option<&str>,
    ) -> Result<FilesystemGroupRecord, AdminError> {
        self.filesystem_group(name.unwrap_or(&FilesystemGroupRecord::default().name))
    }

    /// Gives filesystems their groups when the node starts.
    pub(super) fn join_filesystem_groups(&self, state: &mut State) -> anyhow::Result<()> {
        let groups = self.control.view()?.filesystem_groups()?;
        for entry in state.filesystems.values_mut() {
            match groups.iter().find(|group| group.has(&entry.record)) {
                Some(group) => entry.tier.filesystem_group = group.clone(),
                None => tracing::error!(
                    filesystem = entry.record.name,
                    group = entry.record.filesystem_group,
                    "its filesystem group is not known: that of `default` counts until it is given another"
                ),
            }
        }
        Ok(())
    }

    fn filesystem_group_info(
        &self,
        group: &FilesystemGroupRecord,
    ) -> Result<FilesystemGroupInfo, AdminError> {
        Ok(info(group, &self.view()?.filesystems().map_err(AdminError::failed)?))
    }

    fn filesystem_group_infos(&self) -> Result<Vec<FilesystemGroupInfo>, AdminError> {
        let filesystems = self.view()?.filesystems().map_err(AdminError::failed)?;
        Ok(self.filesystem_groups_now()?.iter().map(|group| info(group, &filesystems)).collect())
    }

    async fn add_filesystem_group_now(
        &self,
        name: &str,
        settings: SetFilesystemGroup,
    ) -> Result<FilesystemGroupInfo, AdminError> {
        check_name("filesystem group", name)?;
        let _one_at_a_time = self.stores_lock.lock().await;
        let view = self.view()?;
        let groups = view.filesystem_groups().map_err(AdminError::failed)?;
        if groups.iter().any(|group| group.name == name) {
            return Err(AdminError::conflict(format!(
                "filesystem group exists: name={name} (change it with `forebay fs group update`)"
            )));
        }
        if groups.len() >= FILESYSTEM_GROUPS_MAX {
            let message =
                format!("there are {FILESYSTEM_GROUPS_MAX} filesystem groups, no more are possible");
            return Err(AdminError::conflict(message));
        }
        let id = groups.last().map_or(0, |last| last.id) + 1;
        let group = new_group(id, name, settings)?;
        let mut change = view.change();
        change.filesystem_group(&group);
        self.control.commit(change).await.map_err(AdminError::failed)?;
        self.filesystem_group_info(&group)
    }

    async fn update_filesystem_group_now(
        &self,
        name: &str,
        settings: SetFilesystemGroup,
    ) -> Result<FilesystemGroupInfo, AdminError> {
        let _one_at_a_time = self.stores_lock.lock().await;
        let group = changed(self.filesystem_group(name)?, settings)?;
        self.follow(&group, Followers::Members).await?;
        self.filesystem_group_info(&group)
    }

    async fn remove_filesystem_group_now(&self, name: &str) -> Result<FilesystemGroupInfo, AdminError> {
        let _one_at_a_time = self.stores_lock.lock().await;
        let group = self.filesystem_group(name)?;
        if group.is_default() {
            return Err(AdminError::conflict(format!(
                "filesystem group {name} stays: filesystems belong to it that are given no other"
            )));
        }
        let info = self.filesystem_group_info(&group)?;
        if let Some(member) = info.filesystems.first() {
            return Err(AdminError::conflict(format!(
                "filesystem group {name} has filesystem {member}: give it another group first (forebay fs set --group)"
            )));
        }
        let mut change = self.view()?.change();
        change.remove_filesystem_group(group.id);
        self.control.commit(change).await.map_err(AdminError::failed)?;
        Ok(info)
    }

    async fn move_filesystem_now(&self, name: &str, group: &str) -> Result<FilesystemInfo, AdminError> {
        let _one_at_a_time = self.stores_lock.lock().await;
        let group = self.filesystem_group(group)?;
        self.follow(&group, Followers::Newcomer(name)).await?;
        self.filesystem_info(name).await
    }

    /// Commits a change of a group or of its members, and restarts tiering of the affected filesystems. All or none.
    async fn follow(
        &self,
        group: &FilesystemGroupRecord,
        followers: Followers<'_>,
    ) -> Result<(), AdminError> {
        let mut running = Vec::new();
        {
            let mut state = self.state.lock().await;
            for entry in followers.among(&mut state, group) {
                entry.check_fits(group)?;
            }
            for entry in followers.among(&mut state, group).filter(|entry| entry.is_retimed_by(group)) {
                running.push(entry.tier.tiering.take());
            }
        }
        join_all(running.into_iter().map(end)).await;
        let committed = match followers {
            Followers::Members => {
                let mut change = self.view()?.change();
                change.filesystem_group(group);
                self.control.commit(change).await.map_err(AdminError::failed)
            }
            Followers::Newcomer(name) => {
                let id = entry_of(&mut *self.state.lock().await, name)?.record.id;
                let filesystem_group = group.reference();
                let change = |record| FilesystemRecord { filesystem_group, ..record };
                self.plan_filesystem(id, change).await.map_err(failed)
            }
        };
        let mut state = self.state.lock().await;
        for entry in followers.among(&mut state, group) {
            let is_retimed = entry.is_retimed_by(group);
            if committed.is_ok() {
                entry.tier.filesystem_group = group.clone();
            }
            if is_retimed {
                self.begin_tiering(entry);
            }
        }
        committed
    }
}

impl FilesystemGroupControl for Node {
    fn filesystem_groups(&self) -> BoxFuture<'_, Result<Vec<FilesystemGroupInfo>, AdminError>> {
        Box::pin(async move { self.filesystem_group_infos() })
    }

    fn add_filesystem_group(
        &self,
        name: String,
        settings: SetFilesystemGroup,
    ) -> BoxFuture<'_, Result<FilesystemGroupInfo, AdminError>> {
        Box::pin(async move { self.add_filesystem_group_now(&name, settings).await })
    }

    fn update_filesystem_group(
        &self,
        name: String,
        settings: SetFilesystemGroup,
    ) -> BoxFuture<'_, Result<FilesystemGroupInfo, AdminError>> {
        Box::pin(async move { self.update_filesystem_group_now(&name, settings).await })
    }

    fn remove_filesystem_group(
        &self,
        name: String,
    ) -> BoxFuture<'_, Result<FilesystemGroupInfo, AdminError>> {
        Box::pin(async move { self.remove_filesystem_group_now(&name).await })
    }

    fn move_filesystem(
        &self,
        name: String,
        request: MoveFilesystem,
    ) -> BoxFuture<'_, Result<FilesystemInfo, AdminError>> {
        Box::pin(async move { self.move_filesystem_now(&name, &request.group).await })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    type Requested = (Option<u64>, Option<u64>);

    fn set((retention_s, cue_s): Requested) -> SetFilesystemGroup {
        SetFilesystemGroup { retention_s, cue_s }
    }

    #[track_caller]
    fn check(got: Result<FilesystemGroupRecord, AdminError>, expected: Result<(u64, u64), &str>) {
        match (got, expected) {
            (Ok(group), Ok(times)) => assert_eq!((group.retention_s, group.cue_s), times),
            (Err(error), Err(text)) => assert!(error.message.ends_with(text), "{error}"),
            (got, _) => panic!("{got:?} is not {expected:?}"),
        }
    }

    #[test]
    fn a_new_group_has_a_day_and_a_cue_that_suits() {
        let new = |asked| new_group(1, "fast", set(asked));
        check(new((None, None)), Ok((86_400, 3600)));
        check(new((Some(60), None)), Ok((60, 20)));
        check(new((Some(30), Some(10))), Ok((30, 10)));
        check(new((None, Some(28_800))), Ok((86_400, 28_800)));
        check(new((None, Some(28_801))), Err("a third of the retention: cue=8h1s retention=1d"));
        check(new((None, Some(9))), Err("between 10s and a third of the retention: cue=9s retention=1d"));
        check(new((Some(29), None)), Err("cue=9s retention=29s"));
        check(new((Some(0), None)), Err("cue=0s retention=0s"));
    }

    #[test]
    fn what_an_update_does_not_name_stays() {
        let update = |asked| changed(new_group(1, "fast", set((Some(7200), Some(60)))).unwrap(), set(asked));
        check(update((None, None)), Ok((7200, 60)));
        check(update((Some(3600), None)), Ok((3600, 60)));
        check(update((None, Some(90))), Ok((7200, 90)));
        check(update((Some(90), None)), Err("cue=1m retention=1m30s"));
    }

    #[test]
    fn times_that_are_not_its_own_are_those_of_the_group_and_must_fit() {
        let group = new_group(1, "fast", set((Some(7200), Some(60)))).unwrap();
        let own = |retention_s, cue_s| TierRecord { store: 1, retention_s, cue_s, detaching: false };
        for (tier, retention_s, cue_s) in [
            (own(None, None), 7200, 60),
            (own(Some(600), None), 600, 60),
            (own(Some(90), None), 90, 30),
            (own(None, Some(90)), 7200, 90),
            (own(Some(30), Some(10)), 30, 10),
        ] {
            assert_eq!(Times::of(tier, &group), Times { retention_s, cue_s });
            assert_eq!(check_own_times(tier, &group), Ok(()));
        }
        for (tier, text) in [
            (own(Some(29), None), "cue=9s retention=29s"),
            (own(None, Some(2401)), "(the retention is that of filesystem group fast: give --retention too)"),
            (own(Some(30), Some(11)), "cue=11s retention=30s"),
        ] {
            let error = check_own_times(tier, &group).unwrap_err();
            assert!(error.message.ends_with(text), "{error}");
        }
    }
}
