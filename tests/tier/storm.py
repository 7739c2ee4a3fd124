"""Changes files and keeps a copy of each, its shadow, in another directory. Calls may fail, because a node or a store is
down: then a read is repeated, and a changed file is restored from its shadow, as soon as that works.

storm.py run MOUNT SHADOW SECONDS SEED     create, overwrite, append, cut, remove, read; ends with status 1 if a byte is wrong
storm.py verify MOUNT SHADOW [ATTEMPTS]    checks that every file has the bytes of its shadow, with ATTEMPTS reads (default: 1)
"""

import os
import random
import sys
import time

NAMES = 90
SIZES = (1000, 6000, 40_000, 300_000, 1_500_000, 6_000_000)
# Longest time that calls may fail: a store or a node is not down longer.
PATIENCE_S = 240
PART = 1 << 20


class Storm:
    def __init__(self, mount, shadow, seed):
        self.mount, self.shadow = mount, shadow
        self.random = random.Random(seed)
        # The directory below the mount must not be mistaken for it.
        self.below = os.stat(os.path.dirname(mount)).st_dev
        self.counts = {}

    def at(self, name):
        return os.path.join(self.mount, name)

    def kept(self, name):
        return os.path.join(self.shadow, name)

    def is_mounted(self):
        try:
            return os.stat(self.mount).st_dev != self.below
        except OSError:
            return False

    def count(self, what):
        self.counts[what] = self.counts.get(what, 0) + 1

    def change(self, path, off, data, cut):
        """Writes `data` at `off` and ends the file at `cut`, durably."""
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(handle, data[done : done + PART], off + done)
            if cut is not None:
                os.ftruncate(handle, cut)
            os.fsync(handle)
        finally:
            os.close(handle)

    def restore(self, name):
        """Makes the file equal to its shadow, from any state."""
        if not os.path.exists(self.kept(name)):
            if os.path.exists(self.at(name)):
                os.unlink(self.at(name))
            return
        with open(self.kept(name), "rb") as file:
            data = file.read()
        self.change(self.at(name), 0, data, len(data))

    def until_it_works(self, work, name, error):
        """Repeats `work` after an error, until it succeeds."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            self.count(f"failed: {error.strerror}")
            time.sleep(0.3)
            try:
                if self.is_mounted():
                    return work(name)
            except OSError as next_error:
                error = next_error
        sys.exit(f"does not work any more: {name}: {error}")

    def step(self):
        name = f"file{self.random.randrange(NAMES)}"
        exists = os.path.exists(self.kept(name))
        size = os.path.getsize(self.kept(name)) if exists else 0
        what = self.random.choices(
            ("create", "overwrite", "append", "cut", "remove", "read"), (5, 8, 2, 1, 4, 6) if exists else (1, 0, 0, 0, 0, 0)
        )[0]
        self.count(what)
        again = self.read if what == "read" else self.restore
        try:
            if not self.is_mounted():
                raise OSError(0, "not mounted")
            if what == "read":
                return self.read(name)
            if what == "remove":
                os.unlink(self.at(name))
                return os.unlink(self.kept(name))
            change = self.chosen(what, size)
            self.change(self.at(name), *change)
        except OSError as error:
            return self.until_it_works(again, name, error)
        self.change(self.kept(name), *change)

    def chosen(self, what, size):
        """Offset, bytes and new end of a change. The end is None if it is not cut."""
        length = self.random.choice(SIZES) + self.random.randrange(1000)
        if what == "create":
            return 0, self.random.randbytes(length), length
        if what == "append":
            return size, self.random.randbytes(length % 700_000), None
        if what == "cut":
            return 0, b"", self.random.randrange(size + 1)
        off = self.random.randrange(size + 1)
        return off, self.random.randbytes(min(length, size - off)), None

    def read(self, name):
        size = os.path.getsize(self.kept(name))
        off = self.random.randrange(size + 1)
        length = min(self.random.choice(SIZES), size - off)
        with open(self.at(name), "rb") as file, open(self.kept(name), "rb") as kept:
            file.seek(off)
            kept.seek(off)
            if file.read(length) != kept.read(length):
                sys.exit(f"other bytes than written: {name}, {length} from {off}")

    def run(self, seconds):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.step()
        print(f"done: {self.counts}")


def same(one, other):
    with open(one, "rb") as file, open(other, "rb") as kept:
        while True:
            part = file.read(PART)
            if part != kept.read(PART):
                return False
            if not part:
                return True


def verify(mount, shadow, attempts):
    names, kept = sorted(os.listdir(mount)), sorted(os.listdir(shadow))
    if names != kept:
        sys.exit(f"other names than there should be: {set(names) ^ set(kept)}")
    for name in names:
        for attempt in range(attempts):
            try:
                if not same(os.path.join(mount, name), os.path.join(shadow, name)):
                    sys.exit(f"other bytes than written: {name}")
                break
            except OSError as error:
                print(f"{name}, attempt {attempt + 1}: {error}")
        else:
            sys.exit(f"cannot be read: {name}")
    total = sum(os.path.getsize(os.path.join(shadow, name)) for name in names)
    print(f"{len(names)} files, {total} bytes as written")


if __name__ == "__main__":
    verb, mount, shadow, *rest = sys.argv[1:]
    if verb == "run":
        Storm(mount, shadow, int(rest[1])).run(float(rest[0]))
    else:
        verify(mount, shadow, int(rest[0]) if rest else 1)
