"""R: a forward that keeps its input alone and is run again, held against training without any."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import schedir
from schedir import Kind, Schedule
from schedir.runtime import Executor
from schedir.runtime.program import program
from schedir.runtime.program.instruction import Instruction
from tests.built_in import NAMES
from tests.literals import listed
from tests.runtime.features import round_robin, zero_bubble
from tests.runtime.kit import (
    MSE,
    ScaledLoss,
    adamw,
    assert_equal_stages,
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


class Checkpointed(nn.Module):
    """Runs a part of its own again, in whatever backward it is in."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return made


def noisy(number: int) -> list[nn.Module]:
    """What draws, what counts its forwards, and what runs itself again."""
    torch.manual_seed(5)
    return [
        nn.Sequential(
            nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), Checkpointed(), nn.ReLU()
        )
        for _ in range(number)
    ]


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
    with Executor(
        schedule, stages, copy.deepcopy(loss_fn), adamw, in_process=rank is None, **options
    ) as executor:
        batches = random_batches(4, rows=3 * schedule.microbatches)
        losses = [executor.step(x, target=y).loss for x, y in batches[:3]]
        losses.append(executor.evaluate(batches[3][0], target=batches[3][1]).loss)
        return losses, stages, executor.schedule


def rs_of(schedule: Schedule) -> set[tuple[int, int | None]]:
    return {
        (action.stage, action.microbatch)
        for actions in schedule.flat
        for action in actions
        if action.kind is Kind.RECOMPUTE
    }


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
    """Of all microbatches, or of some, and earlier than is needed."""
    schedule = LISTS[name]()
    losses, stages, _ = trained(schedule)
    plain = [stages[number] for number in sorted(stages)]
    everything = {(s, m) for s in range(schedule.stages) for m in range(4)}
    found, mine, ran = trained(schedule, recompute=True)
    assert found == losses
    assert_equal_stages(mine, plain)
    assert rs_of(ran) == everything
    if name != "pairs":
        last = schedule.stages - 1
        mixed = recomputed_early(schedule, {0, last})
        found, mine, ran = trained(mixed)
        assert found == losses
        assert_equal_stages(mine, plain)
        assert rs_of(ran) == rs_of(mixed) == {(s, m) for s in {0, last} for m in (0, 2)}
        found, mine, ran = trained(mixed, recompute=[last])  # where there is none yet
        assert found == losses
        assert_equal_stages(mine, plain)
        assert rs_of(ran) == {*rs_of(mixed), *((last, m) for m in range(4))}


@sweep("name", ["1f1b", "pipedream", "interleaved-1f1b"], quick=["1f1b"])
@on_ranks(2)
def test_on_ranks(rank: int, name: str) -> None:
    schedule = recomputed_early(built(name), {0})
    losses, stages, _ = trained(built(name), rank)
    found, mine, ran = trained(schedule, rank, recompute=[1])
    assert found == losses
    assert_equal_stages(mine, [stages.get(s, nn.Module()) for s in range(schedule.stages)])
    assert rs_of(ran) == {*rs_of(schedule), *((1, m) for m in range(4))}
    assert everyone(ran) == [ran] * 2


def test_under_autocast_with_a_loss_of_its_own_parameters() -> None:
    schedule = built("1f1b")
    with torch.autocast("cpu", torch.bfloat16):
        losses, stages, _ = trained(schedule, loss_fn=ScaledLoss())
        found, mine, _ = trained(recomputed_early(schedule, {0, 1}), loss_fn=ScaledLoss())
    assert found == losses
    assert_equal_stages(mine, [stages[0], stages[1]])


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
    assert result.losses is not None
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
    with (
        Executor(schedule, {0: Fails(4, 4)}, MSE, adamw) as executor,
        pytest.raises(schedir.ExecutionError, match="again") as caught,
    ):
        executor.step(x, target=y)
    assert str(caught.value.action) == "0R0"
    assert (caught.value.rank, caught.value.index) == (0, 2)


@on_ranks(2)
def test_ranks_that_recompute_other_stages_are_told(rank: int) -> None:
    stages = numbered(noisy(2))
    message = message_of(
        Executor, built("1f1b"), {rank: stages[rank]}, MSE, adamw, recompute=[rank]
    )
    assert "recompute is [0] on process 0, but [1] on process 1" in message


def test_a_trace_shows_it_and_costs_are_fitted_on_it() -> None:
    class Slow(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(200 * torch.is_grad_enabled()):
                super().forward(x)
            return super().forward(x)

    with Executor(
        built("1f1b"),
        {0: Slow(4, 4), 1: Slow(4, 4)},
        MSE,
        adamw,
        in_process=True,
        recompute=[0],
        trace=True,
    ) as executor:
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


@pytest.mark.parametrize("name", LISTED)
def test_what_is_held_is_what_the_timeline_says(name: str) -> None:
    """After every action of a rank that runs two stages; what the first is given is the user's."""
    schedule = listed(2, "0 0", f"{LISTED[name]} 0OPTIM_STEP 1OPTIM_STEP")
    torch.manual_seed(1)
    stages: list[nn.Module] = [nn.Sequential(linear(), nn.Tanh(), linear()) for _ in range(2)]
    x, y = torch.randn(2, ROWS, WIDTH)
    inputs, target = [x] * 2, [y] * 2
    found: list[int] = []
    live = Live([x, y, *(p for stage in stages for p in stage.parameters())])

    def observer(instruction: Instruction) -> Instruction:
        def run() -> None:
            instruction.run()
            if instruction.computes:
                found.append(live.now())

        return attrs.evolve(instruction, run=run)

    with Executor(schedule, numbered(stages), squares, sgd, trace=True) as executor:
        for _ in range(2):
            executor.step(inputs, target=target)
        with pytest.MonkeyPatch.context() as patch, live:
            patch.setattr(program, "listening", lambda: [observer])
            executor.step(inputs, target=target)
        line = executor.timelines()[-1]
    sizes: Any = line.sizes
    assert (sizes.input, sizes.activation) == ((0, BOUNDARY), (BOUNDARY, 3 * BOUNDARY))
    times, amounts = line.memory(0)
    after = np.searchsorted(times, line.ends, side="right") - 1
    assert found == (amounts[after] - amounts[0]).tolist()


def squares(output: Tensor, target: Tensor) -> Tensor:
    """Unlike MSE it leaves no memory of a boundary's size to its scalar."""
    return ((output - target) ** 2).sum()


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH, bias=False)
