"""The place of each process in its list, in memory that outlives the process.

Each process maps a small file of its own, and stores its place in it before each bound call, as one
number. The other processes of its host read the file when something has gone wrong, even after a
SIGKILL:

    /dev/shm/schedir-1f0c…/0     code   call   step   heartbeat   state   process id   busy times
                          /1     code = number of the bound call, index of the entry, phase
                          /verdict     who is to blame, once that is known
                          /stop        a process has been asked to end
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from time import monotonic_ns, time
from typing import TypeAlias

from attrs import frozen

from schedir.diagnosis.verdict import HANDSHAKE, Phase, Position

Words: TypeAlias = "list[int] | memoryview[int]"
CODE, CALL, STEP, BEAT, STATE, PROCESS = range(6)
ALIVE, BROKEN, LEFT, ORPHANED = range(4)
"""States of a process: it takes part, its own failure is told to its caller, it has closed, or it
has ended because its launcher is gone."""
BUSY, BUSY_OF = 8, 8
"""Where the nanoseconds of compute of the latest calls begin, and how many there are."""
_WORDS = BUSY + BUSY_OF
_PHASES: tuple[Phase, ...] = ("outside", "waiting", "running")
_SHIFT = 32  # of the bound call's number
_FRESH = 60.0  # seconds
SILENT = 1.0
"""Seconds without a heartbeat after which a process is silent: twenty are missing then."""


def code(index: int, phase: Phase) -> int:
    """A place as one number."""
    return (index - HANDSHAKE) << 2 | _PHASES.index(phase)


def numbered(number: int) -> int:
    """What makes a code that of the bound call of this number; see `number_of`."""
    return number << _SHIFT


def number_of(found: int) -> int:
    """The number of the bound call that a code is of."""
    return found >> _SHIFT


OUTSIDE = code(HANDSHAKE, "outside")


def at_place(index: int) -> int:
    """The code of a rank that waits at a place beside its list."""
    return code(index, "waiting")


def nowhere() -> Words:
    """The words of a process that runs all ranks: nobody reads them."""
    return [0] * _WORDS


@frozen
class Place:
    """What one process has said of itself: its position, in a call that `trains` or not, its
    process id and state, and the seconds of compute of its latest calls.

    `age` is the time since its last heartbeat, in seconds.
    """

    position: Position
    trains: bool
    process: int
    state: int
    age: float
    busy: float

    @property
    def is_silent(self) -> bool:
        """Whether the process has not answered for long."""
        return self.age > SILENT


class Positions:
    """The places of the processes on this host; `words` is this process's own, which it writes.

    `token` is the job's, and makes the folder's name; `number` is this process's.
    """

    def __init__(self, token: str, number: int) -> None:
        shared = Path("/dev/shm")
        base = shared if shared.is_dir() else Path(tempfile.gettempdir())
        self.folder = base / f"schedir-{token}"
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self._own = self.folder / str(number)
        with self._own.open("wb+") as file:
            file.truncate(_WORDS * 8)
            mapped = memoryview(mmap.mmap(file.fileno(), _WORDS * 8))
            self.words: Words = mapped.cast("q")
        self.words[CODE] = OUTSIDE
        self.words[PROCESS] = os.getpid()
        self.beat()

    def beat(self) -> None:
        """Say that this process answers."""
        self.words[BEAT] = monotonic_ns()

    def take(self, text: str) -> str:
        """Keep a text for all processes of this host, unless there is one; returns what stands."""
        path, own = self.folder / "verdict", self._own.with_suffix(".verdict")
        with suppress(OSError):
            own.write_text(text)
            with suppress(FileExistsError):
                os.link(own, path)
            own.unlink()
            return path.read_text()
        return text

    def taken(self) -> str | None:
        """The text that was taken, or None."""
        with suppress(OSError):
            return (self.folder / "verdict").read_text()
        return None

    def ask_to_stop(self) -> None:
        """Ask all processes of this host to stop after a call."""
        (self.folder / "stop").touch()

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether somebody has."""
        return (self.folder / "stop").exists()

    def read(self, number: int) -> Place | None:
        """What a process of this host has said; None if it has not come yet, or has cleaned up."""
        with suppress(OSError, struct.error):
            return place_of(struct.unpack(f"{_WORDS}q", (self.folder / str(number)).read_bytes()))
        return None

    def close(self) -> None:
        """Remove this process's file, and the folder with the last one."""
        self.words[STATE] = LEFT
        with suppress(OSError):
            self._own.unlink()
            left = [*self.folder.iterdir()]
            if not any(path.name.isdigit() for path in left):
                for path in left:
                    path.unlink()
            self.folder.rmdir()


def place_of(words: Sequence[int]) -> Place:
    """What the words of a process mean."""
    found, call = words[CODE], words[CALL]
    index = (found >> 2 & (1 << _SHIFT - 2) - 1) + HANDSHAKE
    position = Position(
        call >> 1, index, _PHASES[found & 3], step=words[STEP] - 1 if words[STEP] else None
    )
    known = [busy for busy in words[BUSY:] if busy]
    return Place(
        position,
        bool(call & 1),
        words[PROCESS],
        words[STATE],
        (monotonic_ns() - words[BEAT]) / 1e9,
        median(known) / 1e9 if known else 0.0,
    )


def remove_stale() -> None:
    """Remove folders of jobs whose processes have all been killed, but none that a job may be about
    to fill."""
    for folder in Path("/dev/shm").glob("schedir-*"):
        with suppress(OSError, struct.error):
            if time() - folder.stat().st_mtime < _FRESH:
                continue
            words = [
                struct.unpack(f"{_WORDS}q", path.read_bytes())
                for path in folder.iterdir()
                if path.name.isdigit()
            ]
            if not any(Path(f"/proc/{each[PROCESS]}").exists() for each in words):
                for path in folder.iterdir():
                    path.unlink()
                folder.rmdir()
