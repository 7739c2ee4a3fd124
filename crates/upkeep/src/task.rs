//! The task of a reconciler: begun once, ended in good order.

use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// A task that works until it is told to stop, or until this is dropped.
pub(crate) struct Task {
    stop: watch::Sender<bool>,
    handle: JoinHandle<()>,
}

/// By which a task knows that it is to end.
#[derive(Clone)]
pub(crate) struct Stopped(watch::Receiver<bool>);

impl Task {
    /// Begins `work`.
    pub(crate) fn start<F>(runtime: &Handle, work: impl FnOnce(Stopped) -> F) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let (stop, stopped) = watch::channel(false);
        Self { stop, handle: runtime.spawn(work(Stopped(stopped))) }
    }

    /// Ends it after the step under way.
    pub(crate) async fn stop(self) {
        // A task that has ended already needs no telling.
        let _ = self.stop.send(true);
        let _ = self.handle.await;
    }
}

impl Stopped {
    /// Whether to end.
    pub(crate) fn now(&self) -> bool {
        *self.0.borrow() || self.0.has_changed().is_err()
    }

    /// Rests so long, or until it is time to end.
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
    fn a_task_ends_when_it_is_told_to_and_when_it_is_forgotten() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let both = async {
            Task::start(&Handle::current(), rest).stop().await;
            let Task { stop, handle } = Task::start(&Handle::current(), rest);
            tokio::task::yield_now().await;
            drop(stop);
            handle.await.unwrap();
        };
        // Far less than the rest.
        runtime.block_on(async { tokio::time::timeout(Duration::from_secs(60), both).await }).unwrap();
    }
}
