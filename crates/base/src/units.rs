//! Sizes in bytes, alignment, durations, and their text for people.

/// The unit of checksum and device I/O.
pub const BLOCK_BYTES: u64 = 4096;
/// 2^10 bytes.
pub const KIB: u64 = 1 << 10;
/// 2^20 bytes.
pub const MIB: u64 = 1 << 20;
/// 2^30 bytes.
pub const GIB: u64 = 1 << 30;

/// Rounds `value` up to a multiple of `unit`, a power of two.
pub const fn align_up(value: u64, unit: u64) -> u64 {
    (value + unit - 1) & !(unit - 1)
}

/// Rounds `value` down to a multiple of `unit`, a power of two.
pub const fn align_down(value: u64, unit: u64) -> u64 {
    value & !(unit - 1)
}

/// The text is not a size.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a size: text={0:?} (write 10GiB, 512MiB, 4KiB, 2TB or a number of bytes)")]
pub struct ParseSizeError(String);

/// Parses `10GiB`, `10G` (binary), `10GB` (decimal), `4096`. Fractions such as `1.5TiB` are allowed.
pub fn parse_size(text: &str) -> Result<u64, ParseSizeError> {
    let refuse = || ParseSizeError(text.to_owned());
    let trimmed = text.trim();
    let split = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(split);
    let factor: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => KIB,
        "m" | "mib" => MIB,
        "g" | "gib" => GIB,
        "t" | "tib" => GIB << 10,
        "p" | "pib" => GIB << 20,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        "pb" => 1_000_000_000_000_000,
        _ => return Err(refuse()),
    };
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(factor).ok_or_else(refuse);
    }
    let value = number.parse::<f64>().map_err(|_| refuse())? * factor as f64;
    if value.is_finite() && (0.0..9.0e18).contains(&value) { Ok(value as u64) } else { Err(refuse()) }
}

/// Formats bytes for people, in binary units: `1.5 GiB`.
pub fn format_size(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < KIB {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / KIB as f64;
    let mut unit = 0;
    while value >= 1023.995 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.2} {}", UNITS[unit])
}

/// The text is not a duration.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a duration: text={0:?} (write numbers with s, m, h, d or w: 30s, 2h, 1d5h, 1w)")]
pub struct ParseDurationError(String);

/// Units of durations and their seconds, the longest first.
const DURATION_UNITS: [(char, u64); 5] = [('w', 604_800), ('d', 86_400), ('h', 3600), ('m', 60), ('s', 1)];

/// Parses `30s`, `2h`, `1d5h`, `1w`. Returns seconds.
pub fn parse_duration(text: &str) -> Result<u64, ParseDurationError> {
    let refuse = || ParseDurationError(text.to_owned());
    let mut rest = text.trim();
    let mut seconds = 0_u64;
    loop {
        let end = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(refuse)?;
        let number: u64 = rest[..end].parse().map_err(|_| refuse())?;
        let unit = rest[end..].chars().next().ok_or_else(refuse)?;
        let (_, factor) = DURATION_UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(refuse)?;
        let part = number.checked_mul(*factor).ok_or_else(refuse)?;
        seconds = seconds.checked_add(part).ok_or_else(refuse)?;
        rest = &rest[end + unit.len_utf8()..];
        if rest.is_empty() {
            return Ok(seconds);
        }
    }
}

/// Formats seconds for people, in the form that [`parse_duration`] reads: `1d5h`.
pub fn format_duration(seconds: u64) -> String {
    let (mut text, mut rest) = (String::new(), seconds);
    for (unit, factor) in DURATION_UNITS {
        if rest >= factor {
            text.push_str(&format!("{}{unit}", rest / factor));
            rest %= factor;
        }
    }
    if text.is_empty() { "0s".to_owned() } else { text }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_as_people_write_them() {
        for (text, seconds) in [
            ("3s", 3),
            ("2h", 7200),
            ("4m", 240),
            ("1d", 86_400),
            ("1d5h", 104_400),
            ("1w", 604_800),
            (" 0s ", 0),
            ("1h1h", 7200),
        ] {
            assert_eq!(parse_duration(text), Ok(seconds), "{text}");
        }
        let too_long = ["99999999999999w", "18446744073709551615s1s", "18446744073709551616s"];
        for text in
            ["", " ", "3", "s", "1x", "-1s", "1.5h", "1d 5h", "1d5", "1é", "1é5s"].iter().chain(&too_long)
        {
            assert!(parse_duration(text).is_err(), "{text}");
        }
        let told = parse_duration("soon").unwrap_err().to_string();
        assert_eq!(
            told,
            "not a duration: text=\"soon\" (write numbers with s, m, h, d or w: 30s, 2h, 1d5h, 1w)"
        );
    }

    #[test]
    fn durations_are_written_as_they_are_read() {
        for (seconds, text) in [
            (0, "0s"),
            (59, "59s"),
            (3600, "1h"),
            (104_400, "1d5h"),
            (604_800, "1w"),
            (694_861, "1w1d1h1m1s"),
        ] {
            assert_eq!(format_duration(seconds), text);
        }
        assert_eq!(parse_duration(&format_duration(u64::MAX)), Ok(u64::MAX));
    }

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, bytes) in [
            ("4096", 4096),
            ("4k", 4096),
            ("10GiB", 10 * GIB),
            ("2 TB", 2_000_000_000_000),
            ("1.5g", 3 * GIB / 2),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for text in ["", "x", "-1", "10XB", "1e99T", "99999999999999T"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_written_with_the_nearest_unit() {
        assert_eq!(format_size(0), "0 B");
        assert_eq!(format_size(1536), "1.50 KiB");
        assert_eq!(format_size(GIB), "1.00 GiB");
    }
}
