"""Answers of S3 that programs expect to be the same as those of AWS.

answers.py GROUP…   ENDPOINT, MNT, NODE, FOREBAY and AWS credentials of an administrator come from the environment.
"""

import base64
import hashlib
import hmac
import json
import os
import sys
import time
import urllib.error
import urllib.request
import uuid
import zlib

import boto3
import botocore
from botocore.client import Config

from hostile import HOST, KEYS, exchange, expect, signed
from matrix import ENDPOINT, MIB, MNT, body, bucket, client, data, keys, refused, s3
from users import forebay, key, policy


def user(*rights):
    """A client of a new user with these statements, and its name."""
    name = f"eve-{uuid.uuid4().hex[:8]}"
    options = ["--policy", "-"] if rights else []
    forebay("user", "add", os.environ["NODE"], name, *options, input=policy(*rights) if rights else None)
    own = key(name)
    config = Config(retries={"max_attempts": 0}, s3={"addressing_style": "path"})
    pair = {"aws_access_key_id": own[0], "aws_secret_access_key": own[1]}
    return boto3.client("s3", endpoint_url=ENDPOINT, region_name="us-east-1", config=config, **pair), name


def status(answer):
    return int(answer.split(" ", 2)[1]), answer.partition("<Code>")[2].partition("</Code>")[0]


def composite():
    """A client may send the checksum of an upload without the number of parts, as minio-go does."""
    b = bucket()
    for suffix in ("", "-2"):
        upload = s3.create_multipart_upload(Bucket=b, Key="m", ChecksumAlgorithm="CRC32")["UploadId"]
        same, named, sums = {"Bucket": b, "Key": "m", "UploadId": upload}, [], b""
        for number, part in enumerate((data(5 * MIB, 1), data(1000, 2)), 1):
            answer = s3.upload_part(**same, PartNumber=number, Body=part, ChecksumAlgorithm="CRC32")
            named.append({"PartNumber": number, "ETag": answer["ETag"]})
            sums += base64.b64decode(answer["ChecksumCRC32"])
        want = base64.b64encode(zlib.crc32(sums).to_bytes(4, "big")).decode()
        complete = {**same, "MultipartUpload": {"Parts": named}}
        refused("BadDigest", 400, s3.complete_multipart_upload, **complete, ChecksumCRC32=f"{want}-3")
        done = s3.complete_multipart_upload(**complete, ChecksumCRC32=want + suffix)
        assert done["ChecksumCRC32"] == f"{want}-2", done


def encryption():
    """A request for encryption is refused, never stored unencrypted with a 200."""
    b = bucket()
    s3.put_object(Bucket=b, Key="k", Body=b"x")
    names = ["customer-key", "customer-key-MD5", "aws-kms-key-id", "context", "bucket-key-enabled", "customer-algorithm"]
    for name in names:
        header = {f"x-amz-server-side-encryption-{name}": "dGVzdA=="}
        for method, path in (("PUT", "new"), ("POST", "new?uploads="), ("PUT", "new?partNumber=1&uploadId=0123456789abcdef")):
            answer = exchange(signed(method, f"/{b}/{path}", header))
            assert status(answer) == (501, "NotImplemented"), (name, path, answer[:300])
        assert status(exchange(signed("GET", f"/{b}/k", header))) == (400, "InvalidRequest"), name
        answer = exchange(signed("HEAD", f"/{b}/k", {**header, "Connection": "close"}), until_close=True)
        assert answer.startswith("HTTP/1.1 400"), name
        copy = {"x-amz-copy-source": f"{b}/k", f"x-amz-copy-source-server-side-encryption-{name}": "dGVzdA=="}
        assert status(exchange(signed("PUT", f"/{b}/new", copy))) == (501, "NotImplemented"), name
    for name in ("customer-key", "aws-kms-key-id"):
        field = {f"x-amz-server-side-encryption-{name}": "dGVzdA=="}
        form = s3.generate_presigned_post(b, "new", Fields=field, Conditions=[field])
        assert post(form)[:2] == (501, "NotImplemented"), name
    assert keys(b) == ["k"]
    for name in ("REDUCED_REDUNDANCY", "STANDARD_IA", "GLACIER", "nonsense"):
        answer = exchange(signed("PUT", f"/{b}/new", {"x-amz-storage-class": name}))
        assert status(answer) == (400, "InvalidStorageClass"), (name, answer[:300])
    assert keys(b) == ["k"]


def documents():
    """Documents that are too long, and lists with an unknown version."""
    b = bucket()
    length = {"Content-Length": str((4 << 20) + 1)}
    for sent in ((4 << 20) + 1, 9 << 20):
        xml = b"<Delete>" + b" " * (sent - 8)
        for digest in (None, "UNSIGNED-PAYLOAD"):
            head = signed("POST", f"/{b}?delete=", {"Content-Length": str(sent)}, xml, digest=digest)
            answer = exchange(head + xml)
            assert status(answer) == (400, "MaxMessageLengthExceeded") and "4194304" in answer, (sent, answer[:300])
    for name in ("tagging", "acl", "cors", "policy"):
        answer = exchange(signed("PUT", f"/{b}?{name}=", length, digest="UNSIGNED-PAYLOAD") + b"x" * ((4 << 20) + 1))
        assert status(answer) == (400, "MaxMessageLengthExceeded"), (name, answer[:300])
    chunked = signed("POST", f"/{b}?delete=", {"Transfer-Encoding": "chunked"}, digest="UNSIGNED-PAYLOAD") + b"5\r\nhello\r\n0\r\n\r\n"
    assert status(exchange(chunked)) == (411, "MissingContentLength")
    for kind in ("3", "1", "x", ""):
        answer = exchange(signed("GET", f"/{b}?list-type={kind}"))
        assert status(answer) == (400, "InvalidArgument"), (kind, answer[:300])


def heads():
    """Request heads that are invalid in HTTP get an S3 error, without a delay."""
    b = bucket()
    start = f"PUT /{b}/k HTTP/1.1\r\nHost: {HOST}\r\n"
    for lines, code in (
        ("Content-Length: -1\r\n", "BadRequest"),
        ("Content-Length: 1\r\nContent-Length: 2\r\n", "BadRequest"),
        ("Content-Length: 1,2\r\n", "BadRequest"),
        ("X-A\r\n", "BadRequest"),
        ("X-A: 1\nX-B: 2\r\n", "BadRequest"),
        ("X-A: 1\r\n\nX-B: 2\r\n", "BadRequest"),
    ):
        answer = exchange(f"{start}{lines}\r\n".encode())
        assert status(answer) == (400, code) and "<RequestId>" in answer, (lines, answer)
        assert "x-amz-request-id:" in answer, answer
    for raw in (f"GET / HTTP/1.1\nHost: {HOST}\n\n", f"GET /{b}\n HTTP/1.1\r\n\r\n"):
        assert status(exchange(raw.encode())) == (400, "BadRequest"), raw
    answer = exchange(f"GET /{'x' * 70000} HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
    assert status(answer) == (414, "InvalidURI"), answer[:300]
    for more in (b"".join(b"X-%d: 1\r\n" % number for number in range(500)), b"X-A: " + b"a" * 300_000 + b"\r\n"):
        answer = exchange(start.encode() + more + b"\r\n")
        assert status(answer) == (431, "RequestHeaderSectionTooLarge"), answer[:300]
    # An object that looks like an error response is not mistaken for one, and requests on one connection stay separate.
    likeness = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n" * 3000
    s3.put_object(Bucket=b, Key="like", Body=likeness)
    for _ in range(3):
        assert body(b, "like") == likeness
    # A head in one packet with an earlier request is read as strictly.
    answers = exchange(signed("GET", f"/{b}/none") + f"GET / HTTP/1.1\nHost: {HOST}\r\n\r\n".encode(), until_close=True)
    assert answers.startswith("HTTP/1.1 404") and "HTTP/1.1 400 Bad Request" in answers, answers
    # A request that announces too much is answered before its body arrives.
    for length, code in ((6 << 40, "EntityTooLarge"), (1 << 62, "EntityTooLarge")):
        began = time.monotonic()
        answer = exchange(signed("PUT", f"/{b}/k", {"Content-Length": str(length)}, digest="UNSIGNED-PAYLOAD") + b"x" * 100_000)
        assert status(answer) == (400, code), answer[:300]
        assert time.monotonic() - began < 2, "answered late"
    # So is a request that announces more than it sends.
    began = time.monotonic()
    answer = exchange(signed("PUT", f"/{b}/k", {"Content-Length": "1000000"}, secret="wrong") + b"x" * 1000)
    assert status(answer) == (403, "SignatureDoesNotMatch"), answer[:300]
    assert time.monotonic() - began < 2, "answered late"


def far_ranges():
    b, sent = bucket(), data(1000)
    s3.put_object(Bucket=b, Key="k", Body=sent)
    huge = "9" * 25
    for text in (f"{huge}-", f"{huge}-{huge}9", f"{2 ** 63}-", f"{2 ** 64 - 1}-{2 ** 64 - 1}"):
        refused("InvalidRange", 416, s3.get_object, Bucket=b, Key="k", Range=f"bytes={text}")
    for text, want in ((f"5-{huge}", sent[5:]), (f"-{huge}", sent), (f"0-9,{huge}-", sent[:10])):
        answer = s3.get_object(Bucket=b, Key="k", Range=f"bytes={text}")
        assert answer["Body"].read() == want and answer["ResponseMetadata"]["HTTPStatusCode"] == 206, text
        assert answer["ContentRange"].endswith(f"-{999 if len(want) > 10 else 9}/1000"), answer["ContentRange"]


def absent():
    """A user without the right to list a bucket does not learn which keys exist."""
    b = bucket()
    s3.put_object(Bucket=b, Key="k", Body=b"x")
    objects = {"Effect": "Allow", "Action": ["s3:*Object*"], "Resource": f"arn:aws:s3:::{b}/*"}
    lists = {"Effect": "Allow", "Action": "s3:ListBucket", "Resource": f"arn:aws:s3:::{b}"}
    for rights, may in (((objects,), False), ((objects, lists), True)):
        eve, _ = user(*rights)
        code, head = (("NoSuchKey", 404), ("404", 404)) if may else (("AccessDenied", 403), ("403", 403))
        missing = {"Bucket": b, "Key": "none"}
        assert eve.get_object(Bucket=b, Key="k")["Body"].read() == b"x"
        refused(*code, eve.get_object, **missing)
        refused(*code, eve.get_object, **missing, Range="bytes=0-1,3-4")
        refused(*head, eve.head_object, **missing)
        refused(*code, eve.get_object_tagging, **missing)
        refused(*code, eve.get_object_acl, **missing)
        refused(*code, eve.get_object_attributes, **missing, ObjectAttributes=["ETag"])
        refused(*code, eve.copy_object, Bucket=b, Key="l", CopySource=missing)
        refused(*code, eve.put_object, **missing, Body=b"", IfMatch='"0"')
        eve.delete_object(**missing)
    # Neither does an anonymous client.
    anyone = {"Effect": "Allow", "Principal": "*", "Action": "s3:GetObject", "Resource": f"arn:aws:s3:::{b}/*"}
    s3.put_bucket_policy(Bucket=b, Policy=policy(anyone))
    nobody = client(signature_version=botocore.UNSIGNED)
    nobody.get_object(Bucket=b, Key="k")
    refused("AccessDenied", 403, nobody.get_object, Bucket=b, Key="none")


def ownership():
    """A bucket belongs to its creator, who may use it unless a policy denies it."""
    makes = {"Effect": "Allow", "Action": "s3:CreateBucket", "Resource": "*"}
    (eve, name), (bob, _), b = user(makes), user(makes), f"o-{uuid.uuid4().hex[:12]}"
    eve.create_bucket(Bucket=b)
    refused("BucketAlreadyOwnedByYou", 409, eve.create_bucket, Bucket=b)
    for other in (bob, s3):
        refused("BucketAlreadyExists", 409, other.create_bucket, Bucket=b)
    eve.put_object(Bucket=b, Key="k", Body=b"x")
    assert eve.get_object(Bucket=b, Key="k")["Body"].read() == b"x"
    assert [entry["Key"] for entry in eve.list_objects_v2(Bucket=b)["Contents"]] == ["k"]
    refused("AccessDenied", 403, bob.get_object, Bucket=b, Key="k")
    refused("AccessDenied", 403, bob.delete_bucket, Bucket=b)
    upload = eve.create_multipart_upload(Bucket=b, Key="m")["UploadId"]
    eve.abort_multipart_upload(Bucket=b, Key="m", UploadId=upload)
    # The bucket's policy also applies to its owner.
    deny = {"Effect": "Deny", "Principal": {"AWS": name}, "Action": "s3:PutObject", "Resource": f"arn:aws:s3:::{b}/*"}
    eve.put_bucket_policy(Bucket=b, Policy=policy(deny))
    refused("AccessDenied", 403, eve.put_object, Bucket=b, Key="l", Body=b"x")
    eve.delete_bucket_policy(Bucket=b)
    # The directory keeps its owner, and a later user with the same name is a different user.
    other = f"{b}-renamed"
    os.rename(f"{MNT}/{b}", f"{MNT}/{other}")
    assert eve.get_object(Bucket=other, Key="k")["Body"].read() == b"x"
    forebay("user", "remove", os.environ["NODE"], name)
    forebay("user", "add", os.environ["NODE"], name)
    again = boto3.client("s3", endpoint_url=ENDPOINT, region_name="us-east-1", config=Config(retries={"max_attempts": 0}), **dict(zip(("aws_access_key_id", "aws_secret_access_key"), key(name))))
    refused("AccessDenied", 403, again.get_object, Bucket=other, Key="k")
    # A directory made on the mount belongs to the administrators.
    made = f"o-{uuid.uuid4().hex[:12]}"
    os.mkdir(f"{MNT}/{made}")
    refused("BucketAlreadyOwnedByYou", 409, s3.create_bucket, Bucket=made)
    refused("BucketAlreadyExists", 409, bob.create_bucket, Bucket=made)
    refused("AccessDenied", 403, bob.put_object, Bucket=made, Key="k", Body=b"")


def emptied():
    """A bucket without files is removed with its empty directories; a bucket with files is not."""
    b = bucket()
    os.makedirs(f"{MNT}/{b}/a/b/c")
    os.makedirs(f"{MNT}/{b}/d")
    os.symlink("x", f"{MNT}/{b}/a/b/link")
    refused("BucketNotEmpty", 409, s3.delete_bucket, Bucket=b)
    os.unlink(f"{MNT}/{b}/a/b/link")
    s3.put_object(Bucket=b, Key="d/e/", Body=b"")
    refused("BucketNotEmpty", 409, s3.delete_bucket, Bucket=b)
    assert os.path.isdir(f"{MNT}/{b}/a/b/c"), "nothing goes of a bucket that stays"
    s3.delete_object(Bucket=b, Key="d/e/")
    s3.delete_bucket(Bucket=b)
    assert not os.path.exists(f"{MNT}/{b}")
    refused("NoSuchBucket", 404, s3.delete_bucket, Bucket=b)


def probes():
    """Queries for unsupported features are answered as if they were not configured."""
    b = bucket()
    for call, code in (
        (s3.get_bucket_encryption, "ServerSideEncryptionConfigurationNotFoundError"),
        (s3.get_bucket_lifecycle_configuration, "NoSuchLifecycleConfiguration"),
        (s3.get_object_lock_configuration, "ObjectLockConfigurationNotFoundError"),
        (s3.get_bucket_website, "NoSuchWebsiteConfiguration"),
        (s3.get_bucket_replication, "ReplicationConfigurationNotFoundError"),
        (s3.get_public_access_block, "NoSuchPublicAccessBlockConfiguration"),
        (s3.get_bucket_policy_status, "NoSuchBucketPolicy"),
    ):
        refused(code, 404, call, Bucket=b)
        refused("NoSuchBucket", 404, call, Bucket="no-such-bucket")
    own = lambda answer: {name: value for name, value in answer.items() if name != "ResponseMetadata"}
    for call in (s3.get_bucket_notification_configuration, s3.get_bucket_logging, s3.get_bucket_accelerate_configuration):
        assert own(call(Bucket=b)) == {}, call
    assert s3.get_bucket_request_payment(Bucket=b)["Payer"] == "BucketOwner"
    assert s3.get_bucket_ownership_controls(Bucket=b)["OwnershipControls"]["Rules"] == [{"ObjectOwnership": "BucketOwnerEnforced"}]
    eve, _ = user({"Effect": "Allow", "Action": "s3:GetObject", "Resource": "*"})
    refused("AccessDenied", 403, eve.get_bucket_encryption, Bucket=b)
    anyone = {"Effect": "Allow", "Principal": "*", "Action": "s3:GetObject", "Resource": f"arn:aws:s3:::{b}/*"}
    for condition, public in ({}, True), ({"Condition": {"IpAddress": {"aws:SourceIp": "10.0.0.0/8"}}}, False):
        s3.put_bucket_policy(Bucket=b, Policy=policy({**anyone, **condition}))
        assert s3.get_bucket_policy_status(Bucket=b)["PolicyStatus"]["IsPublic"] is public
    # Requests that configure them are refused.
    refused("NotImplemented", 501, s3.put_bucket_request_payment, Bucket=b, RequestPaymentConfiguration={"Payer": "Requester"})
    expect(exchange(signed("PUT", f"/{b}?encryption=", {"Content-Length": "0"})), 501, "NotImplemented")


def versions():
    b = bucket()
    order = ["a", "b/1", "b/2", "c", "d/x"]
    for name in order:
        s3.put_object(Bucket=b, Key=name, Body=name.encode())
    listed = s3.list_object_versions(Bucket=b)
    assert [(entry["Key"], entry["VersionId"], entry["IsLatest"], entry["Size"]) for entry in listed["Versions"]] == [(name, "null", True, len(name)) for name in order]
    assert "DeleteMarkers" not in listed
    for size in (1, 2, 3):
        pages = s3.get_paginator("list_object_versions").paginate(Bucket=b, PaginationConfig={"PageSize": size})
        assert [entry["Key"] for page in pages for entry in page.get("Versions", [])] == order, size
    page = s3.list_object_versions(Bucket=b, Delimiter="/", Prefix="b")
    assert [entry["Prefix"] for entry in page["CommonPrefixes"]] == ["b/"] and "Versions" not in page
    page = s3.list_object_versions(Bucket=b, Delimiter="/", MaxKeys=2)
    assert page["NextKeyMarker"] == "b/" and page["IsTruncated"], page
    refused("InvalidArgument", 400, s3.list_object_versions, Bucket=b, VersionIdMarker="null")
    gone = [{"Key": entry["Key"], "VersionId": entry["VersionId"]} for entry in listed["Versions"]]
    assert "Errors" not in s3.delete_objects(Bucket=b, Delete={"Objects": gone})
    assert keys(b) == []


def health():
    names = [f"/minio/health/{name}" for name in ("live", "ready", "cluster", "cluster/read")]
    for name in (*names, "/live", "/ready"):
        assert urllib.request.urlopen(ENDPOINT + name).status == 200
        head = f"HEAD {name} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n"
        expect(exchange(head.encode(), until_close=True), 200)
    answer = exchange(signed("GET", "/minio/admin/v3/info"))
    assert status(answer) == (501, "NotImplemented") and "not MinIO" in answer, answer
    expect(exchange(f"GET /minio/health/other HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()), 403)
    # A bucket may have such a name: who signs reaches it.
    s3.create_bucket(Bucket="ready")
    assert s3.list_objects_v2(Bucket="ready")["KeyCount"] == 0
    s3.delete_bucket(Bucket="ready")


def canned():
    """public-read of a bucket lets every client list it, and no more, as on AWS."""
    nobody, name = client(signature_version=botocore.UNSIGNED), f"p-{uuid.uuid4().hex[:12]}"
    s3.create_bucket(Bucket=name, ACL="public-read")
    s3.put_object(Bucket=name, Key="k", Body=b"x")
    assert [entry["Key"] for entry in nobody.list_objects_v2(Bucket=name)["Contents"]] == ["k"]
    refused("AccessDenied", 403, nobody.get_object, Bucket=name, Key="k")
    acl = {part: value for part, value in s3.get_bucket_acl(Bucket=name).items() if part in ("Grants", "Owner")}
    assert [grant["Permission"] for grant in acl["Grants"]] == ["FULL_CONTROL", "READ"], acl
    anyone = {"Effect": "Allow", "Principal": "*", "Action": "s3:GetObject", "Resource": f"arn:aws:s3:::{name}/*"}
    s3.put_bucket_acl(Bucket=name, ACL="private")
    refused("NoSuchBucketPolicy", 404, s3.get_bucket_policy, Bucket=name)
    refused("AccessDenied", 403, nobody.list_objects_v2, Bucket=name)
    s3.put_bucket_policy(Bucket=name, Policy=policy(anyone))
    s3.put_bucket_acl(Bucket=name, AccessControlPolicy=acl)
    nobody.list_objects_v2(Bucket=name), nobody.get_object(Bucket=name, Key="k")
    s3.put_bucket_acl(Bucket=name, ACL="private")
    nobody.get_object(Bucket=name, Key="k")
    refused("AccessDenied", 403, nobody.list_objects_v2, Bucket=name)
    for other in ("public-read-write", "authenticated-read"):
        refused("AccessControlListNotSupported", 400, s3.put_bucket_acl, Bucket=name, ACL=other)


def form_answers():
    """The answer to a form has the location and the ETag of the object; invalid forms get clear errors."""
    b, etag = bucket(), f'"{hashlib.md5(b"hello").hexdigest()}"'
    form = s3.generate_presigned_post(b, "dir/a b", Conditions=[["starts-with", "$success_action_status", ""]])
    for wanted in (200, 201, 204):
        form["fields"]["success_action_status"] = str(wanted)
        got, _, headers = post(form)
        assert got == wanted and headers["ETag"] == etag, (got, headers)
        assert headers["Location"] == f"{ENDPOINT}/{b}/dir/a%20b", headers
    sum_field = {"x-amz-checksum-crc32": base64.b64encode(zlib.crc32(b"hello").to_bytes(4, "big")).decode()}
    headers = post(s3.generate_presigned_post(b, "k", Fields=sum_field, Conditions=[sum_field]))[2]
    assert headers["x-amz-checksum-crc32"] == sum_field["x-amz-checksum-crc32"], headers
    form = s3.generate_presigned_post(b, "k")
    signature = [name for name in form["fields"] if name.lower().endswith("signature")]
    assert post(form, leave_out=signature)[:2] == (400, "InvalidArgument")
    assert post(form, leave_out=[name for name in form["fields"] if name != "key"])[:2] == (403, "AccessDenied"), "only a key: nobody"
    day = time.strftime("%Y-%m-%d", time.gmtime(time.time() + 86400))
    for expiration, status in ((f"{day}T00:00:00Z", 204), (f"{day}T00:00:00.000Z", 204), (f"{day} 00:00:00+00:00", 400), (f"{day} 00:00:00Z", 400), (day, 400)):
        form = s3.generate_presigned_post(b, "k")
        text = base64.b64decode(form["fields"]["policy"]).decode()
        text = json.dumps({**json.loads(text), "expiration": expiration})
        got = post(resigned(form, text))
        assert got[0] == status, (expiration, got[:2])
        assert status == 204 or got[1] == "InvalidPolicyDocument", (expiration, got[:2])


def resigned(form, text):
    """The form with another policy."""
    fields = dict(form["fields"], policy=base64.b64encode(text.encode()).decode())
    digest = lambda secret, text: hmac.new(secret, text.encode(), hashlib.sha256)
    if "x-amz-signature" in fields:
        secret = f"AWS4{KEYS.secret_key}".encode()
        for part in fields["x-amz-credential"].split("/")[1:]:
            secret = digest(secret, part).digest()
        fields["x-amz-signature"] = digest(secret, fields["policy"]).hexdigest()
    else:
        fields["signature"] = base64.b64encode(hmac.new(KEYS.secret_key.encode(), fields["policy"].encode(), hashlib.sha1).digest()).decode()
    return {"url": form["url"], "fields": fields}


def regions():
    """A region that cannot be verified is answered with the right one, as s3cmd needs it; others are taken."""
    b = bucket()
    for region in ("US", "EU", "us_east"):
        for method, payload in (("GET", b""), ("PUT", data(100_000))):
            sizes = {"Content-Length": str(len(payload))}
            answer = exchange(signed(method, f"/{b}/k", sizes, payload, region=region) + payload)
            assert status(answer) == (400, "AuthorizationHeaderMalformed"), answer
            assert "<Region>us-east-1</Region>" in answer and "x-amz-bucket-region: us-east-1" in answer.lower(), answer
    for region in ("us-east-1", "eu-west-3", "garage"):
        expect(exchange(signed("GET", f"/{b}?location=", region=region)), 200)
    odd = boto3.client("s3", endpoint_url=ENDPOINT, region_name="US", config=Config(signature_version="s3v4", s3={"addressing_style": "path"}))
    try:
        urllib.request.urlopen(odd.generate_presigned_url("get_object", Params={"Bucket": b, "Key": "k"}))
        raise AssertionError("must be refused")
    except urllib.error.HTTPError as error:
        assert error.code == 400 and b"<Code>AuthorizationQueryParametersError</Code>" in error.read()


def attributes():
    """Attributes of objects and their parts."""
    b = bucket()
    s3.put_object(Bucket=b, Key="k", Body=b"x", Tagging="a=1&b=2")
    answer = exchange(signed("GET", f"/{b}/k?attributes=", {"x-amz-object-attributes": "ETag,ObjectSize"}))
    assert f"<ETag>{hashlib.md5(b'x').hexdigest()}</ETag>" in answer, answer
    for call in (s3.head_object, s3.get_object):
        assert call(Bucket=b, Key="k")["ResponseMetadata"]["HTTPHeaders"]["x-amz-tagging-count"] == "2", call
    # Part 1 of an object that was put in one piece is all of it: clients take the size from its range.
    s3.put_object(Bucket=b, Key="empty", Body=b"")
    for call in (s3.head_object, s3.get_object):
        told = call(Bucket=b, Key="k", PartNumber=1)
        assert (told["ResponseMetadata"]["HTTPStatusCode"], told.get("ContentRange"), told["ContentLength"]) == (206, "bytes 0-0/1", 1), told
        assert "PartsCount" not in told
        told = call(Bucket=b, Key="empty", PartNumber=1)
        assert (told["ResponseMetadata"]["HTTPStatusCode"], told["ContentLength"]) == (200, 0) and "ContentRange" not in told, told
    parts = [data(5 * MIB, 1), data(1000, 2)]
    for algorithm in (None, "CRC32", "SHA256"):
        kind = {"ChecksumAlgorithm": algorithm} if algorithm else {}
        plain = client(request_checksum_calculation="when_required")
        upload = plain.create_multipart_upload(Bucket=b, Key="m", **kind)["UploadId"]
        same, named = {"Bucket": b, "Key": "m", "UploadId": upload}, []
        for number, part in enumerate(parts, 1):
            answer = plain.upload_part(**same, PartNumber=number, Body=part, **kind)
            named.append({"PartNumber": number, "ETag": answer["ETag"], **{name: value for name, value in answer.items() if name == f"Checksum{algorithm}"}})
        done = plain.complete_multipart_upload(**same, MultipartUpload={"Parts": named})
        got = s3.get_object_attributes(Bucket=b, Key="m", ObjectAttributes=["ETag", "ObjectParts", "Checksum"])
        if algorithm:
            # Only this answer has no number of parts behind the checksum.
            told = got["Checksum"][f"Checksum{algorithm}"]
            assert got["Checksum"]["ChecksumType"] == "COMPOSITE" and done[f"Checksum{algorithm}"] == f"{told}-2", got
        assert [part["Size"] for part in got["ObjectParts"]["Parts"]] == [5 * MIB, 1000], got
        assert got["ETag"].endswith("-2"), got
        for number, part in enumerate(named, 1):
            for call in (s3.get_object, s3.head_object):
                told = call(Bucket=b, Key="m", PartNumber=number, ChecksumMode="ENABLED")
                assert told.get(f"Checksum{algorithm}") == part.get(f"Checksum{algorithm}"), (algorithm, told)
                assert told["ContentLength"] == len(parts[number - 1])


def small_things():
    b = bucket()
    # The date of a signature may be in the header Date alone, in the format of mail or of version 4.
    now = time.gmtime()
    stamp, day = time.strftime("%Y%m%dT%H%M%SZ", now), time.strftime("%Y%m%d", now)
    for date in (time.strftime("%a, %d %b %Y %H:%M:%S GMT", now), stamp):
        empty = hashlib.sha256(b"").hexdigest()
        canonical = f"GET\n/{b}\n\ndate:{date}\nhost:{HOST}\nx-amz-content-sha256:{empty}\n\ndate;host;x-amz-content-sha256\n{empty}"
        scope = f"{day}/us-east-1/s3/aws4_request"
        text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
        secret = f"AWS4{KEYS.secret_key}".encode()
        for part in (*scope.split("/"), text):
            secret = hmac.new(secret, part.encode(), hashlib.sha256).digest()
        head = f"GET /{b} HTTP/1.1\r\nHost: {HOST}\r\nDate: {date}\r\nx-amz-content-sha256: {empty}\r\n"
        head += f"Authorization: AWS4-HMAC-SHA256 Credential={KEYS.access_key}/{scope}, SignedHeaders=date;host;x-amz-content-sha256, Signature={secret.hex()}\r\n\r\n"
        expect(exchange(head.encode()), 200)
    for call in (s3.list_objects, s3.list_objects_v2, s3.list_object_versions, s3.list_multipart_uploads):
        assert "Delimiter" not in call(Bucket=b, Delimiter=""), call
        assert call(Bucket=b, Delimiter="/")["Delimiter"] == "/", call
    # A condition on an object that does not exist.
    for etag in ('"0123"', "*"):
        refused("NoSuchKey", 404, s3.delete_object, Bucket=b, Key="none", IfMatch=etag)
    s3.delete_object(Bucket=b, Key="none")
    rule = {"AllowedMethods": ["PUT"], "AllowedOrigins": ["*"], "AllowedHeaders": ["X-Amz-Meta-*", "Content-Type"]}
    def preflight(**headers):
        lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        return exchange(f"OPTIONS /{b}/k HTTP/1.1\r\nHost: {HOST}\r\n{lines}\r\n".encode())
    put = {"Origin": "http://a", "Access_Control_Request_Method": "PUT"}
    assert status(preflight(**put)) == (403, "AccessForbidden")
    s3.put_bucket_cors(Bucket=b, CORSConfiguration={"CORSRules": [rule]})
    assert s3.get_bucket_cors(Bucket=b)["CORSRules"] == [rule], "letter case is kept"
    expect(preflight(**put, Access_Control_Request_Headers="x-amz-META-a, content-TYPE"), 200)
    assert status(preflight(**put, Access_Control_Request_Headers="x-other")) == (403, "AccessForbidden")
    assert status(preflight(**{**put, "Access_Control_Request_Method": "GET"})) == (403, "AccessForbidden")
    assert status(preflight(Origin="http://a")) == (400, "BadRequest")
    assert status(preflight(Access_Control_Request_Method="PUT")) == (400, "BadRequest")


def tag_policies():
    """Policies may test tags, headers of copies and ACLs, and the Referer."""
    b = bucket()
    on = lambda *actions, effect="Allow", **condition: {"Effect": effect, "Action": list(actions), "Resource": f"arn:aws:s3:::{b}/*", **({"Condition": condition} if condition else {})}
    s3.put_object(Bucket=b, Key="open", Body=b"x", Tagging="class=open")
    s3.put_object(Bucket=b, Key="shut", Body=b"x", Tagging="class=shut")
    s3.put_object(Bucket=b, Key="plain", Body=b"x")
    eve, _ = user(
        on("s3:GetObject", "s3:GetObjectTagging", "s3:PutObjectTagging", StringEquals={"s3:ExistingObjectTag/class": "open"}),
        on("s3:PutObject"),
    )
    assert eve.get_object(Bucket=b, Key="open")["Body"].read() == b"x"
    eve.get_object_tagging(Bucket=b, Key="open")
    for name in ("shut", "plain"):
        for call in (eve.get_object, eve.get_object_tagging):
            refused("AccessDenied", 403, call, Bucket=b, Key=name)
        refused("AccessDenied", 403, eve.put_object_tagging, Bucket=b, Key=name, Tagging={"TagSet": [{"Key": "class", "Value": "open"}]})
        refused("AccessDenied", 403, eve.copy_object, Bucket=b, Key="copy", CopySource={"Bucket": b, "Key": name})
    # Tags of a request are tested in every form: in a header, a document, a form field.
    only = {"ForAllValues:StringEquals": {"s3:RequestObjectTagKeys": ["a", "b"]}}
    bob, name = user(on("s3:PutObject", "s3:PutObjectTagging", **only), on("s3:*", effect="Deny", StringEquals={"s3:RequestObjectTag/a": "bad"}))
    bob.put_object(Bucket=b, Key="k", Body=b"", Tagging="a=1&b=2")
    bob.put_object(Bucket=b, Key="k", Body=b"")
    set_tags = lambda **tags: {"Bucket": b, "Key": "k", "Tagging": {"TagSet": [{"Key": name, "Value": value} for name, value in tags.items()]}}
    bob.put_object_tagging(**set_tags(a="1"))
    for tagging in ("c=1", "a=1&c=1", "a=bad"):
        refused("AccessDenied", 403, bob.put_object, Bucket=b, Key="k", Body=b"", Tagging=tagging)
        refused("AccessDenied", 403, bob.create_multipart_upload, Bucket=b, Key="k", Tagging=tagging)
    for tags in ({"c": "1"}, {"a": "bad"}):
        refused("AccessDenied", 403, bob.put_object_tagging, **set_tags(**tags))
        document = "".join(f"<Tag><Key>{key}</Key><Value>{value}</Value></Tag>" for key, value in tags.items())
        field = {"tagging": f"<Tagging><TagSet>{document}</TagSet></Tagging>"}
        assert post(bob.generate_presigned_post(b, "k", Fields=field, Conditions=[field]))[:2] == (403, "AccessDenied"), tags
    assert s3.get_object_tagging(Bucket=b, Key="k")["TagSet"] == [{"Key": "a", "Value": "1"}]
    eve, _ = user(
        on("s3:GetObject"),
        on("s3:PutObject", StringEquals={"s3:x-amz-copy-source": f"{b}/open", "s3:x-amz-metadata-directive": "REPLACE"}),
    )
    copy = {"Bucket": b, "Key": "copy", "TaggingDirective": "REPLACE"}
    may = lambda **more: {**copy, "CopySource": {"Bucket": b, "Key": "open"}, "MetadataDirective": "REPLACE", **more}
    refused("AccessDenied", 403, eve.copy_object, **may(CopySource={"Bucket": b, "Key": "shut"}))
    refused("AccessDenied", 403, eve.copy_object, **may(MetadataDirective="COPY"))
    refused("AccessDenied", 403, eve.put_object, Bucket=b, Key="copy", Body=b"")
    del copy["TaggingDirective"]
    # Tags of the source need separate rights.
    refused("AccessDenied", 403, eve.copy_object, **may())
    s3.delete_object_tagging(Bucket=b, Key="open")
    eve.copy_object(**may())
    anyone = {"Effect": "Allow", "Principal": "*", "Action": "s3:GetObject", "Resource": f"arn:aws:s3:::{b}/*"}
    s3.put_bucket_policy(Bucket=b, Policy=policy({**anyone, "Condition": {"StringLike": {"aws:Referer": "http://example.com/*"}}}))
    for referer, code in (("http://example.com/a", 200), ("http://example.org/", 403), (None, 403)):
        line = f"Referer: {referer}\r\n" if referer else ""
        expect(exchange(f"GET /{b}/open HTTP/1.1\r\nHost: {HOST}\r\n{line}\r\n".encode()), code)


def post(form, content=b"hello", leave_out=()):
    """Posts a form; returns status, code and headers."""
    fields = {name: value for name, value in form["fields"].items() if name not in leave_out}
    text = "".join(f'--B7\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n' for name, value in fields.items())
    text += '--B7\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
    raw = text.encode() + content + b"\r\n--B7--\r\n"
    request = urllib.request.Request(form["url"], data=raw, headers={"Content-Type": "multipart/form-data; boundary=B7"}, method="POST")
    try:
        answer = urllib.request.urlopen(request)
    except urllib.error.HTTPError as error:
        answer = error
    return answer.status, answer.read().decode().partition("<Code>")[2].partition("</Code>")[0], answer.headers


if __name__ == "__main__":
    for group in sys.argv[1:]:
        globals()[group]()
