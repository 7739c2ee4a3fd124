//! POSIX access control lists, to the extent that a filesystem needs: inheritance, and their relation to mode bits.
//!
//! The bytes are those of the `system.posix_acl_*` attributes of Linux: a version (2) and entries of
//! tag u16, permissions u16, id u32, little-endian. Algorithms after POSIX 1003.1e draft 17, section 23.

use base::codec::{Reader, Writer};

/// The attribute that controls access.
pub const ACCESS: &[u8] = b"system.posix_acl_access";
/// The attribute of a directory that its new entries inherit.
pub const DEFAULT: &[u8] = b"system.posix_acl_default";

const VERSION: u32 = 2;
const USER_OBJ: u16 = 0x01;
const USER: u16 = 0x02;
const GROUP_OBJ: u16 = 0x04;
const GROUP: u16 = 0x08;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    tag: u16,
    perm: u16,
    id: u32,
}

/// A list of entries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Acl {
    entries: Vec<Entry>,
}

impl Acl {
    /// Decodes an attribute's value; `None` if it is not a valid list.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let mut r = Reader::new(bytes);
        if r.u32("version").ok()? != VERSION || !r.rest().len().is_multiple_of(8) {
            return None;
        }
        let mut entries = Vec::with_capacity(r.rest().len() / 8);
        while !r.rest().is_empty() {
            let entry = Entry { tag: r.u16("tag").ok()?, perm: r.u16("perm").ok()?, id: r.u32("id").ok()? };
            let known = matches!(entry.tag, USER_OBJ | USER | GROUP_OBJ | GROUP | MASK | OTHER);
            if !known || entry.perm > 7 {
                return None;
            }
            entries.push(entry);
        }
        let acl = Self { entries };
        let once = |tag| acl.entries.iter().filter(|entry| entry.tag == tag).count();
        let named = once(USER) + once(GROUP) > 0;
        let complete = once(USER_OBJ) == 1 && once(GROUP_OBJ) == 1 && once(OTHER) == 1;
        (complete && once(MASK) <= 1 && (!named || once(MASK) == 1)).then_some(acl)
    }

    /// Encodes the list as an attribute's value.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        w.u32(VERSION);
        for entry in &self.entries {
            w.u16(entry.tag).u16(entry.perm).u32(entry.id);
        }
        w.finish()
    }

    fn perm(&self, tag: u16) -> Option<u32> {
        self.entries.iter().find(|entry| entry.tag == tag).map(|entry| u32::from(entry.perm))
    }

    fn set(&mut self, tag: u16, perm: u32) {
        for entry in self.entries.iter_mut().filter(|entry| entry.tag == tag) {
            entry.perm = perm as u16 & 7;
        }
    }

    /// Whether the list is equivalent to mode bits.
    pub fn is_minimal(&self) -> bool {
        self.entries.len() == 3
    }

    /// The mode bits for this list: the group bits are the mask, if there is one.
    pub fn mode(&self) -> u32 {
        let part = |tag| self.perm(tag).unwrap_or(0);
        let group = self.perm(MASK).unwrap_or_else(|| part(GROUP_OBJ));
        part(USER_OBJ) << 6 | group << 3 | part(OTHER)
    }

    /// Whether a caller that is not the owner has all the rights in `want`. `member` tells whether the caller is in a
    /// group; `None` stands for the group of the inode.
    pub fn allows(&self, uid: u32, member: impl Fn(Option<u32>) -> bool, want: u32) -> bool {
        let mask = self.perm(MASK).unwrap_or(7);
        let grants = |entry: &Entry| u32::from(entry.perm) & mask & want == want;
        if let Some(entry) = self.entries.iter().find(|entry| entry.tag == USER && entry.id == uid) {
            return grants(entry);
        }
        let mine = |entry: &&Entry| match entry.tag {
            GROUP_OBJ => member(None),
            GROUP => member(Some(entry.id)),
            _ => false,
        };
        if self.entries.iter().any(|entry| mine(&entry)) {
            return self.entries.iter().filter(mine).any(grants);
        }
        self.perm(OTHER).unwrap_or(0) & want == want
    }

    /// The list after `chmod(mode)`.
    pub fn with_mode(mut self, mode: u32) -> Self {
        self.set(USER_OBJ, mode >> 6);
        let group = if self.perm(MASK).is_some() { MASK } else { GROUP_OBJ };
        self.set(group, mode >> 3);
        self.set(OTHER, mode);
        self
    }

    /// The access list and mode of a new inode in a directory with this default list.
    pub fn inherit(self, mode: u32) -> (Self, u32) {
        let granted = self.mode() & mode & 0o777;
        (self.with_mode(granted), mode & !0o777 | granted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn acl(entries: &[(u16, u16, u32)]) -> Acl {
        let entries = entries.iter().map(|(tag, perm, id)| Entry { tag: *tag, perm: *perm, id: *id });
        Acl { entries: entries.collect() }
    }

    #[test]
    fn a_default_list_decides_instead_of_the_umask() {
        let default =
            acl(&[(USER_OBJ, 7, 0), (USER, 6, 1000), (GROUP_OBJ, 5, 0), (MASK, 7, 0), (OTHER, 0, 0)]);
        let (access, mode) = default.inherit(0o666);
        assert_eq!(mode, 0o660);
        assert_eq!(access.perm(MASK), Some(6));
        assert_eq!(access.perm(GROUP_OBJ), Some(5));
        assert_eq!(access.mode(), 0o660);
    }

    #[test]
    fn named_users_and_groups_have_what_the_mask_leaves_them() {
        let list = acl(&[
            (USER_OBJ, 7, 0),
            (USER, 6, 1000),
            (GROUP_OBJ, 4, 0),
            (GROUP, 2, 50),
            (MASK, 6, 0),
            (OTHER, 1, 0),
        ]);
        let check = |uid, groups: &'static [Option<u32>], want| {
            list.allows(uid, |group| groups.contains(&group), want)
        };
        assert!(check(1000, &[], 6) && !check(1000, &[], 1), "a named user, and no further");
        assert!(check(1, &[None], 4) && !check(1, &[None], 2), "the inode's group");
        assert!(check(1, &[None, Some(50)], 2), "any group that grants it");
        assert!(!check(1, &[None, Some(50)], 6), "no single group grants both");
        assert!(!check(1, &[Some(50)], 1), "whoever is in a group is not one of the others");
        assert!(check(1, &[], 1) && !check(1, &[], 4));
    }

    #[test]
    fn bytes_round_trip_and_malformed_ones_are_refused() {
        let list = acl(&[(USER_OBJ, 7, 0), (GROUP_OBJ, 5, 0), (OTHER, 0, 0)]);
        let bytes = list.encode();
        assert_eq!(Acl::parse(&bytes), Some(list));
        assert_eq!(Acl::parse(&bytes[..bytes.len() - 1]), None);
        assert_eq!(Acl::parse(&acl(&[(USER_OBJ, 7, 0)]).encode()), None);
        let named_without_mask = acl(&[(USER_OBJ, 7, 0), (USER, 7, 5), (GROUP_OBJ, 5, 0), (OTHER, 0, 0)]);
        assert_eq!(Acl::parse(&named_without_mask.encode()), None);
    }

    #[test]
    fn chmod_changes_the_mask_and_not_the_group() {
        let list = acl(&[(USER_OBJ, 7, 0), (GROUP_OBJ, 5, 0), (GROUP, 7, 10), (MASK, 7, 0), (OTHER, 0, 0)]);
        let after = list.with_mode(0o640);
        assert_eq!((after.perm(GROUP_OBJ), after.perm(MASK), after.perm(OTHER)), (Some(5), Some(4), Some(0)));
    }
}
