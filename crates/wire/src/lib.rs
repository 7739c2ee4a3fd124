//! The messages of every internal service, and the traits by which they are reached.
//!
//! A service in the same process implements its trait directly: that is the in-memory transport.

pub mod damage;
pub mod drive;
pub mod event;
pub mod guard;
pub mod meta;
pub mod moves;
pub mod object;
pub mod position;
pub mod store;
pub mod tier;

use std::future::Future;
use std::pin::Pin;

/// A boxed future, so that services can be trait objects.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;
