//! Services behind a listener, with all that comes there.

use base::NodeId;
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::*;
use crate::identity::{Identity, Party};
use crate::link::authority::{Authority, CLUSTER, expired};

/// A node that serves, until it is dropped.
pub(super) struct Machine {
    pub(super) address: String,
    pub(super) acceptor: watch::Sender<Arc<Acceptor>>,
    /// The nodes that it reaches.
    pub(super) fabric: Arc<Fabric>,
    socket: std::net::TcpListener,
    server: Arc<Server>,
    trust: fn(Option<Party>) -> Option<Trust>,
    serving: JoinSet<()>,
}

impl Machine {
    pub(super) async fn new(identity: &Identity) -> Self {
        Self::trusting(identity, |_| Some(Trust::Full)).await
    }

    pub(super) async fn trusting(identity: &Identity, trust: fn(Option<Party>) -> Option<Trust>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let acceptor = watch::Sender::new(Arc::new(Acceptor::new(identity).unwrap()));
        let server = Server::new(&Env::real(), services(&Arc::new(TestOwner::default()), 1));
        let (socket, serving) = (listener.into_std().unwrap(), JoinSet::new());
        let (runtime, connector) = (tokio::runtime::Handle::current(), Connector::new(identity).unwrap());
        let fabric = Fabric::new(Env::real(), runtime, connector, 1);
        let mut machine = Self { address, acceptor, fabric, socket, server, trust, serving };
        machine.restart();
        machine
    }

    /// Ends all connections, and goes on.
    pub(super) fn restart(&mut self) {
        self.serving = JoinSet::new();
        let listener = TcpListener::from_std(self.socket.try_clone().unwrap()).unwrap();
        let services = (self.server.clone(), self.fabric.clone());
        self.serving.spawn(accept_loop(listener, self.acceptor.subscribe(), services, self.trust));
    }

    /// A peer that finds node 3 here.
    fn peer(&self, identity: &Identity) -> Arc<Peer> {
        let connector = Arc::new(Connector::new(identity).unwrap());
        let address: Arc<str> = self.address.as_str().into();
        let dial: Dial = Arc::new(move || {
            let (connector, address) = (connector.clone(), address.clone());
            Box::pin(async move { connector.connect(&address, Party::Node(NodeId(3))).await })
        });
        let runtime = tokio::runtime::Handle::current();
        Peer::new(PeerOptions {
            env: Env::real(),
            runtime,
            dial,
            data_connections: 2,
            proofs: Arc::default(),
        })
    }

    async fn stranger(&self, authority: &Authority) -> Connection {
        connect_as_stranger(&self.address, CLUSTER, authority.fingerprint()).await.unwrap()
    }
}

/// Whether the other side ends the connection without a word.
async fn is_ended(connection: &mut Connection) -> bool {
    let read = connection.stream.read_u8();
    tokio::time::timeout(Duration::from_millis(500), read).await.is_ok_and(|read| read.is_err())
}

fn get(extent: u64, blocks: u32) -> GetShard {
    GetShard { key: put(extent, 1).key, first_block: 0, blocks, purpose: GetPurpose::Read }
}

#[test]
fn payloads_go_both_ways() {
    run(async {
        let authority = Authority::new();
        let machine = Machine::new(&authority.node(3)).await;
        let peer = machine.peer(&authority.node(4));
        let drive = RemoteDrive::new(&peer, DRIVE).await;
        let owner = RemoteOwner::new(&peer, LEDGER);
        for extent in 0..20 {
            drive.put(put(extent, 256)).await.unwrap();
        }
        let puts = futures_util::future::join_all((20..40).map(|extent| drive.put(put(extent, 256))));
        let beats = futures_util::future::join_all((0..400).map(|seq| owner.call(id(seq), beat(seq))));
        let (puts, beats) = tokio::join!(puts, beats);
        assert!(puts.iter().all(Result::is_ok));
        for (version, answer) in (0..).zip(beats) {
            assert_eq!(answer, Ok(MetaReply::Beat { version, used_bytes: 0, drive_bytes: 0, events: 0 }));
        }
        let gets = futures_util::future::join_all((0..40).map(|extent| drive.get(get(extent, 256)))).await;
        for (extent, got) in (0..).zip(gets) {
            assert_eq!(got.unwrap().bytes, vec![extent; 1 << 20]);
        }
    });
}

#[test]
fn parties_are_trusted_as_the_node_says() {
    run(async {
        let authority = Authority::new();
        let machine = Machine::trusting(&authority.node(3), |party| match party? {
            Party::Node(_) => Some(Trust::Full),
            Party::Client(8) => None,
            Party::Client(_) => Some(client_of(LEDGER)),
        })
        .await;
        let view = async |party, name: &str| {
            let peer = machine.peer(&authority.party(party, CLUSTER));
            let request = ViewRequest::Filesystem { name: name.to_owned(), known: 0, wait_ms: 0 };
            RemoteViews::new(&peer).ask(request).await
        };
        assert_eq!(view(Party::Node(NodeId(4)), "other").await, Err(FsError::NotFound));
        assert_eq!(view(Party::Client(7), "main").await, Ok(ViewReply::Same));
        assert_eq!(view(Party::Client(7), "other").await, Err(FsError::NotPermitted));
        let unwanted = Connector::new(&authority.party(Party::Client(8), CLUSTER)).unwrap();
        let connected = unwanted.connect(&machine.address, Party::Node(NodeId(3))).await;
        assert!(is_ended(&mut connected.unwrap()).await);
        assert!(is_ended(&mut machine.stranger(&authority).await).await);
    });
}

#[test]
fn silent_sides_and_strangers_hold_up_nobody() {
    run(async {
        let authority = Authority::new();
        let machine = Machine::new(&authority.node(3)).await;
        let begun = tokio::time::Instant::now();
        let mut silent = Vec::new();
        // One handshake is left.
        for _ in 0..63 {
            silent.push(TcpStream::connect(&machine.address).await.unwrap());
        }
        let mut strangers = Vec::new();
        for _ in 0..16 {
            strangers.push(machine.stranger(&authority).await);
        }
        assert!(is_ended(&mut machine.stranger(&authority).await).await, "one too many");
        assert!(!is_ended(&mut strangers[0]).await);
        let peer = machine.peer(&authority.node(4));
        assert_eq!(peer.ledgers().await, [(LEDGER, 1)]);
        assert!(
            begun.elapsed() < Duration::from_secs(4),
            "nobody waited until the silent ones were given up"
        );
        // Those that are gone make room.
        strangers.pop();
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert!(!is_ended(&mut machine.stranger(&authority).await).await);
    });
}

#[test]
fn handshakes_are_bounded_and_silent_ones_end() {
    run(async {
        let authority = Authority::new();
        let machine = Machine::new(&authority.node(3)).await;
        let mut silent = Vec::new();
        for _ in 0..64 {
            silent.push(TcpStream::connect(&machine.address).await.unwrap());
        }
        let begun = tokio::time::Instant::now();
        machine.peer(&authority.node(4)).ledgers().await;
        let waited = begun.elapsed();
        assert!((3..15).contains(&waited.as_secs()), "{waited:?}");
    });
}

#[test]
fn a_renewed_certificate_is_shown_to_the_next_connection() {
    run(async {
        let authority = Authority::new();
        let node = Party::Node(NodeId(3));
        let machine = Machine::new(&authority.changed(node, CLUSTER, expired)).await;
        let connector = Connector::new(&authority.node(4)).unwrap();
        assert!(connector.connect(&machine.address, node).await.is_err());
        machine.acceptor.send_replace(Arc::new(Acceptor::new(&authority.node(3)).unwrap()));
        connector.connect(&machine.address, node).await.unwrap();
    });
}

#[test]
fn connections_end_with_the_loop() {
    run(async {
        let authority = Authority::new();
        let machine = Machine::new(&authority.node(3)).await;
        let mut stranger = machine.stranger(&authority).await;
        assert!(!is_ended(&mut stranger).await);
        drop(machine);
        assert!(is_ended(&mut stranger).await);
    });
}
