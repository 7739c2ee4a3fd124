//! Owners of ledgers through their public interface. One binary: each one more would compile the same code again.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod full;
mod owner;
mod records;
mod takeover;
