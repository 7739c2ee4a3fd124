//! Limits of a filesystem: its size, and its share of the drives.

use admin::{AdminError, FilesystemInfo, Placement, SetLimits, ShortageInfo};
use base::units::format_size;
use client::{Client, Limits, Scarce, Shortage};
use control::FilesystemRecord;

use super::Node;
use super::filesystems::FilesystemEntry;
use super::management::failed;
use super::tiers::entry_of;

/// Smallest limit of a filesystem: the content of a few files has to fit.
const BYTES_MIN: u64 = 64 << 20;

pub(super) fn limits_of(record: &FilesystemRecord) -> Limits {
    let FilesystemRecord { provisioned_bytes, ssd_bytes, .. } = *record;
    Limits { provisioned_bytes, ssd_bytes, ..Limits::default() }
}

/// Zero means no limit.
pub(super) fn limit(bytes: u64) -> Option<u64> {
    Some(bytes).filter(|bytes| *bytes > 0)
}

/// Refuses limits that contradict each other, or that are too small.
pub(super) fn check_limits(name: &str, limits: Limits) -> Result<(), AdminError> {
    let Limits { provisioned_bytes, ssd_bytes, .. } = limits;
    for (what, bytes) in [("size", provisioned_bytes), ("SSD quota", ssd_bytes)] {
        if let Some(bytes) = bytes.filter(|bytes| *bytes < BYTES_MIN) {
            return Err(AdminError::invalid(format!(
                "the {what} of filesystem {name} is too small: {} (at least {})",
                format_size(bytes),
                format_size(BYTES_MIN)
            )));
        }
    }
    match (provisioned_bytes, ssd_bytes) {
        (Some(size), Some(ssd)) if ssd > size => Err(AdminError::invalid(format!(
            "the SSD quota of filesystem {name} is larger than all of it: ssd={} size={}",
            format_size(ssd),
            format_size(size)
        ))),
        _ => Ok(()),
    }
}

/// Refuses limits below the stored content, unless that can move to the object store.
async fn check_fits(client: &Client, record: &FilesystemRecord, limits: Limits) -> Result<(), AdminError> {
    let name = &record.name;
    // What was removed a moment ago does not count.
    client.refresh_use().await.map_err(AdminError::failed)?;
    let used = client.statfs().await.map_err(AdminError::failed)?;
    if let Some(size) = limits.provisioned_bytes.filter(|size| *size < used.used_bytes) {
        return Err(AdminError::conflict(format!(
            "filesystem {name} holds more than that: used={} size={} (delete some of it first)",
            format_size(used.used_bytes),
            format_size(size)
        )));
    }
    let leaves = record.tier.is_some_and(|tier| !tier.detaching);
    match limits.ssd_bytes {
        Some(ssd) if !leaves && ssd < used.drive_bytes => Err(AdminError::conflict(format!(
            "filesystem {name} has more than that on drives: used={} ssd={} (delete some of it, or attach an object store \
             with `forebay fs attach`)",
            format_size(used.drive_bytes),
            format_size(ssd)
        ))),
        _ => Ok(()),
    }
}

impl FilesystemEntry {
    /// The limit that is reached or nearly reached, if there is one.
    pub(super) fn shortage(&self) -> Option<ShortageInfo> {
        let Shortage { of, left_bytes, is_refusing } = self.client.shortage()?;
        let of = match of {
            Scarce::Drives => "drives",
            Scarce::Spare => "spare",
            Scarce::SsdQuota => "ssd_quota",
            Scarce::Size => "size",
        };
        let tiered = self.record.tier.is_some_and(|tier| !tier.detaching);
        Some(ShortageInfo { of: of.to_owned(), left_bytes, refusing: is_refusing, tiered })
    }
}

/// Describes the full limit, the refused writes and the advice.
pub(super) fn shortage_text(shortage: &ShortageInfo) -> String {
    let left = format_size(shortage.left_bytes);
    let (what, next) = match (shortage.of.as_str(), shortage.tiered) {
        ("size", _) => {
            ("it has the size that it may have", "delete some files, or give it more (forebay fs set --size)")
        }
        ("ssd_quota", false) => (
            "its SSD quota is used up",
            "delete some files, give it more (forebay fs set --ssd), or attach an object store (forebay fs attach)",
        ),
        ("ssd_quota", true) => (
            "its SSD quota is used up",
            "see that its object store takes what should leave (forebay tier status), or give it more (forebay fs set --ssd)",
        ),
        ("spare", false) => (
            "what is left of its drives stays free for a loss",
            "delete some files, add drives (forebay drive add, then forebay fs balance), attach an object store (forebay fs attach), or keep less free (forebay \
             cluster spares)",
        ),
        ("spare", true) => (
            "what is left of its drives stays free for a loss",
            "see that its object store takes what should leave (forebay tier status), add drives (forebay drive add, then forebay fs balance), or keep less free \
             (forebay cluster spares)",
        ),
        (_, false) => (
            "its drives are full",
            "delete some files, add drives (forebay drive add), or attach an object store (forebay fs attach)",
        ),
        (_, true) => (
            "its drives are full",
            "see that its object store takes what should leave (forebay tier status), or add drives (forebay drive add)",
        ),
    };
    let refused =
        if shortage.refusing { "writes fail with ENOSPC" } else { "writes may fail with ENOSPC soon" };
    format!("{what}, so {refused}: left={left}; {next}")
}

impl Node {
    /// Changes the limits of a filesystem, durably and at once.
    pub(super) async fn set_limits_now(
        &self,
        name: &str,
        request: SetLimits,
    ) -> Result<FilesystemInfo, AdminError> {
        let (client, record) = {
            let mut state = self.state.lock().await;
            let entry = entry_of(&mut state, name)?;
            (entry.client.clone(), entry.record.clone())
        };
        let limits = Limits {
            provisioned_bytes: request.size_bytes.map_or(record.provisioned_bytes, limit),
            ssd_bytes: request.ssd_bytes.map_or(record.ssd_bytes, limit),
            ..Limits::default()
        };
        check_limits(name, limits)?;
        check_fits(&client, &record, limits).await?;
        let Limits { provisioned_bytes, ssd_bytes, .. } = limits;
        let change = |record| FilesystemRecord { provisioned_bytes, ssd_bytes, ..record };
        self.plan_filesystem(record.id, change).await.map_err(failed)?;
        self.publish(&mut *self.state.lock().await);
        self.filesystem_info(name).await
    }

    /// Changes where new data of a filesystem goes, durably and at once. Stored data stays where it is.
    pub(super) async fn set_placement_now(
        &self,
        name: &str,
        placement: Placement,
    ) -> Result<FilesystemInfo, AdminError> {
        let id = entry_of(&mut *self.state.lock().await, name)?.record.id;
        let writes_near = placement == Placement::Local;
        let change = |record| FilesystemRecord { writes_near, ..record };
        self.plan_filesystem(id, change).await.map_err(failed)?;
        self.publish(&mut *self.state.lock().await);
        self.filesystem_info(name).await
    }
}

/// The placement of a filesystem, as its record has it.
pub(super) fn placement_of(writes_near: bool) -> Placement {
    if writes_near { Placement::Local } else { Placement::Spread }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_refused_that_contradict_each_other() {
        let check = |size: u64, ssd: u64| {
            let limits =
                Limits { provisioned_bytes: limit(size), ssd_bytes: limit(ssd), ..Limits::default() };
            check_limits("main", limits).map_err(|error| error.to_string())
        };
        assert_eq!(check(0, 0), Ok(()));
        assert_eq!(check(0, 1 << 30), Ok(()));
        assert_eq!(check(1 << 30, 1 << 30), Ok(()));
        assert!(check(1 << 30, 2 << 30).unwrap_err().contains("ssd=2.00 GiB size=1.00 GiB"));
        assert!(check(1 << 20, 0).unwrap_err().contains("size of filesystem main is too small"));
        assert!(check(0, 1).unwrap_err().contains("SSD quota of filesystem main is too small"));
    }
}
