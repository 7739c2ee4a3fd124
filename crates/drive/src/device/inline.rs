//! A device that does every operation at once on the calling thread: simulation, opening and closing.

use std::time::Duration;

use wire::drive::IoPath;

use super::{Device, DeviceFiles, Done, Op};

/// A device whose operations complete when they are submitted.
pub(crate) struct InlineDevice {
    files: DeviceFiles,
    done: Vec<Done>,
}

impl InlineDevice {
    pub(crate) fn new(files: DeviceFiles) -> Self {
        Self { files, done: Vec::new() }
    }
}

impl Device for InlineDevice {
    fn submit(&mut self, op: Op) {
        self.done.push(self.files.execute(op));
    }

    fn wait(&mut self, done: &mut Vec<Done>, _timeout: Option<Duration>) {
        done.append(&mut self.done);
    }

    fn poll(&mut self, done: &mut Vec<Done>) {
        done.append(&mut self.done);
    }

    fn io_path(&self) -> IoPath {
        IoPath::Simulated
    }
}
