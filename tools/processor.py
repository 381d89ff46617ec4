"""Runs a command, and says how much processor time it and all that it leaves behind have taken.

    python tools/processor.py COMMAND …
    python tools/processor.py --at-most 1.5 COMMAND …    # fails above 1.5 times what is planned

A process whose parent has ended is an orphan. Orphans come to this process, which waits for them
and counts them too; a parent's RUSAGE_CHILDREN has only the children that it has waited for. An
orphan that goes on for longer than the grace is ended and named, which is a failure.

Seconds differ from machine to machine. So the plan, in pyproject.toml, counts in loops: a fixed
one is timed before and after the command.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

ROOT = Path(__file__).resolve().parents[1]
PR_SET_CHILD_SUBREAPER = 36  # of Linux's prctl.h


def run(command: Sequence[str], grace: float) -> tuple[int, float, list[str]]:
    """Run a command. Returns its exit status, the processor seconds of all its descendants, and
    the orphans that had to be ended."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    status = subprocess.run(command, check=False).returncode
    ended = [*_end_orphans(grace)]
    used = getrusage(RUSAGE_CHILDREN)
    return status, used.ru_utime + used.ru_stime, ended


def _end_orphans(grace: float) -> Iterator[str]:
    """Wait for all processes that are left; end those that go on for longer than the grace."""
    end = time.monotonic() + grace
    with suppress(ChildProcessError):  # none is left
        while True:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
            if time.monotonic() < end:
                time.sleep(0.02)
                continue
            own = f"/proc/{os.getpid()}/task/{os.getpid()}/children"
            for orphan in map(int, Path(own).read_text().split()):
                yield Path(f"/proc/{orphan}/cmdline").read_text().rstrip("\0").replace("\0", " ")
                os.kill(orphan, signal.SIGKILL)
                os.waitpid(orphan, 0)


def loop() -> float:
    """The processor seconds of a fixed loop."""
    start, total = time.process_time(), 0
    for number in range(10_000_000):
        total += number & 7
    return time.process_time() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--at-most", type=float, metavar="TIMES", help="of what is planned")
    parser.add_argument("--grace", type=float, default=60, metavar="SECONDS", help="of orphans")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    before = loop()
    status, seconds, ended = run(args.command, args.grace)
    unit = (before + loop()) / 2
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    planned = project["tool"]["schedir"]["suite"]["loops"]
    print(f"{seconds:.1f} s of processor: {seconds / unit:.0f} loops, planned {planned}")
    for orphan in ended:
        print(f"ended an orphan: {orphan}", file=sys.stderr)
    too_many = args.at_most is not None and seconds / unit > args.at_most * planned
    if too_many:
        print(f"error: more than {args.at_most:g} times what is planned", file=sys.stderr)
    return status or int(too_many or bool(ended))


if __name__ == "__main__":
    sys.exit(main())
