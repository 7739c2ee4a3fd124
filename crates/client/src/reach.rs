//! What a client does while the machine with the owner and the drives is away.

use std::time::Duration;

use tokio::sync::watch;
use wire::link::Contact;

/// How long requests to the owner wait for one, by default.
const OWNER_PATIENCE: Duration = Duration::from_secs(60);
/// Longer than any program lives: a signal ends the wait.
const FOR_EVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Where owner and drives are, and how long a client waits for them.
#[derive(Clone)]
pub struct Reach {
    contact: watch::Receiver<Contact>,
    pub(crate) owner_patience: Duration,
    /// For how long a user's request waits for drives whose machines are not reached.
    pub(crate) drive_patience: Duration,
}

impl Reach {
    /// In the client's process, or behind services that say themselves when they are away.
    pub fn here() -> Self {
        let (_, contact) = watch::channel(Contact { is_there: true, losses: 0 });
        Self { contact, owner_patience: OWNER_PATIENCE, drive_patience: Duration::ZERO }
    }

    /// Users' requests wait for drives whose machines are not reached, however long that takes.
    pub fn waiting_for_drives(self) -> Self {
        Self { drive_patience: FOR_EVER, ..self }
    }

    /// Users' requests wait so long for drives whose machines are not reached.
    pub fn waiting_for_drives_at_most(self, drive_patience: Duration) -> Self {
        Self { drive_patience, ..self }
    }

    /// Requests wait so long for an owner.
    pub fn waiting_for_owner_at_most(self, owner_patience: Duration) -> Self {
        Self { owner_patience, ..self }
    }

    /// On one other machine or in another process. While that is away, everything waits and nothing fails.
    pub fn hard(contact: watch::Receiver<Contact>) -> Self {
        Self { contact, owner_patience: FOR_EVER, drive_patience: FOR_EVER }
    }

    /// How often the other side went away so far.
    pub(crate) fn losses(&self) -> u64 {
        self.contact.borrow().losses
    }

    /// Whether the other side went away since [`Reach::losses`] was `before`: then drives that did not answer say nothing. Waits until
    /// it is there again.
    pub(crate) async fn was_away(&self, before: u64) -> bool {
        let mut contact = self.contact.clone();
        let now = *contact.borrow_and_update();
        if now.is_there && now.losses == before {
            return false;
        }
        contact.wait_for(|now| now.is_there).await.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::runtime::Builder;

    #[test]
    fn what_failed_while_the_other_side_was_away_is_tried_again_when_it_is_there() {
        let runtime = Builder::new_current_thread().enable_time().build().expect("a runtime");
        runtime.block_on(async {
            assert!(!Reach::here().was_away(0).await);
            let (tell, contact) = watch::channel(Contact { is_there: true, losses: 2 });
            let reach = Reach::hard(contact);
            let before = reach.losses();
            assert!(!reach.was_away(before).await);
            tell.send_replace(Contact { is_there: false, losses: 3 });
            let wait = tokio::time::timeout(Duration::from_millis(20), reach.was_away(before)).await;
            assert!(wait.is_err(), "it is still away");
            tell.send_replace(Contact { is_there: true, losses: 3 });
            assert!(reach.was_away(before).await);
            assert!(!reach.was_away(reach.losses()).await);
            drop(tell);
            assert!(reach.was_away(before).await, "the last word counts");
        });
    }
}
