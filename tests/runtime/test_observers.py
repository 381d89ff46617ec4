"""Who watches a list being run, and what that costs where nobody does."""

from __future__ import annotations

from functools import partial
from time import perf_counter

import attrs
import pytest
import torch
from torch import nn

import schedir
from schedir import Kind
from schedir.runtime import Executor
from schedir.runtime.accelerator import Host
from schedir.runtime.program import program
from schedir.runtime.program.instruction import Instruction
from schedir.runtime.program.observers import Observer, QueuedClock, observed


@pytest.fixture
def executor() -> Executor:
    schedule = schedir.build("1f1b", ranks=2, microbatches=3)
    stages: dict[int, nn.Module] = {s: nn.Linear(3, 3) for s in range(2)}
    optimizer = partial(torch.optim.SGD, lr=0.1)
    return Executor(schedule, stages, nn.functional.mse_loss, optimizer, in_process=True)


def step(executor: Executor) -> None:
    x, y = torch.randn(2, 6, 3)
    executor.step(x, target=y)


def test_an_observer_can_time_every_entry_of_every_rank(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans: dict[tuple[int, int], tuple[float, float]] = {}

    def recorder(instruction: Instruction) -> Instruction:
        def timed() -> None:
            started = perf_counter()
            instruction.run()
            spans[instruction.rank, instruction.index] = started, perf_counter()

        return attrs.evolve(instruction, run=timed) if instruction.listed else instruction

    observers: list[Observer] = [recorder]
    monkeypatch.setattr(program, "listening", lambda: observers)
    step(executor)
    for _ in range(2):  # of a known shape
        spans.clear()
        step(executor)
        actions = executor.schedule.flat
        assert set(spans) == {(r, i) for r, own in enumerate(actions) for i in range(len(own))}
        for rank, own in enumerate(actions):
            compute = [i for i, a in enumerate(own) if a.kind in (Kind.FORWARD, Kind.BACKWARD)]
            times = [time for i in compute for time in spans[rank, i]]
            assert times == sorted(times)
    observers.clear()
    spans.clear()
    step(executor)
    assert not spans


def test_what_nobody_observes_stays_as_it_is(executor: Executor) -> None:
    step(executor)
    step(executor)
    latest = executor._engine.training._latest
    assert latest is not None
    (instructions, *_) = latest.lists
    assert observed(instructions, []) is instructions
    clock = QueuedClock(Host(torch.device("cpu")))
    timed = {x.action.kind for x in instructions if clock(x) is not x}
    assert timed == {Kind.FORWARD, Kind.BACKWARD, Kind.OPTIM_STEP}
