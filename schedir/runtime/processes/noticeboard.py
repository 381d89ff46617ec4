"""The noticeboard of an executor: where each process stands, and notes for all, as the verdict.

Each process maps a small file of its own, in memory that outlives it, and stores its place there
before each bound call, as one number. The other processes of its host read the file when something
has gone wrong, even after a SIGKILL. Other hosts are told through the store:

    /dev/shm/schedir-1f0c…/0     code   call   step   heartbeat   state   process id   busy times
                          /1     code = number of the bound call, index of the entry, phase
                          /verdict     who is to blame, once that is known; in the store too
                          /stop        a process has been asked to end; in the store too
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import tempfile
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from time import monotonic_ns, time
from typing import TypeAlias

from attrs import frozen
from torch.distributed import Store  # type: ignore[attr-defined]  # public, unlisted

from schedir.diagnosis import Root
from schedir.diagnosis.verdict import HANDSHAKE, Phase, Position
from schedir.ir.tokens import parse_action

Words: TypeAlias = "list[int] | memoryview[int]"
CODE, CALL, STEP, BEAT, STATE, PROCESS = range(6)
ALIVE, BROKEN, LEFT, ORPHANED, ABSENT = range(5)
"""States of a process: it takes part, its own failure is told to its caller, it has closed, it has
ended because its launcher is gone, or it has not come yet."""
BUSY, BUSY_OF = 8, 8
"""Where the nanoseconds of compute of the latest calls begin, and how many there are."""
_WORDS = BUSY + BUSY_OF
_PHASES: tuple[Phase, ...] = ("outside", "waiting", "running")
_SHIFT = 32  # of the bound call's number
_FRESH = 60.0  # seconds
SILENT = 1.0
"""Seconds without a heartbeat after which a process is silent: twenty are missing then."""
TELL = 1.0
"""Seconds from one place to the next that other hosts are told."""
_VERDICT, _STOP = "verdict", "stop"  # names of notes


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


NOWHERE = Place(Position(0, HANDSHAKE, "outside"), False, 0, ABSENT, float("inf"), 0.0)
"""The place of a process that has not come yet."""


@frozen
class Verdict:
    """Who is to blame for a failure, the same on all processes.

    `reason` is the first error in words, and `by` the number of the process that has found out.
    """

    roots: tuple[Root, ...]
    reason: str
    by: int

    def dumps(self) -> str:
        """The verdict as text; `loads` reads it."""
        roots = [
            [r.rank, r.call, r.index, None if r.action is None else str(r.action), r.cause, r.step]
            for r in self.roots
        ]
        return json.dumps([roots, self.reason, self.by])

    @classmethod
    def loads(cls, text: str) -> Verdict:
        """The verdict of a text from `dumps`."""
        roots, reason, by = json.loads(text)
        return cls(
            tuple(
                Root(rank, call, index, None if token is None else parse_action(token), *rest)
                for rank, call, index, token, *rest in roots
            ),
            reason,
            by,
        )


class Noticeboard:
    """The places of all processes, and their notes. This process writes its own place in `words`;
    until the board is open, nobody reads it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.words: Words = [0] * _WORDS
        self._folder: Path | None = None
        self._own, self.far = 0, frozenset[int]()

    def open(self, token: str, own: int, far: Collection[int]) -> None:
        """Show the place of this process, `own`, to the others; those `far` are on other hosts.
        The `token` is the job's, and makes the folder's name."""
        shared = Path("/dev/shm")
        base = shared if shared.is_dir() else Path(tempfile.gettempdir())
        self._folder, self._own, self.far = base / f"schedir-{token}", own, frozenset(far)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        with (self._folder / str(own)).open("wb+") as file:
            file.truncate(_WORDS * 8)
            self.words = memoryview(mmap.mmap(file.fileno(), _WORDS * 8)).cast("q")
        self.words[CODE] = OUTSIDE
        self.words[PROCESS] = os.getpid()
        self.beat()

    def beat(self) -> None:
        """Say that this process answers."""
        self.words[BEAT] = monotonic_ns()

    def tell(self) -> None:
        """Tell other hosts where this process stands."""
        if self.far:
            with suppress(RuntimeError):
                self._store.set(str(self._own), json.dumps([time(), *self.words]))

    def read(self, number: int) -> Place | None:
        """What a process has said; None if it has not come yet, or has cleaned up."""
        if number in self.far:
            if (found := self._in_store(str(number))) is None:
                return None
            moment, *words = json.loads(found)
            return place_of(words, time() - moment - TELL)  # by the hosts' clocks
        if self._folder is not None:
            with suppress(OSError, struct.error):
                words = struct.unpack(f"{_WORDS}q", (self._folder / str(number)).read_bytes())
                return place_of(words, (monotonic_ns() - words[BEAT]) / 1e9)
        return None

    def _note(self, name: str, text: str) -> str:
        """Leave a note for all processes, unless there is one of this name; returns what stands."""
        if self._folder is not None:
            path, own = self._folder / name, self._folder / f"{self._own}.{name}"
            with suppress(OSError):
                own.write_text(text)
                with suppress(FileExistsError):
                    os.link(own, path)
                own.unlink()
                text = path.read_text()
        with suppress(RuntimeError):  # the store may be gone already
            text = self._store.compare_set(name, "", text).decode()
        return text

    def _noted(self, name: str) -> str | None:
        """The note of this name: from this host, or else from the others, if there are any."""
        if self._folder is not None:
            with suppress(OSError):
                return (self._folder / name).read_text()
            if not self.far:
                return None
        return self._in_store(name)

    def give(self, verdict: Verdict) -> Verdict:
        """Give the verdict, unless there is one; returns the one that stands."""
        return Verdict.loads(self._note(_VERDICT, verdict.dumps()))

    def verdict(self) -> Verdict | None:
        """The verdict, or None."""
        found = self._noted(_VERDICT)
        return None if found is None else Verdict.loads(found)

    def has_failed(self) -> bool:
        """Whether some process has, by the store: without it, its process has failed."""
        with suppress(RuntimeError):
            return bool(self._store.check([_VERDICT]))
        return True

    def ask_to_stop(self) -> None:
        """Ask all processes to stop after a call."""
        self._note(_STOP, "1")

    def is_asked_to_stop(self) -> bool:
        """Whether somebody has."""
        return self._noted(_STOP) is not None

    def leave(self) -> None:
        """Say that this process makes no more calls."""
        if self.words[STATE] == ALIVE:
            self.words[STATE] = LEFT
            self.tell()

    def _in_store(self, key: str) -> str | None:
        with suppress(RuntimeError):
            if self._store.check([key]):
                return self._store.get(key).decode()
        return None

    def close(self) -> None:
        """Leave; the last process of this host that does removes the folder."""
        self.leave()
        if self._folder is not None:
            _remove_unless_used(self._folder)


def place_of(words: Sequence[int], age: float) -> Place:
    """What the words of a process mean; its last heartbeat was `age` seconds ago."""
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
        age,
        median(known) / 1e9 if known else 0.0,
    )


def remove_stale() -> None:
    """Remove folders of jobs whose processes have all been killed, but none that a job may be about
    to fill."""
    for folder in Path("/dev/shm").glob("schedir-*"):
        with suppress(OSError):
            if time() - folder.stat().st_mtime > _FRESH:
                _remove_unless_used(folder)


def _remove_unless_used(folder: Path) -> None:
    """Remove a folder, unless a process still takes part that has its place there."""
    with suppress(OSError, struct.error):
        for path in folder.iterdir():
            if path.name.isdigit():
                words = struct.unpack(f"{_WORDS}q", path.read_bytes())
                if words[STATE] == ALIVE and Path(f"/proc/{words[PROCESS]}").exists():
                    return
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
