//! The messages of every internal service, and the traits by which they are reached.
//!
//! A service in the same process implements its trait directly: that is the in-memory transport.

pub mod claim;
pub mod cluster;
pub mod damage;
pub mod drive;
pub mod encoding;
pub mod event;
pub mod frame;
pub mod guard;
pub mod identity;
pub mod link;
pub mod lock;
pub mod message;
pub mod meta;
pub mod moves;
pub mod object;
mod piece;
pub mod position;
pub mod replica;
pub mod rights;
pub mod store;
pub mod tier;
pub mod trace;
pub mod view;

use std::future::Future;
use std::pin::Pin;

/// A boxed future, so that services can be trait objects.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;
