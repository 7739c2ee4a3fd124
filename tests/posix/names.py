#!/usr/bin/env python3
"""names.py SECONDS LIMIT DIR DIR…: changes names in one directory through several mounts at the same moment, when the kernel of each has the names
of all. Each round takes a new directory, of which nobody knows yet that several change it.

What one mount was told that it is done, all others see. No call fails, and none takes longer than LIMIT seconds."""

import os
import sys
import threading
import time

seconds, limit, mounts = float(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
end = time.monotonic() + seconds
together = threading.Barrier(len(mounts))
longest, counts, failures = [0.0] * len(mounts), [0] * len(mounts), []


def timed(number, action, *arguments):
    began = time.monotonic()
    result = action(*arguments)
    longest[number] = max(longest[number], time.monotonic() - began)
    counts[number] += 1
    return result


def looks(mount, shown, gone):
    if not os.path.lexists(f"{mount}/{shown}"):
        raise AssertionError(f"{mount}/{shown} is missing")
    if os.path.lexists(f"{mount}/{gone}"):
        raise AssertionError(f"{mount}/{gone} is still there")


def play(number, round_):
    here = [f"{mount}/{round_}" for mount in mounts]
    if number == 0:
        os.mkdir(here[0])
        for other in range(len(mounts)):
            for name in ("file", "more", "gone"):
                os.mkdir(f"{here[0]}/{name}.{other}")
    together.wait()
    # Puts the names of all into this kernel.
    for entry in os.listdir(here[number]):
        os.stat(f"{here[number]}/{entry}")
    together.wait()
    mine = here[number]
    timed(number, os.rename, f"{mine}/file.{number}", f"{mine}/new.{number}")
    for other in here:
        looks(other, f"new.{number}", f"file.{number}")
    timed(number, os.rmdir, f"{mine}/gone.{number}")
    timed(number, os.mkdir, f"{mine}/made.{number}")
    for other in here:
        looks(other, f"made.{number}", f"gone.{number}")
    together.wait()


def work(number):
    round_ = 0
    try:
        # All see the same, so that all end after the same round.
        while time.monotonic() < end and not failures or together.n_waiting:
            round_ += 1
            play(number, round_)
    except threading.BrokenBarrierError:
        pass
    except BaseException as failure:
        failures.append(f"mount {number}, round {round_}: {failure!r}")
    together.abort()


threads = [threading.Thread(target=work, args=(number,)) for number in range(len(mounts))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(f"{sum(counts)} calls, longest {max(longest):.2f} s")
if max(longest) > limit:
    failures.append(f"a call took {max(longest):.1f} s")
sys.exit("\n".join(failures) or 0)
