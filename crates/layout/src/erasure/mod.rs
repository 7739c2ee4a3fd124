//! Systematic Reed-Solomon code over GF(2^8), byte by byte.
//!
//! Byte i of every parity shard depends on byte i of the data shards only. So any 4 KiB of a lost shard are computed
//! from the same 4 KiB of k others, and encoding may go piece by piece.
//!
//! # Format
//! Drives hold these bytes, so the format can never change.
//! - Field: polynomial 0x11d, see `field`.
//! - Shards 0..k are the data as it is. Parity shard k + i is the sum over j of `a(i, j) * data[j]`.
//! - `a(i, j) = (x0 + j) * xi / (x0 * (xi + j))` with `xi = 128 + i`; `+` is xor.
//!
//! That is the Cauchy matrix `1 / (xi + j)` with columns scaled so that parity 0 is the plain xor of the data, and
//! rows scaled so that the first coefficient of every row is 1, hence with k = 1 every shard is a copy. Every square
//! submatrix of a Cauchy matrix is invertible and scaling keeps that, so any k shards suffice. `a` depends on neither
//! k nor m: a shorter code is the longer one with zeros for the missing data and without the other parity.

mod field;
mod kernel;

use base::ShardIndex;

use crate::{Profile, SHARDS_MAX};
use field::{invert, multiply};
pub use kernel::Kernel;

/// Encodes and reconstructs shards of one shape. Cheap to make: k x m bytes.
#[derive(Debug, Clone)]
pub struct ErasureCode {
    k: u8,
    m: u8,
    /// m rows of k coefficients.
    parity_rows: Vec<u8>,
    kernel: Kernel,
}

/// There is no code with these numbers of shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no such erasure code: k={k} m={m} (1 <= k, k + m <= 20)")]
pub struct ErasureCodeError {
    /// Data shards asked for.
    pub k: u8,
    /// Parity shards asked for.
    pub m: u8,
}

/// Why lost shards could not be computed. Nothing was written to `wanted`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ReconstructError {
    /// More shards must be read first.
    #[error("too few shards: present={present} needed={needed}")]
    TooFewShards {
        /// Different shards given.
        present: u8,
        /// How many are needed, k.
        needed: u8,
    },
    /// A shard number is beyond the code's width.
    #[error("no such shard: shard={shard} width={width}")]
    NoSuchShard {
        /// The number given.
        shard: ShardIndex,
        /// Shards of the code.
        width: u8,
    },
    /// Not all shards are equally long.
    #[error("shards differ in length: shard={shard} len_bytes={len_bytes} expected={expected}")]
    LengthsDiffer {
        /// The first shard that differs from the others.
        shard: ShardIndex,
        /// Its length.
        len_bytes: usize,
        /// The length of the others.
        expected: usize,
    },
}

impl ErasureCode {
    /// The code of k data and m parity shards, with the fastest kernel of this machine.
    pub fn new(k: u8, m: u8) -> Result<Self, ErasureCodeError> {
        if k == 0 || u16::from(k) + u16::from(m) > u16::from(SHARDS_MAX) {
            return Err(ErasureCodeError { k, m });
        }
        let parity_rows = (0..m).flat_map(|i| (0..k).map(move |j| coefficient(i, j))).collect();
        Ok(Self { k, m, parity_rows, kernel: Kernel::fastest() })
    }

    /// The code of a profile.
    pub fn for_profile(profile: Profile) -> Self {
        Self::new(profile.k(), profile.m()).expect("a profile's width is at most 20")
    }

    /// The same code computed by another kernel: for tests and benchmarks.
    ///
    /// # Panics
    /// If this machine lacks the instructions, see [`Kernel::available`].
    pub fn with_kernel(mut self, kernel: Kernel) -> Self {
        assert!(Kernel::available().contains(&kernel), "this machine has no such instructions");
        self.kernel = kernel;
        self
    }

    /// Data shards.
    pub fn k(&self) -> u8 {
        self.k
    }

    /// Parity shards.
    pub fn m(&self) -> u8 {
        self.m
    }

    /// Computes all m parity shards of k data shards, or of the same byte range of each.
    ///
    /// # Panics
    /// If there are not k and m slices of one length.
    pub fn encode(&self, data: &[&[u8]], parity: &mut [&mut [u8]]) {
        assert_eq!(data.len(), usize::from(self.k), "as many data slices as data shards");
        assert_eq!(parity.len(), usize::from(self.m), "as many parity slices as parity shards");
        self.kernel.combine(&self.parity_rows, data, parity);
    }

    /// Computes the `wanted` shards, data or parity, from any k of the others, or the same byte range of each.
    ///
    /// `present` may hold more than k shards; data shards are used first, parity in the order given by number.
    /// A wanted shard that is also present is copied.
    pub fn reconstruct(
        &self,
        present: &[(ShardIndex, &[u8])],
        wanted: &mut [(ShardIndex, &mut [u8])],
    ) -> Result<(), ReconstructError> {
        let lens = present.iter().map(|(shard, bytes)| (*shard, bytes.len()));
        self.check_shapes(lens.chain(wanted.iter().map(|(shard, bytes)| (*shard, bytes.len()))))?;
        let mut by_shard: [Option<&[u8]>; SHARDS_MAX as usize] = [None; SHARDS_MAX as usize];
        for (shard, bytes) in present {
            by_shard[usize::from(shard.0)] = Some(bytes);
        }
        let sources: Vec<u8> = (0..self.k + self.m)
            .filter(|shard| by_shard[usize::from(*shard)].is_some())
            .take(self.k.into())
            .collect();
        if sources.len() < usize::from(self.k) {
            return Err(ReconstructError::TooFewShards { present: sources.len() as u8, needed: self.k });
        }
        let (copied, computed): (Vec<_>, Vec<_>) =
            wanted.iter_mut().partition(|(shard, _)| by_shard[usize::from(shard.0)].is_some());
        for (shard, bytes) in copied {
            bytes.copy_from_slice(by_shard[usize::from(shard.0)].expect("partitioned by presence"));
        }
        let shards: Vec<u8> = computed.iter().map(|(shard, _)| shard.0).collect();
        let rows = self.rows_from(&sources, &shards);
        let inputs: Vec<&[u8]> = sources.iter().filter_map(|shard| by_shard[usize::from(*shard)]).collect();
        let mut outputs: Vec<&mut [u8]> = computed.into_iter().map(|(_, bytes)| &mut **bytes).collect();
        self.kernel.combine(&rows, &inputs, &mut outputs);
        Ok(())
    }

    fn check_shapes(
        &self,
        mut shards: impl Iterator<Item = (ShardIndex, usize)>,
    ) -> Result<(), ReconstructError> {
        let width = self.k + self.m;
        let mut expected = None;
        shards.try_for_each(|(shard, len_bytes)| {
            let expected = *expected.get_or_insert(len_bytes);
            if shard.0 >= width {
                return Err(ReconstructError::NoSuchShard { shard, width });
            }
            if len_bytes != expected {
                return Err(ReconstructError::LengthsDiffer { shard, len_bytes, expected });
            }
            Ok(())
        })
    }

    /// The coefficients that give each of `wanted` from `sources`: k sorted shard numbers, one row per wanted shard.
    ///
    /// With L the lost data shards and P as many parity sources: `P = A(P, L) * L + A(P, D) * D` for the present
    /// data D, so `L = B * (P + A(P, D) * D)` with `B = A(P, L)^-1`. Only that small matrix is inverted.
    fn rows_from(&self, sources: &[u8], wanted: &[u8]) -> Vec<u8> {
        let (data, parity) = sources.split_at(sources.partition_point(|shard| *shard < self.k));
        let lost: Vec<u8> = (0..self.k).filter(|shard| !data.contains(shard)).collect();
        let inverse = invert_matrix(parity.iter().map(|p| self.row(*p, &lost)).collect());
        let lost_row = |shard: u8| -> Vec<u8> {
            let at =
                lost.iter().position(|lost| *lost == shard).expect("present shards are copied, not computed");
            let of_data =
                data.iter().map(|j| dot(&inverse[at], parity.iter().map(|p| self.row(*p, &[*j])[0])));
            of_data.chain(inverse[at].iter().copied()).collect()
        };
        let lost_rows: Vec<Vec<u8>> = lost.iter().map(|shard| lost_row(*shard)).collect();
        let parity_row = |shard: u8| -> Vec<u8> {
            let mut row = self.row(shard, data);
            row.resize(sources.len(), 0);
            for (factor, lost_row) in self.row(shard, &lost).into_iter().zip(&lost_rows) {
                row.iter_mut().zip(lost_row).for_each(|(sum, value)| *sum ^= multiply(factor, *value));
            }
            row
        };
        wanted
            .iter()
            .flat_map(|shard| if *shard < self.k { lost_row(*shard) } else { parity_row(*shard) })
            .collect()
    }

    /// The coefficients of parity shard `shard` for the data shards `columns`.
    fn row(&self, shard: u8, columns: &[u8]) -> Vec<u8> {
        columns.iter().map(|column| coefficient(shard - self.k, *column)).collect()
    }
}

/// Coefficient of data shard j in parity i: the format.
fn coefficient(i: u8, j: u8) -> u8 {
    let (x0, xi) = (128, 128 + i);
    multiply(multiply(x0 ^ j, xi), invert(multiply(x0, xi ^ j)))
}

fn dot(a: &[u8], b: impl Iterator<Item = u8>) -> u8 {
    a.iter().zip(b).fold(0, |sum, (a, b)| sum ^ multiply(*a, b))
}

/// Gauss-Jordan elimination. The matrix is square and, being part of a Cauchy matrix, invertible.
fn invert_matrix(mut rows: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
    let size = rows.len();
    for (at, row) in rows.iter_mut().enumerate() {
        row.extend((0..size).map(|column| u8::from(column == at)));
    }
    for at in 0..size {
        let pivot = (at..size).find(|row| rows[*row][at] != 0).expect("every square part is invertible");
        rows.swap(at, pivot);
        let scale = invert(rows[at][at]);
        rows[at].iter_mut().for_each(|value| *value = multiply(*value, scale));
        let pivot_row = rows[at].clone();
        for (_, row) in rows.iter_mut().enumerate().filter(|(other, _)| *other != at) {
            let factor = row[at];
            row.iter_mut().zip(&pivot_row).for_each(|(value, pivot)| *value ^= multiply(factor, *pivot));
        }
    }
    rows.into_iter().map(|row| row[size..].to_vec()).collect()
}

#[cfg(test)]
mod tests;
