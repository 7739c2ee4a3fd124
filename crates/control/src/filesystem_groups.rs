//! Filesystem groups in the control ledger: the tiering settings that filesystems share. They are not related to
//! placement groups. `docs/formats/stores.md` describes the records.

use serde::{Deserialize, Serialize};

use crate::ledger::KEYS;
use crate::{ControlChange, ControlError, ControlView, FilesystemRecord};

/// Table byte; from the *times* of tiering.
const FILESYSTEM_GROUPS: u8 = b't';
const DEFAULT_ID: u32 = 0;
const DEFAULT_NAME: &str = "default";
const DEFAULT_RETENTION_S: u64 = 86_400;
const DEFAULT_CUE_S: u64 = 3600;

/// A filesystem group. The group named `default` always exists.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilesystemGroupRecord {
    /// Its number; 0 is `default`.
    pub id: u32,
    /// Its name, unique.
    pub name: String,
    /// Seconds for which uploaded data also stays on drives.
    pub retention_s: u64,
    /// Seconds between the writing of data and its upload.
    pub cue_s: u64,
}

/// The group `default`, until an operator changes it.
impl Default for FilesystemGroupRecord {
    fn default() -> Self {
        Self {
            id: DEFAULT_ID,
            name: DEFAULT_NAME.to_owned(),
            retention_s: DEFAULT_RETENTION_S,
            cue_s: DEFAULT_CUE_S,
        }
    }
}

impl FilesystemGroupRecord {
    /// Whether it is the group `default`.
    pub fn is_default(&self) -> bool {
        self.id == DEFAULT_ID
    }

    /// Whether a filesystem belongs to it.
    pub fn has(&self, filesystem: &FilesystemRecord) -> bool {
        filesystem.filesystem_group.unwrap_or(DEFAULT_ID) == self.id
    }

    /// The group's number in the record of a member filesystem.
    pub fn reference(&self) -> Option<u32> {
        (!self.is_default()).then_some(self.id)
    }
}

impl ControlChange {
    /// Adds or changes a filesystem group.
    pub fn filesystem_group(&mut self, record: &FilesystemGroupRecord) -> &mut Self {
        self.put(KEYS.control(FILESYSTEM_GROUPS, record.id), record)
    }

    /// Removes a filesystem group.
    pub fn remove_filesystem_group(&mut self, id: u32) -> &mut Self {
        self.remove(KEYS.control(FILESYSTEM_GROUPS, id))
    }
}

impl ControlView {
    /// All filesystem groups by number, `default` first. It is there even if the ledger has no record of it.
    pub fn filesystem_groups(&self) -> Result<Vec<FilesystemGroupRecord>, ControlError> {
        let mut groups: Vec<FilesystemGroupRecord> = self.all(FILESYSTEM_GROUPS)?;
        if !groups.first().is_some_and(FilesystemGroupRecord::is_default) {
            groups.insert(0, FilesystemGroupRecord::default());
        }
        Ok(groups)
    }
}

#[cfg(test)]
mod tests {
    use base::env::Env;
    use std::sync::Arc;

    use super::*;
    use crate::Control;
    use meta::log::{LedgerLog, MemLog};
    use meta::state::MemState;

    fn group(id: u32, name: &str) -> FilesystemGroupRecord {
        FilesystemGroupRecord { id, name: name.to_owned(), retention_s: 7200, cue_s: 60 }
    }

    #[tokio::test]
    async fn there_is_always_a_default_and_others_come_and_go() {
        let log: Arc<dyn LedgerLog> = Arc::new(MemLog::new());
        let control =
            Control::open(&Env::real(), log.clone(), Arc::new(MemState::default()), None).await.unwrap();
        assert_eq!(control.view().unwrap().filesystem_groups().unwrap(), [FilesystemGroupRecord::default()]);
        let mut change = control.view().unwrap().change();
        change.filesystem_group(&group(1, "fast"));
        control.commit(change).await.unwrap();
        assert_eq!(
            control.view().unwrap().filesystem_groups().unwrap(),
            [FilesystemGroupRecord::default(), group(1, "fast")]
        );
        let mut change = control.view().unwrap().change();
        change.filesystem_group(&group(0, "default")).remove_filesystem_group(1);
        control.commit(change).await.unwrap();
        drop(control);
        let control = Control::open(&Env::real(), log, Arc::new(MemState::default()), None).await.unwrap();
        assert_eq!(control.view().unwrap().filesystem_groups().unwrap(), [group(0, "default")]);
    }

    #[test]
    fn the_record_is_that_of_the_documentation_and_unknown_members_do_not_matter() {
        let text = r#"{"id":1,"name":"fast","retention_s":7200,"cue_s":60}"#;
        assert_eq!(serde_json::to_string(&group(1, "fast")).unwrap(), text);
        assert_eq!(serde_json::from_str::<FilesystemGroupRecord>(text).unwrap(), group(1, "fast"));
        let more = text.replacen('{', r#"{"more":1,"#, 1);
        assert_eq!(serde_json::from_str::<FilesystemGroupRecord>(&more).unwrap(), group(1, "fast"));
    }

    #[test]
    fn a_filesystem_that_names_no_group_is_in_the_default_one() {
        let text = r#"{"id":1,"name":"main","ledger":1,"profile":"4+2","groups":[0],"sets":[],"provisioned_bytes":null}"#;
        let mut filesystem: FilesystemRecord = serde_json::from_str(text).unwrap();
        let (default, fast) = (FilesystemGroupRecord::default(), group(1, "fast"));
        assert!(default.has(&filesystem) && !fast.has(&filesystem));
        filesystem.filesystem_group = fast.reference();
        assert!(fast.has(&filesystem) && !default.has(&filesystem));
        assert!(serde_json::to_string(&filesystem).unwrap().ends_with(r#","filesystem_group":1}"#));
        filesystem.filesystem_group = default.reference();
        assert_eq!(serde_json::to_string(&filesystem).unwrap(), text);
    }
}
