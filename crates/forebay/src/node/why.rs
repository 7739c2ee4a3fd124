//! `why PATH`: the place and state of each byte of a file.

use admin::{AdminError, ExtentInfo, ShardInfo, WhyInfo};
use base::{FsError, Ino};
use client::{Attr, Client};
use layout::ClusterMap;
use wire::meta::{Content, ExtentRef, MapPiece};

use super::damage::Losses;
use super::{Node, State};

type Owed = std::collections::HashSet<(base::DriveId, base::ExtentId)>;

/// Limit of pieces in the answer.
const PIECES_MAX: u32 = 4096;

pub(super) async fn walk(client: &Client, path: &str) -> Result<Attr, FsError> {
    let mut attr = client.getattr(Ino::ROOT).await?;
    for name in path.split('/').filter(|name| !name.is_empty()) {
        let next = client.lookup(attr.ino, name.as_bytes()).await?;
        client.forget(next.ino, 1);
        attr = next;
    }
    Ok(attr)
}

fn shard_state(state: &State, map: &ClusterMap, drive: base::DriveId) -> String {
    match state.drives.get(&drive) {
        Some(entry) => entry.info().state,
        None if map.drive(drive).is_some() => "missing".to_owned(),
        None => "out".to_owned(),
    }
}

fn explain_extent(
    state: &State,
    map: &ClusterMap,
    owed: &Owed,
    piece: &MapPiece,
    extent: &ExtentRef,
) -> ExtentInfo {
    let members = map.group(extent.pg).map(|group| group.members.as_slice()).unwrap_or_default();
    let shards: Vec<ShardInfo> = (0..extent.n)
        .zip(members)
        .map(|(shard, drive)| {
            let mut shard_state = shard_state(state, map, *drive);
            if shard_state == "up" && map.group(extent.pg).is_some_and(|group| group.is_rebuilding(shard)) {
                shard_state = "rebuilding".to_owned();
            }
            if shard_state == "up" && owed.contains(&(*drive, extent.id)) {
                shard_state = "owed".to_owned();
            }
            ShardInfo { shard, drive: drive.0, state: shard_state }
        })
        .collect();
    let up = shards.iter().filter(|shard| shard.state == "up").count();
    let state = match up {
        _ if up == usize::from(extent.n) => "ok",
        _ if up >= usize::from(extent.k) => "degraded",
        _ => "unreadable",
    };
    ExtentInfo {
        offset: piece.off,
        len: piece.len,
        kind: if extent.k == 1 { "copies" } else { "coded" }.to_owned(),
        extent: Some(extent.id.0),
        extent_offset: Some(extent.extent_off.into()),
        shape: Some(format!("{}/{}", extent.n, extent.k)),
        group: Some(extent.pg.0),
        shards,
        state: state.to_owned(),
        reason: None,
    }
}

/// A piece without shards: inline, or in the object store.
fn not_on_drives(piece: &MapPiece, kind: &str) -> ExtentInfo {
    ExtentInfo {
        offset: piece.off,
        len: piece.len,
        kind: kind.to_owned(),
        extent: piece.content.extent().map(|extent| extent.id.0),
        extent_offset: piece.content.extent().map(|extent| extent.extent_off.into()),
        shape: None,
        group: None,
        shards: Vec::new(),
        state: "ok".to_owned(),
        reason: None,
    }
}

fn explain_piece(state: &State, map: &ClusterMap, owed: &Owed, piece: &MapPiece) -> ExtentInfo {
    match &piece.content {
        Content::Extent(extent) => explain_extent(state, map, owed, piece, extent),
        Content::Inline(_) => not_on_drives(piece, "inline"),
        Content::Tiered(..) => not_on_drives(piece, "object_store"),
    }
}

impl Node {
    pub(super) async fn why_now(&self, name: &str, path: &str) -> Result<WhyInfo, AdminError> {
        let state = self.state.lock().await;
        let entry = state
            .filesystems
            .get(name)
            .ok_or_else(|| AdminError::not_found(format!("no such filesystem: name={name}")))?;
        let attr = walk(&entry.client, path)
            .await
            .map_err(|error| AdminError::not_found(format!("{error}: path={path} filesystem={name}")))?;
        let map = &state.map;
        let mut pieces = Vec::new();
        if attr.kind == client::FileKind::Regular {
            entry.client.fsync(attr.ino).await.map_err(AdminError::failed)?;
            pieces = entry.client.map(attr.ino, 0, PIECES_MAX + 1).await.map_err(AdminError::failed)?;
        }
        let owed = entry.client.owed(usize::MAX).await.map_err(AdminError::failed)?;
        let holder = |pg, shard: u8| map.group(pg).and_then(|group| group.members.get(usize::from(shard)));
        let owed: Owed = owed
            .iter()
            .map(|owed| (holder(owed.pg, owed.shard.0).copied().unwrap_or(owed.drive), owed.id))
            .collect();
        let truncated = pieces.len() > PIECES_MAX as usize;
        pieces.truncate(PIECES_MAX as usize);
        let losses = Losses::of(&entry.client, &pieces).await.map_err(AdminError::failed)?;
        let explain = |piece| losses.explain(piece, explain_piece(&state, map, &owed, piece));
        let extents: Vec<ExtentInfo> = pieces.iter().map(explain).collect();
        let worst =
            ["unreadable", "degraded"].into_iter().find(|bad| extents.iter().any(|e| e.state == *bad));
        Ok(WhyInfo {
            path: path.to_owned(),
            filesystem: name.to_owned(),
            inode: attr.ino.0,
            kind: format!("{:?}", attr.kind).to_lowercase(),
            size: attr.size,
            profile: entry.record.profile.to_string(),
            state: worst.unwrap_or("ok").to_owned(),
            extents,
            truncated,
        })
    }
}
