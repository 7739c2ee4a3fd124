//! Reports of damage: in `status`, in `why`, in events, and in answers to requests that fetch files from a store.

use std::collections::{BTreeSet, HashMap};

use admin::{DamageInfo, ExtentInfo, LostFileInfo};
use base::units::format_size;
use base::{ExtentId, FsError, Ino};
use client::Client;
use upkeep::{DamageStat, LostFile};
use wire::damage::{LossCause, LostPiece};
use wire::event::Severity;
use wire::meta::{ExtentRef, MapPiece};

use super::events::{Happened, subject};

/// Files in an answer to `status`.
const FILES_MAX: usize = 100;
/// Files named in a sentence.
const NAMED_MAX: usize = 5;
/// Looks without news before damage is reported, and looks after which it is reported in any case.
const CALM: u32 = 5;
const LONGEST: u32 = 60;

pub(super) fn damage_info(stat: DamageStat) -> DamageInfo {
    let DamageStat { files, sums, .. } = stat;
    let file = |file: &LostFile| LostFileInfo {
        path: file.path.clone(),
        inode: file.ino.0,
        pieces: file.pieces,
        bytes: file.bytes,
        found_s: file.found_s,
    };
    DamageInfo {
        lost_files: files.len() as u64,
        lost_pieces: sums.pieces,
        lost_bytes: files.iter().map(|file| file.bytes).sum(),
        unnoted_pieces: sums.unnoted,
        files: files.iter().take(FILES_MAX).map(file).collect(),
        found: sums.repaired + sums.unrepairable,
        repaired: sums.repaired,
        unrepairable: sums.unrepairable,
    }
}

fn name(file: &LostFileInfo) -> String {
    match (&file.path, file.inode) {
        (Some(path), _) => path.clone(),
        (None, 0) => "parts of uploads".to_owned(),
        (None, ino) => format!("inode {ino}"),
    }
}

/// Names of the first files, and the number of further ones.
fn names(files: &[LostFileInfo], count: u64) -> String {
    let named: Vec<String> = files.iter().take(NAMED_MAX).map(name).collect();
    let more = count.saturating_sub(named.len() as u64);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{}{more}", named.join(", "))
}

fn files_have(count: u64) -> String {
    if count == 1 { "1 file has".to_owned() } else { format!("{count} files have") }
}

/// Damage of a filesystem and the advice for it, as sentences.
pub(super) fn lost_data(filesystem: &str, damage: &DamageInfo) -> Vec<String> {
    let mut problems = Vec::new();
    if damage.lost_files > 0 {
        problems.push(format!(
            "filesystem {filesystem}: {} data that cannot be read ({}): {}; see `forebay why PATH`, then restore them from \
             a copy, or delete them",
            files_have(damage.lost_files),
            format_size(damage.lost_bytes),
            names(&damage.files, damage.lost_files)
        ));
    }
    if damage.unnoted_pieces > 0 {
        problems.push(format!(
            "filesystem {filesystem}: {} more pieces of files cannot be read than there is room to note; a scrub finds \
             what is left of them (forebay drive scrub DIR --now)",
            damage.unnoted_pieces
        ));
    }
    problems
}

/// Recorded losses of the pieces of a file.
pub(super) struct Losses {
    of_extents: HashMap<ExtentId, Vec<(LostPiece, Option<String>)>>,
}

impl Losses {
    /// Reads the losses of these pieces.
    pub(super) async fn of(client: &Client, pieces: &[MapPiece]) -> Result<Self, FsError> {
        let wanted: BTreeSet<ExtentId> =
            pieces.iter().filter_map(|piece| Some(piece.content.extent()?.id)).collect();
        let mut of_extents: HashMap<ExtentId, Vec<_>> = HashMap::new();
        if client.damage_sums().await?.pieces == 0 {
            return Ok(Self { of_extents });
        }
        for loss in client.losses().await?.0 {
            let Some(id) = loss.piece.as_ref().and_then(|piece| Some(piece.content.extent()?.id)) else {
                continue;
            };
            if wanted.contains(&id) {
                let blob = client.lost_blob(loss.cause).await?;
                of_extents.entry(id).or_default().push((loss, blob));
            }
        }
        Ok(Self { of_extents })
    }

    /// Adds to a piece why it cannot be read.
    pub(super) fn explain(&self, piece: &MapPiece, mut info: ExtentInfo) -> ExtentInfo {
        let Some(extent) = piece.content.extent() else { return info };
        let mut losses = self.of_extents.get(&extent.id).into_iter().flatten();
        let Some((loss, blob)) = losses.find(|(loss, _)| overlap(loss, extent, piece.len)) else {
            return info;
        };
        if let LossCause::Shards { damaged, missing } = loss.cause {
            for shard in &mut info.shards {
                let has = |bits: u32| bits & (1 << shard.shard) != 0;
                if has(damaged) {
                    shard.state = "damaged".to_owned();
                } else if has(missing) {
                    shard.state = "lost".to_owned();
                }
            }
        }
        info.state = "unreadable".to_owned();
        info.reason = Some(reason(loss.cause, extent, blob.as_deref()));
        info
    }
}

/// Whether the lost piece overlaps this part of the extent.
fn overlap(loss: &LostPiece, part: &ExtentRef, len: u64) -> bool {
    let Some(lost) = &loss.piece else { return false };
    let Some(extent) = lost.content.extent() else { return false };
    let (from, start) = (u64::from(extent.extent_off), u64::from(part.extent_off));
    from < start + len && start < from + lost.len
}

fn reason(cause: LossCause, extent: &ExtentRef, blob: Option<&str>) -> String {
    let blob = blob.unwrap_or("of this piece");
    match cause {
        LossCause::Shards { damaged, missing } => {
            let (n, k, bad) = (extent.n, extent.k, (damaged | missing).count_ones());
            let bits = |bits: u32| {
                let shards = (0..n).filter(|shard| bits & (1 << shard) != 0);
                shards.map(|shard| shard.to_string()).collect::<Vec<_>>().join(", ")
            };
            let (of_damaged, of_missing) = (bits(damaged), bits(missing));
            let damaged = if damaged == 0 { String::new() } else { format!("; damaged: {of_damaged}") };
            let missing = if missing == 0 { String::new() } else { format!("; not there: {of_missing}") };
            format!("{bad} of {n} shards are bad, and {k} good ones are needed{damaged}{missing}")
        }
        LossCause::BlobMissing { .. } => format!("the object store does not have blob {blob}"),
        LossCause::BlobDamaged { .. } => format!("blob {blob} in the object store is not what was stored"),
    }
}

/// Why a part of a file did not come back although its store answers; `None` if unknown.
pub(super) async fn why_lost(client: &Client, ino: Ino, path: &str, offset: u64) -> Option<String> {
    let (at, cause) = client.first_loss(ino, offset).await?;
    let blob = client.lost_blob(cause).await.ok().flatten();
    let blob = blob.as_deref().unwrap_or("of this part");
    let what = match cause {
        LossCause::BlobMissing { .. } => format!("blob {blob} is not in the store"),
        _ => format!("blob {blob} in the store is damaged"),
    };
    Some(format!(
        "a part of the file is lost: {what}: path={path} offset={at} (restore the blob or the file from a copy, or delete the \
         file; see `forebay why`)"
    ))
}

/// Damage of a filesystem that events have already reported.
#[derive(Debug, Default)]
pub(super) struct SeenDamage {
    /// Files in past events; `None` before the first look, which takes all known files as reported.
    told: Option<BTreeSet<u64>>,
    lost: Burst,
    repaired: Burst,
    /// Number of restored shards in past events.
    told_repaired: Option<u64>,
}

/// Collects many small changes for one event.
#[derive(Debug, Default)]
struct Burst {
    size: u64,
    looks: u32,
    calm: u32,
}

impl Burst {
    /// Whether the event is due now. If so, the collection starts again.
    fn look(&mut self, size: u64) -> bool {
        if size == 0 {
            *self = Self::default();
            return false;
        }
        self.calm = if size == self.size { self.calm + 1 } else { 0 };
        (self.size, self.looks) = (size, self.looks + 1);
        let due = self.calm >= CALM || self.looks >= LONGEST;
        if due {
            *self = Self::default();
        }
        due
    }
}

impl SeenDamage {
    /// State after a start. `was_told`: the last event said that files are unreadable.
    pub(super) fn recalled(was_told: bool) -> Self {
        Self { told: if was_told { None } else { Some(BTreeSet::new()) }, ..Self::default() }
    }

    /// Events of one look; there is one look a second.
    pub(super) fn look(&mut self, filesystem: &str, stat: &DamageStat) -> Vec<Happened> {
        if !stat.is_known {
            return Vec::new();
        }
        self.look_at_repaired(filesystem, stat)
            .into_iter()
            .chain(self.look_at_lost(filesystem, stat))
            .collect()
    }

    fn look_at_repaired(&mut self, filesystem: &str, stat: &DamageStat) -> Option<Happened> {
        let repaired = stat.sums.repaired;
        let new = repaired - *self.told_repaired.get_or_insert(repaired);
        if !self.repaired.look(new) {
            return None;
        }
        self.told_repaired = Some(repaired);
        let (shards, were) = if new == 1 { ("shard", "was") } else { ("shards", "were") };
        let text = format!(
            "{new} damaged {shards} {were} found and restored from other drives; nothing is lost (which drives: forebay \
             drive scrub)"
        );
        Some(Happened::new(Severity::Warning, subject(filesystem), "damage repaired", text))
    }

    fn look_at_lost(&mut self, filesystem: &str, stat: &DamageStat) -> Option<Happened> {
        let now: BTreeSet<u64> = stat.files.iter().map(|file| file.ino.0).collect();
        let told = self.told.get_or_insert_with(|| now.clone());
        if now.is_empty() && !told.is_empty() {
            told.clear();
            let text = "every file that could not be read was restored, written anew or deleted";
            return Some(Happened::new(Severity::Info, subject(filesystem), "data readable", text));
        }
        told.retain(|ino| now.contains(ino));
        let new: BTreeSet<u64> = now.difference(told).copied().collect();
        if !self.lost.look(new.len() as u64) {
            return None;
        }
        told.extend(&new);
        let all = damage_info(stat.clone());
        let files: Vec<_> = all.files.into_iter().filter(|file| new.contains(&file.inode)).collect();
        let count = new.len() as u64;
        let text = format!("{} data that cannot be read: {}", files_have(count), names(&files, count));
        Some(Happened::new(Severity::Error, subject(filesystem), "data unreadable", text))
    }
}

#[cfg(test)]
mod tests {
    use base::PgId;
    use wire::damage::DamageSums;

    use super::*;

    fn stat(files: &[(u64, &str)], repaired: u64) -> DamageStat {
        let file = |(ino, path): &(u64, &str)| LostFile {
            ino: Ino(*ino),
            path: Some((*path).to_owned()),
            pieces: 2,
            bytes: 8192,
            found_s: 7,
        };
        let sums =
            DamageSums { pieces: 2 * files.len() as u64, repaired, unrepairable: 3, ..DamageSums::default() };
        DamageStat { files: files.iter().map(file).collect(), sums, is_known: true }
    }

    #[test]
    fn what_cannot_be_read_is_a_problem_that_names_files_and_the_next_step() {
        assert!(lost_data("main", &damage_info(stat(&[], 5))).is_empty(), "what was repaired is none");
        let files: Vec<(u64, &str)> =
            vec![(2, "/a/b"), (3, "/c"), (4, "/d"), (5, "/e"), (6, "/f"), (7, "/g")];
        let problems = lost_data("main", &damage_info(stat(&files, 0)));
        let text = problems.join("\n");
        assert!(text.contains("filesystem main: 6 files have data that cannot be read"), "{text}");
        assert!(
            text.contains("/a/b, /c, /d, /e, /f and 1 more") && text.contains("forebay why PATH"),
            "{text}"
        );
        let one = lost_data("main", &damage_info(stat(&files[..1], 0))).join("\n");
        assert!(one.contains("1 file has") && one.contains("/a/b;"), "{one}");
        let mut more = damage_info(stat(&[], 0));
        more.unnoted_pieces = 7;
        assert!(more.is_lost() && lost_data("main", &more)[0].contains("7 more pieces"));
    }

    #[test]
    fn a_reason_names_the_shards_or_the_blob() {
        let extent = ExtentRef { id: ExtentId(1), pg: PgId(2), k: 4, n: 6, extent_len: 1, extent_off: 0 };
        let cause = LossCause::Shards { damaged: 0b10_0101, missing: 0b1000 };
        let text = "4 of 6 shards are bad, and 4 good ones are needed; damaged: 0, 2, 5; not there: 3";
        assert_eq!(reason(cause, &extent, None), text);
        assert!(
            reason(LossCause::BlobMissing { serial: 7 }, &extent, Some("k")).contains("does not have blob k")
        );
    }

    /// Kinds of the events over some looks at the same state.
    fn kinds(seen: &mut SeenDamage, stat: &DamageStat, looks: u32) -> Vec<&'static str> {
        (0..looks).flat_map(|_| seen.look("main", stat)).map(|happened| happened.kind()).collect()
    }

    #[test]
    fn damage_is_told_once_when_no_more_comes_and_its_end_at_once() {
        let mut seen = SeenDamage::recalled(false);
        assert!(kinds(&mut seen, &stat(&[], 100), 10).is_empty(), "from before");
        assert_eq!(kinds(&mut seen, &stat(&[(2, "/a")], 131), 20), ["damage repaired", "data unreadable"]);
        assert_eq!(kinds(&mut seen, &stat(&[(2, "/a"), (3, "/b")], 131), 20), ["data unreadable"]);
        assert_eq!(kinds(&mut seen, &stat(&[(3, "/b")], 131), 20), [""; 0]);
        assert_eq!(kinds(&mut seen, &stat(&[], 131), 20), ["data readable"]);
    }

    #[test]
    fn damage_that_does_not_end_is_told_once_a_minute() {
        let mut seen = SeenDamage::recalled(false);
        let told: Vec<_> = (0..130).flat_map(|shards| seen.look("main", &stat(&[], shards))).collect();
        assert_eq!(told.len(), 2, "{told:?}");
    }

    #[test]
    fn a_start_does_not_tell_again_what_was_told() {
        let (mut told, mut untold) = (SeenDamage::recalled(true), SeenDamage::recalled(false));
        assert!(kinds(&mut told, &stat(&[(2, "/a")], 0), 20).is_empty());
        assert_eq!(kinds(&mut told, &stat(&[], 0), 20), ["data readable"]);
        assert_eq!(kinds(&mut untold, &stat(&[(2, "/a")], 0), 20), ["data unreadable"]);
    }
}
