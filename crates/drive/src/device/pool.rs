//! A few threads with pread, pwrite and fdatasync: for systems where io_uring is forbidden.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use base::env::spawn_thread;
use wire::drive::IoPath;

use super::{Device, DeviceFiles, Done, Op, Wake};

const THREADS: usize = 4;

enum Event {
    Done(Done),
    Wake,
}

/// A device served by worker threads. The engine bounds its operations in flight, and thereby the channels.
pub(crate) struct PoolDevice {
    jobs: Option<Sender<Op>>,
    events: Receiver<Event>,
    threads: Vec<JoinHandle<()>>,
    waker: Arc<dyn Wake>,
}

struct PoolWaker {
    events: Mutex<Sender<Event>>,
}

impl Wake for PoolWaker {
    fn wake(&self) {
        // The receiver is gone only when the drive's thread is gone: then there is no thread to wake.
        let _ = self.events.lock().expect("no holder of this lock panics").send(Event::Wake);
    }
}

impl PoolDevice {
    pub(crate) fn new(files: &DeviceFiles) -> Self {
        let (jobs, receiver) = channel::<Op>();
        let (sender, events) = channel();
        let receiver = Arc::new(Mutex::new(receiver));
        let worker = |index: usize| {
            let (files, receiver, sender) = (files.clone(), receiver.clone(), sender.clone());
            spawn_thread(&format!("drive-io-{index}"), move || work(&files, &receiver, &sender))
        };
        let threads = (0..THREADS).map(worker).collect();
        let waker = Arc::new(PoolWaker { events: Mutex::new(sender) });
        Self { jobs: Some(jobs), events, threads, waker }
    }

    pub(crate) fn waker(&self) -> Arc<dyn Wake> {
        self.waker.clone()
    }
}

fn work(files: &DeviceFiles, jobs: &Mutex<Receiver<Op>>, events: &Sender<Event>) {
    loop {
        // One worker waits inside the lock, the others for the lock: either way one job wakes one worker.
        let job = jobs.lock().expect("no holder of this lock panics").recv();
        let Ok(op) = job else { return };
        if events.send(Event::Done(files.execute(op))).is_err() {
            return;
        }
    }
}

impl Device for PoolDevice {
    fn submit(&mut self, op: Op) {
        let jobs = self.jobs.as_ref().expect("jobs are closed in drop only");
        jobs.send(op).expect("workers end only when the jobs are closed");
    }

    fn wait(&mut self, done: &mut Vec<Done>, timeout: Option<Duration>) {
        let event = match timeout {
            Some(timeout) => self.events.recv_timeout(timeout).ok(),
            None => self.events.recv().ok(),
        };
        if let Some(Event::Done(one)) = event {
            done.push(one);
        }
        self.poll(done);
    }

    fn poll(&mut self, done: &mut Vec<Done>) {
        while let Ok(event) = self.events.try_recv() {
            if let Event::Done(one) = event {
                done.push(one);
            }
        }
    }

    fn io_path(&self) -> IoPath {
        IoPath::ThreadPool
    }
}

impl Drop for PoolDevice {
    fn drop(&mut self) {
        self.jobs = None;
        for thread in self.threads.drain(..) {
            // A worker that panicked has ended the process already.
            let _ = thread.join();
        }
    }
}
