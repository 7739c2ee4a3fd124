#!/usr/bin/env python3
"""outlive.py DIR SECONDS [SEED]: works on a mount whose node may be killed at any time, and fails if anything of that is seen.

Writes, reads, renames, removes, truncates and appends; keeps files open that have no name, holds locks (flock and fcntl), works from
inside a directory, and compares everything with what it did. Prints the longest pause.
"""

import fcntl
import hashlib
import os
import random
import sys
import time

BYTES_MAX = 200_000


def content(number, length):
    block = hashlib.sha256(str(number).encode()).digest()
    return (block * (length // len(block) + 1))[:length]


class Work:
    def __init__(self, directory, seed):
        os.makedirs(directory, exist_ok=True)
        # All paths are relative: the process has its place inside the mount.
        os.chdir(directory)
        self.random = random.Random(seed)
        self.files = {}
        self.made = 0
        self.unnamed = []
        self.lock = open("lock", "w+b")
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        self.range = open("range", "w+b")
        fcntl.lockf(self.range, fcntl.LOCK_EX, 10, 5)

    def step(self):
        pick = self.random.choice
        kinds = [self.make, self.make, self.make, self.make_unnamed]
        if self.files:
            kinds += [self.read, self.read, self.append, self.overwrite, self.truncate, self.rename, self.remove, self.replace]
        pick(kinds)()

    def make(self):
        self.made += 1
        name, data = f"f{self.made}", content(self.made, self.random.randrange(BYTES_MAX))
        with open(name, "xb") as file:
            file.write(data)
            if self.random.randrange(3) == 0:
                file.flush()
                os.fsync(file.fileno())
        self.files[name] = data

    def make_unnamed(self):
        if len(self.unnamed) > 20:
            file, data = self.unnamed.pop(self.random.randrange(len(self.unnamed)))
            file.seek(0)
            assert file.read() == data, "a file without a name has changed"
            file.close()
        self.made += 1
        data = content(self.made, self.random.randrange(BYTES_MAX))
        file = open("unnamed", "x+b")
        file.write(data)
        os.unlink("unnamed")
        self.unnamed.append((file, data))

    def one(self):
        return self.random.choice(list(self.files))

    def read(self):
        name = self.one()
        with open(name, "rb") as file:
            assert file.read() == self.files[name], f"{name} has changed"

    def append(self):
        name, more = self.one(), content(self.made, 3000)
        with open(name, "ab") as file:
            file.write(more)
        self.files[name] += more

    def overwrite(self):
        name = self.one()
        data = bytearray(self.files[name])
        if not data:
            return
        off, part = self.random.randrange(len(data)), content(-self.made, 4096)
        with open(name, "r+b") as file:
            file.seek(off)
            file.write(part)
        data[off : off + len(part)] = part
        self.files[name] = bytes(data)

    def truncate(self):
        name = self.one()
        size = self.random.randrange(len(self.files[name]) + 1)
        os.truncate(name, size)
        self.files[name] = self.files[name][:size]

    def rename(self):
        name = self.one()
        self.made += 1
        os.rename(name, f"r{self.made}")
        self.files[f"r{self.made}"] = self.files.pop(name)

    def replace(self):
        name, other = self.one(), self.one()
        if name != other:
            os.replace(name, other)
            self.files[other] = self.files.pop(name)

    def remove(self):
        name = self.one()
        os.unlink(name)
        del self.files[name]
        assert not os.path.exists(name)

    def check_locks(self):
        pid = os.fork()
        if pid == 0:
            # Another process must find the locks taken.
            status = 0
            for take in (self.try_flock, self.try_range):
                try:
                    take()
                    print("a lock was free that is held", file=sys.stderr)
                    status = 1
                except BlockingIOError:
                    pass
            os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0

    @staticmethod
    def try_flock():
        fcntl.flock(open("lock", "rb"), fcntl.LOCK_EX | fcntl.LOCK_NB)

    @staticmethod
    def try_range():
        fcntl.lockf(open("range", "r+b"), fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 5)

    def check_all(self):
        names = set(os.listdir(".")) - {"lock", "range"}
        assert names == set(self.files), names ^ set(self.files)
        for name, data in self.files.items():
            with open(name, "rb") as file:
                assert file.read() == data, f"{name} has changed"
        for file, data in self.unnamed:
            file.seek(0)
            assert file.read() == data, "a file without a name has changed"
        self.check_locks()


def main():
    directory, seconds = sys.argv[1], float(sys.argv[2])
    work = Work(directory, int(sys.argv[3]) if len(sys.argv) > 3 else 1)
    end, longest, steps = time.monotonic() + seconds, 0.0, 0
    while time.monotonic() < end:
        began = time.monotonic()
        work.step()
        if steps % 50 == 0:
            work.check_locks()
        longest = max(longest, time.monotonic() - began)
        steps += 1
        if len(work.files) > 300:
            for _ in range(100):
                work.remove()
    work.check_all()
    print(f"{steps} steps, {len(work.files)} files, longest pause {longest:.1f} s")


main()
