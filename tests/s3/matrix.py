"""Calls of boto3 with assertions; objects are also checked through the mount.

matrix.py GROUP…   ENDPOINT, MNT and AWS credentials come from the environment.
"""

import base64
import concurrent.futures
import hashlib
import io
import json
import os
import socket
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
import zlib

import boto3
import botocore.handlers
from botocore import UNSIGNED
from botocore.auth import S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.client import Config
from botocore.exceptions import ClientError

ENDPOINT, MNT = os.environ["ENDPOINT"], os.environ["MNT"]
MIB = 1 << 20


def client(**settings):
    settings.setdefault("s3", {"addressing_style": "path"})
    settings.setdefault("retries", {"max_attempts": 0})
    return boto3.client("s3", endpoint_url=ENDPOINT, region_name="us-east-1", config=Config(**settings))


s3 = client()


def bucket():
    name = f"t-{uuid.uuid4().hex[:12]}"
    s3.create_bucket(Bucket=name)
    return name


def refused(code, status, call, **arguments):
    try:
        call(**arguments)
    except ClientError as error:
        got = error.response["Error"]["Code"], error.response["ResponseMetadata"]["HTTPStatusCode"]
        assert got == (code, status), f"expected {code} {status}, got {got}: {error}"
        return error
    raise AssertionError(f"must be refused with {code}")


def body(b, key, **arguments):
    return s3.get_object(Bucket=b, Key=key, **arguments)["Body"].read()


def with_headers(call, headers, **arguments):
    """A call with headers that boto3 has no parameters for."""
    operation = call.__name__.title().replace("_", "")
    add = lambda request, **_: [request.headers.add_header(*pair) for pair in headers.items()]
    s3.meta.events.register(f"before-sign.s3.{operation}", add)
    try:
        return call(**arguments)
    finally:
        s3.meta.events.unregister(f"before-sign.s3.{operation}", add)


def on_mount(b, key):
    with open(os.path.join(MNT, b, key), "rb") as file:
        return file.read()


def keys(b, **arguments):
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=b, **arguments)
    return [entry["Key"] for page in pages for entry in page.get("Contents", [])]


def data(size, seed=1):
    block = hashlib.sha256(str(seed).encode()).digest() * 2048
    return (block * (size // len(block) + 1))[:size]


def objects():
    b = bucket()
    for size in (0, 1, 100, 8192, 8193, 65536, 65537, MIB, 5 * MIB + 3):
        sent = data(size, size)
        md5 = hashlib.md5(sent).hexdigest()
        put = s3.put_object(Bucket=b, Key=f"a/b/{size}", Body=sent)
        assert put["ETag"] == f'"{md5}"', put
        assert body(b, f"a/b/{size}") == sent
        assert on_mount(b, f"a/b/{size}") == sent
        head = s3.head_object(Bucket=b, Key=f"a/b/{size}")
        assert head["ContentLength"] == size and head["ETag"] == f'"{md5}"', head
        assert head["ContentType"] == "binary/octet-stream" and head["AcceptRanges"] == "bytes"
    for size in (0, 100, MIB):
        s3.delete_object(Bucket=b, Key=f"a/b/{size}")
        refused("404", 404, s3.head_object, Bucket=b, Key=f"a/b/{size}")
        refused("NoSuchKey", 404, s3.get_object, Bucket=b, Key=f"a/b/{size}")
        assert not os.path.exists(f"{MNT}/{b}/a/b/{size}")
    for turn in range(3):
        s3.put_object(Bucket=b, Key="empty", Body=b"")
    s3.delete_object(Bucket=b, Key="empty")
    s3.delete_object(Bucket=b, Key="never/was")
    s3.delete_object(Bucket=b, Key="a/b/1/below/a/file")
    assert body(b, "a/b/1") == data(1, 1)
    s3.put_object(Bucket=b, Key="a/b/1", Body=b"other")
    assert body(b, "a/b/1") == b"other" == on_mount(b, "a/b/1")
    answer = s3.delete_objects(Bucket=b, Delete={"Objects": [{"Key": key} for key in keys(b)] + [{"Key": "none"}]})
    assert len(answer["Deleted"]) == 7 and "Errors" not in answer, answer
    assert keys(b) == [] and os.listdir(f"{MNT}/{b}") == []
    s3.delete_bucket(Bucket=b)
    refused("404", 404, s3.head_bucket, Bucket=b)


def names():
    b = bucket()
    good = ["a b", "größe/数", "a+b&c=d?e#f%20", "x" * 255, "/".join(["d" * 200] * 5), "~!@$^*()_-|\\;:'\",.<>[]{}`", "..a", "a..b/..."]
    for key in good:
        s3.put_object(Bucket=b, Key=key, Body=key.encode())
        assert body(b, key) == key.encode() == on_mount(b, key)
    assert keys(b) == sorted(good, key=str.encode)
    for key, code in (("a//b", "InvalidArgument"), ("x" * 256, "KeyTooLongError"), ("y/" * 513, "KeyTooLongError"), ("a/../b", "InvalidArgument"), ("./a", "InvalidArgument")):
        try:
            s3.put_object(Bucket=b, Key=key, Body=b"")
            raise AssertionError(key)
        except ClientError as error:
            assert error.response["Error"]["Code"] == code, (key, error)
    # A file cannot also be a directory.
    s3.put_object(Bucket=b, Key="file", Body=b"f")
    refused("ObjectParentIsFile", 409, s3.put_object, Bucket=b, Key="file/below", Body=b"x")
    s3.put_object(Bucket=b, Key="dir/below", Body=b"x")
    refused("ExistingObjectIsDirectory", 409, s3.put_object, Bucket=b, Key="dir", Body=b"x")
    refused("NoSuchKey", 404, s3.get_object, Bucket=b, Key="dir")
    # XML parsers would turn these into line feeds.
    odd = "odd/a\rb\r\nc"
    assert s3.create_multipart_upload(Bucket=b, Key=odd)["Key"] == odd
    assert [entry["Key"] for entry in s3.list_multipart_uploads(Bucket=b)["Uploads"]] == [odd]
    s3.put_object(Bucket=b, Key=odd, Body=b"x")
    assert keys(b, Prefix="odd/") == [odd]
    assert s3.delete_objects(Bucket=b, Delete={"Objects": [{"Key": odd}]})["Deleted"] == [{"Key": odd}]


def directories():
    b = bucket()
    s3.put_object(Bucket=b, Key="d/", Body=b"", Metadata={"who": "hadoop"})
    assert os.path.isdir(f"{MNT}/{b}/d")
    assert s3.head_object(Bucket=b, Key="d/")["Metadata"] == {"who": "hadoop"}
    s3.put_object(Bucket=b, Key="d/x", Body=b"1")
    assert keys(b) == ["d/", "d/x"]
    s3.delete_object(Bucket=b, Key="d/x")
    assert keys(b) == ["d/"], "a directory object outlives what is in it"
    s3.delete_object(Bucket=b, Key="d/")
    assert keys(b) == [] and not os.path.exists(f"{MNT}/{b}/d")
    s3.put_object(Bucket=b, Key="i/j/k", Body=b"1")
    s3.delete_object(Bucket=b, Key="i/j/k")
    assert os.listdir(f"{MNT}/{b}") == [], "implicit parents go with the last object"
    os.makedirs(f"{MNT}/{b}/posix/empty")
    s3.put_object(Bucket=b, Key="posix/empty/x", Body=b"1")
    s3.delete_object(Bucket=b, Key="posix/empty/x")
    assert os.path.isdir(f"{MNT}/{b}/posix/empty"), "a directory made by mkdir stays"
    refused("NoSuchKey", 404, s3.get_object, Bucket=b, Key="posix/")


def metadata():
    b = bucket()
    s3.put_object(Bucket=b, Key="k", Body=b"x", ContentType="text/plain", CacheControl="max-age=1", ContentDisposition="inline", ContentEncoding="gzip", ContentLanguage="de", Expires="2030-01-01T00:00:00Z", Metadata={"one": "1", "two": "zwei"})
    for answer in (s3.head_object(Bucket=b, Key="k"), s3.get_object(Bucket=b, Key="k")):
        assert answer["ContentType"] == "text/plain" and answer["CacheControl"] == "max-age=1"
        assert answer["ContentDisposition"] == "inline" and answer["ContentEncoding"] == "gzip"
        assert answer["ContentLanguage"] == "de" and answer["Metadata"] == {"one": "1", "two": "zwei"}
        assert answer["ExpiresString"] == "Tue, 01 Jan 2030 00:00:00 GMT", answer["ExpiresString"]
    answer = s3.get_object(Bucket=b, Key="k", ResponseContentType="a/b", ResponseContentDisposition="attachment")
    assert answer["ContentType"] == "a/b" and answer["ContentDisposition"] == "attachment"
    refused("MetadataTooLarge", 400, s3.put_object, Bucket=b, Key="m", Body=b"", Metadata={"a": "x" * 2048})
    refused("AccessControlListNotSupported", 400, s3.put_object, Bucket=b, Key="m", Body=b"", ACL="public-read")
    refused("NotImplemented", 501, s3.put_object, Bucket=b, Key="m", Body=b"", ServerSideEncryption="AES256")
    refused("InvalidStorageClass", 400, s3.put_object, Bucket=b, Key="m", Body=b"", StorageClass="GLACIER")
    for get, put, of in ((s3.get_object_acl, s3.put_object_acl, {"Bucket": b, "Key": "k"}), (s3.get_bucket_acl, s3.put_bucket_acl, {"Bucket": b})):
        acl = {name: value for name, value in get(**of).items() if name in ("Grants", "Owner")}
        assert [grant["Permission"] for grant in acl["Grants"]] == ["FULL_CONTROL"]
        put(**of, AccessControlPolicy=acl)
        public = {"Grantee": {"Type": "Group", "URI": "http://acs.amazonaws.com/groups/global/AllUsers"}, "Permission": "READ"}
        if put == s3.put_object_acl:
            refused("AccessControlListNotSupported", 400, put, **of, AccessControlPolicy={**acl, "Grants": [*acl["Grants"], public]})
        public["Permission"] = "WRITE"
        refused("AccessControlListNotSupported", 400, put, **of, AccessControlPolicy={**acl, "Grants": [*acl["Grants"], public]})


def tagging():
    b = bucket()
    s3.put_object(Bucket=b, Key="k", Body=b"x", Tagging="a=1&b=x%20y")
    tags = [{"Key": "a", "Value": "1"}, {"Key": "b", "Value": "x y"}]
    assert s3.get_object_tagging(Bucket=b, Key="k")["TagSet"] == tags
    assert s3.get_object(Bucket=b, Key="k")["TagCount"] == 2
    s3.put_object_tagging(Bucket=b, Key="k", Tagging={"TagSet": tags[:1]})
    assert s3.get_object_tagging(Bucket=b, Key="k")["TagSet"] == tags[:1]
    s3.delete_object_tagging(Bucket=b, Key="k")
    assert s3.get_object_tagging(Bucket=b, Key="k")["TagSet"] == []
    refused("InvalidTag", 400, s3.put_object_tagging, Bucket=b, Key="k", Tagging={"TagSet": tags[:1] * 2})
    refused("NoSuchTagSet", 404, s3.get_bucket_tagging, Bucket=b)
    s3.put_bucket_tagging(Bucket=b, Tagging={"TagSet": tags})
    assert s3.get_bucket_tagging(Bucket=b)["TagSet"] == tags
    s3.delete_bucket_tagging(Bucket=b)
    refused("NoSuchTagSet", 404, s3.get_bucket_tagging, Bucket=b)


def ranges():
    b, sent = bucket(), data(3 * MIB + 17)
    s3.put_object(Bucket=b, Key="k", Body=sent)
    for text, want in (("0-0", sent[:1]), ("5-9", sent[5:10]), ("100-", sent[100:]), ("-7", sent[-7:]), (f"{MIB - 1}-{2 * MIB}", sent[MIB - 1 : 2 * MIB + 1]), ("10-99999999", sent[10:])):
        answer = s3.get_object(Bucket=b, Key="k", Range=f"bytes={text}")
        assert answer["ResponseMetadata"]["HTTPStatusCode"] == 206 and answer["Body"].read() == want, text
        start = len(sent) - len(want) if text.startswith("-") else int(text.split("-")[0])
        assert answer["ContentRange"] == f"bytes {start}-{start + len(want) - 1}/{len(sent)}"
    for wanted in (f"bytes={len(sent)}-", f"bytes={len(sent)}-,{len(sent) + 9}-"):
        error = refused("InvalidRange", 416, s3.get_object, Bucket=b, Key="k", Range=wanted)
        assert error.response["ResponseMetadata"]["HTTPHeaders"]["content-range"] == f"bytes */{len(sent)}", wanted
    assert body(b, "k", Range="lines=1-2") == sent, "a header that is no range of bytes is ignored"
    assert body(b, "k", Range="bytes=0-,0-,0-") == sent, "no answer is longer than the object"
    answer = s3.get_object(Bucket=b, Key="k", Range="bytes=0-9, 1000-2000000, -5")
    kind = answer["ContentType"]
    assert answer["ResponseMetadata"]["HTTPStatusCode"] == 206 and kind.startswith("multipart/byteranges; boundary="), kind
    boundary = kind.split("=", 1)[1].encode()
    parts = answer["Body"].read().split(b"--" + boundary)
    assert parts[0] == b"" and parts[-1] == b"--\r\n" and len(parts) == 5
    got = [part.split(b"\r\n\r\n", 1) for part in parts[1:-1]]
    assert [one[1][:-2] for one in got] == [sent[:10], sent[1000:2000001], sent[-5:]]
    assert f"Content-Range: bytes 1000-2000000/{len(sent)}".encode() in got[1][0]
    # Ranges also work in presigned URLs of both versions, and the answers have the stored headers.
    s3.put_object(Bucket=b, Key="l", Body=b"0123456789", CacheControl="no-store", ContentDisposition="inline", ContentLanguage="de")
    for version in ("s3v4", "s3"):
        url = client(signature_version=version).generate_presigned_url("get_object", Params={"Bucket": b, "Key": "l"})
        answer = urllib.request.urlopen(urllib.request.Request(url, headers={"Range": "bytes=0-1,4-5"}))
        assert answer.status == 206 and answer.headers["Cache-Control"] == "no-store", (version, answer.headers)
        assert answer.headers["Content-Disposition"] == "inline" and answer.headers["Content-Language"] == "de"
    # Listings ignore ranges.
    assert with_headers(s3.list_objects_v2, {"Range": "bytes=0-1,4-5"}, Bucket=b)["KeyCount"] == 2
    head = s3.head_object(Bucket=b, Key="k", Range="bytes=5-9")
    assert head["ResponseMetadata"]["HTTPStatusCode"] == 206 and head["ContentLength"] == 5, head
    assert "ContentRange" not in s3.head_object(Bucket=b, Key="k")
    # If-Range: the range if the client has a part of this object, else the whole object.
    head = s3.head_object(Bucket=b, Key="k")
    date = head["ResponseMetadata"]["HTTPHeaders"]["last-modified"]
    for value, fits in ((head["ETag"], True), (date, True), ('"other"', False), ("Thu, 01 Jan 2004 00:00:00 GMT", False), ("W/" + head["ETag"], False)):
        for text, want in (("bytes=5-9", sent[5:10]), ("bytes=0-1,2-3", None)):
            answer = with_headers(s3.get_object, {"If-Range": value}, Bucket=b, Key="k", Range=text)
            assert answer["ResponseMetadata"]["HTTPStatusCode"] == (206 if fits else 200), (value, text)
            got = answer["Body"].read()
            assert got == (want if fits and want else got) and (fits or got == sent), (value, text)


def conditions():
    b = bucket()
    etag = s3.put_object(Bucket=b, Key="k", Body=b"1", IfNoneMatch="*")["ETag"]
    refused("PreconditionFailed", 412, s3.put_object, Bucket=b, Key="k", Body=b"2", IfNoneMatch="*")
    refused("PreconditionFailed", 412, s3.put_object, Bucket=b, Key="k", Body=b"2", IfMatch='"0123"')
    refused("NoSuchKey", 404, s3.put_object, Bucket=b, Key="none", Body=b"2", IfMatch='"0123"')
    assert body(b, "k") == b"1"
    new = s3.put_object(Bucket=b, Key="k", Body=b"2", IfMatch=etag)["ETag"]
    for call in (s3.get_object, s3.head_object):
        code = "PreconditionFailed" if call == s3.get_object else "412"
        refused(code, 412, call, Bucket=b, Key="k", IfMatch=etag)
        refused("304", 304, call, Bucket=b, Key="k", IfNoneMatch=new)
        refused("304", 304, call, Bucket=b, Key="k", IfModifiedSince="2037-01-01T00:00:00Z")
        refused(code, 412, call, Bucket=b, Key="k", IfUnmodifiedSince="2001-01-01T00:00:00Z")
        call(Bucket=b, Key="k", IfMatch=new, IfNoneMatch=etag, IfModifiedSince="2001-01-01T00:00:00Z")
    listed = f'"0123", {new}'
    s3.get_object(Bucket=b, Key="k", IfMatch=listed)
    refused("304", 304, s3.get_object, Bucket=b, Key="k", IfNoneMatch=listed)
    refused("PreconditionFailed", 412, s3.get_object, Bucket=b, Key="k", IfMatch=f'"0123",{etag}')
    new = s3.put_object(Bucket=b, Key="k", Body=b"3", IfMatch=listed)["ETag"]
    # Exactly one of many writers wins.
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        def race(number):
            try:
                s3.put_object(Bucket=b, Key="race", Body=str(number), IfNoneMatch="*")
                return number
            except ClientError as error:
                assert error.response["ResponseMetadata"]["HTTPStatusCode"] in (409, 412), error
        winners = [number for number in pool.map(race, range(16)) if number is not None]
    assert len(winners) == 1 and body(b, "race") == str(winners[0]).encode()
    refused("PreconditionFailed", 412, s3.delete_object, Bucket=b, Key="k", IfMatch=etag)
    s3.delete_object(Bucket=b, Key="k", IfMatch=new)
    refused("404", 404, s3.head_object, Bucket=b, Key="k")


def listing():
    b = bucket()
    all_keys = ["a", "a-b", "a.txt", "a0", "b/1", "b/2", "b/c/1", "b/c/2", "b-1", "b.1", "c/d/e/f", "z"]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: s3.put_object(Bucket=b, Key=key, Body=key), all_keys))
    order = sorted(all_keys)
    assert keys(b) == order
    for size in (1, 2, 5):
        assert keys(b, PaginationConfig={"PageSize": size}) == order, size
    assert keys(b, Prefix="b/") == ["b/1", "b/2", "b/c/1", "b/c/2"]
    assert keys(b, StartAfter="b.1") == [key for key in order if key > "b.1"]
    page = s3.list_objects_v2(Bucket=b, Delimiter="/")
    assert [entry["Prefix"] for entry in page["CommonPrefixes"]] == ["b/", "c/"]
    assert [entry["Key"] for entry in page["Contents"]] == [key for key in order if "/" not in key]
    assert page["KeyCount"] == 9, page["KeyCount"]
    page = s3.list_objects_v2(Bucket=b, Delimiter="/", Prefix="b/")
    assert [entry["Prefix"] for entry in page["CommonPrefixes"]] == ["b/c/"] and len(page["Contents"]) == 2
    page = s3.list_objects_v2(Bucket=b, Delimiter="-")
    assert [entry["Prefix"] for entry in page["CommonPrefixes"]] == ["a-", "b-"]
    for size in (1, 2, 3):
        found, marker = [], ""
        while True:
            page = s3.list_objects(Bucket=b, Delimiter="/", MaxKeys=size, Marker=marker)
            found += [entry["Key"] for entry in page.get("Contents", [])]
            found += [entry["Prefix"] for entry in page.get("CommonPrefixes", [])]
            if not page["IsTruncated"]:
                break
            marker = page["NextMarker"]
        assert sorted(found) == sorted({key.split("/")[0] + "/" if "/" in key else key for key in order}), found
    assert s3.list_objects_v2(Bucket=b, MaxKeys=0)["KeyCount"] == 0
    entry = s3.list_objects_v2(Bucket=b, Prefix="z", FetchOwner=True)["Contents"][0]
    assert entry["Size"] == 1 and entry["ETag"] == f'"{hashlib.md5(b"z").hexdigest()}"' and "Owner" in entry
    refused("InvalidArgument", 400, s3.list_objects_v2, Bucket=b, ContinuationToken="x")
    refused("NoSuchBucket", 404, s3.list_objects_v2, Bucket="no-such-bucket")
    os.makedirs(f"{MNT}/{b}/p/q")
    open(f"{MNT}/{b}/p/q/file", "w").close()
    open(os.fsencode(f"{MNT}/{b}/p/q/") + b"\xff\x01", "w").close()
    assert "p/q/file" in keys(b)
    page = s3.list_objects_v2(Bucket=b, Prefix="p/", EncodingType="url")
    assert [entry["Key"] for entry in page["Contents"]] == ["p/q/file", "p/q/%FF%01"], page["Contents"]
    # Names that are not UTF-8 cannot be markers: pages of version 1 end at other names.
    names = [b"a", b"zz", b"\xe4pfel", b"\xe4\xb8\xad1", b"\xe5\xad\x97", b"\xe9t\xe9", b"\xef\xbf\xbdz", b"\xf6l"]
    os.mkdir(f"{MNT}/{b}/v1")
    for name in names:
        open(os.fsencode(f"{MNT}/{b}/v1/") + name, "w").close()
    plain = client()
    plain.meta.events.unregister("before-parameter-build.s3.ListObjects", botocore.handlers.set_list_objects_encoding_type_url)
    def version_1(prefix, **arguments):
        found, page = [], {"IsTruncated": True, "NextMarker": ""}
        while page["IsTruncated"]:
            page = plain.list_objects(Bucket=b, Prefix=prefix, Marker=urllib.parse.unquote(page["NextMarker"]), **arguments)
            found += [urllib.parse.unquote_to_bytes(entry["Key"]).removeprefix(prefix.encode()) for entry in page.get("Contents", [])]
        return found
    for size in (1, 2, 3, 10):
        assert version_1("v1/", EncodingType="url", MaxKeys=size) == names, size
    for size in (1, 2, 10):
        texts = [name for name in names if name.decode(errors="replace").encode() == name]
        assert version_1("v1/", MaxKeys=size) == texts, size


def coherence():
    b = bucket()
    path = f"{MNT}/{b}/f"
    for turn in range(20):
        sent = f"turn {turn}".encode()
        s3.put_object(Bucket=b, Key="f", Body=sent)
        assert open(path, "rb").read() == sent and os.stat(path).st_size == len(sent)
        with open(path, "wb") as file:
            file.write(sent + b" posix")
            file.flush()
            os.fsync(file.fileno())
        answer = s3.get_object(Bucket=b, Key="f")
        assert answer["Body"].read() == sent + b" posix"
        assert "-" in answer["ETag"], "a file that POSIX wrote has no MD5"
        os.unlink(path)
        refused("404", 404, s3.head_object, Bucket=b, Key="f")
    os.mkdir(f"{MNT}/posix-bucket")
    assert "posix-bucket" in [entry["Name"] for entry in s3.list_buckets()["Buckets"]]
    s3.put_object(Bucket="posix-bucket", Key="a", Body=b"1")
    os.rename(f"{MNT}/posix-bucket", f"{MNT}/posix-bucket-2")
    refused("NoSuchBucket", 404, s3.get_object, Bucket="posix-bucket", Key="a")
    assert body("posix-bucket-2", "a") == b"1"
    os.rename(f"{MNT}/posix-bucket-2/a", f"{MNT}/posix-bucket-2/b")
    assert keys("posix-bucket-2") == ["b"]
    refused("BucketNotEmpty", 409, s3.delete_bucket, Bucket="posix-bucket-2")
    s3.delete_object(Bucket="posix-bucket-2", Key="b")
    s3.delete_bucket(Bucket="posix-bucket-2")
    assert not os.path.exists(f"{MNT}/posix-bucket-2")
    # A reader keeps the version that it opened.
    s3.put_object(Bucket=b, Key="big", Body=data(8 * MIB, 1))
    reading = s3.get_object(Bucket=b, Key="big")["Body"]
    first = reading.read(1000)
    s3.put_object(Bucket=b, Key="big", Body=data(8 * MIB, 2))
    assert first + reading.read() == data(8 * MIB, 1) and body(b, "big") == data(8 * MIB, 2)


def copies():
    b, other, sent = bucket(), bucket(), data(6 * MIB)
    etag = s3.put_object(Bucket=b, Key="a b/ß", Body=sent, Metadata={"m": "1"}, ContentType="t/t", Tagging="x=1")["ETag"]
    source = {"Bucket": b, "Key": "a b/ß"}
    answer = s3.copy_object(Bucket=other, Key="copy", CopySource=source)
    assert answer["CopyObjectResult"]["ETag"] == etag, answer
    assert body(other, "copy") == sent == on_mount(other, "copy")
    head = s3.head_object(Bucket=other, Key="copy")
    assert head["Metadata"] == {"m": "1"} and head["ContentType"] == "t/t"
    assert s3.get_object_tagging(Bucket=other, Key="copy")["TagSet"] == [{"Key": "x", "Value": "1"}]
    s3.copy_object(Bucket=b, Key="new", CopySource=source, MetadataDirective="REPLACE", Metadata={"n": "2"}, ContentType="u/u", TaggingDirective="REPLACE", Tagging="y=2")
    head = s3.head_object(Bucket=b, Key="new")
    assert head["Metadata"] == {"n": "2"} and head["ContentType"] == "u/u" and head["ETag"] == etag, head
    refused("InvalidRequest", 400, s3.copy_object, Bucket=b, Key="new", CopySource={"Bucket": b, "Key": "new"})
    s3.copy_object(Bucket=b, Key="new", CopySource={"Bucket": b, "Key": "new"}, MetadataDirective="REPLACE", Metadata={"o": "3"})
    head = s3.head_object(Bucket=b, Key="new")
    assert head["Metadata"] == {"o": "3"} and head["ETag"] == etag and body(b, "new") == sent
    refused("PreconditionFailed", 412, s3.copy_object, Bucket=b, Key="x", CopySource=source, CopySourceIfMatch='"0"')
    refused("PreconditionFailed", 412, s3.copy_object, Bucket=b, Key="x", CopySource=source, CopySourceIfNoneMatch=etag)
    for directive in ("MetadataDirective", "TaggingDirective"):
        refused("InvalidArgument", 400, s3.copy_object, Bucket=b, Key="x", CopySource=source, **{directive: "OTHER"})
    refused("NoSuchKey", 404, s3.copy_object, Bucket=b, Key="x", CopySource={"Bucket": b, "Key": "none"})
    refused("NoSuchBucket", 404, s3.copy_object, Bucket=b, Key="x", CopySource={"Bucket": "no-such-bucket", "Key": "k"})
    s3.put_object(Bucket=b, Key="a b/ß", Body=b"changed")
    assert body(other, "copy") == sent


def multipart():
    b = bucket()
    parts = [data(5 * MIB, 1), data(5 * MIB + 7, 2), data(100, 3)]
    upload = s3.create_multipart_upload(Bucket=b, Key="m/k", Metadata={"m": "1"}, ContentType="t/t", Tagging="x=1")["UploadId"]
    same = {"Bucket": b, "Key": "m/k", "UploadId": upload}
    assert not os.path.exists(f"{MNT}/{b}/m/k") and keys(b) == []
    assert [one["UploadId"] for one in s3.list_multipart_uploads(Bucket=b)["Uploads"]] == [upload]
    s3.upload_part(**same, PartNumber=2, Body=b"to be replaced")
    etags = [s3.upload_part(**same, PartNumber=number, Body=part)["ETag"] for number, part in enumerate(parts, 1)]
    assert etags == [f'"{hashlib.md5(part).hexdigest()}"' for part in parts]
    listed = s3.list_parts(**same, MaxParts=2)
    assert [one["PartNumber"] for one in listed["Parts"]] == [1, 2] and listed["IsTruncated"]
    assert s3.list_parts(**same, PartNumberMarker=2)["Parts"][0]["Size"] == 100
    named = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]
    refused("InvalidPartOrder", 400, s3.complete_multipart_upload, **same, MultipartUpload={"Parts": named[::-1]})
    refused("InvalidPart", 400, s3.complete_multipart_upload, **same, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": etags[1]}]})
    refused("EntityTooSmall", 400, s3.complete_multipart_upload, **same, MultipartUpload={"Parts": [named[0], {"PartNumber": 3, "ETag": etags[2]}, {"PartNumber": 4, "ETag": s3.upload_part(**same, PartNumber=4, Body=b"x")["ETag"]}]})
    done = s3.complete_multipart_upload(**same, MultipartUpload={"Parts": named})
    whole = b"".join(parts)
    etag = hashlib.md5(b"".join(hashlib.md5(part).digest() for part in parts)).hexdigest() + "-3"
    assert done["ETag"] == f'"{etag}"', done
    assert body(b, "m/k") == whole == on_mount(b, "m/k")
    again = s3.complete_multipart_upload(**same, MultipartUpload={"Parts": named})
    assert again["ETag"] == f'"{etag}"', "a retry of a completion whose answer was lost succeeds"
    head = s3.head_object(Bucket=b, Key="m/k", PartNumber=2)
    assert head["ContentLength"] == len(parts[1]) and head["PartsCount"] == 3 and head["Metadata"] == {"m": "1"}
    assert body(b, "m/k", PartNumber=3) == parts[2]
    refused("InvalidPartNumber", 416, s3.get_object, Bucket=b, Key="m/k", PartNumber=4)
    # Part numbers of an upload may have gaps, those of the object have none.
    gaps = {"Bucket": b, "Key": "gaps", "UploadId": s3.create_multipart_upload(Bucket=b, Key="gaps")["UploadId"]}
    named = [{"PartNumber": number, "ETag": s3.upload_part(**gaps, PartNumber=number, Body=part)["ETag"]} for number, part in ((2, parts[0]), (3, parts[2]))]
    s3.complete_multipart_upload(**gaps, MultipartUpload={"Parts": named})
    assert [body(b, "gaps", PartNumber=number) for number in (1, 2)] == [parts[0], parts[2]]
    refused("InvalidPartNumber", 416, s3.get_object, Bucket=b, Key="gaps", PartNumber=3)
    refused("NoSuchUpload", 404, s3.upload_part, **same, PartNumber=1, Body=b"x")
    attributes = s3.get_object_attributes(Bucket=b, Key="m/k", ObjectAttributes=["ETag", "ObjectSize", "ObjectParts"])
    assert attributes["ObjectSize"] == len(whole) and attributes["ObjectParts"]["TotalPartsCount"] == 3
    # Parts copied from another object, whole and by range.
    upload = s3.create_multipart_upload(Bucket=b, Key="copied")["UploadId"]
    same = {"Bucket": b, "Key": "copied", "UploadId": upload}
    source = {"Bucket": b, "Key": "m/k"}
    first = s3.upload_part_copy(**same, PartNumber=1, CopySource=source)["CopyPartResult"]["ETag"]
    second = s3.upload_part_copy(**same, PartNumber=2, CopySource=source, CopySourceRange="bytes=10-99")["CopyPartResult"]["ETag"]
    refused("InvalidRange", 416, s3.upload_part_copy, **same, PartNumber=3, CopySource=source, CopySourceRange="bytes=0-99999999")
    s3.complete_multipart_upload(**same, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": first}, {"PartNumber": 2, "ETag": second}]})
    assert body(b, "copied") == whole + whole[10:100]
    upload = s3.create_multipart_upload(Bucket=b, Key="gone")["UploadId"]
    same = {"Bucket": b, "Key": "gone", "UploadId": upload}
    s3.upload_part(**same, PartNumber=1, Body=parts[0])
    s3.abort_multipart_upload(**same)
    refused("NoSuchUpload", 404, s3.list_parts, **same)
    refused("NoSuchUpload", 404, s3.abort_multipart_upload, **same)
    refused("InvalidArgument", 400, s3.upload_part, Bucket=b, Key="k", UploadId=upload, PartNumber=10001, Body=b"")
    s3.upload_fileobj(io.BytesIO(data(20 * MIB)), b, "managed")
    assert body(b, "managed") == data(20 * MIB)


def checksums():
    b, sent = bucket(), data(MIB + 5)
    crc32 = base64.b64encode(zlib.crc32(sent).to_bytes(4, "big")).decode()
    sha256 = base64.b64encode(hashlib.sha256(sent).digest()).decode()
    for name, value in (("CRC32", crc32), ("SHA256", sha256), ("SHA1", base64.b64encode(hashlib.sha1(sent).digest()).decode())):
        put = s3.put_object(Bucket=b, Key=name, Body=sent, ChecksumAlgorithm=name)
        assert put[f"Checksum{name}"] == value, put
        got = s3.get_object(Bucket=b, Key=name, ChecksumMode="ENABLED")
        assert got[f"Checksum{name}"] == value and got["Body"].read() == sent
        attributes = s3.get_object_attributes(Bucket=b, Key=name, ObjectAttributes=["Checksum"])["Checksum"]
        assert attributes[f"Checksum{name}"] == value and attributes["ChecksumType"] == "FULL_OBJECT"
    assert "ChecksumCRC32" not in s3.get_object(Bucket=b, Key="CRC32", Range="bytes=0-9", ChecksumMode="ENABLED")
    refused("BadDigest", 400, s3.put_object, Bucket=b, Key="bad", Body=sent, ChecksumSHA256=base64.b64encode(b"x" * 32).decode())
    refused("BadDigest", 400, s3.put_object, Bucket=b, Key="bad", Body=b"x", ContentMD5=base64.b64encode(b"x" * 16).decode())
    refused("404", 404, s3.head_object, Bucket=b, Key="bad")
    for algorithm, kind in (("CRC32", "COMPOSITE"), ("CRC32", "FULL_OBJECT"), ("SHA256", "COMPOSITE")):
        parts = [data(5 * MIB, 1), data(1000, 2)]
        upload = s3.create_multipart_upload(Bucket=b, Key="m", ChecksumAlgorithm=algorithm, ChecksumType=kind)["UploadId"]
        same = {"Bucket": b, "Key": "m", "UploadId": upload}
        named = []
        for number, part in enumerate(parts, 1):
            answer = s3.upload_part(**same, PartNumber=number, Body=part, ChecksumAlgorithm=algorithm)
            named.append({"PartNumber": number, "ETag": answer["ETag"], f"Checksum{algorithm}": answer[f"Checksum{algorithm}"]})
        if kind == "FULL_OBJECT":
            want = base64.b64encode(zlib.crc32(b"".join(parts)).to_bytes(4, "big")).decode()
        else:
            sums = b"".join(base64.b64decode(part[f"Checksum{algorithm}"]) for part in named)
            raw = zlib.crc32(sums).to_bytes(4, "big") if algorithm == "CRC32" else hashlib.sha256(sums).digest()
            want = base64.b64encode(raw).decode() + "-2"
        wrong = base64.b64encode(bytes(len(base64.b64decode(want.removesuffix("-2"))))).decode() + want[len(want.removesuffix("-2")) :]
        complete = {**same, "MultipartUpload": {"Parts": named}}
        refused("BadDigest", 400, s3.complete_multipart_upload, **complete, **{f"Checksum{algorithm}": wrong})
        refused("InvalidRequest", 400, s3.complete_multipart_upload, **complete, ChecksumType="COMPOSITE" if kind == "FULL_OBJECT" else "FULL_OBJECT")
        s3.complete_multipart_upload(**complete, ChecksumType=kind, **{f"Checksum{algorithm}": want})
        got = s3.get_object_attributes(Bucket=b, Key="m", ObjectAttributes=["Checksum", "ObjectParts"])
        # Only this answer has no number of parts behind a composite checksum.
        assert got["Checksum"][f"Checksum{algorithm}"] == want.split("-")[0] and got["Checksum"]["ChecksumType"] == kind, got


def presigned():
    b, sent = bucket(), data(100_000)
    for version in ("s3v4", "s3"):
        signer = client(signature_version=version)
        url = signer.generate_presigned_url("put_object", Params={"Bucket": b, "Key": "k", "ContentType": "a/b"})
        urllib.request.urlopen(urllib.request.Request(url, data=sent, headers={"Content-Type": "a/b"}, method="PUT"))
        url = signer.generate_presigned_url("get_object", Params={"Bucket": b, "Key": "k"})
        assert urllib.request.urlopen(url).read() == sent
        for broken in (url.replace("k?", "l?"), url + "x"):
            try:
                urllib.request.urlopen(broken)
                raise AssertionError(broken)
            except urllib.error.HTTPError as error:
                assert error.code in (400, 403), error
    expired = client(signature_version="s3v4").generate_presigned_url("get_object", Params={"Bucket": b, "Key": "k"}, ExpiresIn=1)
    expired = expired.replace("X-Amz-Expires=1", "X-Amz-Expires=0")
    try:
        urllib.request.urlopen(expired)
        raise AssertionError("expired")
    except urllib.error.HTTPError as error:
        assert error.code in (400, 403)
    long = client(signature_version="s3v4").generate_presigned_url("get_object", Params={"Bucket": b, "Key": "k"}, ExpiresIn=8 * 24 * 3600)
    assert urlopen_error(long) == (400, "AuthorizationQueryParametersError")
    # Signature version 2: for the URL of a bucket, clients sign `/bucket/` and send `/bucket`.
    for style, old in (("path", client(signature_version="s3")), ("virtual", virtual(signature_version="s3"))):
        assert old.get_object(Bucket=b, Key="k")["Body"].read() == sent
        assert [entry["Key"] for entry in old.list_objects_v2(Bucket=b)["Contents"]] == ["k"]
        old.get_bucket_location(Bucket=b)
        old.put_object(Bucket=b, Key="gone", Body=b"")
        assert [entry["Key"] for entry in old.delete_objects(Bucket=b, Delete={"Objects": [{"Key": "gone"}]})["Deleted"]] == ["gone"]
        made = f"{b}-{style}"
        old.create_bucket(Bucket=made)
        old.delete_bucket(Bucket=made)
        url = old.generate_presigned_url("list_objects_v2", Params={"Bucket": b})
        assert b"<Key>k</Key>" in urllib.request.urlopen(url).read()
        assert urlopen_error(url.replace("Signature=", "Signature=A")) == (403, "SignatureDoesNotMatch")


def signed_url(path, **parameters):
    """A URL signed by version 4, with parameters in place of headers, as some libraries make it."""
    query = urllib.parse.urlencode({name.replace("_", "-"): value for name, value in parameters.items()})
    request = AWSRequest(method="PUT", url=f"{ENDPOINT}{path}?{query}")
    keys = boto3.Session().get_credentials().get_frozen_credentials()
    S3SigV4QueryAuth(keys, "s3", "us-east-1", expires=60).add_auth(request)
    return urllib.request.Request(request.url, method="PUT", data=b"hi", headers={"Content-Type": ""})


def parameters():
    b = bucket()
    put = lambda **more: urllib.request.urlopen(signed_url(f"/{b}/k", **more))
    put(x_amz_meta_foo="b r", x_amz_tagging="a=b", x_amz_checksum_crc32=crc32(b"hi"))
    assert s3.head_object(Bucket=b, Key="k")["Metadata"] == {"foo": "b r"}
    assert s3.get_object_tagging(Bucket=b, Key="k")["TagSet"] == [{"Key": "a", "Value": "b"}]
    assert urlopen_error(signed_url(f"/{b}/k", x_amz_checksum_crc32="AAAAAA==")) == (400, "BadDigest")
    assert urlopen_error(signed_url(f"/{b}/k", x_amz_server_side_encryption="aws:kms")) == (501, "NotImplemented")
    assert urlopen_error(signed_url(f"/{b}/k", x_amz_acl="public-read")) == (400, "AccessControlListNotSupported")
    s3.put_object(Bucket=b, Key="source", Body=b"source")
    put(x_amz_copy_source=f"{b}/source")
    assert body(b, "k") == b"source"
    # The parameter in the URL counts, not an unsigned header.
    more = signed_url(f"/{b}/k", x_amz_meta_foo="signed")
    more.add_header("x-amz-meta-foo", "other")
    urllib.request.urlopen(more)
    assert s3.head_object(Bucket=b, Key="k")["Metadata"] == {"foo": "signed"}


def crc32(content):
    return base64.b64encode(zlib.crc32(content).to_bytes(4, "big")).decode()


def owners():
    """A request with an expected bucket owner fails if the owner is another one."""
    b = bucket()
    s3.put_object(Bucket=b, Key="k", Body=b"x")
    right = s3.get_bucket_acl(Bucket=b)["Owner"]["ID"]
    assert s3.get_object(Bucket=b, Key="k", ExpectedBucketOwner=right)["Body"].read() == b"x"
    source = {"Bucket": b, "Key": "k"}
    s3.copy_object(Bucket=b, Key="l", CopySource=source, ExpectedSourceBucketOwner=right)
    refused("AccessDenied", 403, s3.copy_object, Bucket=b, Key="l", CopySource=source, ExpectedSourceBucketOwner="999")
    for call in (s3.get_object, s3.delete_object, s3.put_object):
        refused("AccessDenied", 403, call, Bucket=b, Key="k", ExpectedBucketOwner="999")
    refused("AccessDenied", 403, s3.delete_objects, Bucket=b, Delete={"Objects": [{"Key": "k"}]}, ExpectedBucketOwner="999")
    assert keys(b) == ["k", "l"]


def renewed():
    """A copy of an object onto itself is a new object, made from the version that the client named."""
    b = bucket()
    s3.put_object(Bucket=b, Key="k", Body=b"x", Metadata={"a": "1"}, Tagging="t=1")
    before, source = s3.head_object(Bucket=b, Key="k")["LastModified"], {"Bucket": b, "Key": "k"}
    time.sleep(1.1)
    after = s3.copy_object(Bucket=b, Key="k", CopySource=source, MetadataDirective="REPLACE", Metadata={"b": "2"})["CopyObjectResult"]["LastModified"]
    head = s3.head_object(Bucket=b, Key="k")
    assert head["LastModified"] == after > before and head["Metadata"] == {"b": "2"}, head
    assert s3.get_object_tagging(Bucket=b, Key="k")["TagSet"] == [{"Key": "t", "Value": "1"}]
    assert s3.get_object(Bucket=b, Key="k", IfModifiedSince=before)["Metadata"] == {"b": "2"}
    s3.copy_object(Bucket=b, Key="k", CopySource=source, StorageClass="STANDARD")
    refused("NotImplemented", 501, s3.copy_object, Bucket=b, Key="k", CopySource=source, StorageClass="STANDARD", WebsiteRedirectLocation="/x")
    bodies = [b"one", b"two"]
    etags = [f'"{hashlib.md5(content).hexdigest()}"' for content in bodies]
    end = time.monotonic() + 2
    def write(content):
        while time.monotonic() < end:
            s3.put_object(Bucket=b, Key="k", Body=content)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        writers = [pool.submit(write, content) for content in bodies]
        done = 0
        while time.monotonic() < end:
            try:
                copied = s3.copy_object(Bucket=b, Key="k", CopySource=source, CopySourceIfMatch=etags[0], MetadataDirective="REPLACE")
                assert copied["CopyObjectResult"]["ETag"] == etags[0], copied
                done += 1
            except ClientError as error:
                assert error.response["Error"]["Code"] in ("PreconditionFailed", "OperationAborted"), error
        for writer in writers:
            writer.result()
    assert done > 0


def urlopen_error(url):
    """Status and code of a request that must fail. The answer must have a message and a request id."""
    try:
        urllib.request.urlopen(url)
    except urllib.error.HTTPError as error:
        text = error.read().decode()
        assert "<Message>" in text and f"<RequestId>{error.headers['x-amz-request-id']}</RequestId>" in text, text
        return error.code, text.partition("<Code>")[2].partition("</Code>")[0]
    raise AssertionError(f"must be refused: {url}")


def post(form, content, **fields):
    """Posts a form; returns status and answer."""
    fields, boundary = dict(form["fields"], **fields), "boundary7"
    text = "".join(f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n' for name, value in fields.items())
    text += f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="C:\\tmp\\x"\r\nContent-Type: text/plain\r\n\r\n'
    raw = text.encode() + content + f"\r\n--{boundary}--\r\n".encode()
    kind = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
    try:
        answer = urllib.request.urlopen(urllib.request.Request(form["url"], data=raw, headers=kind, method="POST"))
        return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def forms():
    b = bucket()
    form = s3.generate_presigned_post(b, "posted/${filename}", Conditions=[["content-length-range", 1, 1000]])
    assert post(form, b"in a form")[0] == 204 and body(b, "posted/x") == b"in a form" == on_mount(b, "posted/x")
    for content, key, status, code in ((b"x" * 2000, "posted/x", 400, "EntityTooLarge"), (b"x", "elsewhere", 403, "AccessDenied")):
        got, text = post(form, content, key=key)
        assert got == status and f"<Code>{code}</Code>" in text, (got, text)
    def with_fields(fields, content=b"hello"):
        return post(s3.generate_presigned_post(b, "k", Fields=fields, Conditions=[{name: value} for name, value in fields.items()]), content)
    # A value that is invalid in a header would make every GET fail.
    for name, value in (("x-amz-meta-ü", "1"), ("x-amz-meta-a b", "1"), ("x-amz-meta-a:b", "1"), ("Content-Type", "a\r\nX-Evil: 1"), ("x-amz-website-redirect-location", "a\r\nb")):
        status, text = with_fields({name: value})
        assert status == 400 and "<Code>InvalidArgument</Code>" in text, (name, status, text)
        assert "k" not in keys(b)
    assert with_fields({"x-amz-meta-u": "ü", "Content-Type": "a/b", "Cache-Control": "max-age=1"})[0] == 204
    status, text = with_fields({"success_action_status": "201", "x-amz-meta-u": "ü", "Content-Type": "a/b", "Cache-Control": "max-age=1"})
    assert status == 201 and f"<ETag>&quot;{hashlib.md5(b'hello').hexdigest()}&quot;</ETag>" in text, text
    head = s3.head_object(Bucket=b, Key="k")
    assert head["ContentType"] == "a/b" and head["CacheControl"] == "max-age=1" and "u" in head["Metadata"], head
    s3.delete_object(Bucket=b, Key="k")
    sha256, md5 = (base64.b64encode(digest(b"hello").digest()).decode() for digest in (hashlib.sha256, hashlib.md5))
    for name, value, code in (
        ("acl", "public-read", "AccessControlListNotSupported"),
        ("tagging", "<Tagging>", "MalformedXML"),
        ("x-amz-checksum-sha256", sha256[::-1], "InvalidRequest"),
        ("x-amz-checksum-sha256", base64.b64encode(b"x" * 32).decode(), "BadDigest"),
        ("x-amz-checksum-crc32", "AAAAAA==", "BadDigest"),
        ("Content-MD5", base64.b64encode(b"x" * 16).decode(), "BadDigest"),
        ("Content-MD5", "x", "InvalidDigest"),
    ):
        status, text = with_fields({name: value})
        assert status == 400 and f"<Code>{code}</Code>" in text, (name, status, text)
        assert "k" not in keys(b)
    tags = "<Tagging><TagSet><Tag><Key>a</Key><Value>1</Value></Tag></TagSet></Tagging>"
    assert with_fields({"acl": "private", "tagging": tags, "x-amz-checksum-sha256": sha256, "Content-MD5": md5})[0] == 204
    assert s3.get_object_tagging(Bucket=b, Key="k")["TagSet"] == [{"Key": "a", "Value": "1"}]
    assert s3.head_object(Bucket=b, Key="k", ChecksumMode="ENABLED")["ChecksumSHA256"] == sha256


def virtual(**settings):
    """A client that puts buckets into host names."""
    # Names below localhost may not resolve.
    resolve = socket.getaddrinfo
    socket.getaddrinfo = lambda host, *rest, **more: resolve("127.0.0.1" if host.endswith("localhost") else host, *rest, **more)
    url = f"http://localhost:{urllib.parse.urlsplit(ENDPOINT).port}"
    return boto3.client("s3", endpoint_url=url, region_name="us-east-1", config=Config(s3={"addressing_style": "virtual"}, **settings))


def transport():
    b, sent = bucket(), data(3 * MIB)
    secure = boto3.client("s3", endpoint_url=ENDPOINT.replace("http://", "https://"), region_name="us-east-1", verify=os.environ["CERTIFICATE"])
    secure.put_object(Bucket=b, Key="tls", Body=sent)
    assert secure.get_object(Bucket=b, Key="tls")["Body"].read() == sent == on_mount(b, "tls")
    assert virtual().get_object(Bucket=b, Key="tls")["Body"].read() == sent
    # An anonymous client that sends frames, which only Content-Encoding announces.
    os.chmod(f"{MNT}/{b}", 0o777)
    anyone = {"Effect": "Allow", "Principal": "*", "Action": "s3:PutObject", "Resource": f"arn:aws:s3:::{b}/*"}
    s3.put_bucket_policy(Bucket=b, Policy=json.dumps({"Version": "2012-10-17", "Statement": [anyone]}))
    nobody = boto3.client("s3", endpoint_url=ENDPOINT.replace("http://", "https://"), region_name="us-east-1", verify=os.environ["CERTIFICATE"], config=Config(signature_version=UNSIGNED))
    for algorithm in ("CRC32", "SHA256"):
        assert f"Checksum{algorithm}" in nobody.put_object(Bucket=b, Key="open", Body=io.BytesIO(sent), ChecksumAlgorithm=algorithm)
        assert body(b, "open") == sent == on_mount(b, "open")
        assert "ContentEncoding" not in s3.head_object(Bucket=b, Key="open")
    for signed in (True, False):
        plain = client(s3={"addressing_style": "path", "payload_signing_enabled": signed})
        plain.put_object(Bucket=b, Key="p", Body=sent)
        assert body(b, "p") == sent
    quiet = client(request_checksum_calculation="when_required")
    quiet.put_object(Bucket=b, Key="q", Body=sent)
    assert body(b, "q") == sent


def cross_origin():
    b = bucket()
    refused("NoSuchCORSConfiguration", 404, s3.get_bucket_cors, Bucket=b)
    rule = {"AllowedMethods": ["GET", "PUT"], "AllowedOrigins": ["https://*.example.com"], "AllowedHeaders": ["*"], "ExposeHeaders": ["ETag"], "MaxAgeSeconds": 60}
    s3.put_bucket_cors(Bucket=b, CORSConfiguration={"CORSRules": [rule]})
    assert s3.get_bucket_cors(Bucket=b)["CORSRules"] == [rule]
    def preflight(origin, method):
        headers = {"Origin": origin, "Access-Control-Request-Method": method, "Access-Control-Request-Headers": "x-a"}
        return urllib.request.urlopen(urllib.request.Request(f"{ENDPOINT}/{b}/k", headers=headers, method="OPTIONS"))
    answer = preflight("https://a.example.com", "PUT")
    assert answer.headers["Access-Control-Allow-Origin"] == "https://a.example.com"
    for origin, method in (("https://example.org", "PUT"), ("https://a.example.com", "DELETE")):
        try:
            preflight(origin, method)
            raise AssertionError((origin, method))
        except urllib.error.HTTPError as error:
            assert error.code == 403
    s3.put_object(Bucket=b, Key="k", Body=b"x")
    url = s3.generate_presigned_url("get_object", Params={"Bucket": b, "Key": "k"})
    answer = urllib.request.urlopen(urllib.request.Request(url, headers={"Origin": "https://a.example.com"}))
    assert answer.headers["Access-Control-Expose-Headers"] == "ETag"
    # As on AWS, the method may be named in any request.
    for method, allowed in (("PUT", "https://a.example.com"), ("DELETE", None)):
        headers = {"Origin": "https://a.example.com", "Access-Control-Request-Method": method}
        answer = urllib.request.urlopen(urllib.request.Request(url, headers=headers))
        assert answer.headers["Access-Control-Allow-Origin"] == allowed, (method, answer.headers)
    s3.delete_bucket_cors(Bucket=b)
    refused("NoSuchCORSConfiguration", 404, s3.get_bucket_cors, Bucket=b)


def buckets():
    b = bucket()
    refused("BucketAlreadyOwnedByYou", 409, s3.create_bucket, Bucket=b)
    for name in ("ab", "Upper", "a_b", "a..b", "foo-.bar", "foo.-bar", "x" * 64):
        try:
            s3.create_bucket(Bucket=name)
            raise AssertionError(name)
        except ClientError as error:
            assert error.response["Error"]["Code"] == "InvalidBucketName", (name, error)
    assert s3.get_bucket_location(Bucket=b)["LocationConstraint"] is None
    assert "Status" not in s3.get_bucket_versioning(Bucket=b)
    assert b in [entry["Name"] for entry in s3.list_buckets()["Buckets"]]
    refused("NoSuchBucketPolicy", 404, s3.get_bucket_policy, Bucket=b)
    policy = '{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Principal":"*","Action":"s3:GetObject","Resource":"arn:aws:s3:::%s/*"}]}' % b
    s3.put_object(Bucket=b, Key="k", Body=b"x")
    def anonymous(query=""):
        return urllib.request.urlopen(f"{ENDPOINT}/{b}/k{query}").read()
    try:
        anonymous()
        raise AssertionError("no anonymous access by default")
    except urllib.error.HTTPError as error:
        assert error.code == 403
    s3.put_bucket_policy(Bucket=b, Policy=policy)
    assert s3.get_bucket_policy(Bucket=b)["Policy"] == policy and anonymous() == b"x"
    try:
        anonymous("?response-content-type=text%2Fhtml")
        raise AssertionError("headers of the answer are for requests with a signature")
    except urllib.error.HTTPError as error:
        assert error.code == 400 and b"<Code>InvalidRequest</Code>" in error.read()
    s3.delete_bucket_policy(Bucket=b)
    try:
        anonymous()
        raise AssertionError("the policy is gone")
    except urllib.error.HTTPError as error:
        assert error.code == 403
    refused("MalformedPolicy", 400, s3.put_bucket_policy, Bucket=b, Policy="{}")
    error = refused("NotImplemented", 501, s3.list_bucket_metrics_configurations, Bucket=b)
    assert "not implemented" in str(error), error


if __name__ == "__main__":
    for group in sys.argv[1:]:
        globals()[group]()
