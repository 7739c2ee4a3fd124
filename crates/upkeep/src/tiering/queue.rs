//! Chooses the extents of the next blob.
//!
//! Readers and removals of a part of a tree usually touch few directories. So a blob is filled from the directory of
//! the oldest extent that is due, then from that of the oldest one left, as far as the window reaches. The oldest
//! extent is always in the next blob, so none waits for ever.

use std::collections::{HashMap, HashSet};

use base::{ExtentId, FsError};
use client::Client;
use wire::tier::{DueExtent, Stage, TIER_EXTENTS_MAX};

/// Extents for this many blobs are considered when one is filled.
const WINDOW_BLOBS: u64 = 4;

/// Extents that are due, oldest first. Valid for one round of uploads.
pub(super) struct Queue {
    before_s: u64,
    blob_bytes: u32,
    due: Vec<DueExtent>,
    /// Where to continue.
    after: Option<(u64, ExtentId)>,
    all: bool,
}

impl Queue {
    /// Extents written at or before `before_s`.
    pub(super) fn new(before_s: u64, blob_bytes: u32) -> Self {
        Self { before_s, blob_bytes, due: Vec::new(), after: None, all: false }
    }

    /// Takes the extents of the next blob, the oldest first, without those under way. Returns whether the blob is full.
    pub(super) async fn next_load(
        &mut self,
        client: &Client,
        under_way: &HashSet<ExtentId>,
    ) -> Result<(Vec<DueExtent>, bool), FsError> {
        let window = WINDOW_BLOBS * u64::from(self.blob_bytes);
        let mut bytes: u64 = self.due.iter().map(|due| u64::from(due.extent.extent_len)).sum();
        while !self.all && bytes < window && self.due.len() < TIER_EXTENTS_MAX {
            let page = client.tier_due(Stage::Queued, self.before_s, self.after).await?;
            match page.last() {
                Some(last) => self.after = Some((last.written_s, last.extent.id)),
                None => self.all = true,
            }
            for due in page.into_iter().filter(|due| !under_way.contains(&due.extent.id)) {
                bytes += u64::from(due.extent.extent_len);
                self.due.push(due);
            }
        }
        Ok(take_load(&mut self.due, self.blob_bytes))
    }
}

/// Takes the extents of one blob from `due`, which is ordered by age. Returns whether the blob is full.
fn take_load(due: &mut Vec<DueExtent>, blob_bytes: u32) -> (Vec<DueExtent>, bool) {
    let mut oldest = HashMap::new();
    for (at, one) in due.iter().enumerate() {
        oldest.entry(one.directory).or_insert(at);
    }
    let mut by_directory: Vec<usize> = (0..due.len()).collect();
    by_directory.sort_by_key(|at| oldest[&due[*at].directory]);
    let mut load: Vec<DueExtent> = by_directory.iter().map(|at| due[*at]).collect();
    let fitting = Client::fitting(&load, blob_bytes);
    let is_full = fitting < load.len();
    load.truncate(fitting);
    let taken: HashSet<ExtentId> = load.iter().map(|one| one.extent.id).collect();
    due.retain(|one| !taken.contains(&one.extent.id));
    (load, is_full)
}

#[cfg(test)]
mod tests {
    use base::{Ino, PgId};
    use proptest::prelude::*;

    use super::*;

    const BLOB_BYTES: u32 = 4 << 20;

    fn due(id: u64, directory: u64, extent_len: u32) -> DueExtent {
        let extent = wire::tier::whole(ExtentId(id), PgId(0), (1, 1), extent_len);
        DueExtent { extent, written_s: id, directory: Ino(directory), origin: wire::tier::Origin::default() }
    }

    fn ids(load: &[DueExtent]) -> Vec<u64> {
        load.iter().map(|one| one.extent.id.0).collect()
    }

    #[test]
    fn a_blob_is_filled_from_the_directory_of_the_oldest() {
        // Three directories that were written at the same time, a third of a blob each.
        let mut queue: Vec<DueExtent> = (0..30).map(|id| due(id, 7 + id % 3, 400 << 10)).collect();
        let (first, is_full) = take_load(&mut queue, BLOB_BYTES);
        assert!(is_full);
        assert_eq!(ids(&first), [0, 3, 6, 9, 12, 15, 18, 21, 24, 27]);
        let (second, is_full) = take_load(&mut queue, BLOB_BYTES);
        assert!(is_full);
        assert_eq!(ids(&second), [1, 4, 7, 10, 13, 16, 19, 22, 25, 28]);
        let (third, is_full) = take_load(&mut queue, BLOB_BYTES);
        assert!(!is_full && queue.is_empty());
        assert_eq!(ids(&third), [2, 5, 8, 11, 14, 17, 20, 23, 26, 29]);
    }

    #[test]
    fn the_rest_of_a_blob_is_filled_from_the_next_directory() {
        let mut queue = vec![due(1, 5, 1 << 20), due(2, 6, 1 << 20), due(3, 5, 1 << 20), due(4, 6, 3 << 20)];
        let (load, is_full) = take_load(&mut queue, BLOB_BYTES);
        assert_eq!((ids(&load), is_full), (vec![1, 3, 2], true));
        assert_eq!(ids(&queue), [4]);
    }

    proptest! {
        #[test]
        fn every_extent_is_taken_once_and_the_oldest_first(
            found in prop::collection::vec((1_u64..5, 1_u32..3 << 20), 0..60)
        ) {
            let mut queue: Vec<DueExtent> =
                found.iter().enumerate().map(|(id, (dir, len))| due(id as u64, *dir, *len)).collect();
            let mut taken = Vec::new();
            while let Some(oldest) = queue.first().copied() {
                let (load, is_full) = take_load(&mut queue, BLOB_BYTES);
                prop_assert_eq!(load.first(), Some(&oldest));
                prop_assert_eq!(is_full, !queue.is_empty());
                prop_assert!(queue.is_sorted_by_key(|one| one.extent.id));
                taken.extend(ids(&load));
            }
            taken.sort_unstable();
            prop_assert_eq!(taken, (0..found.len() as u64).collect::<Vec<_>>());
        }
    }
}
