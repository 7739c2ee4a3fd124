//! Conversion of attributes and errors between [`client`] and the kernel.

use std::panic::Location;
use std::sync::atomic::{AtomicU64, Ordering};

use base::FsError;
use client::{Attr, FileKind};
use fuse::{Errno, FileAttr, FileType};

const BLOCK_BYTES: u32 = 4096;

pub(super) fn file_type(kind: FileKind) -> FileType {
    match kind {
        FileKind::Regular => FileType::Regular,
        FileKind::Directory => FileType::Directory,
        FileKind::Symlink => FileType::Symlink,
        FileKind::Fifo => FileType::Fifo,
        FileKind::Socket => FileType::Socket,
        FileKind::CharDevice => FileType::CharDevice,
        FileKind::BlockDevice => FileType::BlockDevice,
    }
}

/// The kind of inode that `mknod` requests; `None` for a kind that other calls make.
pub(super) fn kind_of_mode(mode: u32) -> Option<FileKind> {
    Some(match mode & libc::S_IFMT {
        libc::S_IFREG | 0 => FileKind::Regular,
        libc::S_IFIFO => FileKind::Fifo,
        libc::S_IFSOCK => FileKind::Socket,
        libc::S_IFCHR => FileKind::CharDevice,
        libc::S_IFBLK => FileKind::BlockDevice,
        _ => return None,
    })
}

pub(super) fn file_attr(attr: &Attr) -> FileAttr {
    FileAttr {
        ino: attr.ino.0,
        kind: file_type(attr.kind),
        mode: attr.mode,
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        rdev: attr.rdev,
        size: attr.size,
        blocks: attr.stored_bytes.div_ceil(512),
        block_bytes: BLOCK_BYTES,
        atime_ns: attr.atime_ns,
        mtime_ns: attr.mtime_ns,
        ctime_ns: attr.ctime_ns,
        btime_ns: attr.btime_ns,
    }
}

/// Input and output errors of this process.
static IO_ERRORS: AtomicU64 = AtomicU64::new(0);
/// So many of them are logged each by itself.
const IO_ERRORS_LOGGED: u64 = 100;

/// The one mapping from errors to errno values. An input or output error says nothing of its reason to a program, so the log does.
#[track_caller]
pub(super) fn errno(error: FsError) -> Errno {
    let errno = errno_of(error);
    if errno == Errno::IO {
        let count = IO_ERRORS.fetch_add(1, Ordering::Relaxed) + 1;
        if count <= IO_ERRORS_LOGGED || count.is_power_of_two() {
            tracing::warn!(%error, at = %Location::caller(), count, "a program gets an input/output error");
        }
    }
    errno
}

fn errno_of(error: FsError) -> Errno {
    match error {
        FsError::NotFound => Errno::NOENT,
        FsError::Exists => Errno::EXIST,
        FsError::NotDirectory => Errno::NOTDIR,
        FsError::IsDirectory => Errno::ISDIR,
        FsError::NotEmpty => Errno::NOTEMPTY,
        FsError::Denied => Errno::ACCESS,
        FsError::NotPermitted => Errno::PERM,
        FsError::Invalid => Errno::INVAL,
        FsError::NameTooLong => Errno::NAMETOOLONG,
        FsError::TooLarge => Errno::FBIG,
        FsError::TooManyLinks => Errno::MLINK,
        FsError::NoAttribute => Errno::NODATA,
        FsError::Range => Errno::RANGE,
        FsError::ValueTooLarge => Errno::TOOBIG,
        FsError::CrossDevice => Errno::XDEV,
        FsError::NoSpace => Errno::NOSPC,
        FsError::QuotaExceeded => Errno::DQUOT,
        FsError::WouldBlock => Errno::AGAIN,
        FsError::Deadlock => Errno::DEADLK,
        FsError::Interrupted => Errno::INTR,
        FsError::StaleLease
        | FsError::Io
        | FsError::Unavailable
        | FsError::Disconnected
        | FsError::Unknown
        | FsError::StaleMap => Errno::IO,
        // The kernel lets the locks of the directories go, and asks once more.
        FsError::Stale | FsError::Retry => Errno::STALE,
        FsError::Unsupported => Errno::OPNOTSUPP,
        FsError::ReadOnly => Errno::ROFS,
    }
}
