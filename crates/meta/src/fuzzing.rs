//! Entry points for fuzzers to private decoders. Only in builds of fuzzers and tests.

pub use crate::log::fuzzing::{frame, sample_frame};

/// Decodes a POSIX access control list from an attribute.
pub fn acl(bytes: &[u8]) {
    if let Some(acl) = crate::owner::Acl::parse(bytes) {
        assert_eq!(acl.encode(), bytes);
    }
}
