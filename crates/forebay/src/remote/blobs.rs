//! The object store of a client that has no keys of it: the node that owns the ledger reads for it.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use base::{ClusterId, FsError, Ino};
use bytes::{Bytes, BytesMut};
use futures_util::future::try_join_all;
use layout::BlobId;
use tokio::sync::mpsc;
use wire::BoxFuture;
use wire::link::RemoteViews;
use wire::store::{BringsBack, ObjectStore, Outgoing, StoreError};
use wire::view::{BLOB_PART_MAX, FilesystemView, ViewReply, ViewRequest, ViewService};

use super::Owner;

/// Reads of which the owner is not told yet. More are forgotten.
const READS_MAX: usize = 64;
/// Pause after the owner was not reached.
const PAUSE: Duration = Duration::from_millis(500);

/// See the module.
pub(super) struct OwnersStore {
    owner: Owner,
    cluster: ClusterId,
    filesystem: String,
    /// How long a read waits for an owner that is away; `None`: for ever.
    patience: Option<Duration>,
    /// Reads that the owner is told of.
    reads: mpsc::Sender<(Ino, u64, u64)>,
}

impl OwnersStore {
    pub(super) fn new(
        owner: &Owner,
        view: &FilesystemView,
        name: &str,
        patience: Option<Duration>,
    ) -> Arc<Self> {
        let (reads, told) = mpsc::channel(READS_MAX);
        tokio::spawn(tell(owner.clone(), name.to_owned(), told));
        let (owner, filesystem) = (owner.clone(), name.to_owned());
        Arc::new(Self { owner, cluster: view.cluster, filesystem, patience, reads })
    }

    async fn part(&self, id: BlobId, range: Range<u64>) -> Result<Bytes, StoreError> {
        let BlobId { serial, term, .. } = id;
        let len = (range.end - range.start) as u32;
        let mut owner = self.owner.clone();
        loop {
            let views = RemoteViews::new(&owner.peer().await);
            let filesystem = self.filesystem.clone();
            let request = ViewRequest::Blob { filesystem, serial, term, off: range.start, len };
            let answer = tokio::select! {
                answer = views.ask(request) => answer,
                () = owner.changed() => continue,
            };
            match answer {
                Ok(ViewReply::Blob(part)) => return part.map(|part| part.bytes),
                Ok(_) => return Err(StoreError::Unexpected("the owner answers another question".to_owned())),
                Err(FsError::Disconnected) => tokio::time::sleep(PAUSE).await,
                Err(FsError::NotPermitted) => {
                    return Err(StoreError::Denied("this client may not read the filesystem".to_owned()));
                }
                Err(error) => return Err(StoreError::Unavailable(error.to_string())),
            }
        }
    }

    async fn parts(&self, key: String, range: Option<Range<u64>>) -> Result<Bytes, StoreError> {
        let id = BlobId::of_key(&key, self.cluster);
        let (Some(id), Some(range)) = (id, range) else {
            return Err(StoreError::Denied(format!("a client reads ranges of blobs only: {key}")));
        };
        let starts = range.clone().step_by(BLOB_PART_MAX as usize);
        let parts = starts.map(|start| {
            let end = range.end.min(start + u64::from(BLOB_PART_MAX));
            async move {
                let bytes = self.part(id, start..end).await?;
                if bytes.len() as u64 == end - start {
                    Ok(bytes)
                } else {
                    Err(StoreError::TooShort(format!("{} bytes instead of {}", bytes.len(), end - start)))
                }
            }
        });
        let mut parts = try_join_all(parts).await?;
        if parts.len() == 1 {
            return Ok(parts.remove(0));
        }
        let mut joined = BytesMut::with_capacity((range.end - range.start) as usize);
        parts.iter().for_each(|part| joined.extend_from_slice(part));
        Ok(joined.freeze())
    }
}

impl ObjectStore for OwnersStore {
    fn put(&self, key: String, _object: Outgoing) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move { Err(refused(&key)) })
    }

    fn get(&self, key: String, range: Option<Range<u64>>) -> BoxFuture<'_, Result<Bytes, StoreError>> {
        Box::pin(async move {
            let read = self.parts(key, range);
            let Some(patience) = self.patience else { return read.await };
            let late = || StoreError::Unavailable("the owner of the metadata is away".to_owned());
            tokio::time::timeout(patience, read).await.unwrap_or_else(|_| Err(late()))
        })
    }

    fn delete(&self, key: String) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move { Err(refused(&key)) })
    }

    fn brings_back(&self) -> Option<&dyn BringsBack> {
        Some(self)
    }
}

impl BringsBack for OwnersStore {
    fn was_read(&self, ino: Ino, off: u64, len: u64) {
        // If the owner is slow, later reads tell of the file again.
        let _ = self.reads.try_send((ino, off, len));
    }
}

fn refused(key: &str) -> StoreError {
    StoreError::Denied(format!("a client does not change blobs: {key}"))
}

/// Tells the owner of reads, until the store is dropped.
async fn tell(mut owner: Owner, filesystem: String, mut reads: mpsc::Receiver<(Ino, u64, u64)>) {
    while let Some((ino, off, len)) = reads.recv().await {
        let views = RemoteViews::new(&owner.peer().await);
        let request = ViewRequest::Reads { filesystem: filesystem.clone(), ino, off, len };
        if let Err(error) = views.ask(request).await {
            tracing::debug!(%error, %ino, "what was read is not brought back");
        }
    }
}
