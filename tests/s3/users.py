"""Users, keys, policies and short-lived keys, as S3 clients see them.

users.py GROUP…   ENDPOINT, NODE, FOREBAY and AWS credentials of an administrator come from the environment.
"""

import glob
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid

import boto3
import botocore
from botocore.client import Config
from botocore.exceptions import ClientError

ENDPOINT, NODE, FOREBAY = os.environ["ENDPOINT"], os.environ["NODE"], os.environ["FOREBAY"]


def client(key=None, service="s3", **settings):
    keys = {}
    if key:
        keys = dict(zip(("aws_access_key_id", "aws_secret_access_key", "aws_session_token"), key))
    config = Config(retries={"max_attempts": 0}, **settings)
    return boto3.client(service, endpoint_url=ENDPOINT, region_name="us-east-1", config=config, **keys)


admin = client()


def forebay(*command, **options):
    done = subprocess.run([FOREBAY, *command], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def refused(code, call, **arguments):
    try:
        call(**arguments)
    except ClientError as error:
        got = error.response["Error"]["Code"]
        assert got == code, f"expected {code}, got {got}: {error}"
        return
    raise AssertionError(f"must be refused with {code}")


def policy(*statements):
    return json.dumps({"Version": "2012-10-17", "Statement": statements})


def bucket():
    name = f"u-{uuid.uuid4().hex[:12]}"
    admin.create_bucket(Bucket=name)
    return name


def user(b):
    """A user with the right to read, write and list below home/NAME/."""
    name = f"ann-{uuid.uuid4().hex[:8]}"
    home = "home/${aws:username}/*"
    rights = policy(
        {"Effect": "Allow", "Action": ["s3:GetObject", "s3:PutObject"], "Resource": f"arn:aws:s3:::{b}/{home}"},
        {
            "Effect": "Allow",
            "Action": "s3:ListBucket",
            "Resource": f"arn:aws:s3:::{b}",
            "Condition": {"StringLike": {"s3:prefix": home}},
        },
    )
    forebay("user", "add", NODE, name, "--policy", "-", input=rights)
    admin.put_object(Bucket=b, Key=f"home/{name}/x", Body=b"own")
    admin.put_object(Bucket=b, Key="home/bob/x", Body=b"of another")
    return name


def key(name, *options):
    made = json.loads(forebay("key", "add", NODE, name, *options, "--json"))
    return made["access_key"], made["secret_key"]


def prefixes():
    b = bucket()
    name = user(b)
    ann = client(key(name))
    assert ann.get_object(Bucket=b, Key=f"home/{name}/x")["Body"].read() == b"own"
    ann.put_object(Bucket=b, Key=f"home/{name}/y", Body=b"3")
    refused("AccessDenied", ann.get_object, Bucket=b, Key="home/bob/x")
    refused("AccessDenied", ann.put_object, Bucket=b, Key="top", Body=b"3")
    refused("AccessDenied", ann.delete_object, Bucket=b, Key=f"home/{name}/x")
    listed = ann.list_objects_v2(Bucket=b, Prefix=f"home/{name}/")["Contents"]
    assert [entry["Key"] for entry in listed] == [f"home/{name}/x", f"home/{name}/y"]
    for prefix in ("home/", ""):
        refused("AccessDenied", ann.list_objects_v2, Bucket=b, Prefix=prefix)
    refused("AccessDenied", ann.list_buckets)
    nobody = client(signature_version=botocore.UNSIGNED)
    refused("AccessDenied", nobody.get_object, Bucket=b, Key=f"home/{name}/x")


def disabled():
    b = bucket()
    name = user(b)
    own = key(name)
    ann, read = client(own), {"Bucket": b, "Key": f"home/{name}/x"}
    forebay("key", "disable", NODE, own[0])
    refused("InvalidAccessKeyId", ann.get_object, **read)
    forebay("key", "enable", NODE, own[0])
    ann.get_object(**read)
    forebay("user", "disable", NODE, name)
    refused("InvalidAccessKeyId", ann.get_object, **read)
    forebay("user", "enable", NODE, name)
    ann.get_object(**read)
    # A name can be used again at once, and old keys are not valid.
    forebay("user", "remove", NODE, name)
    forebay("user", "add", NODE, name)
    refused("InvalidAccessKeyId", ann.get_object, **read)


def expiring():
    b = bucket()
    name = user(b)
    ann, end = client(key(name, "--expires", "1s")), time.monotonic() + 30
    while True:
        try:
            ann.get_object(Bucket=b, Key=f"home/{name}/x")
        except ClientError as error:
            assert error.response["Error"]["Code"] == "ExpiredToken", error
            return
        assert time.monotonic() < end, "the key does not expire"


def addresses():
    b = bucket()
    name = user(b)
    ann, read = client(key(name)), {"Bucket": b, "Key": f"home/{name}/x"}
    both = [f"arn:aws:s3:::{b}", f"arn:aws:s3:::{b}/*"]
    local = {"IpAddress": {"aws:SourceIp": "127.0.0.0/8"}}
    text = policy({"Effect": "Deny", "Principal": "*", "Action": "s3:GetObject", "Resource": both, "Condition": local})
    forebay("policy", "set", NODE, "--bucket", b, "-", input=text)
    refused("AccessDenied", ann.get_object, **read)
    refused("AccessDenied", admin.get_object, **read)
    assert json.loads(admin.get_bucket_policy(Bucket=b)["Policy"]) == json.loads(text)
    admin.delete_bucket_policy(Bucket=b)
    ann.get_object(**read)


def post(form):
    """Sends a form. Returns the status."""
    part = lambda name: f'--boundary\r\nContent-Disposition: form-data; name="{name}"'
    text = "".join(f"{part(name)}\r\n\r\n{value}\r\n" for name, value in form["fields"].items())
    raw = f'{text}{part("file")}; filename="f"\r\n\r\nhello\r\n--boundary--\r\n'.encode()
    kind = {"Content-Type": "multipart/form-data; boundary=boundary"}
    try:
        return urllib.request.urlopen(urllib.request.Request(form["url"], data=raw, headers=kind, method="POST")).status
    except urllib.error.HTTPError as error:
        return error.code


def renamed():
    """A renamed bucket keeps its policy."""
    b = bucket()
    name, other = user(b), f"{b}-renamed"
    own = key(name)
    read = lambda where: client(own).get_object(Bucket=where, Key=f"open/{name}")
    admin.put_object(Bucket=b, Key=f"open/{name}", Body=b"")
    refused("AccessDenied", lambda: read(b))
    admin.put_bucket_policy(
        Bucket=b,
        Policy=policy(
            {"Effect": "Allow", "Principal": {"AWS": name}, "Action": "s3:GetObject", "Resource": f"arn:aws:s3:::{b}/open/*"},
            {"Effect": "Deny", "Principal": "*", "Action": "s3:DeleteObject", "Resource": f"arn:aws:s3:::{b[:5]}*"},
        ),
    )
    read(b)
    os.rename(f"{NODE}/mnt/{b}", f"{NODE}/mnt/{other}")
    read(other)
    refused("AccessDenied", lambda: client(own).get_object(Bucket=other, Key="shut"))
    refused("AccessDenied", lambda: admin.delete_object(Bucket=other, Key=f"open/{name}"))


def sessions():
    b = bucket()
    name = user(b)
    own = key(name)
    sts = client(own, "sts")
    reading = policy({"Effect": "Allow", "Action": "s3:GetObject", "Resource": "*"})
    role = {"RoleArn": f"arn:aws:iam::000000000000:user/{name}", "RoleSessionName": "job", "DurationSeconds": 900}
    given = sts.assume_role(Policy=reading, **role)["Credentials"]
    short = given["AccessKeyId"], given["SecretAccessKey"], given["SessionToken"]
    job, read = client(short), {"Bucket": b, "Key": f"home/{name}/x"}
    job.get_object(**read)
    refused("AccessDenied", job.put_object, Body=b"", **read)
    refused("AccessDenied", job.get_object, Bucket=b, Key="home/bob/x")
    refused("InvalidToken", client(short[:2]).get_object, **read)
    refused("SignatureDoesNotMatch", client((short[0], "x" * 40, short[2])).get_object, **read)
    # In a URL of signature version 2 and in a form.
    old = client(short, signature_version="s3")
    url = old.generate_presigned_url("get_object", Params=read)
    assert "security-token" in url and urllib.request.urlopen(url).status == 200, url
    form = client(short).generate_presigned_post(b, f"home/{name}/x")
    assert post(form) == 403, "the session may not write"
    given = sts.get_session_token()["Credentials"]
    short = given["AccessKeyId"], given["SecretAccessKey"], given["SessionToken"]
    client(short).put_object(Bucket=b, Key=f"home/{name}/z", Body=b"")
    assert post(client(short).generate_presigned_post(b, f"home/{name}/form")) == 204
    refused("AccessDenied", client(short, "sts").get_session_token)
    assert sts.get_caller_identity()["Arn"].endswith(name)
    # Short-lived keys end with the key that requested them.
    forebay("key", "remove", NODE, own[0])
    refused("InvalidAccessKeyId", client(short).get_object, **read)


def copies():
    """Tags are copied only with the rights to read and set them; attributes need another right than the bytes."""
    b = bucket()
    name = f"cat-{uuid.uuid4().hex[:8]}"
    rights = lambda *actions: policy({"Effect": "Allow", "Action": list(actions), "Resource": f"arn:aws:s3:::{b}/*"})
    forebay("user", "add", NODE, name, "--policy", "-", input=rights("s3:GetObject", "s3:PutObject"))
    cat = client(key(name))
    admin.put_object(Bucket=b, Key="plain", Body=b"1")
    admin.put_object(Bucket=b, Key="tagged", Body=b"2", Tagging="x=1")
    copy = lambda source: cat.copy_object(Bucket=b, Key="copy", CopySource={"Bucket": b, "Key": source})
    attributes = {"Bucket": b, "Key": "plain", "ObjectAttributes": ["ObjectSize"]}
    copy("plain")
    refused("AccessDenied", copy, source="tagged")
    refused("AccessDenied", cat.get_object_attributes, **attributes)
    for more, may in (("GetObjectTagging", False), ("PutObjectTagging", False), ("*ObjectTagging", True)):
        text = rights("s3:GetObject", "s3:PutObject", f"s3:{more}", "s3:GetObjectAttributes")
        forebay("policy", "set", NODE, "--user", name, "-", input=text)
        copy("tagged") if may else refused("AccessDenied", copy, source="tagged")
        assert cat.get_object_attributes(**attributes)["ObjectSize"] == 1
    assert admin.get_object_tagging(Bucket=b, Key="copy")["TagSet"] == [{"Key": "x", "Value": "1"}]
    forebay("policy", "set", NODE, "--user", name, "-", input=rights("s3:GetObjectAttributes"))
    refused("AccessDenied", cat.get_object_attributes, **attributes)


def audited():
    b = bucket()
    name = user(b)
    own = key(name)
    client(own).get_object(Bucket=b, Key=f"home/{name}/x")
    refused("AccessDenied", client(own).get_object, Bucket=b, Key="home/bob/x")
    end, found = time.monotonic() + 30, []
    while len(found) < 2:
        assert time.monotonic() < end, f"audited: {found}"
        files = sorted(glob.glob(f"{NODE}/audit/*.jsonl"))
        lines = [json.loads(line) for file in files for line in open(file)]
        found = [line for line in lines if line.get("access_key") == own[0]]
    assert [line["status"] for line in found] == [200, 403], found
    assert [line["key"] for line in found] == [f"home/{name}/x", "home/bob/x"], found
    assert own[1] not in json.dumps(found)
    # The audit log names each of many keys that are deleted at once.
    right = {"Effect": "Allow", "Principal": {"AWS": name}, "Action": "s3:DeleteObject", "Resource": f"arn:aws:s3:::{b}/home/{name}/*"}
    admin.put_bucket_policy(Bucket=b, Policy=policy(right))
    gone = [f"home/{name}/{number}" for number in range(3)] + ["home/bob/x"]
    client(own).delete_objects(Bucket=b, Delete={"Objects": [{"Key": key} for key in gone]})
    end, named = time.monotonic() + 30, []
    while len(named) < len(gone):
        assert time.monotonic() < end, f"audited: {named}"
        lines = [json.loads(line) for file in sorted(glob.glob(f"{NODE}/audit/*.jsonl")) for line in open(file)]
        named = [line for line in lines if line.get("access_key") == own[0] and line["operation"] == "DeleteObjects" and "key" in line]
    assert [(line["key"], line["status"]) for line in named] == [(key, 403 if "bob" in key else 204) for key in gone], named
    tail = forebay("audit", "tail", NODE, "-n", "1000")
    assert f"{b}/home/bob/x" in tail and "AccessDenied" in tail, tail
    assert json.loads(forebay("audit", "tail", NODE, "--json", "-n", "1"))["status"] > 0


if __name__ == "__main__":
    for group in sys.argv[1:]:
        globals()[group]()
