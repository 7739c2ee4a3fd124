//! Copies of all metadata that the cluster makes by itself. `docs/formats/backup.md` describes the record.

use serde::{Deserialize, Serialize};

use crate::ledger::KEYS;
use crate::{ControlChange, ControlError, ControlView};

const NAME: &str = "backups";

/// Where backups go.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BackupPlace {
    /// A directory of the machine that owns the ledgers.
    Directory(String),
    /// The object store with this number.
    Store(u32),
}

/// A backup.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackupRecord {
    /// Its number, never used again.
    pub number: u64,
    /// When it was begun, in seconds since 1970.
    pub begun_s: i64,
    /// Its size in bytes.
    pub bytes: u64,
    /// Its objects in a store.
    pub parts: u32,
}

/// A backup that was begun: it may be there, in part or whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BegunRecord {
    /// Where it goes.
    pub at: BackupPlace,
    /// It.
    pub backup: BackupRecord,
}

/// When backups are made, where they go, and those that there are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackupsRecord {
    /// Seconds from one to the next.
    pub every_s: u64,
    /// How many are kept.
    pub keep: u32,
    /// Where they go.
    pub to: BackupPlace,
    /// The number of the next one.
    pub next: u64,
    /// None are made now.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub off: bool,
    /// How often one was asked for at once.
    #[serde(default)]
    pub asked: u64,
    /// How often that was done.
    #[serde(default)]
    pub served: u64,
    /// One that was begun.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub begun: Option<BegunRecord>,
    /// Those that are whole, oldest first.
    #[serde(default)]
    pub made: Vec<BackupRecord>,
}

impl BackupsRecord {
    /// Seconds since the last one; `None`: there is none. A clock that was set back counts as a long time.
    pub fn age_s(&self, now_s: i64) -> Option<u64> {
        let last = self.made.last()?;
        Some(u64::try_from(now_s - last.begun_s).unwrap_or(u64::MAX))
    }

    /// Whether one is to be made now.
    pub fn is_due(&self, now_s: i64) -> bool {
        !self.off && (self.asked > self.served || self.age_s(now_s).is_none_or(|age_s| age_s >= self.every_s))
    }

    /// The oldest one, if there are more than are kept.
    pub fn surplus(&self) -> Option<&BackupRecord> {
        self.made.first().filter(|_| self.made.len() > self.keep as usize)
    }

    /// Whether both are made at the same times and go to the same place.
    pub fn is_same_plan(&self, other: &Self) -> bool {
        (self.every_s, self.keep, &self.to, self.off) == (other.every_s, other.keep, &other.to, other.off)
    }
}

impl ControlChange {
    /// Sets when backups are made.
    pub fn backups(&mut self, record: &BackupsRecord) -> &mut Self {
        self.put(KEYS.value(NAME), record)
    }
}

impl ControlView {
    /// When backups are made; `None`: nobody has asked for any.
    pub fn backups(&self) -> Result<Option<BackupsRecord>, ControlError> {
        self.one(NAME)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn backup(number: u64, begun_s: i64) -> BackupRecord {
        BackupRecord { number, begun_s, bytes: 5, parts: 1 }
    }

    fn record() -> BackupsRecord {
        let (to, made, asked, served) = (BackupPlace::Store(3), Vec::new(), 0, 0);
        BackupsRecord { every_s: 60, keep: 2, to, next: 1, off: false, asked, served, begun: None, made }
    }

    #[test]
    fn the_record_is_what_the_format_says() {
        let mut record = record();
        let text = r#"{"every_s":60,"keep":2,"to":{"store":3},"next":1,"asked":0,"served":0,"made":[]}"#;
        assert_eq!(serde_json::to_string(&record).unwrap(), text);
        record.to = BackupPlace::Directory("/b".to_owned());
        record.asked = 1;
        record.begun = Some(BegunRecord { at: record.to.clone(), backup: backup(1, 9) });
        let text = r#"{"every_s":60,"keep":2,"to":{"directory":"/b"},"next":1,"asked":1,"served":0,"begun":{"at":{"directory":"/b"},"backup":{"number":1,"begun_s":9,"bytes":5,"parts":1}},"made":[]}"#;
        assert_eq!(serde_json::to_string(&record).unwrap(), text);
        assert_eq!(serde_json::from_str::<BackupsRecord>(text).unwrap(), record);
    }

    #[test]
    fn one_is_due_after_its_time_when_asked_for_and_when_the_clock_was_set_back() {
        let mut record = record();
        assert!(record.is_due(0), "there is none");
        record.made.push(backup(0, 1000));
        assert!(!record.is_due(1059));
        assert!(record.is_due(1060));
        assert!(record.is_due(900));
        record.asked = 1;
        assert!(record.is_due(1001));
        record.served = 1;
        assert!(!record.is_due(1001));
        record.off = true;
        assert!(!record.is_due(5000));
    }

    #[test]
    fn the_oldest_is_given_up_when_there_are_too_many() {
        let mut record = record();
        record.made = vec![backup(4, 9), backup(5, 3)];
        assert_eq!(record.surplus(), None);
        record.made.push(backup(6, 4));
        assert_eq!(record.surplus(), Some(&backup(4, 9)));
    }
}
