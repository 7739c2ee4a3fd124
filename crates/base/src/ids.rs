//! Ids. Each is a type of its own, so that one cannot be passed for another.

use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, serde::Serialize, serde::Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }
    };
}

id!(
    /// A node (a server process) of the cluster.
    NodeId(u32)
);
id!(
    /// A drive's number in the control ledger; never reused.
    DriveId(u32)
);
id!(
    /// The metadata of one filesystem; 0 is the control ledger.
    LedgerId(u32)
);
id!(
    /// A placement group: an ordered list of drives in distinct failure domains.
    PgId(u32)
);
id!(
    /// An immutable run of file bytes on drives; unique inside a ledger and never reused.
    ExtentId(u64)
);
id!(
    /// The map from file offsets to extents of one file generation; never reused. It may tell its file: see
    /// [`MapId::file`].
    MapId(u64)
);
id!(
    /// An inode number; never reused.
    Ino(u64)
);
id!(
    /// A client's registration with an owner.
    SessionId(u64)
);
id!(
    /// One grant of a lease; a release names the grant it gives back.
    LeaseId(u64)
);
id!(
    /// A fencing number: of an owner in a log, of a placement group, of the cluster map.
    Epoch(u64)
);
id!(
    /// The position of a batch in a ledger's log.
    Seq(u64)
);
id!(
    /// One stretch of a ledger's history: each owner that takes over begins a new one, with a random number.
    Lineage(u64)
);
id!(
    /// Which shard of a stripe: 0..k are data, k..n parity.
    ShardIndex(u8)
);

impl MapId {
    /// Set in the number of a map that tells its file.
    const OF_FILE: u64 = 1 << 62;
    /// Bits of the inode's number; those between them and [`Self::OF_FILE`] count the file's maps.
    const INO_BITS: u32 = 48;
    const NEXT: u64 = 1 << Self::INO_BITS;

    /// The first map of a file. `None` if the inode's number is too large for one that tells it.
    pub fn first_of(ino: Ino) -> Option<Self> {
        (ino.0 < Self::NEXT).then_some(Self(Self::OF_FILE | ino.0))
    }

    /// The map that replaces this one in its file. `None` if this one does not tell its file, or was the last that can.
    pub fn next_of_file(self) -> Option<Self> {
        self.file()?;
        let next = Self(self.0 + Self::NEXT);
        (next.file() == self.file()).then_some(next)
    }

    /// The file whose map it is or was, if its number tells that.
    pub fn file(self) -> Option<Ino> {
        (self.0 >> 62 == 1).then_some(Ino(self.0 & (Self::NEXT - 1)))
    }
}

impl Ino {
    /// The root directory of every filesystem, as FUSE numbers it.
    pub const ROOT: Ino = Ino(1);
}

macro_rules! uuid {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub [u8; 16]);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                for (index, byte) in self.0.iter().enumerate() {
                    if matches!(index, 4 | 6 | 8 | 10) {
                        f.write_str("-")?;
                    }
                    write!(f, "{byte:02x}")?;
                }
                Ok(())
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }

        impl std::str::FromStr for $name {
            type Err = ParseUuidError;

            fn from_str(text: &str) -> Result<Self, ParseUuidError> {
                let digits: Vec<u8> = text.bytes().filter(|byte| *byte != b'-').collect();
                if digits.len() != 32 {
                    return Err(ParseUuidError);
                }
                let mut bytes = [0u8; 16];
                for (index, pair) in digits.chunks(2).enumerate() {
                    let pair = std::str::from_utf8(pair).map_err(|_| ParseUuidError)?;
                    bytes[index] = u8::from_str_radix(pair, 16).map_err(|_| ParseUuidError)?;
                }
                Ok(Self(bytes))
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = <String as serde::Deserialize>::deserialize(deserializer)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}

uuid!(
    /// Identifies a cluster for ever; written on every drive and in every blob name.
    ClusterId
);
uuid!(
    /// Identifies a drive. It is written on the drive and stays the same if the drive moves.
    DriveUuid
);

/// Bits of the epoch of an owner below those that count recoveries.
const RECOVERY_SHIFT: u32 = 48;
/// Distance between the last epoch that is known when logs are lost, and the first one after their recovery: further than owners
/// that are not known can have come.
const RECOVERY_LEAP: u64 = 1 << 10;

impl Epoch {
    /// How often the logs of a cluster were lost and begun anew before this epoch of an owner. The upper 16 bits.
    #[must_use]
    pub fn recoveries(self) -> u32 {
        (self.0 >> RECOVERY_SHIFT) as u32
    }

    /// The last epoch before the first owner after a recovery, which is the `recoveries`th. All earlier owners have lower ones.
    #[must_use]
    pub fn recovered(self, recoveries: u32) -> Self {
        let low = self.0 & ((1 << RECOVERY_SHIFT) - 1);
        Self(u64::from(recoveries) << RECOVERY_SHIFT | (low + RECOVERY_LEAP))
    }
}

/// The text is not 32 hexadecimal digits, with or without dashes.
#[derive(Debug, thiserror::Error)]
#[error("not an id of 32 hexadecimal digits")]
pub struct ParseUuidError;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_of_a_file_tell_it_until_their_numbers_end() {
        let first = MapId::first_of(Ino(7)).unwrap();
        assert_eq!((first.file(), first.0), (Some(Ino(7)), 1 << 62 | 7));
        let mut maps = vec![first];
        while let Some(next) = maps.last().and_then(|map| map.next_of_file()) {
            assert!(next > maps[maps.len() - 1]);
            maps.push(next);
        }
        assert!(maps.iter().all(|map| map.file() == Some(Ino(7))));
        assert_eq!(maps.len(), 1 << 14);
        // Of ordinary, composed and too large numbers nothing is told.
        assert_eq!(MapId(7).file(), None);
        assert_eq!(MapId(1 << 63 | 7).file(), None);
        assert_eq!(MapId(7).next_of_file(), None);
        assert_eq!(MapId::first_of(Ino(1 << 48)), None);
    }

    #[test]
    fn epochs_after_a_recovery_are_above_all_before() {
        let lost = Epoch(7);
        assert_eq!(lost.recoveries(), 0);
        let next = lost.recovered(1);
        assert!(next > Epoch(lost.0 + 1000) && next.recoveries() == 1, "{next}");
        let third = Epoch(next.0 + 3).recovered(2);
        assert!(third > next && third.recoveries() == 2);
        // Numbers made from the lower bits stay unique, too.
        assert!(third.0 << 40 != next.0 << 40);
    }

    #[test]
    fn uuid_text_round_trips() {
        let id = ClusterId(*b"0123456789abcdef");
        assert_eq!(id.to_string(), "30313233-3435-3637-3839-616263646566");
        assert_eq!(id.to_string().parse::<ClusterId>().unwrap(), id);
        assert!("30313233".parse::<ClusterId>().is_err());
    }
}
