//! How an extent is protected: width n, read threshold k, write threshold w.
//!
//! An extent is cut into k data shards, n - k parity shards are computed, and each of the n goes to another failure
//! domain. Any k of them give the bytes back. A write is acknowledged once w of them are durable; repair writes the
//! others, which are owed, later.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::SHARDS_MAX;

const DATA_MAX: u32 = 16;
const PARITY_MAX: u32 = 4;
const COPIES_MAX: u32 = 5;

/// How an extent is protected. Invariant: `1 <= k <= w <= n <= 20`.
///
/// # Text
/// | written | means |
/// |---|---|
/// | `12/7/9` | n/k/w: 12 shards, any 7 read, acknowledged at 9 |
/// | `4+2` | k+m: 4 data shards and 2 parity shards, with the standard write threshold: 6/4/5 |
/// | `r3` | 3 copies: the same as 1+2, 3/1/2 |
///
/// The standard write threshold is `w = k + ceil(m / 2)`: half of the parity, rounded up, is durable before a write
/// is acknowledged, so acknowledged data always survives at least one loss at once if there is any parity. That
/// makes `r2` 2/1/2: a write with one copy would survive nothing. While one of two drives is missing, writes go on
/// only under a narrower profile, which is the writer's explicit choice.
///
/// [`fmt::Display`] gives the short form if it means the same, else n/k/w. Serialized as that text.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Profile {
    n: u8,
    k: u8,
    w: u8,
}

/// Why a profile was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParseProfileError {
    /// The text has none of the three forms.
    #[error(
        "unknown profile: text={text:?} (write k+m such as 4+2, n/k/w such as 12/7/9, or r3 for 3 copies)"
    )]
    Unknown {
        /// The text.
        text: String,
    },
    /// Too few or too many data shards.
    #[error("data shards out of range: k={k} (1 to 16)")]
    DataShards {
        /// The number given.
        k: u32,
    },
    /// Too many parity shards for the short form.
    #[error("parity shards out of range: m={m} (0 to 4; n/k/w such as 12/7/9 allows more)")]
    ParityShards {
        /// The number given.
        m: u32,
    },
    /// Too few or too many copies.
    #[error("copies out of range: copies={copies} (1 to 5)")]
    Copies {
        /// The number given.
        copies: u32,
    },
    /// Width and thresholds do not fit together.
    #[error("thresholds out of range: n={n} k={k} w={w} (1 <= k <= w <= n <= 20)")]
    Thresholds {
        /// Width.
        n: u32,
        /// Read threshold.
        k: u32,
        /// Write threshold.
        w: u32,
    },
}

impl Profile {
    /// One copy on one drive, `1+0`: no protection.
    pub const SINGLE: Profile = Profile { n: 1, k: 1, w: 1 };

    /// The profile n/k/w.
    pub fn new(n: u32, k: u32, w: u32) -> Result<Self, ParseProfileError> {
        if 1 <= k && k <= w && w <= n && n <= u32::from(SHARDS_MAX) {
            Ok(Self { n: n as u8, k: k as u8, w: w as u8 })
        } else {
            Err(ParseProfileError::Thresholds { n, k, w })
        }
    }

    /// The profile k+m with the standard write threshold.
    pub fn from_data_and_parity(k: u32, m: u32) -> Result<Self, ParseProfileError> {
        if !(1..=DATA_MAX).contains(&k) {
            return Err(ParseProfileError::DataShards { k });
        }
        if m > PARITY_MAX {
            return Err(ParseProfileError::ParityShards { m });
        }
        Self::new(k + m, k, k + m.div_ceil(2))
    }

    /// The profile of this many copies, `r3` for 3.
    pub fn from_copies(copies: u32) -> Result<Self, ParseProfileError> {
        if !(1..=COPIES_MAX).contains(&copies) {
            return Err(ParseProfileError::Copies { copies });
        }
        Self::from_data_and_parity(1, copies - 1)
    }

    /// Width: shards of an extent, each in its own failure domain.
    pub fn n(self) -> u8 {
        self.n
    }

    /// Read threshold: the number of data shards. Any k shards give the bytes back.
    pub fn k(self) -> u8 {
        self.k
    }

    /// Write threshold: shards that must be durable before a write is acknowledged.
    pub fn w(self) -> u8 {
        self.w
    }

    /// Parity shards, n - k.
    pub fn m(self) -> u8 {
        self.n - self.k
    }

    /// This profile on fewer domains than n: the same parity and the same margin at acknowledgement, fewer data
    /// shards. 4+2 becomes 2+2 on four domains and 1+2 on three.
    ///
    /// The profile itself if the domains suffice; `None` if not even one data shard fits beside the parity.
    pub fn narrowed(self, domains: u32) -> Option<Self> {
        let missing = u32::from(self.n).saturating_sub(domains);
        let missing = u8::try_from(missing).ok().filter(|missing| *missing < self.k)?;
        Some(Self { n: self.n - missing, k: self.k - missing, w: self.w - missing })
    }

    /// The operations that still work for data on n domains when `lost` of them are down.
    pub fn with_lost(self, lost: u8) -> DegradedService {
        let reachable = self.n.saturating_sub(lost);
        let writes = reachable >= self.w;
        DegradedService {
            reads: reachable >= self.k,
            writes,
            owed_per_extent: if writes { self.n - reachable } else { 0 },
        }
    }

    /// The promises of this profile on a cluster of `domains` failure domains.
    pub fn explain(self, domains: u32) -> ProfileExplanation {
        let reachable = u8::try_from(domains).unwrap_or(u8::MAX).min(self.n);
        ProfileExplanation {
            profile: self,
            domains,
            placeable: domains >= u32::from(self.n),
            narrowed: if domains < u32::from(self.n) { self.narrowed(domains) } else { None },
            overhead: f64::from(self.n) / f64::from(self.k),
            usable_fraction: f64::from(self.k) / f64::from(self.n),
            reads_survive: reachable.checked_sub(self.k),
            writes_survive: reachable.checked_sub(self.w),
            acknowledged_survives_at_once: self.w - self.k,
            acknowledged_survives_after_repair: self.n - self.k,
            spare_domains: domains.saturating_sub(u32::from(self.n)),
        }
    }

    fn short_form(self) -> Option<String> {
        let standard = Self::from_data_and_parity(u32::from(self.k), u32::from(self.m())).ok()?;
        match (standard == self, self.k, self.m()) {
            (false, ..) => None,
            (true, 1, 1..) => Some(format!("r{}", self.n)),
            (true, k, m) => Some(format!("{k}+{m}")),
        }
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.short_form() {
            Some(short) => f.pad(&short),
            None => f.pad(&format!("{}/{}/{}", self.n, self.k, self.w)),
        }
    }
}

impl fmt::Debug for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.n, self.k, self.w)
    }
}

impl FromStr for Profile {
    type Err = ParseProfileError;

    fn from_str(text: &str) -> Result<Self, ParseProfileError> {
        let trimmed = text.trim();
        let unknown = || ParseProfileError::Unknown { text: text.to_owned() };
        let numbers =
            |separator: char| -> Option<Vec<u32>> { trimmed.split(separator).map(number).collect() };
        if let Some(copies) = trimmed.strip_prefix(['r', 'R']) {
            return Self::from_copies(number(copies).ok_or_else(unknown)?);
        }
        if let Some([n, k, w]) = numbers('/').as_deref() {
            return Self::new(*n, *k, *w);
        }
        if let Some([k, m]) = numbers('+').as_deref() {
            return Self::from_data_and_parity(*k, *m);
        }
        Err(unknown())
    }
}

/// Parses digits only: `u32::from_str` would accept a sign.
fn number(text: &str) -> Option<u32> {
    if text.bytes().all(|byte| byte.is_ascii_digit()) { text.parse().ok() } else { None }
}

impl Serialize for Profile {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Profile {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = <String as Deserialize>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// The operations that still work when domains of a placement group are down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DegradedService {
    /// Data with all its shards written is readable.
    pub reads: bool,
    /// Extents can be acknowledged without narrowing.
    pub writes: bool,
    /// Owed shards of each new extent; 0 if writes are not possible.
    pub owed_per_extent: u8,
}

/// The promises of a profile on a number of failure domains. [`fmt::Display`] gives the text for people.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProfileExplanation {
    /// The profile.
    pub profile: Profile,
    /// Failure domains of the cluster.
    pub domains: u32,
    /// Whether each of the n shards gets a domain of its own.
    pub placeable: bool,
    /// The profile of new extents if the domains are too few and narrowing is possible.
    pub narrowed: Option<Profile>,
    /// Raw bytes per byte stored, n / k.
    pub overhead: f64,
    /// Share of raw space left for data, k / n, before reserves.
    pub usable_fraction: f64,
    /// Most losses after which fully written data is readable; `None` if it is unreadable even without a loss.
    ///
    /// With fewer domains than n, the missing ones count as lost already.
    pub reads_survive: Option<u8>,
    /// Most losses after which writes go on without narrowing; `None` if they are impossible even without a loss.
    pub writes_survive: Option<u8>,
    /// Losses that data survives right after its acknowledgement, w - k.
    pub acknowledged_survives_at_once: u8,
    /// Losses that data survives once repair has written the owed shards, n - k.
    pub acknowledged_survives_after_repair: u8,
    /// Domains beyond n, onto which a lost domain is rebuilt.
    pub spare_domains: u32,
}

impl fmt::Display for ProfileExplanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Profile { n, k, w } = self.profile;
        let survive = |what: &str, losses: Option<u8>| match losses {
            Some(losses) => format!("{what} survive the loss of {}", count(u32::from(losses), "domain")),
            None => format!("{what} are not possible on {}", count(self.domains, "domain")),
        };
        writeln!(
            f,
            "profile {} (n/k/w {n}/{k}/{w}) on {}",
            self.profile,
            count(self.domains, "failure domain")
        )?;
        writeln!(f, "  {}, {}", count(u32::from(k), "data shard"), count(u32::from(n - k), "parity shard"))?;
        writeln!(f, "  a write is acknowledged when {w} of {n} shards are durable")?;
        writeln!(
            f,
            "  {:.2} bytes stored per byte, {:.1} % of raw space usable before reserves",
            self.overhead,
            100.0 * self.usable_fraction
        )?;
        if !self.placeable {
            writeln!(f, "  cannot be placed: {n} domains needed, {} present", self.domains)?;
            if let Some(narrowed) = self.narrowed {
                writeln!(f, "  new extents are written as {narrowed} until domains are added")?;
            }
        }
        writeln!(f, "  {}", survive("reads", self.reads_survive))?;
        writeln!(f, "  {}", survive("writes", self.writes_survive))?;
        write!(
            f,
            "  acknowledged data survives {} at once, {} after repair",
            count(u32::from(self.acknowledged_survives_at_once), "loss"),
            count(u32::from(self.acknowledged_survives_after_repair), "loss"),
        )?;
        if self.spare_domains > 0 {
            write!(f, "\n  {} to rebuild onto", count(self.spare_domains, "spare domain"))?;
        }
        Ok(())
    }
}

fn count(number: u32, noun: &str) -> String {
    let plural = if noun.ends_with('s') { "es" } else { "s" };
    format!("{number} {noun}{}", if number == 1 { "" } else { plural })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[track_caller]
    fn check(text: &str, nkw: (u8, u8, u8), displayed: &str) {
        let profile: Profile = text.parse().unwrap();
        assert_eq!((profile.n(), profile.k(), profile.w()), nkw, "{text}");
        assert_eq!(profile.to_string(), displayed, "{text}");
        assert_eq!(serde_json::to_string(&profile).unwrap(), format!("{displayed:?}"));
        assert_eq!(serde_json::from_str::<Profile>(&format!("{text:?}")).unwrap(), profile);
    }

    #[test]
    fn profiles_are_read_in_three_forms_and_written_in_the_shortest() {
        check("1+0", (1, 1, 1), "1+0");
        check("r1", (1, 1, 1), "1+0");
        check("r2", (2, 1, 2), "r2");
        check("r3", (3, 1, 2), "r3");
        check("1+2", (3, 1, 2), "r3");
        check("3/1/2", (3, 1, 2), "r3");
        check("r5", (5, 1, 3), "r5");
        check("4+2", (6, 4, 5), "4+2");
        check(" 6/4/5 ", (6, 4, 5), "4+2");
        check("6/4/6", (6, 4, 6), "6/4/6");
        check("5+2", (7, 5, 6), "5+2");
        check("6+3", (9, 6, 8), "6+3");
        check("8+2", (10, 8, 9), "8+2");
        check("9+3", (12, 9, 11), "9+3");
        check("16+4", (20, 16, 18), "16+4");
        check("12/7/9", (12, 7, 9), "12/7/9");
        check("6/1/4", (6, 1, 4), "6/1/4");
        check("20/20/20", (20, 20, 20), "20/20/20");
        check("3+0", (3, 3, 3), "3+0");
    }

    #[track_caller]
    fn refuse(text: &str, reason: &str) {
        let error = text.parse::<Profile>().unwrap_err().to_string();
        assert!(error.contains(reason), "{text}: {error}");
    }

    #[test]
    fn a_refusal_says_what_is_allowed() {
        for text in
            ["", "x", "4", "4+", "+2", "4++2", "4+-2", "4/2", "6/4/5/1", "r", "rx", "3r", "99999999999+1"]
        {
            refuse(text, "write k+m such as 4+2");
        }
        refuse("0+2", "k=0 (1 to 16)");
        refuse("17+2", "k=17 (1 to 16)");
        refuse("300+2", "k=300 (1 to 16)");
        refuse("4+5", "m=5 (0 to 4; n/k/w");
        refuse("r0", "copies=0 (1 to 5)");
        refuse("r6", "copies=6 (1 to 5)");
        for text in ["6/0/1", "6/5/4", "6/4/7", "21/16/18", "257/1/1"] {
            refuse(text, "1 <= k <= w <= n <= 20");
        }
    }

    proptest! {
        #[test]
        fn the_displayed_form_gives_the_profile_back(n in 1u32..=20, k in 1u32..=20, w in 1u32..=20) {
            match Profile::new(n, k, w) {
                Ok(profile) => prop_assert_eq!(profile.to_string().parse::<Profile>(), Ok(profile)),
                Err(_) => prop_assert!(!(k <= w && w <= n)),
            }
        }

        #[test]
        fn with_parity_an_acknowledgement_survives_a_loss(k in 1u32..=16, m in 0u32..=4) {
            let profile = Profile::from_data_and_parity(k, m).unwrap();
            prop_assert_eq!(profile.w() > profile.k(), m > 0);
        }

        #[test]
        fn narrowing_keeps_parity_and_margin(k in 1u32..=16, m in 0u32..=4, domains in 0u32..30) {
            let profile = Profile::from_data_and_parity(k, m).unwrap();
            match profile.narrowed(domains) {
                Some(narrow) => {
                    prop_assert_eq!(u32::from(narrow.n()), domains.min(k + m));
                    prop_assert_eq!(narrow.m(), profile.m());
                    prop_assert_eq!(narrow.w() - narrow.k(), profile.w() - profile.k());
                }
                None => prop_assert!(domains <= m),
            }
        }
    }

    #[test]
    fn twelve_seven_nine_degrades_step_by_step() {
        let profile: Profile = "12/7/9".parse().unwrap();
        let with_lost = |lost| {
            let service = profile.with_lost(lost);
            (service.writes, service.reads, service.owed_per_extent)
        };
        assert_eq!(with_lost(0), (true, true, 0));
        assert_eq!(with_lost(3), (true, true, 3));
        assert_eq!(with_lost(4), (false, true, 0));
        assert_eq!(with_lost(5), (false, true, 0));
        assert_eq!(with_lost(6), (false, false, 0));
        assert_eq!(with_lost(200), (false, false, 0));
    }

    #[test]
    fn an_explanation_tells_reads_writes_and_acknowledged_data_apart() {
        let explained = "12/7/9".parse::<Profile>().unwrap().explain(12);
        assert!((explained.overhead - 1.714).abs() < 0.001);
        assert!((explained.usable_fraction - 0.583).abs() < 0.001);
        assert_eq!((explained.reads_survive, explained.writes_survive), (Some(5), Some(3)));
        assert_eq!(explained.acknowledged_survives_at_once, 2);
        assert_eq!(explained.acknowledged_survives_after_repair, 5);
        assert!(explained.placeable);

        let explained = "8+2".parse::<Profile>().unwrap().explain(10);
        assert_eq!((explained.reads_survive, explained.writes_survive), (Some(2), Some(1)));
        assert_eq!(explained.acknowledged_survives_at_once, 1);
    }

    #[test]
    fn missing_domains_count_as_lost() {
        let profile: Profile = "12/7/9".parse().unwrap();
        for (domains, reads, writes) in [
            (11, Some(4), Some(2)),
            (9, Some(2), Some(0)),
            (8, Some(1), None),
            (6, None, None),
            (0, None, None),
        ] {
            let explained = profile.explain(domains);
            assert!(!explained.placeable);
            assert_eq!((explained.reads_survive, explained.writes_survive), (reads, writes), "{domains}");
        }
        assert_eq!(profile.explain(300).spare_domains, 288);
    }

    #[test]
    fn four_plus_two_narrows_to_what_there_is() {
        let profile: Profile = "4+2".parse().unwrap();
        let narrowed = |domains| profile.explain(domains).narrowed.map(|narrow| narrow.to_string());
        assert_eq!(narrowed(6), None);
        assert_eq!(narrowed(5).as_deref(), Some("3+2"));
        assert_eq!(narrowed(4).as_deref(), Some("2+2"));
        assert_eq!(narrowed(3).as_deref(), Some("r3"));
        assert_eq!(narrowed(2), None);
    }

    #[test]
    fn the_text_for_people_names_every_figure() {
        let text = "4+2".parse::<Profile>().unwrap().explain(4).to_string();
        for part in [
            "profile 4+2 (n/k/w 6/4/5) on 4 failure domains",
            "4 data shards, 2 parity shards",
            "when 5 of 6 shards are durable",
            "1.50 bytes stored per byte, 66.7 % of raw",
            "cannot be placed: 6 domains needed, 4 present",
            "written as 2+2",
            "reads survive the loss of 0 domains",
            "writes are not possible on 4 domains",
            "survives 1 loss at once, 2 losses after repair",
        ] {
            assert!(text.contains(part), "{part}\n{text}");
        }
        assert!(
            "r2".parse::<Profile>().unwrap().explain(3).to_string().contains("1 spare domain to rebuild")
        );
    }
}
