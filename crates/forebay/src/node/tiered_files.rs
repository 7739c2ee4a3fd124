//! Files of filesystems with a store: locating their bytes, bringing them back to drives, releasing them from drives.

use std::collections::HashSet;

use admin::{
    AdminError, FETCH_FILES_MAX, FetchFile, FetchFileInfo, FetchStep, ReleaseInfo, TierLocationInfo,
};
use base::units::format_size;
use base::{FsError, Ino};
use client::{Attr, Client, FileKind, FileTiers};
use futures_util::{StreamExt, stream};
use upkeep::GivesWay;
use wire::tier::Stage;

use super::Node;
use super::damage::why_lost;
use super::tiers::{entry_of, no_store_attached};
use super::why::walk;

/// Files looked up at a time.
const FILES_AT_ONCE: usize = 16;

impl Node {
    /// The lock of the state is not held during requests to the store.
    async fn client_of(&self, name: &str) -> Result<Client, AdminError> {
        let mut state = self.state.lock().await;
        Ok(entry_of(&mut state, name)?.client.clone())
    }

    /// The error of a filesystem's store if it is down.
    async fn why_down(&self, name: &str) -> Result<Option<String>, AdminError> {
        let mut state = self.state.lock().await;
        Ok(entry_of(&mut state, name)?.tier.why_down())
    }

    /// A file after its data was written out, and a client of its filesystem.
    async fn tier_file(&self, name: &str, path: &str) -> Result<(Client, Attr), AdminError> {
        let client = self.client_of(name).await?;
        let attr = written_out(&client, name, path).await?;
        Ok((client, attr))
    }

    pub(super) async fn tier_location_now(
        &self,
        name: String,
        path: String,
    ) -> Result<TierLocationInfo, AdminError> {
        let (client, attr) = self.tier_file(&name, &path).await?;
        let tiers = location(&client, &attr).await?;
        Ok(TierLocationInfo {
            path,
            filesystem: name,
            inode: attr.ino.0,
            size: attr.size,
            ssd_write_cache_bytes: tiers.drives_bytes,
            ssd_read_cache_bytes: tiers.both_bytes,
            object_store_bytes: tiers.away_bytes,
        })
    }

    pub(super) async fn tier_fetch_now(
        &self,
        name: &str,
        step: FetchStep,
    ) -> Result<Vec<FetchFileInfo>, AdminError> {
        let files = step.files;
        if files.len() > FETCH_FILES_MAX {
            return Err(AdminError::invalid(format!(
                "more files than one step may have: files={} most={FETCH_FILES_MAX}",
                files.len()
            )));
        }
        let client = self.client_of(name).await?;
        let found =
            stream::iter(files.clone()).map(|file| find_away(&client, name, file)).buffered(FILES_AT_ONCE);
        let found: Vec<_> = found.collect().await;
        let down = self.why_down(name).await?;
        let (mut room, mut wanted) = (client.free_bytes(), Vec::new());
        let mut infos = Vec::with_capacity(files.len());
        for (file, found) in files.iter().zip(found) {
            let problem = match found {
                Ok((_, Some(away))) if away > room => Some(no_room(&file.path, away, room)),
                Ok((_, away)) if away != Some(0) && down.is_some() => down.clone(),
                Ok((ino, away_bytes)) => {
                    room -= away_bytes.unwrap_or(0);
                    wanted.push((infos.len(), (ino, file.offset)));
                    infos.push(FetchFileInfo { bytes: 0, next_offset: None, away_bytes, problem: None });
                    continue;
                }
                Err(error) => Some(error.message),
            };
            infos.push(FetchFileInfo { bytes: 0, next_offset: None, away_bytes: None, problem });
        }
        let (numbers, wanted): (Vec<usize>, Vec<_>) = wanted.into_iter().unzip();
        // An operator requested it, but foreground requests come first.
        let pace = GivesWay::new(client.clone(), self.pace.clone(), |_| false);
        let fetched = client.fetch_files(&wanted, Some(&pace)).await;
        let down = if fetched.iter().any(Result::is_err) { self.why_down(name).await? } else { None };
        for ((number, (ino, _)), fetched) in numbers.into_iter().zip(wanted).zip(fetched) {
            let (info, file) = (&mut infos[number], &files[number]);
            match fetched {
                Ok(fetched) => {
                    (info.bytes, info.next_offset) = (fetched.bytes, fetched.next);
                    // The step did not begin at the start of the file.
                    info.away_bytes.take_if(|_| fetched.next == Some(file.offset));
                }
                Err(error) => {
                    let lost = match &down {
                        Some(down) => Some(down.clone()),
                        None => why_lost(&client, ino, &file.path, file.offset).await,
                    };
                    info.problem = Some(lost.unwrap_or_else(|| not_back(file, error)));
                }
            }
        }
        Ok(infos)
    }

    pub(super) async fn tier_release_now(&self, name: &str, path: &str) -> Result<ReleaseInfo, AdminError> {
        let tier = {
            let mut state = self.state.lock().await;
            entry_of(&mut state, name)?.record.tier
        };
        match tier {
            None => return Err(no_store_attached(name)),
            Some(tier) if tier.detaching => {
                return Err(AdminError::conflict(format!(
                    "everything of filesystem {name} comes back to the drives: nothing leaves them now"
                )));
            }
            Some(_) => {}
        }
        let (client, attr) = self.tier_file(name, path).await?;
        let mut info = ReleaseInfo { released_bytes: 0, not_uploaded_bytes: 0 };
        let mut next = Some(0);
        while let Some(off) = next {
            let page = client.file_parts(attr.ino, off).await.map_err(AdminError::failed)?;
            let mut ids = HashSet::new();
            for part in &page.parts {
                match (part.extent, part.stage) {
                    (Some(id), Some(Stage::Both)) => {
                        ids.insert(id);
                    }
                    (Some(_), None | Some(Stage::Queued)) => info.not_uploaded_bytes += part.bytes,
                    _ => {}
                }
            }
            let released = client.release_extents(ids.into_iter().collect()).await;
            info.released_bytes += released.map_err(AdminError::failed)?.bytes;
            next = page.next;
        }
        Ok(info)
    }
}

/// A file after its data was written out, so that the ledger has all of its content.
async fn written_out(client: &Client, name: &str, path: &str) -> Result<Attr, AdminError> {
    let attr = walk(client, path)
        .await
        .map_err(|error| AdminError::not_found(format!("{error}: path={path} filesystem={name}")))?;
    if attr.kind != FileKind::Regular {
        return Err(AdminError::invalid(format!("not a regular file: path={path} filesystem={name}")));
    }
    client.fsync(attr.ino).await.map_err(AdminError::failed)?;
    Ok(attr)
}

/// A file that is to come back. If the step begins at the start of the file, also the number of bytes that only the
/// store has.
async fn find_away(client: &Client, name: &str, file: FetchFile) -> Result<(Ino, Option<u64>), AdminError> {
    let attr = written_out(client, name, &file.path).await?;
    let is_first = file.offset == 0;
    let away_bytes = if is_first { Some(location(client, &attr).await?.away_bytes) } else { None };
    Ok((attr.ino, away_bytes))
}

fn no_room(path: &str, away: u64, room: u64) -> String {
    format!(
        "the drives have no room for the file: path={path} away={} room={} (take others from the drives with \
         `forebay tier release`, or delete some)",
        format_size(away),
        format_size(room)
    )
}

fn not_back(file: &FetchFile, error: FsError) -> String {
    let FetchFile { path, offset } = file;
    format!(
        "a part of the file did not come back: {error}: path={path} offset={offset} (is the store reached, and is there \
         room? see `forebay tier status` and the log file)"
    )
}

/// Where a file's bytes are.
async fn location(client: &Client, attr: &Attr) -> Result<FileTiers, AdminError> {
    let (mut tiers, mut next) = (FileTiers::default(), Some(0));
    while let Some(off) = next {
        let page = client.file_parts(attr.ino, off).await.map_err(AdminError::failed)?;
        page.add_to(&mut tiers);
        next = page.next;
    }
    Ok(tiers)
}
