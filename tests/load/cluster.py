"""Works on the mounts and S3 endpoints of several machines at once while they are disturbed, and knows what was acknowledged.

cluster.py work DIRECTORY PREFIX ROUND SEED MACHINE…: works until DIRECTORY/stop exists, then compares everything, from each machine.
cluster.py check DIRECTORY PREFIX MACHINE…: compares everything that earlier rounds left, from each mount and over S3.

DIRECTORY/N/mnt is the mount of machine N, whose network namespace is PREFIX-N and has an S3 endpoint at 127.0.0.1:9000. Lines of
DIRECTORY/outages say when programs at a machine may fail and wait: `TIME open|close MACHINE all|s3`, by the clock of /proc/uptime. Any other
error is a failure, and so is a call that takes longer than HANGS_S.

- registers: files with one value, replaced by write and fsync, by rename, or by PUT. A read must return the latest completed write, or one
  that overlaps it: histories are linearizable.
- logs: lines appended by all machines. Each is there once, in the order of time, whole.
- counter: incremented under flock. No value is given twice, and none is lost.
- names: files that are created, renamed and removed; what was acknowledged is so.
- claims: files that several machines create with O_EXCL, or PUT with If-None-Match, at the same time. At most one succeeds.
- blocks: files of some MiB, compared with their checksums at other machines.
"""

import ctypes
import errno
import fcntl
import hashlib
import http.client
import json
import os
import random
import sys
import threading
import time
import traceback
from urllib.parse import urlsplit

import boto3
import botocore

BUCKET = "load"
ENDPOINT = "http://127.0.0.1:9000"
# A call that takes longer hangs.
HANGS_S = 60
# Of a call that takes longer, the place where it waits is noted.
PAUSES_S = 9
# Threads of each machine.
POSIX_THREADS = 3
S3_THREADS = 1
REGISTERS = 6
LOGS = 2
# Live blocks of each machine.
BLOCKS = 5
FOREVER = float("inf")
CLONE_NEWNET = 0x40000000
LIBC = ctypes.CDLL(None, use_errno=True)


def now():
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def body(value, size):
    """The content of a register: its value, and bytes that follow from it."""
    line = f"{value}\n".encode()
    return (line * (size // len(line) + 1))[:size]


def value_of(content, size):
    """The value of a register, or None if the content is not whole."""
    value = content.split(b"\n", 1)[0].decode(errors="replace")
    return value if content == body(value, size) else None


def block(seed):
    chooser = random.Random(seed)
    return chooser.randbytes(chooser.randrange(200_000, 2_000_000))


class Failure(Exception):
    """What must never happen."""


class Refused(Exception):
    """An answer of S3 that is an error."""


class Call:
    """One call of a program, from its begin to its end."""

    def __init__(self, machine, kind, what):
        self.machine, self.kind, self.what = machine, kind, what
        self.start, self.end, self.error = now(), FOREVER, None
        self.thread = threading.get_native_id()

    def __str__(self):
        took = "not ended" if self.end == FOREVER else f"{self.end - self.start:.1f} s"
        return f"{self.start:.2f} machine {self.machine} {self.kind}: {self.what}: {took} {self.error or ''}"


class Calls:
    """All calls, for the judgement at the end."""

    def __init__(self):
        self.lock = threading.Lock()
        self.running = {}
        self.ended = []

    def run(self, machine, kind, what, action):
        """Returns the call and the result of the action, which is None if it failed."""
        call = Call(machine, kind, what)
        with self.lock:
            self.running[id(call)] = call
        result = None
        try:
            result = action()
        except (OSError, http.client.HTTPException, Refused) as error:
            call.error = repr(error)
        call.end = now()
        with self.lock:
            del self.running[id(call)]
            self.ended.append(call)
        return call, result


class Register:
    """The history of a register. Values are unique."""

    def __init__(self, name, size, initial, doubtful):
        self.name, self.size = name, size
        self.lock = threading.Lock()
        # Value: when its write began and ended.
        self.writes = {initial: (-FOREVER, -FOREVER)}
        self.writes.update({value: (-FOREVER, FOREVER) for value in doubtful})
        self.reads = []
        self.doubtful = set(doubtful)

    def begins(self, value):
        with self.lock:
            self.writes[value] = (now(), FOREVER)
            self.doubtful.add(value)

    def ends(self, value):
        with self.lock:
            self.writes[value] = (self.writes[value][0], now())
            self.doubtful.discard(value)

    def was_read(self, call, content):
        value = value_of(content, self.size)
        if value is None:
            raise Failure(f"{self.name} is not whole: {len(content)} bytes, {content[:80]!r}; {call}")
        with self.lock:
            if value not in self.writes:
                raise Failure(f"{self.name} has a value that nobody wrote: {value}; {call}")
            self.reads.append((value, call.start, call.end, str(call)))
        return value

    def check(self):
        """Gibbons and Korach: each value has a zone, from the first end to the last begin of the calls that have to do with it."""
        zones = {value: [end, start, ""] for value, (start, end) in self.writes.items()}
        seen = set()
        for value, start, end, text in self.reads:
            if end < self.writes[value][0]:
                raise Failure(f"{self.name}: read before it was written: {text}")
            seen.add(value)
            zone = zones[value]
            if start > zone[1]:
                zone[1], zone[2] = start, text
            zone[0] = min(zone[0], end)
        # A write without an end that nobody saw may not have happened.
        zones = {value: zone for value, zone in zones.items() if value in seen or self.writes[value][1] != FOREVER}
        forward = sorted((zone[0], zone[1], value) for value, zone in zones.items() if zone[0] < zone[1])
        for (_, last, value), (first, _, other) in zip(forward, forward[1:]):
            if first < last:
                raise Failure(self.explain(value, other, zones))
        for value, (first, last, _) in zones.items():
            if first >= last:
                for low, high, other in forward:
                    if low < last and first < high:
                        raise Failure(self.explain(other, value, zones))

    def explain(self, value, other, zones):
        lines = [f"{self.name}: no order of the calls explains what was read: {value} was there after {other} was written"]
        for name in (value, other):
            start, end = self.writes[name]
            lines.append(f"  {name}: written {start:.3f} to {end:.3f}, zone {zones[name][0]:.3f} to {zones[name][1]:.3f}")
            lines += [f"    read {text}" for read, _, _, text in self.reads if read == name][-4:]
        return "\n".join(lines)


class Names:
    """What names should be: their content, None for those that must not be, or a set of possibilities."""

    def __init__(self):
        self.lock = threading.Lock()
        self.wanted = {}

    def set(self, name, *contents):
        with self.lock:
            self.wanted[name] = set(contents)


class Work:
    def __init__(self, directory, prefix, number, seed, machines):
        self.directory, self.prefix, self.round, self.seed, self.machines = directory, prefix, number, seed, machines
        self.calls = Calls()
        self.failures = []
        self.stop = threading.Event()
        self.state = self.read_state()
        self.urls = {}
        self.lock = threading.Lock()
        # Lines of logs: when they were written. Results of the counter.
        self.lines = [{} for _ in range(LOGS)]
        self.counts, self.count_doubts = [], 0
        self.names = Names()
        self.claims = {}
        self.blocks = dict(self.state["blocks"])
        self.made = 0
        self.registers = []
        self.stale = 0

    def read_state(self):
        try:
            with open(f"{self.directory}/state.json", encoding="utf-8") as file:
                return json.load(file)
        except FileNotFoundError:
            return {"registers": {}, "counter": 0, "blocks": {}, "files": {}}

    def path(self, machine, name):
        return f"{self.directory}/{machine}/mnt/{BUCKET}/{name}"

    # --- S3 --------------------------------------------------------------------------------------------------------

    def enter(self, machine):
        """The thread makes its connections in the network of a machine from now on."""
        with open(f"/run/netns/{self.prefix}-{machine}", "rb") as file:
            if LIBC.setns(file.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")

    def signed(self, call, key):
        with self.lock:
            if (call, key) not in self.urls:
                client = boto3.client("s3", endpoint_url=ENDPOINT, region_name="us-east-1", config=botocore.config.Config(s3={"addressing_style": "path"})) if "client" not in self.__dict__ else self.client
                self.client = client
                self.urls[call, key] = client.generate_presigned_url(call, {"Bucket": BUCKET, "Key": key}, 36000)
            return self.urls[call, key]

    def ask(self, method, key, content=None, headers=None):
        parts = urlsplit(self.signed({"PUT": "put_object", "GET": "get_object"}[method], key))
        connection = http.client.HTTPConnection(parts.netloc, timeout=2 * HANGS_S)
        try:
            connection.request(method, f"{parts.path}?{parts.query}", content, headers or {})
            answer = connection.getresponse()
            received = answer.read()
        finally:
            connection.close()
        if answer.status == 412:
            return None
        if answer.status != 200:
            raise Refused(f"{answer.status} {received[:200]}")
        return received

    # --- steps -----------------------------------------------------------------------------------------------------

    def unique(self):
        with self.lock:
            self.made += 1
            return f"{self.round}.{self.made}"

    def read_file(self, machine, name):
        try:
            return self.read_once(machine, name)
        except OSError as error:
            # The kernel looks a name up twice. Where it is replaced again in between, a program sees that: a known weakness, which the
            # report counts.
            if error.errno != errno.ESTALE:
                raise
            self.stale += 1
            return self.read_once(machine, name)

    def read_once(self, machine, name):
        with open(self.path(machine, name), "rb") as file:
            return file.read()

    def write_new(self, machine, name, content, flags=os.O_EXCL):
        handle = os.open(self.path(machine, name), os.O_CREAT | os.O_WRONLY | flags)
        try:
            for off in range(0, len(content), 1 << 20):
                os.write(handle, content[off : off + (1 << 20)])
            os.fsync(handle)
        finally:
            os.close(handle)

    def sync_directory(self, machine, name):
        handle = os.open(self.path(machine, name), os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def write_register(self, machine, chooser, put):
        register = chooser.choice(self.registers)
        value = f"{register.name}.{self.unique()}.m{machine}"
        content = body(value, register.size)

        def in_place():
            handle = os.open(self.path(machine, register.name), os.O_WRONLY)
            try:
                os.pwrite(handle, content, 0)
                os.fsync(handle)
            finally:
                os.close(handle)

        def by_rename():
            self.write_new(machine, f"temporary/{value.replace(chr(47), chr(45))}", content)
            os.rename(self.path(machine, f"temporary/{value.replace(chr(47), chr(45))}"), self.path(machine, register.name))
            self.sync_directory(machine, "registers")

        if put:
            kind, what, action = "s3", "PUT", lambda: self.ask("PUT", register.name, content)
        elif register.size < 4096 and chooser.randrange(2) == 0:
            kind, what, action = "posix", "write", in_place
        else:
            kind, what, action = "posix", "rename to", by_rename
        register.begins(value)
        call, _ = self.calls.run(machine, kind, f"{what} {value}", action)
        if call.error is None:
            register.ends(value)

    def read_register(self, machine, chooser, get):
        register = chooser.choice(self.registers)
        if get:
            call, content = self.calls.run(machine, "s3", f"GET {register.name}", lambda: self.ask("GET", register.name))
        else:
            call, content = self.calls.run(machine, "posix", f"read {register.name}", lambda: self.read_file(machine, register.name))
        if call.error is None:
            register.was_read(call, content)

    def log_name(self, number):
        return f"logs/{self.round}-{number}"

    def append(self, machine, chooser):
        number = chooser.randrange(LOGS)
        token = f"{self.unique()}.m{machine}"
        line = f"{token} {'x' * chooser.randrange(300)} {token}\n".encode()

        def action():
            handle = os.open(self.path(machine, self.log_name(number)), os.O_WRONLY | os.O_APPEND)
            try:
                os.write(handle, line)
                os.fsync(handle)
            finally:
                os.close(handle)

        with self.lock:
            self.lines[number][token] = (line, now(), FOREVER)
        call, _ = self.calls.run(machine, "posix", f"append {token} to {self.log_name(number)}", action)
        if call.error is None:
            with self.lock:
                self.lines[number][token] = (line, call.start, call.end)

    def read_log(self, machine, chooser):
        number = chooser.randrange(LOGS)
        call, content = self.calls.run(machine, "posix", f"read {self.log_name(number)}", lambda: self.read_file(machine, self.log_name(number)))
        if call.error is None:
            self.check_log(number, content, call)

    def check_log(self, number, content, call):
        with self.lock:
            lines = dict(self.lines[number])
        found = {}
        for place, line in enumerate(content.splitlines(keepends=True)):
            token = line.split(b" ", 1)[0].decode(errors="replace")
            if token not in lines or lines[token][0] != line:
                raise Failure(f"{self.log_name(number)}: a line that nobody wrote: {line[:120]!r} at line {place}; {call}")
            if token in found:
                raise Failure(f"{self.log_name(number)}: {token} is there twice; {call}")
            found[token] = place
        missing = [token for token, (_, _, end) in lines.items() if end < call.start and token not in found]
        if missing:
            raise Failure(f"{self.log_name(number)}: acknowledged lines are missing: {sorted(missing)[:9]} of {len(lines)}, {len(content)} bytes; {call}")
        earliest, later = FOREVER, ""
        for token in sorted(found, key=found.get, reverse=True):
            _, start, end = lines[token]
            if earliest < start:
                raise Failure(f"{self.log_name(number)}: {token} is before {later}, which was complete before it began; {call}")
            if end < earliest:
                earliest, later = end, token

    def increment(self, machine):
        def action():
            handle = os.open(self.path(machine, "counter"), os.O_RDWR)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
                count = int(os.pread(handle, 100, 0)) + 1
                os.pwrite(handle, f"{count:020}".encode(), 0)
                os.fsync(handle)
                return count
            finally:
                os.close(handle)

        with self.lock:
            self.count_doubts += 1
        call, count = self.calls.run(machine, "posix", "increment the counter", action)
        if call.error is None:
            with self.lock:
                self.count_doubts -= 1
                self.counts.append((count, str(call)))

    def create(self, machine, chooser):
        """Creates a file, and renames or removes it perhaps."""
        name = f"names/{self.round}-{self.unique()}.m{machine}"
        token = name.encode()
        self.names.set(name, None, b"", token)
        call, _ = self.calls.run(machine, "posix", f"create {name}", lambda: self.write_new(machine, name, token))
        if call.error is not None:
            return
        self.names.set(name, token)
        kind = chooser.randrange(4)
        if kind == 0:
            other = f"{name}.renamed"
            self.names.set(name, None, token)
            self.names.set(other, None, token)

            def action():
                os.rename(self.path(machine, name), self.path(machine, other))
                self.sync_directory(machine, "names")

            call, _ = self.calls.run(machine, "posix", f"rename {name}", action)
            if call.error is None:
                self.names.set(name, None)
                self.names.set(other, token)
        elif kind == 1:
            self.names.set(name, None, token)

            def remove():
                os.unlink(self.path(machine, name))
                self.sync_directory(machine, "names")

            call, _ = self.calls.run(machine, "posix", f"unlink {name}", remove)
            if call.error is None:
                self.names.set(name, None)

    def claim(self, machine, mine, put):
        """Threads of all machines come to the same name at about the same time."""
        name = f"claims/{self.round}-{int(now() * 2)}"
        if name in mine:
            return
        mine.add(name)
        token = f"{name} {self.unique()}.m{machine}".encode()
        with self.lock:
            tries = self.claims.setdefault(name, {})
            tries[token] = "doubtful"

        def exclusive():
            try:
                handle = os.open(self.path(machine, name), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            except FileExistsError:
                return "taken"
            try:
                os.write(handle, token)
                os.fsync(handle)
            finally:
                os.close(handle)
            return "won"

        def conditional():
            return "taken" if self.ask("PUT", name, token, {"If-None-Match": "*"}) is None else "won"

        kind, action = ("s3", conditional) if put else ("posix", exclusive)
        call, result = self.calls.run(machine, kind, f"claim {name}", action)
        if call.error is None:
            with self.lock:
                tries[token] = result

    def make_block(self, machine, chooser, put):
        own = sorted(name for name in list(self.blocks) if f".m{machine}" in name)
        if len(own) >= BLOCKS:
            old = chooser.choice(own)
            with self.lock:
                seed = self.blocks.pop(old, None)
            if seed is None:
                return
            self.calls.run(machine, "posix", f"unlink {old}", lambda: os.unlink(self.path(machine, old)))
            return
        name = f"blocks/{self.unique()}.m{machine}"
        seed = f"{name} {self.seed}"
        content = block(seed)
        if put:
            call, _ = self.calls.run(machine, "s3", f"PUT {name}", lambda: self.ask("PUT", name, content))
        else:
            call, _ = self.calls.run(machine, "posix", f"write {name}", lambda: self.write_new(machine, name, content))
        if call.error is None:
            with self.lock:
                self.blocks[name] = seed

    def read_block(self, machine, chooser, get):
        with self.lock:
            if not self.blocks:
                return
            name = chooser.choice(sorted(self.blocks))
            seed = self.blocks[name]
        if get:
            call, content = self.calls.run(machine, "s3", f"GET {name}", lambda: self.tolerant(name, lambda: self.ask("GET", name)))
        else:
            call, content = self.calls.run(machine, "posix", f"read {name}", lambda: self.tolerant(name, lambda: self.read_file(machine, name)))
        if call.error is None and content is not None and content != block(seed):
            raise Failure(f"{name} has other bytes: {describe(content, block(seed))}; {call}")

    def tolerant(self, name, action):
        """None if the file was removed in the meantime."""
        try:
            return action()
        except (OSError, http.client.HTTPException, Refused):
            if name in self.blocks:
                raise
            return None

    # --- threads ---------------------------------------------------------------------------------------------------

    def posix_step(self, machine, chooser, mine):
        step = chooser.choice("wwwwwrrrrrrraaallccnnkkbBB")
        {
            "w": lambda: self.write_register(machine, chooser, False),
            "r": lambda: self.read_register(machine, chooser, False),
            "a": lambda: self.append(machine, chooser),
            "l": lambda: self.read_log(machine, chooser),
            "c": lambda: self.increment(machine),
            "n": lambda: self.create(machine, chooser),
            "k": lambda: self.claim(machine, mine, False),
            "b": lambda: self.make_block(machine, chooser, False),
            "B": lambda: self.read_block(machine, chooser, False),
        }[step]()

    def s3_step(self, machine, chooser, mine):
        step = chooser.choice("wwwrrrrkkbBB")
        {
            "w": lambda: self.write_register(machine, chooser, True),
            "r": lambda: self.read_register(machine, chooser, True),
            "k": lambda: self.claim(machine, mine, True),
            "b": lambda: self.make_block(machine, chooser, True),
            "B": lambda: self.read_block(machine, chooser, True),
        }[step]()

    def thread(self, machine, kind, number):
        chooser, mine = random.Random(f"{self.seed} {self.round} {machine} {kind} {number}"), set()
        try:
            if kind == "s3":
                self.enter(machine)
            while not self.stop.is_set():
                errors = len(self.calls.ended)
                self.s3_step(machine, chooser, mine) if kind == "s3" else self.posix_step(machine, chooser, mine)
                failed = any(call.error for call in self.calls.ended[errors:])
                self.stop.wait(0.3 if failed else chooser.random() * 0.08)
        except Failure as failure:
            self.fail(str(failure))
        except Exception:  # pylint: disable=broad-except
            self.fail(traceback.format_exc())

    def fail(self, text):
        with self.lock:
            self.failures.append(text)
        print(f"{now():.2f} FAILURE: {text}", flush=True)

    def prepare(self):
        machine = self.machines[0]
        for name in ("", "registers", "temporary", "logs", "names", "claims", "blocks"):
            os.makedirs(self.path(machine, name), exist_ok=True)
        for number in range(REGISTERS):
            name, size = f"registers/{number}", 100 if number % 2 == 0 else 30_000
            state = self.state["registers"].get(str(number))
            if state is None:
                state = {"value": f"{name}.first", "doubtful": []}
                self.write_new(machine, name, body(state["value"], size))
            self.registers.append(Register(name, size, state["value"], state["doubtful"]))
        for number in range(LOGS):
            self.write_new(machine, self.log_name(number), b"")
        if not os.path.exists(self.path(machine, "counter")):
            self.write_new(machine, "counter", b"0")
        self.sync_directory(machine, "")

    def run(self):
        self.prepare()
        jobs = [(machine, "posix", number) for machine in self.machines for number in range(POSIX_THREADS)]
        jobs += [(machine, "s3", number) for machine in self.machines for number in range(S3_THREADS)]
        threads = [threading.Thread(target=self.thread, args=job, daemon=True) for job in jobs]
        for thread in threads:
            thread.start()
        print(f"{now():.2f} work begins", flush=True)
        noted = 0
        while not os.path.exists(f"{self.directory}/stop"):
            time.sleep(0.1)
            with self.calls.lock:
                long = [call for call in self.calls.running.values() if now() - call.start > PAUSES_S]
            if long and now() > noted + PAUSES_S:
                noted = now()
                self.note_pause(long)
        self.stop.set()
        end = now() + HANGS_S + 10
        for thread in threads:
            thread.join(max(0.1, end - now()))
        self.judge_calls()
        if not self.failures:
            self.check_all()
        self.report()

    def note_pause(self, calls):
        """Where calls that take long wait, and what the mounts do."""
        with open(f"{self.directory}/pauses-{self.round}", "a", encoding="utf-8") as file:
            for call in calls:
                file.write(f"{now():.2f} {call}\n{kernel_stack('self', call.thread)}")
            for process in filter(str.isdigit, os.listdir("/proc")):
                try:
                    with open(f"/proc/{process}/cmdline", encoding="utf-8") as line:
                        command = line.read()
                    threads = os.listdir(f"/proc/{process}/task") if f'mount-process\0{{"dir":"{self.directory}/' in command else []
                except OSError:
                    continue
                for thread in threads:
                    stack = kernel_stack(process, thread)
                    if "fuse" in stack and "fuse_dev_do_read" not in stack:
                        file.write(f"{now():.2f} a thread of {command[:160]!r}\n{stack}")

    # --- judgement -------------------------------------------------------------------------------------------------

    def outages(self):
        """Machine and kind: when programs there may fail."""
        found, opened = [], {}
        with open(f"{self.directory}/outages", encoding="utf-8") as file:
            for line in file:
                moment, what, machine, kind = line.split()
                if what == "open":
                    opened.setdefault((machine, kind), float(moment))
                elif (machine, kind) in opened:
                    found.append((machine, kind, opened.pop((machine, kind)), float(moment)))
        return found + [(machine, kind, since, FOREVER) for (machine, kind), since in opened.items()]

    def judge_calls(self):
        outages = self.outages()
        with self.calls.lock:
            calls = self.calls.ended + list(self.calls.running.values())
        self.longest, self.excused = None, 0
        errors = []
        for call in calls:
            own = [(start, end) for machine, kind, start, end in outages if machine == call.machine and kind in ("all", call.kind)]
            own = [(max(start, call.start), min(end, call.end, now())) for start, end in own if start <= call.end and call.start <= end]
            took = min(call.end, now()) - call.start - sum(end - start for start, end in own)
            if took > HANGS_S:
                errors.append(f"hangs: {call}")
            elif call.error and not own:
                errors.append(f"failed: {call}")
            elif call.error:
                self.excused += 1
            if not own and (self.longest is None or took > self.longest[0]):
                self.longest = (took, call)
        errors.sort(key=lambda text: not text.startswith("hangs"))
        for text in errors[:12]:
            self.fail(text)
        if len(errors) > 12:
            self.fail(f"and {len(errors) - 12} more calls")
        self.count_calls = len(calls)

    def check_all(self):
        try:
            for register in self.registers:
                for machine in self.machines:
                    call, content = self.calls.run(machine, "posix", f"read {register.name} at last", lambda: self.read_file(machine, register.name))
                    if call.error:
                        raise Failure(str(call))
                    value = register.was_read(call, content)
                register.check()
                self.state["registers"][register.name.split("/")[1]] = {"value": value, "doubtful": sorted(register.doubtful - {value})}
            self.check_counter()
            self.check_claims()
            for machine in self.machines:
                self.check_machine(machine)
            self.keep()
        except Failure as failure:
            self.fail(str(failure))
        except Exception:  # pylint: disable=broad-except
            self.fail(traceback.format_exc())

    def check_counter(self):
        values = {int(self.read_file(machine, "counter")) for machine in self.machines}
        if len(values) != 1:
            raise Failure(f"the counter differs: {values}")
        value, seen = values.pop(), {}
        for count, text in self.counts:
            if count in seen:
                raise Failure(f"two programs held the lock: both counted to {count}: {seen[count]}; {text}")
            seen[count] = text
        first = self.state["counter"] + len(self.counts)
        if not first <= value <= first + self.count_doubts:
            raise Failure(f"the counter is {value}, but was {self.state['counter']} and {len(self.counts)} times incremented, {self.count_doubts} perhaps")
        self.state["counter"] = value

    def check_claims(self):
        for name, tries in self.claims.items():
            won = [token for token, result in tries.items() if result == "won"]
            doubtful = [token for token, result in tries.items() if result == "doubtful"]
            if len(won) > 1:
                raise Failure(f"{name}: several succeeded: {won}")
            if not won and not doubtful:
                raise Failure(f"{name}: it was there for everybody, and nobody made it: {tries}")
            if won:
                self.names.set(name, won[0])
            else:
                taken = any(result == "taken" for result in tries.values())
                self.names.set(name, *([] if taken else [None]), b"", *doubtful)

    def check_machine(self, machine):
        for number in range(LOGS):
            call, content = self.calls.run(machine, "posix", f"read {self.log_name(number)} at last", lambda: self.read_file(machine, self.log_name(number)))
            if call.error:
                raise Failure(str(call))
            self.check_log(number, content, call)
        self.check_names(machine)
        for name, seed in self.blocks.items():
            content = self.read_file(machine, name)
            if content != block(seed):
                raise Failure(f"machine {machine}: {name} has other bytes: {describe(content, block(seed))}")

    def check_names(self, machine):
        for directory in ("names", "claims"):
            listed = {f"{directory}/{name}" for name in os.listdir(self.path(machine, directory))}
            known = {name for name in set(self.names.wanted) | set(self.state["files"]) if name.startswith(directory)}
            if listed - known:
                raise Failure(f"machine {machine}: names that nobody made: {sorted(listed - known)[:9]}")
            for name in sorted(known):
                wanted = self.names.wanted.get(name)
                if wanted is None:
                    wanted = {self.state["files"][name].encode()}
                try:
                    content = self.read_file(machine, name)
                except FileNotFoundError:
                    content = None
                if (content is not None) != (name in listed):
                    raise Failure(f"machine {machine}: {name} is in its directory: {name in listed}, can be read: {content is not None}")
                if content not in wanted:
                    raise Failure(f"machine {machine}: {name} is {content!r}, should be one of {wanted}")
                # From here on all must see the same.
                if name in self.names.wanted:
                    self.names.wanted[name] = {content}

    def keep(self):
        """What later rounds must find. Of the small files, those of the last rounds."""
        machine = self.machines[0]
        files = dict(self.state["files"])
        for name, contents in self.names.wanted.items():
            content = next(iter(contents))
            if content is not None:
                files[name] = content.decode()
        for number in range(LOGS):
            files[self.log_name(number)] = self.read_file(machine, self.log_name(number)).decode()
        while len(files) > 600:
            name = next(iter(files))
            del files[name]
            os.unlink(self.path(machine, name))
        self.state.update(files=files, blocks=self.blocks)
        with open(f"{self.directory}/state.json", "w", encoding="utf-8") as file:
            json.dump(self.state, file)

    def report(self):
        longest = "none" if self.longest is None else f"{self.longest[0]:.1f}"
        print(f"{now():.2f} {self.count_calls} calls, {self.excused} failed at machines that were away, {self.stale} times a stale handle, longest pause of the others {longest} s: {self.longest and self.longest[1]}")
        with open(f"{self.directory}/pause", "w", encoding="utf-8") as file:
            file.write(longest)
        slow = sorted(self.calls.ended, key=lambda call: call.start - call.end)[:8]
        for call in slow:
            print(f"slow: {call}")
        with self.calls.lock:
            with open(f"{self.directory}/calls-{self.round}", "w", encoding="utf-8") as file:
                file.writelines(f"{call}\n" for call in sorted(self.calls.ended, key=lambda call: call.start))
        for call in list(self.calls.running.values()):
            print(f"still running: {call}\n{kernel_stack('self', call.thread)}")
        sys.stdout.flush()
        # Threads that hang cannot be waited for.
        os._exit(1 if self.failures else 0)

    def check_everywhere(self):
        """Without any load: all that is known, from each mount and over S3 at each machine."""
        wanted = {f"registers/{number}": body(state["value"], 100 if int(number) % 2 == 0 else 30_000) for number, state in self.state["registers"].items()}
        wanted.update({name: content.encode() for name, content in self.state["files"].items()})
        wanted.update({name: block(seed) for name, seed in self.state["blocks"].items()})
        for machine in self.machines:
            self.enter(machine)
            for name, content in wanted.items():
                if self.read_file(machine, name) != content:
                    raise Failure(f"machine {machine}: {name} has other bytes")
                if self.ask("GET", name) != content:
                    raise Failure(f"machine {machine}: {name} has other bytes over S3")
            if int(self.read_file(machine, "counter")) != self.state["counter"]:
                raise Failure(f"machine {machine}: the counter has another value")
            self.check_listing(machine, wanted)
        print(f"{len(wanted)} files are the same everywhere")

    def check_listing(self, machine, wanted):
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        listed = {item["Key"]: item["Size"] for page in pages for item in page.get("Contents", [])}
        for name, content in wanted.items():
            if listed.get(name) != len(content):
                raise Failure(f"machine {machine}: S3 lists {name} with {listed.get(name)} bytes, it has {len(content)}")
        walked = set()
        top = self.path(machine, "")
        for parent, _, names in os.walk(top):
            walked |= {os.path.relpath(f"{parent}/{name}", top) for name in names}
        objects = {name for name in listed if not name.endswith("/")}
        if walked != objects:
            raise Failure(f"machine {machine}: the tree and the list of S3 differ: {sorted(walked ^ objects)[:9]}")


def kernel_stack(process, thread):
    try:
        with open(f"/proc/{process}/task/{thread}/stack", encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        return str(error)


def describe(found, wanted):
    """Where two contents differ first."""
    place = next((place for place, (one, other) in enumerate(zip(found, wanted)) if one != other), min(len(found), len(wanted)))
    return f"{len(found)} bytes, should be {len(wanted)}, the first difference at {place}; sha256 {hashlib.sha256(found).hexdigest()[:12]}"


def main():
    what, directory, prefix = sys.argv[1:4]
    if what == "work":
        Work(directory, prefix, int(sys.argv[4]), int(sys.argv[5]), sys.argv[6:]).run()
    else:
        Work(directory, prefix, -1, 0, sys.argv[4:]).check_everywhere()


main()
