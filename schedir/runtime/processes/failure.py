"""Ends the waits of all ranks when one fails, and says on each of them why.

The rank that fails shows a traceback, every other rank one line:

    rank 1   its module raises ──▶ writes the reason down, lets its connections go
    rank 0   its wait ends ──▶ reads the reason, says where it stands and what it waited for

A wait for a connection ends with the connection. Work on a device never ends if its input never
comes. So there the host polls (`Patience`), until the work is done, time is out, or another process
has failed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep
from types import TracebackType
from typing import TypeAlias

import attrs
from torch.distributed import Store  # type: ignore[attr-defined]  # public, unlisted
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from schedir.errors import ExecutionError
from schedir.ir import Action

_PACKAGE = str(Path(__file__).parents[2])
_ROOT = "failure"
_CLOSED = "closed"
_PAUSE = 20e-6  # seconds from look to look
_ASK = 0.5  # seconds after which to ask whether another process has failed: over the network
_Hook: TypeAlias = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class WaitError(Exception):
    """A wait for other processes has failed.

    `what` says in words what was waited for; empty if the rank's current action says it. `advice`
    says what may help if nothing came in time.
    """

    def __init__(self, cause: BaseException, what: str = "", advice: str = "") -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.what = what
        self.advice = advice
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


@contextmanager
def waiting(what: str = "", advice: str = "") -> Iterator[None]:
    """Inside, a RuntimeError means a failed wait for other processes: it becomes a WaitError."""
    try:
        yield
    except RuntimeError as error:
        raise WaitError(error, what, advice) from error


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
class Board:
    """Notes for all processes: the reason of the first failure, and which processes have closed."""

    _store: Store

    def write(self, reason: str) -> bool:
        """Write the reason, if there is none yet; returns whether this one was written."""
        with suppress(RuntimeError):  # the store may be gone already
            return self._store.compare_set(_ROOT, "", reason).decode() == reason
        return True

    def has_failed(self) -> bool:
        """Whether some process has."""
        with suppress(RuntimeError):
            return bool(self._store.check([_ROOT]))
        return True  # the store is gone, and with it the process that holds it

    def leave(self, number: int, calls: int) -> None:
        """Note that a process makes no more calls, after `calls` of them."""
        with suppress(RuntimeError):
            self._store.set(f"{_CLOSED}/{number}", str(calls))

    def reason(self) -> str | None:
        """The reason that the first failing process has written, or None."""
        with suppress(RuntimeError):
            if self._store.check([_ROOT]):
                return self._store.get(_ROOT).decode()
        return None

    def fewest_calls(self, everyone: Sequence[int]) -> tuple[int, int] | None:
        """Among the processes that make no more calls, the one with the fewest: (calls, process).
        None if all still may call."""
        with suppress(RuntimeError):
            keys = [f"{_CLOSED}/{number}" for number in range(len(everyone))]
            left = [n for n, key in enumerate(keys) if self._store.check([key])]
            return min(((int(self._store.get(keys[n])), n) for n in left), default=None)
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
    before: _Hook = sys.excepthook

    def hook(
        kind: type[BaseException], found: BaseException, traceback: TracebackType | None
    ) -> None:
        if found is error:
            print(f"{ExecutionError.__name__}: {found}", file=sys.stderr)
        else:
            before(kind, found, traceback)

    sys.excepthook = hook


def users_line() -> str:
    """Where the user's code has called schedir."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def describe(error: BaseException) -> str:
    """An exception's type and message."""
    return f"{type(error).__name__}: {error}"
