//! Drives below their share, in the order of what they lack.

use std::cmp::Reverse;
use std::collections::BTreeSet;

/// Drives below their share by domain. Domains and drives that lack most come first.
pub(super) struct Underfull {
    domains: BTreeSet<(Reverse<u64>, u32)>,
    drives: Vec<BTreeSet<(Reverse<u32>, u32)>>,
    lacking: Vec<u64>,
}

impl Underfull {
    pub(super) fn new(domains: usize) -> Self {
        Self { domains: BTreeSet::new(), drives: vec![BTreeSet::new(); domains], lacking: vec![0; domains] }
    }

    /// Notes that a drive lacks `lacks` positions now, and lacked `lacked` before.
    pub(super) fn set(&mut self, domain: u32, drive: u32, lacked: u32, lacks: u32) {
        if lacked == lacks {
            return;
        }
        let (drives, lacking) = (&mut self.drives[domain as usize], &mut self.lacking[domain as usize]);
        drives.remove(&(Reverse(lacked), drive));
        self.domains.remove(&(Reverse(*lacking), domain));
        *lacking = *lacking + u64::from(lacks) - u64::from(lacked);
        if lacks > 0 {
            drives.insert((Reverse(lacks), drive));
        }
        if *lacking > 0 {
            self.domains.insert((Reverse(*lacking), domain));
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.domains.is_empty()
    }

    /// Domains with such drives.
    pub(super) fn domains(&self) -> impl Iterator<Item = u32> + '_ {
        self.domains.iter().map(|(_, domain)| *domain)
    }

    /// Such drives of a domain.
    pub(super) fn drives(&self, domain: u32) -> impl Iterator<Item = u32> + '_ {
        self.drives[domain as usize].iter().map(|(_, drive)| *drive)
    }
}
