//! Copies of a store in parts: their checksum, and the check of parts as they arrive.

use base::checksum::Crc32c;
use bytes::Bytes;
use wire::replica::CopyPart;

use crate::state::Applied;

/// The checksum of a copy.
#[derive(Default)]
pub(super) struct CopySum(Crc32c);

impl CopySum {
    pub(super) fn add(&mut self, pairs: &[(Bytes, Bytes)]) {
        for bytes in pairs.iter().flat_map(|(key, value)| [key, value]) {
            self.0.update(&(bytes.len() as u32).to_le_bytes());
            self.0.update(bytes);
        }
    }

    pub(super) fn finish(&self) -> u32 {
        self.0.finish()
    }
}

/// A part of a copy is damaged, or is not the one that follows. The copy is of no use: another one must begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a copy of the owner's store arrived damaged")]
pub struct BadPart;

/// Checks the parts of a copy as they arrive: all are of one copy and of one position, none is missing or came twice, and the content is
/// what the owner sent.
#[derive(Default)]
pub struct CopyCheck {
    /// The copy and its position; `None` before the first part.
    begun: Option<(u64, Applied)>,
    /// The last key so far.
    after: Bytes,
    sum: CopySum,
    is_complete: bool,
}

impl CopyCheck {
    /// What is to be asked for next: the copy, and the key behind which its next part begins.
    #[must_use]
    pub fn next(&self) -> (u64, Bytes) {
        (self.begun.map_or(0, |(copy, _)| copy), self.after.clone())
    }

    /// Whether the last part has come.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// Takes the next part.
    ///
    /// # Errors
    /// [`BadPart`] if it is not.
    pub fn take(&mut self, part: &CopyPart) -> Result<(), BadPart> {
        let at = Applied { seq: part.seq, epoch: part.epoch };
        let begun = *self.begun.get_or_insert((part.copy, at));
        self.sum.add(&part.pairs);
        let is_sound = !self.is_complete
            && begun == (part.copy, at)
            && part.copy != 0
            && part.pairs.is_sorted_by(|(one, _), (next, _)| one < next)
            && part.pairs.first().is_none_or(|(first, _)| *first > self.after)
            && !(part.pairs.is_empty() && part.more)
            && self.sum.finish() == part.sum;
        if !is_sound {
            return Err(BadPart);
        }
        self.is_complete = !part.more;
        if let Some((last, _)) = part.pairs.last() {
            self.after = last.clone();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use base::{Epoch, Seq};

    use super::*;

    fn pair(key: &'static str) -> (Bytes, Bytes) {
        (Bytes::from_static(key.as_bytes()), Bytes::from_static(b"value"))
    }

    /// Two parts of a copy, as an owner sends them.
    fn parts() -> [CopyPart; 2] {
        let mut sum = CopySum::default();
        let mut part = |pairs: Vec<(Bytes, Bytes)>, more| {
            sum.add(&pairs);
            CopyPart { copy: 7, seq: Seq(9), epoch: Epoch(2), pairs, sum: sum.finish(), more }
        };
        [part(vec![pair("a"), pair("c")], true), part(vec![pair("d"), pair("e")], false)]
    }

    fn check(parts: &[CopyPart]) -> Result<bool, BadPart> {
        let mut check = CopyCheck::default();
        parts.iter().try_for_each(|part| check.take(part))?;
        Ok(check.is_complete())
    }

    #[test]
    fn parts_that_follow_each_other_are_a_copy() {
        let [first, second] = parts();
        let mut check = CopyCheck::default();
        assert_eq!(check.next(), (0, Bytes::new()));
        check.take(&first).unwrap();
        assert_eq!(check.next(), (7, Bytes::from_static(b"c")));
        assert!(!check.is_complete());
        check.take(&second).unwrap();
        assert!(check.is_complete());
    }

    #[test]
    fn an_empty_store_is_one_empty_part() {
        let [first, _] = parts();
        let sum = CopySum::default().finish();
        assert_eq!(check(&[CopyPart { pairs: Vec::new(), more: false, sum, ..first.clone() }]), Ok(true));
        assert_eq!(check(&[CopyPart { pairs: Vec::new(), more: true, sum, ..first }]), Err(BadPart));
    }

    #[test]
    fn what_is_lost_doubled_mixed_or_changed_is_noticed() {
        let [first, second] = parts();
        let bad = |change: &dyn Fn(&mut CopyPart)| {
            let mut changed = second.clone();
            change(&mut changed);
            check(&[first.clone(), changed])
        };
        assert_eq!(check(std::slice::from_ref(&second)), Err(BadPart), "the first one is missing");
        assert_eq!(check(&[first.clone(), first.clone()]), Err(BadPart));
        assert_eq!(check(&[first.clone(), second.clone(), second.clone()]), Err(BadPart));
        assert_eq!(bad(&|part| part.copy = 8), Err(BadPart));
        assert_eq!(bad(&|part| part.seq = Seq(10)), Err(BadPart));
        assert_eq!(bad(&|part| part.epoch = Epoch(3)), Err(BadPart));
        assert_eq!(bad(&|part| part.sum ^= 1), Err(BadPart));
        assert_eq!(bad(&|part| part.pairs[0].1 = Bytes::from_static(b"valuf")), Err(BadPart));
        assert_eq!(bad(&|part| part.pairs.truncate(1)), Err(BadPart));
        let swapped = |part: &mut CopyPart| {
            part.pairs.swap(0, 1);
            let mut sum = CopySum::default();
            sum.add(&first.pairs);
            sum.add(&part.pairs);
            part.sum = sum.finish();
        };
        assert_eq!(bad(&swapped), Err(BadPart), "the sum is right, the order is not");
        assert_eq!(bad(&|_| {}), Ok(true));
    }
}
