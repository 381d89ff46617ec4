"""What processes tell each other outside of any group: hello, where they stand, who is to blame.

On the noticeboard of an executor are the places of all processes, and notes, as the verdict. Each
process maps a small file of its own, in memory that outlives it, and stores its place there before
each bound call, as one number. The other processes of its host read the file when something has
gone wrong, even after a SIGKILL. Other hosts are told through the store:

    /dev/shm/schedir-places-1f…/0   code   call   step   heartbeats   state   process id  busy times
                               /1   code = number of the bound call, index of the entry, phase
                               /verdict   who is to blame, once that is known; in the store too
                               /stop      a process has been asked to end; in the store too
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from statistics import median
from time import monotonic_ns, time, time_ns
from typing import Any, TypeAlias

import torch.distributed as dist
from attrs import astuple, frozen
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, unlisted
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.rendezvous import rendezvous

from schedir.diagnosis import Root
from schedir.diagnosis.verdict import HANDSHAKE, Phase, Position
from schedir.errors import ExecutionError, SchedirError
from schedir.ir.tokens import parse_action
from schedir.runtime.processes.failure import (
    Patience,
    WaitError,
    describe,
    end_quietly,
    interface_advice,
    record,
    waiting,
)
from schedir.runtime.processes.grid import slices_of

Words: TypeAlias = "list[int] | memoryview[int]"
CODE, CALL, STEP, BEAT, TOLD, STATE, PROCESS = range(7)
ALIVE, BROKEN, LEFT, ORPHANED, ABSENT = range(5)
"""States of a process: it takes part, its own failure is told to its caller, it has closed, it has
ended because its launcher is gone, or it has not come yet."""
BUSY, BUSY_OF = 8, 8
"""Where the nanoseconds of compute of the latest calls begin, and how many there are."""
_WORDS = BUSY + BUSY_OF
_FORMAT = f"{_WORDS}q"
_PHASES: tuple[Phase, ...] = ("outside", "waiting", "running")
_SHIFT = 32  # of the bound call's number
_FRESH = 60.0  # seconds
SILENT = 1.0
"""Seconds without a heartbeat after which a process is silent: twenty are missing then."""
TELL = 0.5
"""Seconds from one place to the next that other hosts are told."""
_VERDICT, _STOP = "verdict", "stop"  # names of notes


def code(index: int, phase: Phase = "waiting", number: int = 0) -> int:
    """A place as one word: in the bound call of this number, where that matters."""
    return number << _SHIFT | (index - HANDSHAKE) << 2 | _PHASES.index(phase)


def number_of(found: int) -> int:
    """The number of the bound call that a code is of."""
    return found >> _SHIFT


OUTSIDE = code(HANDSHAKE, "outside")


@frozen
class Place:
    """What one process has said of itself: its position, in a call that `trains` or not, its state,
    whether it `is_silent`, without a heartbeat for long, and the seconds of compute of its latest
    calls."""

    position: Position
    trains: bool
    state: int
    is_silent: bool
    busy: float


_NOWHERE = Place(Position(0, HANDSHAKE, "outside"), False, ABSENT, True, 0.0)


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
        roots = [astuple(root, recurse=False) for root in self.roots]
        return json.dumps([roots, self.reason, self.by], default=str)  # an action as its token

    @classmethod
    def loads(cls, text: str) -> Verdict:
        """The verdict of a text from `dumps`."""
        found, reason, by = json.loads(text)
        roots = (
            Root(rank, call, index, token and parse_action(token), *rest)
            for rank, call, index, token, *rest in found
        )
        return cls(tuple(roots), reason, by)


class Noticeboard:
    """The places of all processes, and their notes. This process writes its own place in `words`;
    until the board is open, nobody reads it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.words: Words = [0] * _WORDS
        self._folder: Path | None = None
        self._own, self.far = 0, frozenset[int]()
        self._places: dict[int, Place] = {}  # the last that was read of each process

    def open(self, token: str, own: int, far: Collection[int]) -> None:
        """Show the place of this process, `own`, to the others; those `far` are on other hosts.
        The `token` is the job's, and makes the folder's name."""
        shared = Path("/dev/shm")
        base = shared if shared.is_dir() else Path(tempfile.gettempdir())
        self._folder, self._own, self.far = base / f"schedir-places-{token}", own, frozenset(far)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        with (self._folder / str(own)).open("wb+") as file:
            file.truncate(_WORDS * 8)
            self.words = memoryview(mmap.mmap(file.fileno(), _WORDS * 8)).cast("q")
        self.words[CODE] = OUTSIDE
        self.words[PROCESS] = os.getpid()
        self.beat()

    @property
    def is_open(self) -> bool:
        """Whether the processes have come together."""
        return self._folder is not None

    def beat(self) -> None:
        """Say that this process answers."""
        self.words[BEAT] = monotonic_ns()

    def tell(self) -> None:
        """Tell other hosts where this process stands."""
        if self.far:
            self.words[TOLD] = time_ns()
            with suppress(RuntimeError):
                self._store.set(str(self._own), bytes(self.words))  # type: ignore[arg-type]

    def read(self, number: int) -> Place:
        """What a process has said last; it is absent if it has not come yet."""
        is_far = number in self.far
        if content := self._look_up(str(number), not is_far, is_far):
            words = struct.unpack(_FORMAT, content)
            # By the hosts' clocks, with two turns of leave, or by the one of this host.
            told = words[TOLD] + 2e9 * TELL
            age = time_ns() - told if is_far else monotonic_ns() - words[BEAT]
            self._places[number] = place_of(words, age > SILENT * 1e9)
        return self._places.get(number, _NOWHERE)

    def _look_up(self, name: str, near: bool, far: bool) -> bytes:
        """What is there of this name on this host, or else in the store; empty if nothing is."""
        if near and self._folder is not None:
            with suppress(OSError):
                return (self._folder / name).read_bytes()
        with suppress(RuntimeError):
            if far and self._store.check([name]):
                return bytes(self._store.get(name))
        return b""

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

    def _noted(self, name: str) -> str:
        """The note of this name, of a host or of the others; empty if there is none."""
        return self._look_up(name, True, not self.is_open or bool(self.far)).decode()

    def give(self, verdict: Verdict) -> Verdict:
        """Give the verdict, unless there is one; returns the one that stands."""
        return Verdict.loads(self._note(_VERDICT, verdict.dumps()))

    def verdict(self) -> Verdict | None:
        """The verdict, or None."""
        found = self._noted(_VERDICT)
        return Verdict.loads(found) if found else None

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
        return bool(self._noted(_STOP))

    def become(self, state: int) -> None:
        """Say what this process is from now on."""
        self.words[STATE] = state
        self.tell()

    def leave(self) -> None:
        """Say that this process makes no more calls."""
        if self.words[STATE] == ALIVE:
            self.become(LEFT)

    def close(self) -> None:
        """Leave; the last process of this host that does removes the folder."""
        self.leave()
        if self._folder is not None:
            _remove_unless_used(self._folder)


def place_of(words: Sequence[int], is_silent: bool) -> Place:
    """What the words of a process mean."""
    found, call, step = words[CODE], words[CALL], words[STEP]
    index = (found >> 2 & (1 << _SHIFT - 2) - 1) + HANDSHAKE
    position = Position(call >> 1, index, _PHASES[found & 3], step=step - 1 if step else None)
    busy = 1e-9 * median([each for each in words[BUSY:] if each] or [0])
    return Place(position, bool(call & 1), words[STATE], is_silent, busy)


def remove_stale() -> None:
    """Remove folders of jobs whose processes have all been killed, but none that a job may be about
    to fill."""
    for folder in Path("/dev/shm").glob("schedir-places-*"):
        with suppress(OSError):
            if time() - folder.stat().st_mtime > _FRESH:
                _remove_unless_used(folder)


def _remove_unless_used(folder: Path) -> None:
    """Remove a folder, unless a process still takes part that has its place there."""
    with suppress(OSError, struct.error):
        for path in folder.iterdir():
            if path.name.isdigit():
                words = struct.unpack(_FORMAT, path.read_bytes())
                if words[STATE] == ALIVE and Path(f"/proc/{words[PROCESS]}").exists():
                    return
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


# What processes tell each other before there is any group.

MAKING = "all ranks to make their executors"
"""What is waited for as an executor is made, in words."""
_NOT_ALL = "making the executor: not all processes have come together"
_SOON = timedelta(seconds=5)
_kept: list[Store] = []  # until this process ends, so that others can read why
_made: Counter[tuple[int, ...]] = Counter()


def named(everyone: tuple[int, ...]) -> str:
    """The name of the next groups of these processes. All of them have made, or tried to make, the
    same number together, so they use the same keys, and none of a job before torchrun's restart."""
    _made[everyone] += 1
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"schedir/{attempt}/{everyone}/{_made[everyone]}"


def hello(
    store: Store, everyone: Sequence[int], own: int, said: Any, timeout: timedelta
) -> list[Any]:
    """Tell all processes something that JSON can hold, as process `own`, before there is any group,
    and wait for what they tell, in the order of `everyone`.

    Raises WaitError, with those that have not come, if they don't in time; ExecutionError if one of
    them can't make its executor.
    """
    board = Noticeboard(store)
    keys = [f"hello/{number}" for number in everyone]
    with waiting(MAKING, interface_advice()):
        store.set(f"hello/{own}", json.dumps(said))
        try:
            patience = Patience(timeout, board.has_failed)
            patience.until(lambda: store.check(keys), lambda: MAKING, over_network=True)
        except WaitError as stalled:
            verdict = None if stalled.timed_out else board.verdict()
            if verdict is not None:
                line = f"{_NOT_ALL}: process {everyone[verdict.by]}: {verdict.reason}"
                raise ExecutionError(line, one_line=True) from None
            away = (key.replace("hello/", "process ") for key in keys if not store.check([key]))
            advice = (
                f"missing: {', '.join(away)}; make the executor on all of them, with a mesh of the "
                "same processes"
            )
            stalled.advice = "; ".join(filter(None, (advice, interface_advice())))
            raise
        return [json.loads(store.get(key)) for key in keys]


@contextmanager
def declining(
    mesh: DeviceMesh | None, pipeline_dim: str, data_dims: Sequence[str]
) -> Iterator[None]:
    """Inside, an error is told to the other processes, so that they don't wait for this one."""
    try:
        yield
    except Exception as error:
        reason = str(error) if isinstance(error, SchedirError) else describe(error)
        # It may not be one of several, or be alone yet.
        with suppress(RuntimeError, ValueError, SchedirError):
            if dist.is_initialized():
                store, rank, world = _get_default_store(), dist.get_rank(), dist.get_world_size()
            else:
                store, rank, world = next(rendezvous("env://", timeout=_SOON))
            everyone = tuple(range(world))
            if mesh is not None:
                slices = slices_of(mesh, pipeline_dim, data_dims)
                everyone = tuple(sorted(slices.flatten().tolist()))
            store = PrefixStore(named(everyone), store)
            if len(everyone) > 1:
                _kept.append(store)
                Noticeboard(store).give(Verdict((), reason, everyone.index(rank)))
        raise


def init_process_group(timeout: timedelta | None) -> None:
    """Join the ranks that torchrun has started.

    Raises ExecutionError if they don't come in time, or if one of them can't make its executor.
    """
    limit = default_pg_timeout if timeout is None else timeout
    store, rank, world = next(rendezvous("env://", timeout=default_pg_timeout))
    # gloo would find the addresses of an earlier group of this job, or of the run before a restart.
    store = PrefixStore(named(tuple(range(world))), store)
    try:
        hello(store, range(world), rank, None, limit)
        with waiting(advice=interface_advice()):
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world, timeout=timeout
            )
    except (WaitError, ExecutionError) as error:
        found = error
        if isinstance(error, WaitError):
            advice = error.advice if error.timed_out else ""
            line = "; ".join(filter(None, (f"{_NOT_ALL}: {error}", advice)))
            found = ExecutionError(line, cause=error.cause, one_line=True)
        record(found)
        end_quietly()
        raise found from None
