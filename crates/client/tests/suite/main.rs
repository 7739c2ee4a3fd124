//! The client against a real owner and real drives, in one process. One binary: each one more would compile the same code again.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod budget;
mod common;
mod damage;
mod early;
mod kernel_cache;
mod limits;
mod locks;
mod model;
mod objects;
mod pack;
mod placement;
mod profiles;
mod repair;
mod sharing;
mod socket;
mod takeover;
mod tier;
mod times;
mod verify;
