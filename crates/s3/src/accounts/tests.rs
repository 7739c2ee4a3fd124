use base::env::sim::SimClock;

use super::*;
use crate::identity::PolicyFacts;

/// A node at a fixed noon, with the users `root` (1), `ann` (2), and the key `AKIAANN` of `ann`.
pub(crate) struct Fixture {
    pub(crate) accounts: Accounts,
    pub(crate) clock: Arc<SimClock>,
}

pub(crate) const START_S: i64 = 1_795_320_000;

impl Fixture {
    pub(crate) fn new() -> Self {
        let clock = Arc::new(SimClock::default());
        clock.set_wall_offset_ns(START_S * 1_000_000_000);
        let env = Env { clock: clock.clone(), ..Env::real() };
        let key = NodeKey::new(&[5; NodeKey::BYTES], env.random.clone());
        let accounts = Accounts::new(env, key);
        accounts.replace(set());
        Self { accounts, clock }
    }

    /// Replaces the snapshot by a changed copy.
    pub(crate) fn change(&self, change: impl FnOnce(&mut AccountSet)) {
        let mut next = set();
        change(&mut next);
        self.accounts.replace(next);
    }

    pub(crate) fn pass_s(&self, seconds: u64) {
        self.clock.advance_ns(seconds * 1_000_000_000);
    }

    pub(crate) fn ann(&self) -> Identity {
        self.accounts.identify("AKIAANN", None).unwrap()
    }
}

pub(crate) fn policy(actions: &str) -> Arc<Policy> {
    let text = format!(r#"{{"Statement":{{"Effect":"Allow","Action":"{actions}","Resource":"*"}}}}"#);
    Arc::new(Policy::parse(text.as_bytes(), PolicyOf::User).unwrap())
}

fn set() -> AccountSet {
    let mut set = AccountSet::default();
    for (id, name, admin) in [(1, "root", true), (2, "ann", false)] {
        let user = User {
            id,
            name: name.into(),
            uid: 0,
            gid: 0,
            groups: Vec::new(),
            admin,
            policy: Some(policy("s3:*")),
        };
        set.users.insert(id, AccountUser { user: Arc::new(user), disabled: false });
    }
    let key = AccountKey {
        access_key: "AKIAANN".into(),
        secret: Some(Secret::new("ann's secret")),
        user: 2,
        disabled: false,
        created_ns: 77,
        expires_s: None,
    };
    set.keys.insert(key.access_key.clone(), key);
    set.roles.insert("reader".to_owned(), policy("s3:Get*"));
    set
}

fn key_of(set: &mut AccountSet) -> &mut AccountKey {
    set.keys.get_mut("AKIAANN").unwrap()
}

#[track_caller]
fn check(fixture: &Fixture, has_secret: bool, expected: Result<&str, IdentityError>) {
    assert_eq!(fixture.accounts.secret("AKIAANN").is_some(), has_secret);
    let identity = fixture.accounts.identify("AKIAANN", None);
    assert_eq!(identity.as_ref().map(|identity| &*identity.user.name).map_err(|error| *error), expected);
}

#[test]
fn a_key_stands_for_its_user_as_long_as_both_count() {
    let fixture = Fixture::new();
    check(&fixture, true, Ok("ann"));
    assert_eq!(fixture.accounts.secret("AKIAANN").unwrap().expose(), "ann's secret");
    fixture.change(|set| key_of(set).disabled = true);
    check(&fixture, false, Err(IdentityError::UnknownKey));
    fixture.change(|set| set.users.get_mut(&2).unwrap().disabled = true);
    check(&fixture, false, Err(IdentityError::UnknownKey));
    fixture.change(|set| drop(set.users.remove(&2)));
    check(&fixture, false, Err(IdentityError::UnknownKey));
    fixture.change(|set| set.keys.clear());
    check(&fixture, false, Err(IdentityError::UnknownKey));
    fixture.change(|set| key_of(set).secret = None);
    check(&fixture, false, Ok("ann"));
}

#[test]
fn a_key_ends_with_its_time() {
    let fixture = Fixture::new();
    fixture.change(|set| key_of(set).expires_s = Some(START_S + 60));
    fixture.pass_s(59);
    check(&fixture, true, Ok("ann"));
    fixture.pass_s(1);
    check(&fixture, true, Err(IdentityError::Expired));
}

#[test]
fn a_lasting_key_has_no_token() {
    let fixture = Fixture::new();
    let result = fixture.accounts.identify("AKIAANN", Some("token"));
    assert_eq!(result.unwrap_err(), IdentityError::InvalidToken);
}

#[test]
fn a_short_lived_key_stands_for_its_user_until_its_time_is_over() {
    let fixture = Fixture::new();
    let (session, expires_s) = fixture.accounts.new_session(&fixture.ann(), 900, None, None).unwrap();
    assert_eq!(expires_s, START_S + 900);
    assert_eq!(fixture.accounts.secret(&session.access_key).unwrap().expose(), session.secret.expose());
    let ask = || fixture.accounts.identify(&session.access_key, Some(&session.token));
    let identity = ask().unwrap();
    assert_eq!((&*identity.user.name, identity.is_session, identity.limits.len()), ("ann", true, 0));
    fixture.pass_s(899);
    assert!(ask().is_ok());
    fixture.pass_s(1);
    assert_eq!(ask().unwrap_err(), IdentityError::Expired);
}

#[test]
fn a_token_is_good_for_its_key_only_and_as_it_is() {
    let fixture = Fixture::new();
    let accounts = &fixture.accounts;
    let make = || accounts.new_session(&fixture.ann(), 900, None, None).unwrap().0;
    let (one, two) = (make(), make());
    let check = |access_key: &str, token: Option<&str>| {
        assert_eq!(accounts.identify(access_key, token).unwrap_err(), IdentityError::InvalidToken);
    };
    check(&one.access_key, None);
    check(&one.access_key, Some(&two.token));
    assert!(accounts.identify(&one.access_key, Some(&one.token)).is_ok());
    check(&two.access_key, Some(&one.token));
    check(&one.access_key, Some(""));
    check(&one.access_key, Some("not base64!"));
    check(&one.access_key, Some(&"A".repeat(TOKEN_BYTES_MAX + 1)));
    check(&one.access_key, Some(&one.token[..one.token.len() - 2]));
    let mut changed = one.token.clone().into_bytes();
    changed[30] = if changed[30] == b'A' { b'B' } else { b'A' };
    check(&one.access_key, Some(std::str::from_utf8(&changed).unwrap()));
}

#[test]
fn a_restart_keeps_sessions_and_another_node_key_ends_them() {
    let fixture = Fixture::new();
    let (session, _) = fixture.accounts.new_session(&fixture.ann(), 900, None, None).unwrap();
    let restarted = Fixture::new();
    assert!(restarted.accounts.identify(&session.access_key, Some(&session.token)).is_ok());
    let env = Env { clock: fixture.clock.clone(), ..Env::real() };
    let other = Accounts::new(env, NodeKey::new(&[6; NodeKey::BYTES], Env::real().random));
    other.replace(set());
    let result = other.identify(&session.access_key, Some(&session.token));
    assert_eq!(result.unwrap_err(), IdentityError::InvalidToken);
}

#[test]
fn a_short_lived_key_ends_with_its_user_and_with_the_key_that_asked_for_it() {
    let fixture = Fixture::new();
    let (session, _) = fixture.accounts.new_session(&fixture.ann(), 900, None, None).unwrap();
    let check = |expected| {
        let identity = fixture.accounts.identify(&session.access_key, Some(&session.token));
        assert_eq!(identity.map(|_| ()), expected);
    };
    let gone = Err(IdentityError::UnknownKey);
    check(Ok(()));
    fixture.change(|set| set.users.get_mut(&2).unwrap().disabled = true);
    check(gone);
    fixture.change(|set| key_of(set).disabled = true);
    check(gone);
    fixture.change(|set| key_of(set).created_ns = 78);
    check(gone);
    fixture.change(|set| key_of(set).user = 1);
    check(gone);
    fixture.change(|set| key_of(set).expires_s = Some(START_S));
    check(Err(IdentityError::Expired));
    fixture.change(|_| {});
    check(Ok(()));
}

#[test]
fn roles_and_session_policies_limit_and_a_role_that_is_gone_allows_nothing() {
    let fixture = Fixture::new();
    let accounts = &fixture.accounts;
    let get = r#"{"Statement":{"Effect":"Allow","Action":"s3:*","Resource":"arn:aws:s3:::b/*"}}"#.to_owned();
    let session = accounts.new_session(&fixture.ann(), 900, Some("reader".to_owned()), Some(get));
    let (session, _) = session.unwrap();
    let may = |action, bucket| {
        let identity = accounts.identify(&session.access_key, Some(&session.token)).unwrap();
        let request = PolicyRequest {
            identity: Some(&identity),
            action,
            bucket,
            key: Some("k"),
            owns_bucket: false,
            bucket_policy: None,
            source_ip: None,
            is_secure: false,
            now_s: START_S,
            prefix: None,
            delimiter: None,
            max_keys: None,
            more: PolicyFacts::default(),
        };
        accounts.may(&request).is_allowed()
    };
    assert!(may("s3:GetObject", "b"));
    assert!(!may("s3:PutObject", "b"));
    assert!(!may("s3:GetObject", "c"));
    fixture.change(|set| drop(set.roles.insert("reader".to_owned(), policy("s3:Put*"))));
    assert!(may("s3:PutObject", "b"));
    fixture.change(|set| set.roles.clear());
    assert!(!may("s3:GetObject", "b") && !may("s3:PutObject", "b"));
}

#[test]
fn new_keys_and_secrets_have_the_form_that_clients_expect() {
    let env = Env::real();
    let key = new_access_key(&env, "AKIA");
    assert_eq!(key.len(), 20);
    assert!(key.bytes().all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit()), "{key}");
    let secret = new_secret(&env);
    assert_eq!(secret.expose().len(), 40);
    assert!(secret.expose().bytes().all(|byte| byte.is_ascii_alphanumeric()));
    assert_ne!(new_secret(&env).expose(), secret.expose());
    assert!(!format!("{secret:?}").contains(secret.expose()));
}

#[test]
fn many_tokens_are_not_remembered_without_end() {
    let fixture = Fixture::new();
    let ann = fixture.ann();
    for _ in 0..SESSIONS_REMEMBERED_MAX + 1 {
        let (session, _) = fixture.accounts.new_session(&ann, 900, None, None).unwrap();
        fixture.accounts.identify(&session.access_key, Some(&session.token)).unwrap();
    }
    assert!(fixture.accounts.sessions.lock().unwrap().len() <= SESSIONS_REMEMBERED_MAX);
}
