"""Requests that no client should send: each must get a clear error and leave nothing behind.

hostile.py GROUP…   ENDPOINT, MNT and AWS credentials come from the environment.
"""

import base64
import contextlib
import datetime
import hashlib
import json
import os
import resource
import socket
import sys
import time
import urllib.parse
import xml.dom.minidom
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.session import Session

from matrix import MIB, body, bucket, client, data, keys, refused, s3

ENDPOINT = os.environ["ENDPOINT"]
HOST = urllib.parse.urlsplit(ENDPOINT).netloc
# Memory of the node, in MiB.
MEMORY_MIB = int(os.environ.get("FOREBAY_TEST_MEMORY", "512MiB").removesuffix("MiB"))
KEYS = Session().get_credentials().get_frozen_credentials()


class Auth(S3SigV4Auth):
    """Signs a given payload hash, which may be wrong."""

    digest = ""

    def payload(self, request):
        return self.digest


def signed(method, path, headers=None, payload=b"", secret=None, digest=None, region="us-east-1"):
    """Head of a signed request."""
    request = AWSRequest(method=method, url=ENDPOINT + path, data=payload, headers=dict(headers or {}))
    auth = Auth(Credentials(KEYS.access_key, secret or KEYS.secret_key), "s3", region)
    auth.digest = digest or hashlib.sha256(payload).hexdigest()
    auth.add_auth(request)
    lines = [f"{method} {path} HTTP/1.1", f"Host: {HOST}"]
    lines += [f"{name}: {value}" for name, value in request.headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def exchange(raw, close=False, timeout=20, until_close=False):
    """Sends bytes. Returns the status line and all bytes of the answer, until it is complete or the server closes."""
    host, port = HOST.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=timeout) as peer:
        try:
            peer.sendall(raw)
            if close:
                return ""
            answer = b""
            while until_close or not done(answer):
                more = peer.recv(65536)
                if not more:
                    break
                answer += more
        except (BrokenPipeError, ConnectionResetError):
            pass
    return answer.decode("latin-1")


def done(answer):
    head, found, rest = answer.partition(b"\r\n\r\n")
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-length:"):
            return bool(found) and len(rest) >= int(line.split(b":")[1])
    return bool(found) and b" 204 " in head


def expect(answer, status, code=""):
    assert answer.startswith(f"HTTP/1.1 {status}"), answer[:600]
    assert f"<Code>{code}</Code>" in answer or not code, answer[:600]


def signatures():
    b = bucket()
    s3.put_object(Bucket=b, Key="k", Body=b"x")
    expect(exchange(signed("GET", f"/{b}/k")), 200)
    expect(exchange(signed("GET", f"/{b}/k", secret="wrong")), 403, "SignatureDoesNotMatch")
    expect(exchange(signed("GET", f"/{b}/k").replace(b"/k HTTP", b"/l HTTP", 1)), 403, "SignatureDoesNotMatch")
    expect(exchange(signed("GET", f"/{b}/k").replace(KEYS.access_key.encode(), b"AKIANOBODY")), 403, "InvalidAccessKeyId")
    expect(exchange(f"GET /{b}/k HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()), 403, "AccessDenied")
    expect(exchange(f"PUT /{b}/k HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 1\r\n\r\nx".encode()), 403, "AccessDenied")
    expect(exchange(f"GET /no-such-bucket HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()), 403, "AccessDenied")
    expect(exchange(f"GET / HTTP/1.1\r\nHost: {HOST}\r\nAuthorization: rubbish\r\n\r\n".encode()), 400)
    # Dates without digits: in the scope of a signature, in a header, in a presigned URL.
    for date, scope in (("20261123T010203Z", "2026*123"), ("2026*123T010203Z", "20261123"), ("!!!!!!!!T!!!!!!Z", "!!!!!!!!")):
        credential = f"AKIA/{scope}/us-east-1/s3/aws4_request"
        header = f"AWS4-HMAC-SHA256 Credential={credential}, SignedHeaders=host, Signature=00"
        expect(exchange(f"GET /{b} HTTP/1.1\r\nHost: {HOST}\r\nAuthorization: {header}\r\nx-amz-date: {date}\r\n\r\n".encode()), 400)
        query = f"X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential={credential}&X-Amz-Date={date}&X-Amz-Expires=60"
        query += "&X-Amz-SignedHeaders=host&X-Amz-Signature=" + "0" * 64
        answer = exchange(f"GET /{b}/k?{query} HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
        assert answer.startswith(("HTTP/1.1 400", "HTTP/1.1 403")), answer[:600]
    # A body that differs from the signed one.
    raw = signed("PUT", f"/{b}/k", {"Content-Length": "5"}, digest=hashlib.sha256(b"other").hexdigest()) + b"hello"
    expect(exchange(raw), 400, "XAmzContentSHA256Mismatch")
    assert body(b, "k") == b"x"
    # A document that differs from the signed one.
    xml = b"<Delete><Object><Key>k</Key></Object></Delete>"
    length = {"Content-Length": str(len(xml))}
    remove = lambda more={}, digest=None: signed("POST", f"/{b}?delete=", dict(length, **more), xml, digest=digest) + xml
    expect(exchange(remove(digest=hashlib.sha256(b"other").hexdigest())), 400, "XAmzContentSHA256Mismatch")
    md5 = lambda content: {"Content-MD5": base64.b64encode(hashlib.md5(content).digest()).decode()}
    expect(exchange(remove(md5(b"other"))), 400, "BadDigest")
    expect(exchange(remove({"Content-MD5": "rubbish"})), 400, "InvalidDigest")
    assert body(b, "k") == b"x"
    expect(exchange(remove(md5(xml))), 200)
    refused("NoSuchKey", 404, s3.get_object, Bucket=b, Key="k")


def clock():
    b = bucket()
    real = datetime.datetime

    class Shifted(real):
        @classmethod
        def utcnow(cls):
            return real.utcnow() - datetime.timedelta(hours=1)

        @classmethod
        def now(cls, tz=None):
            return real.now(tz) - datetime.timedelta(hours=1)

    import botocore.auth
    import botocore.compat

    def shifted_now(remove_tzinfo=True):
        now = real.now(datetime.timezone.utc) - datetime.timedelta(hours=1)
        return now.replace(tzinfo=None) if remove_tzinfo else now

    kept = getattr(botocore.auth, "get_current_datetime", None)
    if kept:
        botocore.auth.get_current_datetime = shifted_now
    else:
        botocore.auth.datetime.datetime = Shifted
    expect(exchange(signed("GET", f"/{b}")), 403, "RequestTimeTooSkewed")
    if kept:
        botocore.auth.get_current_datetime = kept


def rubbish():
    b = bucket()
    for raw in (b"\x00" * 100, b"GET\r\n\r\n", b"\x16\x03\x01\x00\x05hello", b"GET / HTTP/9.9\r\n\r\n", os.urandom(4000)):
        exchange(raw)
    expect(exchange(b"GET / HTTP/1.1\r\nHost: " + HOST.encode() + b"\r\n" + b"X-A: " + b"a" * 300_000 + b"\r\n\r\n"), 431)
    many = b"".join(b"X-%d: 1\r\n" % number for number in range(500))
    expect(exchange(b"GET / HTTP/1.1\r\nHost: " + HOST.encode() + b"\r\n" + many + b"\r\n"), 431)
    # A parser that reads in pieces could leave CDATA out of the key.
    for name in ("cx", "cyx"):
        s3.put_object(Bucket=b, Key=name, Body=b"")
    literal = b"<Delete><Object><Key>c<![CDATA[y]]>x</Key></Object></Delete>"
    head = signed("POST", f"/{b}?delete=", {"Content-Length": str(len(literal))}, literal)
    expect(exchange(head + literal), 400, "MalformedXML")
    # Documents must not be in aws-chunked frames, because digests of frames are not checked for them.
    framed = b"%x\r\n%s\r\n0\r\n\r\n" % (len(literal), literal)
    more = {"Content-Encoding": "aws-chunked", "X-Amz-Decoded-Content-Length": str(len(literal)), "Content-Length": str(len(framed))}
    expect(exchange(signed("POST", f"/{b}?delete=", more, digest="UNSIGNED-PAYLOAD") + framed), 400, "InvalidRequest")
    assert keys(b) == ["cx", "cyx"]
    for xml in (b"<", b"rubbish", b"<Delete>" * 5000, b"\xff" * 1000, b'<!DOCTYPE a [<!ENTITY b "c">]><Delete>&b;</Delete>', b""):
        head = signed("POST", f"/{b}?delete=", {"Content-Length": str(len(xml))}, xml)
        answer = exchange(head + xml)
        assert answer.startswith("HTTP/1.1 400"), (xml[:40], answer[:400])
    expect(exchange(signed("GET", f"/{b}/%ff%fe")), 400, "InvalidURI")
    expect(exchange(signed("PATCH", f"/{b}/k")), 501, "NotImplemented")
    assert client().list_buckets()["Buckets"], "it still serves"


def unprintable():
    """Names that XML cannot contain: answers must still be valid XML."""
    b = bucket()
    bad, plain = ("a\ufffe", "a\uffff", "a\x01"), ["a\rb", "a b"]
    for key in (*bad, *plain):
        s3.put_object(Bucket=b, Key=key, Body=b"x")
    assert keys(b) == sorted((*bad, *plain), key=str.encode), "boto3 lists with encoding-type=url"
    def answer(raw):
        head, _, text = exchange(raw).partition("\r\n\r\n")
        return xml.dom.minidom.parseString(text.encode("latin-1"))
    names = lambda document, tag: [key.firstChild.data for entry in document.getElementsByTagName(tag) for key in entry.getElementsByTagName("Key")]
    for version in ("list-type=2&", ""):
        assert names(answer(signed("GET", f"/{b}?{version}prefix=a")), "Contents") == plain
        assert names(answer(signed("GET", f"/{b}?{version}prefix=a%EF%BF%BE")), "Contents") == []
    wanted = "".join(f"<Object><Key>{key}</Key></Object>" for key in (*bad, *(key.replace("\r", "&#13;") for key in plain)))
    wanted = f"<Delete>{wanted}</Delete>".encode()
    deletion = answer(signed("POST", f"/{b}?delete=", {"Content-Length": str(len(wanted))}, wanted) + wanted)
    assert names(deletion, "Deleted") == plain, deletion.toxml()
    assert names(deletion, "Error") == [urllib.parse.quote(key) for key in bad], deletion.toxml()
    for key in bad:
        s3.delete_object(Bucket=b, Key=key)
    assert keys(b) == []
    # Pages of uploads continue after such a name.
    for key in ("a%01", "b"):
        expect(exchange(signed("POST", f"/{b}/{key}?uploads=")), 200)
    page = exchange(signed("GET", f"/{b}?uploads=&max-uploads=1"))
    assert "<NextKeyMarker>a&#1;</NextKeyMarker>" in page and "<Key>a&#1;</Key>" in page, page
    id_marker = page.partition("<NextUploadIdMarker>")[2].partition("<")[0]
    page = exchange(signed("GET", f"/{b}?uploads=&max-uploads=1&key-marker=a%01&upload-id-marker={id_marker}"))
    assert "<Key>b</Key>" in page, page


def lengths():
    b = bucket()
    put = lambda length, digest="UNSIGNED-PAYLOAD", **more: signed("PUT", f"/{b}/k", {"Content-Length": str(length), **more}, digest=digest)
    expect(exchange(put(5 << 40)), 400, "EntityTooLarge")
    expect(exchange(put(0)), 200)
    assert s3.head_object(Bucket=b, Key="k")["ContentLength"] == 0
    # aws-chunked: wrong sizes, no end, a frame that claims terabytes, a trailer that never comes.
    streaming = {"Content-Encoding": "aws-chunked", "X-Amz-Trailer": "x-amz-checksum-crc32"}
    def chunked(decoded, raw):
        more = {**streaming, "X-Amz-Decoded-Content-Length": str(decoded)}
        return exchange(put(len(raw), "STREAMING-UNSIGNED-PAYLOAD-TRAILER", **more) + raw)
    for decoded, raw in ((5, b"zz\r\nhello\r\n0\r\n\r\n"), (9, b"5\r\nhello\r\n0\r\nx-amz-checksum-crc32:NhCmhg==\r\n\r\n"), (5, b"5\r\nhello\r\n0\r\n\r\n"), (5, b"5\r\nhello\r\n0\r\nx-amz-checksum-crc32:AAAAAA==\r\n\r\n"), (3, b"5\r\nhello\r\n0\r\nx-amz-checksum-crc32:NhCmhg==\r\n\r\n"), (5, b"ffffffffff\r\nhello")):
        answer = chunked(decoded, raw)
        assert answer.startswith("HTTP/1.1 400") or answer == "", (raw, answer[:400])
    assert s3.head_object(Bucket=b, Key="k")["ContentLength"] == 0, "nothing of it became an object"
    expect(chunked(5, b"5\r\nhello\r\n0\r\nx-amz-checksum-crc32:NhCmhg==\r\n\r\n"), 200)
    assert body(b, "k") == b"hello"
    # A body without its last frame is incomplete, and a framed body needs a length, with every kind of signature.
    answer = chunked(5, b"5\r\nhello\r\n")
    assert answer.startswith("HTTP/1.1 400") or answer == "", answer[:400]
    url = client(signature_version="s3").generate_presigned_url("put_object", Params={"Bucket": b, "Key": "framed"})
    def framed(raw, *more):
        lines = [f"PUT {url[len(ENDPOINT):]} HTTP/1.1", f"Host: {HOST}", f"Content-Length: {len(raw)}", "Content-Encoding: aws-chunked", *more]
        return exchange("\r\n".join(lines).encode() + b"\r\n\r\n" + raw)
    whole = b"5\r\nhello\r\n0\r\n\r\n"
    # Version 2 signs all x-amz- headers: the length must be signed, too.
    expect(framed(whole, "X-Amz-Decoded-Content-Length: 5"), 403, "SignatureDoesNotMatch")
    refused("404", 404, s3.head_object, Bucket=b, Key="framed")
    # Without the length, the encoding was copied from another store and is ignored.
    expect(framed(b"hello"), 200)
    assert body(b, "framed") == b"hello" and "ContentEncoding" not in s3.head_object(Bucket=b, Key="framed")
    # Version 4 with an unsigned body: the signed length counts, and an empty body is not five bytes.
    plain = {"Content-Encoding": "aws-chunked", "X-Amz-Decoded-Content-Length": "5"}
    expect(exchange(put(len(whole), **plain) + whole), 200)
    assert body(b, "k") == b"hello"
    expect(exchange(put(0, **plain)), 400, "IncompleteBody")
    # A checksum in a trailer is verified beside other trailers, and an unknown checksum is refused.
    tail = b"5\r\nhello\r\n0\r\nx-foo:1\r\nx-amz-checksum-crc32:%s\r\n\r\n"
    def trailed(names, raw):
        more = {**plain, "X-Amz-Trailer": names}
        return exchange(put(len(raw), "STREAMING-UNSIGNED-PAYLOAD-TRAILER", **more) + raw)
    expect(trailed("x-foo,x-amz-checksum-crc32", tail % b"AAAAAA=="), 400, "BadDigest")
    expect(trailed("x-foo,x-amz-checksum-crc32", tail % b"NhCmhg=="), 200)
    expect(trailed("x-amz-checksum-md5", tail % b"AAAAAA=="), 400, "InvalidRequest")
    expect(exchange(put(0, **{"X-Amz-Checksum-Sha512": "AAAA"})), 400, "InvalidRequest")
    # A large frame is processed in parts, not kept in memory.
    sent = data(24 * MIB)
    crc = base64.b64encode(zlib.crc32(sent).to_bytes(4, "big"))
    expect(chunked(len(sent), b"%x\r\n" % len(sent) + sent + b"\r\n0\r\nx-amz-checksum-crc32:" + crc + b"\r\n\r\n"), 200)
    assert body(b, "k") == sent


def broken():
    """Connections that end in every phase of a request."""
    b = bucket()
    sent = data(4 * MIB)
    upload = s3.create_multipart_upload(Bucket=b, Key="m")["UploadId"]
    paths = (f"/{b}/new", f"/{b}/m?partNumber=1&uploadId={upload}")
    for path in paths:
        head = signed("PUT", path, {"Content-Length": str(len(sent))}, digest="UNSIGNED-PAYLOAD")
        for cut in (10, len(head) - 2, len(head), len(head) + 1, len(head) + MIB, len(head) + len(sent) - 1):
            exchange((head + sent)[:cut], close=True)
    s3.put_object(Bucket=b, Key="big", Body=data(32 * MIB))
    for _ in range(8):
        exchange(signed("GET", f"/{b}/big"), close=True)
        s3.get_object(Bucket=b, Key="big")["Body"].read(1000)
    assert "Parts" not in s3.list_parts(Bucket=b, Key="m", UploadId=upload)
    s3.abort_multipart_upload(Bucket=b, Key="m", UploadId=upload)
    refused("404", 404, s3.head_object, Bucket=b, Key="new")
    s3.delete_object(Bucket=b, Key="big")
    assert keys(b) == []
    s3.delete_bucket(Bucket=b)


def additions():
    """Unsigned headers are refused: they must not turn a put into a copy."""
    b, secret = bucket(), bucket()
    s3.put_object(Bucket=secret, Key="key", Body=b"secret")
    copy = f"x-amz-copy-source: {secret}/key"
    put = client(signature_version="s3v4").generate_presigned_url("put_object", Params={"Bucket": b, "Key": "k"})
    path = put[len(ENDPOINT) :]
    head = f"PUT {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 0\r\n"
    expect(exchange(f"{head}{copy}\r\n\r\n".encode()), 403, "AccessDenied")
    expect(exchange(f"{head}x-amz-tagging: a=b\r\n\r\n".encode()), 403, "AccessDenied")
    plain = signed("PUT", f"/{b}/k").decode()
    expect(exchange(plain.replace("\r\n\r\n", f"\r\n{copy}\r\n\r\n").encode()), 403, "AccessDenied")
    # Unknown algorithms and a second signature are refused.
    for word in ("aws4-hmac-sha256", "AWS3", "foo"):
        other = plain.replace("AWS4-HMAC-SHA256 Credential", f"{word} Credential")
        assert other != plain
        expect(exchange(other.encode()), 400)
        expect(exchange(other.replace("\r\n\r\n", f"\r\n{copy}\r\n\r\n").encode()), 400)
    for second in ("Bearer x", "Basic abc", "rubbish", "AWS a:b", "AWS4-HMAC-SHA256 Credential=a/b, SignedHeaders=host;x-amz-copy-source, Signature=0"):
        answer = exchange(f"{head}Authorization: {second}\r\n{copy}\r\n\r\n".encode())
        assert " 400 " in answer[:20] or " 403 " in answer[:20], (second, answer[:300])
    assert keys(b) == []
    expect(exchange(f"{head}\r\n".encode()), 200)
    assert keys(b) == ["k"]


def subresources():
    """Unsupported subresources are refused, never ignored."""
    b, empty = bucket(), bucket()
    s3.put_object(Bucket=b, Key="kept", Body=b"kept")
    for name in ("encryption", "restore", "retention", "legal-hold", "policy", "uploads=", "partNumber=1", "foo"):
        for method in ("PUT", "DELETE"):
            answer = exchange(signed(method, f"/{b}/kept?{name}", {"Content-Length": "0"}))
            assert " 501 " in answer[:20] or " 400 " in answer[:20], (method, name, answer[:300])
        answer = exchange(signed("DELETE", f"/{empty}?{name}"))
        if name not in ("policy", "encryption"):
            assert " 501 " in answer[:20] or " 400 " in answer[:20], (name, answer[:300])
    assert body(b, "kept") == b"kept"
    expect(exchange(signed("GET", f"/{b}?abac")), 501, "NotImplemented")
    s3.head_bucket(Bucket=empty)


def slow_forms():
    """Forms that arrive slowly do not delay other requests."""
    host, port = HOST.rsplit(":", 1)
    start = (
        f"POST /x HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: multipart/form-data; boundary=B\r\n"
        'Content-Length: 60000\r\n\r\n--B\r\nContent-Disposition: form-data; name="q"\r\n\r\n'
    )
    slow = [socket.create_connection((host, int(port)), timeout=20) for _ in range(20)]
    try:
        for peer in slow:
            peer.sendall(start.encode())
        b = bucket()
        post = s3.generate_presigned_post(b, "formed")
        fields = "".join(
            f'--B\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
            for name, value in post["fields"].items()
        )
        text = f'{fields}--B\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nbytes\r\n--B--\r\n'
        head = f"POST /{b} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: multipart/form-data; boundary=B\r\n"
        expect(exchange(f"{head}Content-Length: {len(text)}\r\n\r\n{text}".encode()), 204)
        assert body(b, "formed") == b"bytes"
    finally:
        for peer in slow:
            peer.close()


@contextlib.contextmanager
def connections(count, received_bytes=None):
    """Opens `count` connections, each with a receive buffer of `received_bytes`."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    host, port = HOST.rsplit(":", 1)
    with contextlib.ExitStack() as stack:
        peers = []
        for _ in range(count):
            peer = stack.enter_context(socket.socket())
            peer.settimeout(5)
            if received_bytes:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, received_bytes)
            peer.connect((host, int(port)))
            peers.append(peer)
        yield peers


def crowd():
    """Idle connections do not keep other clients out, even if there are many."""
    with connections(MEMORY_MIB * 16 // 15 + 100):
        began = time.monotonic()
        b = bucket()
        expect(exchange(signed("GET", f"/{b}")), 200)
        assert time.monotonic() - began < 20


def slow_puts():
    """Hanging uploads leave room for other requests, and further ones get SlowDown."""
    b = bucket()
    s3.put_object(Bucket=b, Key="kept", Body=b"kept")

    def put(name):
        return signed("PUT", f"/{b}/{name}", {"Content-Length": "100000"}, digest="UNSIGNED-PAYLOAD")

    # More than the limit of uploads under way.
    with connections(MEMORY_MIB // 3 + 20) as slow:
        for number, peer in enumerate(slow):
            peer.sendall(put(f"slow{number}") + b"x" * 1000)
        time.sleep(1)
        began = time.monotonic()
        assert body(b, "kept") == b"kept"
        s3.delete_object(Bucket=b, Key="kept")
        assert time.monotonic() - began < 5
        expect(exchange(put("more") + b"x" * 100000), 503, "SlowDown")
    s3.put_object(Bucket=b, Key="after", Body=b"x" * 100000)
    assert keys(b) == ["after"]


def resident_mib():
    """Memory of the node now, in MiB."""
    with open(os.path.join(os.environ["NODE"], "node.json")) as file:
        pid = json.load(file)["pid"]
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS:")) >> 10


def slow_gets():
    """Answers that clients do not read stay within the node's memory budget, are complete, and leave room for requests."""
    b = bucket()
    names = ["a", "b", "c", "d"]
    for name in names:
        # More than the kernel buffers for a client that does not read.
        s3.put_object(Bucket=b, Key=name, Body=data(8 * MIB))
    # Fewer than the limit of connections.
    with connections(MEMORY_MIB, received_bytes=4096) as slow:
        for number, peer in enumerate(slow):
            peer.sendall(signed("GET", f"/{b}/{names[number % len(names)]}"))
        peak = 0
        for _ in range(50):
            time.sleep(0.1)
            peak = max(peak, resident_mib())
        began = time.monotonic()
        s3.put_object(Bucket=b, Key="put", Body=b"x" * 100000)
        s3.head_object(Bucket=b, Key="put")
        s3.delete_object(Bucket=b, Key="put")
        assert time.monotonic() - began < 5
        expect(exchange(signed("GET", f"/{b}/a")), 503, "SlowDown")
        print(f"peak {peak} MiB")
        assert peak < MEMORY_MIB, peak
    assert len(body(b, "a")) == 8 * MIB


def full_puts():
    """Uploads to full drives, more than the limit, are all answered and do not block deletions."""
    b, kept, removed = os.environ["BUCKET"], os.environ["KEPT"], os.environ["REMOVED"]
    body_of = {number: f"{number:08}".encode() * (MIB // 8) for number in range(MEMORY_MIB // 3 + 20)}

    def put(number):
        length = {"Content-Length": str(MIB)}
        return exchange(signed("PUT", f"/{b}/put{number}", length, digest="UNSIGNED-PAYLOAD") + body_of[number], timeout=60)

    with ThreadPoolExecutor(len(body_of)) as pool:
        answers = pool.map(put, body_of)
        time.sleep(1)
        began = time.monotonic()
        size = s3.head_object(Bucket=b, Key=kept)["ContentLength"]
        assert len(body(b, kept)) == size
        s3.delete_object(Bucket=b, Key=removed)
        took_s = time.monotonic() - began
        statuses = [answer.split(" ", 2)[1] for answer in answers]
    print(f"reading and removing took {took_s:.1f} s; answers:", Counter(statuses))
    assert took_s < 15
    assert set(statuses) <= {"200", "503", "507"} and "507" in statuses, Counter(statuses)
    for number, status in enumerate(statuses):
        if status == "200":
            assert body(b, f"put{number}") == body_of[number]
            s3.delete_object(Bucket=b, Key=f"put{number}")
        else:
            refused("404", 404, s3.head_object, Bucket=b, Key=f"put{number}")


if __name__ == "__main__":
    for group in sys.argv[1:]:
        globals()[group]()
