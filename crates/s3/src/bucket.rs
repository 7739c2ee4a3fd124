//! Buckets: top-level directories, found by name in memory while a lease on the directory holds.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use base::{FsError, Ino};
use bytes::Bytes;
use client::{Client, FileKind, Invalidate, NameTerm};
use s3s::{S3Error, S3Result, s3_error};

use crate::cors::CorsRules;
use crate::error::object_error;
use crate::identity::Identity;
use crate::policy::{Policy, PolicyOf};

/// Limit of the bucket cache.
const BUCKETS_MAX: usize = 10_000;

pub(crate) const POLICY: &str = "policy";
pub(crate) const CORS: &str = "cors";
pub(crate) const TAGS: &str = "tags";
/// The number of the user that the bucket belongs to, in decimal digits.
pub(crate) const OWNER: &str = "owner";

/// A bucket and its settings.
pub(crate) struct Bucket {
    pub(crate) name: String,
    pub(crate) ino: Ino,
    pub(crate) policy: Option<Arc<Policy>>,
    pub(crate) cors: Option<Arc<CorsRules>>,
    /// Number of the user that made the bucket through S3; `None` if it was made otherwise.
    pub(crate) owner: Option<u32>,
    settings: Vec<(String, Bytes)>,
}

impl Bucket {
    /// Whether the sender owns the bucket and may do everything that no policy denies.
    pub(crate) fn belongs_to(&self, identity: Option<&Identity>) -> bool {
        identity.is_some_and(|identity| self.owner == Some(identity.user.id))
    }

    /// A setting as it is stored.
    pub(crate) fn setting(&self, name: &str) -> Option<&Bytes> {
        self.settings.iter().find(|(other, _)| other == name).map(|(_, value)| value)
    }
}

/// The bucket cache. An entry is valid while the client has a lease on the directory: if another client renames,
/// removes or changes the directory, the lease is recalled, and [`Invalidate`] is called before that change is
/// acknowledged. An invalidation during a lookup keeps its result out of the cache.
pub(crate) struct Buckets {
    client: Client,
    known: Mutex<HashMap<String, Arc<Bucket>>>,
    /// Counts invalidations: a lookup that began before one is not cached.
    changes: AtomicU64,
}

impl Buckets {
    pub(crate) fn new(client: Client) -> Arc<Self> {
        Arc::new(Self { client, known: Mutex::default(), changes: AtomicU64::new(0) })
    }

    /// Finds a bucket.
    pub(crate) async fn get(&self, name: &str) -> S3Result<Arc<Bucket>> {
        if let Some(bucket) = self.known(name) {
            return Ok(bucket);
        }
        let changes = self.changes.load(Ordering::Acquire);
        let (attr, term) = match self.client.find(Ino::ROOT, name.as_bytes()).await {
            Ok((Some(attr), term)) => (attr, term),
            Ok((None, _)) | Err(FsError::NotFound | FsError::NameTooLong | FsError::Invalid) => {
                return Err(no_such());
            }
            Err(error) => return Err(object_error(error.into())),
        };
        if attr.kind != FileKind::Directory {
            self.client.forget(attr.ino, 1);
            return Err(no_such());
        }
        let settings = match self.client.bucket_settings(attr.ino).await {
            Ok(settings) => settings,
            Err(error) => {
                self.client.forget(attr.ino, 1);
                return Err(object_error(error));
            }
        };
        let bucket = Arc::new(Self::read(name, attr.ino, settings)?);
        self.remember(&bucket, &term, changes);
        Ok(bucket)
    }

    fn read(name: &str, ino: Ino, settings: Vec<(String, Bytes)>) -> S3Result<Bucket> {
        let find = |wanted: &str| settings.iter().find(|(name, _)| name == wanted).map(|(_, value)| value);
        let unreadable = |what: &str| {
            tracing::error!(bucket = name, setting = what, "setting of a bucket cannot be read");
            s3_error!(InternalError, "The {what} setting of the bucket cannot be read: set it again.")
        };
        // The policy may deny requests: if it cannot be read, the request fails.
        let policy = match find(POLICY) {
            Some(text) => {
                let policy = Policy::parse(text, PolicyOf::Bucket(name))
                    .or_else(|_| Policy::parse(text, PolicyOf::RenamedBucket(name)));
                Some(Arc::new(policy.map_err(|_| unreadable(POLICY))?))
            }
            None => None,
        };
        let cors = find(CORS).and_then(|text| CorsRules::parse(text)).map(Arc::new);
        let owner = find(OWNER).and_then(|text| std::str::from_utf8(text).ok()?.parse().ok());
        Ok(Bucket { name: name.to_owned(), ino, policy, cors, owner, settings })
    }

    fn known(&self, name: &str) -> Option<Arc<Bucket>> {
        let known = self.known.lock().expect("no holder of this lock panics");
        let bucket = known.get(name)?;
        self.client.cached_attr(bucket.ino)?;
        Some(bucket.clone())
    }

    fn remember(&self, bucket: &Arc<Bucket>, term: &NameTerm, changes: u64) {
        let mut known = self.known.lock().expect("no holder of this lock panics");
        let is_vouched =
            !self.client.name_term(term).is_zero() && !self.client.attr_term(bucket.ino).is_zero();
        let is_current = is_vouched && self.changes.load(Ordering::Acquire) == changes;
        let old = if is_current && known.len() < BUCKETS_MAX {
            known.insert(bucket.name.clone(), bucket.clone()).map(|old| old.ino)
        } else {
            Some(bucket.ino)
        };
        drop(known);
        if let Some(ino) = old {
            self.client.forget(ino, 1);
        }
    }

    /// Removes a bucket that this gate changes from the cache.
    pub(crate) fn forget(&self, name: &str) {
        self.changes.fetch_add(1, Ordering::AcqRel);
        let old = self.known.lock().expect("no holder of this lock panics").remove(name);
        if let Some(bucket) = old {
            self.client.forget(bucket.ino, 1);
        }
    }

    /// Sets or removes a setting.
    pub(crate) async fn set(&self, bucket: &Bucket, name: &str, value: Option<Bytes>) -> S3Result<()> {
        let result = self.client.set_bucket_setting(bucket.ino, name, value).await;
        self.forget(&bucket.name);
        result.map_err(object_error)
    }

    fn drop_where(&self, gone: impl Fn(&Bucket) -> bool) {
        self.changes.fetch_add(1, Ordering::AcqRel);
        let mut known = self.known.lock().expect("no holder of this lock panics");
        let names: Vec<String> =
            known.values().filter(|bucket| gone(bucket)).map(|bucket| bucket.name.clone()).collect();
        let dropped: Vec<_> = names.iter().filter_map(|name| known.remove(name)).collect();
        drop(known);
        dropped.iter().for_each(|bucket| self.client.forget(bucket.ino, 1));
    }
}

impl Invalidate for Buckets {
    fn inode(&self, ino: Ino) {
        self.drop_where(|bucket| bucket.ino == ino);
    }

    fn entry(&self, parent: Ino, name: &[u8]) {
        if parent == Ino::ROOT {
            self.drop_where(|bucket| bucket.name.as_bytes() == name);
        }
    }
}

fn no_such() -> S3Error {
    s3_error!(NoSuchBucket, "The specified bucket does not exist")
}
