//! The inner loop: `output[r] = sum over j of coefficient[r][j] * input[j]`, by the fastest instructions of the
//! machine.
//!
//! All kernels have the same shape. Outputs are taken in groups that fit into registers; a group is computed in one
//! pass over the inputs, a few vectors at a time, so each input byte is loaded once per group and each output byte
//! is stored once. The scalar kernel computes the rest that does not fill a vector.

#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::sync::OnceLock;

/// A way to compute products in bulk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kernel {
    /// Tables, one byte at a time. The reference for the others.
    Scalar,
    /// 16 bytes at a time by table shuffles (aarch64).
    Neon,
    /// 32 bytes at a time by table shuffles (x86-64).
    Avx2,
    /// 64 bytes at a time by table shuffles (x86-64 with AVX-512BW).
    Avx512,
    /// 64 bytes at a time by bit matrices (x86-64 with AVX-512BW and GFNI).
    Gfni,
}

impl Kernel {
    /// The kernels that this machine can run, slowest first.
    pub fn available() -> &'static [Kernel] {
        static AVAILABLE: OnceLock<Vec<Kernel>> = OnceLock::new();
        AVAILABLE.get_or_init(|| {
            let all = [Kernel::Scalar, Kernel::Neon, Kernel::Avx2, Kernel::Avx512, Kernel::Gfni];
            all.into_iter().filter(|kernel| kernel.runs_here()).collect()
        })
    }

    /// The fastest kernel that this machine can run.
    pub fn fastest() -> Kernel {
        *Self::available().last().expect("the scalar kernel runs everywhere")
    }

    #[cfg(target_arch = "x86_64")]
    fn runs_here(self) -> bool {
        let avx512 = || is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw");
        match self {
            Kernel::Scalar => true,
            Kernel::Neon => false,
            Kernel::Avx2 => is_x86_feature_detected!("avx2"),
            Kernel::Avx512 => avx512(),
            Kernel::Gfni => avx512() && is_x86_feature_detected!("gfni"),
        }
    }

    #[cfg(target_arch = "aarch64")]
    fn runs_here(self) -> bool {
        match self {
            Kernel::Scalar => true,
            Kernel::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            Kernel::Avx2 | Kernel::Avx512 | Kernel::Gfni => false,
        }
    }

    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    fn runs_here(self) -> bool {
        self == Kernel::Scalar
    }

    /// Computes every output from all inputs. `rows` holds one coefficient per input, output after output.
    ///
    /// # Panics
    /// If the slices differ in length, the coefficients do not match their number, or this machine lacks the
    /// instructions.
    pub(super) fn combine(self, rows: &[u8], inputs: &[&[u8]], outputs: &mut [&mut [u8]]) {
        assert_eq!(rows.len(), inputs.len() * outputs.len(), "one coefficient per input and output");
        let len = inputs.first().map_or(0, |input| input.len());
        assert!(inputs.iter().all(|input| input.len() == len), "inputs are equally long");
        assert!(outputs.iter().all(|output| output.len() == len), "outputs are as long as the inputs");
        assert!(Self::available().contains(&self), "this machine has no such instructions");
        if let [input] = inputs {
            return copy(rows, input, outputs);
        }
        let done = match self {
            Kernel::Scalar => 0,
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the kernel is available here, so the machine has its instructions; the slices are equally long.
            Kernel::Avx2 => unsafe { x86::avx2(rows, inputs, outputs) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Kernel::Avx512 => unsafe { x86::avx512(rows, inputs, outputs) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Kernel::Gfni => unsafe { x86::gfni(rows, inputs, outputs) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: the kernel is available here, so the machine has its instructions; the slices are equally long.
            Kernel::Neon => unsafe { neon::neon(rows, inputs, outputs) },
            _ => unreachable!("a kernel of another architecture is not available"),
        };
        if done < len {
            scalar::combine(rows, inputs, outputs, done);
        }
    }
}

/// With one input the format has coefficients 1 only: every output is a copy.
fn copy(rows: &[u8], input: &[u8], outputs: &mut [&mut [u8]]) {
    assert!(rows.iter().all(|coefficient| *coefficient == 1), "one data shard makes copies");
    outputs.iter_mut().for_each(|output| output.copy_from_slice(input));
}
