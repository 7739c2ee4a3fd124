//! The Forebay entries of the kernel's mount table.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

/// Prefix of the source of every Forebay mount.
pub(super) const SOURCE_PREFIX: &str = "forebay:";

/// A mount of a Forebay filesystem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountedFilesystem {
    /// Mount point.
    pub path: PathBuf,
    /// The source that was given when it was mounted.
    pub source: String,
}

/// All Forebay mounts, in the order of mounting: of two at one place the later covers the earlier.
pub fn forebay_mounts() -> io::Result<Vec<MountedFilesystem>> {
    let file =
        rustix::fs::open("/proc/self/mountinfo", rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty())?;
    let mut table = Vec::new();
    File::from(file).read_to_end(&mut table)?;
    Ok(parse(&table))
}

/// The format is that of proc(5): mount id, parent, device, root, mount point, options, tags, `-`, type, source.
fn parse(table: &[u8]) -> Vec<MountedFilesystem> {
    let mut mounts = Vec::new();
    for line in table.split(|byte| *byte == b'\n') {
        let fields: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
        let Some(dash) = fields.iter().position(|field| *field == b"-") else { continue };
        let (Some(path), Some(kind), Some(source)) =
            (fields.get(4), fields.get(dash + 1), fields.get(dash + 2))
        else {
            continue;
        };
        let source = String::from_utf8_lossy(&unescape(source)).into_owned();
        if kind.starts_with(b"fuse")
            && let Some(source) = source.strip_prefix(SOURCE_PREFIX)
        {
            let path = PathBuf::from(OsString::from_vec(unescape(path)));
            mounts.push(MountedFilesystem { path, source: source.to_owned() });
        }
    }
    mounts
}

/// Blanks and backslashes are written as a backslash and three octal digits.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, later)) = rest.split_first() {
        let digits = later.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        match digits.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) if *first == b'\\' => {
                out.push(byte);
                rest = &later[3..];
            }
            _ => {
                out.push(*first);
                rest = later;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_mounts_are_found_whatever_their_names() {
        let table = b"22 1 0:20 / /proc rw - proc proc rw\n\
            63 22 0:51 / /srv/a\\040b rw,relatime shared:1 - fuse forebay:/srv/dir\\040x\\043main rw,user_id=0\n\
            64 22 0:52 / /other rw - fuse.sshfs host: rw\nbroken line\n";
        let expected =
            MountedFilesystem { path: PathBuf::from("/srv/a b"), source: "/srv/dir x#main".to_owned() };
        assert_eq!(parse(table), [expected]);
    }

    #[test]
    fn escapes_are_undone() {
        assert_eq!(unescape(br"/a\040b\134c"), br"/a b\c");
        assert_eq!(unescape(br"/end\"), br"/end\");
    }
}
