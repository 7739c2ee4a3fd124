//! A whole node in one thread under one seed: clients, owner, log, drives and upkeep, on simulated disks, time and
//! messages, with crashes and faults.
//!
//! The same seed gives the same run, event for event. The results that processes saw are checked against a model: some
//! order of their operations must explain them, and after a crash no acknowledged change may be missing.
//! `docs/develop/simulation.md` explains how to run it, what it checks and what it has found.

mod check;
mod cluster;
mod disks;
mod faults;
mod helpers;
mod history;
mod ledger;
mod linear;
mod locks;
mod model;
mod net;
mod node;
mod owners;
mod reads;
mod run;
mod runs;
mod scenario;
mod spread;
mod store;
mod trace;
mod workload;
mod world;

pub use run::{Outcome, mix, run};
pub use scenario::Scenario;
pub use spread::{Rebuild, rebuild};
