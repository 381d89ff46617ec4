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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from types import TracebackType

import attrs
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from schedir.errors import ExecutionError
from schedir.ir import Action

_PACKAGE = str(Path(__file__).parents[2])
_PAUSE = 20e-6  # seconds from look to look
_RARELY = 0.1  # the same over the network, if it takes long
_ASK = 0.2  # seconds after which to ask whether another process has failed: over the network
_SEEN = 1.0  # seconds within which a launcher sees that a process has ended
_ROOTS = "schedir_roots"  # of an error that is not printed: the process ids of those to blame


@attrs.define(eq=False)
class WaitError(Exception):
    """A wait for other processes has failed; within the runtime alone, which tells its user why.

    `what` says in words what was waited for; empty if the rank's current action says it. `advice`
    says what may help if nothing came in time. `process` is the number of the one that was waited
    for, `peer` its rank in the pipeline; None if unknown.
    """

    cause: BaseException
    what: str = ""
    advice: str = ""
    process: int | None = None
    peer: int | None = None
    rank: int | None = None
    index: int | None = None
    action: Action | None = None

    def __str__(self) -> str:
        return str(self.cause)

    def at(self, rank: int, index: int, action: Action) -> None:
        """The rank's place in its list."""
        self.rank, self.index, self.action = rank, index, action

    @property
    def timed_out(self) -> bool:
        """Whether time ran out, as opposed to a lost connection."""
        return any(word in str(self.cause).lower() for word in ("timed out", "timeout"))


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


@attrs.define
class Patience:
    """Waits for as long as `timeout`; `others_failed` asks whether another process has failed."""

    timeout: timedelta
    _others_failed: Callable[[], bool]

    def until(
        self, done: Callable[[], bool], what: Callable[[], str], over_network: bool = False
    ) -> None:
        """Wait until it is done. Raises WaitError, with `what` in words, if that fails. Looks that
        go over the network come ever more rarely."""
        begun = asked = monotonic()
        while not done():
            now = monotonic()
            if now - begun > self.timeout.total_seconds():
                raise WaitError(TimeoutError("timed out"), what())
            if now - asked > _ASK:
                asked = now
                if self._others_failed():
                    raise WaitError(RuntimeError("another process has failed"), what())
            sleep(min(_RARELY, (now - begun) / 20) if over_network else _PAUSE)


def says_all(error: BaseException) -> bool:
    """Whether an error's message says everything, so that a traceback would only hide it."""
    return isinstance(error, ExecutionError) and error.one_line


def record(error: BaseException) -> None:
    """Fill torchrun's error file, from which torchrun reports the root of a failure."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return
    if not says_all(error):
        get_error_handler().record_exception(error)
        return
    try:  # torchrun shows what is being handled, which is the transport's own words here
        raise ExecutionError(str(error)) from None
    except ExecutionError as line:
        line.__traceback__ = None
        get_error_handler().record_exception(line)


def end_quietly() -> None:
    """From now on, if an error ends this process, print no traceback that says nothing more."""
    if getattr(sys.excepthook, "func", None) is not _print_at_the_end:
        sys.excepthook = partial(_print_at_the_end, sys.excepthook)


def end_in_silence(error: BaseException, roots: Iterable[int]) -> None:
    """If this error ends the process, print nothing, for its line has been printed; wait until the
    launcher has seen the roots' processes end, because torchrun names one that it sees first."""
    vars(error)[_ROOTS] = [*roots]


def _print_at_the_end(
    before: Callable[[type[BaseException], BaseException, TracebackType | None], object],
    kind: type[BaseException],
    error: BaseException,
    traceback: TracebackType | None,
) -> None:
    if (roots := vars(error).get(_ROOTS)) is not None:
        until = monotonic() + _SEEN
        for process in roots:
            while state_of(process) not in ("", "T") and monotonic() < until:
                sleep(_SEEN / 50)
    elif says_all(error):
        print(f"{kind.__name__}: {error}", file=sys.stderr)
    else:
        before(kind, error, traceback)


def of_the_user(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback from its first line outside of schedir on; all of it if there is none."""
    found = traceback
    while found is not None and found.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        found = found.tb_next
    return found or traceback


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
