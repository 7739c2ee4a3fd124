use std::collections::BTreeMap;

use proptest::prelude::*;
use serde::{Deserialize, Serialize};

use super::*;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Inner {
    count: u64,
    name: String,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Id(u32);

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum Choice {
    Unit,
    New(Id),
    Two(u8, i64),
    Named { inner: Inner, list: Vec<Option<i32>> },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Outer {
    flag: bool,
    small: i16,
    large: u64,
    bytes: Bytes,
    map: BTreeMap<u16, Choice>,
    pairs: Vec<(u32, Inner)>,
    result: Result<Choice, Id>,
    last: char,
}

fn inner() -> impl Strategy<Value = Inner> {
    (any::<u64>(), ".{0,200}").prop_map(|(count, name)| Inner { count, name })
}

fn choice() -> impl Strategy<Value = Choice> {
    prop_oneof![
        Just(Choice::Unit),
        any::<u32>().prop_map(|id| Choice::New(Id(id))),
        any::<(u8, i64)>().prop_map(|(one, two)| Choice::Two(one, two)),
        (inner(), proptest::collection::vec(any::<Option<i32>>(), 0..99))
            .prop_map(|(inner, list)| Choice::Named { inner, list }),
    ]
}

prop_compose! {
    fn outer()(
        numbers in any::<(bool, i16, u64, char)>(),
        bytes in proptest::collection::vec(any::<u8>(), 0..300),
        map in proptest::collection::btree_map(any::<u16>(), choice(), 0..9),
        pairs in proptest::collection::vec((any::<u32>(), inner()), 0..9),
        result in prop_oneof![choice().prop_map(Ok), any::<u32>().prop_map(|id| Err(Id(id)))],
    ) -> Outer {
        let (flag, small, large, last) = numbers;
        Outer { flag, small, large, bytes: bytes.into(), map, pairs, result, last }
    }
}

proptest! {
    #[test]
    fn a_value_comes_back(value in outer()) {
        let bytes = encode(&value);
        prop_assert_eq!(decode::<Outer>(&bytes).unwrap(), value);
        for end in 0..bytes.len() {
            prop_assert!(decode::<Outer>(&bytes[..end]).is_err());
        }
    }

    #[test]
    fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = decode::<Outer>(&bytes);
        let _ = decode::<Vec<Choice>>(&bytes);
    }
}

#[test]
fn the_bytes_are_those_of_the_document() {
    let value = Choice::Named { inner: Inner { count: 300, name: "ab".into() }, list: vec![None, Some(-1)] };
    assert_eq!(encode(&value), [3, 10, 5, 0xac, 2, 2, b'a', b'b', 2, 0, 1, 1]);
    assert_eq!(encode(&Choice::New(Id(7))), [1, 7]);
    assert_eq!(encode(&Choice::Two(1, -2)), [2, 2, 1, 3]);
    assert_eq!(encode(&Choice::Unit), [0]);
    assert_eq!(encode(&(1u64 << 63)), [0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 1]);
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Newer {
    count: u64,
    name: String,
    #[serde(default)]
    colour: Option<String>,
    #[serde(default)]
    weight: u32,
}

#[test]
fn older_readers_skip_new_fields_and_newer_ones_take_defaults() {
    let newer = vec![
        Newer { count: 1, name: "a".into(), colour: Some("red".into()), weight: 9 },
        Newer { count: 2, name: "b".into(), colour: None, weight: 8 },
    ];
    let older: Vec<Inner> = decode(&encode(&newer)).unwrap();
    assert_eq!(older, [Inner { count: 1, name: "a".into() }, Inner { count: 2, name: "b".into() }]);
    let back: Vec<Newer> = decode(&encode(&older)).unwrap();
    assert_eq!(back[1], Newer { count: 2, name: "b".into(), colour: None, weight: 0 });
    // A field without a default must be there.
    assert!(decode::<Inner>(&encode(&(1u8, 5u8))).is_err());
}

/// Fields go by their places: what follows a field that is left out would be taken for it.
#[test]
fn only_the_last_fields_can_be_left_out() {
    #[derive(Serialize)]
    struct First {
        #[serde(skip_serializing_if = "Option::is_none")]
        first: Option<u8>,
        last: u8,
    }
    let can_write = |value: First| value.serialize(&mut write::Writer::default()).is_ok();
    assert!(can_write(First { first: Some(1), last: 2 }));
    assert!(!can_write(First { first: None, last: 2 }));
    let mut group = layout::PlacementGroup::new(base::PgId(3), vec![base::DriveId(1), base::DriveId(2)]);
    for _ in 0..2 {
        assert_eq!(decode::<layout::PlacementGroup>(&encode(&group)).unwrap(), group);
        group.rebuilding.push(layout::Rebuilding { position: 1, from: base::DriveId(9) });
    }
}

#[test]
fn what_cannot_be_is_refused() {
    assert!(decode::<u64>(&[]).is_err());
    assert!(
        decode::<u64>(&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2]).is_err(),
        "2^64 and more"
    );
    assert!(decode::<u8>(&[1, 2]).is_err(), "surplus bytes");
    assert!(decode::<u16>(&[0x80, 0x80, 4]).is_err(), "2^16 and more");
    assert!(decode::<bool>(&[2]).is_err());
    assert!(decode::<Choice>(&[4]).is_err(), "an unknown variant");
    assert!(decode::<String>(&[1, 0xff]).is_err());
    assert!(decode::<Vec<u64>>(&[0xff, 0xff, 0xff, 0x7f, 1]).is_err(), "a count without items");
}

#[test]
fn operations_go_by_their_codes() {
    const OPERATIONS: Operations =
        Operations(&[("Unit", 0x101), ("New", 0x205), ("Two", 0x102), ("Named", 0x103)]);
    for (value, code) in [(Choice::Unit, 0x101), (Choice::New(Id(9)), 0x205), (Choice::Two(3, -4), 0x102)] {
        let (encoded, fields) = OPERATIONS.encode(&value);
        assert_eq!(encoded, code);
        assert_eq!(OPERATIONS.decode::<Choice>(code, &fields).unwrap(), value);
    }
    assert_eq!(OPERATIONS.decode::<Choice>(0x104, &[]), Err(BadRequest::Unknown));
    assert!(matches!(OPERATIONS.decode::<Choice>(0x205, &[]), Err(BadRequest::Malformed(_))));
}
