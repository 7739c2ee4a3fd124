"""Increases the load of a node to its peak throughput, then to ten times that load, and compares the throughputs.

overload.py DIRECTORY ENDPOINT SECONDS SHARE: DIRECTORY is on the mount and its name is a bucket of ENDPOINT. A unit of load
is four writers that overwrite files and fsync, two readers, and two clients of S3. Each goes on as soon as it has its
answer. The number of units is doubled a few times; the best throughput is the peak. Then ten times as many run. Fails if a
call fails or hangs, or if the throughput under overload is less than SHARE of the peak.
"""

import http.client
import os
import random
import sys
import threading
import time
from urllib.parse import urlsplit

import boto3

BLOCK = 64 << 10
OBJECT = 1 << 20
BODY = os.urandom(OBJECT)
LEVELS = 4
OVERLOAD = 10
# A call that takes longer hangs.
HANGS_S = 60


class Phase:
    """Counts the work between two moments."""

    def __init__(self):
        self.stop = threading.Event()
        self.lock = threading.Lock()
        self.bytes = {"written": 0, "read": 0, "s3": 0}
        self.errors = []

    def done(self, kind, count):
        with self.lock:
            self.bytes[kind] += count

    def work(self, step):
        """Repeats a step until the end of the phase."""
        try:
            while not self.stop.is_set():
                step()
        except Exception as error:  # pylint: disable=broad-except
            with self.lock:
                self.errors.append(repr(error))
            self.stop.set()


def writer(phase, directory, number):
    path = os.path.join(directory, f"file-{number}")
    handle = os.open(path, os.O_RDWR)
    places = random.Random(number)

    def step():
        written = os.pwrite(handle, BODY[:BLOCK], places.randrange(64) * BLOCK)
        os.fsync(handle)
        phase.done("written", written)

    phase.work(step)
    os.close(handle)


def reader(phase, directory, number):
    places = random.Random(number)

    def step():
        name = places.choice(os.listdir(directory))
        with open(os.path.join(directory, name), "rb") as file:
            file.seek(places.randrange(64) * BLOCK)
            phase.done("read", len(file.read(BLOCK)))

    phase.work(step)


def object_client(phase, urls):
    put, get = urls
    parts = urlsplit(put)
    connection = http.client.HTTPConnection(parts.netloc, timeout=HANGS_S)

    def ask(method, url, body=None):
        target = urlsplit(url)
        connection.request(method, f"{target.path}?{target.query}", body)
        answer = connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{method}: {answer.status} {content[:200]}")
        return content

    def step():
        ask("PUT", put, BODY)
        if ask("GET", get) != BODY:
            raise RuntimeError("GET: other bytes than were PUT")
        phase.done("s3", 2 * OBJECT)

    phase.work(step)
    connection.close()


def run(units, seconds, directory, sign):
    """Runs `units` units of load for `seconds` seconds. Returns MiB per second, by kind."""
    phase = Phase()
    jobs = [(writer, (phase, directory, number)) for number in range(4 * units)]
    jobs += [(reader, (phase, directory, number)) for number in range(2 * units)]
    jobs += [(object_client, (phase, sign(f"object-{number}"))) for number in range(2 * units)]
    threads = [threading.Thread(target=job, args=arguments, daemon=True) for job, arguments in jobs]
    begun = time.monotonic()
    for thread in threads:
        thread.start()
    phase.stop.wait(seconds)
    took = time.monotonic() - begun
    done = dict(phase.bytes)
    phase.stop.set()
    for thread in threads:
        thread.join(HANGS_S)
    hanging = sum(thread.is_alive() for thread in threads)
    rates = {kind: count / took / 2**20 for kind, count in done.items()}
    shown = ", ".join(f"{kind} {rate:.1f}" for kind, rate in rates.items())
    print(f"{len(threads)} clients: {shown} MiB/s", flush=True)
    if phase.errors or hanging:
        sys.exit(f"{hanging} calls hang, {len(phase.errors)} failed: {phase.errors[:3]}")
    return rates


def main():
    directory, endpoint, seconds, share = sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])
    bucket = os.path.basename(directory)
    os.makedirs(directory, exist_ok=True)
    s3 = boto3.client("s3", endpoint_url=endpoint)

    def sign(key):
        params = {"Bucket": bucket, "Key": f"objects/{key}"}
        return tuple(s3.generate_presigned_url(call, params, 3600) for call in ("put_object", "get_object"))

    files = os.path.join(directory, "files")
    os.makedirs(files)
    # Created before the load starts: the creation of a file blocks its whole directory until the answer.
    for number in range(4 * OVERLOAD * 2 ** (LEVELS - 1)):
        with open(os.path.join(files, f"file-{number}"), "wb") as file:
            file.truncate(64 * BLOCK)
    peak, units = {"written": 0, "read": 0, "s3": 0}, 1
    best = 0
    for level in range(LEVELS):
        rates = run(2**level, seconds, files, sign)
        if sum(rates.values()) > best:
            best, units, peak = sum(rates.values()), 2**level, rates
    over = run(OVERLOAD * units, 2 * seconds, files, sign)
    kept = sum(over.values()) / best
    print(f"peak with {8 * units} clients: {best:.1f} MiB/s; ten times as many: {kept * 100:.0f} % of it")
    if kept < share:
        sys.exit(f"less than {share * 100:.0f} % of the peak gets done under overload")
    for kind, rate in over.items():
        if peak[kind] > 0 and rate <= 0:
            sys.exit(f"nothing at all is {kind} under overload")


main()
