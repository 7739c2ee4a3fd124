//! Stored checksums in the fields of inputs and outputs, one field for each algorithm.

use client::object::{Checksum as StoredChecksum, ChecksumKind};
use s3s::dto::{Checksum, ChecksumType};

use crate::hash;

/// Sets the field of an output for a checksum. The value is the checksum's type, for outputs that have it.
macro_rules! set_checksum {
    ($output:ident, $checksum:expr, $parts:expr) => {{
        let fields = $crate::ops::checksum::checksum_fields($checksum, $parts);
        $output.checksum_crc32 = fields.checksum_crc32;
        $output.checksum_crc32c = fields.checksum_crc32c;
        $output.checksum_crc64nvme = fields.checksum_crc64nvme;
        $output.checksum_sha1 = fields.checksum_sha1;
        $output.checksum_sha256 = fields.checksum_sha256;
        fields.checksum_type
    }};
}
pub(crate) use set_checksum;

/// The checksums in an input, in a fixed order.
macro_rules! checksums_of {
    ($input:expr) => {
        [
            &$input.checksum_crc32,
            &$input.checksum_crc32c,
            &$input.checksum_crc64nvme,
            &$input.checksum_sha1,
            &$input.checksum_sha256,
        ]
    };
}
pub(crate) use checksums_of;

/// A checksum as S3 writes it.
pub(crate) fn checksum_fields(checksum: &StoredChecksum, parts: usize) -> Checksum {
    use client::object::ChecksumAlgorithm as Algorithm;
    let mut value = hash::base64(&checksum.value);
    if checksum.of.kind == ChecksumKind::Composite && parts > 0 {
        value = format!("{value}-{parts}");
    }
    let mut fields = Checksum { checksum_type: Some(checksum_kind(checksum.of.kind)), ..Checksum::default() };
    match checksum.of.algorithm {
        Algorithm::Crc32 => fields.checksum_crc32 = Some(value),
        Algorithm::Crc32c => fields.checksum_crc32c = Some(value),
        Algorithm::Crc64Nvme => fields.checksum_crc64nvme = Some(value),
        Algorithm::Sha1 => fields.checksum_sha1 = Some(value),
        Algorithm::Sha256 => fields.checksum_sha256 = Some(value),
    }
    fields
}

/// The type of a checksum in the terms of S3.
pub(crate) fn checksum_kind(kind: ChecksumKind) -> ChecksumType {
    ChecksumType::from_static(match kind {
        ChecksumKind::FullObject => ChecksumType::FULL_OBJECT,
        ChecksumKind::Composite => ChecksumType::COMPOSITE,
    })
}
