//! chattr(1) and lsattr(1): the requests by which programs read and set the append-only and immutable flags.
//!
//! The kernel has checked that the caller may set the flags. The owner of the ledger enforces them: the kernel does not
//! know what a FUSE filesystem answered here.

use base::FsError;
use client::Guard;

/// `_IOR('f', 1, long)`, of which the kernel passes an int.
const GET_FLAGS: u32 = 0x8008_6601;
/// `_IOW('f', 2, long)`
const SET_FLAGS: u32 = 0x4008_6602;
/// `_IOR('X', 31, struct fsxattr)`
const GET_XFLAGS: u32 = 0x801c_581f;
/// `_IOW('X', 32, struct fsxattr)`
const SET_XFLAGS: u32 = 0x401c_5820;

/// Bytes of `struct fsxattr`: flags, extent size, extents, project, extent size for copies, padding.
const FSXATTR_BYTES: usize = 28;

/// The flag bits of one of the two request forms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Bits {
    append_only: u32,
    immutable: u32,
}

const FLAGS: Bits = Bits { append_only: 0x20, immutable: 0x10 };
const XFLAGS: Bits = Bits { append_only: 0x10, immutable: 0x8 };

/// A request for the flags.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GuardRequest {
    /// Get the flags, in the form that [`GuardAnswer::encode`] makes.
    Get(GuardAnswer),
    /// Set the flags.
    Set(Guard),
}

/// The form of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GuardAnswer {
    /// An int.
    Flags,
    /// A `struct fsxattr`.
    Xflags,
}

impl GuardAnswer {
    /// The bytes of the answer.
    pub(super) fn encode(self, guard: Guard) -> Vec<u8> {
        let of = |bits: Bits| {
            let bit = |is_set, bit| if is_set { bit } else { 0u32 };
            bit(guard.append_only, bits.append_only) | bit(guard.immutable, bits.immutable)
        };
        match self {
            Self::Flags => of(FLAGS).to_le_bytes().to_vec(),
            Self::Xflags => {
                let mut bytes = of(XFLAGS).to_le_bytes().to_vec();
                bytes.resize(FSXATTR_BYTES, 0);
                bytes
            }
        }
    }
}

/// Decodes a request.
///
/// # Errors
/// `NoAttribute` if it is another request; `Unsupported` if it sets attributes that Forebay does not store.
pub(super) fn parse(command: u32, data: &[u8]) -> Result<GuardRequest, FsError> {
    let set = |word: &[u8], bits: Bits| {
        let word = u32::from_le_bytes(word.try_into().map_err(|_| FsError::Invalid)?);
        if word & !(bits.append_only | bits.immutable) != 0 {
            return Err(FsError::Unsupported);
        }
        let guard =
            Guard { append_only: word & bits.append_only != 0, immutable: word & bits.immutable != 0 };
        Ok(GuardRequest::Set(guard))
    };
    match command {
        GET_FLAGS => Ok(GuardRequest::Get(GuardAnswer::Flags)),
        GET_XFLAGS => Ok(GuardRequest::Get(GuardAnswer::Xflags)),
        SET_FLAGS => set(data.get(..4).ok_or(FsError::Invalid)?, FLAGS),
        SET_XFLAGS => {
            let (word, rest) = data.split_at_checked(4).ok_or(FsError::Invalid)?;
            // Extent sizes and projects. The number of extents is output only.
            let is_kept = rest.len() == FSXATTR_BYTES - 4
                && [&rest[..4], &rest[8..]].concat().iter().all(|byte| *byte == 0);
            if is_kept { set(word, XFLAGS) } else { Err(FsError::Unsupported) }
        }
        _ => Err(FsError::NoAttribute),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: Guard = Guard { append_only: false, immutable: false };
    const APPEND: Guard = Guard { append_only: true, immutable: false };
    const BOTH: Guard = Guard { append_only: true, immutable: true };

    #[test]
    fn flags_are_told_and_set_in_both_ways() {
        for guard in [NONE, APPEND, BOTH] {
            for (form, get, set) in
                [(GuardAnswer::Flags, GET_FLAGS, SET_FLAGS), (GuardAnswer::Xflags, GET_XFLAGS, SET_XFLAGS)]
            {
                assert_eq!(parse(get, &[]), Ok(GuardRequest::Get(form)));
                assert_eq!(parse(set, &form.encode(guard)), Ok(GuardRequest::Set(guard)));
            }
        }
        assert_eq!(GuardAnswer::Flags.encode(BOTH), [0x30, 0, 0, 0]);
        assert_eq!(GuardAnswer::Xflags.encode(BOTH).len(), FSXATTR_BYTES);
    }

    #[test]
    fn what_is_not_kept_is_refused() {
        assert_eq!(parse(SET_FLAGS, &[0x40, 0, 0, 0]), Err(FsError::Unsupported), "no dump");
        assert_eq!(parse(SET_FLAGS, &[1]), Err(FsError::Invalid));
        let mut project = GuardAnswer::Xflags.encode(NONE);
        project[12] = 7;
        assert_eq!(parse(SET_XFLAGS, &project), Err(FsError::Unsupported));
        assert_eq!(parse(SET_XFLAGS, &[]), Err(FsError::Invalid));
        assert_eq!(parse(0x5401, &[]), Err(FsError::NoAttribute), "a terminal's");
    }
}
