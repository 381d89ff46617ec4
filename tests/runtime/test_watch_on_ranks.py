"""What processes learn of each other: who is to blame, who is slow, and whether to stop."""

from __future__ import annotations

import os
import signal
import time

import pytest

import schedir
from schedir.runtime import Executor
from tests.runtime.kit import MSE, adamw, everyone, linear_stages, numbered, random_batch
from tests.runtime.on_ranks import on_ranks


def executor_on(rank: int, seconds: float = 0.0, fails: bool = False) -> Executor:
    """Of a stage that takes some seconds more in its forward, or fails."""
    schedule = schedir.build("1f1b", ranks=2, microbatches=4)
    stage = linear_stages(2)[rank]

    def delay(*_: object) -> None:
        time.sleep(seconds)
        if fails:
            raise OSError("no more of this")

    stage.register_forward_pre_hook(delay)
    return Executor(schedule, {rank: stage}, MSE, adamw, timeout=60)


@on_ranks(2)
def test_the_error_on_each_rank_has_the_root(rank: int) -> None:
    executor = executor_on(rank, fails=rank == 1)
    x, y = random_batch(8)
    with pytest.raises(schedir.ExecutionError) as found:
        executor.step(x, target=y).loss  # noqa: B018  # a rank that only sends learns of it here
    (root,) = found.value.roots
    place = (root.rank, root.step, root.index, str(root.action), root.cause)
    assert place == (1, 0, 1, "1F0", "OSError: no more of this")
    everyone("both have failed")


@on_ranks(2)
def test_a_slow_rank_is_named_with_its_ratio(rank: int) -> None:
    with executor_on(rank, seconds=0.02 if rank == 1 else 0.0) as executor:
        x, y = random_batch(8)
        for _ in range(4):
            result = executor.step(x, target=y)
        everyone("both have measured")
        ((slow, ratio),) = result.stragglers
        assert slow == 1
        assert ratio > 2
        everyone("both have looked")


@on_ranks(2)
def test_sigterm_asks_both_ranks_to_stop_after_the_same_call(rank: int) -> None:
    with executor_on(rank) as executor:
        x, y = random_batch(8)
        assert everyone(executor.stop_requested) == [False, False]
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        stopped: list[bool] = []
        while not stopped or not stopped[-1]:
            executor.step(x, target=y)
            stopped.append(executor.stop_requested)
        assert len(set(everyone(len(stopped)))) == 1


@on_ranks(2)
def test_sigterm_ends_a_forked_process_and_only_that(rank: int) -> None:
    """Such as a worker of a DataLoader, which is ended so."""
    with executor_on(rank) as executor:
        x, y = random_batch(8)
        executor.step(x, target=y)
        child = os.fork()
        if not child:
            signal.pause()
            os._exit(0)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGTERM
        everyone("both have lost theirs")
        for _ in range(3):
            executor.step(x, target=y)
            assert not executor.stop_requested


def test_with_one_process_nobody_is_slow_or_stops() -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=4)
    executor = Executor(schedule, numbered(linear_stages()), MSE, in_process=True)
    x, y = random_batch(8)
    assert executor.step(x, target=y).stragglers == ()
    assert not executor.stop_requested
