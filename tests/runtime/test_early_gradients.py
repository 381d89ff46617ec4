"""Gradients of parameters that an I computes: when they are added, to the bit, and what is held."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from reference import recurrence_of
from torch import Tensor, nn

import schedir
from schedir import Kind
from schedir.runtime import Executor
from schedir.runtime.program.compiler import early_additions
from tests.built_in import EVERY
from tests.literals import listed
from tests.runtime.features import zero_bubble
from tests.runtime.kit import (
    MSE,
    Calls,
    Checkpointed,
    SometimesCheckpointed,
    Twins,
    numbered,
    sgd,
)
from tests.runtime.on_ranks import on_ranks
from tests.runtime.test_memory import Live
from tests.runtime.test_split import doubled

WIDTH = 4


class Own(nn.Linear):
    """A linear layer by a custom Function."""

    def forward(self, x: Tensor) -> Tensor:
        return doubled(x, self.weight)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "checkpointed": lambda: Checkpointed(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
    "sometimes": lambda: SometimesCheckpointed(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
    "custom": lambda: Own(WIDTH, WIDTH),
    "twice": lambda: Calls(lambda layer, x: layer(layer(x).tanh()), nn.Linear(WIDTH, WIDTH)),
    "in part": lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH), Checkpointed(nn.Linear(WIDTH, WIDTH)), nn.LayerNorm(WIDTH)
    ),
}
ORDERS = {
    "in order": "F0 F1 F2 F3 I0 I1 W0 I2 W1 I3 W2 W3 S",
    "reversed": "F0 F1 F2 F3 I0 I1 I2 I3 W3 W2 W1 W0 S",
    "overtaken at the end": "F0 F1 F2 F3 I0 B1 B2 W0 B3 S",
    "overtaken": "F0 F1 F2 F3 I0 B1 I2 B3 W0 W2 S",
    "of an older version": "F0 F1 F2 B0 S F3 B3 I1 I2 W1 W2 S",
    "of two versions": "F0 F1 B0 S F2 F3 B3 I1 I2 W1 W2 S",
    "across an update": "F0 F1 F2 F3 I0 I1 W0 S I2 W1 I3 W2 W3 S",
}
"""Lists of a stage of four microbatches; S is its OPTIM_STEP."""


def with_a_stage_before(order: str) -> schedir.Schedule:
    """On one rank, with another stage before it, which makes its I compute something."""
    own = []
    for token in order.split():
        if token == "S":
            own.append("0OPTIM_STEP 1OPTIM_STEP")
        elif token[0] == "F":
            own.append(f"0{token} 1{token}")
        elif token[0] == "I":
            own.append(f"1{token}")
        else:
            own.append(f"1{token} 0B{token[1:]}")
    return listed(4, "0 0", " ".join(own))


def checkpointed_at(odd: bool, microbatches: int, rows: int = 2) -> Tensor:
    """Inputs of microbatches, of which the odd ones, or the even ones, are checkpointed by
    `SometimesCheckpointed`."""
    x = torch.randn(microbatches, rows, WIDTH)
    signs = torch.tensor([1.0 if bool(m % 2) is odd else -1.0 for m in range(microbatches)])
    x[:, 0, 0] = x[:, 0, 0].abs() * signs
    return x.flatten(0, 1)


def assert_trains(
    schedule: schedir.Schedule,
    module: Callable[[], nn.Module],
    rank: int | None = None,
) -> None:
    """Such stages after a first one, which changes no sign, train as one process does, bit for bit,
    from the first call on."""
    torch.manual_seed(3)
    stages = [nn.RMSNorm(WIDTH), *(module() for _ in range(1, schedule.stages))]
    twins = Twins(stages, schedule, rank, sgd)
    with twins.executor() as executor:
        for step in range(4):
            x = checkpointed_at(step % 2 == 1, schedule.microbatches)
            y = torch.randn(x.shape)
            executor.step(x, target=y)
            twins.step((x, y), recurrence=recurrence_of(schedule))
            twins.assert_equal()


@pytest.mark.parametrize("order", ORDERS)
def test_microbatches_are_added_in_the_order_of_their_ws(order: str) -> None:
    for module in MODULES.values():
        assert_trains(with_a_stage_before(ORDERS[order]), module)


REPLICAS = schedir.insert_communication(
    listed(
        6,
        "2 0,1 2",
        "1F0 1F2 1F4 1I0 1I2 1W0 1W2 1REDUCE_GRAD 1I4 1OPTIM_STEP 1W4 1REDUCE_GRAD 1OPTIM_STEP",
        "1F1 1F3 1F5 1I1 1I3 1W1 1W3 1REDUCE_GRAD 1I5 1OPTIM_STEP 1W5 1REDUCE_GRAD 1OPTIM_STEP",
        "0F0 0F1 0F2 0F3 0F4 0F5 2F0 2I0 2F1 2I1 2W0 2F2 2I2 2W1 2F3 2I3 2W2 2W3 2F4 2I4 2F5 2I5 "
        "2OPTIM_STEP 2W4 2W5 2OPTIM_STEP 0B0 0B1 0B2 0B3 0OPTIM_STEP 0B4 0B5 0OPTIM_STEP",
    )
)
"""Also with an I between the sum of the gradients and the update."""


def test_each_replica_of_one_process_adds_to_its_own_gradients() -> None:
    for module in MODULES.values():
        assert_trains(REPLICAS, module)


@on_ranks(2)
def test_on_ranks(rank: int) -> None:
    schedule = schedir.build("zbv", ranks=2, microbatches=5)
    assert_trains(schedule, MODULES["in part"], rank)


def test_hooks_run_once_for_each_microbatch() -> None:
    schedule = schedir.build(zero_bubble, ranks=2, microbatches=3)
    twins = Twins([MODULES["checkpointed"]() for _ in range(2)], schedule)
    calls: list[str] = []
    for stage in twins.local.values():
        for p in stage.parameters():
            p.register_hook(lambda _: calls.append("tensor"))
            p.register_post_accumulate_grad_hook(lambda _: calls.append("after"))
    with twins.executor() as executor:
        x = torch.randn(6, WIDTH)
        executor.step(x, target=x)
    assert sorted(calls) == ["after"] * 12 + ["tensor"] * 12


def test_in_every_built_in_schedule_all_may_be_added_at_once() -> None:
    found = 0
    for name in EVERY:
        schedule = schedir.build(name, ranks=4, microbatches=8)
        for actions in schedule.flat:
            split = [t for t, a in enumerate(actions) if a.kind is Kind.BACKWARD_INPUT]
            assert [*early_additions(actions)] == split
            found += len(split)
    assert found > 500


SIZE = 32


def peak(name: str, kind: Callable[..., nn.Module]) -> int:
    """The most gradients of a stage's weights at once in a step, of all stages together."""
    schedule = schedir.build(name, ranks=4, microbatches=8)
    stages = [kind(nn.Linear(SIZE, SIZE, bias=False), nn.Tanh()) for _ in range(schedule.stages)]
    x = [torch.randn(2, SIZE)] * 8
    with Executor(schedule, numbered(stages), MSE, sgd, in_process=True) as executor:
        executor.step(x, target=x)
        with Live((p for stage in stages for p in stage.parameters()), 4 * SIZE**2) as live:
            executor.step(x, target=x)
    most: int = live.peak // (4 * SIZE**2)
    return most


@pytest.mark.parametrize(("name", "stages"), [(zero_bubble, 4), ("zbv", 8)])
def test_no_gradient_waits_for_its_w(name: str, stages: int) -> None:
    """The `.grad` of each stage is there, and what is being added to one of them."""
    for kind in (nn.Sequential, Checkpointed):
        assert peak(name, kind) == stages + 1
