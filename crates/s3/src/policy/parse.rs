//! Parses policies. Unknown members are refused with their place: a policy must not mean less than it says.

use super::condition::parse_conditions;
use super::json::Json;
use super::pattern::{Case, Pattern, Syntax, Values};
use super::{
    Effect, POLICY_BYTES_MAX, Policy, PolicyError, PolicyOf, Principals, SESSION_POLICY_BYTES_MAX, Statement,
};

const ARN: &str = "arn:aws:s3:::";
/// Versions after this one have variables.
const VERSION_WITHOUT_VARIABLES: &str = "2008-10-17";
const VERSION: &str = "2012-10-17";
/// Length of the longest resource, with some room for variables.
const PATTERN_BYTES_MAX: usize = 2048;

/// A place in a policy, such as `Statement[2].Action`.
#[derive(Debug, Clone)]
pub(super) struct Place(String);

/// An error with its place in the policy.
pub(super) type Fault = PolicyError;

impl Place {
    pub(super) fn member(&self, name: &str) -> Self {
        Self(if self.0.is_empty() { name.to_owned() } else { format!("{}.{name}", self.0) })
    }

    fn item(&self, index: usize) -> Self {
        Self(format!("{}[{index}]", self.0))
    }

    pub(super) fn fault(&self, reason: &str) -> Fault {
        let place = if self.0.is_empty() { "the top" } else { &self.0 };
        PolicyError { place: place.to_owned(), reason: reason.to_owned() }
    }
}

pub(super) fn parse(text: &[u8], of: PolicyOf<'_>) -> Result<Policy, Fault> {
    let top = Place(String::new());
    let most = if of == PolicyOf::Session { SESSION_POLICY_BYTES_MAX } else { POLICY_BYTES_MAX };
    if text.len() > most {
        return Err(top.fault(&format!("policy is too long: bytes={} most={most}", text.len())));
    }
    let json = serde_json::from_slice(text).map_err(|error| top.fault(&format!("not JSON: {error}")))?;
    let Json::Object(members) = json else { return Err(top.fault("must be an object")) };
    let (mut variables, mut statements) = (false, None);
    for (name, value) in members {
        let place = top.member(&name);
        match (name.as_str(), value) {
            ("Version", Json::Text(version)) if version == VERSION => variables = true,
            ("Version", Json::Text(version)) if version == VERSION_WITHOUT_VARIABLES => {}
            ("Version", _) => return Err(place.fault("must be \"2012-10-17\" or \"2008-10-17\"")),
            ("Id", Json::Text(_)) => {}
            ("Id", _) => return Err(place.fault("must be text")),
            ("Statement", value) => statements = Some(value),
            _ => return Err(place.fault("element is not known")),
        }
    }
    let place = top.member("Statement");
    let statements = match statements {
        Some(Json::List(statements)) if !statements.is_empty() => statements,
        Some(statement @ Json::Object(_)) => vec![statement],
        Some(_) => return Err(place.fault("must be a statement or a list of them")),
        None => return Err(place.fault("is missing")),
    };
    let reader = Reader { of, variables };
    let statements = statements.into_iter().enumerate();
    let statements = statements.map(|(index, json)| reader.statement(json, &place.item(index)));
    Ok(Policy { statements: statements.collect::<Result<_, _>>()? })
}

struct Reader<'a> {
    of: PolicyOf<'a>,
    variables: bool,
}

impl Reader<'_> {
    fn statement(&self, json: Json, place: &Place) -> Result<Statement, Fault> {
        let Json::Object(members) = json else { return Err(place.fault("must be an object")) };
        let (mut effect, mut principals, mut actions, mut resources) = (None, None, None, None);
        let mut conditions = Vec::new();
        for (name, value) in members {
            let at = place.member(&name);
            match name.as_str() {
                "Sid" if matches!(value, Json::Text(_)) => {}
                "Sid" => return Err(at.fault("must be text")),
                "Effect" => effect = Some(parse_effect(&value, &at)?),
                "Principal" | "NotPrincipal" => {
                    let names = self.principals(value, &at)?;
                    set_once(&mut principals, (names, name == "NotPrincipal"), &at)?;
                }
                "Action" | "NotAction" => {
                    let patterns = each(value, &at, |text, at| self.action(text, at))?;
                    set_once(&mut actions, (patterns, name == "NotAction"), &at)?;
                }
                "Resource" | "NotResource" => {
                    let patterns = each(value, &at, |text, at| self.resource(text, at))?;
                    set_once(&mut resources, (patterns, name == "NotResource"), &at)?;
                }
                "Condition" => conditions = parse_conditions(value, &at, self.variables)?,
                _ => return Err(at.fault("element is not known")),
            }
        }
        let missing = |name: &str| place.fault(&format!("{name} is missing"));
        if self.of.is_bucket() && principals.is_none() {
            return Err(missing("Principal"));
        }
        let (actions, not_actions) = actions.ok_or_else(|| missing("Action"))?;
        let (resources, not_resources) = resources.ok_or_else(|| missing("Resource"))?;
        Ok(Statement {
            effect: effect.ok_or_else(|| missing("Effect"))?,
            principals,
            actions,
            not_actions,
            resources,
            not_resources,
            conditions,
        })
    }

    fn principals(&self, json: Json, place: &Place) -> Result<Principals, Fault> {
        if !self.of.is_bucket() {
            return Err(place.fault("only policies of buckets have principals"));
        }
        match json {
            Json::Text(text) if text == "*" => Ok(Principals::Everybody),
            Json::Object(members) if members.len() == 1 => {
                let (name, value) = members.into_iter().next().expect("there is one");
                let place = place.member(&name);
                if name != "AWS" {
                    return Err(place.fault("kind of principal is not supported: use AWS"));
                }
                let names = each(value, &place, principal)?;
                let everybody = names.iter().any(|name| name == "*");
                Ok(if everybody { Principals::Everybody } else { Principals::Users(names) })
            }
            _ => Err(place.fault("must be \"*\" or {\"AWS\": …}")),
        }
    }

    fn action(&self, text: &str, place: &Place) -> Result<Pattern, Fault> {
        let service = text.split_once(':').map(|(service, _)| service.to_ascii_lowercase());
        match service.as_deref() {
            Some("s3" | "sts") => {}
            None if text == "*" => {}
            _ => return Err(place.fault("action must be s3:…, sts:… or *")),
        }
        pattern(text, Syntax { wildcards: true, variables: false }, place)
    }

    fn resource(&self, text: &str, place: &Place) -> Result<Pattern, Fault> {
        let syntax = Syntax { wildcards: true, variables: self.variables };
        if text == "*" {
            return pattern(text, syntax, place);
        }
        let Some(resource) = text.strip_prefix(ARN).filter(|resource| !resource.is_empty()) else {
            return Err(place.fault("resource must be * or arn:aws:s3:::BUCKET or arn:aws:s3:::BUCKET/KEY"));
        };
        let named = resource.split('/').next().unwrap_or(resource);
        if let PolicyOf::RenamedBucket(bucket) = self.of
            && !named.contains("${")
        {
            // A wildcard in the bucket name also matches keys.
            let keys = if named == resource && named.contains('*') { "*" } else { &resource[named.len()..] };
            return pattern(&format!("{bucket}{keys}"), syntax, place);
        }
        if let PolicyOf::Bucket(bucket) = self.of {
            let is_of_bucket = named.contains("${")
                || pattern(named, syntax, place)?.matches(bucket, Values::default(), Case::Differs);
            if !is_of_bucket {
                return Err(place.fault(&format!("resource is not of this bucket: bucket={bucket}")));
            }
        }
        pattern(resource, syntax, place)
    }
}

fn parse_effect(json: &Json, place: &Place) -> Result<Effect, Fault> {
    match json {
        Json::Text(text) if text == "Allow" => Ok(Effect::Allow),
        Json::Text(text) if text == "Deny" => Ok(Effect::Deny),
        _ => Err(place.fault("must be \"Allow\" or \"Deny\"")),
    }
}

fn set_once<T>(slot: &mut Option<T>, value: T, place: &Place) -> Result<(), Fault> {
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => Err(place.fault("excludes its opposite")),
    }
}

fn pattern(text: &str, syntax: Syntax, place: &Place) -> Result<Pattern, Fault> {
    if text.len() > PATTERN_BYTES_MAX {
        return Err(place.fault(&format!("is too long: bytes={} most={PATTERN_BYTES_MAX}", text.len())));
    }
    Pattern::parse(text, syntax).map_err(|reason| place.fault(&reason))
}

/// One text, or a list of at least one.
fn each<T>(
    json: Json,
    place: &Place,
    one: impl Fn(&str, &Place) -> Result<T, Fault>,
) -> Result<Vec<T>, Fault> {
    match json {
        Json::Text(text) => Ok(vec![one(&text, place)?]),
        Json::List(items) if !items.is_empty() => {
            let items = items.into_iter().enumerate();
            let read = items.map(|(index, item)| match item {
                Json::Text(text) => one(&text, &place.item(index)),
                _ => Err(place.item(index).fault("must be text")),
            });
            read.collect()
        }
        _ => Err(place.fault("must be text or a list of texts")),
    }
}

/// Name of the user in `NAME` or `arn:aws:iam::ACCOUNT:user/NAME`.
fn principal(text: &str, place: &Place) -> Result<String, Fault> {
    if text == "*" {
        return Ok(text.to_owned());
    }
    let name = match text.strip_prefix("arn:") {
        Some(arn) => {
            arn.strip_prefix("aws:iam::").and_then(|arn| arn.split_once(":user/")).map(|(_, name)| name)
        }
        None => Some(text),
    };
    let is_name = |name: &&str| !name.is_empty() && !name.contains(['*', '?', '$', ':', '/']);
    let name = name.filter(is_name);
    name.map(str::to_owned).ok_or_else(|| {
        place.fault("principal must be *, the name of a user, or arn:aws:iam::ACCOUNT:user/NAME")
    })
}
