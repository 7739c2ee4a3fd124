//! POSIX protocols to [`client`], and nothing else. FUSE now; NFS is served over the mount later.

pub mod fuse;
