//! `audit`: reads the log of requests to the S3 endpoint, with or without a running node.

use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use base::env::{Caching, OpenMode};
use serde_json::Value;

use super::env;
use super::output::Format;
use crate::node::NodeDir;

/// Interval of checks for new lines.
const POLL: Duration = Duration::from_millis(200);

/// Prints the last lines; with `follow` also new lines, until it is interrupted.
pub(super) fn tail(dir: &Path, lines: usize, follow: bool, format: Format) -> Result<()> {
    let mut reader = Reader::new(NodeDir::new(dir).audit());
    let last = reader.last(lines)?;
    if !show(&last, format)? || !follow {
        return Ok(());
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
    while show(&reader.more()?, format)? {
        runtime.block_on(async { tokio::time::sleep(POLL).await });
    }
    Ok(())
}

/// Prints lines. Returns whether the output still has a reader.
fn show(lines: &[String], format: Format) -> Result<bool> {
    let mut out = std::io::stdout().lock();
    let written = lines.iter().try_for_each(|line| match format {
        Format::Json => writeln!(out, "{line}"),
        Format::Text => writeln!(out, "{}", in_words(line)),
    });
    match written.and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error).context("cannot print"),
    }
}

/// Formats a line of the log for people.
fn in_words(line: &str) -> String {
    let Ok(record) = serde_json::from_str::<Value>(line) else { return line.to_owned() };
    let text = |name: &str| record[name].as_str().unwrap_or_default().to_owned();
    if let Some(lost) = record["lost"].as_u64() {
        return format!("{}  {lost} requests are missing here", text("time"));
    }
    let number = |name: &str| record[name].as_u64().unwrap_or_default();
    let user = Some(text("user")).filter(|user| !user.is_empty()).unwrap_or_else(|| "-".to_owned());
    let place = match (text("bucket"), text("key")) {
        (bucket, key) if key.is_empty() => bucket,
        (bucket, key) => format!("{bucket}/{key}"),
    };
    // Keys may contain control characters of terminals.
    let place: String = place.escape_debug().collect();
    format!(
        "{}  {:<3} {} {:<12} {:<20} {place}  in={} out={} ms={:.1} from={}",
        text("time"),
        number("status"),
        if text("error").is_empty() { "ok".to_owned() } else { text("error") },
        user,
        text("operation"),
        number("bytes_in"),
        number("bytes_out"),
        number("duration_us") as f64 / 1e3,
        text("source_ip"),
    )
}

/// Reads the files of the log one after another.
struct Reader {
    dir: PathBuf,
    /// The file that was read last, and the offset in it.
    file: Option<(PathBuf, u64)>,
}

impl Reader {
    fn new(dir: PathBuf) -> Self {
        Self { dir, file: None }
    }

    fn files(&self) -> Result<Vec<PathBuf>> {
        s3::audit_files(&env(), &self.dir).with_context(|| format!("cannot list {}", self.dir.display()))
    }

    /// The complete lines of a file after an offset, and the offset of their end.
    fn lines(path: &Path, from: u64) -> Result<(Vec<String>, u64)> {
        let read = || {
            let file = env().files.open(path, OpenMode::Existing, Caching::Buffered)?;
            let mut bytes = vec![0; file.len()?.saturating_sub(from) as usize];
            file.read_at(&mut bytes, from)?;
            Ok::<_, std::io::Error>(bytes)
        };
        let mut bytes = read().with_context(|| format!("cannot read {}", path.display()))?;
        bytes.truncate(bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1));
        let text = String::from_utf8_lossy(&bytes);
        Ok((text.lines().map(str::to_owned).collect(), from + bytes.len() as u64))
    }

    /// The last `count` lines of all files.
    fn last(&mut self, count: usize) -> Result<Vec<String>> {
        let mut found: Vec<String> = Vec::new();
        for path in self.files()?.into_iter().rev() {
            let (mut lines, end) = Self::lines(&path, 0)?;
            self.file.get_or_insert((path, end));
            lines.append(&mut found);
            found = lines;
            if found.len() >= count {
                break;
            }
        }
        Ok(found.split_off(found.len().saturating_sub(count)))
    }

    /// New lines since the last call.
    fn more(&mut self) -> Result<Vec<String>> {
        let mut found = Vec::new();
        for path in self.files()? {
            let from = match &self.file {
                Some((known, _)) if path < *known => continue,
                Some((known, end)) if path == *known => *end,
                _ => 0,
            };
            let (lines, end) = Self::lines(&path, from)?;
            found.extend(lines);
            self.file = Some((path, end));
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn append(path: &Path, text: &str) {
        let file = env().files.open(path, OpenMode::Create, Caching::Buffered).unwrap();
        file.write_at(text.as_bytes(), file.len().unwrap()).unwrap();
    }

    #[test]
    fn lines_are_read_across_files_once_they_are_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        append(&path("2026-01-01T00-00-00.jsonl"), "1\n2\n");
        append(&path("2026-01-02T00-00-00.jsonl"), "3\nha");
        let mut reader = Reader::new(dir.path().to_owned());
        assert_eq!(reader.last(2).unwrap(), ["2", "3"]);
        assert!(reader.more().unwrap().is_empty());
        append(&path("2026-01-02T00-00-00.jsonl"), "lf\n");
        append(&path("2026-01-03T00-00-00.jsonl"), "5\n");
        assert_eq!(reader.more().unwrap(), ["half", "5"]);
        assert_eq!(Reader::new(dir.path().to_owned()).last(9).unwrap(), ["1", "2", "3", "half", "5"]);
        assert!(Reader::new(dir.path().join("none")).last(1).is_err());
    }

    #[test]
    fn people_read_what_was_done() {
        let line = r#"{"time":"T","duration_us":1500,"request_id":"1","user":"ann","operation":"GetObject",
            "bucket":"b","key":"k\u001b","status":404,"error":"NoSuchKey","bytes_in":0,"bytes_out":9,"source_ip":"::1"}"#;
        assert_eq!(
            in_words(line),
            "T  404 NoSuchKey ann          GetObject            b/k\\u{1b}  in=0 out=9 ms=1.5 from=::1"
        );
        assert_eq!(in_words(r#"{"time":"T","lost":3}"#), "T  3 requests are missing here");
    }
}
