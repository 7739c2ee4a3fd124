//! What certificates are accepted at which side.

use base::{ClusterId, NodeId};
use rcgen::{CertificateParams, ExtendedKeyUsagePurpose};
use rustls::pki_types::ServerName;
use rustls::sign::SingleCertAndKey;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::identity::{Fingerprint, Identity, Party};
use crate::link::authority::{Authority, CLUSTER, OTHER_CLUSTER, expired, not_yet_valid};
use crate::link::tls::Wants;

const NODE: Party = Party::Node(NodeId(3));

type Change = fn(&mut CertificateParams);
type Accepted = io::Result<Option<Party>>;

/// What both sides of a first contact see. Bytes can go both ways if both are content.
async fn meet<C: Future<Output = io::Result<Connection>>>(
    acceptor: &Identity,
    connect: impl FnOnce(String) -> C,
) -> (Accepted, io::Result<Connection>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let acceptor = Acceptor::new(acceptor).unwrap();
    let accept = async { acceptor.accept(listener.accept().await.unwrap().0).await };
    let (accepted, mut connected) = tokio::join!(accept, connect(address));
    let accepted = match (accepted, &mut connected) {
        (Ok((mut there, party, Wants::Services)), Ok(here)) => {
            exchange(&mut there, here).await;
            Ok(party)
        }
        (accepted, _) => accepted.map(|(_, party, _)| party),
    };
    (accepted, connected)
}

async fn exchange(there: &mut Connection, here: &mut Connection) {
    send_hello(there, here).await;
    send_hello(here, there).await;
}

async fn send_hello(from: &mut Connection, to: &mut Connection) {
    from.stream.write_all(b"hello").await.unwrap();
    from.stream.flush().await.unwrap();
    let mut bytes = [0; 5];
    to.stream.read_exact(&mut bytes).await.unwrap();
    assert_eq!(&bytes, b"hello");
}

async fn ask_for(party: Party, identity: Identity, address: String) -> io::Result<Connection> {
    Connector::new(&identity).unwrap().connect(&address, party).await
}

#[track_caller]
fn check_text<T>(result: io::Result<T>, text: &str) {
    let error = result.err().unwrap_or_else(|| panic!("refused: {text}"));
    assert!(error.to_string().contains(text), "{error}");
    assert!(error.to_string().contains("127.0.0.1:"), "it names the address: {error}");
}

#[test]
fn nodes_and_clients_recognise_each_other() {
    run(async {
        let authority = Authority::new();
        for party in [Party::Node(NodeId(4)), Party::Client(7)] {
            let own = authority.party(party, CLUSTER);
            let (accepted, connected) = meet(&authority.node(3), |address| ask_for(NODE, own, address)).await;
            connected.unwrap();
            assert_eq!(accepted.unwrap(), Some(party));
        }
    });
}

/// What node 4 says when it looks for node 3 and finds this.
#[track_caller]
fn check_there(there: &Identity, own: &Identity, text: &str) {
    let (accepted, connected) = run(meet(there, |address| ask_for(NODE, own.clone(), address)));
    check_text(connected, text);
    assert!(accepted.is_err(), "the side that accepts is told");
}

#[test]
fn the_side_that_connects_checks_who_is_there() {
    let authority = Authority::new();
    let own = authority.node(4);
    let changed = |change: Change| authority.changed(NODE, CLUSTER, change);
    check_there(&authority.party(NODE, OTHER_CLUSTER), &own, "is of another cluster");
    check_there(&Authority::new().node(3), &own, "is of another authority");
    check_there(&changed(expired), &own, "has expired");
    check_there(&changed(not_yet_valid), &own, "is not valid yet: check the clocks");
    check_there(&authority.node(5), &own, "there is node 5 at 127.0.0.1:");
    check_there(&authority.party(Party::Client(3), CLUSTER), &own, "there is client 3 at 127.0.0.1:");
    let is_for_clients =
        changed(|params| params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth]);
    check_there(&is_for_clients, &own, "is not meant for this side");
}

/// What node 3 says when this comes, and what that is told.
#[track_caller]
fn check_comes(there: &Identity, own: &Identity, text: &str, told: &str) {
    run(async {
        let (accepted, connected) = meet(there, |address| ask_for(NODE, own.clone(), address)).await;
        check_text(accepted, text);
        check_text(connected.unwrap().stream.read_u8().await, told);
    });
}

#[test]
fn the_side_that_accepts_checks_who_comes() {
    let (authority, other) = (Authority::new(), Authority::new());
    let there = authority.node(3);
    let client = Party::Client(7);
    let changed = |change: Change| authority.changed(client, CLUSTER, change);
    check_comes(&there, &changed(expired), "has expired", "our certificate: it has expired");
    check_comes(&there, &changed(not_yet_valid), "is not valid yet: check the clocks", "or is not valid yet");
    let is_for_servers =
        changed(|params| params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth]);
    check_comes(&there, &is_for_servers, "is not meant for this side", "refuses us");
    // It believes the authority of the node, but that does not make its own certificate any better.
    let name = client.dns_name(CLUSTER);
    let (certificate, key) = other.issue(&[&name], |_| {});
    let foreign = Identity::new(&certificate, &key, &authority.pem()).unwrap();
    check_comes(&there, &foreign, "is of another authority", "our certificate: it is of another authority");
}

/// A client of TLS that minds nothing.
async fn connect_raw(address: String, protocols: &[&[u8]], identity: &Identity) -> io::Result<Connection> {
    let builder =
        rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(identity.roots.clone());
    let key = SingleCertAndKey::from(identity.key.clone());
    let mut config = builder.with_client_cert_resolver(Arc::new(key));
    config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
    let stream = TcpStream::connect(address).await?;
    let name = ServerName::try_from(NODE.dns_name(CLUSTER)).unwrap();
    let stream = tokio_rustls::TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
    Ok(Connection::over(stream))
}

#[test]
fn parties_of_other_clusters_are_refused_even_if_they_mind_nothing() {
    let authority = Authority::new();
    let own = authority.party(Party::Node(NodeId(4)), OTHER_CLUSTER);
    let there = authority.node(3);
    let (accepted, _) =
        run(meet(&there, |address| async { connect_raw(address, &[b"forebay/1"], &own).await }));
    check_text(accepted, "is of another cluster");
}

#[test]
fn both_sides_must_speak_the_protocol() {
    run(async {
        let authority = Authority::new();
        let (there, own) = (authority.node(3), authority.node(4));
        for (protocols, is_right) in
            [(&[][..], false), (&[b"h2".as_slice()], false), (&[b"forebay/1".as_slice()], true)]
        {
            let (accepted, _) = meet(&there, |address| connect_raw(address, protocols, &own)).await;
            match is_right {
                true => assert_eq!(accepted.unwrap(), Some(own.party())),
                false => assert!(accepted.is_err()),
            }
        }
        for protocols in [vec![], vec![b"h2".to_vec()]] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap().to_string();
            let mut config = rustls::ServerConfig::builder_with_provider(Arc::new(
                rustls::crypto::ring::default_provider(),
            ))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(SingleCertAndKey::from(there.key.clone())));
            config.alpn_protocols = protocols;
            let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
            let accept = async { acceptor.accept(listener.accept().await.unwrap().0).await.map(drop) };
            let (_, connected) = tokio::join!(accept, ask_for(NODE, own.clone(), address));
            check_text(connected, "does not speak the protocol of the cluster");
        }
    });
}

#[test]
fn what_is_not_tls_is_refused_at_both_sides() {
    run(async {
        let authority = Authority::new();
        let (accepted, _) = meet(&authority.node(3), |address| async {
            let mut stream = TcpStream::connect(address).await?;
            stream.write_all(b"GET / HTTP/1.1\r\nHost: node\r\n\r\n").await?;
            Ok(Connection::over(stream))
        })
        .await;
        check_text(accepted, "does not speak TLS");
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let answer = async { listener.accept().await.unwrap().0.write_all(b"HTTP/1.1 400\r\n\r\n").await };
        let (_, connected) = tokio::join!(answer, ask_for(NODE, authority.node(4), address.clone()));
        check_text(connected, "does not speak TLS");
        drop(listener);
        check_text(ask_for(NODE, authority.node(4), address).await, "no connection with");
    });
}

#[test]
fn a_side_that_says_nothing_is_given_up() {
    run(async {
        let authority = Authority::new();
        let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = silent.local_addr().unwrap().to_string();
        let node = authority.node(3);
        let begun = tokio::time::Instant::now();
        let (connected, (accepted, _)) = tokio::join!(
            ask_for(NODE, authority.node(4), address),
            meet(&node, |address| async { Ok(Connection::over(TcpStream::connect(address).await?)) }),
        );
        check_text(connected, "did not complete the handshake within 5 s");
        check_text(accepted, "did not complete the handshake within 5 s");
        assert!((4..8).contains(&begun.elapsed().as_secs()));
    });
}

/// What a stranger sees that was told of this authority.
fn meet_stranger(
    there: &Identity,
    cluster: ClusterId,
    told: Fingerprint,
) -> (Accepted, io::Result<Connection>) {
    run(meet(there, |address| async move { connect_as_stranger(&address, cluster, told).await }))
}

#[test]
fn a_stranger_recognises_a_node_by_its_authority() {
    let (authority, other) = (Authority::new(), Authority::new());
    let told = authority.fingerprint();
    let (accepted, connected) = meet_stranger(&authority.node(3), CLUSTER, told);
    connected.unwrap();
    assert_eq!(accepted.unwrap(), None);
    // While authorities change, a node sends both.
    let (certificate, key) = authority.issue(&[&NODE.dns_name(CLUSTER)], |_| {});
    let both = Identity::new(&certificate, &key, &(other.pem() + &authority.pem())).unwrap();
    meet_stranger(&both, CLUSTER, told).1.unwrap();
    let check = |there: &Identity, told, text| {
        let (accepted, connected) = meet_stranger(there, CLUSTER, told);
        check_text(connected, text);
        assert!(accepted.is_err(), "the side that accepts is told");
    };
    check(&both, other.fingerprint(), "is of another authority");
    check(&authority.node(3), other.fingerprint(), "is not of the authority with the fingerprint");
    check(&authority.party(NODE, OTHER_CLUSTER), told, "is of another cluster");
    check(&authority.changed(NODE, CLUSTER, expired), told, "has expired");
    check(&authority.changed(NODE, CLUSTER, not_yet_valid), told, "is not valid yet: check the clocks");
    check(&authority.party(Party::Client(3), CLUSTER), told, "client 3, which is not a node");
    let is_for_clients = |params: &mut CertificateParams| {
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    };
    check(&authority.changed(NODE, CLUSTER, is_for_clients), told, "is not meant for this side");
    // The certificate of the authority is no secret: nobody can sign with it.
    let (certificate, key) = other.issue(&[&NODE.dns_name(CLUSTER)], |_| {});
    let forged = Identity::new(&certificate, &key, &authority.pem()).unwrap();
    check(&forged, told, "is of another authority");
}
