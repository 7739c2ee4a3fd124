//! Our erasure code beside ISA-L: gigabytes of data per second and core, encode, the same shards in the same run.
//!
//! `cargo bench -p layout --features isal --bench isal`; needs Debian's libisal-dev. No shipped binary links it.
//! Decoding is the same loop with another matrix in both. Each round measures both, so that other work on the machine
//! affects both; the best round counts.

use std::ffi::{c_int, c_uchar};
use std::hint::black_box;
use std::time::Duration;

use base::env::Env;
use layout::{ErasureCode, Profile};

const MEASURED: Duration = Duration::from_millis(100);
const ROUNDS: usize = 5;

#[link(name = "isal")]
unsafe extern "C" {
    fn gf_gen_cauchy1_matrix(matrix: *mut c_uchar, rows: c_int, columns: c_int);
    fn ec_init_tables(columns: c_int, rows: c_int, matrix: *mut c_uchar, tables: *mut c_uchar);
    fn ec_encode_data(
        len: c_int,
        columns: c_int,
        rows: c_int,
        tables: *mut c_uchar,
        data: *mut *mut c_uchar,
        coding: *mut *mut c_uchar,
    );
}

/// Multiplication tables of one profile for ISA-L: 32 bytes for each product.
struct Isal {
    k: usize,
    m: usize,
    tables: Vec<u8>,
}

impl Isal {
    fn new(k: usize, m: usize) -> Self {
        let mut matrix = vec![0; (k + m) * k];
        let mut tables = vec![0; 32 * k * m];
        // SAFETY: the matrix has k + m rows of k bytes, the part behind the first k rows has m rows, and the tables
        // have 32 bytes for each of its k * m elements: as the library documents.
        unsafe {
            gf_gen_cauchy1_matrix(matrix.as_mut_ptr(), (k + m) as c_int, k as c_int);
            ec_init_tables(k as c_int, m as c_int, matrix[k * k..].as_mut_ptr(), tables.as_mut_ptr());
        }
        Self { k, m, tables }
    }

    fn encode(&mut self, data: &mut [Vec<u8>], parity: &mut [Vec<u8>]) {
        let len = data[0].len();
        assert!(data.len() == self.k && parity.len() == self.m);
        assert!(data.iter().chain(&*parity).all(|shard| shard.len() == len));
        let mut data: Vec<_> = data.iter_mut().map(Vec::as_mut_ptr).collect();
        let mut parity: Vec<_> = parity.iter_mut().map(Vec::as_mut_ptr).collect();
        // SAFETY: k + m pointers to `len` bytes each, checked above, which no other code uses during the call.
        unsafe {
            ec_encode_data(
                len as c_int,
                self.k as c_int,
                self.m as c_int,
                self.tables.as_mut_ptr(),
                data.as_mut_ptr(),
                parity.as_mut_ptr(),
            );
        }
    }
}

fn main() {
    println!("GB of data per second, one thread, encode: ours / ISA-L (ratio)");
    for profile in ["4+2", "8+2", "9+3", "16+4", "12/7/9"] {
        let profile: Profile = profile.parse().expect("a valid profile");
        print!("{:<8}", profile.to_string());
        for shard_bytes in [16 << 10, 256 << 10, 1 << 20] {
            let (ours, isal) = compare(profile, shard_bytes);
            print!("  {:>4} KiB {ours:.1} / {isal:.1} ({:.2})", shard_bytes >> 10, ours / isal);
        }
        println!();
    }
}

fn compare(profile: Profile, shard_bytes: usize) -> (f64, f64) {
    let (k, m) = (usize::from(profile.k()), usize::from(profile.m()));
    let shard = |fill: usize| (0..shard_bytes).map(|at| (at.wrapping_mul(fill + 31) >> 3) as u8).collect();
    let mut data: Vec<Vec<u8>> = (0..k).map(shard).collect();
    let mut parity: Vec<Vec<u8>> = (0..m).map(shard).collect();
    let code = ErasureCode::for_profile(profile);
    let mut isal = Isal::new(k, m);
    let bytes = (k * shard_bytes) as f64;
    let (mut best_ours, mut best_isal) = (0.0_f64, 0.0_f64);
    for _ in 0..ROUNDS {
        best_ours = best_ours.max(rate(bytes, || {
            let data: Vec<&[u8]> = data.iter().map(Vec::as_slice).collect();
            let mut parity: Vec<&mut [u8]> = parity.iter_mut().map(Vec::as_mut_slice).collect();
            code.encode(black_box(&data), black_box(&mut parity));
        }));
        best_isal = best_isal.max(rate(bytes, || isal.encode(black_box(&mut data), black_box(&mut parity))));
    }
    (best_ours, best_isal)
}

/// Gigabytes per second of one round.
fn rate(bytes: f64, mut work: impl FnMut()) -> f64 {
    let clock = Env::real().clock;
    let start = clock.boot_ns();
    let mut count = 0;
    while clock.boot_ns() - start < MEASURED.as_nanos() as u64 {
        work();
        count += 1;
    }
    f64::from(count) * bytes / (clock.boot_ns() - start) as f64
}
