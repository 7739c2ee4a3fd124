use base::NodeId;
use base::env::Env;
use bytes::Bytes;

use super::*;
use crate::{Authority, Cluster, Control, NewKey};

const NOW: i64 = 1_000;

fn plan(uses: u32) -> Plan {
    let mut plan = Plan::new(Cluster::new(Control::new_cluster(&Env::real())));
    let id = plan.next_token();
    plan.set_token(TokenRecord::new(id, b"secret", NOW + 60, uses, 0));
    plan
}

fn wish(name: &str) -> NewNode {
    NewNode {
        token: 0,
        secret: Bytes::from_static(b"secret"),
        name: name.to_owned(),
        request: Bytes::new(),
        addresses: vec!["10.0.0.2:7740".to_owned()],
        zone: "z".to_owned(),
        rack: String::new(),
        format_level: 0,
    }
}

#[test]
fn a_node_with_an_older_program_than_the_cluster_needs_does_not_join() {
    let mut plan = plan(1);
    plan.set_cluster(|cluster| cluster.format_level = 3);
    let of_level = |format_level| NewNode { format_level, ..wish("one") };
    for level in [0, 1, 2] {
        let refused = plan.join(&of_level(level), "k1", NOW);
        let node = level.max(1);
        assert!(
            matches!(refused, Err(JoinError::TooOld { cluster: 3, node: n }) if n == node),
            "{refused:?}"
        );
    }
    plan.join(&of_level(3), "k1", NOW).unwrap();
}

#[test]
fn a_token_admits_as_many_nodes_as_it_says_and_a_repetition_is_no_other_node() {
    let mut plan = plan(2);
    let first = plan.join(&wish("one"), "k1", NOW).unwrap();
    let again = plan.join(&wish("one"), "k1", NOW).unwrap();
    assert_eq!(first, again);
    let second = plan.join(&wish("two"), "k2", NOW).unwrap();
    assert_ne!(first, second);
    assert!(matches!(plan.join(&wish("three"), "k3", NOW), Err(JoinError::Used)));
    // The answer got lost, and the token is used up and has expired since.
    assert_eq!(plan.join(&wish("two"), "k2", NOW + 3600).unwrap(), second);
    let node = &plan.next().nodes[&second];
    assert_eq!((node.name.as_str(), node.zone.as_str(), node.key.as_str()), ("two", "z", "k2"));
}

#[test]
fn a_node_that_joins_again_keeps_its_name_and_place_and_may_have_moved() {
    let mut plan = plan(1);
    let id = plan.join(&wish("one"), "k1", NOW).unwrap();
    let moved = NewNode {
        name: "hostname".to_owned(),
        zone: String::new(),
        addresses: vec!["10.0.0.9:7740".to_owned()],
        ..wish("one")
    };
    assert_eq!(plan.join(&moved, "k1", NOW).unwrap(), id);
    let node = &plan.next().nodes[&id];
    assert_eq!((node.name.as_str(), node.zone.as_str()), ("one", "z"));
    assert_eq!(node.addresses, ["10.0.0.9:7740"]);
}

#[test]
fn bad_wishes_change_nothing() {
    let mut plan = plan(1);
    plan.join(&wish("one"), "k1", NOW).unwrap();
    let mut plan = {
        let mut other = Plan::new(plan.into_next());
        other.set_token(TokenRecord::new(0, b"secret", NOW + 60, 1, 0));
        other
    };
    let before = plan.next().clone();
    let mut refuse = |new: NewNode, now| plan.join(&new, "k2", now).unwrap_err();
    assert!(matches!(refuse(wish("one"), NOW), JoinError::NameTaken(_)));
    assert!(matches!(refuse(wish("two"), NOW + 60), JoinError::Expired(0)));
    assert!(matches!(
        refuse(NewNode { secret: Bytes::from_static(b"guess"), ..wish("two") }, NOW),
        JoinError::Unknown
    ));
    assert!(matches!(refuse(NewNode { token: 7, ..wish("two") }, NOW), JoinError::Unknown));
    for name in ["", "-x", "a b", "ä", &"x".repeat(64)] {
        assert!(matches!(refuse(wish(name), NOW), JoinError::BadName(_)), "{name}");
    }
    for address in ["", "host", "host:", "host:0", "host:70000", ":1", "::1:80", "a b:1", "http://x:1"] {
        let new = NewNode { addresses: vec![address.to_owned()], ..wish("two") };
        assert!(matches!(refuse(new, NOW), JoinError::BadAddress(_)), "{address}");
    }
    assert!(matches!(
        refuse(NewNode { addresses: Vec::new(), ..wish("two") }, NOW),
        JoinError::BadAddress(_)
    ));
    assert_eq!(*plan.next(), before);
    for address in ["host:1", "10.0.0.2:65535", "[::1]:80"] {
        check_address(address).unwrap();
    }
}

#[test]
fn a_token_for_witnesses_makes_witnesses_which_have_the_last_seats() {
    let mut plan = plan(9);
    let join = |plan: &mut Plan, name: &str| plan.join(&wish(name), name, NOW).unwrap();
    let mark = |plan: &mut Plan, witness| {
        let token = plan.next().tokens.values().next().unwrap().clone();
        plan.set_token(TokenRecord { witness, ..token });
    };
    let one = join(&mut plan, "one");
    mark(&mut plan, true);
    let witness = join(&mut plan, "witness");
    mark(&mut plan, false);
    let two = join(&mut plan, "two");
    let seats = |plan: &Plan| plan.next().seats();
    let owners = |plan: &Plan| -> Vec<NodeId> {
        let nodes = plan.next().nodes.keys().copied();
        nodes.filter(|node| plan.next().may_own(*node)).collect()
    };
    assert!(plan.next().nodes[&witness].witness && !plan.next().nodes[&two].witness);
    assert_eq!((seats(&plan), owners(&plan)), (vec![one, two, witness], vec![one, two]));
    // Another node takes its seat.
    let three = join(&mut plan, "three");
    let four = join(&mut plan, "four");
    assert_eq!((seats(&plan), owners(&plan)), (vec![one, two, three], vec![one, two, three]));
    plan.remove_node(two);
    assert_eq!(seats(&plan), [one, three, four]);
    // It stays one, also when it joins again with a token for nodes.
    assert_eq!(join(&mut plan, "witness"), witness);
    assert!(plan.next().nodes[&witness].witness);
}

#[test]
fn the_text_of_a_token_comes_back_and_a_damaged_one_is_refused() {
    let token = Token {
        cluster: ClusterId([3; 16]),
        authority: Fingerprint([9; 32]),
        id: 7,
        secret: Bytes::from_static(&[5; SECRET_BYTES]),
        addresses: vec!["10.0.0.1:7740".to_owned()],
        is_for_clients: true,
        is_for_witnesses: false,
    };
    let text = token.to_string();
    assert_eq!(text.parse::<Token>().unwrap(), token);
    let other = Token { is_for_clients: false, is_for_witnesses: true, ..token.clone() };
    assert_eq!(other.to_string().parse::<Token>().unwrap(), other);
    assert_eq!(format!(" {text}\n").parse::<Token>().unwrap(), token);
    for at in 0..text.len() {
        let mut damaged = text.clone().into_bytes();
        damaged[at] = if damaged[at] == b'A' { b'B' } else { b'A' };
        assert_eq!(String::from_utf8(damaged).unwrap().parse::<Token>(), Err(NotAToken), "{at}");
    }
    assert_eq!(text[..text.len() - 4].parse::<Token>(), Err(NotAToken));
}

#[test]
fn certificates_name_the_party_and_nothing_that_the_request_wishes() {
    let cluster = ClusterId([3; 16]);
    let authority = Authority::make(cluster, 0).unwrap();
    let authority = Authority::of_pem(authority.certificate_pem(), authority.key_pem()).unwrap();
    let key = NewKey::make().unwrap();
    let party = wire::identity::Party::Node(NodeId(3));
    let issued = authority.issue(cluster, party, &key.request, 0).unwrap();
    let again = authority.issue(cluster, party, &NewKey::of_pem(&key.key_pem).unwrap().request, 0).unwrap();
    assert_eq!(issued.key, again.key);
    assert!(issued.key.len() == 64 && issued.certificate_pem.contains("BEGIN CERTIFICATE"));
    let mut forged = key.request.clone();
    let last = forged.len() - 1;
    forged[last] ^= 1;
    assert!(authority.issue(cluster, party, &forged, 0).is_err());
    assert!(authority.issue(cluster, party, b"nonsense", 0).is_err());
}
