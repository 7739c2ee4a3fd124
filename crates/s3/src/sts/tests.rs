use super::*;
use crate::accounts::tests::{Fixture, START_S, policy};
use crate::identity::{Identities, IdentityError, PolicyFacts};

const CLIENT: PolicyRequest<'static> = PolicyRequest {
    identity: None,
    action: "",
    bucket: "",
    key: None,
    owns_bucket: false,
    bucket_policy: None,
    source_ip: None,
    is_secure: true,
    now_s: START_S,
    prefix: None,
    delimiter: None,
    max_keys: None,
    more: PolicyFacts {
        headers: None,
        referer: None,
        user_agent: None,
        existing_tags: None,
        request_tags: None,
    },
};

fn ask_as(fixture: &Fixture, identity: &Identity, form: &str) -> StsAnswer {
    answer(&fixture.accounts, identity, &CLIENT, form.as_bytes(), "request-1")
}

fn ask(fixture: &Fixture, form: &str) -> StsAnswer {
    ask_as(fixture, &fixture.ann(), &format!("Version=2011-06-15&{form}"))
}

/// The text between the tags of this name.
fn element<'a>(answer: &'a StsAnswer, name: &str) -> &'a str {
    let (_, rest) = answer.body.split_once(&format!("<{name}>")).expect(&answer.body);
    rest.split_once(&format!("</{name}>")).unwrap().0
}

/// The identity of the key in an answer.
fn identify(fixture: &Fixture, answer: &StsAnswer) -> Result<Identity, IdentityError> {
    let access_key = element(answer, "AccessKeyId");
    let secret = fixture.accounts.secret(access_key).unwrap();
    assert_eq!(secret.expose(), element(answer, "SecretAccessKey"));
    fixture.accounts.identify(access_key, Some(element(answer, "SessionToken")))
}

#[test]
fn get_session_token_gives_a_key_of_the_same_user() {
    let fixture = Fixture::new();
    let answer = ask(&fixture, "Action=GetSessionToken&DurationSeconds=900");
    assert_eq!((answer.status, answer.operation), (200, "GetSessionToken"));
    assert_eq!(element(&answer, "Expiration"), instant::format_s(START_S + 900));
    assert_eq!(element(&answer, "RequestId"), "request-1");
    let identity = identify(&fixture, &answer).unwrap();
    assert_eq!((&*identity.user.name, identity.limits.len()), ("ann", 0));
    fixture.pass_s(900);
    assert_eq!(identify(&fixture, &answer).unwrap_err(), IdentityError::Expired);
}

#[test]
fn assume_role_takes_the_limits_of_role_and_policy() {
    let fixture = Fixture::new();
    let policy = "%7B%22Statement%22%3A%7B%22Effect%22%3A%22Allow%22%2C%22Action%22%3A%22*%22%2C%22Resource%22%3A%22*%22%7D%7D";
    let form =
        format!("Action=AssumeRole&RoleArn=arn:aws:iam::1:role/reader&RoleSessionName=job+1&Policy={policy}");
    assert_eq!(element(&ask(&fixture, &form), "Code"), "ValidationError");
    let answer = ask(&fixture, &form.replace("job+1", "job-1"));
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert_eq!(element(&answer, "Arn"), "arn:aws:sts::000000000000:assumed-role/reader/job-1");
    assert_eq!(element(&answer, "Expiration"), instant::format_s(START_S + 3600));
    assert_eq!(identify(&fixture, &answer).unwrap().limits.len(), 2);
    // Clients for other servers send this; no such role exists.
    let answer = ask(&fixture, "Action=AssumeRole&RoleArn=arn:xxx:xxx:xxx:xxxx&RoleSessionName=anything");
    assert_eq!(identify(&fixture, &answer).unwrap().limits.len(), 0);
}

#[track_caller]
fn check_refused(form: &str, status: u16, code: &str, text: &str) {
    let answer = ask(&Fixture::new(), form);
    assert_eq!(answer.status, status, "{}", answer.body);
    assert!(element(&answer, "Message").contains(text), "{}", answer.body);
    assert_eq!(element(&answer, "Code"), code);
}

#[test]
fn what_cannot_be_done_is_refused() {
    let role = "Action=AssumeRole&RoleArn=arn:aws:iam::1:role/reader&RoleSessionName=job";
    check_refused("", 400, "InvalidAction", "Action=");
    check_refused("Action=GetFederationToken", 400, "InvalidAction", "GetFederationToken");
    check_refused("Action=%3Cx%3E", 400, "InvalidAction", "&lt;x&gt;");
    check_refused("Action=GetSessionToken&DurationSeconds=899", 400, "ValidationError", "least=900");
    check_refused("Action=GetSessionToken&DurationSeconds=43201", 400, "ValidationError", "most=43200");
    check_refused("Action=GetSessionToken&DurationSeconds=x", 400, "ValidationError", "value=x");
    check_refused("Action=GetSessionToken&SerialNumber=1", 400, "ValidationError", "SerialNumber");
    check_refused("Action=GetSessionToken&Action=AssumeRole", 400, "ValidationError", "twice");
    check_refused("Action=%zz", 400, "MalformedInput", "form");
    check_refused("Action=%ff", 400, "MalformedInput", "form");
    check_refused(&role.replace("reader", "nobody"), 403, "AccessDenied", "name=nobody");
    check_refused(&format!("{role}&PolicyArns.member.1.arn=x"), 400, "ValidationError", "PolicyArns");
    check_refused(&format!("{role}&Policy=x"), 400, "MalformedPolicyDocument", "JSON");
    check_refused(&format!("{role}&Policy={}", "x".repeat(2049)), 400, "PackedPolicyTooLarge", "most=2048");
    let answer = ask_as(&Fixture::new(), &Fixture::new().ann(), "Action=GetSessionToken");
    assert_eq!(element(&answer, "Code"), "InvalidAction");
}

#[test]
fn policies_can_deny_it_and_short_lived_keys_make_no_others() {
    let fixture = Fixture::new();
    let mut ann = fixture.ann();
    let session = identify(&fixture, &ask(&fixture, "Action=GetSessionToken")).unwrap();
    let form = "Version=2011-06-15&Action=GetSessionToken";
    assert_eq!(element(&ask_as(&fixture, &session, form), "Code"), "AccessDenied");
    let who = ask_as(&fixture, &session, "Version=2011-06-15&Action=GetCallerIdentity");
    assert_eq!(element(&who, "Arn"), "arn:aws:iam::000000000000:user/ann");
    let deny = r#"{"Statement":{"Effect":"Deny","Action":"sts:*","Resource":"*"}}"#;
    let deny = std::sync::Arc::new(Policy::parse(deny.as_bytes(), PolicyOf::User).unwrap());
    let user = crate::identity::User { policy: Some(deny), ..(*ann.user).clone() };
    ann.user = user.into();
    assert_eq!(element(&ask_as(&fixture, &ann, form), "Code"), "AccessDenied");
    let user = crate::identity::User { policy: Some(policy("s3:GetObject")), ..(*ann.user).clone() };
    ann.user = user.into();
    assert_eq!(ask_as(&fixture, &ann, form).status, 200);
}

#[test]
fn texts_are_escaped() {
    assert_eq!(escape("a<b>&\"\u{1}\n"), "a&lt;b&gt;&amp;&quot;?\n");
    assert_eq!(decode("a+b%20%C3%9f"), Some("a b ß".to_owned()));
    assert_eq!(decode("%4"), None);
}
