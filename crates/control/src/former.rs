//! What records of earlier versions had and no record has now: what belongs to one machine and not to the cluster.
//!
//! A node takes it over once, when it starts for the first time with this version. A record loses it when it is written again.

use base::DriveUuid;
use serde::Deserialize;

use crate::ledger::{DRIVES, FILESYSTEMS};
use crate::{ControlError, ControlView};

/// Former members of a drive's record.
pub(crate) const OF_DRIVE: &[&str] = &["path"];
/// Former members of a filesystem's record.
pub(crate) const OF_FILESYSTEM: &[&str] = &["mount", "mount_options"];

#[derive(Deserialize)]
struct FormerDrive {
    uuid: DriveUuid,
    path: Option<String>,
}

/// Where and how a filesystem was mounted.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct FormerMount {
    /// The filesystem's number.
    pub id: u32,
    /// The mount point, if there was one.
    #[serde(rename = "mount")]
    pub path: Option<String>,
    /// Mount options.
    #[serde(rename = "mount_options", default)]
    pub options: String,
}

impl ControlView {
    /// Where drives were, as earlier versions wrote it down.
    pub fn former_paths(&self) -> Result<Vec<(DriveUuid, String)>, ControlError> {
        let drives = self.all::<FormerDrive>(DRIVES)?.into_iter();
        Ok(drives.filter_map(|drive| Some((drive.uuid, drive.path?))).collect())
    }

    /// Where filesystems were mounted, as earlier versions wrote it down.
    pub fn former_mounts(&self) -> Result<Vec<FormerMount>, ControlError> {
        let mut mounts = self.all::<FormerMount>(FILESYSTEMS)?;
        mounts.retain(|mount| mount.path.is_some() || !mount.options.is_empty());
        Ok(mounts)
    }
}

#[cfg(test)]
mod tests {
    use base::env::Env;
    use std::sync::Arc;

    use meta::log::MemLog;
    use meta::records::{Records, RecordsOptions};
    use meta::state::{MemState, State};
    use serde_json::{Value, json};

    use super::*;
    use crate::ledger::KEYS;
    use crate::{CONTROL_LEDGER, Control, ControlChange};

    /// A ledger with a record of an earlier version.
    async fn earlier(key: &[u8], stored: &Value) -> (Control, Arc<dyn State>) {
        let (log, state) = (Arc::new(MemLog::new()), Arc::new(MemState::default()));
        let options = RecordsOptions {
            ledger: CONTROL_LEDGER,
            log: log.clone(),
            state: state.clone(),
            env: Env::real(),
            vacant: None,
        };
        let records = Records::open(options).await.unwrap();
        let change = vec![(key.to_owned(), Some(serde_json::to_vec(stored).unwrap()))];
        records.commit(|_, _| Ok::<_, ControlError>(change)).await.unwrap();
        (Control::open(&Env::real(), log, state.clone(), None).await.unwrap(), state)
    }

    /// The record as it is stored after `change` has written it as it was read.
    async fn rewritten(
        key: &[u8],
        stored: &Value,
        change: impl FnOnce(&ControlView, &mut ControlChange),
    ) -> Value {
        let (control, state) = earlier(key, stored).await;
        let view = control.view().unwrap();
        let mut next = view.change();
        change(&view, &mut next);
        control.commit(next).await.unwrap();
        serde_json::from_slice(&state.get(key).unwrap().unwrap()).unwrap()
    }

    fn drive(path: Option<&str>) -> Value {
        let mut record = json!({
            "id": 3,
            "uuid": "30313233-3435-3637-3839-616263646566",
            "node": 0,
            "capacity_bytes": 1000,
            "state": "up",
            "scrub": {"started_ns": null, "after": null, "verified_ns": null},
            "mark": {"incarnation": 2, "seq": 7},
            "newer": [1],
            "revision": 1,
        });
        path.into_iter().for_each(|path| record["path"] = path.into());
        record
    }

    #[tokio::test]
    async fn the_path_of_a_drive_is_read_from_an_old_record_and_leaves_it_when_it_is_written() {
        let key = KEYS.control(DRIVES, 3);
        let (control, _) = earlier(&key, &drive(Some("/dev/sdb"))).await;
        let uuid = DriveUuid(*b"0123456789abcdef");
        assert_eq!(control.view().unwrap().former_paths().unwrap(), [(uuid, "/dev/sdb".to_owned())]);
        let (control, _) = earlier(&key, &drive(None)).await;
        assert_eq!(control.view().unwrap().former_paths().unwrap(), []);
        let write = |view: &ControlView, next: &mut ControlChange| {
            next.drive(&view.drives().unwrap()[0]);
        };
        let mut expected = drive(None);
        expected["revision"] = 2.into();
        assert_eq!(rewritten(&key, &drive(Some("/dev/sdb")), write).await, expected, "what is newer stays");
    }

    #[tokio::test]
    async fn the_mount_of_a_filesystem_is_read_from_an_old_record_and_leaves_it_when_it_is_written() {
        let key = KEYS.control(FILESYSTEMS, 1);
        let present = json!({
            "id": 1,
            "name": "main",
            "ledger": 1,
            "profile": "4+2",
            "groups": [0],
            "sets": [],
            "provisioned_bytes": null,
            "newer": [1],
        });
        let mut old = present.clone();
        (old["mount"], old["mount_options"]) = ("/mnt".into(), "strict".into());
        let (control, _) = earlier(&key, &old).await;
        let mount = FormerMount { id: 1, path: Some("/mnt".to_owned()), options: "strict".to_owned() };
        assert_eq!(control.view().unwrap().former_mounts().unwrap(), [mount]);
        let (control, _) = earlier(&key, &present).await;
        assert_eq!(control.view().unwrap().former_mounts().unwrap(), []);
        let write = |view: &ControlView, next: &mut ControlChange| {
            next.filesystem(&view.filesystems().unwrap()[0]);
        };
        let mut expected = present.clone();
        expected["revision"] = 2.into();
        assert_eq!(rewritten(&key, &old, write).await, expected, "what is newer stays");
    }
}
