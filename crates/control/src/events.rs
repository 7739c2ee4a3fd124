//! The events of the cluster.

use wire::event::Event;

use crate::ledger::KEYS;
use crate::{ControlChange, ControlError, ControlView};

const EVENTS: u8 = b'e';
/// Most events that are kept; older ones are dropped.
const EVENTS_MAX: u32 = 4096;

impl ControlChange {
    /// Adds an event, and drops the oldest one beyond the limit.
    pub fn event(&mut self, event: &Event) -> &mut Self {
        if let Some(old) = event.id.checked_sub(EVENTS_MAX) {
            self.remove(KEYS.control(EVENTS, old));
        }
        self.put(KEYS.control(EVENTS, event.id), event)
    }
}

impl ControlView {
    /// The kept events, oldest first.
    pub fn events(&self) -> Result<Vec<Event>, ControlError> {
        self.all(EVENTS)
    }
}

#[cfg(test)]
mod tests {
    use base::env::Env;
    use std::sync::Arc;

    use wire::event::Severity;

    use super::*;
    use crate::Control;
    use meta::log::{LedgerLog, MemLog};
    use meta::state::MemState;

    fn event(id: u32) -> Event {
        let (subject, kind) = ("drive 3".to_owned(), "failed".to_owned());
        let text = "a write failed: /dev/sdb".to_owned();
        Event { id, time_s: 1_795_392_000, severity: Severity::Error, subject, kind, text }
    }

    #[tokio::test]
    async fn the_last_events_are_kept_in_their_order() {
        let log: Arc<dyn LedgerLog> = Arc::new(MemLog::new());
        let control = Control::open(&Env::real(), log, Arc::new(MemState::default()), None).await.unwrap();
        for first in (1..=EVENTS_MAX + 50).step_by(97) {
            let mut change = control.view().unwrap().change();
            (first..(first + 97).min(EVENTS_MAX + 51)).for_each(|id| {
                change.event(&event(id));
            });
            control.commit(change).await.unwrap();
        }
        let ids: Vec<u32> =
            control.view().unwrap().events().unwrap().into_iter().map(|event| event.id).collect();
        assert!(ids == (51..=EVENTS_MAX + 50).collect::<Vec<_>>(), "{:?}", &ids[..3]);
    }

    #[test]
    fn the_record_is_that_of_the_documentation_and_unknown_members_do_not_matter() {
        let text = r#"{"id":7,"time_s":1795392000,"severity":"error","subject":"drive 3","kind":"failed","text":"a write failed: /dev/sdb"}"#;
        assert_eq!(serde_json::to_string(&event(7)).unwrap(), text);
        assert_eq!(serde_json::from_str::<Event>(&text.replacen('{', r#"{"more":1,"#, 1)).unwrap(), event(7));
    }
}
