//! Arithmetic in GF(2^8) with the polynomial x^8 + x^4 + x^3 + x^2 + 1 (0x11d) and the generator 2.
//!
//! Addition is xor. The tables are computed by the compiler.

/// The field polynomial. Part of the on-drive format.
pub(crate) const POLYNOMIAL: u16 = 0x11d;

const LOG_EXP: ([u8; 256], [u8; 510]) = {
    let mut log = [0u8; 256];
    let mut exp = [0u8; 510];
    let mut value = 1u16;
    let mut power = 0;
    while power < 255 {
        log[value as usize] = power as u8;
        exp[power] = value as u8;
        exp[power + 255] = value as u8;
        value <<= 1;
        if value & 0x100 != 0 {
            value ^= POLYNOMIAL;
        }
        power += 1;
    }
    (log, exp)
};

static LOG: [u8; 256] = LOG_EXP.0;
static EXP: [u8; 510] = LOG_EXP.1;

/// `a * b`.
pub(crate) fn multiply(a: u8, b: u8) -> u8 {
    if a == 0 || b == 0 {
        0
    } else {
        EXP[usize::from(LOG[usize::from(a)]) + usize::from(LOG[usize::from(b)])]
    }
}

/// `1 / a`. There is no inverse of 0.
pub(crate) fn invert(a: u8) -> u8 {
    assert!(a != 0, "zero has no inverse");
    EXP[255 - usize::from(LOG[usize::from(a)])]
}

const fn multiply_slowly(a: u8, b: u8) -> u8 {
    let (mut a, mut b, mut product) = (a as u16, b, 0u16);
    while b != 0 {
        if b & 1 != 0 {
            product ^= a;
        }
        a <<= 1;
        if a & 0x100 != 0 {
            a ^= POLYNOMIAL;
        }
        b >>= 1;
    }
    product as u8
}

/// For each factor c: the products `c * x` for x in 0..16, then `c * (x << 4)`.
///
/// Multiplication is linear, so `c * x` is the xor of the products of its two halves.
pub(crate) static NIBBLES: [[u8; 32]; 256] = {
    let mut tables = [[0u8; 32]; 256];
    let mut c = 0;
    while c < 256 {
        let mut x = 0;
        while x < 16 {
            tables[c][x] = multiply_slowly(c as u8, x as u8);
            tables[c][16 + x] = multiply_slowly(c as u8, (x << 4) as u8);
            x += 1;
        }
        c += 1;
    }
    tables
};

/// For each factor c: multiplication by c as an 8x8 bit matrix, in the layout of `GF2P8AFFINEQB`.
///
/// Byte 7 - i of the matrix holds, for bit i of the product, which bits of x it is the parity of.
#[cfg(any(test, target_arch = "x86_64"))]
pub(crate) static BIT_MATRICES: [u64; 256] = {
    let mut matrices = [0u64; 256];
    let mut c = 0;
    while c < 256 {
        let mut bit_of_x = 0;
        while bit_of_x < 8 {
            let product = multiply_slowly(c as u8, 1 << bit_of_x);
            let mut i = 0;
            while i < 8 {
                if product >> i & 1 != 0 {
                    matrices[c] |= 1 << (8 * (7 - i) + bit_of_x);
                }
                i += 1;
            }
            bit_of_x += 1;
        }
        c += 1;
    }
    matrices
};

#[cfg(test)]
mod tests {
    use super::*;

    /// Schoolbook: multiply as polynomials, then subtract the field polynomial from the top down.
    fn oracle(a: u8, b: u8) -> u8 {
        let mut product = 0u16;
        for bit in 0..8 {
            if b >> bit & 1 != 0 {
                product ^= u16::from(a) << bit;
            }
        }
        for bit in (8..16).rev() {
            if product >> bit & 1 != 0 {
                product ^= POLYNOMIAL << (bit - 8);
            }
        }
        product as u8
    }

    #[test]
    fn every_product_is_that_of_the_polynomials() {
        for a in 0..=255 {
            for b in 0..=255 {
                let expected = oracle(a, b);
                assert_eq!(multiply(a, b), expected, "{a} {b}");
                let table = &NIBBLES[usize::from(a)];
                assert_eq!(table[usize::from(b & 15)] ^ table[16 + usize::from(b >> 4)], expected, "{a} {b}");
                let matrix = BIT_MATRICES[usize::from(a)].to_be_bytes();
                let product = (0..8).map(|i| ((matrix[i] & b).count_ones() as u8 & 1) << i).sum::<u8>();
                assert_eq!(product, expected, "{a} {b}");
                assert_eq!(reed_solomon_erasure::galois_8::mul(a, b), expected, "{a} {b}");
            }
        }
    }

    #[test]
    fn every_value_but_zero_has_an_inverse() {
        for a in 1..=255 {
            assert_eq!(multiply(a, invert(a)), 1, "{a}");
        }
    }
}
