"""R: a forward that keeps its input alone and is run again, held against training without any."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import schedir
from schedir import Kind, Schedule
from schedir.ir import COMPUTE
from schedir.runtime import Executor
from schedir.runtime.program import program
from schedir.runtime.program.instruction import Instruction
from tests.built_in import NAMES
from tests.literals import listed
from tests.runtime.features import round_robin, zero_bubble
from tests.runtime.kit import (
    MSE,
    Checkpointed,
    ScaledLoss,
    adamw,
    differing,
    everyone,
    message_of,
    numbered,
    random_batches,
    sgd,
)
from tests.runtime.lists import bidirectional_v, recomputed_early
from tests.runtime.on_ranks import on_ranks
from tests.runtime.test_memory import BOUNDARY, ROWS, WIDTH, Live
from tests.sweeps import sweep


def noisy(number: int) -> list[nn.Module]:
    """What draws, what counts its forwards, and what runs itself again."""
    torch.manual_seed(5)

    def stage() -> nn.Module:
        inner = Checkpointed(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), inner, nn.ReLU())

    return [stage() for _ in range(number)]


def trained(
    schedule: Schedule,
    rank: int | None = None,
    make: Callable[[int], list[nn.Module]] = noisy,
    loss_fn: Any = MSE,
    **options: Any,
) -> tuple[list[float], dict[int, nn.Module], Schedule]:
    """The losses of three steps and an evaluation, the stages, and the list that ran."""
    whole = make(schedule.stages)
    here = range(schedule.stages) if rank is None else schedule.stages_of(rank)
    stages = {stage: whole[stage] for stage in here}
    given = {"in_process": rank is None, **options}
    with Executor(schedule, stages, copy.deepcopy(loss_fn), adamw, **given) as executor:
        *batches, (x, y) = random_batches(4, rows=3 * schedule.microbatches)
        losses = [executor.step(a, target=b).loss for a, b in batches]
        losses.append(executor.evaluate(x, target=y).loss)
        return losses, stages, executor.schedule


def trains_alike(
    schedule: Schedule, *others: tuple[Schedule, dict[str, Any]], **given: Any
) -> list[Schedule]:
    """Train by a list, and alike by others with their options; the lists that ran then."""
    losses, stages, _ = trained(schedule, **given)
    lists = []
    for other, options in others:
        found, mine, ran = trained(other, **given, **options)
        assert found == losses
        assert mine.keys() == stages.keys()
        assert not [s for s in mine if differing(mine[s], stages[s])]
        lists.append(ran)
    return lists


def rs_of(schedule: Schedule) -> set[tuple[int, int | None]]:
    every = (action for actions in schedule.flat for action in actions)
    return {(a.stage, a.microbatch) for a in every if a.kind is Kind.RECOMPUTE}


def rs(*stages: int, microbatches: Iterable[int] = range(4)) -> set[tuple[int, int]]:
    return {(stage, m) for stage in stages for m in microbatches}


def built(target: Any, ranks: int = 2, **parameters: Any) -> Schedule:
    return schedir.build(target, ranks=ranks, microbatches=4, **parameters)


LISTS: dict[str, Callable[[], Schedule]] = {
    **{name: lambda name=name: built(name) for name in NAMES},  # type: ignore[misc]
    "vertical sync": lambda: built("pipedream", vertical_sync=True),
    "split": lambda: built(zero_bubble),
    "pairs": lambda: bidirectional_v(2, 4),
    "replicas": lambda: built(round_robin, 3),
}


@sweep("name", LISTS, quick=["interleaved-1f1b", "vertical sync", "split", "pairs", "replicas"])
def test_weights_are_those_without(name: str) -> None:
    """Of all microbatches, or of some, earlier than is needed, and in stages that have none yet."""
    schedule = LISTS[name]()
    last = schedule.stages - 1
    others: list[tuple[Schedule, dict[str, Any]]] = [(schedule, {"recompute": True})]
    if name != "pairs":
        mixed = recomputed_early(schedule, {0, last})
        assert rs_of(mixed) == rs(0, last, microbatches=(0, 2))
        others += [(mixed, {}), (mixed, {"recompute": [last]})]
    every, *some = map(rs_of, trains_alike(schedule, *others))
    assert every == rs(*range(schedule.stages))
    assert name == "pairs" or some == [rs_of(mixed), rs_of(mixed) | rs(last)]


@sweep("name", ["1f1b", "pipedream", "interleaved-1f1b"], quick=["1f1b"])
@on_ranks(2)
def test_on_ranks(rank: int, name: str) -> None:
    schedule = recomputed_early(built(name), {0})
    (ran,) = trains_alike(built(name), (schedule, {"recompute": [1]}), rank=rank)
    assert rs_of(ran) == rs_of(schedule) | rs(1)
    assert everyone(ran) == [ran] * 2


def test_under_autocast_with_a_loss_of_its_own_parameters() -> None:
    schedule = built("1f1b")
    with torch.autocast("cpu", torch.bfloat16):
        trains_alike(schedule, (recomputed_early(schedule, {0, 1}), {}), loss_fn=ScaledLoss())


def test_a_loss_is_counted_once() -> None:
    calls: list[bool] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        calls.append(torch.is_grad_enabled())
        return MSE(output, target)

    schedule = listed(2, "0", "0F0 0F1 0R0 0B0 0B1 0OPTIM_STEP")
    with Executor(schedule, numbered(noisy(1)), loss_fn, adamw) as executor:
        ((x, y),) = random_batches(1)
        executor.step(x, target=y)
        calls.clear()
        result = executor.step(x, target=y, outputs=True)
    assert calls == [False, True, True]
    assert len(result.losses) == 2
    assert result.loss == pytest.approx(sum(result.losses) / 2)


def test_an_error_names_the_r() -> None:
    runs: list[Tensor] = []

    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            runs.append(x)
            if len(runs) == 3:
                raise ValueError("again")
            return super().forward(x)

    schedule = listed(2, "0", "0F0 0F1 0R0 0B0 0R1 0B1 0OPTIM_STEP")
    ((x, y),) = random_batches(1)
    with Executor(schedule, {0: Fails(4, 4)}, MSE, adamw) as executor:
        assert "rank 0 #2 0R0: ValueError: again" in message_of(executor.step, x, target=y)


@on_ranks(2)
def test_ranks_that_recompute_other_stages_are_told(rank: int) -> None:
    stages = {rank: noisy(2)[rank]}
    message = message_of(Executor, built("1f1b"), stages, MSE, adamw, recompute=[rank])
    assert "recompute is [0] on process 0, but [1] on process 1" in message


def test_a_trace_shows_it_and_costs_are_fitted_on_it() -> None:
    class Slow(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(200 * torch.is_grad_enabled()):
                super().forward(x)
            return super().forward(x)

    stages: dict[int, nn.Module] = {0: Slow(4, 4), 1: Slow(4, 4)}
    given: dict[str, Any] = {"in_process": True, "recompute": [0], "trace": True}
    with Executor(built("1f1b"), stages, MSE, adamw, **given) as executor:
        for x, y in random_batches(3):
            executor.step(x, target=y)
        lines = executor.timelines()
    for line in lines:
        places = line.schedule.columns.where(Kind.RECOMPUTE)
        assert len(places) == 4
        assert (line.ends[places] > line.starts[places]).all()
    costs = schedir.CostModel.fit(lines)
    assert isinstance(costs.forward, tuple)
    assert isinstance(costs.recompute, tuple)
    assert costs.recompute[0] > 3 * costs.forward[0]  # nothing of it is taken for a forward
    assert costs.recompute[1] == costs.forward[1]  # nobody has seen it


LISTED = {
    "all": "0F0 1F0 0F1 1F1 1R0 1B0 0R0 0B0 1R1 1B1 0R1 0B1",
    "some, and early": "0F0 1F0 0F1 1F1 0R0 1R0 1B0 0B0 0R1 1B1 0B1",
    "of a split backward": "0F0 1F0 0F1 1F1 1R0 1I0 0R0 0I0 1I1 0R1 0I1 1W0 0W0 1W1 0W1",
}


def three_layers() -> Sequence[nn.Module]:
    return linear(), nn.Tanh(), linear()


def held_at(
    schedule: Schedule, layers: Callable[[], Sequence[nn.Module]] = three_layers
) -> tuple[list[int], Any, Any]:
    """The bytes after every action of compute of a rank that runs two stages of these layers, those
    of the timeline then, and the sizes; what the first stage is given is the user's."""
    torch.manual_seed(1)
    stages: list[nn.Module] = [nn.Sequential(*layers()) for _ in range(2)]
    x, y = torch.randn(2, ROWS, WIDTH)
    inputs, target = [x] * 2, [y] * 2
    found: list[int] = []
    with Executor(schedule, numbered(stages), squares, sgd, trace=True) as executor:
        for _ in range(2):
            executor.step(inputs, target=target)
        hosts = buffers_of(executor)
        live = Live([x, y, *(p for stage in stages for p in stage.parameters()), *hosts])

        def observer(instruction: Instruction) -> Instruction:
            def run() -> None:
                instruction.run()
                if instruction.computes:
                    found.append(live.now())

            return attrs.evolve(instruction, run=run)

        with pytest.MonkeyPatch.context() as patch, live:
            patch.setattr(program, "listening", lambda: [observer])
            executor.step(inputs, target=target)
        assert {*map(id, buffers_of(executor))} == {*map(id, hosts)}
        line = executor.timelines()[-1]
    times, amounts = line.memory(0)
    after = np.searchsorted(times, line.ends[line.schedule.columns.is_kind(*COMPUTE)], "right") - 1
    return found, amounts[after] - amounts[0], line.sizes


def buffers_of(executor: Executor) -> list[Tensor]:
    """The host's memory for what is moved there."""
    copiers = executor._engine.training.parts.copiers.values()
    return [own for copier in copiers for each in copier._buffers.values() for own in each]


@pytest.mark.parametrize("name", LISTED)
def test_what_is_held_is_what_the_timeline_says(name: str) -> None:
    found, said, sizes = held_at(listed(2, "0 0", f"{LISTED[name]} 0OPTIM_STEP 1OPTIM_STEP"))
    assert (sizes.input, sizes.activation) == ((0, BOUNDARY), (BOUNDARY, 3 * BOUNDARY))
    assert found == said.tolist()


def test_gradients_that_an_i_computes_are_held_from_then_on() -> None:
    """Those of the middle layer, which is called twice; the first stage's I computes nothing."""

    def layers() -> Sequence[nn.Module]:
        middle = linear()
        return linear(), nn.Tanh(), middle, nn.Tanh(), middle, nn.Tanh(), linear()

    schedule = listed(
        2, "0 0", "0F0 1F0 0F1 1F1 1I0 0I0 1I1 0I1 1W0 0W0 1W1 0W1 0OPTIM_STEP 1OPTIM_STEP"
    )
    found, said, sizes = held_at(schedule, layers)
    weight = 4 * WIDTH**2
    assert (sizes.gradient, sizes.early_gradient) == ((3 * weight,) * 2, (0, weight))
    assert found == said.tolist()


def squares(output: Tensor, target: Tensor) -> Tensor:
    """Unlike MSE it leaves no memory of a boundary's size to its scalar."""
    return ((output - target) ** 2).sum()


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH, bias=False)
