//! Numbers and layouts of the protocol. All integers have the byte order of the machine.

/// The version of the protocol that this crate speaks. New parts of later ones are used only if both sides want them.
pub const MAJOR: u32 = 7;
/// See [`MAJOR`].
pub const MINOR: u32 = 42;
/// Kernels before this minor version (Linux 5.4) are refused.
pub const MINOR_LEAST: u32 = 31;

/// Bytes before the body of a request.
pub const IN_HEADER_BYTES: usize = 40;
/// Bytes before the body of a reply.
pub const OUT_HEADER_BYTES: usize = 16;

/// The kinds of requests.
#[allow(missing_docs, reason = "the names of the protocol")]
pub mod opcode {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const READLINK: u32 = 5;
    pub const SYMLINK: u32 = 6;
    pub const MKNOD: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const UNLINK: u32 = 10;
    pub const RMDIR: u32 = 11;
    pub const RENAME: u32 = 12;
    pub const LINK: u32 = 13;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const SETXATTR: u32 = 21;
    pub const GETXATTR: u32 = 22;
    pub const LISTXATTR: u32 = 23;
    pub const REMOVEXATTR: u32 = 24;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const FSYNCDIR: u32 = 30;
    pub const GETLK: u32 = 31;
    pub const SETLK: u32 = 32;
    pub const SETLKW: u32 = 33;
    pub const CREATE: u32 = 35;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const IOCTL: u32 = 39;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const READDIRPLUS: u32 = 44;
    pub const RENAME2: u32 = 45;
    pub const LSEEK: u32 = 46;
    pub const COPY_FILE_RANGE: u32 = 47;
    pub const TMPFILE: u32 = 51;
    pub const STATX: u32 = 52;
    pub const COPY_FILE_RANGE_64: u32 = 53;
}

/// The kinds of notices to the kernel.
#[allow(missing_docs, reason = "the names of the protocol")]
pub mod notice {
    pub const INVAL_INODE: i32 = 2;
    pub const INVAL_ENTRY: i32 = 3;
}

/// A set of bits.
macro_rules! flags {
    ($(#[$doc:meta])* $name:ident: $int:ty { $($bit:ident = $at:expr,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        pub struct $name(pub $int);

        #[allow(missing_docs, reason = "the names of the protocol")]
        impl $name {
            $(pub const $bit: Self = Self(1 << $at);)*

            /// Whether all bits of `other` are set.
            pub const fn contains(self, other: Self) -> bool {
                self.0 & other.0 == other.0
            }
        }

        impl std::ops::BitOr for $name {
            type Output = Self;

            fn bitor(self, other: Self) -> Self {
                Self(self.0 | other.0)
            }
        }

        impl std::ops::BitAnd for $name {
            type Output = Self;

            fn bitand(self, other: Self) -> Self {
                Self(self.0 & other.0)
            }
        }
    };
}

flags! {
    /// Parts of the protocol that both sides must want.
    InitFlags: u64 {
        ASYNC_READ = 0,
        POSIX_LOCKS = 1,
        EXPORT_SUPPORT = 4,
        BIG_WRITES = 5,
        DONT_MASK = 6,
        FLOCK_LOCKS = 10,
        DO_READDIRPLUS = 13,
        READDIRPLUS_AUTO = 14,
        ASYNC_DIO = 15,
        PARALLEL_DIROPS = 18,
        POSIX_ACL = 20,
        MAX_PAGES = 22,
        CACHE_SYMLINKS = 23,
        EXPLICIT_INVAL_DATA = 25,
        HANDLE_KILLPRIV_V2 = 28,
        INIT_EXT = 30,
        DIRECT_IO_ALLOW_MMAP = 36,
        OVER_IO_URING = 41,
    }
}

flags! {
    /// How the kernel treats an open file.
    OpenFlags: u32 {
        DIRECT_IO = 0,
        KEEP_CACHE = 1,
        NOFLUSH = 5,
        PARALLEL_DIRECT_WRITES = 6,
    }
}

/// In [`WriteRequest::write_flags`](crate::WriteRequest): from the page cache.
pub const WRITE_CACHE: u32 = 1 << 0;
/// In [`WriteRequest::write_flags`](crate::WriteRequest): the set-id bits must be cleared.
pub const WRITE_KILL_SUIDGID: u32 = 1 << 2;
/// In the flags of a release: flock(2) locks of the file handle end.
pub const RELEASE_FLOCK_UNLOCK: u32 = 1 << 1;
/// In the flags of a lock: of flock(2).
pub const LK_FLOCK: u32 = 1 << 0;

/// Which values of a setattr request count.
#[allow(missing_docs, reason = "the names of the protocol")]
pub mod setattr {
    pub const MODE: u32 = 1 << 0;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
    pub const ATIME: u32 = 1 << 4;
    pub const MTIME: u32 = 1 << 5;
    pub const ATIME_NOW: u32 = 1 << 7;
    pub const MTIME_NOW: u32 = 1 << 8;
    pub const KILL_SUIDGID: u32 = 1 << 11;
}

/// Kinds of inodes, as in the upper bits of a mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the kinds are known")]
pub enum FileType {
    Regular,
    Directory,
    Symlink,
    Fifo,
    Socket,
    CharDevice,
    BlockDevice,
}

impl FileType {
    /// Its bits in a mode.
    pub const fn mode(self) -> u32 {
        match self {
            Self::Regular => libc::S_IFREG,
            Self::Directory => libc::S_IFDIR,
            Self::Symlink => libc::S_IFLNK,
            Self::Fifo => libc::S_IFIFO,
            Self::Socket => libc::S_IFSOCK,
            Self::CharDevice => libc::S_IFCHR,
            Self::BlockDevice => libc::S_IFBLK,
        }
    }
}

/// Attributes of an inode. Times are nanoseconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "as in stat(2)")]
pub struct FileAttr {
    pub ino: u64,
    pub kind: FileType,
    /// The lower 12 bits.
    pub mode: u32,
    pub nlink: u32,
    pub uid: u32,
    pub gid: u32,
    pub rdev: u32,
    pub size: u64,
    /// Units of 512 bytes.
    pub blocks: u64,
    pub block_bytes: u32,
    pub atime_ns: i64,
    pub mtime_ns: i64,
    pub ctime_ns: i64,
    pub btime_ns: i64,
}

/// A lock on a range, or an inquiry about one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lock {
    /// First byte.
    pub start: u64,
    /// Last byte; the end of the file is `i64::MAX`.
    pub last: u64,
    /// `F_RDLCK`, `F_WRLCK` or `F_UNLCK`.
    pub kind: i32,
    /// The process.
    pub pid: u32,
}

const NS_PER_S: i64 = 1_000_000_000;

/// Seconds and nanoseconds of a time.
pub(crate) const fn split_time(ns: i64) -> (i64, u32) {
    (ns.div_euclid(NS_PER_S), ns.rem_euclid(NS_PER_S) as u32)
}

/// The time, clamped to what 64 bits hold: the years 1677 to 2262.
pub(crate) const fn join_time(seconds: i64, ns: u32) -> i64 {
    seconds.saturating_mul(NS_PER_S).saturating_add(ns as i64)
}

/// Bytes of a message, in order.
#[derive(Debug, Default)]
pub(crate) struct Out(pub(crate) Vec<u8>);

impl Out {
    pub(crate) fn u16(&mut self, value: u16) -> &mut Self {
        self.0.extend_from_slice(&value.to_ne_bytes());
        self
    }

    pub(crate) fn u32(&mut self, value: u32) -> &mut Self {
        self.0.extend_from_slice(&value.to_ne_bytes());
        self
    }

    pub(crate) fn i32(&mut self, value: i32) -> &mut Self {
        self.u32(value as u32)
    }

    pub(crate) fn u64(&mut self, value: u64) -> &mut Self {
        self.0.extend_from_slice(&value.to_ne_bytes());
        self
    }

    pub(crate) fn i64(&mut self, value: i64) -> &mut Self {
        self.u64(value as u64)
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }

    pub(crate) fn zeros(&mut self, count: usize) -> &mut Self {
        self.0.resize(self.0.len() + count, 0);
        self
    }

    /// `struct fuse_attr`.
    pub(crate) fn attr(&mut self, attr: &FileAttr) -> &mut Self {
        let [atime, mtime, ctime] = [attr.atime_ns, attr.mtime_ns, attr.ctime_ns].map(split_time);
        self.u64(attr.ino).u64(attr.size).u64(attr.blocks);
        self.i64(atime.0).i64(mtime.0).i64(ctime.0);
        self.u32(atime.1).u32(mtime.1).u32(ctime.1);
        self.u32(attr.kind.mode() | attr.mode & 0o7777).u32(attr.nlink).u32(attr.uid).u32(attr.gid);
        self.u32(attr.rdev).u32(attr.block_bytes).u32(0)
    }

    /// `struct fuse_sx_time`.
    fn statx_time(&mut self, ns: i64) -> &mut Self {
        let (seconds, ns) = split_time(ns);
        self.i64(seconds).u32(ns).u32(0)
    }

    /// `struct fuse_statx`.
    pub(crate) fn statx(&mut self, attr: &FileAttr) -> &mut Self {
        const BASIC_STATS_AND_BTIME: u32 = 0xfff;
        let (major, minor) = (rustix::fs::major(attr.rdev.into()), rustix::fs::minor(attr.rdev.into()));
        self.u32(BASIC_STATS_AND_BTIME).u32(attr.block_bytes).u64(0);
        self.u32(attr.nlink).u32(attr.uid).u32(attr.gid);
        self.u16((attr.kind.mode() | attr.mode & 0o7777) as u16).u16(0);
        self.u64(attr.ino).u64(attr.size).u64(attr.blocks).u64(0);
        [attr.atime_ns, attr.btime_ns, attr.ctime_ns, attr.mtime_ns].into_iter().for_each(|ns| {
            self.statx_time(ns);
        });
        self.u32(major).u32(minor).u32(0).u32(0).zeros(14 * 8)
    }

    /// `struct fuse_file_lock`.
    pub(crate) fn lock(&mut self, lock: &Lock) -> &mut Self {
        self.u64(lock.start).u64(lock.last).i32(lock.kind).u32(lock.pid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_before_1970_and_beyond_the_range_survive() {
        for ns in [0, 1, -1, -1_750_000_000, -3_000_000_000, 1_700_000_000_123_456_789, i64::MAX] {
            let (seconds, part) = split_time(ns);
            assert!(part < 1_000_000_000);
            assert_eq!(join_time(seconds, part), ns);
        }
        assert_eq!(split_time(-1_750_000_000), (-2, 250_000_000));
        assert_eq!(join_time(1 << 40, 0), i64::MAX);
        assert_eq!(join_time(-(1 << 40), 7), i64::MIN + 7);
    }

    #[test]
    fn structures_have_the_size_that_the_kernel_expects() {
        let attr = FileAttr {
            ino: 7,
            kind: FileType::Symlink,
            mode: 0o777,
            nlink: 1,
            uid: 2,
            gid: 3,
            rdev: 0,
            size: 4,
            blocks: 1,
            block_bytes: 4096,
            atime_ns: 0,
            mtime_ns: -1,
            ctime_ns: 0,
            btime_ns: 0,
        };
        let mut out = Out::default();
        out.attr(&attr);
        assert_eq!(out.0.len(), 88);
        assert_eq!(out.0[60..64], (libc::S_IFLNK | 0o777).to_ne_bytes());
        assert_eq!(out.0[32..40], (-1i64).to_ne_bytes());
        let mut out = Out::default();
        out.statx(&attr);
        assert_eq!(out.0.len(), 256);
        assert_eq!(out.0[28..30], ((libc::S_IFLNK | 0o777) as u16).to_ne_bytes());
        assert_eq!(out.0[112..120], (-1i64).to_ne_bytes());
        let mut out = Out::default();
        out.lock(&Lock { start: 0, last: 1, kind: 0, pid: 1 });
        assert_eq!(out.0.len(), 24);
    }
}
