#!/usr/bin/env python3
"""Asynchronous O_DIRECT writes of one process beside buffered reads of another: direct.py FILE SECONDS.

Fails if a buffered read returns an older block than the last one whose write had ended before the read began.
"""

import ctypes
import mmap
import os
import platform
import struct
import sys
import time

BLOCK = 4096
BLOCKS = 256
DEPTH = 32
CALLS = {"x86_64": (206, 208, 209), "aarch64": (0, 4, 2)}
SETUP, GETEVENTS, SUBMIT = CALLS[platform.machine()]
LIBC = ctypes.CDLL(None, use_errno=True)


class Iocb(ctypes.Structure):
    """struct iocb of the kernel, for PWRITE."""

    _fields_ = [
        ("data", ctypes.c_uint64),
        ("key", ctypes.c_uint32),
        ("rw_flags", ctypes.c_uint32),
        ("opcode", ctypes.c_uint16),
        ("priority", ctypes.c_int16),
        ("fd", ctypes.c_uint32),
        ("buf", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("reserved", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("resfd", ctypes.c_uint32),
    ]


def call(number, *args):
    result = LIBC.syscall(number, *args)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def write_forever(path, done):
    """Writes all blocks repeatedly, with the next number each time. Keeps the last completed number of each in `done`."""
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    context = ctypes.c_uint64(0)
    call(SETUP, DEPTH, ctypes.byref(context))
    memory = mmap.mmap(-1, DEPTH * BLOCK)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    events = (ctypes.c_uint64 * (4 * DEPTH))()
    number = 0
    while True:
        number += 1
        for first in range(0, BLOCKS, DEPTH):
            iocbs = (Iocb * DEPTH)()
            pointers = (ctypes.c_uint64 * DEPTH)()
            for slot in range(DEPTH):
                memory[slot * BLOCK : slot * BLOCK + 8] = struct.pack("<Q", number)
                place = (first + slot) * BLOCK
                iocbs[slot] = Iocb(first + slot, 0, 0, 1, 0, fd, base + slot * BLOCK, BLOCK, place, 0, 0, 0)
                pointers[slot] = ctypes.addressof(iocbs[slot])
            call(SUBMIT, context, DEPTH, pointers)
            ended = 0
            while ended < DEPTH:
                some = call(GETEVENTS, context, 1, DEPTH, events, None)
                for event in range(some):
                    assert events[4 * event + 2] == BLOCK, "a write failed or was short"
                    struct.pack_into("<Q", done, 8 * events[4 * event], number)
                ended += some


def main():
    path, seconds = sys.argv[1], float(sys.argv[2])
    with open(path, "wb") as file:
        file.write(bytes(BLOCKS * BLOCK))
        os.fsync(file.fileno())
    done = mmap.mmap(-1, 8 * BLOCKS)
    writer = os.fork()
    if writer == 0:
        write_forever(path, done)
        os._exit(1)
    fd = os.open(path, os.O_RDONLY)
    reads = old = 0
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            for block in range(BLOCKS):
                (least,) = struct.unpack_from("<Q", done, 8 * block)
                (seen,) = struct.unpack("<Q", os.pread(fd, 8, block * BLOCK))
                reads += 1
                old += seen < least
        assert os.waitpid(writer, os.WNOHANG)[0] == 0, "the writer ended"
    finally:
        os.kill(writer, 9)
    last = struct.unpack_from("<Q", done, 0)[0]
    print(f"reads={reads} old={old} rounds={last}")
    sys.exit(1 if old else 0)


if __name__ == "__main__":
    main()
