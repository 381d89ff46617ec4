"""Timelines of real ranks: clocks that are apart, stages that take a known time, who may ask."""

from __future__ import annotations

import time
from time import perf_counter_ns
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import schedir
from schedir import Kind, Timeline
from schedir.graph.compile import graph_of
from schedir.runtime import Executor, trace
from schedir.runtime.accelerator import Mark
from schedir.runtime.session import Session
from schedir.runtime.trace import Taken, read_clocks
from tests.literals import listed
from tests.runtime.features import check_timeline
from tests.runtime.kit import MSE, everyone, message_of, random_batch, sgd
from tests.runtime.on_ranks import name_of, on_ranks
from tests.sweeps import sweep

MICROBATCHES = 4


class Sleep(torch.autograd.Function):
    """Takes seconds, forward and back."""

    @staticmethod
    def forward(context: Any, x: Tensor, there: float, back: float) -> Tensor:
        context.back = back
        time.sleep(there)
        return x.clone()

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> Any:
        time.sleep(context.back)
        return grads[0], None, None


class Sleeps(nn.Linear):
    """A stage that takes seconds, and twice as many on the way back."""

    def __init__(self, seconds: float) -> None:
        super().__init__(4, 4)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        return Sleep.apply(made, self.seconds, 2 * self.seconds)  # type: ignore[no-any-return, no-untyped-call]


def executor(rank: int, ranks: int, stage: nn.Module | None = None, **options: Any) -> Executor:
    schedule = schedir.build("1f1b", ranks=ranks, microbatches=MICROBATCHES)
    torch.manual_seed(0)
    stages = {rank: stage or nn.Linear(4, 4)}
    return Executor(schedule, stages, MSE, sgd, **{"trace": True, **options})


def run(traced: Executor, steps: int) -> list[Timeline]:
    x, y = random_batch()
    for _ in range(steps):
        traced.step(x, target=y)
    return traced.timelines()


@on_ranks(2, 4)
def test_a_stage_that_sleeps_takes_as_long(rank: int, ranks: int) -> None:
    seconds = [0.002 * (1 + (3 * stage) % 4) for stage in range(ranks)]
    with executor(rank, ranks, Sleeps(seconds[rank])) as traced:
        found = run(traced, 3)
    assert bool(found) == (rank == 0)
    for one in found:
        check_timeline(one)
        columns, durations = one.schedule.columns, one.ends - one.starts
        for kind, factor in ((Kind.FORWARD, 1), (Kind.BACKWARD, 2)):
            for stage in range(ranks):
                own = durations[columns.is_kind(kind) & (columns.stage == stage)]
                assert own.min() >= factor * seconds[stage]
                # Nobody promises when a sleeper is woken, but one of them soon is.
                assert own.min() < factor * seconds[stage] + 0.05
        # Some rank has to wait for a slower one, and sees what it waits for arrive.
        assert np.isfinite(one.ends[graph_of(one.schedule).transfers.receive]).any()


SUMMED = listed(
    2,
    "0,1 0,1",
    "0F0 1F0 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD 0OPTIM_STEP 1OPTIM_STEP",
    "0F1 1F1 1B1 1REDUCE_GRAD 0B1 0REDUCE_GRAD 0OPTIM_STEP 1OPTIM_STEP",
)


@on_ranks(2)
@sweep("options", [{}, {"clip_grad_norm": 1.0}], quick=[{}], ids=["plain", "clipped"])
def test_a_sum_ends_when_it_is_there_and_not_when_all_are(
    rank: int, options: dict[str, Any]
) -> None:
    stages = {0: Sleeps(0.1), 1: nn.Linear(4, 4)}
    with Executor(SUMMED, stages, MSE, sgd, trace=True, **options) as traced:
        found = run(traced, 4)
    if rank == 0:
        columns = found[0].schedule.columns
        first, last = columns.where(Kind.REDUCE_GRAD)[:2]  # of one rank
        durations = np.array([one.ends - one.starts for one in found])
        # While that of stage 1 is under way its ranks do something else for 200 ms. A busy machine
        # may put a rank to sleep where it finds it there.
        assert not (durations[:, first] > 0.1).all()
        assert np.isfinite(durations[:, last]).any()  # the first has to wait for the other one


@on_ranks(2)
def test_sums_that_are_posted_without_an_update_have_their_time(rank: int) -> None:
    stages = {s: nn.Linear(4, 4) for s in range(2)}
    x, y = random_batch()
    with Executor(SUMMED, stages, MSE, trace=True) as traced:
        traced.step(x, target=y, update=False)
        found = traced.timelines()
    for one in found:
        columns = one.schedule.columns
        assert np.isfinite(one.starts[columns.is_kind(Kind.REDUCE_GRAD)]).all()
        assert np.isnan(one.starts[columns.is_kind(Kind.OPTIM_STEP)]).all()


@on_ranks()
@sweep("ranks", [2, 3], quick=[2], ids=name_of)
def test_clocks_that_are_apart_and_drift_are_aligned(
    rank: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def own(true: int) -> int:
        return true - 10**15 * rank + rank * (true - begun) // 5000  # 200 ppm fast, each rank more

    begun: int = everyone(perf_counter_ns())[0]
    monkeypatch.setattr(trace, "now", lambda: own(perf_counter_ns()))
    monkeypatch.setattr(Session, "spans_hosts", True)  # else they have the same clock
    with executor(rank, ranks) as traced:
        made = traced._engine.trace
        assert made is not None
        first, instants = made._read_clocks(), []
        for _ in range(20):
            run(traced, 1)
            instants.append(Mark())
        taken = [(first.mark, Taken(instants, ()))]
        (aligned,), error = made.recorder.read(taken, first, made._read_clocks())
        # All ranks here have the clock of one machine, in truth.
        true = [1e9 * mark._seconds for mark in instants]
        assert np.abs(aligned - true).max() <= error + 1
        assert error < 10**9  # of 10**15 that they are apart
        for one in run(traced, 3):
            check_timeline(one)
            assert one.makespan < 1000


@on_ranks(2)
def test_clocks_of_one_machine_are_found_equal(rank: int) -> None:
    with executor(rank, 2) as traced:
        reading = read_clocks(traced._engine.session.control)
    assert abs(reading.offset) <= reading.error


@on_ranks(2)
def test_all_ranks_record_or_none(rank: int) -> None:
    message = message_of(executor, rank, 2, trace=rank == 0)
    assert "the ranks were given different arguments: trace is True on process 0" in message


@on_ranks(2)
def test_a_rank_that_does_not_ask_is_not_waited_for_for_ever(rank: int) -> None:
    traced = executor(rank, 2, timeout=4)
    x, y = random_batch()
    traced.step(x, target=y)
    if rank == 0:
        said = message_of(traced.timelines)  # process 1 may have dropped its executor
        assert "waited for a message from process 1" in said or "1 has closed its" in said
