"""Ranks of one process, each on a stream of its own: memory, errors and random numbers.

What is ordered before what is shown in `test_races`, on the same device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedir
from schedir.runtime import Executor, plan, rng
from schedir.runtime.stage import stage as seeds
from tests.runtime.kit import MSE, adamw, linear_stages, message_of, numbered, random_batch
from tests.runtime.streams.clocks import FakeDevice
from tests.runtime.streams.watched import watching


class Noting(FakeDevice):
    """Notes what is used on which stream, by address."""

    def __init__(self) -> None:
        super().__init__()
        self.uses: set[tuple[int, int]] = set()

    def used(self, tensor: Tensor) -> None:
        self.uses.add((tensor.data_ptr(), self.current.number))


def test_what_a_tie_makes_is_kept_while_others_use_it() -> None:
    device = Noting()
    schedule = schedir.build("1f1b", ranks=3, microbatches=4)
    stages = numbered(linear_stages(3))
    stages[2].load_state_dict(stages[0].state_dict())
    x, y = random_batch()
    made: dict[int, int] = {}

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        held = list(parameters)

        class Looks(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:  # type: ignore[override]
                made[device.current.number] = held[0].grad.data_ptr()

        return Looks(held, lr=0.1)

    options: Any = {"ties": [[(0, "0.weight"), (2, "0.weight")]], "in_process": True}
    with watching(device, False), Executor(schedule, stages, MSE, sgd, **options) as executor:
        executor.step(x, target=y)
    assert {(made[1], 1), (made[3], 3)} <= device.uses


def test_after_an_error_too_the_caller_waits_for_every_stream() -> None:
    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if type(x) is Tensor:
                raise ValueError("not now")
            return super().forward(x)

    schedule = schedir.build("1f1b", ranks=3, microbatches=4)
    stages = numbered([*linear_stages(2), Fails(4, 4)])
    x, y = random_batch()
    device = FakeDevice()
    options: Any = {"in_process": True}
    with watching(device, False), Executor(schedule, stages, MSE, adamw, **options) as executor:
        assert "not now" in message_of(executor.step, x, target=y)
        assert not device.unjoined()
        with device.on(device.stream()):
            assert {1, 2} <= {*device.unjoined()}  # the first two ranks have done something


def test_seeding_touches_the_stages_own_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = torch.Generator(), torch.Generator()
    monkeypatch.setattr(plan, "accelerator_of", lambda _: FakeDevice())
    monkeypatch.setattr(FakeDevice, "generators", lambda self: (own,))
    monkeypatch.setattr(torch.cuda, "default_generators", (own, other))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: pytest.fail("all devices"))
    drawn: list[float] = []

    class Draws(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if type(x) is Tensor:
                drawn.append(float(torch.rand((), generator=own)))
            return super().forward(x)

    schedule = schedir.build("1f1b", ranks=1, microbatches=2)
    x, y = random_batch()
    stages = Draws(4, 4), Draws(4, 4)
    before, seed = (torch.get_rng_state(), own.get_state()), other.initial_seed()
    for stage in stages:
        with Executor(schedule, {0: stage}, MSE, adamw) as executor:
            executor.step(x, target=y)
    assert drawn[:2] == drawn[2:]
    assert drawn[0] != drawn[1]
    assert other.initial_seed() == seed
    assert all(map(torch.equal, (torch.get_rng_state(), own.get_state()), before))


def test_a_loop_is_seeded_as_a_stage_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the current device, whose generator it finds itself."""
    own = torch.Generator()
    monkeypatch.setattr(FakeDevice, "generators", lambda self: (own,))
    monkeypatch.setattr(seeds, "current_accelerator", FakeDevice)
    before = own.get_state(), torch.get_rng_state()
    with rng(1, 2, 3, 4):
        drawn = torch.rand(2, generator=own)
        assert torch.equal(drawn, torch.rand(2))
    assert all(map(torch.equal, (own.get_state(), torch.get_rng_state()), before))
