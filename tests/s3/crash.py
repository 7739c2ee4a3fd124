"""Kills a node repeatedly while clients put, upload in parts, copy, delete and change objects, by S3 and on the mount.
Acknowledged operations must survive, operations under way must have happened completely or not at all, and bytes, ETag,
metadata and tags of an object must be of the same moment.

crash.py ROUNDS SEED   FOREBAY, NODE and AWS credentials come from the environment; the node runs and is mounted at NODE/mnt.

Each worker owns its keys, so it knows the allowed states of each key: one, or two while an operation is under way. The
name of a state tells how its bytes were made, so a failure reports the origin of the bytes that were found.
"""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback

import boto3
from botocore.client import Config
from botocore.exceptions import BotoCoreError, ClientError

FOREBAY, NODE = os.environ["FOREBAY"], os.environ["NODE"]
MNT = os.path.join(NODE, "mnt")
BUCKET = "crash"
WORKERS, KEYS = 8, 6
MIB = 1 << 20
SIZES = (0, 1, 700, 5000, 9000, 70_000, 300_000, 2 * MIB)
# Longest wait for a node or a client.
PATIENCE_S = 60


def node_file():
    with open(os.path.join(NODE, "node.json")) as file:
        return json.load(file)


def client():
    config = Config(
        s3={"addressing_style": "path"}, retries={"max_attempts": 0}, connect_timeout=10, read_timeout=PATIENCE_S
    )
    return boto3.client("s3", endpoint_url=node_file()["s3"], region_name="us-east-1", config=config)


class Version:
    """One content of an object with its metadata. The ETag is None if it is not an MD5, but number and version of the
    file."""

    def __init__(self, name, data, user=None, etag=None, tags=None):
        self.name, self.data, self.user, self.etag, self.tags = name, data, user, etag, tags or {}

    def __repr__(self):
        return f"<{self.name}: {len(self.data)} bytes, etag={self.etag} tags={self.tags}>"


def content(name, size):
    return hashlib.shake_128(name.encode()).digest(size)


def single_etag(data):
    return f'"{hashlib.md5(data).hexdigest()}"'


def combined_etag(parts):
    digests = b"".join(hashlib.md5(part).digest() for part in parts)
    return f'"{hashlib.md5(digests).hexdigest()}-{len(parts)}"'


class Broken(Exception):
    """The node ended during an operation."""


class Key:
    """The allowed states of a key; None: no object."""

    def __init__(self, name):
        self.name, self.states = name, [None]

    @property
    def state(self):
        assert len(self.states) == 1, f"{self.name} is undecided"
        return self.states[0]

    def path(self):
        return os.path.join(MNT, BUCKET, self.name)


class Upload:
    """A multipart upload: parts by number, each with the contents that it may have."""

    def __init__(self, key, upload_id, name):
        self.key, self.id, self.name, self.parts = key, upload_id, name, {}
        # False: the upload is gone. None: an operation that ends it is under way.
        self.there = True


class Worker:
    def __init__(self, number, seed):
        self.number, self.random, self.count = number, random.Random(seed), 0
        self.keys = [Key(f"w{number}/d{index % 3}/k{index}") for index in range(KEYS)]
        self.uploads = []
        self.done = 0
        self.failure = None

    def fresh(self):
        self.count += 1
        return f"w{self.number}-{self.count}"

    def try_states(self, keys, states, call):
        """Does a call after which each key has its new state; if it breaks off, its old or its new one."""
        before = [key.states for key in keys]
        for key, state in zip(keys, states):
            key.states = key.states + [state]
        result = attempt(call)
        for key, state, old in zip(keys, states, before):
            key.states = [state] if not isinstance(result, ClientError) else old
        return result

    def new_version(self, size=None):
        name = self.fresh()
        data = content(name, self.random.choice(SIZES) if size is None else size)
        return Version(name, data, user=name, etag=single_etag(data))

    def put(self, key, version, **conditions):
        def call():
            answer = self.s3.put_object(
                Bucket=BUCKET, Key=key.name, Body=version.data, Metadata={"version": version.user}, **conditions
            )
            assert answer["ETag"] == version.etag, answer

        return self.try_states([key], [version], call)

    # --- operations --------------------------------------------------------------------------------------------------

    def do_put(self):
        accepted(self.put(self.random.choice(self.keys), self.new_version()))

    def do_put_if_none(self):
        key = self.random.choice(self.keys)
        was = key.state
        expect(self.put(key, self.new_version(), IfNoneMatch="*"), None if was is None else "PreconditionFailed")

    def do_put_if_match(self):
        key = self.random.choice(self.keys)
        was = key.state
        if was is None or was.etag is None:
            return self.do_put()
        right = self.random.random() < 0.7
        etag = was.etag if right else '"00000000000000000000000000000000"'
        expect(self.put(key, self.new_version(), IfMatch=etag), None if right else "PreconditionFailed")

    def do_delete(self):
        key = self.random.choice(self.keys)
        accepted(self.try_states([key], [None], lambda: self.s3.delete_object(Bucket=BUCKET, Key=key.name)))

    def do_delete_several(self):
        keys = self.random.sample(self.keys, 3)
        objects = {"Objects": [{"Key": key.name} for key in keys]}

        def call():
            answer = self.s3.delete_objects(Bucket=BUCKET, Delete=objects)
            assert "Errors" not in answer, answer

        accepted(self.try_states(keys, [None] * 3, call))

    def do_copy(self):
        source, target = self.random.sample(self.keys, 2)
        was = source.state
        version = was and Version(was.name, was.data, was.user, was.etag, was.tags)
        source_name = {"Bucket": BUCKET, "Key": source.name}
        result = self.try_states(
            [target],
            [version],
            lambda: self.s3.copy_object(Bucket=BUCKET, Key=target.name, CopySource=source_name),
        )
        expect(result, "NoSuchKey" if was is None else None)

    def do_tag(self):
        key = self.random.choice(self.keys)
        was = key.state
        tags = {"tag": self.fresh()}
        version = was and Version(was.name, was.data, was.user, was.etag, tags)
        tag_set = {"TagSet": [{"Key": "tag", "Value": tags["tag"]}]}
        result = self.try_states(
            [key],
            [version],
            lambda: self.s3.put_object_tagging(Bucket=BUCKET, Key=key.name, Tagging=tag_set),
        )
        expect(result, "NoSuchKey" if was is None else None)

    def do_upload(self):
        key, name = self.random.choice(self.keys), self.fresh()
        made = attempt(
            lambda: self.s3.create_multipart_upload(Bucket=BUCKET, Key=key.name, Metadata={"version": name})
        )
        upload = Upload(key, accepted(made)["UploadId"], name)
        self.uploads.append(upload)
        for number, size in enumerate((5 * MIB, self.random.choice((1, 70_000, MIB))), 1):
            self.put_part(upload, number, content(f"{name}.{number}", size))
        if self.random.random() < 0.2:
            self.put_part(upload, 2, content(f"{name}.2b", 40_000))

    def put_part(self, upload, number, data):
        upload.parts[number] = upload.parts.get(number, [None]) + [data]
        result = attempt(
            lambda: self.s3.upload_part(
                Bucket=BUCKET, Key=upload.key.name, UploadId=upload.id, PartNumber=number, Body=data
            )
        )
        assert accepted(result)["ETag"] == single_etag(data)
        upload.parts[number] = [data]

    def do_complete(self):
        upload = self.random.choice(self.uploads) if self.uploads else None
        if upload is None or any(len(states) > 1 or states == [None] for states in upload.parts.values()):
            return self.do_upload()
        parts = [upload.parts[number][0] for number in sorted(upload.parts)]
        if len(parts) < 2:
            return self.do_abort()
        etag = combined_etag(parts)
        version = Version(upload.name, b"".join(parts), user=upload.name, etag=etag)
        named = [{"PartNumber": number, "ETag": single_etag(part)} for number, part in enumerate(parts, 1)]
        upload.there = None
        result = self.try_states(
            [upload.key],
            [version],
            lambda: self.s3.complete_multipart_upload(
                Bucket=BUCKET, Key=upload.key.name, UploadId=upload.id, MultipartUpload={"Parts": named}
            ),
        )
        assert accepted(result)["ETag"] == etag
        self.uploads.remove(upload)

    def do_abort(self):
        if not self.uploads:
            return
        upload = self.random.choice(self.uploads)
        upload.there = None
        accepted(
            attempt(
                lambda: self.s3.abort_multipart_upload(Bucket=BUCKET, Key=upload.key.name, UploadId=upload.id)
            )
        )
        self.uploads.remove(upload)

    # --- on the mount ------------------------------------------------------------------------------------------------

    def do_rename(self):
        """A file that is durable takes the place of the object; it has no metadata of S3."""
        key, name = self.random.choice(self.keys), self.fresh()
        version = Version(name, content(name, self.random.choice(SIZES)))
        other = os.path.join(MNT, "posix", name)

        def call():
            with open(other, "wb") as file:
                file.write(version.data)
                os.fsync(file.fileno())
            os.makedirs(os.path.dirname(key.path()), exist_ok=True)
            os.rename(other, key.path())

        accepted(self.try_states([key], [version], call))

    def do_unlink(self):
        key = self.random.choice(self.keys)
        if key.state is not None:
            accepted(self.try_states([key], [None], lambda: os.unlink(key.path())))

    def do_write(self):
        """Bytes of the object change in place: its ETag is not an MD5 afterwards, its metadata stays."""
        key = self.random.choice(self.keys)
        was = key.state
        if was is None or not was.data:
            return
        name = self.fresh()
        part = content(name, min(len(was.data), 4096))
        version = Version(f"{was.name}+{name}", part + was.data[len(part) :], was.user, None, was.tags)

        def call():
            with open(key.path(), "r+b") as file:
                file.write(part)
                file.flush()
                os.fsync(file.fileno())

        accepted(self.try_states([key], [version], call))

    OPERATIONS = (
        [do_put] * 6
        + [do_put_if_none, do_put_if_match, do_delete, do_delete_several, do_copy, do_tag] * 2
        + [do_upload, do_complete, do_complete, do_abort]
        + [do_rename, do_rename, do_unlink, do_write]
    )

    def run(self, stop):
        try:
            self.s3 = client()
            while not stop.is_set():
                self.random.choice(self.OPERATIONS)(self)
                self.done += 1
        except Broken:
            pass
        except BaseException:
            self.failure = traceback.format_exc()


def attempt(call):
    """The result of a call, or the error code from S3. A node that ended is an exception."""
    try:
        return call()
    except ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] >= 500 and KILLED.is_set():
            raise Broken from error
        return error
    except (BotoCoreError, OSError) as error:
        if not KILLED.is_set():
            raise
        raise Broken from error


def accepted(result):
    if isinstance(result, Exception):
        raise result
    return result


def expect(result, code):
    got = result.response["Error"]["Code"] if isinstance(result, ClientError) else None
    # The error of a HEAD or a copy may have no document.
    assert got == code, f"expected {code}, got {got}: {result}"


# --- after the crash -------------------------------------------------------------------------------------------------


def found_object(s3, key):
    """The object with all its metadata, compared with the file on the mount."""
    try:
        answer = s3.get_object(Bucket=BUCKET, Key=key.name)
    except ClientError as error:
        assert error.response["Error"]["Code"] == "NoSuchKey", error
        assert not os.path.lexists(key.path()), f"{key.name} is on the mount and no object"
        return None
    data = answer["Body"].read()
    tags = s3.get_object_tagging(Bucket=BUCKET, Key=key.name)["TagSet"]
    tags = {tag["Key"]: tag["Value"] for tag in tags}
    assert len(data) == answer["ContentLength"], key.name
    with open(key.path(), "rb") as file:
        assert file.read() == data, f"{key.name}: the mount has other bytes"
    if "-" not in answer["ETag"]:
        assert answer["ETag"] == single_etag(data), f"{key.name}: the ETag is not that of the bytes"
    return Version("found", data, answer["Metadata"].get("version"), answer["ETag"], tags)


def is_state(found, state):
    if found is None or state is None:
        return found is state
    return (
        found.data == state.data
        and found.user == state.user
        and found.tags == state.tags
        and (found.etag == state.etag if state.etag else "-" in found.etag)
    )


def is_torn_write(found, states):
    """A write in place that was under way may have reached the drives in part."""
    if found is None or len(states) != 2 or None in states:
        return False
    old, new = states
    if not new.name.startswith(f"{old.name}+") or found.user != old.user or found.tags != old.tags:
        return False
    same = len(found.data) == len(old.data) == len(new.data) and found.data[4096:] == old.data[4096:]
    return same and all(byte in pair for byte, *pair in zip(found.data[:4096], old.data, new.data))


def check_keys(s3, workers):
    listed = set()
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET):
        listed |= {entry["Key"] for entry in page.get("Contents", [])}
    for worker in workers:
        for key in worker.keys:
            found = found_object(s3, key)
            assert (found is not None) == (key.name in listed), f"{key.name}: the listing disagrees"
            fits = [state for state in key.states if is_state(found, state)]
            assert fits or is_torn_write(found, key.states), f"{key.name}: found {found}, allowed {key.states}"
            if not fits:
                # A torn write: its ETag is unknown.
                found.etag = None
            key.states = [fits[-1] if fits else found]
            listed.discard(key.name)
    assert not listed, f"nobody put these: {listed}"


def check_uploads(s3, workers):
    pages = s3.get_paginator("list_multipart_uploads").paginate(Bucket=BUCKET)
    there = {entry["UploadId"]: entry["Key"] for page in pages for entry in page.get("Uploads", [])}
    for worker in workers:
        for upload in list(worker.uploads):
            if upload.id not in there:
                assert upload.there is None, f"upload of {upload.key.name} is lost"
                worker.uploads.remove(upload)
                continue
            assert there.pop(upload.id) == upload.key.name
            upload.there = True
            check_parts(s3, upload)
    # Uploads whose creation was not acknowledged: no worker knows their ids.
    for upload_id, key in there.items():
        s3.abort_multipart_upload(Bucket=BUCKET, Key=key, UploadId=upload_id)


def check_parts(s3, upload):
    listed = s3.list_parts(Bucket=BUCKET, Key=upload.key.name, UploadId=upload.id).get("Parts", [])
    listed = {part["PartNumber"]: (part["ETag"], part["Size"]) for part in listed}
    for number, states in list(upload.parts.items()):
        found = listed.pop(number, None)
        fits = [data for data in states if found == (data and (single_etag(data), len(data)))]
        assert fits, f"part {number} of {upload.key.name}: {found}"
        upload.parts[number] = fits[-1:]
        if fits[-1] is None:
            del upload.parts[number]
    assert not listed, f"nobody put these parts of {upload.key.name}: {listed}"


# --- rounds ----------------------------------------------------------------------------------------------------------

KILLED = threading.Event()


def kill_node():
    pid = node_file()["pid"]
    KILLED.set()
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_S
    while os.path.exists(f"/proc/{pid}/fd/0"):
        assert time.monotonic() < deadline, "the node survives SIGKILL"
        time.sleep(0.01)
    subprocess.run(["umount", "-l", MNT], check=False, stderr=subprocess.DEVNULL)


def start_node():
    subprocess.run([FOREBAY, "start", NODE], check=True, stdout=subprocess.DEVNULL, timeout=PATIENCE_S)
    KILLED.clear()


def one_round(workers, duration_s):
    stop = threading.Event()
    threads = [threading.Thread(target=worker.run, args=(stop,)) for worker in workers]
    for thread in threads:
        thread.start()
    time.sleep(duration_s)
    kill_node()
    stop.set()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a client hangs"
    failures = [worker.failure for worker in workers if worker.failure]
    assert not failures, "\n".join(failures)
    start_node()
    s3 = client()
    check_keys(s3, workers)
    check_uploads(s3, workers)
    # Files that were never renamed.
    for name in os.listdir(os.path.join(MNT, "posix")):
        os.unlink(os.path.join(MNT, "posix", name))


def empty(workers):
    """Deletes everything, through S3 and on the mount."""
    s3 = client()
    for worker in workers:
        for upload in worker.uploads:
            s3.abort_multipart_upload(Bucket=BUCKET, Key=upload.key.name, UploadId=upload.id)
        for key in worker.keys:
            s3.delete_object(Bucket=BUCKET, Key=key.name)
    os.rmdir(os.path.join(MNT, "posix"))


def main(rounds, seed):
    moments = random.Random(seed)
    os.makedirs(os.path.join(MNT, "posix"), exist_ok=True)
    client().create_bucket(Bucket=BUCKET)
    workers = [Worker(number, seed * 1000 + number) for number in range(WORKERS)]
    for number in range(1, rounds + 1):
        one_round(workers, moments.uniform(0.3, 3.0))
        done = sum(worker.done for worker in workers)
        print(f"round {number}: {done} operations so far", flush=True)
    empty(workers)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
