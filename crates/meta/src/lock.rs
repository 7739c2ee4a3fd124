//! Locks of files.

use std::io;
use std::time::Duration;

use base::env::File;

/// Attempts to lock a file that another process uses, and the pause between two of them.
const ATTEMPTS: u32 = 100;
const PAUSE: Duration = Duration::from_millis(5);

/// Locks a file for this process alone. A process that is being started has the files of this one, and so their locks, until its program begins,
/// also those that this one has closed in the meantime: it is tried for half a second.
///
/// # Errors
/// `WouldBlock` if another process keeps the lock.
pub(crate) fn lock(file: &dyn File) -> io::Result<()> {
    for _ in 1..ATTEMPTS {
        match file.try_lock() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::thread::park_timeout(PAUSE),
            taken => return taken,
        }
    }
    file.try_lock()
}
