//! Nodes that come, move and go.

use base::NodeId;
use tokio::net::TcpListener;

use super::listener::Machine;
use super::*;
use crate::identity::Party;
use crate::link::authority::{Authority, CLUSTER, expired};

const NODE: NodeId = NodeId(3);

/// Node 4, which has others to talk to.
struct Others {
    authority: Authority,
    fabric: Arc<Fabric>,
}

impl Others {
    fn new() -> Self {
        let authority = Authority::new();
        let connector = Connector::new(&authority.node(4)).unwrap();
        let runtime = tokio::runtime::Handle::current();
        Self { authority, fabric: Fabric::new(Env::real(), runtime, connector, 1) }
    }

    /// Node 3 is at these addresses.
    fn set(&self, addresses: &[&str]) {
        let addresses = addresses.iter().map(|address| (*address).to_owned()).collect();
        self.fabric.set_nodes(BTreeMap::from([(NODE, addresses)]));
    }

    async fn machine(&self) -> Machine {
        Machine::new(&self.authority.node(NODE.0)).await
    }
}

async fn is_there(peer: &Peer, expected: bool) {
    let mut contact = peer.contact();
    let seen = contact.wait_for(|now| now.is_there == expected);
    tokio::time::timeout(Duration::from_secs(20), seen).await.expect("in time").unwrap();
}

/// An address at which nobody listens.
async fn dead_address() -> String {
    TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().to_string()
}

#[test]
fn a_node_that_moves_is_found_again() {
    run(async {
        let others = Others::new();
        let first = others.machine().await;
        assert!(others.fabric.peer(NODE).is_none());
        others.set(&[&first.address]);
        let peer = others.fabric.peer(NODE).unwrap();
        is_there(&peer, true).await;
        let second = others.machine().await;
        others.set(&[&second.address]);
        assert!(Arc::ptr_eq(&others.fabric.peer(NODE).unwrap(), &peer), "it is the same node");
        drop(first);
        peer.contact().wait_for(|now| now.is_there && now.losses > 0).await.unwrap();
    });
}

#[test]
fn all_addresses_of_a_node_are_tried() {
    run(async {
        let others = Others::new();
        let machine = others.machine().await;
        let other = Machine::new(&others.authority.node(5)).await;
        // These take connections, and say nothing: together they take longer than one attempt may.
        let mute = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let silent = mute.local_addr().unwrap().to_string();
        let addresses = [&dead_address().await, &other.address, &silent, &silent, &silent, &machine.address];
        others.set(&addresses.map(String::as_str));
        is_there(&others.fabric.peer(NODE).unwrap(), true).await;
    });
}

#[test]
fn the_address_that_worked_is_tried_first() {
    run(async {
        let others = Others::new();
        let mut machine = others.machine().await;
        let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let has_come =
            async || tokio::time::timeout(Duration::from_millis(100), silent.accept()).await.is_ok();
        others.set(&[&silent.local_addr().unwrap().to_string(), &machine.address]);
        let peer = others.fabric.peer(NODE).unwrap();
        is_there(&peer, true).await;
        // The connection for data has come as far as the one for metadata.
        RemoteDrive::new(&peer, DRIVE).await.put(put(1, 1)).await.unwrap();
        assert!(has_come().await, "it was tried");
        while has_come().await {}
        for losses in 1..4 {
            machine.restart();
            peer.contact().wait_for(|now| now.is_there && now.losses == losses).await.unwrap();
            assert!(!has_come().await);
        }
    });
}

#[test]
fn the_peer_of_a_node_that_is_gone_ends() {
    run(async {
        let others = Others::new();
        let machine = others.machine().await;
        others.set(&[&machine.address]);
        let peer = others.fabric.peer(NODE).unwrap();
        let owner = RemoteOwner::new(&peer, LEDGER);
        let drive = RemoteDrive::new(&peer, DRIVE).await;
        let (events, _inbox) = mpsc::unbounded_channel();
        owner.connect(Arc::new(Sent(events))).await.unwrap();
        let waiting = owner.call(id(1), MetaRequest::StatFs);
        let removal = async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            others.fabric.set_nodes(BTreeMap::new());
        };
        let (answer, ()) = tokio::join!(waiting, removal);
        assert_eq!(answer, Err(FsError::Disconnected));
        assert!(owner.is_lost());
        assert!(others.fabric.peer(NODE).is_none());
        is_there(&peer, false).await;
        let late = tokio::time::timeout(Duration::from_secs(1), drive.put(put(1, 1))).await;
        assert!(matches!(late.expect("at once"), Err(PutShardError::Failed { .. })));
        // If the node is there again, it has another peer.
        others.set(&[&machine.address]);
        is_there(&others.fabric.peer(NODE).unwrap(), true).await;
        assert!(!peer.contact().borrow().is_there);
    });
}

#[test]
fn a_renewed_identity_is_used_by_the_next_connection() {
    run(async {
        let others = Others::new();
        let own = others.authority.changed(Party::Node(NodeId(4)), CLUSTER, expired);
        others.fabric.set_connector(Connector::new(&own).unwrap());
        let machine = others.machine().await;
        others.set(&[&machine.address]);
        let peer = others.fabric.peer(NODE).unwrap();
        let refused = tokio::time::timeout(Duration::from_millis(500), peer.ledgers()).await;
        assert!(refused.is_err(), "the certificate has expired");
        others.fabric.set_connector(Connector::new(&others.authority.node(4)).unwrap());
        is_there(&peer, true).await;
    });
}
