//! The task of a reconciler: it is started once and ends after the step under way.

use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// A task that works until it is stopped or this is dropped.
pub(crate) struct Task {
    stop: watch::Sender<bool>,
    handle: JoinHandle<()>,
}

/// Tells a task when to end.
#[derive(Clone)]
pub(crate) struct Stopped(watch::Receiver<bool>);

impl Task {
    /// Starts `work`.
    pub(crate) fn start<F>(runtime: &Handle, work: impl FnOnce(Stopped) -> F) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let (stop, stopped) = watch::channel(false);
        Self { stop, handle: runtime.spawn(work(Stopped(stopped))) }
    }

    /// Ends the task after the step under way.
    pub(crate) async fn stop(self) {
        // A task that has already ended no longer listens.
        let _ = self.stop.send(true);
        let _ = self.handle.await;
    }
}

impl Stopped {
    /// Whether to end.
    pub(crate) fn now(&self) -> bool {
        *self.0.borrow() || self.0.has_changed().is_err()
    }

    /// Rests for `pause`, or until it is time to end.
    pub(crate) async fn or_after(&mut self, pause: Duration) {
        let _ = tokio::time::timeout(pause, self.0.wait_for(|stop| *stop)).await;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    async fn rest(mut stopped: Stopped) {
        while !stopped.now() {
            stopped.or_after(Duration::from_secs(3600)).await;
        }
    }

    #[test]
    fn a_task_ends_when_it_is_stopped_and_when_its_handle_is_dropped() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let both = async {
            Task::start(&Handle::current(), rest).stop().await;
            let Task { stop, handle } = Task::start(&Handle::current(), rest);
            tokio::task::yield_now().await;
            drop(stop);
            handle.await.unwrap();
        };
        // Far less than the pause of an hour.
        runtime.block_on(async { tokio::time::timeout(Duration::from_secs(60), both).await }).unwrap();
    }
}
