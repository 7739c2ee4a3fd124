//! The inner loop: `output[r] = sum over j of coefficient[r][j] * input[j]`, by the fastest means of the machine.

mod scalar;

/// A way to compute products in bulk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kernel {
    /// Tables, one byte at a time. The reference for the others.
    Scalar,
}

impl Kernel {
    /// The kernels that this machine can run, slowest first.
    pub fn available() -> &'static [Kernel] {
        &[Kernel::Scalar]
    }

    /// The fastest of them.
    pub fn fastest() -> Kernel {
        *Self::available().last().expect("the scalar kernel runs everywhere")
    }

    /// Computes every output from all inputs. `rows` holds one coefficient per input, output after output.
    ///
    /// # Panics
    /// If the slices differ in length or the coefficients do not match their number.
    pub(super) fn combine(self, rows: &[u8], inputs: &[&[u8]], outputs: &mut [&mut [u8]]) {
        assert_eq!(rows.len(), inputs.len() * outputs.len(), "one coefficient per input and output");
        let len = inputs.first().map_or(0, |input| input.len());
        assert!(inputs.iter().all(|input| input.len() == len), "inputs are equally long");
        assert!(outputs.iter().all(|output| output.len() == len), "outputs are as long as the inputs");
        match self {
            Kernel::Scalar => scalar::combine(rows, inputs, outputs),
        }
    }
}
