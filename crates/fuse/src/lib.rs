//! The kernel's FUSE protocol: requests, replies and notices, as `include/uapi/linux/fuse.h` has them, over `/dev/fuse`.
//!
//! A [`Session`] mounts a filesystem. Its threads read requests, each from a descriptor of its own, and give them to a
//! [`Serve`], which answers each by its [`Reply`] from any thread, now or later. A reply must leave by the descriptor
//! from which its request was read.
//!
//! No request makes its program unkillable: one that is not answered at once is registered ([`Reply::park`]), and if the
//! kernel says that its program got a deadly signal, it is answered with EINTR while the work goes on. Threads that
//! all hang are joined by more, so that signals are heard.

pub mod abi;
mod channel;
mod interrupt;
mod reply;
mod request;
mod session;
mod uring;

pub use abi::{FileAttr, FileType, InitFlags, Lock, OpenFlags};
pub use channel::{ATTRIBUTES_ONLY, Kernel};
pub use reply::{DirReply, Reply, StatFs, Terms};
pub use request::{BadRequest, Op, ReadRequest, Request, SetAttrRequest, Time, WriteRequest};
pub use rustix::io::Errno;
pub use session::{Options, Serve, Session, Transport};

/// Parses any bytes, for the fuzzers.
pub fn fuzz_request(bytes: &[u8]) {
    let _ = Request::parse(&bytes::Bytes::copy_from_slice(bytes));
}
