//! Speed of the erasure code: gigabytes of data per second and core, for every kernel of this machine.
//!
//! `cargo bench -p layout`. Encode computes all parity; decode computes as many lost data shards as there is parity,
//! from all the rest. Shards are 1 MiB. Most columns use one stripe repeatedly, so it is in the cache as far as it
//! fits; the last column uses 256 MiB of stripes with the fastest kernel, so its data comes from memory.

use std::hint::black_box;
use std::time::Duration;

use base::ShardIndex;
use base::env::Env;
use layout::erasure::Kernel;
use layout::{ErasureCode, Profile};

const SHARD_BYTES: usize = 1 << 20;
const COLD_BYTES: usize = 256 << 20;
const MEASURED: Duration = Duration::from_millis(150);
const ROUNDS: usize = 3;

fn main() {
    println!(
        "GB of data per second, 1 MiB shards, one thread; encode / decode of min(k, m) lost data shards"
    );
    for profile in ["1+2", "4+2", "8+2", "9+3", "16+4", "12/7/9"] {
        let profile: Profile = profile.parse().expect("a valid profile");
        print!("{:<8}", profile.to_string());
        for kernel in Kernel::available() {
            let code = ErasureCode::for_profile(profile).with_kernel(*kernel);
            let mut stripe = Stripe::new(profile);
            let encode = gigabytes_per_second(profile, || stripe.encode(&code));
            let decode = gigabytes_per_second(profile, || stripe.decode(&code));
            print!("  {kernel:?} {encode:.1} / {decode:.1}");
        }
        let (encode, decode) = from_memory(profile);
        println!("  from memory {encode:.1} / {decode:.1}");
    }
}

/// The fastest kernel on stripes that are no longer in any cache.
fn from_memory(profile: Profile) -> (f64, f64) {
    let code = ErasureCode::for_profile(profile);
    let count = COLD_BYTES / (SHARD_BYTES * usize::from(profile.n())) + 1;
    let mut stripes: Vec<Stripe> = (0..count).map(|_| Stripe::new(profile)).collect();
    let mut next = 0;
    let mut turn = || {
        next = (next + 1) % count;
        next
    };
    let encode = gigabytes_per_second(profile, || stripes[turn()].encode(&code));
    let decode = gigabytes_per_second(profile, || stripes[turn()].decode(&code));
    (encode, decode)
}

/// The best of a few rounds: other work on the machine only slows a round down.
fn gigabytes_per_second(profile: Profile, mut work: impl FnMut()) -> f64 {
    let clock = Env::real().clock;
    let data_bytes = f64::from(profile.k()) * SHARD_BYTES as f64;
    let round = |work: &mut dyn FnMut()| {
        let start = clock.boot_ns();
        let mut stripes = 0;
        while clock.boot_ns() - start < MEASURED.as_nanos() as u64 {
            work();
            stripes += 1;
        }
        f64::from(stripes) * data_bytes / (clock.boot_ns() - start) as f64
    };
    (0..ROUNDS).map(|_| round(&mut work)).fold(0.0, f64::max)
}

struct Stripe {
    data: Vec<Vec<u8>>,
    parity: Vec<Vec<u8>>,
    /// Lost data shards.
    lost: usize,
    found: Vec<Vec<u8>>,
}

impl Stripe {
    fn new(profile: Profile) -> Self {
        let (k, m) = (usize::from(profile.k()), usize::from(profile.m()));
        let shard =
            |fill: usize| (0..SHARD_BYTES).map(|at| (at.wrapping_mul(fill + 31) >> 3) as u8).collect();
        let lost = k.min(m);
        Self {
            data: (0..k).map(shard).collect(),
            parity: (0..m).map(shard).collect(),
            lost,
            found: (0..lost).map(shard).collect(),
        }
    }

    fn encode(&mut self, code: &ErasureCode) {
        let data: Vec<&[u8]> = self.data.iter().map(Vec::as_slice).collect();
        let mut parity: Vec<&mut [u8]> = self.parity.iter_mut().map(Vec::as_mut_slice).collect();
        code.encode(black_box(&data), black_box(&mut parity));
    }

    fn decode(&mut self, code: &ErasureCode) {
        let numbered = (0u8..).map(ShardIndex).zip(self.data.iter().chain(&self.parity).map(Vec::as_slice));
        let present: Vec<_> = numbered.skip(self.lost).collect();
        let mut wanted: Vec<_> =
            (0u8..).map(ShardIndex).zip(self.found.iter_mut().map(Vec::as_mut_slice)).collect();
        let result = code.reconstruct(black_box(&present), black_box(&mut wanted));
        result.expect("as many shards are present as the code needs");
    }
}
