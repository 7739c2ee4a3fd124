//! Two 16-entry tables per coefficient.

use crate::erasure::field::NIBBLES;

/// See [`super::Kernel::combine`]; leaves the first `start` bytes of the outputs as they are.
pub(super) fn combine(rows: &[u8], inputs: &[&[u8]], outputs: &mut [&mut [u8]], start: usize) {
    for (row, output) in rows.chunks_exact(inputs.len()).zip(outputs) {
        let output = &mut output[start..];
        output.fill(0);
        for (coefficient, input) in row.iter().zip(inputs) {
            let table = &NIBBLES[usize::from(*coefficient)];
            for (sum, byte) in output.iter_mut().zip(&input[start..]) {
                *sum ^= table[usize::from(byte & 15)] ^ table[16 + usize::from(byte >> 4)];
            }
        }
    }
}
