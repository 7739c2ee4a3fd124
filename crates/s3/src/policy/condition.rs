//! The `Condition` of a statement: what a request must satisfy besides action and resource.
//!
//! All operators and keys must hold; of several values, one is enough. If the request lacks a key, a condition is
//! false, a negated condition true, and a condition with `IfExists` true.

use std::borrow::Cow;
use std::net::IpAddr;

use super::parse::{Fault, Place};
use super::pattern::{Case, Pattern, Syntax, Values};
use super::{Facts, json::Json};
use crate::instant;

/// One condition key with its operator and values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Condition {
    key: Key,
    test: Test,
    /// The operator's name contains `Not`.
    negated: bool,
    /// The operator's name ends in `IfExists`.
    if_exists: bool,
    /// Prefix of the operator's name; keys with several values have one, and no others.
    quantifier: Option<Quantifier>,
}

/// Condition keys.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Key {
    SourceIp,
    SecureTransport,
    UserName,
    UserId,
    CurrentTime,
    EpochTime,
    Prefix,
    Delimiter,
    MaxKeys,
    Referer,
    UserAgent,
    /// A header of the request, by name.
    Header(&'static str),
    /// A tag of the existing object, by name.
    ExistingTag(String),
    /// A tag that the request sets, by name.
    RequestTag(String),
    /// The names of all tags that the request sets.
    RequestTagNames,
}

/// Condition keys that read headers.
const HEADERS: [(&str, &str); 5] = [
    ("s3:x-amz-acl", "x-amz-acl"),
    ("s3:x-amz-content-sha256", "x-amz-content-sha256"),
    ("s3:x-amz-copy-source", COPY_SOURCE),
    ("s3:x-amz-metadata-directive", "x-amz-metadata-directive"),
    ("s3:x-amz-storage-class", "x-amz-storage-class"),
];
const COPY_SOURCE: &str = "x-amz-copy-source";

/// How a key with several values is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Quantifier {
    /// `ForAnyValue`: one of the values must match.
    Any,
    /// `ForAllValues`: each of the values must match; true if there are none.
    All,
}

/// The comparison and the values of the policy.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Test {
    Text(Vec<Pattern>, Case),
    Number(Comparison, Vec<i64>),
    Bool(bool),
    Address(Vec<Network>),
    /// `Null`: whether the request lacks the key.
    Missing(bool),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Comparison {
    Equals,
    LessThan,
    LessThanEquals,
    GreaterThan,
    GreaterThanEquals,
}

/// Addresses with a common prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Network {
    address: IpAddr,
    prefix_bits: u8,
}

/// Kinds of operators, without values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Text { wildcards: bool, case: Case },
    Number(Comparison),
    Date(Comparison),
    Bool,
    Address,
    Missing,
}

struct Operator {
    kind: Kind,
    negated: bool,
    if_exists: bool,
    quantifier: Option<Quantifier>,
}

/// Value of a key in a request.
enum Value<'a> {
    Text(Cow<'a, str>),
    Texts(Vec<&'a str>),
    Number(i64),
    Bool(bool),
    Address(IpAddr),
}

impl Operator {
    fn parse(name: &str) -> Option<Self> {
        let (quantifier, name) = match name.split_once(':') {
            Some(("ForAnyValue", name)) => (Some(Quantifier::Any), name),
            Some(("ForAllValues", name)) => (Some(Quantifier::All), name),
            Some(_) => return None,
            None => (None, name),
        };
        let (plain, if_exists) = match name.strip_suffix("IfExists") {
            Some(plain) => (plain, true),
            None => (name, false),
        };
        let text = |wildcards, case| Kind::Text { wildcards, case };
        let (kind, negated) = match plain {
            "StringEquals" => (text(false, Case::Differs), false),
            "StringNotEquals" => (text(false, Case::Differs), true),
            "StringEqualsIgnoreCase" => (text(false, Case::Ignored), false),
            "StringNotEqualsIgnoreCase" => (text(false, Case::Ignored), true),
            "StringLike" => (text(true, Case::Differs), false),
            "StringNotLike" => (text(true, Case::Differs), true),
            "Bool" => (Kind::Bool, false),
            "IpAddress" => (Kind::Address, false),
            "NotIpAddress" => (Kind::Address, true),
            "Null" if !if_exists => (Kind::Missing, false),
            _ => {
                let (make, comparison): (fn(Comparison) -> Kind, _) = match plain.strip_prefix("Numeric") {
                    Some(comparison) => (Kind::Number, comparison),
                    None => (Kind::Date, plain.strip_prefix("Date")?),
                };
                let (comparison, negated) = match comparison {
                    "Equals" => (Comparison::Equals, false),
                    "NotEquals" => (Comparison::Equals, true),
                    "LessThan" => (Comparison::LessThan, false),
                    "LessThanEquals" => (Comparison::LessThanEquals, false),
                    "GreaterThan" => (Comparison::GreaterThan, false),
                    "GreaterThanEquals" => (Comparison::GreaterThanEquals, false),
                    _ => return None,
                };
                (make(comparison), negated)
            }
        };
        Some(Self { kind, negated, if_exists, quantifier })
    }
}

impl Key {
    fn parse(name: &str) -> Option<Self> {
        // Tag names are case-sensitive; the part of the key before them is not.
        let tag = |start: &str| {
            let (head, tag) = name.split_at_checked(start.len())?;
            (head.eq_ignore_ascii_case(start) && !tag.is_empty()).then(|| tag.to_owned())
        };
        if let Some(tag) = tag("s3:ExistingObjectTag/") {
            return Some(Self::ExistingTag(tag));
        }
        if let Some(tag) = tag("s3:RequestObjectTag/") {
            return Some(Self::RequestTag(tag));
        }
        Some(match name.to_ascii_lowercase().as_str() {
            "aws:sourceip" => Self::SourceIp,
            "aws:securetransport" => Self::SecureTransport,
            "aws:username" => Self::UserName,
            "aws:userid" => Self::UserId,
            "aws:currenttime" => Self::CurrentTime,
            "aws:epochtime" => Self::EpochTime,
            "s3:prefix" => Self::Prefix,
            "s3:delimiter" => Self::Delimiter,
            "s3:max-keys" => Self::MaxKeys,
            "s3:requestobjecttagkeys" => Self::RequestTagNames,
            "aws:referer" => Self::Referer,
            "aws:useragent" => Self::UserAgent,
            name => Self::Header(HEADERS.iter().find(|(key, _)| *key == name)?.1),
        })
    }

    /// Whether the operator can compare values of this key.
    fn takes(&self, kind: Kind) -> bool {
        match self {
            _ if kind == Kind::Missing => true,
            Self::SourceIp => kind == Kind::Address,
            Self::SecureTransport => kind == Kind::Bool,
            Self::UserName
            | Self::UserId
            | Self::Prefix
            | Self::Delimiter
            | Self::Referer
            | Self::UserAgent
            | Self::Header(_)
            | Self::ExistingTag(_)
            | Self::RequestTag(_)
            | Self::RequestTagNames => matches!(kind, Kind::Text { .. }),
            Self::CurrentTime => matches!(kind, Kind::Date(_)),
            Self::EpochTime => matches!(kind, Kind::Date(_) | Kind::Number(_)),
            Self::MaxKeys => matches!(kind, Kind::Number(_)),
        }
    }

    /// Whether the key can have several values and needs a quantifier.
    fn has_several(&self) -> bool {
        *self == Self::RequestTagNames
    }

    fn value<'a>(&self, facts: &Facts<'a>) -> Option<Value<'a>> {
        let request = facts.request;
        let text = |text: &'a str| Value::Text(text.into());
        let tag = |tags: Option<&'a [(String, String)]>, name: &String| {
            tags?.iter().find(|(tag, _)| tag == name).map(|(_, value)| text(value))
        };
        match self {
            Self::SourceIp => request.source_ip.map(Value::Address),
            Self::SecureTransport => Some(Value::Bool(request.is_secure)),
            Self::UserName => facts.values.user_name.map(text),
            Self::UserId => facts.values.user_id.map(text),
            Self::CurrentTime | Self::EpochTime => Some(Value::Number(request.now_s)),
            Self::Prefix => request.prefix.map(text),
            Self::Delimiter => request.delimiter.map(text),
            Self::Referer => request.more.referer.map(text),
            Self::UserAgent => request.more.user_agent.map(text),
            Self::Header(name) => {
                let value = request.more.headers?.get(*name)?.to_str().ok()?;
                Some(Value::Text(if *name == COPY_SOURCE { copy_source(value) } else { value.into() }))
            }
            Self::ExistingTag(name) => tag(request.more.existing_tags, name),
            Self::RequestTag(name) => tag(request.more.request_tags, name),
            Self::RequestTagNames => {
                let names: Vec<&str> = request.more.request_tags?.iter().map(|(name, _)| &**name).collect();
                (!names.is_empty()).then_some(Value::Texts(names))
            }
            Self::MaxKeys => request.max_keys.map(|keys| Value::Number(keys.into())),
        }
    }
}

/// The source of a copy as in policies: `BUCKET/KEY`, not encoded.
fn copy_source(value: &str) -> Cow<'_, str> {
    let value = value.strip_prefix('/').unwrap_or(value);
    urlencoding::decode(value).unwrap_or(Cow::Borrowed(value))
}

/// Parses the member `Condition`.
pub(super) fn parse_conditions(json: Json, place: &Place, variables: bool) -> Result<Vec<Condition>, Fault> {
    let Json::Object(operators) = json else { return Err(place.fault("must be an object")) };
    let mut conditions = Vec::new();
    for (name, keys) in operators {
        let place = place.member(&name);
        let operator = Operator::parse(&name).ok_or_else(|| place.fault("operator is not known"))?;
        let Json::Object(keys) = keys else { return Err(place.fault("must be an object")) };
        for (name, values) in keys {
            let place = place.member(&name);
            let key = Key::parse(&name).ok_or_else(|| place.fault("condition key is not known"))?;
            if !key.takes(operator.kind) {
                return Err(place.fault("operator does not fit this condition key"));
            }
            let is_plain = operator.kind == Kind::Missing && operator.quantifier.is_none();
            if key.has_several() != operator.quantifier.is_some() && !is_plain {
                return Err(place.fault(match operator.quantifier {
                    Some(_) => "ForAnyValue and ForAllValues are for s3:RequestObjectTagKeys only",
                    None => "operator must begin with ForAnyValue: or ForAllValues:",
                }));
            }
            conditions.push(parse_one(&operator, key, values, &place, variables)?);
        }
    }
    Ok(conditions)
}

fn parse_one(
    operator: &Operator,
    key: Key,
    values: Json,
    place: &Place,
    variables: bool,
) -> Result<Condition, Fault> {
    let values = match values {
        Json::List(values) if values.is_empty() => return Err(place.fault("is empty")),
        Json::List(values) => values,
        one => vec![one],
    };
    let texts = values.into_iter().map(|value| match value {
        Json::Text(text) => Ok(text),
        Json::Integer(number) => Ok(number.to_string()),
        Json::Bool(value) => Ok(value.to_string()),
        _ => Err(place.fault("value must be text, a number, true or false")),
    });
    let texts = texts.collect::<Result<Vec<_>, _>>()?;
    let test = match operator.kind {
        Kind::Text { wildcards, case } => {
            let syntax = Syntax { wildcards, variables };
            let patterns = texts.iter().map(|text| Pattern::parse(text, syntax));
            Test::Text(patterns.collect::<Result<_, _>>().map_err(|reason| place.fault(&reason))?, case)
        }
        Kind::Number(comparison) => {
            let numbers =
                texts.iter().map(|text| text.parse().map_err(|_| place.fault("is no whole number")));
            Test::Number(comparison, numbers.collect::<Result<_, _>>()?)
        }
        Kind::Date(comparison) => {
            let date = |text: &String| instant::parse(text).or_else(|| text.parse().ok());
            let dates = texts.iter().map(|text| date(text).ok_or_else(|| place.fault("is no date")));
            Test::Number(comparison, dates.collect::<Result<_, _>>()?)
        }
        Kind::Address => {
            let network = |text| Network::parse(text).ok_or_else(|| place.fault("is no IP address or range"));
            Test::Address(texts.iter().map(|text| network(text)).collect::<Result<_, _>>()?)
        }
        Kind::Bool => Test::Bool(parse_bool(&texts, place)?),
        Kind::Missing => Test::Missing(parse_bool(&texts, place)?),
    };
    let Operator { negated, if_exists, quantifier, .. } = *operator;
    Ok(Condition { key, test, negated, if_exists, quantifier })
}

fn parse_bool(texts: &[String], place: &Place) -> Result<bool, Fault> {
    match texts {
        [text] if text == "true" => Ok(true),
        [text] if text == "false" => Ok(false),
        _ => Err(place.fault("must be true or false")),
    }
}

impl Condition {
    /// Whether the condition depends on tags of the existing object.
    pub(super) fn looks_at_existing_tags(&self) -> bool {
        matches!(self.key, Key::ExistingTag(_))
    }

    /// Whether the condition holds for some addresses only.
    pub(super) fn limits_address(&self) -> bool {
        self.key == Key::SourceIp && matches!(self.test, Test::Address(_)) && !self.negated && !self.if_exists
    }

    pub(super) fn holds(&self, facts: &Facts<'_>) -> bool {
        let value = self.key.value(facts);
        if let Test::Missing(missing) = self.test {
            return value.is_none() == missing;
        }
        let Some(value) = value else {
            return match self.quantifier {
                Some(quantifier) => quantifier == Quantifier::All || self.if_exists,
                None => self.negated || self.if_exists,
            };
        };
        if let (Test::Text(patterns, case), Value::Texts(texts)) = (&self.test, &value) {
            let mut each =
                texts.iter().map(|text| matches_any(patterns, text, facts.values, *case) != self.negated);
            return match self.quantifier {
                Some(Quantifier::All) => each.all(|holds| holds),
                _ => each.any(|holds| holds),
            };
        }
        let any = match (&self.test, value) {
            (Test::Text(patterns, case), Value::Text(text)) => {
                matches_any(patterns, &text, facts.values, *case)
            }
            (Test::Number(comparison, numbers), Value::Number(number)) => {
                numbers.iter().any(|with| comparison.holds(number, *with))
            }
            (Test::Bool(expected), Value::Bool(value)) => *expected == value,
            (Test::Address(networks), Value::Address(address)) => {
                networks.iter().any(|network| network.contains(address))
            }
            _ => unreachable!("parsing lets only operators through that fit their key"),
        };
        any != self.negated
    }
}

fn matches_any(patterns: &[Pattern], text: &str, values: Values<'_>, case: Case) -> bool {
    patterns.iter().any(|pattern| pattern.matches(text, values, case))
}

impl Comparison {
    fn holds(self, left: i64, right: i64) -> bool {
        match self {
            Self::Equals => left == right,
            Self::LessThan => left < right,
            Self::LessThanEquals => left <= right,
            Self::GreaterThan => left > right,
            Self::GreaterThanEquals => left >= right,
        }
    }
}

impl Network {
    fn parse(text: &str) -> Option<Self> {
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().ok()?;
        let most = if address.is_ipv4() { 32 } else { 128 };
        let digits = |text: &&str| (1..=3).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit());
        let prefix_bits = match prefix {
            Some(prefix) => Some(prefix).filter(digits)?.parse().ok().filter(|bits| *bits <= most)?,
            None => most,
        };
        Some(Self { address, prefix_bits })
    }

    /// IPv4 addresses inside IPv6, as dual-stack sockets report them, match as IPv4 addresses.
    fn contains(&self, address: IpAddr) -> bool {
        let bits = u32::from(self.prefix_bits);
        match (self.address, address.to_canonical()) {
            (IpAddr::V4(network), IpAddr::V4(address)) => {
                let mask = u32::MAX.checked_shl(32 - bits).unwrap_or(0);
                u32::from(network) & mask == u32::from(address) & mask
            }
            (IpAddr::V6(network), IpAddr::V6(address)) => {
                let mask = u128::MAX.checked_shl(128 - bits).unwrap_or(0);
                u128::from(network) & mask == u128::from(address) & mask
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(network: &str, address: &str, expected: bool) {
        let network = Network::parse(network).unwrap();
        assert_eq!(network.contains(address.parse().unwrap()), expected);
    }

    #[test]
    fn ranges_contain_addresses() {
        check("10.1.0.0/16", "10.1.255.255", true);
        check("10.1.0.0/16", "10.2.0.0", false);
        check("10.1.2.3", "10.1.2.3", true);
        check("10.1.2.3", "10.1.2.2", false);
        check("0.0.0.0/0", "255.1.2.3", true);
        check("0.0.0.0/0", "::1", false);
        check("10.1.0.0/16", "::ffff:10.1.0.9", true);
        check("2001:db8::/32", "2001:db8:ffff::1", true);
        check("2001:db8::/32", "2001:db9::1", false);
        check("::/0", "2001:db9::1", true);
    }

    #[test]
    fn what_is_no_range_is_refused() {
        for text in
            ["", "10.1.0.0/33", "10.1.0.0/", "10.1.0.0/+8", "10.1.0/16", "::/129", "host", "10.1.0.0/0008"]
        {
            assert_eq!(Network::parse(text), None, "{text}");
        }
    }
}
