//! S3 for clients: protocol, server, users and keys, policies, audit log.
//!
//! [`Server`] listens and passes requests to the [`Gate`]. The gate verifies signatures, asks [`Identities`] for
//! permission, and runs the object operations of one [`client::Client`]. A bucket is a top-level directory, a key the
//! path of a file below it.

mod access;
mod accounts;
mod answer;
mod api;
mod audit;
mod bucket;
mod cors;
mod error;
mod gate;
mod hash;
mod identity;
mod instant;
mod key;
mod minio;
mod multirange;
mod ops;
pub mod policy;
mod read;
mod route;
mod screen;
mod seal;
mod server;
pub mod sts;
mod tls;

pub use accounts::{
    AccountKey, AccountSet, AccountUser, Accounts, SESSION_KEY_PREFIX, new_access_key, new_secret,
};
pub use audit::{AuditLog, AuditStat, audit_files};
pub use gate::{Gate, GateOptions};
pub use identity::{
    Audit, AuditEntry, AuditRecord, Identities, Identity, IdentityError, PolicyFacts, PolicyRequest, Secret,
    User, Verdict,
};
pub use instant::format_s as format_instant;
pub use key::{EntryIs, KeyError, ObjectKey, sort_name};
pub use seal::{NodeKey, Purpose, from_base64, to_base64};
#[cfg(any(fuzzing, feature = "fuzzing"))]
pub use server::serve_stream;
pub use server::{Limits, ListenError, Server};
pub use tls::{TlsConfig, TlsError, TlsFiles};
