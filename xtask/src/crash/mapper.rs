//! Stores through a mapping, in a separate process: SIGBUS ends it when the filesystem is gone.

use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::Result;
use rustix::io::Errno;

use crate::node;

/// The program, in C because a mapping is unsafe.
const SOURCE: &str = include_str!("mapper.c");

/// Compiles the program.
pub(crate) fn build(binary: &Path) -> Result<()> {
    let source = binary.with_extension("c");
    std::fs::write(&source, SOURCE)?;
    node::run(Command::new("cc").args(["-O1", "-Wall", "-Werror", "-o"]).arg(binary).arg(&source))
}

/// A running program.
#[derive(Debug)]
pub(crate) struct Mapper {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Mapper {
    pub(crate) fn start(binary: &Path) -> io::Result<Self> {
        let mut child = Command::new(binary).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let input = child.stdin.take().expect("piped above");
        let output = BufReader::new(child.stdout.take().expect("piped above"));
        Ok(Self { child, input, output })
    }

    /// Stores bytes at `offset`, inside the file; with `is_synced`, after msync has returned.
    ///
    /// # Errors
    /// Those of the system calls; EIO if the program died by a signal.
    pub(crate) fn store(&mut self, path: &Path, offset: u64, data: &[u8], is_synced: bool) -> io::Result<()> {
        let died = |_| io::Error::from(Errno::IO);
        let header = format!("{offset} {} {} {}\n", data.len(), u8::from(is_synced), path.display());
        self.input.write_all(header.as_bytes()).map_err(died)?;
        self.input.write_all(data).map_err(died)?;
        self.input.flush().map_err(died)?;
        let mut line = String::new();
        self.output.read_line(&mut line).map_err(died)?;
        match line.trim().parse() {
            Ok(0) => Ok(()),
            Ok(errno) => Err(io::Error::from_raw_os_error(errno)),
            Err(_) => Err(Errno::IO.into()),
        }
    }
}

impl Drop for Mapper {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
