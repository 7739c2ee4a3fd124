#!/usr/bin/env python3
"""creates.py DIR SECONDS: creates files one after another, each durable, and compares all of them at the end. Prints the longest pause."""

import os
import sys
import time

directory, seconds = sys.argv[1], float(sys.argv[2])
os.makedirs(directory, exist_ok=True)
began = last = time.monotonic()
count = 0
longest = 0.0
while last - began < seconds:
    with open(f"{directory}/{count}", "x") as file:
        file.write(str(count))
        file.flush()
        os.fsync(file.fileno())
    count += 1
    now = time.monotonic()
    longest, last = max(longest, now - last), now
for number in range(count):
    with open(f"{directory}/{number}") as file:
        assert file.read() == str(number), f"{number} has other content"
names = set(os.listdir(directory))
assert names == {str(number) for number in range(count)}, "a file is missing, or too many"
print(f"{count} files, longest pause {longest:.1f} s")
