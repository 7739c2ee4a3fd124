//! Requests of the kernel.

use bytes::Bytes;

use crate::abi::{IN_HEADER_BYTES, Lock, join_time, opcode, setattr};

/// A request. Numbers of inodes are those that replies named.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Names the request in its reply.
    pub unique: u64,
    /// The inode that it is about.
    pub ino: u64,
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// The thread; 0 if it is the kernel's own or cannot be seen from here.
    pub pid: u32,
    /// What to do.
    pub op: Op,
}

/// What a request asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "as in the system calls of these names")]
pub enum Op {
    Lookup {
        name: Bytes,
    },
    /// The kernel has dropped references to inodes: the number of each. It expects no reply.
    Forget(Vec<(u64, u64)>),
    GetAttr,
    SetAttr(SetAttrRequest),
    ReadLink,
    Symlink {
        name: Bytes,
        target: Bytes,
    },
    MakeNode {
        name: Bytes,
        mode: u32,
        umask: u32,
        rdev: u32,
    },
    MakeDir {
        name: Bytes,
        mode: u32,
        umask: u32,
    },
    Unlink {
        name: Bytes,
    },
    RemoveDir {
        name: Bytes,
    },
    Rename {
        name: Bytes,
        new_parent: u64,
        new_name: Bytes,
        flags: u32,
    },
    /// The inode of the request is the directory of the new name.
    Link {
        target: u64,
        name: Bytes,
    },
    Open {
        flags: i32,
    },
    Create {
        name: Bytes,
        flags: i32,
        mode: u32,
        umask: u32,
    },
    /// O_TMPFILE in the directory.
    MakeUnnamed {
        mode: u32,
        umask: u32,
    },
    Read(ReadRequest),
    Write(WriteRequest),
    StatFs,
    /// The last reference to a file handle is gone.
    Release {
        handle: u64,
        flags: u32,
        owner: u64,
    },
    /// `fsync` of a file or directory.
    Sync,
    /// A descriptor was closed.
    Flush {
        owner: u64,
    },
    SetXattr {
        name: Bytes,
        value: Bytes,
        flags: i32,
    },
    GetXattr {
        name: Bytes,
        size: u32,
    },
    ListXattr {
        size: u32,
    },
    RemoveXattr {
        name: Bytes,
    },
    OpenDir,
    ReadDir {
        handle: u64,
        offset: u64,
        size: u32,
        plus: bool,
    },
    ReleaseDir {
        handle: u64,
    },
    GetLock {
        owner: u64,
        lock: Lock,
        flock: bool,
    },
    SetLock {
        handle: u64,
        owner: u64,
        lock: Lock,
        flock: bool,
        wait: bool,
    },
    /// The program that sent the other request got a signal.
    Interrupt {
        unique: u64,
    },
    Ioctl {
        command: u32,
        data: Bytes,
    },
    Allocate {
        offset: u64,
        length: u64,
        mode: i32,
    },
    Seek {
        offset: u64,
        whence: i32,
    },
    /// `wide`: the reply has 64 bits.
    CopyRange {
        offset: u64,
        to: u64,
        to_offset: u64,
        length: u64,
        wide: bool,
    },
    StatX,
    /// The kernel unmounts.
    Destroy,
}

/// A read of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadRequest {
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub size: u32,
    /// Flags of the open file.
    pub flags: i32,
}

/// A write to a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WriteRequest {
    /// First byte.
    pub offset: u64,
    /// The bytes. They share the buffer of the request: copy them to keep them for long.
    pub data: Bytes,
    /// `WRITE_*` of [`abi`](crate::abi).
    pub write_flags: u32,
    /// Flags of the open file.
    pub flags: i32,
}

/// A time to set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Time {
    /// The present time.
    Now,
    /// Nanoseconds since 1970.
    At(i64),
}

/// A change of attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(missing_docs, reason = "as in chmod(2), chown(2), truncate(2), utimensat(2)")]
pub struct SetAttrRequest {
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub size: Option<u64>,
    pub atime: Option<Time>,
    pub mtime: Option<Time>,
    /// The set-id bits must be cleared.
    pub kills_set_id: bool,
}

/// A request that is not understood.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BadRequest {
    /// It has no header: it cannot be answered.
    NoHeader,
    /// It ends early, or a name has no end.
    Malformed {
        /// See [`Request::unique`].
        unique: u64,
        /// Its kind.
        opcode: u32,
    },
    /// Its kind is unknown, or not supported.
    Unsupported {
        /// See [`Request::unique`].
        unique: u64,
        /// Its kind.
        opcode: u32,
    },
}

/// The rest of a request.
struct Fields<'a> {
    message: &'a Bytes,
    at: usize,
}

/// The request ends early.
struct Short;

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], Short> {
        let bytes = self.message.get(self.at..self.at + N).ok_or(Short)?;
        self.at += N;
        bytes.try_into().map_err(|_| Short)
    }

    fn u16(&mut self) -> Result<u16, Short> {
        self.take().map(u16::from_ne_bytes)
    }

    fn u32(&mut self) -> Result<u32, Short> {
        self.take().map(u32::from_ne_bytes)
    }

    fn i32(&mut self) -> Result<i32, Short> {
        self.take().map(i32::from_ne_bytes)
    }

    fn u64(&mut self) -> Result<u64, Short> {
        self.take().map(u64::from_ne_bytes)
    }

    fn bytes(&mut self, len: usize) -> Result<Bytes, Short> {
        let end = self.at.checked_add(len).filter(|end| *end <= self.message.len()).ok_or(Short)?;
        let bytes = self.message.slice(self.at..end);
        self.at = end;
        Ok(bytes)
    }

    /// A text that ends with a zero byte.
    fn text(&mut self) -> Result<Bytes, Short> {
        let rest = self.message.get(self.at..).ok_or(Short)?;
        let len = rest.iter().position(|byte| *byte == 0).ok_or(Short)?;
        let text = self.bytes(len)?;
        self.at += 1;
        Ok(text)
    }

    fn skip(&mut self, count: usize) -> Result<(), Short> {
        self.bytes(count).map(|_| ())
    }

    fn lock(&mut self) -> Result<Lock, Short> {
        Ok(Lock { start: self.u64()?, last: self.u64()?, kind: self.i32()?, pid: self.u32()? })
    }
}

impl Request {
    /// Parses a message of the kernel. The names and bytes in the result share its buffer.
    pub fn parse(message: &Bytes) -> Result<Self, BadRequest> {
        let mut fields = Fields { message, at: 0 };
        let header = |fields: &mut Fields<'_>| -> Result<(u32, [u64; 2], [u32; 3], u16), Short> {
            let (_, opcode) = (fields.u32()?, fields.u32()?);
            let numbers = [fields.u64()?, fields.u64()?];
            let caller = [fields.u32()?, fields.u32()?, fields.u32()?];
            let extensions = fields.u16()?;
            fields.skip(2)?;
            Ok((opcode, numbers, caller, extensions))
        };
        let (opcode, [unique, ino], [uid, gid, pid], extensions) =
            header(&mut fields).map_err(|Short| BadRequest::NoHeader)?;
        debug_assert_eq!(fields.at, IN_HEADER_BYTES);
        // Extensions, in units of 8 bytes, follow the body. None is wanted.
        let body_end = message.len().checked_sub(usize::from(extensions) * 8).filter(|end| *end >= fields.at);
        let malformed = |Short| BadRequest::Malformed { unique, opcode };
        let message = message.slice(..body_end.ok_or(Short).map_err(malformed)?);
        let mut fields = Fields { message: &message, at: fields.at };
        let op = parse_op(opcode, ino, &mut fields).map_err(malformed)?;
        let op = op.ok_or(BadRequest::Unsupported { unique, opcode })?;
        Ok(Self { unique, ino, uid, gid, pid, op })
    }
}

fn parse_op(opcode: u32, ino: u64, fields: &mut Fields<'_>) -> Result<Option<Op>, Short> {
    let op = match about_names(opcode, fields)? {
        Some(op) => Some(op),
        None => about_content(opcode, fields)?,
    };
    if op.is_some() { Ok(op) } else { about_others(opcode, ino, fields) }
}

/// Requests about directories.
fn about_names(opcode: u32, fields: &mut Fields<'_>) -> Result<Option<Op>, Short> {
    Ok(Some(match opcode {
        opcode::LOOKUP => Op::Lookup { name: fields.text()? },
        opcode::READLINK => Op::ReadLink,
        opcode::SYMLINK => Op::Symlink { name: fields.text()?, target: fields.text()? },
        opcode::MKNOD => {
            let (mode, rdev, umask) = (fields.u32()?, fields.u32()?, fields.u32()?);
            fields.skip(4)?;
            Op::MakeNode { name: fields.text()?, mode, umask, rdev }
        }
        opcode::MKDIR => {
            let (mode, umask) = (fields.u32()?, fields.u32()?);
            Op::MakeDir { name: fields.text()?, mode, umask }
        }
        opcode::UNLINK => Op::Unlink { name: fields.text()? },
        opcode::RMDIR => Op::RemoveDir { name: fields.text()? },
        opcode::RENAME => rename(fields, 0)?,
        opcode::RENAME2 => {
            let new_parent = fields.u64()?;
            let flags = fields.u32()?;
            fields.skip(4)?;
            Op::Rename { name: fields.text()?, new_parent, new_name: fields.text()?, flags }
        }
        opcode::LINK => Op::Link { target: fields.u64()?, name: fields.text()? },
        opcode::CREATE | opcode::TMPFILE => {
            let (flags, mode, umask) = (fields.i32()?, fields.u32()?, fields.u32()?);
            fields.skip(4)?;
            match opcode {
                opcode::CREATE => Op::Create { name: fields.text()?, flags, mode, umask },
                _ => Op::MakeUnnamed { mode, umask },
            }
        }
        opcode::OPENDIR => Op::OpenDir,
        opcode::READDIR | opcode::READDIRPLUS => {
            let (handle, offset, size) = (fields.u64()?, fields.u64()?, fields.u32()?);
            Op::ReadDir { handle, offset, size, plus: opcode == opcode::READDIRPLUS }
        }
        opcode::RELEASEDIR => Op::ReleaseDir { handle: fields.u64()? },
        _ => return Ok(None),
    }))
}

/// Requests about open files.
fn about_content(opcode: u32, fields: &mut Fields<'_>) -> Result<Option<Op>, Short> {
    Ok(Some(match opcode {
        opcode::OPEN => Op::Open { flags: fields.i32()? },
        opcode::READ => {
            fields.skip(8)?;
            let (offset, size) = (fields.u64()?, fields.u32()?);
            fields.skip(12)?;
            Op::Read(ReadRequest { offset, size, flags: fields.i32()? })
        }
        opcode::WRITE => write(fields)?,
        opcode::RELEASE => {
            let handle = fields.u64()?;
            fields.skip(4)?;
            Op::Release { handle, flags: fields.u32()?, owner: fields.u64()? }
        }
        opcode::FSYNC | opcode::FSYNCDIR => Op::Sync,
        opcode::FLUSH => {
            fields.skip(16)?;
            Op::Flush { owner: fields.u64()? }
        }
        opcode::GETLK | opcode::SETLK | opcode::SETLKW => lock(opcode, fields)?,
        opcode::IOCTL => {
            fields.skip(12)?;
            let command = fields.u32()?;
            fields.skip(8)?;
            let in_size = fields.u32()?;
            fields.skip(4)?;
            Op::Ioctl { command, data: fields.bytes(in_size as usize)? }
        }
        opcode::FALLOCATE => {
            fields.skip(8)?;
            Op::Allocate { offset: fields.u64()?, length: fields.u64()?, mode: fields.i32()? }
        }
        opcode::LSEEK => {
            fields.skip(8)?;
            Op::Seek { offset: fields.u64()?, whence: fields.i32()? }
        }
        opcode::COPY_FILE_RANGE | opcode::COPY_FILE_RANGE_64 => {
            fields.skip(8)?;
            let (offset, to) = (fields.u64()?, fields.u64()?);
            fields.skip(8)?;
            let (to_offset, length) = (fields.u64()?, fields.u64()?);
            Op::CopyRange { offset, to, to_offset, length, wide: opcode == opcode::COPY_FILE_RANGE_64 }
        }
        _ => return Ok(None),
    }))
}

/// Requests about inodes, and those of the connection.
fn about_others(opcode: u32, ino: u64, fields: &mut Fields<'_>) -> Result<Option<Op>, Short> {
    Ok(Some(match opcode {
        opcode::FORGET => Op::Forget(vec![(ino, fields.u64()?)]),
        opcode::BATCH_FORGET => Op::Forget(batch_forget(fields)?),
        opcode::GETATTR => Op::GetAttr,
        opcode::SETATTR => Op::SetAttr(set_attr(fields)?),
        opcode::STATX => Op::StatX,
        opcode::STATFS => Op::StatFs,
        opcode::SETXATTR => {
            let (size, flags) = (fields.u32()?, fields.i32()?);
            Op::SetXattr { name: fields.text()?, value: fields.bytes(size as usize)?, flags }
        }
        opcode::GETXATTR => {
            let size = fields.u32()?;
            fields.skip(4)?;
            Op::GetXattr { name: fields.text()?, size }
        }
        opcode::LISTXATTR => Op::ListXattr { size: fields.u32()? },
        opcode::REMOVEXATTR => Op::RemoveXattr { name: fields.text()? },
        opcode::INTERRUPT => Op::Interrupt { unique: fields.u64()? },
        opcode::DESTROY => Op::Destroy,
        _ => return Ok(None),
    }))
}

fn batch_forget(fields: &mut Fields<'_>) -> Result<Vec<(u64, u64)>, Short> {
    const ENTRY_BYTES: usize = 16;
    let count = fields.u32()? as usize;
    fields.skip(4)?;
    if count > (fields.message.len() - fields.at) / ENTRY_BYTES {
        return Err(Short);
    }
    (0..count).map(|_| Ok((fields.u64()?, fields.u64()?))).collect()
}

fn rename(fields: &mut Fields<'_>, flags: u32) -> Result<Op, Short> {
    let new_parent = fields.u64()?;
    Ok(Op::Rename { name: fields.text()?, new_parent, new_name: fields.text()?, flags })
}

fn set_attr(fields: &mut Fields<'_>) -> Result<SetAttrRequest, Short> {
    let valid = fields.u32()?;
    fields.skip(12)?;
    let size = fields.u64()?;
    fields.skip(8)?;
    let [atime_s, mtime_s] = [fields.u64()?, fields.u64()?];
    fields.skip(8)?;
    let [atime_ns, mtime_ns] = [fields.u32()?, fields.u32()?];
    fields.skip(4)?;
    let mode = fields.u32()?;
    fields.skip(4)?;
    let [uid, gid] = [fields.u32()?, fields.u32()?];
    let is = |bit| valid & bit != 0;
    let time = |bit, now, seconds: u64, ns| {
        is(bit).then(|| if is(now) { Time::Now } else { Time::At(join_time(seconds as i64, ns)) })
    };
    Ok(SetAttrRequest {
        mode: is(setattr::MODE).then_some(mode),
        uid: is(setattr::UID).then_some(uid),
        gid: is(setattr::GID).then_some(gid),
        size: is(setattr::SIZE).then_some(size),
        atime: time(setattr::ATIME, setattr::ATIME_NOW, atime_s, atime_ns),
        mtime: time(setattr::MTIME, setattr::MTIME_NOW, mtime_s, mtime_ns),
        kills_set_id: is(setattr::KILL_SUIDGID),
    })
}

fn write(fields: &mut Fields<'_>) -> Result<Op, Short> {
    fields.skip(8)?;
    let (offset, size, write_flags) = (fields.u64()?, fields.u32()?, fields.u32()?);
    fields.skip(8)?;
    let flags = fields.i32()?;
    fields.skip(4)?;
    Ok(Op::Write(WriteRequest { offset, data: fields.bytes(size as usize)?, write_flags, flags }))
}

fn lock(opcode: u32, fields: &mut Fields<'_>) -> Result<Op, Short> {
    let (handle, owner, lock) = (fields.u64()?, fields.u64()?, fields.lock()?);
    let flock = fields.u32()? & crate::abi::LK_FLOCK != 0;
    Ok(match opcode {
        opcode::GETLK => Op::GetLock { owner, lock, flock },
        _ => Op::SetLock { handle, owner, lock, flock, wait: opcode == opcode::SETLKW },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::Out;
    use proptest::prelude::*;

    /// A request with a body.
    fn message(opcode: u32, body: &[u8]) -> Bytes {
        let mut out = Out::default();
        out.u32((IN_HEADER_BYTES + body.len()) as u32).u32(opcode).u64(10).u64(11);
        out.u32(12).u32(13).u32(14).u32(0).bytes(body);
        out.0.into()
    }

    fn parse(opcode: u32, fill: impl FnOnce(&mut Out)) -> Op {
        let mut body = Out::default();
        fill(&mut body);
        let request = Request::parse(&message(opcode, &body.0)).unwrap();
        assert_eq!((request.unique, request.ino), (10, 11));
        assert_eq!((request.uid, request.gid, request.pid), (12, 13, 14));
        request.op
    }

    fn text(text: &'static str) -> Bytes {
        Bytes::from_static(text.as_bytes())
    }

    #[test]
    fn names_end_with_a_zero_byte() {
        let op = parse(opcode::RENAME2, |body| {
            body.u64(5).u32(1).u32(0).bytes(b"old\0new\0");
        });
        let expected = Op::Rename { name: text("old"), new_parent: 5, new_name: text("new"), flags: 1 };
        assert_eq!(op, expected);
        let unended = message(opcode::LOOKUP, b"name");
        let malformed = BadRequest::Malformed { unique: 10, opcode: opcode::LOOKUP };
        assert_eq!(Request::parse(&unended), Err(malformed));
    }

    #[test]
    fn the_values_of_a_change_are_those_that_count() {
        let op = parse(opcode::SETATTR, |body| {
            let valid = setattr::SIZE | setattr::ATIME | setattr::MTIME | setattr::MTIME_NOW | setattr::GID;
            body.u32(valid).u32(0).u64(0).u64(100).u64(0).i64(-2).u64(3).u64(0);
            body.u32(250_000_000).u32(0).u32(0).u32(0o644).u32(0).u32(1).u32(2).u32(0);
        });
        let expected = SetAttrRequest {
            gid: Some(2),
            size: Some(100),
            atime: Some(Time::At(-1_750_000_000)),
            mtime: Some(Time::Now),
            ..SetAttrRequest::default()
        };
        assert_eq!(op, Op::SetAttr(expected));
    }

    #[test]
    fn a_write_shares_the_buffer() {
        let op = parse(opcode::WRITE, |body| {
            body.u64(1).u64(4096).u32(5).u32(4).u64(0).i32(libc::O_DIRECT).u32(0).bytes(b"hello");
        });
        let Op::Write(write) = op else { panic!("{op:?}") };
        assert_eq!((write.offset, write.write_flags, write.flags), (4096, 4, libc::O_DIRECT));
        assert_eq!(write.data, text("hello"));
    }

    #[test]
    fn extensions_are_not_part_of_the_body() {
        let mut bytes = message(opcode::SYMLINK, b"name\0target\0ABCDEFGH").to_vec();
        bytes[36..38].copy_from_slice(&1u16.to_ne_bytes());
        let op = Request::parse(&bytes.clone().into()).unwrap().op;
        assert_eq!(op, Op::Symlink { name: text("name"), target: text("target") });
        bytes[36..38].copy_from_slice(&100u16.to_ne_bytes());
        assert!(matches!(Request::parse(&bytes.into()), Err(BadRequest::Malformed { .. })));
    }

    #[test]
    fn what_is_unknown_can_be_answered() {
        let unknown = message(9999, &[]);
        assert_eq!(Request::parse(&unknown), Err(BadRequest::Unsupported { unique: 10, opcode: 9999 }));
        assert_eq!(Request::parse(&Bytes::from_static(b"short")), Err(BadRequest::NoHeader));
    }

    #[test]
    fn a_batch_longer_than_its_message_is_refused() {
        let mut body = Out::default();
        body.u32(u32::MAX).u32(0).u64(1).u64(2);
        let malformed = BadRequest::Malformed { unique: 10, opcode: opcode::BATCH_FORGET };
        assert_eq!(Request::parse(&message(opcode::BATCH_FORGET, &body.0)), Err(malformed));
        let op = parse(opcode::BATCH_FORGET, |body| {
            body.u32(1).u32(0).u64(1).u64(2);
        });
        assert_eq!(op, Op::Forget(vec![(1, 2)]));
    }

    proptest! {
        #[test]
        fn no_message_panics(opcode in 0u32..60, body in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Request::parse(&message(opcode, &body));
        }
    }
}
