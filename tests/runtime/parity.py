"""Every built-in schedule trained beside plain training, in shapes of all kinds."""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from reference import Optimizer, accumulation
from torch import Tensor, nn

import schedir
from schedir import Kind
from tests.built_in import NAMES, SYNCHRONOUS, variants
from tests.runtime.kit import Twins, adamw, momentum, random_batches
from tests.runtime.recurrences import pipedream

STEPS = 5
WIDTH = 6


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


@frozen
class Case:
    """A schedule of some shape, and the optimiser that trains it."""

    name: str
    ranks: int
    microbatches: int
    parameters: dict[str, Any]
    optimizer: Optimizer

    def __str__(self) -> str:
        own = "".join(f" {key}={value}" for key, value in self.parameters.items())
        by = getattr(self.optimizer, "__name__", "")
        return f"{self.name}{own} of {self.microbatches} microbatches by {by}"

    @property
    def schedule(self) -> schedir.Schedule:
        shape = {"ranks": self.ranks, "microbatches": self.microbatches}
        return schedir.build(self.name, **shape, **self.parameters)


def cases(ranks: int) -> list[Case]:
    """Microbatches below, at and above the ranks, odd ones too: powers of two hide scale errors."""
    found = []
    for microbatches in sorted({1, 3, ranks, 2 * ranks + 1}):
        for name in NAMES:
            chosen = variants(name)
            if name == "fill-drain":
                chosen = [*chosen, {"order": "descending"}]
            optimizers = (adamw,) if name in SYNCHRONOUS else (momentum, adam)
            found += [
                Case(name, ranks, microbatches, parameters, optimizer)
                for parameters in chosen
                for optimizer in optimizers
            ]
    return found


def last_backwards(schedule: schedir.Schedule) -> list[int]:
    """The order of the loss stage's backwards."""
    last = schedule.stages - 1
    (rank,) = schedule.placement[last]
    return [
        action.microbatch
        for action in schedule.flat[rank]
        if action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)
        and action.stage == last
        and action.microbatch is not None
    ]


def assert_trains_as_one_process(case: Case, rank: int | None, device: str = "cpu") -> None:
    """On a rank, or, where that is None, on all ranks in this process: bit for bit.

    What updates more often than once is held against PipeDream's recurrence.
    """
    schedule = case.schedule
    torch.manual_seed(7)
    whole: list[nn.Module] = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).to(device) for _ in range(schedule.stages)
    ]
    twins = Twins(whole, schedule, rank, case.optimizer)
    if case.name in SYNCHRONOUS:
        recurrence = accumulation(schedule.stages, last_backwards(schedule))
    else:
        sync = case.parameters.get("vertical_sync", False)
        recurrence = pipedream(schedule.stages, schedule.microbatches, sync)
    with twins.executor() as executor:
        for x, y in random_batches(STEPS, 3 * schedule.microbatches, WIDTH):
            batch = x.to(device), y.to(device)
            found = executor.step(batch[0], target=batch[1]).loss
            assert found == twins.step(batch, recurrence=recurrence)
        twins.assert_equal()
        for s in twins.local:
            assert_equal_states(executor.optimizers[s], twins.optimizers[s])


def assert_equal_states(mine: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    """Of two optimisers, bit for bit."""
    state, other = mine.state_dict()["state"], theirs.state_dict()["state"]
    assert state.keys() == other.keys()
    for key, entry in other.items():
        for name, value in entry.items():
            equal = torch.equal if isinstance(value, Tensor) else lambda a, b: bool(a == b)
            assert equal(state[key][name], value), f"{name} of parameter {key}"
