//! Calls about the logs of the ledgers.

use hyper::Method;

use super::{AdminClient, CallError};
use crate::logs::{LogMove, MoveLedgers};

impl AdminClient {
    /// Begins to move the logs to an engine.
    pub async fn move_log(&self, request: &LogMove) -> Result<(), CallError> {
        self.call(Method::POST, "/v1/log/move", Some(request)).await
    }

    /// Gives all ledgers to another node.
    pub async fn move_ledgers(&self, request: &MoveLedgers) -> Result<(), CallError> {
        self.call(Method::POST, "/v1/ledgers/owner", Some(request)).await
    }
}
