//! NEON kernel. See the parent module for its shape.

use std::arch::aarch64::*;

use crate::SHARDS_MAX;
use crate::erasure::field::NIBBLES;

const GROUP_MAX: usize = 4;
const STEP: usize = 16;

/// Table shuffles of 16 bytes.
///
/// Returns how many bytes of every output were computed, from the front.
///
/// # Safety
/// The machine has NEON; inputs and outputs are equally long.
#[target_feature(enable = "neon")]
pub(super) unsafe fn neon(rows: &[u8], inputs: &[&[u8]], outputs: &mut [&mut [u8]]) -> usize {
    let rows = rows.chunks(inputs.len() * GROUP_MAX);
    for (rows, outputs) in rows.zip(outputs.chunks_mut(GROUP_MAX)) {
        match outputs.len() {
            // SAFETY: the caller's promise; the group has exactly as many outputs as the kernel expects.
            1 => unsafe { group::<1>(rows, inputs, outputs) },
            // SAFETY: as above.
            2 => unsafe { group::<2>(rows, inputs, outputs) },
            // SAFETY: as above.
            3 => unsafe { group::<3>(rows, inputs, outputs) },
            // SAFETY: as above.
            4 => unsafe { group::<4>(rows, inputs, outputs) },
            _ => unreachable!("groups have 1 to 4 outputs"),
        }
    }
    inputs[0].len() / STEP * STEP
}

/// # Safety
/// NEON; `outputs` has R slices, as long as the inputs.
#[target_feature(enable = "neon")]
unsafe fn group<const R: usize>(rows: &[u8], inputs: &[&[u8]], outputs: &mut [&mut [u8]]) {
    let mut tables = [[&NIBBLES[0]; R]; SHARDS_MAX as usize];
    for (j, tables) in tables.iter_mut().enumerate().take(inputs.len()) {
        *tables = std::array::from_fn(|r| &NIBBLES[usize::from(rows[r * inputs.len() + j])]);
    }
    let outputs: [*mut u8; R] = std::array::from_fn(|r| outputs[r].as_mut_ptr());
    let mask = vdupq_n_u8(15);
    for at in (0..inputs[0].len() / STEP * STEP).step_by(STEP) {
        let mut sums = [vdupq_n_u8(0); R];
        for (input, tables) in inputs.iter().zip(&tables) {
            // SAFETY: `at + STEP` is at most the length of every input.
            let bytes = unsafe { vld1q_u8(input.as_ptr().add(at)) };
            let (low, high) = (vandq_u8(bytes, mask), vshrq_n_u8::<4>(bytes));
            for (sum, table) in sums.iter_mut().zip(tables) {
                // SAFETY: a table is 32 bytes: two halves of 16.
                let (of_low, of_high) =
                    unsafe { (vld1q_u8(table.as_ptr()), vld1q_u8(table.as_ptr().add(16))) };
                let product = veorq_u8(vqtbl1q_u8(of_low, low), vqtbl1q_u8(of_high, high));
                *sum = veorq_u8(*sum, product);
            }
        }
        for (output, sum) in outputs.iter().zip(sums) {
            // SAFETY: `at + STEP` is at most the length of every output.
            unsafe { vst1q_u8(output.add(at), sum) };
        }
    }
}
