#!/usr/bin/env python3
"""Locks of programs, signals, and calls of few programs, on one directory: calls.py DIR. Prints what does not hold."""

import concurrent.futures
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import time

SELF = [sys.executable, os.path.abspath(__file__)]
FAILED = []


def check(name, holds):
    if not holds:
        FAILED.append(name)
        print("does not hold:", name)


def range_lock(fd, kind, start=0, length=0, wait=False):
    """fcntl(2). Returns whether it was granted."""
    flags = kind if wait else kind | fcntl.LOCK_NB
    try:
        fcntl.lockf(fd, flags, length, start)
        return True
    except BlockingIOError:
        return False


class Other:
    """Another process that runs commands: see `other_process`."""

    def __init__(self, path, mode):
        self.process = subprocess.Popen(
            [*SELF, "--other", path, mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def send(self, command):
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def answers(self, seconds):
        return bool(select.select([self.process.stdout], [], [], seconds)[0])

    def ask(self, command):
        self.send(command)
        return self.process.stdout.readline().strip()

    def end(self):
        self.process.stdin.close()
        self.process.wait(timeout=10)


def other_process(path, mode):
    """Executes commands from standard input: lock KIND START LENGTH [wait], flock [wait], close, test."""
    caught = []
    signal.signal(signal.SIGUSR1, lambda *_: caught.append(1) or (_ for _ in ()).throw(InterruptedError()))
    fd = os.open(path, os.O_RDONLY if mode == "r" else os.O_RDWR)
    for line in sys.stdin:
        words = line.split()
        try:
            if words[0] == "lock":
                kind = fcntl.LOCK_EX if words[1] == "w" else fcntl.LOCK_SH
                answer = range_lock(fd, kind, int(words[2]), int(words[3]), "wait" in words)
            elif words[0] == "flock":
                fcntl.flock(fd, fcntl.LOCK_EX | (0 if "wait" in words else fcntl.LOCK_NB))
                answer = True
            elif words[0] == "test":
                asked = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
                kind, _, start, length, pid = struct.unpack("hhqqi", fcntl.fcntl(fd, fcntl.F_GETLK, asked))
                answer = f"{kind} {start} {length} {pid}"
            else:
                os.close(fd)
                fd = os.open(path, os.O_RDWR)
                answer = True
        except BlockingIOError:
            answer = False
        except InterruptedError:
            answer = "interrupted"
        print(answer, flush=True)


def soon(name, take):
    """Checks that a lock is granted soon: the last close is told to the filesystem after it has returned."""
    for _ in range(100):
        try:
            return take()
        except BlockingIOError:
            time.sleep(0.05)
    check(name, False)


def ranges(path):
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    other = Other(path, "w")
    check("a range is locked", range_lock(fd, fcntl.LOCK_EX, 10, 10))
    check("another process does not get it", other.ask("lock w 19 1") == "False")
    check("it gets the bytes beside it", other.ask("lock w 20 5") == "True")
    expected = f"{fcntl.F_WRLCK} 10 10 {os.getpid()}"
    check("F_GETLK names the holder", other.ask("test") == expected)
    check("readers exclude writers only", range_lock(fd, fcntl.LOCK_SH, 100, 1) and other.ask("lock r 100 1") == "True")
    check("a reader does not become a writer beside another", not range_lock(fd, fcntl.LOCK_EX, 100, 1))
    # At the first close of the file in the process its locks end, even those through other descriptors.
    os.close(os.open(path, os.O_RDWR))
    check("a close gives up all locks of the process", other.ask("lock w 10 10") == "True")
    other.end()
    check("the end of a process gives up its locks", range_lock(fd, fcntl.LOCK_EX, 0, 0))
    os.close(fd)


def readers(path):
    """Read locks through descriptors that can only read."""
    other = Other(path, "r")
    check("a reader locks", other.ask("lock r 0 0") == "True")
    fd = os.open(path, os.O_RDWR)
    check("it excludes writers", not range_lock(fd, fcntl.LOCK_EX))
    check("its close is answered", other.ask("close") == "True")
    time.sleep(0.2)
    check("its close gives the lock up", range_lock(fd, fcntl.LOCK_EX))
    os.close(fd)
    other.end()


def open_files(path):
    """Locks of open files (F_OFD_SETLK): they end with the open file, not with another close in the process."""
    ofd_setlk = 37
    lock = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    first, second = os.open(path, os.O_RDWR), os.open(path, os.O_RDWR)
    fcntl.fcntl(first, ofd_setlk, lock)
    os.close(os.open(path, os.O_RDWR))
    try:
        fcntl.fcntl(second, ofd_setlk, lock)
        check("a lock of an open file excludes another open file", False)
    except BlockingIOError:
        pass
    os.close(first)
    soon("a lock of an open file ends with it", lambda: fcntl.fcntl(second, ofd_setlk, lock))
    os.close(second)
    time.sleep(0.2)


def late_release(path):
    """A lock through a descriptor that can only read, then one through another descriptor. Its end may meet the other lock."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT))
    other = Other(path, "w")
    for _ in range(1000):
        reader = os.open(path, os.O_RDONLY)
        range_lock(reader, fcntl.LOCK_SH)
        os.close(reader)
        writer = os.open(path, os.O_RDWR)
        if not range_lock(writer, fcntl.LOCK_EX):
            check("a process is not in its own way", False)
        if other.ask("lock w 0 1") != "False":
            check("the close of a reader leaves later locks", False)
            break
        os.close(writer)
    other.end()


def waits(path):
    fd = os.open(path, os.O_RDWR)
    other = Other(path, "w")
    for take, wait in (
        (lambda: range_lock(fd, fcntl.LOCK_EX), "lock w 0 0 wait"),
        (lambda: fcntl.flock(fd, fcntl.LOCK_EX) is None, "flock wait"),
    ):
        check("a lock is free", take())
        other.send(wait)
        check(f"{wait}: it waits", not other.answers(0.3))
        other.process.send_signal(signal.SIGUSR1)
        check(f"{wait}: a signal ends it", other.answers(5) and other.process.stdout.readline().strip() == "interrupted")
        other.send(wait)
        check(f"{wait}: it waits again", not other.answers(0.3))
        fcntl.lockf(fd, fcntl.LOCK_UN)
        fcntl.flock(fd, fcntl.LOCK_UN)
        check(f"{wait}: it gets the lock", other.answers(5) and other.process.stdout.readline().strip() == "True")
        other.ask("close")
    check("a lock is free", range_lock(fd, fcntl.LOCK_EX))
    other.send("lock w 0 0 wait")
    check("it waits", not other.answers(0.3))
    other.process.terminate()
    try:
        other.process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        check("a program that waits for a lock can be killed", False)
    os.close(fd)
    fd = os.open(path, os.O_RDWR)
    check("its wait is over, too", range_lock(fd, fcntl.LOCK_EX))
    os.close(fd)


def flocks(path):
    """Locks of open files: a copy of a descriptor shares them, another open does not."""
    first, second = os.open(path, os.O_RDWR), os.open(path, os.O_RDWR)
    fcntl.flock(first, fcntl.LOCK_EX)
    copy = os.dup(first)
    os.close(first)
    try:
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        check("flock excludes another open file", False)
    except BlockingIOError:
        pass
    os.close(copy)
    soon("the last close gives an flock up", lambda: fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB))
    os.close(second)


def give_name(fd, path):
    """linkat(2) of an open file. Returns whether it succeeded."""
    command = ["ln", "-L", f"/proc/{os.getpid()}/fd/{fd}", path]
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0


def unnamed(directory):
    """O_TMPFILE."""
    names = os.listdir(directory)
    fd = os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o640)
    os.write(fd, b"content")
    os.fsync(fd)
    check("an unnamed file has no link", os.fstat(fd).st_nlink == 0 and os.listdir(directory) == names)
    check("linkat takes it", give_name(fd, f"{directory}/named"))
    os.write(fd, b" and more")
    os.close(fd)
    with open(f"{directory}/named", "rb") as file:
        check("linkat names it", file.read() == b"content and more" and os.fstat(file.fileno()).st_nlink == 1)
    check("its mode is that of the call", os.stat(f"{directory}/named").st_mode & 0o777 == 0o640)
    fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_EXCL, 0o600)
    check("O_EXCL forbids a name", not give_name(fd, f"{directory}/excluded"))
    os.close(fd)
    fd = os.open(f"{directory}/removed", os.O_CREAT | os.O_RDWR)
    os.unlink(f"{directory}/removed")
    check("a file that had a name gets none again", not give_name(fd, f"{directory}/again"))
    os.close(fd)


def times(directory):
    path = f"{directory}/times"
    before = time.time()
    with open(path, "wb") as file:
        file.write(b"x")
    out = subprocess.run(["stat", "-c", "%W", path], capture_output=True, text=True, check=True).stdout
    check("the time of creation is known", abs(int(out) - before) < 5)
    os.utime(path, (1, 2))
    fd = os.open(path, os.O_RDONLY | os.O_NOATIME)
    os.read(fd, 1)
    os.close(fd)
    check("O_NOATIME leaves the access time", os.stat(path).st_atime == 1)


def removed_directories(directory):
    """A directory that is open while another process fills, empties and removes it."""
    changer = subprocess.Popen([*SELF, "--changes", directory])
    errors = set()
    while changer.poll() is None:
        # Before the open, so that the kernel has fresh attributes of it.
        if "changing" not in [entry.name for entry in os.scandir(directory)]:
            continue
        try:
            fd = os.open(f"{directory}/changing", os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        try:
            os.fstat(fd)
            os.listdir(fd)
        except OSError as error:
            errors.add(str(error))
        os.close(fd)
    check(f"an open directory has attributes, removed or not: {errors}", not errors)


def change_directory(path):
    end = time.time() + 3
    while time.time() < end:
        os.mkdir(path)
        for name in range(20):
            open(f"{path}/{name}", "wb").close()
        for name in range(20):
            os.unlink(f"{path}/{name}")
        os.rmdir(path)


def main():
    if sys.argv[1] == "--changes":
        return change_directory(f"{sys.argv[2]}/changing")
    if sys.argv[1] == "--other":
        return other_process(sys.argv[2], sys.argv[3])
    directory = sys.argv[1]
    path = f"{directory}/locked"
    ranges(path)
    readers(path)
    open_files(path)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        list(threads.map(late_release, [f"{path}.{number}" for number in range(3)]))
    waits(path)
    flocks(path)
    unnamed(directory)
    times(directory)
    removed_directories(directory)
    sys.exit(1 if FAILED else 0)


main()
