//! Doors for the fuzzers to decoders that are private otherwise. Only in builds of fuzzers and tests.

pub use crate::log::fuzzing::{frame, sample_frame};

/// A POSIX access control list as it is in an attribute.
pub fn acl(bytes: &[u8]) {
    if let Some(acl) = crate::owner::Acl::parse(bytes) {
        assert_eq!(acl.encode(), bytes);
    }
}
