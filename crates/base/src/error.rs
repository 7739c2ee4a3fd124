//! [`FsError`]: why a filesystem operation failed, in terms that every protocol can translate.

/// Why a filesystem operation failed. Each protocol maps it to its own codes in one place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error, serde::Serialize, serde::Deserialize)]
pub enum FsError {
    /// The name or inode does not exist.
    #[error("no such file or directory")]
    NotFound,
    /// The name already exists.
    #[error("file exists")]
    Exists,
    /// The operation needs a directory.
    #[error("not a directory")]
    NotDirectory,
    /// The operation does not work on a directory.
    #[error("is a directory")]
    IsDirectory,
    /// The directory still has entries.
    #[error("directory not empty")]
    NotEmpty,
    /// The mode bits, ACL or owner forbid it.
    #[error("permission denied")]
    Denied,
    /// The operation is forbidden for every user.
    #[error("operation not permitted")]
    NotPermitted,
    /// An argument is out of range or makes no sense.
    #[error("invalid argument")]
    Invalid,
    /// A name is longer than 255 bytes, or a path component is malformed.
    #[error("file name too long")]
    NameTooLong,
    /// The offset or size is beyond 2^60 bytes.
    #[error("file too large")]
    TooLarge,
    /// The inode already has 2^31 - 1 links.
    #[error("too many links")]
    TooManyLinks,
    /// An extended attribute, or the room for it, does not exist.
    #[error("no such attribute")]
    NoAttribute,
    /// The caller's buffer, or a limit on a value, is too small.
    #[error("result too large")]
    Range,
    /// A value is larger than the limit for it.
    #[error("value too large")]
    ValueTooLarge,
    /// Source and destination are in different filesystems or projects.
    #[error("cross-device link")]
    CrossDevice,
    /// The drives have no room left for user data.
    #[error("no space left on device")]
    NoSpace,
    /// A quota is used up.
    #[error("quota exceeded")]
    QuotaExceeded,
    /// Another process holds a conflicting lock.
    #[error("resource temporarily unavailable")]
    WouldBlock,
    /// Waiting for this lock would never end.
    #[error("resource deadlock avoided")]
    Deadlock,
    /// The caller gave up waiting.
    #[error("interrupted")]
    Interrupted,
    /// The lease was revoked or the session has ended; data cached under it is void.
    #[error("stale lease")]
    StaleLease,
    /// The inode or handle is gone.
    #[error("stale handle")]
    Stale,
    /// Not supported on this kind of inode or at all.
    #[error("operation not supported")]
    Unsupported,
    /// Data could not be read or made durable. The log says which drive or extent.
    #[error("input/output error")]
    Io,
    /// The filesystem is read-only now.
    #[error("read-only file system")]
    ReadOnly,
    /// The service is stopping or cannot be reached; the operation did not happen.
    #[error("service unavailable")]
    Unavailable,
    /// The service is not the one to ask any more; whether the operation happened is not known. Only clients see this error:
    /// they ask the service's successor.
    #[error("service moved")]
    Disconnected,
    /// Data was written to drives by an older cluster map than the ledger accepts; nothing was committed. Only clients see this
    /// error: they write the data again by the newer map.
    #[error("cluster map is out of date")]
    StaleMap,
    /// There was no answer: the operation may have happened, and may even happen later.
    #[error("no answer: it may have happened")]
    Unknown,
    /// Another request must come first, and waits for this client; nothing has happened. A client gets this error only if it says that it
    /// gives way and asks again.
    #[error("refused for a moment")]
    Retry,
}
