//! The number of a user's request. It goes with all requests that this one causes, so that the logs of all nodes can be searched for it.
//!
//! Work that continues after the answer, or serves several requests at once, has none: it is 0 there.

use tokio::task_local;

task_local! {
    static TRACE: u64;
}

/// The number of the request that this task works on; 0: none.
pub fn current() -> u64 {
    TRACE.try_with(|trace| *trace).unwrap_or(0)
}

/// Works on a request.
pub async fn within<F: Future>(trace: u64, work: F) -> F::Output {
    TRACE.scope(trace, work).await
}

/// Works on a request for one step.
pub fn step<T>(trace: u64, work: impl FnOnce() -> T) -> T {
    TRACE.sync_scope(trace, work)
}

/// The number as logs and S3 show it.
pub fn text(trace: u64) -> String {
    format!("{trace:016X}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_a_request_does_knows_it_and_nothing_else_does() {
        assert_eq!(current(), 0);
        let inner = within(7, async {
            tokio::task::yield_now().await;
            let spawned = tokio::spawn(async { current() }).await;
            (current(), spawned.ok(), step(9, current), within(8, async { current() }).await)
        });
        assert_eq!(inner.await, (7, Some(0), 9, 8));
        assert_eq!(current(), 0);
        assert_eq!(text(0x2a), "000000000000002A");
    }
}
