//! Ledgers: the metadata of filesystems as ordered, fenced logs, the state they produce, and their owners.

pub mod batch;
pub mod fsck;
#[cfg(any(fuzzing, feature = "fuzzing"))]
pub mod fuzzing;
pub mod history;
mod keeper;
pub mod keys;
mod lock;
pub mod log;
pub mod owner;
pub mod records;
pub mod state;
pub mod store;
pub mod values;

pub use keeper::Keeper;
