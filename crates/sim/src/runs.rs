//! The bytes of a file as runs of equal bytes. Processes write nothing else, so a long file is a short list.

/// Runs of (length, byte) in order; neighbours differ, and no run is empty.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(crate) struct Runs(Vec<(u64, u8)>);

impl Runs {
    /// The runs of plain bytes.
    pub(crate) fn of(bytes: &[u8]) -> Self {
        Self(bytes.chunk_by(|a, b| a == b).map(|run| (run.len() as u64, run[0])).collect())
    }

    pub(crate) fn fill(len: u64, byte: u8) -> Self {
        let mut runs = Self::default();
        runs.push(len, byte);
        runs
    }

    pub(crate) fn len(&self) -> u64 {
        self.0.iter().map(|(len, _)| len).sum()
    }

    fn push(&mut self, len: u64, byte: u8) {
        match self.0.last_mut() {
            _ if len == 0 => {}
            Some((last_len, last)) if *last == byte => *last_len += len,
            _ => self.0.push((len, byte)),
        }
    }

    fn append(&mut self, other: Runs) {
        other.0.into_iter().for_each(|(len, byte)| self.push(len, byte));
    }

    /// The bytes in `[from, to)`, fewer at the end.
    pub(crate) fn part(&self, from: u64, to: u64) -> Runs {
        let (mut part, mut at) = (Runs::default(), 0);
        for (len, byte) in &self.0 {
            let (start, end) = (from.max(at), to.min(at + len));
            part.push(end.saturating_sub(start), *byte);
            at += len;
        }
        part
    }

    /// The bytes cut to `len`, or extended with zeros.
    pub(crate) fn resized(&self, len: u64) -> Runs {
        let mut resized = self.part(0, len);
        resized.push(len.saturating_sub(self.len()), 0);
        resized
    }

    /// The bytes with other bytes at `off`.
    pub(crate) fn with(&self, off: u64, bytes: &Runs) -> Runs {
        if bytes.0.is_empty() {
            return self.clone();
        }
        let mut changed = self.resized(off);
        changed.append(bytes.clone());
        changed.append(self.part(off + bytes.len(), u64::MAX));
        changed
    }

    /// The runs as text.
    pub(crate) fn show(&self) -> String {
        let runs: Vec<String> = self.0.iter().map(|(len, byte)| format!("{byte}x{len}")).collect();
        format!("{} bytes: {}", self.len(), runs.join(" "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_those_of_plain_bytes() {
        let runs = Runs::of(&[1, 1, 2, 2, 2, 3]);
        assert_eq!(runs.with(1, &Runs::fill(2, 9)), Runs::of(&[1, 9, 9, 2, 2, 3]));
        assert_eq!(runs.with(8, &Runs::fill(1, 9)), Runs::of(&[1, 1, 2, 2, 2, 3, 0, 0, 9]));
        assert_eq!(runs.with(2, &Runs::fill(3, 1)), Runs::of(&[1, 1, 1, 1, 1, 3]));
        assert_eq!(runs.with(3, &Runs::default()), runs);
        assert_eq!(
            (runs.resized(4), runs.resized(7)),
            (Runs::of(&[1, 1, 2, 2]), Runs::of(&[1, 1, 2, 2, 2, 3, 0]))
        );
        assert_eq!(
            (runs.part(1, 4), runs.part(5, 99), runs.part(6, 9)),
            (Runs::of(&[1, 2, 2]), Runs::of(&[3]), Runs::default())
        );
        assert_eq!(runs.show(), "6 bytes: 1x2 2x3 3x1");
    }
}
