//! The token service: issues short-lived keys to holders of lasting keys, in the AWS query protocol.
//!
//! The protocol front passes the form of a POST whose signature it has verified for the service `sts`. A key from this
//! service has at most the rights of its user: roles and session policies only remove rights. Keys are not stored, see
//! [`crate::Accounts`].

use crate::accounts::{Accounts, NewSession};
use crate::identity::{Identity, PolicyRequest, Verdict};
use crate::instant;
use crate::policy::{Policy, PolicyOf, SESSION_POLICY_BYTES_MAX, decide};

const VERSION: &str = "2011-06-15";
const NAMESPACE: &str = "https://sts.amazonaws.com/doc/2011-06-15/";
/// Account number in the ARN of a role or user; there are no accounts, so it has no meaning.
const ACCOUNT: &str = "000000000000";
const DURATION_S: std::ops::RangeInclusive<i64> = 900..=43_200;
const ROLE_DURATION_S: i64 = 3600;
const SESSION_DURATION_S: i64 = 43_200;

/// The response: always XML.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StsAnswer {
    /// HTTP status.
    pub status: u16,
    /// The body, `text/xml`.
    pub body: String,
    /// For the audit log.
    pub operation: &'static str,
}

/// An error of the token service.
struct Refusal {
    status: u16,
    code: &'static str,
    message: String,
}

fn refuse(status: u16, code: &'static str, message: impl Into<String>) -> Refusal {
    Refusal { status, code, message: message.into() }
}

/// Fields of a form.
struct Form(Vec<(String, String)>);

/// Answers one request.
///
/// `client` has the facts that policies look at; action, bucket and key are filled in here.
pub fn answer(
    accounts: &Accounts,
    identity: &Identity,
    client: &PolicyRequest<'_>,
    form: &[u8],
    request_id: &str,
) -> StsAnswer {
    let form = Form::parse(form);
    let (operation, result) = match &form {
        Ok(form) => dispatch(accounts, identity, client, form),
        Err(refusal) => ("Unknown", Err(refuse(refusal.status, refusal.code, &*refusal.message))),
    };
    match result {
        Ok(result) => StsAnswer {
            status: 200,
            body: format!(
                "<{operation}Response xmlns=\"{NAMESPACE}\">{result}<ResponseMetadata><RequestId>{}</RequestId>\
                 </ResponseMetadata></{operation}Response>",
                escape(request_id)
            ),
            operation,
        },
        Err(Refusal { status, code, message }) => StsAnswer {
            status,
            body: format!(
                "<ErrorResponse xmlns=\"{NAMESPACE}\"><Error><Type>Sender</Type><Code>{code}</Code>\
                 <Message>{}</Message></Error><RequestId>{}</RequestId></ErrorResponse>",
                escape(&message),
                escape(request_id)
            ),
            operation,
        },
    }
}

fn dispatch(
    accounts: &Accounts,
    identity: &Identity,
    client: &PolicyRequest<'_>,
    form: &Form,
) -> (&'static str, Result<String, Refusal>) {
    if form.get("Version") != Some(VERSION) {
        let refusal =
            refuse(400, "InvalidAction", format!("version is not supported: use Version={VERSION}"));
        return ("Unknown", Err(refusal));
    }
    let allowed = |action| may(identity, client, action);
    match form.get("Action") {
        Some("AssumeRole") => {
            ("AssumeRole", allowed("sts:AssumeRole").and_then(|()| assume_role(accounts, identity, form)))
        }
        Some("GetSessionToken") => (
            "GetSessionToken",
            allowed("sts:GetSessionToken").and_then(|()| session_token(accounts, identity, form)),
        ),
        Some("GetCallerIdentity") => ("GetCallerIdentity", caller_identity(identity, form)),
        other => {
            let name = other.unwrap_or_default();
            ("Unknown", Err(refuse(400, "InvalidAction", format!("action is not supported: Action={name}"))))
        }
    }
}

/// Every user may get keys with fewer rights, unless a policy denies it. Short-lived keys cannot get further keys:
/// otherwise the finder of a leaked key could extend it for ever.
fn may(identity: &Identity, client: &PolicyRequest<'_>, action: &str) -> Result<(), Refusal> {
    if identity.is_session {
        return Err(refuse(403, "AccessDenied", "short-lived keys cannot ask for others"));
    }
    let request = PolicyRequest {
        identity: Some(identity),
        action,
        bucket: "",
        key: None,
        bucket_policy: None,
        ..*client
    };
    match decide(&request) {
        Verdict::Denied => Err(refuse(403, "AccessDenied", format!("a policy denies it: action={action}"))),
        Verdict::Allowed | Verdict::NotAllowed => Ok(()),
    }
}

fn assume_role(accounts: &Accounts, identity: &Identity, form: &Form) -> Result<String, Refusal> {
    form.only(&["RoleArn", "RoleSessionName", "DurationSeconds", "Policy", "ExternalId"])?;
    let duration_s = form.duration_s(ROLE_DURATION_S)?;
    let name = form.get("RoleSessionName").unwrap_or("session");
    let fits = |c: char| c.is_ascii_alphanumeric() || "_=,.@+-".contains(c);
    if !(2..=64).contains(&name.len()) || !name.chars().all(fits) {
        return Err(refuse(
            400,
            "ValidationError",
            "RoleSessionName must be 2 to 64 of letters, digits and =,.@-_+",
        ));
    }
    let role = match form.get("RoleArn").unwrap_or_default().split_once(":role/") {
        // An ARN that names no role, as clients for other servers send: the key gets the rights of the user.
        None => None,
        Some((_, role)) if accounts.has_role(role) => Some(role.to_owned()),
        Some((_, role)) => {
            return Err(refuse(403, "AccessDenied", format!("there is no such role: name={role}")));
        }
    };
    let policy = form.get("Policy").filter(|policy| !policy.is_empty());
    if let Some(policy) = policy {
        if policy.len() > SESSION_POLICY_BYTES_MAX {
            let bytes = policy.len();
            let message = format!("policy is too long: bytes={bytes} most={SESSION_POLICY_BYTES_MAX}");
            return Err(refuse(400, "PackedPolicyTooLarge", message));
        }
        Policy::parse(policy.as_bytes(), PolicyOf::Session)
            .map_err(|error| refuse(400, "MalformedPolicyDocument", error.to_string()))?;
    }
    let shown = role.clone().unwrap_or_else(|| identity.user.name.to_string());
    let credentials = credentials(accounts, identity, duration_s, role, policy.map(str::to_owned))?;
    let (shown, name) = (escape(&shown), escape(name));
    Ok(format!(
        "<AssumeRoleResult>{}<AssumedRoleUser><AssumedRoleId>{}:{name}</AssumedRoleId>\
         <Arn>arn:aws:sts::{ACCOUNT}:assumed-role/{shown}/{name}</Arn></AssumedRoleUser></AssumeRoleResult>",
        credentials, identity.user.id,
    ))
}

fn session_token(accounts: &Accounts, identity: &Identity, form: &Form) -> Result<String, Refusal> {
    form.only(&["DurationSeconds"])?;
    let duration_s = form.duration_s(SESSION_DURATION_S)?;
    let credentials = credentials(accounts, identity, duration_s, None, None)?;
    Ok(format!("<GetSessionTokenResult>{credentials}</GetSessionTokenResult>"))
}

fn caller_identity(identity: &Identity, form: &Form) -> Result<String, Refusal> {
    form.only(&[])?;
    Ok(format!(
        "<GetCallerIdentityResult><UserId>{}</UserId><Account>{ACCOUNT}</Account>\
         <Arn>arn:aws:iam::{ACCOUNT}:user/{}</Arn></GetCallerIdentityResult>",
        identity.user.id,
        escape(&identity.user.name)
    ))
}

fn credentials(
    accounts: &Accounts,
    identity: &Identity,
    duration_s: i64,
    role: Option<String>,
    policy: Option<String>,
) -> Result<String, Refusal> {
    let session = accounts.new_session(identity, duration_s, role, policy);
    let (NewSession { access_key, secret, token }, expires_s) =
        session.map_err(|error| refuse(403, "InvalidClientTokenId", error.to_string()))?;
    Ok(format!(
        "<Credentials><AccessKeyId>{access_key}</AccessKeyId><SecretAccessKey>{}</SecretAccessKey>\
         <SessionToken>{token}</SessionToken><Expiration>{}</Expiration></Credentials>",
        escape(secret.expose()),
        instant::format_s(expires_s)
    ))
}

impl Form {
    fn parse(body: &[u8]) -> Result<Self, Refusal> {
        let malformed = || refuse(400, "MalformedInput", "body is no form");
        let body = std::str::from_utf8(body).map_err(|_| malformed())?;
        let mut fields: Vec<(String, String)> = Vec::new();
        for field in body.split('&').filter(|field| !field.is_empty()) {
            let (name, value) = field.split_once('=').unwrap_or((field, ""));
            let name = decode(name).ok_or_else(malformed)?;
            if fields.iter().any(|(known, _)| *known == name) {
                return Err(refuse(400, "ValidationError", format!("parameter appears twice: name={name}")));
            }
            fields.push((name, decode(value).ok_or_else(malformed)?));
        }
        Ok(Self(fields))
    }

    fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(field, _)| field == name).map(|(_, value)| value.as_str())
    }

    /// Refuses parameters that would have no effect.
    fn only(&self, names: &[&str]) -> Result<(), Refusal> {
        let known = |name: &str| name == "Action" || name == "Version" || names.contains(&name);
        match self.0.iter().find(|(name, _)| !known(name)) {
            None => Ok(()),
            Some((name, _)) => {
                Err(refuse(400, "ValidationError", format!("parameter is not supported: name={name}")))
            }
        }
    }

    fn duration_s(&self, default: i64) -> Result<i64, Refusal> {
        let Some(text) = self.get("DurationSeconds") else { return Ok(default) };
        let duration = text.parse().ok().filter(|duration| DURATION_S.contains(duration));
        duration.ok_or_else(|| {
            let (least, most) = (DURATION_S.start(), DURATION_S.end());
            let message = format!("DurationSeconds is out of range: value={text} least={least} most={most}");
            refuse(400, "ValidationError", message)
        })
    }
}

/// Decodes percent-encoding; `None` if it is malformed or not UTF-8.
fn decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        match first {
            b'+' => bytes.push(b' '),
            b'%' => {
                let (digits, after) = rest.split_at_checked(2)?;
                let digit = |byte: u8| char::from(byte).to_digit(16).map(|digit| digit as u8);
                bytes.push(digit(digits[0])? * 16 + digit(digits[1])?);
                rest = after;
            }
            byte => bytes.push(*byte),
        }
    }
    String::from_utf8(bytes).ok()
}

/// Escapes text for XML; characters that XML cannot hold become question marks.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\t' | '\n' | '\r' => out.push(c),
            _ if c < ' ' || ('\u{fffe}'..='\u{ffff}').contains(&c) => out.push('?'),
            _ => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests;
