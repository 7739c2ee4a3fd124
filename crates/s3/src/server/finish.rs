//! Runs requests to their end after their clients have gone.
//!
//! HTTP drops the future of a request when its connection breaks, at any point. Calls of the client library must be
//! awaited to their end, so a dropped future continues as a task of its own. Its body has ended by then, so the task
//! ends soon.

use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use tokio::runtime::Handle;
use tokio::task::JoinSet;

type BoxedFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Continues futures that were dropped.
#[derive(Clone)]
pub(crate) struct Finisher {
    runtime: Handle,
    tasks: Arc<Mutex<JoinSet<()>>>,
}

impl Finisher {
    pub(crate) fn new(runtime: Handle) -> Self {
        Self { runtime, tasks: Arc::new(Mutex::new(JoinSet::new())) }
    }

    /// Wraps `future` so that it runs to its end even if the wrapper is dropped.
    pub(crate) fn run<T: Send + 'static>(
        &self,
        future: impl Future<Output = T> + Send + 'static,
    ) -> Finish<T> {
        Finish { future: Some(Box::pin(future)), finisher: self.clone() }
    }

    /// Runs a dropped future as a task.
    fn leave<T: Send + 'static>(&self, future: BoxedFuture<T>) {
        let mut tasks = self.tasks.lock().expect("no holder of this lock panics");
        while tasks.try_join_next().is_some() {}
        tasks.spawn_on(
            async move {
                future.await;
            },
            &self.runtime,
        );
    }

    /// Waits until all dropped futures have ended.
    pub(crate) async fn finish(&self) {
        loop {
            let mut tasks = std::mem::take(&mut *self.tasks.lock().expect("no holder of this lock panics"));
            if tasks.is_empty() {
                return;
            }
            while tasks.join_next().await.is_some() {}
        }
    }
}

/// See [`Finisher::run`].
pub(crate) struct Finish<T: Send + 'static> {
    future: Option<BoxedFuture<T>>,
    finisher: Finisher,
}

impl<T: Send + 'static> Future for Finish<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let future = self.future.as_mut().expect("a future is not polled after its end");
        let output = std::task::ready!(future.as_mut().poll(context));
        self.future = None;
        Poll::Ready(output)
    }
}

impl<T: Send + 'static> Drop for Finish<T> {
    fn drop(&mut self) {
        if let Some(future) = self.future.take() {
            self.finisher.leave(future);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::oneshot;

    #[tokio::test]
    async fn what_is_dropped_half_way_goes_on_to_its_end() {
        let finisher = Finisher::new(Handle::current());
        let (go, wait) = oneshot::channel::<()>();
        let (done, was_done) = oneshot::channel();
        let mut future = Box::pin(finisher.run(async move {
            let _ = wait.await;
            let _ = done.send(7);
        }));
        assert!(futures_util::poll!(future.as_mut()).is_pending());
        drop(future);
        go.send(()).unwrap();
        finisher.finish().await;
        assert_eq!(was_done.await, Ok(7));
    }
}
