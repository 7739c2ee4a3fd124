//! Requests to the members of an etcd cluster. Each has a deadline, and a member that does not answer is left for the next.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use tokio::time::timeout;
use tonic::Code;
use tonic::client::Grpc;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic_prost::ProstCodec;

use super::super::LogError;
use super::super::entry::ENTRY_BYTES_MAX;
use super::super::remote::{Patience, Runner, invalid};
use super::proto::{Call, StatusRequest};
use super::{ENTRIES_PER_RANGE, EtcdOptions, EtcdTls};

const CONNECT: Duration = Duration::from_secs(1);
/// etcd closes connections that ask more often than every five seconds, or while nothing is under way.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(3);
/// What a connection may receive before the reader takes it.
const WINDOW_BYTES: u32 = 4 << 20;
const ANSWER_BYTES_MAX: usize = ENTRIES_PER_RANGE as usize * (ENTRY_BYTES_MAX + 1024);
/// The oldest version that is used: the first with reads of the newest state that do not write.
const OLDEST: (u32, u32) = (3, 4);

/// Why a request has no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum CallError {
    /// etcd has no room. The request may have been executed all the same: the member that notices it executes first.
    #[error("etcd has no room")]
    NoSpace(#[source] io::Error),
    /// The request is larger than etcd takes; it was not executed.
    #[error("request is larger than etcd takes")]
    TooLarge,
    /// The revision is gone; nothing was read.
    #[error("revision is compacted")]
    Compacted,
    /// The answer is from another cluster.
    #[error("another etcd cluster answers: expected={expected:x} found={found:x}")]
    OtherCluster { expected: u64, found: u64 },
    /// No answer, or one that tells nothing. Whether the request was executed is unknown.
    #[error("etcd does not answer")]
    Unknown(#[source] io::Error),
}

impl CallError {
    /// Whether the next member may know more.
    fn is_transient(&self) -> bool {
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
            CallError::OtherCluster { .. } => LogError::Damaged(format!(
                "{error}; if etcd was restored from a backup, stop all nodes, and start them again: they check \
                 how much was lost"
            )),
            error => LogError::Io(error.into_io()),
        }
    }
}

/// What a member said instead of an answer.
fn refused(endpoint: &str, status: tonic::Status) -> CallError {
    let says = |text: &str| status.message().contains(text);
    match status.code() {
        Code::ResourceExhausted if says("database space exceeded") => {
            CallError::NoSpace(told(endpoint, status))
        }
        Code::InvalidArgument if says("request is too large") => CallError::TooLarge,
        Code::ResourceExhausted if says("message larger than max") => CallError::TooLarge,
        Code::OutOfRange if says("has been compacted") => CallError::Compacted,
        _ => CallError::Unknown(told(endpoint, status)),
    }
}

fn told(endpoint: &str, status: tonic::Status) -> io::Error {
    let kind = match status.code() {
        // Asking again changes nothing.
        Code::InvalidArgument | Code::PermissionDenied | Code::Unauthenticated | Code::Unimplemented => {
            io::ErrorKind::PermissionDenied
        }
        Code::DeadlineExceeded | Code::Cancelled => io::ErrorKind::TimedOut,
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, Told { endpoint: endpoint.to_owned(), status })
}

#[derive(Debug, thiserror::Error)]
#[error("no answer from member {endpoint}")]
struct Told {
    endpoint: String,
    #[source]
    status: tonic::Status,
}

struct Member {
    endpoint: String,
    channel: Channel,
}

/// See the module.
pub(super) struct Client {
    members: RwLock<Arc<Vec<Arc<Member>>>>,
    /// The member that answers, as far as is known.
    current: AtomicUsize,
    /// Identity of the cluster, from the first answer on.
    cluster_id: OnceLock<u64>,
    runner: Runner,
}

impl Client {
    /// The cluster of which the members are, once one has answered.
    pub(super) fn cluster_id(&self) -> u64 {
        self.cluster_id.get().copied().unwrap_or_default()
    }

    /// Looks at every member. At least one must answer; those that do must be of one cluster, and not too old.
    ///
    /// # Errors
    /// `Io` if no member answers or a setting is wrong; `Damaged` if members are of different clusters.
    pub(super) async fn connect(options: &EtcdOptions) -> Result<Self, LogError> {
        let client = Self {
            members: RwLock::default(),
            current: AtomicUsize::new(0),
            cluster_id: OnceLock::new(),
            runner: Runner::current(),
        };
        client.set_members(options)?;
        let mut answer = Err(invalid("no member of etcd answers".to_owned()).into());
        for (index, member) in client.members().iter().enumerate().rev() {
            match client.attempt(member, StatusRequest {}, CONNECT).await {
                Ok(status) => {
                    check_version(&member.endpoint, &status.version)?;
                    client.current.store(index, Ordering::Relaxed);
                    answer = Ok(());
                }
                Err(CallError::Unknown(error)) if answer.is_err() => answer = Err(error.into()),
                Err(CallError::Unknown(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        answer.map(|()| client)
    }

    /// Goes to these members from now on. Connections to those that stay are kept.
    pub(super) fn set_members(&self, options: &EtcdOptions) -> io::Result<()> {
        if options.endpoints.is_empty() {
            return Err(invalid("no endpoint of etcd is set".to_owned()));
        }
        let known = self.members();
        let next = |endpoint: &String| match known.iter().find(|known| known.endpoint == *endpoint) {
            Some(known) => Ok(known.clone()),
            None => member(endpoint, options.tls.as_ref()).map(Arc::new),
        };
        let members = options.endpoints.iter().map(next).collect::<io::Result<Vec<_>>>()?;
        *self.members.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(members);
        Ok(())
    }

    fn members(&self) -> Arc<Vec<Arc<Member>>> {
        self.members.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Carries `work` out on the client's runtime. It ends when the caller goes away.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> io::Result<T> {
        self.runner.run(work).await
    }

    /// Sends a request to one member, once.
    pub(super) async fn once<R: Call>(&self, request: R, limit: Duration) -> Result<R::Answer, CallError> {
        let (members, index) = (self.members(), self.current.load(Ordering::Relaxed));
        let answer = self.attempt(&members[index % members.len()], request, limit).await;
        if answer.as_ref().is_err_and(CallError::is_transient) {
            let next = (index + 1) % members.len();
            // Others may have gone on already.
            let _ = self.current.compare_exchange(index, next, Ordering::Relaxed, Ordering::Relaxed);
        }
        answer
    }

    /// Sends a request that may be executed more than once to one member after the other, until one answers.
    pub(super) async fn repeat<R: Call>(
        &self,
        request: R,
        patience: Patience,
    ) -> Result<R::Answer, CallError> {
        patience.repeat(CallError::is_transient, |limit| self.once(request.clone(), limit)).await
    }

    /// Asks all members at once. Returns each endpoint, and whether its member answers and knows a leader: one that is cut off
    /// from the others knows none.
    pub(super) async fn look(&self, limit: Duration) -> Vec<(String, bool)> {
        let members = self.members();
        let asks = members.iter().map(|member| async move {
            let status = self.attempt(member, StatusRequest {}, limit).await;
            (member.endpoint.clone(), status.is_ok_and(|status| status.leader != 0))
        });
        futures_util::future::join_all(asks).await
    }

    async fn attempt<R: Call>(
        &self,
        Member { endpoint, channel }: &Member,
        request: R,
        limit: Duration,
    ) -> Result<R::Answer, CallError> {
        let mut grpc = Grpc::new(channel.clone()).max_decoding_message_size(ANSWER_BYTES_MAX);
        let exchange = async {
            let unready = |error| tonic::Status::from_error(Box::new(error));
            grpc.ready().await.map_err(unready)?;
            let path = tonic::codegen::http::uri::PathAndQuery::from_static(R::PATH);
            grpc.unary(tonic::Request::new(request), path, ProstCodec::<R, R::Answer>::default()).await
        };
        let answer = match timeout(limit, exchange).await {
            Ok(Ok(answer)) => answer.into_inner(),
            Ok(Err(status)) => return Err(refused(endpoint, status)),
            Err(_) => {
                let late =
                    tonic::Status::deadline_exceeded(format!("nothing within {} ms", limit.as_millis()));
                return Err(refused(endpoint, late));
            }
        };
        let found = R::header(&answer).map_or(0, |header| header.cluster_id);
        let expected = *self.cluster_id.get_or_init(|| found);
        if found == expected { Ok(answer) } else { Err(CallError::OtherCluster { expected, found }) }
    }
}

/// A member to which there is no connection yet.
fn member(name: &str, tls: Option<&EtcdTls>) -> io::Result<Member> {
    let wrong = |error| invalid(format!("endpoint of etcd is wrong: endpoint={name} error={error}"));
    let endpoint = Endpoint::from_shared(name.to_owned()).map_err(wrong)?;
    let endpoint = match (endpoint.uri().scheme_str(), tls) {
        (Some("http"), None) => endpoint,
        (Some("https"), Some(tls)) => {
            let mut config = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(&tls.ca_pem));
            if let Some((certificate, key)) = &tls.identity_pem {
                config = config.identity(Identity::from_pem(certificate, key));
            }
            endpoint.tls_config(config).map_err(wrong)?
        }
        _ => {
            return Err(invalid(format!(
                "endpoint of etcd needs https:// and an authority, or http://: {name}"
            )));
        }
    };
    let channel = endpoint
        .connect_timeout(CONNECT)
        .tcp_nodelay(true)
        .tcp_keepalive(Some(KEEP_ALIVE))
        .http2_keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(2 * WINDOW_BYTES)
        .connect_lazy();
    Ok(Member { endpoint: name.to_owned(), channel })
}

fn check_version(endpoint: &str, version: &str) -> io::Result<()> {
    let mut numbers = version.split('.').map(|number| number.parse::<u32>().ok());
    let found = numbers.next().flatten().zip(numbers.next().flatten());
    if found.is_some_and(|found| found >= OLDEST) {
        return Ok(());
    }
    Err(io::Error::new(
        io::ErrorKind::Unsupported,
        format!("etcd is too old, 3.4 is needed: endpoint={endpoint} version={version}"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_before_3_4_are_refused() {
        for version in ["3.4.0", "3.4.23", "3.5.0-rc.1", "3.10.1", "4.0.0"] {
            assert!(check_version("a", version).is_ok(), "{version}");
        }
        for version in ["3.3.25", "2.9", "", "3", "x.y", "-1.4"] {
            assert!(check_version("a", version).is_err(), "{version}");
        }
    }

    #[test]
    fn a_refusal_says_whether_the_request_was_executed() {
        let check = |code, message: &str| refused("a", tonic::Status::new(code, message));
        let space = check(Code::ResourceExhausted, "etcdserver: mvcc: database space exceeded");
        assert!(matches!(space, CallError::NoSpace(_)) && !space.is_transient());
        let large = check(Code::InvalidArgument, "etcdserver: request is too large");
        assert!(matches!(large, CallError::TooLarge));
        let large = check(Code::ResourceExhausted, "grpc: received message larger than max (3 vs. 2)");
        assert!(matches!(large, CallError::TooLarge));
        let compacted = check(Code::OutOfRange, "etcdserver: mvcc: required revision has been compacted");
        assert!(matches!(compacted, CallError::Compacted));
        for (code, is_transient) in [
            (Code::Unavailable, true),
            (Code::Unknown, true),
            (Code::DeadlineExceeded, true),
            (Code::ResourceExhausted, true),
            (Code::PermissionDenied, false),
            (Code::InvalidArgument, false),
        ] {
            let error = check(code, "etcdserver: something else");
            assert!(
                matches!(error, CallError::Unknown(_)) && error.is_transient() == is_transient,
                "{code:?}"
            );
        }
    }
}
