//! Calls about the logs of the ledgers.

use hyper::Method;

use super::{AdminClient, CallError};
use crate::logs::LogMove;

impl AdminClient {
    /// Begins to move the logs to an engine.
    pub async fn move_log(&self, request: &LogMove) -> Result<(), CallError> {
        self.call(Method::POST, "/v1/log/move", Some(request)).await
    }
}
