//! Conversion of attributes, times and errors between [`client`] and the kernel.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base::FsError;
use client::{Attr, FileKind};
use fuser::{Errno, FileAttr, FileType, INodeNo};

const BLOCK_BYTES: u32 = 4096;

pub(super) fn file_type(kind: FileKind) -> FileType {
    match kind {
        FileKind::Regular => FileType::RegularFile,
        FileKind::Directory => FileType::Directory,
        FileKind::Symlink => FileType::Symlink,
        FileKind::Fifo => FileType::NamedPipe,
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

const NS_PER_S: i64 = 1_000_000_000;

pub(super) fn time_of(ns: i64) -> SystemTime {
    let distance = Duration::from_nanos(ns.unsigned_abs());
    if ns >= 0 { UNIX_EPOCH + distance } else { UNIX_EPOCH - distance }
}

/// Nanoseconds since 1970 of a time from `fuser`, which before 1970 takes the fraction off instead of adding it.
/// Clamped to what 64 bits hold: the years 1677 to 2262.
pub(super) fn ns_of(time: SystemTime) -> i64 {
    match time.duration_since(UNIX_EPOCH) {
        Ok(after) => i64::try_from(after.as_nanos()).unwrap_or(i64::MAX),
        Err(before) => {
            let distance = before.duration();
            let seconds = i64::try_from(distance.as_secs()).unwrap_or(i64::MAX);
            seconds
                .saturating_neg()
                .saturating_mul(NS_PER_S)
                .saturating_add(i64::from(distance.subsec_nanos()))
        }
    }
}

pub(super) fn file_attr(attr: &Attr) -> FileAttr {
    FileAttr {
        ino: INodeNo(attr.ino.0),
        size: attr.size,
        blocks: attr.stored_bytes.div_ceil(512),
        atime: time_of(attr.atime_ns),
        mtime: time_of(attr.mtime_ns),
        ctime: time_of(attr.ctime_ns),
        crtime: time_of(attr.btime_ns),
        kind: file_type(attr.kind),
        perm: (attr.mode & 0o7777) as u16,
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        rdev: attr.rdev,
        blksize: BLOCK_BYTES,
        flags: 0,
    }
}

/// The attributes of a name that does not exist.
pub(super) fn no_inode() -> FileAttr {
    FileAttr {
        ino: INodeNo(0),
        size: 0,
        blocks: 0,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind: FileType::RegularFile,
        perm: 0,
        nlink: 0,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: BLOCK_BYTES,
        flags: 0,
    }
}

/// The one mapping from errors to errno values.
pub(super) fn errno(error: FsError) -> Errno {
    let number = match error {
        FsError::NotFound => libc::ENOENT,
        FsError::Exists => libc::EEXIST,
        FsError::NotDirectory => libc::ENOTDIR,
        FsError::IsDirectory => libc::EISDIR,
        FsError::NotEmpty => libc::ENOTEMPTY,
        FsError::Denied => libc::EACCES,
        FsError::NotPermitted => libc::EPERM,
        FsError::Invalid => libc::EINVAL,
        FsError::NameTooLong => libc::ENAMETOOLONG,
        FsError::TooLarge => libc::EFBIG,
        FsError::TooManyLinks => libc::EMLINK,
        FsError::NoAttribute => libc::ENODATA,
        FsError::Range => libc::ERANGE,
        FsError::ValueTooLarge => libc::E2BIG,
        FsError::CrossDevice => libc::EXDEV,
        FsError::NoSpace => libc::ENOSPC,
        FsError::QuotaExceeded => libc::EDQUOT,
        FsError::WouldBlock => libc::EAGAIN,
        FsError::Deadlock => libc::EDEADLK,
        FsError::Interrupted => libc::EINTR,
        FsError::StaleLease
        | FsError::Io
        | FsError::Unavailable
        | FsError::Disconnected
        | FsError::Unknown
        | FsError::StaleMap => libc::EIO,
        FsError::Stale => libc::ESTALE,
        FsError::Unsupported => libc::EOPNOTSUPP,
        FsError::ReadOnly => libc::EROFS,
    };
    Errno::from_i32(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_before_1970_and_beyond_the_range_survive() {
        for ns in [0, 1, -3_000_000_000, 1_700_000_000_123_456_789, i64::MAX] {
            assert_eq!(ns_of(time_of(ns)), ns);
        }
        assert_eq!(ns_of(UNIX_EPOCH + Duration::from_secs(1 << 40)), i64::MAX);
        // The kernel states 1.75 s before 1970 as second -2 and a quarter, and `fuser` passes it on like that.
        assert_eq!(ns_of(UNIX_EPOCH - Duration::new(2, 250_000_000)), -1_750_000_000);
        assert_eq!(time_of(-1_750_000_000), UNIX_EPOCH - Duration::from_millis(1750));
    }
}
