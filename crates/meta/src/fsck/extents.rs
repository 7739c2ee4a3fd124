//! I4, I6: the reference counts of extents are right, extents in use are on the drives, and other shards are not.

use std::collections::HashMap;
use std::ops::ControlFlow;

use base::{DriveId, ExtentId, PgId};
use wire::drive::ShardEntry;
use wire::meta::Content;
use wire::tier::Stage;

use super::{Check, FsckError, SUSPECTS_MAX, u64_at};
use crate::keys::Keys;
use crate::values::{ExtentPlace, ExtentUse, IdRange, Piece, PieceContent, Residence};

/// Most extents for which a file is looked up: each lookup costs two scans.
const FILES_MAX: u64 = 20;

/// Whether drives newer than the state can cause this finding.
pub(super) fn is_suspect(code: &str) -> bool {
    matches!(code, "missing_shard" | "unreadable" | "unknown_shard" | "leaked_shard")
}

#[derive(Debug, Clone, Copy, Default)]
struct Extent {
    refs: u32,
    live: u64,
    len: u32,
    pg: u32,
    k: u8,
    n: u8,
    free: bool,
    /// Only a blob holds the extent.
    away: bool,
    counted: bool,
    present: u32,
    owed: u32,
}

/// Extents with ids in `[from, to)`.
struct Window {
    extents: HashMap<u64, Extent>,
    from: u64,
    to: u64,
    limit: usize,
}

impl Window {
    fn holds(&self, id: u64) -> bool {
        (self.from..self.to).contains(&id)
    }

    /// The entry of an extent. If the window is full, the higher half of the ids is left to the next window.
    fn entry(&mut self, id: u64) -> Option<&mut Extent> {
        if self.extents.len() >= self.limit && !self.extents.contains_key(&id) {
            let mut ids: Vec<u64> = self.extents.keys().copied().collect();
            let middle = ids.len() / 2;
            let (_, median, _) = ids.select_nth_unstable(middle);
            self.to = *median;
            self.extents.retain(|id, _| *id < self.to);
        }
        self.holds(id).then(|| self.extents.entry(id).or_default())
    }
}

/// A range of ids that was handed to a session.
struct Given {
    first: u64,
    count: u64,
}

impl Check<'_> {
    pub(super) fn extents(&mut self) -> Result<(), FsckError> {
        let given = self.given()?;
        let mut from = 0;
        loop {
            let mut window =
                Window { extents: HashMap::new(), from, to: u64::MAX, limit: self.window.max(2) };
            self.references_into(&mut window)?;
            self.residences_into(&mut window)?;
            self.frees_into(&mut window)?;
            self.compare_uses(&mut window)?;
            self.owed_into(&mut window)?;
            self.shards_into(&mut window, &given)?;
            self.compare_shards(&window)?;
            if window.to == u64::MAX {
                return Ok(());
            }
            from = window.to;
        }
    }

    fn wanted(&self, id: u64) -> bool {
        self.only.is_none_or(|only| only.contains(&id))
    }

    fn suspect(&mut self, code: &str, id: u64, what: String, advice: &str) {
        self.find(code, what, advice);
        self.suspects.findings += 1;
        if self.suspects.ids.len() < SUSPECTS_MAX {
            self.suspects.ids.insert(id);
        }
    }

    fn given(&mut self) -> Result<Vec<Given>, FsckError> {
        let range = self.keys.ranges();
        let mut given = Vec::new();
        self.each::<IdRange>(&range, 13..=13, |_, key, range| {
            given.push(Given { first: u64_at(key, 5), count: range.count });
            ControlFlow::Continue(())
        })?;
        Ok(given)
    }

    fn references_into(&mut self, window: &mut Window) -> Result<(), FsckError> {
        self.input.progress.begin("extents");
        let next_extent = self.number("next_extent")?;
        let range = self.keys.table(b'M');
        self.each::<Piece>(&range, 25..=25, |check, _, piece| {
            let PieceContent::Data(Content::Extent(extent)) = piece.content else {
                return ControlFlow::Continue(());
            };
            let id = extent.id.0;
            if !window.holds(id) || !check.wanted(id) {
                return ControlFlow::Continue(());
            }
            let Some(entry) = window.entry(id) else { return ControlFlow::Continue(()) };
            let (len, pg) = (extent.extent_len, extent.pg.0);
            let contradicts =
                entry.refs > 0 && (entry.len, entry.pg, entry.k, entry.n) != (len, pg, extent.k, extent.n);
            (entry.len, entry.pg, entry.k, entry.n) = (len, pg, extent.k, extent.n);
            entry.refs += 1;
            entry.live += piece.len;
            if contradicts {
                check.find(
                    "extent_shape",
                    format!("pieces of extent {id} contradict each other"),
                    "restore the files",
                );
            }
            if id >= next_extent {
                check.find(
                    "extent_number",
                    format!("extent {id} is in use and the next number is {next_extent}"),
                    "the number may be given to other data: copy the data away and stop writing",
                );
            }
            ControlFlow::Continue(())
        })
    }

    fn frees_into(&mut self, window: &mut Window) -> Result<(), FsckError> {
        let range = self.keys.table(b'F');
        self.each::<ExtentPlace>(&range, 21..=21, |check, key, _| {
            let (_, ExtentId(id)) = Keys::free_of_key(key);
            if !window.holds(id) || !check.wanted(id) {
                return ControlFlow::Continue(());
            }
            let Some(entry) = window.entry(id) else { return ControlFlow::Continue(()) };
            // The shards of an extent that only a blob holds are deleted although it is in use.
            let (used, twice) = (entry.refs > 0 && !entry.away, entry.free);
            entry.free = true;
            if used {
                check.find(
                    "live_extent_freed",
                    format!("extent {id} is in use and waits for deletion"),
                    "data is about to be lost: stop the node and keep the drives as they are",
                );
            } else if twice {
                check.find("freed_twice", format!("extent {id} waits for deletion twice"), "harmless");
            }
            ControlFlow::Continue(())
        })
    }

    /// I20: tiered extents are in use.
    fn residences_into(&mut self, window: &mut Window) -> Result<(), FsckError> {
        let range = (self.keys.residence(ExtentId(window.from)), self.keys.table_end(b'L'));
        self.each::<Residence>(&range, 13..=13, |check, key, residence| {
            let id = Keys::number_in_key(key);
            if id >= window.to {
                return ControlFlow::Break(());
            }
            if !check.wanted(id) {
                return ControlFlow::Continue(());
            }
            let Some(entry) = window.extents.get_mut(&id) else {
                check.find(
                    "residence_of_nothing",
                    format!("extent {id} is tiered and nothing refers to it"),
                    "its blob is kept for ever: report this",
                );
                return ControlFlow::Continue(());
            };
            entry.away = residence.stage == Stage::Tiered;
            check.report.away_extents += u64::from(entry.away);
            ControlFlow::Continue(())
        })
    }

    /// I16: reference counts equal the number of references.
    fn compare_uses(&mut self, window: &mut Window) -> Result<(), FsckError> {
        let range = (self.keys.extent(ExtentId(window.from)), self.keys.table_end(b'E'));
        self.each::<ExtentUse>(&range, 13..=13, |check, key, used| {
            let id = u64_at(key, 5);
            if id >= window.to {
                return ControlFlow::Break(());
            }
            if !check.wanted(id) {
                return ControlFlow::Continue(());
            }
            let found = window.extents.get_mut(&id).map(|extent| {
                extent.counted = true;
                (extent.refs, extent.live)
            });
            if found != Some((used.refs, used.live_bytes)) {
                let (refs, live) = found.unwrap_or_default();
                check.count_is_wrong(id, (used.refs, used.live_bytes), (refs, live));
            }
            ControlFlow::Continue(())
        })?;
        let uncounted: Vec<(u64, Extent)> = window
            .extents
            .iter()
            .filter(|(_, extent)| {
                let whole = extent.refs == 1 && extent.live == u64::from(extent.len);
                extent.refs > 0 && !extent.counted && !whole
            })
            .map(|(id, extent)| (*id, *extent))
            .collect();
        for (id, extent) in uncounted {
            self.count_is_wrong(id, (1, u64::from(extent.len)), (extent.refs, extent.live));
        }
        Ok(())
    }

    fn count_is_wrong(&mut self, id: u64, says: (u32, u64), found: (u32, u64)) {
        self.find(
            "extent_use",
            format!(
                "extent {id} is said to be used by {} pieces with {} bytes; it is by {} with {}",
                says.0, says.1, found.0, found.1
            ),
            "with too low a count it is deleted while in use: copy the data away before deleting anything",
        );
    }

    /// The drive that holds the position at the time of repair gets an owed shard, so only the position matters.
    fn owed_into(&mut self, window: &mut Window) -> Result<(), FsckError> {
        let range = self.keys.all_owed();
        self.each::<ExtentPlace>(&range, 17..=17, |check, key, place| {
            let (drive, ExtentId(id)) = Keys::owed_of_key(key);
            if !window.holds(id) || !check.wanted(id) {
                return ControlFlow::Continue(());
            }
            check.report.owed_shards += 1;
            let Some(extent) = window.extents.get_mut(&id) else {
                check.report.stale_owed += 1;
                return ControlFlow::Continue(());
            };
            if extent.refs > 0 && place.shard >= extent.n {
                let (shard, n) = (place.shard, extent.n);
                check.find(
                    "owed_shape",
                    format!("drive {drive} is owed shard {shard} of extent {id}, which has {n}"),
                    "repair cannot pay it",
                );
                return ControlFlow::Continue(());
            }
            extent.owed |= 1u32.checked_shl(u32::from(place.shard)).unwrap_or(0);
            ControlFlow::Continue(())
        })
    }

    /// Marks shards in their right place, and reports the others.
    fn shards_into(&mut self, window: &mut Window, given: &[Given]) -> Result<(), FsckError> {
        self.input.progress.begin("shards");
        let next_extent = self.number("next_extent")?;
        let input = self.input;
        for drive in input.inventory.drives() {
            let range = (window.from, window.to);
            let visited = input.inventory.visit(drive, input.ledger, range, &mut |entry| {
                input.progress.count();
                let id = entry.key.extent.0;
                if self.wanted(id) {
                    self.report.shards += 1;
                    self.shard(window, given, next_extent, drive, &entry);
                }
            });
            visited.map_err(|error| FsckError::Drive(drive, error))?;
        }
        Ok(())
    }

    fn shard(
        &mut self,
        window: &mut Window,
        given: &[Given],
        next_extent: u64,
        drive: DriveId,
        entry: &ShardEntry,
    ) {
        let (id, shard) = (entry.key.extent.0, entry.key.shard.0);
        if let Some(extent) = window.extents.get_mut(&id) {
            let group = self.input.map.group(PgId(extent.pg));
            let here = group.is_some_and(|group| {
                group.members.get(usize::from(shard)) == Some(&drive)
                    || group.sources(shard).any(|source| source == drive)
            });
            if here && shard < extent.n {
                extent.present |= 1 << shard;
            } else if extent.refs > 0 {
                // A drive that has left a group keeps its shards until they are deleted.
                self.report.unreferenced_shards += 1;
                self.report.unreferenced_bytes += u64::from(entry.len_bytes);
            }
            return;
        }
        let after = given.partition_point(|range| range.first <= id);
        let known = after > 0 && id - given[after - 1].first < given[after - 1].count;
        let text = format!("drive {drive} holds shard {shard} of extent {id}, ");
        if id >= next_extent {
            let what = text + &format!("and the next number is {next_extent}");
            self.suspect(
                "unknown_shard",
                id,
                what,
                "the metadata is older than the drives: stop writing, restore the newer metadata",
            );
        } else if known {
            self.report.unreferenced_shards += 1;
            self.report.unreferenced_bytes += u64::from(entry.len_bytes);
        } else {
            self.suspect("leaked_shard", id, text + "which nothing knows of", "its space does not come back");
        }
    }

    /// I4: shards on drives and owed shards together make all shards.
    fn compare_shards(&mut self, window: &Window) -> Result<(), FsckError> {
        let up = self.input.inventory.drives();
        let mut ids: Vec<u64> = window.extents.keys().copied().collect();
        ids.sort_unstable();
        for id in ids {
            let extent = window.extents[&id];
            if extent.refs == 0 {
                self.report.free_extents += u64::from(extent.free);
                continue;
            }
            self.report.extents += 1;
            if extent.away {
                self.report.free_extents += u64::from(extent.free);
                continue;
            }
            let Some(group) = self.input.map.group(PgId(extent.pg)) else {
                self.find(
                    "no_group",
                    format!("extent {id} is in placement group {}, which does not exist", extent.pg),
                    "the control ledger is older than this one",
                );
                continue;
            };
            let mut missing = Vec::new();
            for (shard, drive) in (0..extent.n).zip(&group.members) {
                let bit = 1 << shard;
                let there = (extent.present | extent.owed) & bit != 0;
                if !there && group.rebuilding.iter().any(|rebuilding| rebuilding.position == shard) {
                    self.report.rebuilding_shards += 1;
                } else if !there && !up.contains(drive) {
                    self.report.unreachable_shards += 1;
                } else if !there {
                    missing.push(format!("{shard} on drive {drive}"));
                }
            }
            let (there, k) = (extent.present.count_ones(), u32::from(extent.k));
            if !missing.is_empty() {
                let what =
                    format!("extent {id} lacks shards that nobody is said to owe: {}", missing.join(", "));
                let advice = if there >= k {
                    "reads reconstruct it; copy the data to make it whole"
                } else {
                    "see the next finding"
                };
                self.suspect("missing_shard", id, what, advice);
            }
            if there < k {
                let file = if self.report.findings_count < FILES_MAX {
                    self.file_of_extent(id)?
                } else {
                    "a file".to_owned()
                };
                let what = format!("extent {id} of {file} cannot be read: {there} of {k} shards are there");
                self.suspect(
                    "unreadable",
                    id,
                    what,
                    "bring missing drives back; otherwise these bytes are lost",
                );
            }
        }
        Ok(())
    }
}
