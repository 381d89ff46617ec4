"""Who watches a list being run, and what that costs where nobody does."""

from __future__ import annotations

import attrs
import pytest
import torch

import schedir
from schedir import Kind
from schedir.runtime import Executor
from schedir.runtime.accelerator import Host
from schedir.runtime.program import program
from schedir.runtime.program.instruction import Instruction, Observer, observed
from schedir.runtime.trace import Recorder
from tests.runtime.kit import MSE, linear_stages, numbered, random_batch, sgd


@pytest.fixture
def executor() -> Executor:
    schedule = schedir.build("1f1b", ranks=2, microbatches=3)
    return Executor(schedule, numbered(linear_stages()), MSE, sgd, in_process=True)


def step(executor: Executor) -> None:
    x, y = random_batch(6)
    executor.step(x, target=y)


def test_an_observer_may_come_and_go(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: set[tuple[int, int]] = set()

    def recorder(instruction: Instruction) -> Instruction:
        def run() -> None:
            instruction.run()
            ran.add((instruction.rank, instruction.index))

        return attrs.evolve(instruction, run=run) if instruction.listed else instruction

    observers: list[Observer] = []
    monkeypatch.setattr(program, "listening", lambda: observers)
    for _ in range(2):
        step(executor)
        assert not ran
        observers.append(recorder)
        step(executor)
        actions = executor.schedule.flat
        assert ran == {(r, i) for r, own in enumerate(actions) for i in range(len(own))}
        ran.clear()
        observers.clear()


def test_what_nobody_observes_stays_as_it_is(executor: Executor) -> None:
    step(executor)
    step(executor)
    latest = executor._engine.training._latest
    assert latest is not None
    instructions = latest.instructions
    assert observed(instructions, []) is instructions
    clock = Recorder(Host(torch.device("cpu")), traces=False)
    timed = {x.action.kind for x in instructions if clock(x) is not x}
    assert timed == {Kind.FORWARD, Kind.BACKWARD, Kind.OPTIM_STEP}
