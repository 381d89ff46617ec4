"""How long a host waits for what it can only look at, and what it says where that is in vain."""

from __future__ import annotations

import gc
from collections.abc import Callable
from datetime import timedelta
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

import schedir
from schedir.runtime import Executor
from schedir.runtime.accelerator import Host
from schedir.runtime.engine import _arrive
from schedir.runtime.processes.control import Courier
from schedir.runtime.processes.failure import Patience, WaitError
from schedir.runtime.program.instruction import Progress
from schedir.runtime.session import Session
from tests.runtime.kit import MSE, linear_stages, numbered, sgd

CPU = torch.device("cpu")
SECOND = timedelta(seconds=1)


def test_patience_ends_when_it_is_done() -> None:
    looks = iter([False, False, True])
    Patience(SECOND, lambda: False).until(lambda: next(looks), lambda: "nothing")
    assert next(looks, None) is None


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.01, "timed out"), (1000, "another process has failed")]
)
def test_patience_ends_with_the_timeout_or_when_another_process_has_failed(
    seconds: float, text: str
) -> None:
    timed_out = seconds < 1
    with pytest.raises(WaitError, match=text) as stalled:
        Patience(seconds * SECOND, lambda: not timed_out).until(lambda: False, lambda: "0B0")
    assert (stalled.value.what, stalled.value.timed_out) == ("0B0", timed_out)


@pytest.mark.parametrize("closes", [False, True])
def test_leaving_waits_for_the_device(closes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []
    monkeypatch.setattr(Host, "synchronize", lambda self: waited.append(self.device))
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    executor = Executor(schedule, numbered(linear_stages()), MSE, sgd, in_process=True)
    executor.step(torch.zeros(2, 4), target=torch.zeros(2, 4))
    if closes:
        executor.close()
    del executor
    gc.collect()
    assert waited == [CPU] * (not closes)


def test_leaving_ends_where_the_device_stands_still() -> None:
    """What the courier has to send never comes from it; nobody may wait for that for ever."""

    def stalled() -> None:
        raise WaitError(TimeoutError("timed out"), "0RECV_GRAD0")

    courier, comes = Courier(), Event()
    sent = courier.send(comes.wait)
    progress: Any = SimpleNamespace(settle=stalled)
    _arrive([], progress, courier, Host(CPU))
    assert not sent.done()
    comes.set()
    courier.finish()


def test_a_call_waits_for_the_one_before_the_latest_alone() -> None:
    posted: list[Any] = []
    progress = Progress(Patience(SECOND / 100, lambda: False), posted, Host(CPU), follows=True)
    works = [Mock(**{"is_completed.return_value": False}) for _ in range(2)]
    for work in works:
        progress.begin()
        posted.append(work)
        ended = progress.end()
    with pytest.raises(WaitError):
        progress.begin()
    works[0].is_completed.return_value = True
    progress.begin()
    works[1].is_completed.assert_not_called()
    progress.reach(ended)  # the device has come to the end of the latest call
    with pytest.raises(WaitError, match="timed out"):
        progress.settle()
    works[1].is_completed.return_value = True
    progress.settle()


SENT: Any = SimpleNamespace(
    rank=1, listed_at=4, action=schedir.send_act(1, 0), peer=2, parts=(), run=lambda: None
)


def failing(says: Callable[[], object], posted_before: int) -> WaitError:
    """What comes of a work that is done, and fails as it `says`, after some that are fine."""
    posted: list[Any] = []
    progress = Progress(Patience(SECOND, lambda: False), posted, Host(CPU), follows=True)
    fine = SimpleNamespace(is_completed=lambda: True, wait=lambda: True)
    posted += [fine] * posted_before
    progress._take(None)
    posted.append(SimpleNamespace(is_completed=lambda: True, wait=says))
    progress._take(SENT)
    posted.append(SimpleNamespace(is_completed=lambda: False, wait=lambda: True))
    progress._take(None)
    with pytest.raises(WaitError) as failed:
        progress.reach(lambda: False)
    return failed.value


@pytest.mark.parametrize("before", [0, 3])
def test_a_work_that_has_failed_is_not_taken_for_done(before: int) -> None:
    """NCCL counts it as completed, and what comes behind it never ends."""

    def raises() -> None:
        raise RuntimeError("remote process exited or there was a network error")

    failed = failing(raises, before)
    place = failed.rank, failed.index, failed.action, failed.what
    assert place == (1, 4, schedir.send_act(1, 0), "1SEND_ACT0 to rank 2")
    assert "network error" in str(failed.cause)


def test_a_failed_work_that_never_says_so_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL aborts its communicator before, which may take for ever."""
    monkeypatch.setattr("schedir.runtime.program.instruction.ABORT", 0.1)
    never = Event()
    try:
        failed = failing(never.wait, 1)
    finally:
        never.set()
    assert failed.index == 4
    assert "does not end" in str(failed.cause)


def test_where_a_wait_of_the_host_tells_nothing_is_followed() -> None:
    posted: list[Any] = [object()]
    progress = Progress(Patience(SECOND, lambda: False), posted, Host(CPU), follows=False)
    instruction: Any = object()
    assert progress(instruction) is instruction
    progress.settle()
    assert len(posted) == 1


def test_what_nccl_says_is_not_lost() -> None:
    """Such as that two ranks have one GPU: no connection has ended."""
    groups, grid = SimpleNamespace(timeout=SECOND), SimpleNamespace(rank=1)
    session: Any = SimpleNamespace(groups=groups, grid=grid, closed=True)
    stalled = WaitError(dist.DistBackendError("NCCL error: Duplicate GPU detected"))
    assert str(Session._explained(session, stalled, "making the executor", None)) == (
        "rank 1: making the executor: waited for the other ranks, but DistBackendError: "
        "NCCL error: Duplicate GPU detected"
    )
