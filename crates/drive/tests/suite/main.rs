//! A drive through its public interface. One binary: each one more would compile the same code again.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;
mod damage;
mod debt;
mod golden;
mod history;
mod host_full;
mod loop_device;
mod model;
mod real;
mod space;
