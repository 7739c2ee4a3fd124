use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::identity::{PolicyFacts, User};

fn identity(name: &str, admin: bool, policy: Option<&str>, limits: &[&str]) -> Identity {
    let parse = |text: &str| Arc::new(Policy::parse(text.as_bytes(), PolicyOf::User).unwrap());
    let user = User {
        id: 7,
        name: name.into(),
        uid: 1000,
        gid: 1000,
        groups: Vec::new(),
        admin,
        policy: policy.map(parse),
    };
    Identity {
        user: Arc::new(user),
        access_key: "AKIA".into(),
        limits: limits.iter().map(|text| parse(text)).collect(),
        is_session: false,
    }
}

fn request<'a>(action: &'a str, resource: &'a str) -> PolicyRequest<'a> {
    let (bucket, key) =
        resource.split_once('/').map_or((resource, None), |(bucket, key)| (bucket, Some(key)));
    PolicyRequest {
        identity: None,
        action,
        bucket,
        key,
        owns_bucket: false,
        bucket_policy: None,
        source_ip: Some("10.1.2.3".parse().unwrap()),
        is_secure: false,
        now_s: 1_795_320_306,
        prefix: None,
        delimiter: None,
        max_keys: None,
        more: PolicyFacts::default(),
    }
}

/// One statement with these members.
fn policy(members: &str) -> String {
    format!(r#"{{"Version":"2012-10-17","Statement":[{{{members}}}]}}"#)
}

const OK: Verdict = Verdict::Allowed;
const NO: Verdict = Verdict::NotAllowed;
const DENIED: Verdict = Verdict::Denied;

/// The verdict for the user `ann` with a policy of one statement.
#[track_caller]
fn check(members: &str, action: &str, resource: &str, expected: Verdict) {
    check_request(members, &request(action, resource), expected);
}

#[track_caller]
fn check_request(members: &str, request: &PolicyRequest<'_>, expected: Verdict) {
    let ann = identity("ann", false, Some(&policy(members)), &[]);
    assert_eq!(decide(&PolicyRequest { identity: Some(&ann), ..*request }), expected, "{members}");
}

#[test]
fn actions_and_resources_select() {
    let get = r#""Effect":"Allow","Action":"s3:GetObject","Resource":"arn:aws:s3:::photos/*""#;
    check(get, "s3:GetObject", "photos/a/b", OK);
    check(get, "s3:PutObject", "photos/a/b", NO);
    check(get, "s3:GetObject", "other/a", NO);
    check(get, "s3:GetObject", "photos", NO);
    let any = r#""Effect":"Allow","Action":["S3:get*","s3:List?ucket"],"Resource":"*""#;
    check(any, "s3:GetObject", "photos/a", OK);
    check(any, "s3:ListBucket", "photos", OK);
    check(any, "s3:ListBuckets", "photos", NO);
    let all = r#""Effect":"Allow","Action":"*","Resource":"arn:aws:s3:::*""#;
    check(all, "s3:ListAllMyBuckets", "", OK);
    let but = r#""Effect":"Allow","NotAction":"s3:Delete*","NotResource":"arn:aws:s3:::secret/*""#;
    check(but, "s3:PutObject", "photos/a", OK);
    check(but, "s3:DeleteObject", "photos/a", NO);
    check(but, "s3:PutObject", "secret/a", NO);
    check(r#""Effect":"Deny","Action":"*","Resource":"*""#, "s3:GetObject", "a/b", DENIED);
}

#[test]
fn variables_name_the_user() {
    let home = r#""Effect":"Allow","Action":"s3:*","Resource":"arn:aws:s3:::home/${aws:username}/*""#;
    check(home, "s3:PutObject", "home/ann/x", OK);
    check(home, "s3:PutObject", "home/bob/x", NO);
    check(home, "s3:PutObject", "home/${aws:username}/x", NO);
    let ann = r#"{"Version":"2008-10-17","Statement":{"Effect":"Allow","Action":"*","Resource":"arn:aws:s3:::home/${aws:username}/*"}}"#;
    let ann = identity("ann", false, Some(ann), &[]);
    let literal = request("s3:PutObject", "home/${aws:username}/x");
    assert_eq!(decide(&PolicyRequest { identity: Some(&ann), ..literal }), OK);
}

#[track_caller]
fn check_condition(condition: &str, request: &PolicyRequest<'_>, expected: Verdict) {
    let members = format!(r#""Effect":"Allow","Action":"*","Resource":"*","Condition":{{{condition}}}"#);
    check_request(&members, request, expected);
}

#[test]
fn conditions_look_at_the_request() {
    let plain = request("s3:ListBucket", "b");
    let listing =
        PolicyRequest { prefix: Some("home/ann/"), delimiter: Some("/"), max_keys: Some(100), ..plain };
    check_condition(r#""IpAddress":{"aws:SourceIp":["192.168.0.0/16","10.1.0.0/16"]}"#, &plain, OK);
    check_condition(r#""IpAddress":{"aws:SourceIp":"10.2.0.0/16"}"#, &plain, NO);
    check_condition(r#""NotIpAddress":{"AWS:sourceip":["10.1.0.0/16","::/0"]}"#, &plain, NO);
    check_condition(r#""NotIpAddress":{"aws:SourceIp":"10.2.0.0/16"}"#, &plain, OK);
    check_condition(r#""Bool":{"aws:SecureTransport":"true"}"#, &plain, NO);
    check_condition(r#""Bool":{"aws:SecureTransport":false}"#, &plain, OK);
    check_condition(r#""StringEquals":{"s3:prefix":["","home/ann/"],"s3:delimiter":"/"}"#, &listing, OK);
    check_condition(r#""StringEquals":{"s3:prefix":["","home/ann/"],"s3:delimiter":"-"}"#, &listing, NO);
    check_condition(r#""StringLike":{"s3:prefix":"home/${aws:username}/*"}"#, &listing, OK);
    check_condition(r#""StringEquals":{"s3:prefix":"home/*"}"#, &listing, NO);
    check_condition(r#""StringNotLike":{"s3:prefix":["x*","home/*"]}"#, &listing, NO);
    check_condition(r#""StringEqualsIgnoreCase":{"aws:username":"ANN"}"#, &plain, OK);
    check_condition(r#""StringNotEqualsIgnoreCase":{"aws:userid":"7"}"#, &plain, NO);
    check_condition(r#""NumericLessThanEquals":{"s3:max-keys":"100"}"#, &listing, OK);
    check_condition(r#""NumericLessThan":{"s3:max-keys":100}"#, &listing, NO);
    check_condition(r#""NumericNotEquals":{"s3:max-keys":[99,101]}"#, &listing, OK);
    check_condition(r#""DateLessThan":{"aws:CurrentTime":"2026-11-22T04:05:07Z"}"#, &plain, OK);
    check_condition(r#""DateGreaterThan":{"aws:CurrentTime":"2026-11-22T04:05:06Z"}"#, &plain, NO);
    check_condition(r#""DateGreaterThanEquals":{"aws:EpochTime":"1795320306"}"#, &plain, OK);
    check_condition(r#""NumericGreaterThan":{"aws:EpochTime":1795320306}"#, &plain, NO);
    check_condition(r#""NumericGreaterThanEquals":{"aws:EpochTime":1795320306}"#, &plain, OK);
}

#[test]
fn what_a_request_lacks_fails_unless_negated_or_asked_otherwise() {
    let plain = request("s3:GetObject", "b/k");
    check_condition(r#""StringEquals":{"s3:prefix":""}"#, &plain, NO);
    check_condition(r#""StringNotEquals":{"s3:prefix":"x"}"#, &plain, OK);
    check_condition(r#""StringEqualsIfExists":{"s3:prefix":"x"}"#, &plain, OK);
    check_condition(
        r#""StringLikeIfExists":{"s3:prefix":"x"}"#,
        &PolicyRequest { prefix: Some("y"), ..plain },
        NO,
    );
    check_condition(r#""NumericLessThan":{"s3:max-keys":5}"#, &plain, NO);
    check_condition(r#""Null":{"s3:prefix":"true"}"#, &plain, OK);
    check_condition(r#""Null":{"s3:prefix":false}"#, &plain, NO);
    let nowhere = PolicyRequest { source_ip: None, ..plain };
    check_condition(r#""IpAddress":{"aws:SourceIp":"0.0.0.0/0"}"#, &nowhere, NO);
    check_condition(r#""NotIpAddress":{"aws:SourceIp":"0.0.0.0/0"}"#, &nowhere, OK);
}

/// Checks the verdict on `s3:GetObject` of `b/k` under this bucket policy.
#[track_caller]
fn check_bucket(members: &str, who: Option<&Identity>, expected: Verdict) {
    let bucket = Policy::parse(policy(members).as_bytes(), PolicyOf::Bucket("b")).unwrap();
    let request =
        PolicyRequest { identity: who, bucket_policy: Some(&bucket), ..request("s3:GetObject", "b/k") };
    assert_eq!(decide(&request), expected, "{members}");
}

#[test]
fn policies_of_buckets_say_whom_they_are_about() {
    let ann = identity("ann", false, None, &[]);
    let to = |principal: &str| {
        format!(r#""Effect":"Allow","Action":"*","Resource":"arn:aws:s3:::b/*",{principal}"#)
    };
    check_bucket(&to(r#""Principal":"*""#), None, OK);
    check_bucket(&to(r#""Principal":{"AWS":"*"}"#), None, OK);
    check_bucket(&to(r#""Principal":{"AWS":["bob","ann"]}"#), Some(&ann), OK);
    check_bucket(&to(r#""Principal":{"AWS":"arn:aws:iam::123456789012:user/ann"}"#), Some(&ann), OK);
    check_bucket(&to(r#""Principal":{"AWS":"bob"}"#), Some(&ann), NO);
    check_bucket(&to(r#""Principal":{"AWS":"ann"}"#), None, NO);
    check_bucket(&to(r#""NotPrincipal":{"AWS":"bob"}"#), Some(&ann), OK);
    check_bucket(&to(r#""NotPrincipal":{"AWS":"ann"}"#), Some(&ann), NO);
    let denies = r#""Effect":"Deny","Action":"*","Resource":"*","NotPrincipal":{"AWS":"ann"}"#;
    check_bucket(denies, None, DENIED);
    check_bucket(denies, Some(&ann), NO);
}

#[test]
fn nobody_may_do_anything_by_default() {
    assert_eq!(decide(&request("s3:GetObject", "b/k")), NO);
    let ann = identity("ann", false, None, &[]);
    assert_eq!(decide(&PolicyRequest { identity: Some(&ann), ..request("s3:GetObject", "b/k") }), NO);
}

#[test]
fn a_policy_that_cannot_be_read_denies_everything_to_administrators_too() {
    let root = User {
        policy: Some(Policy::deny_everything().into()),
        ..(*identity("root", true, None, &[]).user).clone()
    };
    let root = Identity { user: root.into(), ..identity("root", true, None, &[]) };
    assert_eq!(decide(&PolicyRequest { identity: Some(&root), ..request("s3:GetObject", "b/k") }), DENIED);
}

#[test]
fn whom_a_bucket_belongs_to_may_use_it_unless_a_policy_denies_it() {
    let nothing: &[&str] = &[];
    let get = policy(r#""Effect":"Allow","Action":"s3:GetObject","Resource":"*""#);
    let owner = identity("ann", false, None, nothing);
    let ask = |who: &Identity, action: &str, bucket: Option<&Policy>| {
        let request = request(action, "b/k");
        decide(&PolicyRequest { identity: Some(who), owns_bucket: true, bucket_policy: bucket, ..request })
    };
    assert_eq!(ask(&owner, "s3:PutObject", None), OK);
    let denial =
        policy(r#""Effect":"Deny","Action":"s3:Put*","Resource":"arn:aws:s3:::b/*","Principal":"*""#);
    let denial = Policy::parse(denial.as_bytes(), PolicyOf::Bucket("b")).unwrap();
    assert_eq!(ask(&owner, "s3:PutObject", Some(&denial)), DENIED);
    assert_eq!(ask(&owner, "s3:GetObject", Some(&denial)), OK);
    let limited = identity("ann", false, None, &[&get]);
    assert_eq!(ask(&limited, "s3:GetObject", None), OK);
    assert_eq!(ask(&limited, "s3:PutObject", None), NO, "a session is limited all the same");
}

#[test]
fn a_policy_is_public_if_it_lets_everybody_in_from_everywhere() {
    #[track_caller]
    fn check(members: &str, expected: bool) {
        let text = policy(&format!(r#""Action":"s3:GetObject","Resource":"arn:aws:s3:::b/*",{members}"#));
        let policy = Policy::parse(text.as_bytes(), PolicyOf::Bucket("b")).unwrap();
        assert_eq!(policy.is_public(), expected, "{members}");
    }
    check(r#""Effect":"Allow","Principal":"*""#, true);
    check(r#""Effect":"Allow","Principal":{"AWS":"*"}"#, true);
    check(r#""Effect":"Deny","Principal":"*""#, false);
    check(r#""Effect":"Allow","Principal":{"AWS":"ann"}"#, false);
    let address = r#""Effect":"Allow","Principal":"*","Condition":"#;
    check(&format!(r#"{address}{{"IpAddress":{{"aws:SourceIp":"10.0.0.0/8"}}}}"#), false);
    check(&format!(r#"{address}{{"NotIpAddress":{{"aws:SourceIp":"10.0.0.0/8"}}}}"#), true);
    check(&format!(r#"{address}{{"Bool":{{"aws:SecureTransport":"true"}}}}"#), true);
}

#[test]
fn conditions_look_at_headers_and_tags() {
    let headers = hyper::HeaderMap::from_iter(
        [("x-amz-acl", "private"), ("x-amz-copy-source", "/b/a%20b"), ("x-amz-metadata-directive", "COPY")]
            .map(|(name, value)| (hyper::header::HeaderName::from_static(name), value.parse().unwrap())),
    );
    let existing = [("Class".to_owned(), "secret".to_owned())];
    let given = [("a".to_owned(), "1".to_owned()), ("b".to_owned(), "2".to_owned())];
    let full = PolicyFacts {
        headers: Some(&headers),
        referer: Some("http://example.com/page"),
        user_agent: Some("aws-cli/2"),
        existing_tags: Some(&existing),
        request_tags: Some(&given),
    };
    let allowed = |condition: &str, more: PolicyFacts<'_>| {
        let members = format!(r#""Effect":"Allow","Action":"*","Resource":"*","Condition":{{{condition}}}"#);
        let ann = identity("ann", false, Some(&policy(&members)), &[]);
        decide(&PolicyRequest { identity: Some(&ann), more, ..request("s3:PutObject", "b/k") }) == OK
    };
    #[track_caller]
    fn check(allowed: bool, expected: bool, condition: &str) {
        assert_eq!(allowed, expected, "{condition}");
    }
    for (condition, with, without) in [
        (r#""StringEquals":{"s3:x-amz-acl":"private"}"#, true, false),
        (r#""StringNotEquals":{"s3:x-amz-acl":"private"}"#, false, true),
        (r#""StringEquals":{"s3:x-amz-copy-source":"b/a b"}"#, true, false),
        (r#""StringLike":{"s3:x-amz-copy-source":"c/*"}"#, false, false),
        (r#""StringEquals":{"s3:x-amz-metadata-directive":"REPLACE"}"#, false, false),
        (r#""StringLike":{"aws:Referer":"http://example.com/*"}"#, true, false),
        (r#""StringLike":{"aws:UserAgent":"aws-cli/*"}"#, true, false),
        (r#""StringEquals":{"S3:existingobjecttag/Class":"secret"}"#, true, false),
        (r#""StringEquals":{"s3:ExistingObjectTag/class":"secret"}"#, false, false),
        (r#""StringEquals":{"s3:RequestObjectTag/a":["0","1"]}"#, true, false),
        (r#""Null":{"s3:RequestObjectTag/c":"true"}"#, true, true),
        (r#""ForAnyValue:StringEquals":{"s3:RequestObjectTagKeys":["b","c"]}"#, true, false),
        (r#""ForAnyValue:StringEquals":{"s3:RequestObjectTagKeys":"c"}"#, false, false),
        (r#""ForAllValues:StringEquals":{"s3:RequestObjectTagKeys":["a","b","c"]}"#, true, true),
        (r#""ForAllValues:StringLike":{"s3:RequestObjectTagKeys":"a*"}"#, false, true),
        (r#""ForAllValues:StringNotEquals":{"s3:RequestObjectTagKeys":"c"}"#, true, true),
        (r#""ForAnyValue:StringNotEquals":{"s3:RequestObjectTagKeys":["a","b"]}"#, false, false),
    ] {
        check(allowed(condition, full), with, condition);
        check(allowed(condition, PolicyFacts::default()), without, condition);
    }
    for condition in [
        r#""StringEquals":{"s3:RequestObjectTagKeys":"a"}"#,
        r#""ForAnyValue:StringEquals":{"s3:x-amz-acl":"private"}"#,
        r#""ForSomeValues:StringEquals":{"s3:RequestObjectTagKeys":"a"}"#,
        r#""StringEquals":{"s3:ExistingObjectTag/":"a"}"#,
        r#""NumericEquals":{"s3:RequestObjectTag/a":"1"}"#,
        r#""StringEquals":{"s3:x-amz-nothing":"1"}"#,
    ] {
        let members = format!(r#""Effect":"Allow","Action":"*","Resource":"*","Condition":{{{condition}}}"#);
        assert!(Policy::parse(policy(&members).as_bytes(), PolicyOf::User).is_err(), "{condition}");
    }
}

#[test]
fn administrators_are_stopped_by_denials_only_and_can_lift_them() {
    let root = identity("root", true, None, &[]);
    let everything = r#""Effect":"Deny","Action":"*","Resource":"*","Principal":"*""#;
    check_bucket(everything, Some(&root), DENIED);
    let plain = PolicyRequest { identity: Some(&root), ..request("s3:GetObject", "b/k") };
    assert_eq!(decide(&plain), OK);
    let bucket = Policy::parse(policy(everything).as_bytes(), PolicyOf::Bucket("b")).unwrap();
    for action in POLICY_ACTIONS {
        let ask = |who| {
            decide(&PolicyRequest {
                identity: Some(who),
                bucket_policy: Some(&bucket),
                ..request(action, "b")
            })
        };
        assert_eq!(ask(&root), OK);
        let limited =
            identity("root", true, None, &[&policy(r#""Effect":"Allow","Action":"*","Resource":"*""#)]);
        assert_eq!(ask(&limited), DENIED);
    }
}

#[test]
fn sessions_are_limited_to_what_all_their_policies_allow() {
    let all = policy(r#""Effect":"Allow","Action":"*","Resource":"*""#);
    let get = policy(r#""Effect":"Allow","Action":"s3:Get*","Resource":"*""#);
    let no_b = policy(r#""Effect":"Deny","Action":"*","Resource":"arn:aws:s3:::b/*""#);
    let ask = |admin, own: Option<&str>, limits: &[&str], action: &str| {
        let who = identity("ann", admin, own, limits);
        decide(&PolicyRequest { identity: Some(&who), ..request(action, "b/k") })
    };
    assert_eq!(ask(false, Some(&all), &[&get], "s3:GetObject"), OK);
    assert_eq!(ask(false, Some(&all), &[&get], "s3:PutObject"), NO);
    assert_eq!(ask(false, Some(&get), &[&all], "s3:PutObject"), NO);
    assert_eq!(ask(true, None, &[&get], "s3:PutObject"), NO);
    assert_eq!(ask(true, None, &[&all, &get], "s3:GetObject"), OK);
    assert_eq!(ask(true, None, &[&all, &no_b], "s3:GetObject"), DENIED);
}

#[track_caller]
fn check_refused(text: &str, of: PolicyOf<'_>, place: &str, reason: &str) {
    let error = Policy::parse(text.as_bytes(), of).unwrap_err();
    assert_eq!(error.place, place, "{error}");
    assert!(error.reason.contains(reason), "{error}");
}

#[test]
fn what_is_not_understood_is_refused_with_its_place() {
    let user = |members: &str, place: &str, reason: &str| {
        check_refused(&policy(members), PolicyOf::User, &format!("Statement[0]{place}"), reason);
    };
    let rest = r#""Effect":"Allow","Action":"*","Resource":"*""#;
    check_refused("{", PolicyOf::User, "the top", "not JSON");
    check_refused("[]", PolicyOf::User, "the top", "object");
    check_refused("{}", PolicyOf::User, "Statement", "missing");
    check_refused(r#"{"Statement":[]}"#, PolicyOf::User, "Statement", "list");
    check_refused(r#"{"Version":"2020-01-01"}"#, PolicyOf::User, "Version", "2012-10-17");
    check_refused(r#"{"Extra":1}"#, PolicyOf::User, "Extra", "not known");
    check_refused(r#"{"Id":1}"#, PolicyOf::User, "Id", "text");
    check_refused(r#"{"Id":"a","Id":"b"}"#, PolicyOf::User, "the top", "twice");
    check_refused(r#"{"Statement":["x"]}"#, PolicyOf::User, "Statement[0]", "object");
    user(r#""Action":"*","Resource":"*""#, "", "Effect is missing");
    user(r#""Effect":"Allow","Resource":"*""#, "", "Action is missing");
    user(r#""Effect":"Allow","Action":"*""#, "", "Resource is missing");
    user(r#""Effect":"allow""#, ".Effect", "Allow");
    user(r#""Sid":7"#, ".Sid", "text");
    user(r#""Effekt":"Allow""#, ".Effekt", "not known");
    user(r#""Action":"*","NotAction":"*""#, ".NotAction", "opposite");
    user(r#""Action":["s3:*","ec2:*"]"#, ".Action[1]", "s3:");
    user(r#""Action":[]"#, ".Action", "list");
    user(r#""Action":[7]"#, ".Action[0]", "text");
    user(r#""Resource":"photos/*""#, ".Resource", "arn:aws:s3:::");
    user(r#""Resource":"arn:aws:s3:::""#, ".Resource", "arn:aws:s3:::");
    user(r#""Resource":"arn:aws:s3:::${aws:nobody}""#, ".Resource", "aws:nobody");
    user(&format!(r#""Resource":"arn:aws:s3:::{}""#, "x".repeat(2049)), ".Resource", "too long");
    user(&format!(r#"{rest},"Principal":"*""#), ".Principal", "buckets");
    let condition = |condition: &str, place: &str, reason: &str| {
        user(&format!(r#"{rest},"Condition":{condition}"#), &format!(".Condition{place}"), reason);
    };
    condition("1", "", "object");
    condition(r#"{"StringIs":{}}"#, ".StringIs", "operator");
    condition(r#"{"NullIfExists":{"s3:prefix":true}}"#, ".NullIfExists", "operator");
    condition(r#"{"ForSome:StringEquals":{}}"#, ".ForSome:StringEquals", "operator");
    condition(r#"{"DateEqual":{}}"#, ".DateEqual", "operator");
    condition(r#"{"StringEquals":7}"#, ".StringEquals", "object");
    condition(r#"{"StringEquals":{"aws:SourceArn":"x"}}"#, ".StringEquals.aws:SourceArn", "condition key");
    condition(r#"{"StringEquals":{"aws:SourceIp":"10.0.0.1"}}"#, ".StringEquals.aws:SourceIp", "fit");
    condition(r#"{"StringEquals":{"s3:prefix":[]}}"#, ".StringEquals.s3:prefix", "empty");
    condition(r#"{"StringEquals":{"s3:prefix":null}}"#, ".StringEquals.s3:prefix", "text");
    condition(r#"{"IpAddress":{"aws:SourceIp":"10.0.0.0/40"}}"#, ".IpAddress.aws:SourceIp", "IP address");
    condition(r#"{"Bool":{"aws:SecureTransport":"yes"}}"#, ".Bool.aws:SecureTransport", "true or false");
    condition(r#"{"NumericEquals":{"s3:max-keys":"many"}}"#, ".NumericEquals.s3:max-keys", "number");
    condition(r#"{"DateEquals":{"aws:CurrentTime":"today"}}"#, ".DateEquals.aws:CurrentTime", "date");
    let long = " ".repeat(POLICY_BYTES_MAX + 1);
    check_refused(&long, PolicyOf::User, "the top", "too long");
    check_refused(&long[..SESSION_POLICY_BYTES_MAX + 1], PolicyOf::Session, "the top", "too long");
}

#[test]
fn policies_of_buckets_name_principals_and_their_bucket() {
    let bucket = |members: &str, place: &str, reason: &str| {
        check_refused(&policy(members), PolicyOf::Bucket("b"), &format!("Statement[0]{place}"), reason);
    };
    bucket(r#""Effect":"Allow","Action":"*","Resource":"*""#, "", "Principal is missing");
    bucket(r#""Principal":"ann""#, ".Principal", "AWS");
    bucket(r#""Principal":{}"#, ".Principal", "AWS");
    bucket(r#""Principal":{"AWS":"ann","Service":"x"}"#, ".Principal", "AWS");
    bucket(r#""Principal":{"Federated":"x"}"#, ".Principal.Federated", "not supported");
    bucket(r#""Principal":{"AWS":["ann","arn:aws:iam::1:root"]}"#, ".Principal.AWS[1]", "name of a user");
    bucket(r#""Principal":{"AWS":"a*"}"#, ".Principal.AWS", "name of a user");
    bucket(r#""Resource":"arn:aws:s3:::other/*""#, ".Resource", "bucket=b");
    bucket(r#""Resource":"arn:aws:s3:::bb""#, ".Resource", "bucket=b");
    for resource in ["*", "arn:aws:s3:::b", "arn:aws:s3:::b/*", "arn:aws:s3:::?/x", "arn:aws:s3:::*"] {
        let members = format!(r#""Effect":"Allow","Action":"*","Principal":"*","Resource":"{resource}""#);
        assert!(Policy::parse(policy(&members).as_bytes(), PolicyOf::Bucket("b")).is_ok(), "{resource}");
    }
}

/// Whether a policy of the bucket `old` allows `s3:GetObject` of an object after the bucket was renamed to `new`.
#[track_caller]
fn check_renamed(resource: &str, place: &str, expected: Verdict) {
    let members = format!(r#""Effect":"Allow","Action":"*","Principal":"*","Resource":"{resource}""#);
    let bucket = Policy::parse(policy(&members).as_bytes(), PolicyOf::RenamedBucket("new")).unwrap();
    let request = PolicyRequest { bucket_policy: Some(&bucket), ..request("s3:GetObject", place) };
    assert_eq!(decide(&request), expected, "{resource} {place}");
}

#[test]
fn the_policy_of_a_renamed_bucket_is_about_the_same_things() {
    for (resource, bucket, in_a, in_b) in [
        ("arn:aws:s3:::old", OK, NO, NO),
        ("arn:aws:s3:::old/*", NO, OK, OK),
        ("arn:aws:s3:::old/a/*", NO, OK, NO),
        ("arn:aws:s3:::ol?/a/*", NO, OK, NO),
        ("arn:aws:s3:::o*/a/*", NO, OK, NO),
        ("arn:aws:s3:::o*", OK, OK, OK),
        ("*", OK, OK, OK),
    ] {
        check_renamed(resource, "new", bucket);
        check_renamed(resource, "new/a/k", in_a);
        check_renamed(resource, "new/b/k", in_b);
    }
}

/// Strategy for statements as JSON.
fn any_statement() -> impl Strategy<Value = String> {
    let action = prop::sample::select(vec!["*", "s3:*", "s3:Get*", "s3:PutObject", "s3:GetObject"]);
    let resource = prop::sample::select(vec!["*", "arn:aws:s3:::b/*", "arn:aws:s3:::b", "arn:aws:s3:::c/k"]);
    let condition = prop::sample::select(vec![
        "",
        r#","Condition":{"Bool":{"aws:SecureTransport":true}}"#,
        r#","Condition":{"IpAddress":{"aws:SourceIp":"10.0.0.0/8"}}"#,
    ]);
    let not = prop::sample::select(vec!["", "Not"]);
    (prop::sample::select(vec!["Allow", "Deny"]), not, action, resource, condition).prop_map(
        |(effect, not, action, resource, condition)| {
            format!(r#"{{"Effect":"{effect}","{not}Action":"{action}","Resource":"{resource}"{condition}}}"#)
        },
    )
}

fn verdict(statements: &[String], request: &PolicyRequest<'_>) -> Verdict {
    let text = format!(r#"{{"Version":"2012-10-17","Statement":[{}]}}"#, statements.join(","));
    let ann = identity("ann", false, Some(&text), &[]);
    decide(&PolicyRequest { identity: Some(&ann), ..*request })
}

proptest! {
    #[test]
    fn the_order_of_statements_means_nothing(
        (statements, shuffled) in prop::collection::vec(any_statement(), 1..6)
            .prop_flat_map(|list| (Just(list.clone()), Just(list).prop_shuffle())),
        action in prop::sample::select(vec!["s3:GetObject", "s3:PutObject"]),
        resource in prop::sample::select(vec!["b/k", "c/k", "b"]),
    ) {
        let request = request(action, resource);
        prop_assert_eq!(verdict(&statements, &request), verdict(&shuffled, &request));
    }

    #[test]
    fn a_denial_wins_and_the_verdict_is_that_of_the_statements_one_by_one(
        statements in prop::collection::vec(any_statement(), 1..6),
        action in prop::sample::select(vec!["s3:GetObject", "s3:PutObject"]),
        resource in prop::sample::select(vec!["b/k", "c/k", "b"]),
    ) {
        let request = request(action, resource);
        let alone: Vec<Verdict> =
            statements.iter().map(|one| verdict(std::slice::from_ref(one), &request)).collect();
        let expected = if alone.contains(&DENIED) { DENIED } else if alone.contains(&OK) { OK } else { NO };
        prop_assert_eq!(verdict(&statements, &request), expected);
        let denied = [statements, vec![r#"{"Effect":"Deny","Action":"*","Resource":"*"}"#.to_owned()]].concat();
        prop_assert_eq!(verdict(&denied, &request), DENIED);
    }

    #[test]
    fn any_bytes_are_a_policy_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = Policy::parse(&bytes, PolicyOf::Bucket("b"));
    }
}
