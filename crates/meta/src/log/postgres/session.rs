//! A connection to one server of PostgreSQL, and what is asked of a server before it is used.

use std::future::poll_fn;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::Instant;
use tokio_postgres::error::Severity;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{AsyncMessage, Client, Config, Connection, NoTls, Row, SimpleQueryMessage};

use super::super::remote::AbortOnDrop;
use super::client::{CallError, refused};
use super::tls::Tls;

/// The oldest version that is used: 13. It and all later ones are the same in what is needed here.
const OLDEST: u32 = 130_000;

/// Said at the beginning of each session; then what [`Server::read`] takes. A statement ends before the owner's lease does, and a
/// transaction that is not continued ends.
const BEGIN: &str = "
SET statement_timeout = '2s';
SET idle_in_transaction_session_timeout = '5s';
SELECT set_config('synchronous_commit', 'on', false)
    WHERE current_setting('synchronous_commit') <> 'remote_apply';
SELECT current_setting('server_version_num'), system_identifier::text, pg_is_in_recovery(),
    CASE WHEN pg_is_in_recovery() THEN '' ELSE substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) END,
    current_setting('fsync'), current_setting('full_page_writes'), current_setting('synchronous_standby_names')
    FROM pg_control_system()";

/// A parameter of a statement.
pub(super) type Parameter<'a> = (&'a (dyn ToSql + Sync), Type);

/// What a server says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Server {
    version: u32,
    /// The same for a primary and its standbys, and for nobody else.
    pub(super) system: String,
    pub(super) is_standby: bool,
    /// Counts how often a standby became the primary; 0 of a standby.
    pub(super) timeline: u32,
    is_fsynced: bool,
    has_full_pages: bool,
    has_sync_standby: bool,
}

impl Server {
    fn read(messages: &[SimpleQueryMessage]) -> Option<Self> {
        let rows = messages.iter().filter_map(|message| match message {
            SimpleQueryMessage::Row(row) => Some(row),
            _ => None,
        });
        let row = rows.last()?;
        let is_standby = row.try_get(2).ok()?? == "t";
        let timeline = u32::from_str_radix(row.try_get(3).ok()??, 16);
        Some(Self {
            version: row.try_get(0).ok()??.parse().ok()?,
            system: row.try_get(1).ok()??.to_owned(),
            is_standby,
            timeline: if is_standby { 0 } else { timeline.ok()? },
            is_fsynced: row.try_get(4).ok()?? == "on",
            has_full_pages: row.try_get(5).ok()?? == "on",
            has_sync_standby: !row.try_get(6).ok()??.trim().is_empty(),
        })
    }

    /// Why it must not have logs.
    fn check(&self, is_single: bool) -> Result<(), String> {
        if self.version < OLDEST {
            return Err(format!("it is too old, 13 is needed: version={}", self.version));
        }
        if self.is_standby {
            return Ok(());
        }
        if !self.is_fsynced {
            return Err("fsync is off there: a power loss would damage the logs".to_owned());
        }
        if !self.has_full_pages {
            return Err("full_page_writes is off there: a power loss would damage the logs".to_owned());
        }
        if !self.has_sync_standby && !is_single {
            return Err("it has no synchronous standby (synchronous_standby_names is empty): with the machine the logs would be \
                        lost; allow that with single=yes"
                .to_owned());
        }
        Ok(())
    }
}

/// See the module.
pub(super) struct Session {
    client: Client,
    /// The server has warned since the last statement began.
    is_warned: Arc<AtomicBool>,
    pub(super) server: Server,
    /// The server that it goes to, by its place in the list.
    pub(super) index: usize,
    pub(super) opened: Instant,
    _driver: AbortOnDrop,
}

impl Session {
    /// Connects to the server with this place in the list. A standby is no error here.
    pub(super) async fn open(
        (index, address): (usize, &str),
        config: &Config,
        tls: Option<&Tls>,
        is_single: bool,
    ) -> Result<Self, CallError> {
        let is_warned = Arc::new(AtomicBool::new(false));
        let lost = |error| refused(address, error);
        let (client, driver) = match tls {
            Some(tls) => {
                let (client, connection) = config.connect(tls.clone()).await.map_err(lost)?;
                (client, tokio::spawn(drive(connection, is_warned.clone())))
            }
            None => {
                let (client, connection) = config.connect(NoTls).await.map_err(lost)?;
                (client, tokio::spawn(drive(connection, is_warned.clone())))
            }
        };
        let driver = AbortOnDrop(driver.abort_handle());
        let answer = client.simple_query(BEGIN).await.map_err(lost)?;
        let unusable = |why: String| {
            let text = format!("PostgreSQL at {address} cannot be used: {why}");
            CallError::Unknown(io::Error::new(io::ErrorKind::PermissionDenied, text))
        };
        let server =
            Server::read(&answer).ok_or_else(|| unusable("it says too little of itself".to_owned()))?;
        server.check(is_single).map_err(unusable)?;
        Ok(Self { client, is_warned, server, index, opened: Instant::now(), _driver: driver })
    }

    pub(super) fn is_closed(&self) -> bool {
        self.client.is_closed()
    }

    /// Carries out one statement, which is a transaction. A warning means that the server has changed something without the
    /// standby: somebody ended the wait for it.
    pub(super) async fn call(
        &self,
        address: &str,
        statement: &str,
        parameters: &[Parameter<'_>],
    ) -> Result<Vec<Row>, CallError> {
        self.is_warned.store(false, Ordering::Relaxed);
        let rows = self.client.query_typed(statement, parameters).await;
        let rows = rows.map_err(|error| refused(address, error))?;
        self.check_warning(address).map(|()| rows)
    }

    /// Carries out statements without parameters, in one transaction.
    pub(super) async fn batch(&self, address: &str, statements: &str) -> Result<(), CallError> {
        self.is_warned.store(false, Ordering::Relaxed);
        self.client.batch_execute(statements).await.map_err(|error| refused(address, error))?;
        self.check_warning(address)
    }

    fn check_warning(&self, address: &str) -> Result<(), CallError> {
        if !self.is_warned.load(Ordering::Relaxed) {
            return Ok(());
        }
        let text = format!("PostgreSQL at {address} may have committed without its standby");
        Err(CallError::Unknown(io::Error::other(text)))
    }
}

/// Moves what is said and answered. A warning is noted before the end of the answer that it belongs to is passed on.
async fn drive<S, T>(mut connection: Connection<S, T>, is_warned: Arc<AtomicBool>)
where
    S: AsyncRead + AsyncWrite + Unpin,
    T: AsyncRead + AsyncWrite + Unpin,
{
    while let Some(Ok(message)) = poll_fn(|context| connection.poll_message(context)).await {
        if let AsyncMessage::Notice(notice) = message
            && matches!(notice.parsed_severity(), None | Some(Severity::Warning))
        {
            tracing::warn!(code = notice.code().code(), text = notice.message(), "PostgreSQL warns");
            is_warned.store(true, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_would_lose_logs_is_refused() {
        let good = Server {
            version: 150_000,
            system: "1".to_owned(),
            is_standby: false,
            timeline: 1,
            is_fsynced: true,
            has_full_pages: true,
            has_sync_standby: true,
        };
        let check = |server: Server, is_single, why: Option<&str>| {
            let found = server.check(is_single).err();
            assert_eq!(found.is_some(), why.is_some(), "{found:?}");
            assert!(found.unwrap_or_default().contains(why.unwrap_or_default()));
        };
        check(good.clone(), false, None);
        check(Server { version: 120_019, ..good.clone() }, true, Some("13 is needed"));
        check(Server { is_fsynced: false, ..good.clone() }, true, Some("fsync is off"));
        check(Server { has_full_pages: false, ..good.clone() }, true, Some("full_page_writes"));
        let alone = Server { has_sync_standby: false, ..good };
        check(alone.clone(), false, Some("single=yes"));
        check(alone.clone(), true, None);
        check(Server { is_standby: true, ..alone }, false, None);
    }
}
