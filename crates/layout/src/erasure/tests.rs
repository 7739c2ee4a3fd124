use super::*;
use proptest::prelude::*;

/// Bytes that look random and are the same everywhere.
fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    })
    .take(len)
    .collect()
}

fn slices(shards: &[Vec<u8>]) -> Vec<&[u8]> {
    shards.iter().map(Vec::as_slice).collect()
}

/// All n shards of a random extent, encoded by `code`.
fn stripe(code: &ErasureCode, seed: u64, len: usize) -> Vec<Vec<u8>> {
    let mut shards: Vec<Vec<u8>> = (0..code.k()).map(|j| bytes(seed + u64::from(j), len)).collect();
    let mut parity = vec![vec![0xa5; len]; code.m().into()];
    let mut outputs: Vec<&mut [u8]> = parity.iter_mut().map(Vec::as_mut_slice).collect();
    code.encode(&slices(&shards), &mut outputs);
    shards.append(&mut parity);
    shards
}

/// Reconstructs `lost` from the shards `given` and expects the originals.
#[track_caller]
fn check(code: &ErasureCode, shards: &[Vec<u8>], given: &[u8], lost: &[u8]) {
    let present: Vec<_> =
        given.iter().map(|s| (ShardIndex(*s), shards[usize::from(*s)].as_slice())).collect();
    let mut found = vec![vec![0x5a; shards[0].len()]; lost.len()];
    let mut wanted: Vec<_> =
        lost.iter().zip(&mut found).map(|(s, bytes)| (ShardIndex(*s), bytes.as_mut_slice())).collect();
    assert_eq!(code.reconstruct(&present, &mut wanted), Ok(()));
    for (shard, found) in lost.iter().zip(&found) {
        assert!(*found == shards[usize::from(*shard)], "shard {shard} from {given:?}, {code:?}");
    }
}

/// Every way to lose as many shards as there is parity.
#[track_caller]
fn check_every_loss(k: u8, m: u8) {
    let code = ErasureCode::new(k, m).unwrap();
    let shards = stripe(&code, 7, 70);
    for mask in 0u32..1 << (k + m) {
        if mask.count_ones() == u32::from(m) {
            let (lost, given): (Vec<u8>, Vec<u8>) = (0..k + m).partition(|shard| mask >> shard & 1 != 0);
            check(&code, &shards, &given, &lost);
        }
    }
}

#[test]
fn any_k_shards_give_all_the_others_back() {
    for k in 1..=6 {
        for m in 0..=6 {
            check_every_loss(k, m);
        }
    }
    for (k, m) in [(7, 5), (9, 3), (8, 2), (10, 4), (12, 2)] {
        check_every_loss(k, m);
    }
}

/// Every square submatrix of the whole coefficient table is invertible: sizes 1 and 2 for all, larger ones sampled.
#[test]
fn every_square_part_of_the_matrix_is_invertible() {
    let limit = SHARDS_MAX;
    for i in 0..limit {
        for j in 0..limit {
            assert_ne!(coefficient(i, j), 0);
            for (i2, j2) in (i + 1..limit).flat_map(|i2| (j + 1..limit).map(move |j2| (i2, j2))) {
                let left = multiply(coefficient(i, j), coefficient(i2, j2));
                assert_ne!(left, multiply(coefficient(i, j2), coefficient(i2, j)), "{i} {j} {i2} {j2}");
            }
        }
    }
}

#[test]
fn the_matrix_is_the_format() {
    let rows: Vec<Vec<u8>> = (0..5).map(|i| (0..8).map(|j| coefficient(i, j)).collect()).collect();
    assert_eq!(rows[0], [1; 8]);
    assert_eq!(rows, GOLDEN_ROWS);
    for i in 0..19 {
        assert_eq!(coefficient(i, 0), 1, "with one data shard, parity is a copy");
    }
    let shards = stripe(&ErasureCode::new(4, 2).unwrap(), 1, 4);
    assert_eq!(shards[4..], GOLDEN_PARITY);
}

/// Computed by other code, from the formula in the module's documentation.
const GOLDEN_ROWS: [[u8; 8]; 5] = [
    [1, 1, 1, 1, 1, 1, 1, 1],
    [1, 89, 5, 230, 237, 182, 65, 90],
    [1, 5, 124, 190, 72, 193, 168, 94],
    [1, 230, 190, 36, 129, 19, 178, 31],
    [1, 237, 72, 129, 232, 164, 106, 57],
];
const GOLDEN_PARITY: [[u8; 4]; 2] = [[228, 227, 252, 255], [121, 207, 81, 70]];

#[test]
fn a_lone_data_shard_is_copied_and_one_parity_is_the_xor() {
    let shards = stripe(&ErasureCode::new(1, 4).unwrap(), 3, 5000);
    assert!(shards.iter().all(|shard| *shard == shards[0]));
    let shards = stripe(&ErasureCode::new(3, 1).unwrap(), 3, 50);
    let xor: Vec<u8> = (0..50).map(|at| shards[0][at] ^ shards[1][at] ^ shards[2][at]).collect();
    assert_eq!(shards[3], xor);
}

#[test]
fn impossible_reconstructions_are_refused() {
    let code = ErasureCode::new(4, 2).unwrap();
    let shard = [1u8; 16];
    let reconstruct = |present: &[(u8, usize)], wanted: u8| {
        let present: Vec<_> = present.iter().map(|(s, len)| (ShardIndex(*s), &shard[..*len])).collect();
        code.reconstruct(&present, &mut [(ShardIndex(wanted), &mut [0u8; 16])])
    };
    assert_eq!(
        reconstruct(&[(0, 16), (1, 16), (5, 16)], 2),
        Err(ReconstructError::TooFewShards { present: 3, needed: 4 })
    );
    assert_eq!(
        reconstruct(&[(0, 16), (0, 16), (1, 16), (5, 16)], 2),
        Err(ReconstructError::TooFewShards { present: 3, needed: 4 })
    );
    assert_eq!(
        reconstruct(&[(6, 16)], 2),
        Err(ReconstructError::NoSuchShard { shard: ShardIndex(6), width: 6 })
    );
    assert_eq!(
        reconstruct(&[(0, 16), (1, 15)], 2),
        Err(ReconstructError::LengthsDiffer { shard: ShardIndex(1), len_bytes: 15, expected: 16 })
    );
    for (k, m) in [(0, 2), (17, 4), (20, 1), (255, 255)] {
        assert_eq!(ErasureCode::new(k, m).unwrap_err(), ErasureCodeError { k, m });
    }
}

#[test]
fn a_present_shard_that_is_wanted_is_copied() {
    let code = ErasureCode::new(4, 2).unwrap();
    let shards = stripe(&code, 11, 100);
    check(&code, &shards, &[0, 2, 3, 4, 5], &[3, 1, 5, 1]);
}

proptest! {
    #[test]
    fn every_kernel_equals_the_scalar_one(
        k in 1u8..=20,
        m in 0u8..=19,
        len in 0usize..1500,
        skew in 0usize..64,
        seed in any::<u64>(),
    ) {
        prop_assume!(k + m <= SHARDS_MAX);
        let code = ErasureCode::new(k, m).unwrap();
        let data: Vec<Vec<u8>> = (0..k).map(|j| bytes(seed ^ u64::from(j), len + skew)).collect();
        let inputs: Vec<&[u8]> = data.iter().map(|shard| &shard[skew..]).collect();
        let encode = |kernel: Kernel| {
            let mut parity = vec![vec![0u8; len + skew]; m.into()];
            let mut outputs: Vec<&mut [u8]> = parity.iter_mut().map(|shard| &mut shard[skew..]).collect();
            code.clone().with_kernel(kernel).encode(&inputs, &mut outputs);
            parity
        };
        let expected = encode(Kernel::Scalar);
        for kernel in Kernel::available() {
            prop_assert!(encode(*kernel) == expected, "{:?}", kernel);
        }
    }

    #[test]
    fn random_losses_are_reconstructed(
        k in 1u8..=20,
        m in 0u8..=19,
        order in Just((0u8..20).collect::<Vec<u8>>()).prop_shuffle(),
        len in 1usize..300,
        seed in any::<u64>(),
    ) {
        prop_assume!(k + m <= SHARDS_MAX);
        let shuffled: Vec<u8> = order.into_iter().filter(|shard| *shard < k + m).collect();
        let (given, lost) = shuffled.split_at(k.into());
        for kernel in Kernel::available() {
            let code = ErasureCode::new(k, m).unwrap().with_kernel(*kernel);
            check(&code, &stripe(&code, seed, len), given, lost);
        }
    }

    #[test]
    fn any_range_is_reconstructed_from_the_same_range(start in 0usize..8192, len in 1usize..4096) {
        let code = ErasureCode::new(4, 2).unwrap();
        let ranges: Vec<Vec<u8>> = stripe(&code, 5, 12288).iter().map(|s| s[start..start + len].to_vec()).collect();
        check(&code, &ranges, &[5, 1, 4, 3], &[0, 2]);
    }

    /// Our kernels with the matrix of an independent implementation give that implementation's parity.
    #[test]
    fn another_implementation_encodes_the_same(k in 1usize..=16, m in 1usize..=4, len in 1usize..300, seed in any::<u64>()) {
        let theirs = reed_solomon_erasure::galois_8::ReedSolomon::new(k, m).unwrap();
        let data: Vec<Vec<u8>> = (0..k).map(|j| bytes(seed ^ j as u64, len)).collect();
        let mut expected = vec![vec![0u8; len]; m];
        theirs.encode_sep(&data, &mut expected).unwrap();
        for kernel in Kernel::available() {
            let mut parity = vec![vec![0u8; len]; m];
            let mut outputs: Vec<&mut [u8]> = parity.iter_mut().map(Vec::as_mut_slice).collect();
            kernel.combine(&their_rows(&theirs, k, m), &slices(&data), &mut outputs);
            prop_assert!(parity == expected, "{:?}", kernel);
        }
    }
}

/// Their parity matrix, learned by encoding unit vectors: byte j of data shard j is 1.
fn their_rows(theirs: &reed_solomon_erasure::galois_8::ReedSolomon, k: usize, m: usize) -> Vec<u8> {
    let unit: Vec<Vec<u8>> = (0..k).map(|j| (0..k).map(|at| u8::from(at == j)).collect()).collect();
    let mut rows = vec![vec![0u8; k]; m];
    theirs.encode_sep(&unit, &mut rows).unwrap();
    rows.concat()
}
