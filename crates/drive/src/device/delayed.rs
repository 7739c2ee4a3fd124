//! Simulated files with latency: an operation completes when its latency has passed, so completions may be out of
//! order. The device belongs to a task, so that one thread can run many drives.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;
use wire::drive::IoPath;

use super::{Device, DeviceFiles, Done, Op};

/// Operations by their due time; the number distinguishes those that are due at the same time.
pub(crate) struct DelayedDevice {
    files: DeviceFiles,
    in_flight: BTreeMap<(Instant, u64), Op>,
    submitted: u64,
}

impl DelayedDevice {
    pub(crate) fn new(files: DeviceFiles) -> Self {
        Self { files, in_flight: BTreeMap::new(), submitted: 0 }
    }

    /// Returns the next completion; pends for ever if no operation is under way. Cancel safe.
    pub(crate) async fn next(&mut self) -> Done {
        let Some(((due, number), _)) = self.in_flight.first_key_value() else {
            return std::future::pending().await;
        };
        let key = (*due, *number);
        tokio::time::sleep_until(key.0).await;
        let op = self.in_flight.remove(&key).expect("only this method and `poll` take operations out");
        self.files.execute(op)
    }
}

impl Device for DelayedDevice {
    fn submit(&mut self, op: Op) {
        let due = Instant::now() + self.files.direct.latency().unwrap_or_default();
        self.submitted += 1;
        self.in_flight.insert((due, self.submitted), op);
    }

    /// Does not wait: the task awaits [`DelayedDevice::next`] instead. Completes the next operation at once.
    fn wait(&mut self, done: &mut Vec<Done>, _timeout: Option<Duration>) {
        done.extend(self.in_flight.pop_first().map(|(_, op)| self.files.execute(op)));
    }

    fn poll(&mut self, done: &mut Vec<Done>) {
        let now = Instant::now();
        while let Some(next) = self.in_flight.first_entry()
            && next.key().0 <= now
        {
            done.push(self.files.execute(next.remove()));
        }
    }

    fn io_path(&self) -> IoPath {
        IoPath::Simulated
    }
}
