//! Statements to the primary among several servers of PostgreSQL. Each has a deadline; connections come back by themselves.

use std::error::Error as _;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};
use tokio_postgres::config::SslMode;
use tokio_postgres::error::SqlState;
use tokio_postgres::{Config, Row};

use super::super::LogError;
use super::super::remote::{Patience, Runner, invalid};
use super::PostgresOptions;
use super::session::{Parameter, Session};
use super::tls::Tls;

/// Statements under way at once.
const SESSIONS_MAX: usize = 16;
/// The checks of a server are repeated this often: by another connection.
const SESSION_AGE_MAX: Duration = Duration::from_secs(60);
const CONNECT: Duration = Duration::from_secs(1);
/// How long the other servers may take to say that they are a newer primary than the one that was found.
const GRACE: Duration = Duration::from_millis(200);
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// Why a statement has no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum CallError {
    /// PostgreSQL has no room; the statement was not executed.
    #[error("PostgreSQL has no room")]
    NoSpace(#[source] io::Error),
    /// The servers are not those of before.
    #[error("another PostgreSQL answers: expected={expected} found={found}")]
    OtherSystem { expected: String, found: String },
    /// No answer, or one that tells nothing. Whether the statement was executed is unknown.
    #[error("PostgreSQL does not answer")]
    Unknown(#[source] io::Error),
}

impl CallError {
    /// Whether asking again may help.
    pub(super) fn is_transient(&self) -> bool {
        matches!(self, Self::Unknown(error) if error.kind() != io::ErrorKind::PermissionDenied)
    }

    pub(super) fn into_io(self) -> io::Error {
        match self {
            Self::Unknown(error) | Self::NoSpace(error) => error,
            error => io::Error::other(error),
        }
    }
}

impl From<CallError> for LogError {
    fn from(error: CallError) -> Self {
        match error {
            CallError::OtherSystem { .. } => LogError::Damaged(format!(
                "{error}; if PostgreSQL was restored from a dump, stop all nodes, and start them again: they check how \
                 much was lost"
            )),
            error => LogError::Io(error.into_io()),
        }
    }
}

#[derive(Debug, thiserror::Error)]
#[error("no answer from PostgreSQL at {address}")]
struct Told {
    address: String,
    #[source]
    error: tokio_postgres::Error,
}

/// What a server said instead of an answer.
pub(super) fn refused(address: &str, error: tokio_postgres::Error) -> CallError {
    let code = error.code().cloned();
    let is_certificate = error.source().is_some_and(|source| {
        source.downcast_ref::<io::Error>().is_some_and(|source| source.kind() == io::ErrorKind::InvalidData)
    });
    let kind = match &code {
        Some(code) if is_final(code) => io::ErrorKind::PermissionDenied,
        None if is_certificate => io::ErrorKind::PermissionDenied,
        Some(code) if *code == SqlState::QUERY_CANCELED => io::ErrorKind::TimedOut,
        _ => io::ErrorKind::Other,
    };
    let told = io::Error::new(kind, Told { address: address.to_owned(), error });
    match code {
        Some(code) if code == SqlState::DISK_FULL => CallError::NoSpace(told),
        _ => CallError::Unknown(told),
    }
}

/// Whether asking again changes nothing: a wrong password, no such database, no right to a table, no such table.
fn is_final(code: &SqlState) -> bool {
    let code = code.code();
    code.starts_with("28") || code.starts_with("3D") || code.starts_with("42")
}

/// What is known of the servers.
#[derive(Default)]
struct Known {
    /// Identity of primary and standbys, from the first one on.
    system: Option<String>,
    /// The newest timeline that was seen: a primary on an older one was replaced.
    timeline: u32,
    /// The place of the primary in the list, unless it has not answered.
    current: Option<usize>,
    idle: Vec<Session>,
}

struct Host {
    address: String,
    config: Config,
}

/// See the module.
pub(super) struct Client {
    hosts: Vec<Host>,
    tls: Option<Tls>,
    is_single: bool,
    known: Mutex<Known>,
    permits: Semaphore,
    runner: Runner,
}

impl Client {
    /// Connects to the primary.
    ///
    /// # Errors
    /// `Io` if there is none that answers and may be used, or a setting is wrong.
    pub(super) async fn connect(options: &PostgresOptions) -> Result<Self, LogError> {
        let tls = options.ca_pem.as_ref().map(|ca_pem| Tls::new(ca_pem)).transpose()?;
        let hosts = options.hosts.iter().map(|address| host(address, options));
        let client = Self {
            hosts: hosts.collect::<io::Result<Vec<_>>>()?,
            tls,
            is_single: options.is_single,
            known: Mutex::default(),
            permits: Semaphore::new(SESSIONS_MAX),
            runner: Runner::current(),
        };
        if client.hosts.is_empty() {
            return Err(invalid("no server of PostgreSQL is set".to_owned()).into());
        }
        let session = client.find().await?;
        client.known().idle.push(session);
        Ok(client)
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Carries `work` out on the client's runtime. It ends when the caller goes away.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> io::Result<T> {
        self.runner.run(work).await
    }

    /// Carries out a statement, once.
    pub(super) async fn once(
        &self,
        statement: &str,
        parameters: &[Parameter<'_>],
        limit: Duration,
    ) -> Result<Vec<Row>, CallError> {
        self.within(limit, async |session: &Session| {
            session.call(&self.hosts[session.index].address, statement, parameters).await
        })
        .await
    }

    /// Carries out a statement that may be executed more than once, until there is an answer.
    pub(super) async fn repeat(
        &self,
        statement: &str,
        parameters: &[Parameter<'_>],
        patience: Patience,
    ) -> Result<Vec<Row>, CallError> {
        patience.repeat(CallError::is_transient, |limit| self.once(statement, parameters, limit)).await
    }

    /// Carries out statements without parameters, in one transaction, once.
    pub(super) async fn batch(&self, statements: &str, limit: Duration) -> Result<(), CallError> {
        self.within(limit, async |session: &Session| {
            session.batch(&self.hosts[session.index].address, statements).await
        })
        .await
    }

    /// Carries out `work` with a connection. One that did not answer, or answered with a doubt, is not used again.
    async fn within<T>(
        &self,
        limit: Duration,
        work: impl AsyncFnOnce(&Session) -> Result<T, CallError>,
    ) -> Result<T, CallError> {
        let exchange = async {
            let _permit = self.permits.acquire().await.expect("the semaphore is never closed");
            let session = self.session().await?;
            let answer = work(&session).await;
            if answer.is_ok() {
                self.known().idle.push(session);
            }
            answer
        };
        let late = || {
            let text = format!("nothing from PostgreSQL within {} ms", limit.as_millis());
            Err(CallError::Unknown(io::Error::new(io::ErrorKind::TimedOut, text)))
        };
        let answer = timeout(limit, exchange).await.unwrap_or_else(|_| late());
        if answer.as_ref().is_err_and(CallError::is_transient) {
            // The primary may be another one now.
            let mut known = self.known();
            known.current = None;
            known.idle.clear();
        }
        answer
    }

    /// A connection to the primary.
    async fn session(&self) -> Result<Session, CallError> {
        let current = {
            let mut known = self.known();
            let newest = known.timeline;
            known.idle.retain(|session| {
                !session.is_closed()
                    && session.opened.elapsed() < SESSION_AGE_MAX
                    && session.server.timeline == newest
            });
            if let Some(session) = known.idle.pop() {
                return Ok(session);
            }
            known.current
        };
        if let Some(index) = current
            && let Ok(session) = self.open(index).await
            && let Some(session) = self.take(session)?
        {
            return Ok(session);
        }
        self.find().await
    }

    async fn open(&self, index: usize) -> Result<Session, CallError> {
        let Host { address, config } = &self.hosts[index];
        let opening = Session::open((index, address), config, self.tls.as_ref(), self.is_single);
        timeout(CONNECT, opening).await.unwrap_or_else(|_| {
            let text = format!("no connection to PostgreSQL at {address} within {} ms", CONNECT.as_millis());
            Err(CallError::Unknown(io::Error::new(io::ErrorKind::TimedOut, text)))
        })
    }

    /// Looks for the primary at all servers at once. Of two, that on the newer timeline: the other was replaced and may not know.
    async fn find(&self) -> Result<Session, CallError> {
        let mut asked: FuturesUnordered<_> = (0..self.hosts.len()).map(|index| self.open(index)).collect();
        let mut found: Option<Session> = None;
        let mut failed: Option<CallError> = None;
        let mut end = None;
        loop {
            let answer = match end {
                None => asked.next().await,
                Some(end) => tokio::select! {
                    answer = asked.next() => answer,
                    () = tokio::time::sleep_until(end) => None,
                },
            };
            match answer {
                None => break,
                Some(Ok(session)) if session.server.is_standby => {}
                Some(Ok(session)) => {
                    end.get_or_insert_with(|| Instant::now() + GRACE);
                    if found.as_ref().is_none_or(|known| known.server.timeline < session.server.timeline) {
                        found = Some(session);
                    }
                }
                // What a person must change is said first.
                Some(Err(error)) if failed.as_ref().is_none_or(CallError::is_transient) => {
                    failed = Some(error)
                }
                Some(Err(_)) => {}
            }
        }
        drop(asked);
        if let Some(session) = found
            && let Some(session) = self.take(session)?
        {
            return Ok(session);
        }
        Err(failed.unwrap_or_else(|| {
            let hosts: Vec<&str> = self.hosts.iter().map(|host| host.address.as_str()).collect();
            let text = format!("no primary among the servers of PostgreSQL: {}", hosts.join(", "));
            CallError::Unknown(io::Error::other(text))
        }))
    }

    /// Accepts a connection, if it goes to a primary that has not been replaced as far as is known.
    fn take(&self, session: Session) -> Result<Option<Session>, CallError> {
        let mut known = self.known();
        let found = session.server.system.clone();
        let expected = known.system.get_or_insert_with(|| found.clone()).clone();
        if found != expected {
            return Err(CallError::OtherSystem { expected, found });
        }
        if session.server.is_standby || session.server.timeline < known.timeline {
            return Ok(None);
        }
        known.timeline = session.server.timeline;
        known.current = Some(session.index);
        Ok(Some(session))
    }

    /// The system of which the first server was that answered.
    pub(super) fn system(&self) -> String {
        self.known().system.clone().unwrap_or_default()
    }

    /// Asks all servers at once. Returns each address, and whether it is a usable primary, or a standby.
    pub(super) async fn look(&self, limit: Duration) -> Vec<(String, bool)> {
        let asks = (0..self.hosts.len()).map(|index| async move {
            let answers = timeout(limit, self.open(index)).await.is_ok_and(|answer| answer.is_ok());
            (self.hosts[index].address.clone(), answers)
        });
        join_all(asks).await
    }
}

fn host(address: &str, options: &PostgresOptions) -> io::Result<Host> {
    let wrong = || invalid(format!("a server of PostgreSQL is given as host:port: {address}"));
    let (name, port) = address.rsplit_once(':').ok_or_else(wrong)?;
    let name = name.trim_start_matches('[').trim_end_matches(']');
    let port: u16 = port.parse().map_err(|_| wrong())?;
    if name.is_empty() {
        return Err(wrong());
    }
    let mut config = Config::new();
    config.host(name).port(port).dbname(&options.database).user(&options.user).application_name("forebay");
    config.keepalives_idle(KEEP_ALIVE).keepalives_interval(KEEP_ALIVE).keepalives_retries(3);
    config.ssl_mode(if options.ca_pem.is_some() { SslMode::Require } else { SslMode::Disable });
    if let Some(password) = &options.password {
        config.password(password);
    }
    Ok(Host { address: address.to_owned(), config })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_person_must_change_is_final() {
        for (code, expected) in [
            (SqlState::INVALID_PASSWORD, true),
            (SqlState::INVALID_CATALOG_NAME, true),
            (SqlState::UNDEFINED_TABLE, true),
            (SqlState::INSUFFICIENT_PRIVILEGE, true),
            (SqlState::QUERY_CANCELED, false),
            (SqlState::CANNOT_CONNECT_NOW, false),
            (SqlState::READ_ONLY_SQL_TRANSACTION, false),
            (SqlState::TOO_MANY_CONNECTIONS, false),
            (SqlState::DISK_FULL, false),
        ] {
            assert_eq!(is_final(&code), expected, "{code:?}");
        }
    }

    #[test]
    fn a_server_has_a_name_and_a_port() {
        let options = PostgresOptions::default();
        for address in ["10.0.0.1:5432", "db.example:1", "[fd00::1]:5432"] {
            assert!(host(address, &options).is_ok(), "{address}");
        }
        for address in ["10.0.0.1", ":5432", "a:b", "a:70000", "a:"] {
            assert!(host(address, &options).is_err(), "{address}");
        }
    }
}
