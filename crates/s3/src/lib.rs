//! S3 to the client. Today only the rules by which object keys are paths; the protocol is not served yet.

mod key;

pub use key::{EntryIs, KeyError, ObjectKey, sort_name};
