"""Ends the waits of all ranks when one fails, and says on each of them why.

The rank that fails shows a traceback, every other rank one line:

    rank 1   its module raises ──▶ writes the reason down, lets its connections go
    rank 0   its wait ends ──▶ reads the reason, says where it stands and what it waited for

A wait for a connection ends with the connection. Work on a device never ends if its input never
comes. So there the host polls (`Patience`), until the work is done, time is out, or another process
has failed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep, time
from types import TracebackType
from typing import Any, TypeAlias
from weakref import ref

import attrs
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # public, unlisted
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from schedir.diagnosis import Root
from schedir.errors import ExecutionError
from schedir.ir import Action
from schedir.ir.tokens import parse_action

_PACKAGE = str(Path(__file__).parents[2])
_ROOT = "failure"
_CLOSED = "closed"
_PLACE = "place"
_STOP = "stop"
_PAUSE = 20e-6  # seconds from look to look
_ASK = 0.2  # seconds after which to ask whether another process has failed: over the network
_SEEN = 1.0  # seconds within which a launcher sees that a process has ended
_Hook: TypeAlias = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class WaitError(Exception):
    """A wait for other processes has failed.

    `what` says in words what was waited for; empty if the rank's current action says it. `advice`
    says what may help if nothing came in time. `process` is the number of the one that was waited
    for, `peer` its rank in the pipeline; None if unknown.
    """

    def __init__(
        self, cause: BaseException, what: str = "", advice: str = "", process: int | None = None
    ) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.what = what
        self.advice = advice
        self.process = process
        self.peer: int | None = None
        self.rank: int | None = None
        self.index: int | None = None
        self.action: Action | None = None

    def forget_frames(self) -> None:
        """Drop the traceback, whose frames hold a work, and so a connection."""
        self.__traceback__ = self.cause.__traceback__ = None

    def at(self, rank: int, index: int, action: Action) -> None:
        """The rank's place in its list."""
        self.rank, self.index, self.action = rank, index, action

    @property
    def timed_out(self) -> bool:
        """Whether time ran out, as opposed to a lost connection."""
        return _timed_out(self.cause)


class OneLineError(ExecutionError):
    """An error whose message says everything: a traceback would only hide it."""


class DifferError(OneLineError):
    """Two `processes`, by number, make different calls or hold different things."""

    def __init__(self, message: str, processes: tuple[int, int], **place: Any) -> None:
        super().__init__(message, **place)
        self.message, self.processes = message, processes


@contextmanager
def waiting(what: str = "", advice: str = "") -> Iterator[None]:
    """Inside, a RuntimeError means a failed wait for other processes: it becomes a WaitError."""
    try:
        yield
    except RuntimeError as error:
        raise WaitError(error, what, advice) from error


def within_stage(error: BaseException) -> BaseException:
    """A failed collective in a stage's module as what it is, a failed wait; other errors as they
    are."""
    if not isinstance(error, ExecutionError) or not isinstance(cause := error.cause, RuntimeError):
        return error
    if not isinstance(cause, dist.DistError) and "gloo/transport" not in str(cause):
        return error
    stalled = WaitError(cause, "the other processes of its stage")
    stalled.rank, stalled.index, stalled.action = error.rank, error.index, error.action
    return stalled


@contextmanager
def joining() -> Iterator[None]:
    """Inside, a RuntimeError means that the rendezvous of the processes has failed, before they can
    tell each other why. It becomes an ExecutionError of one line."""
    try:
        yield
    except RuntimeError as error:
        advice = interface_advice() if _timed_out(error) else ""
        line = f"making the executor: not all processes have come together: {error}"
        found = OneLineError("; ".join(filter(None, (line, advice))), cause=error)
        record(found)
        end_in_one_line(found)
        raise found from None


def interface_advice() -> str:
    """Advice for gloo addresses that other hosts may not reach; empty if torchrun has started all
    processes on this host."""
    if os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE"):
        return ""
    return (
        "gloo uses the address of its host's name, and other hosts cannot reach it if that is "
        "127.0.0.1: on each host set GLOO_SOCKET_IFNAME to the name of a network interface that "
        "the other hosts can reach"
    )


def _timed_out(error: BaseException) -> bool:
    return any(word in str(error).lower() for word in ("timed out", "timeout"))


@attrs.frozen
class Patience:
    """Waits for as long as `timeout`; `others_failed` asks whether another process has failed."""

    _timeout: timedelta
    _others_failed: Callable[[], bool]

    def until(self, done: Callable[[], bool], what: Callable[[], str]) -> None:
        """Wait until it is done. Raises WaitError, with `what` in words, if that fails."""
        if done():
            return
        begun = asked = monotonic()
        while not done():
            now = monotonic()
            if now - begun > self._timeout.total_seconds():
                raise WaitError(TimeoutError("timed out"), what())
            if now - asked > _ASK:
                asked = now
                if self._others_failed():
                    raise WaitError(RuntimeError("another process has failed"), what())
            sleep(_PAUSE)


@attrs.frozen
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


@attrs.frozen
class Board:
    """Notes for all processes: the verdict, which processes have closed, and where those of other
    hosts stand."""

    _store: Store

    def give(self, verdict: Verdict) -> Verdict:
        """Give the verdict, unless there is one; returns the one that stands."""
        with suppress(RuntimeError):  # the store may be gone already
            return Verdict.loads(self._store.compare_set(_ROOT, "", verdict.dumps()).decode())
        return verdict

    def has_failed(self) -> bool:
        """Whether some process has."""
        with suppress(RuntimeError):
            return bool(self._store.check([_ROOT]))
        return True  # the store is gone, and with it the process that holds it

    def verdict(self) -> Verdict | None:
        """The verdict, or None."""
        found = self._read(_ROOT)
        return None if found is None else Verdict.loads(found)

    def tell(self, number: int, words: Sequence[int]) -> None:
        """Say where a process stands, for other hosts."""
        with suppress(RuntimeError):
            self._store.set(f"{_PLACE}/{number}", json.dumps([time(), *words]))

    def told(self, number: int) -> tuple[list[int], float] | None:
        """What a process of another host has told of itself, and how many seconds ago by the hosts'
        clocks; None if nothing."""
        found = self._read(f"{_PLACE}/{number}")
        if found is None:
            return None
        moment, *words = json.loads(found)
        return words, time() - moment

    def ask_to_stop(self) -> None:
        """Ask the processes of all hosts to stop after a call."""
        with suppress(RuntimeError):
            self._store.set(_STOP, "1")

    def is_asked_to_stop(self) -> bool:
        """Whether somebody has."""
        return self._read(_STOP) is not None

    def leave(self, number: int, calls: int) -> None:
        """Note that a process makes no more calls, after `calls` of them."""
        with suppress(RuntimeError):
            self._store.set(f"{_CLOSED}/{number}", str(calls))

    def fewest_calls(self, everyone: Sequence[int]) -> tuple[int, int] | None:
        """Among the processes that make no more calls, the one with the fewest: (calls, process).
        None if all still may call."""
        found = [(n, self._read(f"{_CLOSED}/{n}")) for n in range(len(everyone))]
        return min(((int(calls), n) for n, calls in found if calls is not None), default=None)

    def _read(self, key: str) -> str | None:
        with suppress(RuntimeError):
            if self._store.check([key]):
                return self._store.get(key).decode()
        return None


def record(error: BaseException) -> None:
    """Fill torchrun's error file, from which torchrun reports the root of a failure."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return
    if not isinstance(error, OneLineError):
        get_error_handler().record_exception(error)
        return
    try:  # torchrun shows what is being handled, which is the transport's own words here
        raise ExecutionError(str(error)) from None
    except ExecutionError as line:
        line.__traceback__ = None
        get_error_handler().record_exception(line)


def end_in_one_line(error: OneLineError) -> None:
    """If this error ends the process, print its message alone."""
    _at_the_end(error, lambda found: print(f"{ExecutionError.__name__}: {found}", file=sys.stderr))


def _at_the_end(error: BaseException, say: Callable[[BaseException], object]) -> None:
    """If this error ends the process, say it in this way."""
    before: _Hook = sys.excepthook
    # Its frames hold the executor, and with it the modules.
    known = ref(error) if isinstance(error, ExecutionError) else lambda: error

    def hook(
        kind: type[BaseException], found: BaseException, traceback: TracebackType | None
    ) -> None:
        if found is known():
            say(found)
        else:
            before(kind, found, traceback)

    sys.excepthook = hook


def end_in_silence(error: BaseException, roots: Iterable[int]) -> None:
    """If this error ends the process, print nothing, for its line has been printed. Wait a moment
    until the launcher has seen the roots' processes end: torchrun names one that it sees first."""

    def wait(_: BaseException) -> None:
        until = monotonic() + _SEEN
        for process in roots:
            while state_of(process) not in ("", "T") and monotonic() < until:
                sleep(_SEEN / 50)

    _at_the_end(error, wait)


def state_of(process: int) -> str:
    """T of a process that is stopped, Z of one that has ended, empty if there is none."""
    return (status_of(process) or [""])[0]


def status_of(process: int) -> list[str]:
    """The fields of a process of this host in /proc behind its name, none if it is not known."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return []


def users_line() -> str:
    """Where the user's code has called schedir."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def describe(error: BaseException) -> str:
    """An exception's type and message."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def in_one_line(text: object) -> str:
    """The first line of a text. torch's messages may have dozens."""
    return str(text).strip().partition("\n")[0]
