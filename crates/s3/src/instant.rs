//! Instants as text: ISO 8601 for policies, token answers and the audit log. UTC, years 0 to 9999.

const DAY_S: i64 = 86_400;

/// `2026-11-22T04:05:06Z`.
pub fn format_s(at_s: i64) -> String {
    let (year, month, day) = civil(at_s.div_euclid(DAY_S));
    let second = at_s.rem_euclid(DAY_S);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// `2026-11-22T04:05:06.123456Z`.
pub(crate) fn format_ns(at_ns: i64) -> String {
    let mut text = format_s(at_ns.div_euclid(1_000_000_000));
    text.pop();
    format!("{text}.{:06}Z", at_ns.rem_euclid(1_000_000_000) / 1000)
}

/// Seconds since 1970 of `YYYY-MM-DD`, optionally with `Thh:mm[:ss[.fraction]]` and then `Z` or `+hh:mm`.
pub(crate) fn parse(text: &str) -> Option<i64> {
    let (date, time) = match text.split_once('T') {
        Some((date, time)) => (date, Some(time)),
        None => (text, None),
    };
    let mut fields = date.split('-');
    let (year, month, day) =
        (digits(fields.next()?, 4)?, digits(fields.next()?, 2)?, digits(fields.next()?, 2)?);
    if fields.next().is_some() || !(1..=12).contains(&month) || day < 1 {
        return None;
    }
    let days = days_since_1970(year, month, day);
    // The day exists in that month exactly if the inverse function returns the same date.
    if civil(days) != (year, month, day) {
        return None;
    }
    Some(days * DAY_S + time.map_or(Some(0), parse_time)?)
}

/// Seconds since midnight UTC; the zone may move them outside of the day.
fn parse_time(text: &str) -> Option<i64> {
    let (clock, offset_s) = match text.strip_suffix('Z') {
        Some(clock) => (clock, 0),
        None => {
            let at = text.rfind(['+', '-'])?;
            let (clock, zone) = text.split_at(at);
            let (hours, minutes) = zone[1..].split_once(':')?;
            let offset_s = bounded(hours, 23)? * 3600 + bounded(minutes, 59)? * 60;
            (clock, if zone.starts_with('-') { -offset_s } else { offset_s })
        }
    };
    let mut fields = clock.split(':');
    let (hour, minute) = (bounded(fields.next()?, 23)?, bounded(fields.next()?, 59)?);
    let second = match fields.next() {
        Some(second) => {
            let (whole, fraction) = second.split_once('.').unwrap_or((second, "0"));
            if fraction.is_empty() || !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
                return None;
            }
            bounded(whole, 59)?
        }
        None => 0,
    };
    fields.next().is_none().then_some(hour * 3600 + minute * 60 + second - offset_s)
}

fn digits(text: &str, count: usize) -> Option<i64> {
    let valid = text.len() == count && text.bytes().all(|byte| byte.is_ascii_digit());
    valid.then(|| text.parse().ok())?
}

fn bounded(text: &str, most: i64) -> Option<i64> {
    digits(text, 2).filter(|number| *number <= most)
}

/// Days since 1970-01-01. Years are counted from March, so that the leap day is the last day of a year.
fn days_since_1970(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let (era, year_of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

/// Year, month and day from the number of days since 1970-01-01.
fn civil(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let (era, day_of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[track_caller]
    fn check(text: &str, expected: Option<i64>) {
        assert_eq!(parse(text), expected, "{text}");
    }

    #[test]
    fn dates_and_times_are_read() {
        check("1970-01-01", Some(0));
        check("1970-01-01T00:00:01Z", Some(1));
        check("2000-02-29T12:00:00Z", Some(951_825_600));
        check("2026-11-22T04:05:06Z", Some(1_795_320_306));
        check("2026-11-22T04:05:06.789Z", Some(1_795_320_306));
        check("2026-11-22T06:05:06+02:00", Some(1_795_320_306));
        check("2026-11-22T04:05Z", Some(1_795_320_300));
        check("1969-12-31T23:59:59Z", Some(-1));
    }

    #[test]
    fn what_is_no_date_is_refused() {
        for text in [
            "",
            "2026",
            "2026-11",
            "2026-13-01",
            "2026-02-29",
            "2026-11-31",
            "2026-11-22T",
            "2026-11-22T04",
            "2026-11-22T24:00Z",
            "2026-11-22T04:05",
            "2026-11-22T04:05:60Z",
            "2026-11-22T04:05:06.Z",
            "+2026-1-22",
            "2026-11-22T04:05:06+2:00",
            "2026-11-22-01",
            "2026-11-22T04:05:06:07Z",
        ] {
            check(text, None);
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_again(at_s in -62_000_000_000_i64..253_402_300_799) {
            prop_assert_eq!(parse(&format_s(at_s)), Some(at_s));
        }
    }

    #[test]
    fn fractions_are_shown_in_microseconds() {
        assert_eq!(format_ns(1_795_320_306_000_001_999), "2026-11-22T04:05:06.000001Z");
    }
}
