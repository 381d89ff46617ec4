"""After a call that failed, the next one starts anew: nothing of the failed one is left."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable
from typing import cast

import pytest
import torch
import torch.distributed as dist
from reference import plain_step, recurrence_of
from torch import Tensor, nn

import schedir
from schedir.errors import ExecutionError
from schedir.runtime import Executor
from schedir.runtime.processes.failure import WaitError
from schedir.runtime.processes.groups import Message
from schedir.runtime.program.instruction import Progress
from tests.built_in import EVERY
from tests.runtime.kit import (
    MSE,
    Checkpointed,
    assert_equal_stages,
    gradients,
    microbatches_of,
    numbered,
    sgd,
)
from tests.runtime.on_ranks import on_ranks
from tests.sweeps import sweep


class Fails(nn.Module):
    """Fails in its forward, or in the backward of that, where it is called that many times; its
    layer may be checkpointed."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.linear = (Checkpointed if checkpointed else nn.Sequential)(nn.Linear(3, 3))
        self.left, self.backward = -1, False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(self.linear(x))
        if not self.training:
            return y
        self.left -= 1
        if not self.left:
            if not self.backward:
                raise ValueError("struck")
            y.register_hook(self._strike)
        return y

    def _strike(self, grad: Tensor) -> None:
        raise ValueError("struck")


@sweep("seed", range(500), quick=range(8))
def test_the_calls_after_a_failed_one_train_as_if_it_had_not_been(seed: int) -> None:
    chance = random.Random(seed)
    name = chance.choice([*EVERY])
    schedule = schedir.build(name, ranks=3 if name == "1f1b-rr" else 2, microbatches=6)
    torch.manual_seed(seed)
    stages, whole = (
        [Fails(checkpointed=s % 2 == 1) for s in range(schedule.stages)] for _ in range(2)
    )
    optimizers = [sgd(stage.parameters()) for stage in whole]
    failing = chance.randrange(3)
    with Executor(schedule, numbered(stages), MSE, sgd, in_process=True) as executor:
        for call in range(4):
            # An update of an asynchronous schedule may have come before the failure.
            for mine, theirs in zip(stages, whole, strict=True):
                theirs.load_state_dict(mine.state_dict())
            inputs, target = torch.randn(2, chance.choice([6, 12]), 3)
            if call == failing:
                struck = chance.choice(stages)
                struck.left, struck.backward = chance.randint(1, 6), chance.random() < 0.5
                with pytest.raises(ExecutionError, match="struck"):
                    executor.step(inputs, target=target)
                struck.left = -1
                assert gradients(stages) == [None] * 2 * len(stages)
                continue
            found = executor.step(inputs, target=target).loss
            microbatches = microbatches_of((inputs, target), 6)
            recurrence = recurrence_of(schedule)
            assert found == plain_step(whole, MSE, optimizers, microbatches, recurrence)
            assert_equal_stages(numbered(stages), whole)


@pytest.mark.parametrize("struck", [0, 1])
def test_accumulated_gradients_that_are_lost_are_told_of(struck: int) -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    stages = [Fails(), Fails()]
    inputs, target = torch.randn(2, 4, 3)
    with Executor(schedule, numbered(stages), MSE, sgd, in_process=True) as executor:
        executor.step(inputs, target=target, update=False)
        stages[struck].left = 1
        with pytest.raises(ExecutionError) as caught:
            executor.step(inputs, target=target)
    assert caught.value.__notes__ == [
        "the gradients that earlier calls with update=False had accumulated are lost: repeat those "
        "calls"
    ]
    assert gradients(stages) == [None] * 4
    first, *between, last = (str(entry.path) for entry in caught.traceback)
    assert first == last == __file__
    assert sum("schedir/runtime" in path for path in between) <= 3


class Never:
    """What can't arrive."""

    def wait(self) -> None:
        raise RuntimeError("closed")


def test_what_had_not_arrived_raises_at_every_read() -> None:
    message: Message = Message(torch.zeros(1), "the loss of process 1", 1, cast(dist.Work, Never()))
    message.drop()
    message.drop()
    for _ in range(2):
        with pytest.raises(WaitError):
            message.wait()
    arrived = Message(torch.zeros(1), "the loss of process 1", 1, None)
    arrived.drop()
    assert arrived.wait() == 0


@on_ranks(2)
def test_a_failed_executor_keeps_nothing_alive(rank: int) -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    stage = Fails()
    stage.left = -1 if rank else 1
    executor = Executor(schedule, {rank: stage}, MSE, sgd, timeout=30)
    x = torch.ones(4, 3)
    with pytest.raises(ExecutionError):
        executor.step(x, target=x)
    gone = threading.Event()
    known = weakref.ref(stage, lambda _: gone.set())
    del executor, stage
    for _ in range(600):  # the monitor holds what it watches until its next look
        gc.collect()
        if gone.wait(0.1):
            break
    assert known() is None


class Reads(nn.Module):
    """From its third forward on another thread reads a loss, which has come in the fourth one; then
    it fails."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(3, 3), 0
        self.loss: Callable[[], float] | None = None
        self.reads, self.comes = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.loss is not None and self.calls == 3:
            self.reader = threading.Thread(target=self.loss)
            self.reader.start()
            assert self.reads.wait(60)
        if self.loss is not None and self.calls == 4:
            self.comes.set()
            self.reader.join(60)
            raise ValueError("struck")
        y: Tensor = self.linear(x)
        return y

    def wait(self, *_: object) -> None:
        self.reads.set()
        if threading.current_thread() is not threading.main_thread():
            assert self.comes.wait(60)


@on_ranks(2)
def test_a_thread_that_reads_a_loss_leaves_the_place_of_an_error_alone(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    stage = Reads()
    x = torch.ones(4, 3)
    with Executor(schedule, {rank: stage}, MSE, sgd, timeout=30) as executor:
        result = executor.step(x, target=x)
        if not rank:
            monkeypatch.setattr(Progress, "reach", stage.wait)
            stage.loss = lambda: result.loss
        with pytest.raises(ExecutionError) as caught:
            executor.step(x, target=x)
    if not rank:
        assert str(caught.value.action) == "0F1"
