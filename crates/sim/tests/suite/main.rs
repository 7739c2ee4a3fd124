//! The simulation as a whole, and the decoders of all crates. One binary: each one more would compile the same code again.
#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a test fails by panicking")]

mod decoders;
mod seeds;
mod spread;
