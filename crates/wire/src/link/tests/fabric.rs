//! Nodes that come, move and go.

use base::NodeId;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

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

/// Node 4 does not reach node 3. Each of these machines does.
async fn led_by(others: &Others, machine: &Machine, leaders: &[(u32, &Machine)]) -> Arc<Peer> {
    let mut nodes = BTreeMap::from([(NODE, vec![dead_address().await])]);
    for (node, leader) in leaders {
        leader.fabric.set_nodes(BTreeMap::from([(NODE, vec![machine.address.clone()])]));
        nodes.insert(NodeId(*node), vec![leader.address.clone()]);
    }
    others.fabric.set_nodes(nodes);
    others.fabric.peer(NODE).unwrap()
}

#[test]
fn a_node_is_reached_through_another_until_it_answers_by_itself() {
    run(async {
        let others = Others::new();
        let machine = others.machine().await;
        let leader = Machine::new(&others.authority.node(5)).await;
        let peer = led_by(&others, &machine, &[(5, &leader)]).await;
        is_there(&peer, true).await;
        assert_eq!(others.fabric.detours(), [(NODE, NodeId(5))]);
        let (drive, owner) = (RemoteDrive::new(&peer, DRIVE).await, RemoteOwner::new(&peer, LEDGER));
        for extent in 0..10 {
            drive.put(put(extent, 256)).await.unwrap();
        }
        let get = GetShard { key: put(7, 1).key, first_block: 0, blocks: 256, purpose: GetPurpose::Read };
        assert_eq!(drive.get(get).await.unwrap().bytes, vec![7; 1 << 20]);
        let beats = futures_util::future::join_all((0..400).map(|seq| owner.call(id(seq), beat(seq)))).await;
        assert!(beats.iter().all(Result::is_ok));
        // Its own address works again.
        let nodes = [(NODE, vec![machine.address.clone()]), (NodeId(5), vec![leader.address.clone()])];
        others.fabric.set_nodes(BTreeMap::from(nodes));
        let mut contact = peer.contact();
        contact.wait_for(|now| now.is_there && now.losses == 1).await.unwrap();
        assert_eq!(others.fabric.detours(), []);
        drop(leader);
        drive.put(put(20, 256)).await.unwrap();
        assert!(tokio::time::timeout(Duration::from_secs(1), contact.changed()).await.is_err());
    });
}

#[test]
fn a_node_that_is_about_to_start_is_reached_directly() {
    run(async {
        let others = Others::new();
        let machine = others.machine().await;
        let leader = Machine::new(&others.authority.node(5)).await;
        leader.fabric.set_nodes(BTreeMap::from([(NODE, vec![machine.address.clone()])]));
        let (address, started) = (dead_address().await, machine.address.clone());
        let nodes = [(NODE, vec![address.clone()]), (NodeId(5), vec![leader.address.clone()])];
        others.fabric.set_nodes(BTreeMap::from(nodes));
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(200)).await;
            let listener = TcpListener::bind(&address).await.unwrap();
            while let Ok((mut from, _)) = listener.accept().await {
                let mut to = TcpStream::connect(&started).await.unwrap();
                tokio::spawn(async move { tokio::io::copy_bidirectional(&mut from, &mut to).await });
            }
        });
        let peer = others.fabric.peer(NODE).unwrap();
        is_there(&peer, true).await;
        RemoteDrive::new(&peer, DRIVE).await.put(put(1, 1)).await.unwrap();
        assert_eq!((others.fabric.detours(), peer.contact().borrow().losses), (vec![], 0));
    });
}

#[test]
fn another_leads_when_the_one_that_led_is_gone() {
    run(async {
        let others = Others::new();
        let machine = others.machine().await;
        let (fifth, sixth) = (others.authority.node(5), others.authority.node(6));
        let mut leaders = BTreeMap::from([(5, Machine::new(&fifth).await), (6, Machine::new(&sixth).await)]);
        let peer = led_by(&others, &machine, &[(5, &leaders[&5]), (6, &leaders[&6])]).await;
        is_there(&peer, true).await;
        let [(NODE, first)] = others.fabric.detours()[..] else { panic!("it is reached through another") };
        leaders.remove(&first.0);
        peer.contact().wait_for(|now| now.is_there && now.losses > 0).await.unwrap();
        let left = NodeId(*leaders.keys().next().unwrap());
        assert_eq!(others.fabric.detours(), [(NODE, left)]);
    });
}

#[test]
fn there_is_no_way_to_unknown_nodes_and_none_for_strangers() {
    run(async {
        let others = Others::new();
        let machine = others.machine().await;
        let leader = Machine::new(&others.authority.node(5)).await;
        leader.fabric.set_nodes(BTreeMap::from([(NODE, vec![machine.address.clone()])]));
        let connector = Connector::new(&others.authority.node(4)).unwrap();
        let (_back, told) = watch::channel(0);
        let through = async |leader: &Machine, wanted| {
            let asked = connector.connect_through(&leader.address, NodeId(5), NodeId(wanted), told.clone());
            asked.await.map(drop).map_err(|error| error.kind())
        };
        assert_eq!(through(&leader, 3).await, Ok(()));
        assert_eq!(through(&leader, 9).await, Err(io::ErrorKind::HostUnreachable));
        let strict = Machine::trusting(&others.authority.node(5), |_| Some(Trust::Stranger)).await;
        strict.fabric.set_nodes(BTreeMap::from([(NODE, vec![machine.address.clone()])]));
        assert!(through(&strict, 3).await.is_err());
        // Nobody else passes for the node at the end of the way.
        let false_one = Machine::new(&others.authority.node(7)).await;
        leader.fabric.set_nodes(BTreeMap::from([(NODE, vec![false_one.address.clone()])]));
        assert!(through(&leader, 3).await.is_err());
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
