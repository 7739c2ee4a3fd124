//! Numbers of blobs that are being made. Numbers that are not used go back to the owner, also if it is not known whether it
//! reserved them: otherwise a blob in the store would stay until the session ends.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use base::{Epoch, FsError};
use wire::tier::{TierReply, TierRequest};

use crate::Client;

/// See the module.
#[derive(Default)]
pub(crate) struct Reserved {
    /// Of blobs that are being made.
    numbers: Mutex<BTreeSet<u64>>,
    /// Held while a number is reserved and while others go back.
    exchange: tokio::sync::Mutex<()>,
    /// The owner may have numbers that are not used.
    has_unused: AtomicBool,
}

/// The number of a blob that is being made.
pub(crate) struct BlobNumber<'a> {
    reserved: &'a Reserved,
    pub(crate) serial: u64,
    pub(crate) term: Epoch,
    is_committed: bool,
}

impl BlobNumber<'_> {
    /// The blob is in use.
    pub(crate) fn committed(mut self) {
        self.is_committed = true;
    }
}

/// A request to the owner, which may be cut off before its answer.
struct Doubt<'a>(Option<&'a Reserved>);

impl Doubt<'_> {
    /// It was answered.
    fn settled(mut self) {
        self.0 = None;
    }
}

impl Drop for Doubt<'_> {
    fn drop(&mut self) {
        if let Some(reserved) = self.0 {
            reserved.has_unused.store(true, Ordering::Release);
        }
    }
}

impl Drop for BlobNumber<'_> {
    fn drop(&mut self) {
        self.reserved.numbers.lock().expect("no holder of this lock panics").remove(&self.serial);
        if !self.is_committed {
            self.reserved.has_unused.store(true, Ordering::Release);
        }
    }
}

impl Client {
    /// Reserves a number for a blob.
    pub(crate) async fn reserve_blob(&self) -> Result<BlobNumber<'_>, FsError> {
        let reserved = &self.inner.blobs.reserved;
        let _exchange = reserved.exchange.lock().await;
        let doubt = Doubt(Some(reserved));
        match self.tier(TierRequest::Reserve).await {
            Ok(TierReply::Reserved { serial, term }) => {
                doubt.settled();
                reserved.numbers.lock().expect("no holder of this lock panics").insert(serial);
                Ok(BlobNumber { reserved, serial, term, is_committed: false })
            }
            other => Err(other.err().unwrap_or(FsError::Io)),
        }
    }

    /// Gives numbers of blobs back that are not used. After an error it is tried again at the next call.
    pub async fn return_numbers(&self) {
        let reserved = &self.inner.blobs.reserved;
        if !reserved.has_unused.load(Ordering::Acquire) {
            return;
        }
        let _exchange = reserved.exchange.lock().await;
        reserved.has_unused.store(false, Ordering::Release);
        let doubt = Doubt(Some(reserved));
        let keep = reserved.numbers.lock().expect("no holder of this lock panics").iter().copied().collect();
        match self.tier(TierRequest::Abandon { keep }).await {
            Ok(_) => doubt.settled(),
            Err(error) => tracing::debug!(%error, "numbers of blobs were not given back"),
        }
    }
}
