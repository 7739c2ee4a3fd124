//! AVX2, AVX-512 and GFNI kernels. See the parent module for their common shape.

use std::arch::x86_64::*;

use crate::SHARDS_MAX;
use crate::erasure::field::{BIT_MATRICES, NIBBLES};

const INPUTS_MAX: usize = SHARDS_MAX as usize;

/// Defines an entry that cuts the outputs into groups and calls the kernel compiled for each group's size.
macro_rules! kernel {
    ($(#[$doc:meta])* $name:ident, $group:ident, $features:literal, $($size:literal)*) => {
        $(#[$doc])*
        ///
        /// Returns how many bytes of every output were computed, from the front.
        ///
        /// # Safety
        /// The machine has the instructions; inputs and outputs are equally long.
        #[target_feature(enable = $features)]
        pub(super) unsafe fn $name(rows: &[u8], inputs: &[&[u8]], outputs: &mut [&mut [u8]]) -> usize {
            const GROUP_MAX: usize = { let sizes = [$($size),*]; sizes[sizes.len() - 1] };
            let rows = rows.chunks(inputs.len() * GROUP_MAX);
            let mut done = 0;
            for (rows, outputs) in rows.zip(outputs.chunks_mut(GROUP_MAX)) {
                done = match outputs.len() {
                    // SAFETY: the caller's promise; the group has exactly as many outputs as the kernel expects.
                    $($size => unsafe { $group::<$size>(rows, inputs, outputs) },)*
                    _ => unreachable!("groups have 1 to GROUP_MAX outputs"),
                };
            }
            done
        }
    };
}

kernel!(
    /// Table shuffles of 32 bytes.
    avx2, avx2_group, "avx2", 1 2 3 4
);
kernel!(
    /// Table shuffles of 64 bytes.
    avx512, avx512_group, "avx512f,avx512bw", 1 2 3 4 5 6
);
kernel!(
    /// Bit matrices on 64 bytes.
    gfni, gfni_group, "avx512f,avx512bw,gfni", 1 2 3 4 5 6
);

/// Addresses of the outputs of a group.
fn pointers<const R: usize>(outputs: &mut [&mut [u8]]) -> [*mut u8; R] {
    std::array::from_fn(|r| outputs[r].as_mut_ptr())
}

/// The contribution of an input to each output of a group: `of` each of its coefficients.
fn factors<const R: usize, T: Copy>(
    rows: &[u8],
    inputs: usize,
    of: impl Fn(u8) -> T,
) -> [[T; R]; INPUTS_MAX] {
    let factor = |j: usize, r: usize| of(if j < inputs { rows[r * inputs + j] } else { 0 });
    std::array::from_fn(|j| std::array::from_fn(|r| factor(j, r)))
}

/// # Safety
/// AVX2; `outputs` has R slices, as long as the inputs.
#[target_feature(enable = "avx2")]
unsafe fn avx2_group<const R: usize>(rows: &[u8], inputs: &[&[u8]], outputs: &mut [&mut [u8]]) -> usize {
    const STEP: usize = 32;
    let tables = factors::<R, _>(rows, inputs.len(), |coefficient| &NIBBLES[usize::from(coefficient)]);
    let outputs = pointers::<R>(outputs);
    let done = inputs[0].len() / STEP * STEP;
    let mask = _mm256_set1_epi8(15);
    for at in (0..done).step_by(STEP) {
        let mut sums = [_mm256_setzero_si256(); R];
        for (input, tables) in inputs.iter().zip(&tables) {
            // SAFETY: `at + STEP` is at most the length of every input.
            let bytes = unsafe { _mm256_loadu_si256(input.as_ptr().add(at).cast()) };
            let low = _mm256_and_si256(bytes, mask);
            let high = _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), mask);
            for (sum, table) in sums.iter_mut().zip(tables) {
                // SAFETY: a table is 32 bytes: two halves of 16.
                let (of_low, of_high) = unsafe {
                    let halves = table.as_ptr().cast::<__m128i>();
                    (_mm_loadu_si128(halves), _mm_loadu_si128(halves.add(1)))
                };
                let of_low = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(of_low), low);
                let of_high = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(of_high), high);
                *sum = _mm256_xor_si256(*sum, _mm256_xor_si256(of_low, of_high));
            }
        }
        for (output, sum) in outputs.iter().zip(sums) {
            // SAFETY: `at + STEP` is at most the length of every output.
            unsafe { _mm256_storeu_si256(output.add(at).cast(), sum) };
        }
    }
    done
}

/// # Safety
/// AVX-512F and BW; `outputs` has R slices, as long as the inputs.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn avx512_group<const R: usize>(rows: &[u8], inputs: &[&[u8]], outputs: &mut [&mut [u8]]) -> usize {
    const VECTORS: usize = 2;
    const STEP: usize = 64 * VECTORS;
    let tables = factors::<R, _>(rows, inputs.len(), |coefficient| &NIBBLES[usize::from(coefficient)]);
    let outputs = pointers::<R>(outputs);
    let done = inputs[0].len() / STEP * STEP;
    let mask = _mm512_set1_epi8(15);
    for at in (0..done).step_by(STEP) {
        let mut sums = [[_mm512_setzero_si512(); VECTORS]; R];
        for (input, tables) in inputs.iter().zip(&tables) {
            // SAFETY: `at + STEP` is at most the length of every input.
            let bytes: [__m512i; VECTORS] = std::array::from_fn(|v| unsafe {
                _mm512_loadu_si512(input.as_ptr().add(at + 64 * v).cast())
            });
            let low = bytes.map(|bytes| _mm512_and_si512(bytes, mask));
            let high = bytes.map(|bytes| _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), mask));
            for (sums, table) in sums.iter_mut().zip(tables) {
                // SAFETY: a table is 32 bytes: two halves of 16.
                let (of_low, of_high) = unsafe {
                    let halves = table.as_ptr().cast::<__m128i>();
                    (_mm_loadu_si128(halves), _mm_loadu_si128(halves.add(1)))
                };
                let (of_low, of_high) = (_mm512_broadcast_i32x4(of_low), _mm512_broadcast_i32x4(of_high));
                for v in 0..VECTORS {
                    let product = _mm512_xor_si512(
                        _mm512_shuffle_epi8(of_low, low[v]),
                        _mm512_shuffle_epi8(of_high, high[v]),
                    );
                    sums[v] = _mm512_xor_si512(sums[v], product);
                }
            }
        }
        for (output, sums) in outputs.iter().zip(sums) {
            for (v, sum) in sums.into_iter().enumerate() {
                // SAFETY: `at + STEP` is at most the length of every output.
                unsafe { _mm512_storeu_si512(output.add(at + 64 * v).cast(), sum) };
            }
        }
    }
    done
}

/// # Safety
/// AVX-512F, BW and GFNI; `outputs` has R slices, as long as the inputs.
#[target_feature(enable = "avx512f,avx512bw,gfni")]
unsafe fn gfni_group<const R: usize>(rows: &[u8], inputs: &[&[u8]], outputs: &mut [&mut [u8]]) -> usize {
    const VECTORS: usize = 4;
    const STEP: usize = 64 * VECTORS;
    let matrices = factors::<R, _>(rows, inputs.len(), |coefficient| BIT_MATRICES[usize::from(coefficient)]);
    let outputs = pointers::<R>(outputs);
    let done = inputs[0].len() / STEP * STEP;
    for at in (0..done).step_by(STEP) {
        let mut sums = [[_mm512_setzero_si512(); VECTORS]; R];
        for (input, matrices) in inputs.iter().zip(&matrices) {
            // SAFETY: `at + STEP` is at most the length of every input.
            let bytes: [__m512i; VECTORS] = std::array::from_fn(|v| unsafe {
                _mm512_loadu_si512(input.as_ptr().add(at + 64 * v).cast())
            });
            for (sums, matrix) in sums.iter_mut().zip(matrices) {
                let matrix = _mm512_set1_epi64(matrix.cast_signed());
                for v in 0..VECTORS {
                    sums[v] = _mm512_xor_si512(sums[v], _mm512_gf2p8affine_epi64_epi8::<0>(bytes[v], matrix));
                }
            }
        }
        for (output, sums) in outputs.iter().zip(sums) {
            for (v, sum) in sums.into_iter().enumerate() {
                // SAFETY: `at + STEP` is at most the length of every output.
                unsafe { _mm512_storeu_si512(output.add(at + 64 * v).cast(), sum) };
            }
        }
    }
    done
}
