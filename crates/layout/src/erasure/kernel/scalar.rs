//! Two 16-entry tables per coefficient.

use crate::erasure::field::NIBBLES;

/// See [`super::Kernel::combine`].
pub(super) fn combine(rows: &[u8], inputs: &[&[u8]], outputs: &mut [&mut [u8]]) {
    for (row, output) in rows.chunks_exact(inputs.len()).zip(outputs) {
        output.fill(0);
        for (coefficient, input) in row.iter().zip(inputs) {
            let table = &NIBBLES[usize::from(*coefficient)];
            for (sum, byte) in output.iter_mut().zip(*input) {
                *sum ^= table[usize::from(byte & 15)] ^ table[16 + usize::from(byte >> 4)];
            }
        }
    }
}
