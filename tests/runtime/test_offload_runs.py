"""OFFLOAD and RELOAD: what a forward has saved is away in between, and all else is as without."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import schedir
from schedir import Kind, Schedule
from schedir.passes import offload
from schedir.runtime import Executor
from schedir.runtime.memory import Saved, unpacked
from schedir.runtime.program.offloading import Copier
from schedir.runtime.stage import split_backward
from tests.literals import listed
from tests.runtime.kit import (
    MSE,
    ScaledLoss,
    linear_stages,
    message_of,
    numbered,
    random_batches,
    sgd,
)
from tests.runtime.lists import recomputed_early
from tests.runtime.on_ranks import on_ranks
from tests.runtime.test_memory import BOUNDARY
from tests.runtime.test_recomputation import buffers_of, held_at, noisy, trained, trains_alike


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing by several, which wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def copies_of(schedule: Schedule) -> int:
    return len(schedule.columns.where(Kind.OFFLOAD))


def away(schedule: Schedule, ahead: int = 1) -> Schedule:
    found = offload(schedule, range(schedule.stages), ahead=ahead)
    assert copies_of(found) > 1
    return found


def built(name: str, ranks: int = 2) -> Schedule:
    return schedir.build(name, ranks=ranks, microbatches=4)


LISTS: dict[str, Callable[[], Schedule]] = {
    "1f1b": lambda: built("1f1b", 3),
    "zb-h1": lambda: built("zb-h1", 3),
    "pipedream": lambda: built("pipedream", 3),
    "some are recomputed": lambda: recomputed_early(built("1f1b", 3), {0}),
}


@pytest.mark.parametrize("name", LISTS)
def test_weights_are_those_without(name: str) -> None:
    """With dropout, buffers, and activation checkpointing inside of the stages."""
    schedule = LISTS[name]()
    (ran,) = trains_alike(schedule, (away(schedule), {}))
    assert copies_of(ran) == copies_of(away(schedule))


def test_what_an_r_has_saved_is_moved() -> None:
    tokens = "0F0 0R0 0OFFLOAD0 0F1 0R1 0RELOAD0 0F2 0B0 0B1 0R2 0B2 0OPTIM_STEP"
    plain = " ".join(token for token in tokens.split() if "LOAD" not in token)
    trains_alike(listed(3, "0", plain), (listed(3, "0", tokens), {}))


def test_under_autocast_with_a_loss_of_its_own_parameters() -> None:
    schedule = built("1f1b")
    with torch.autocast("cpu", torch.bfloat16):
        trains_alike(schedule, (away(schedule), {}), loss_fn=ScaledLoss())


@on_ranks(2)
def test_on_ranks(rank: int) -> None:
    for name in ("1f1b", "zb-h1"):
        (ran,) = trains_alike(built(name), (away(built(name)), {}), rank=rank)
        assert copies_of(ran) > 1


TWICE = "0F0{} 0F1{} 0F2 {}0B0 {}0B1 0B2 0OPTIM_STEP"
MOVED = TWICE.format(" 0OFFLOAD0", " 0OFFLOAD1", "0RELOAD0 ", "0RELOAD1 ")


def executor_of(
    tokens: str, stages: list[nn.Module], loss_fn: Any = MSE, **options: Any
) -> Executor:
    return Executor(listed(3, "0", tokens), numbered(stages), loss_fn, sgd, **options)


def batch(rows: int = 6, width: int = 4) -> tuple[Tensor, Tensor]:
    ((x, y),) = random_batches(1, rows, width)
    return x, y


SPLIT = {
    "whole": "0F0 1F0{0} 0F1 1F1 1B1 0B1 {1}1B0 0B0",
    "split": "0F0 1F0{0} 0F1 1F1 1I1 0I1 1W1 0W1 {1}1I0 0I0 1W0 0W0",
}


@pytest.mark.parametrize("name", SPLIT)
def test_what_goes_is_what_the_forecast_says(name: str) -> None:
    """Less the stage's input, which stays: after every action of compute, exactly."""
    tokens = f"{SPLIT[name]} 0OPTIM_STEP 1OPTIM_STEP"
    held, forecast, sizes = held_at(listed(2, "0 0", tokens.format("", "")))
    less, said, same = held_at(listed(2, "0 0", tokens.format(" 1OFFLOAD0", "1RELOAD0 ")))
    assert sizes == same
    assert sizes.activation == (BOUNDARY, 3 * BOUNDARY)
    went = forecast - said
    assert set(went.tolist()) == {0, 3 * BOUNDARY}
    stayed = np.where(went > 0, BOUNDARY, 0)
    assert (np.array(held) - less).tolist() == (went - stayed).tolist()


def test_host_memory_is_used_again() -> None:
    with executor_of(MOVED, linear_stages(1)) as executor:
        seen: list[dict[int, int]] = []
        for rows in [6] * 4 + [12] * 4:
            x, y = batch(rows)
            executor.step(x, target=y)
            seen.append({id(buffer): buffer.numel() for buffer in buffers_of(executor)})
    assert (seen[2], seen[6]) == (seen[3], seen[7])
    assert {*seen[3].values()} == {2 * 4 * 4}  # the output, which Tanh and the loss have saved
    assert {*seen[7].values()} == {4 * 4 * 4}


def test_parameters_and_what_the_user_has_given_stay() -> None:
    moved: list[int] = []

    def out(self: Copier, memories: Any, ran: Any = Copier.out) -> Any:
        moved.extend(memory.untyped_storage()._cdata for memory in memories)
        return ran(self, memories)

    (x, y), stages = batch(), noisy(1)
    inputs, target = list(x.clone().split(2)), list(y.clone().split(2))
    with pytest.MonkeyPatch.context() as patch, executor_of(MOVED, stages) as executor:
        patch.setattr(Copier, "out", out)
        executor.step(inputs, target=target)
        held = [*stages[0].parameters(), *stages[0].buffers(), *inputs, *target]
    assert len(moved) > 4
    assert not {tensor.untyped_storage()._cdata for tensor in held} & set(moved)


def test_a_w_still_does_its_part() -> None:
    """The hooks that move what is saved are not those of activation checkpointing."""
    split: list[int] = []

    def input_part(*given: Any, ran: Any = split_backward.input_part) -> Any:
        found = ran(*given)
        split.append(len(found[1].sides))
        assert not found[1].found
        return found

    schedule = away(built("zb-h1"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("schedir.runtime.program.compute.input_part", input_part)
        trained(schedule, make=lambda many: [nn.Linear(4, 4) for _ in range(many)])
    assert set(split) == {1}


def test_what_is_away_is_not_to_be_had() -> None:
    saved = Saved()
    x = torch.ones(3, requires_grad=True)
    with saved.hooks():
        y = x.exp()
    ((held,),) = saved.movable([x], x.device)
    before = y.detach().clone()
    held.move(torch.empty(12, dtype=torch.uint8), away=True)
    with pytest.raises(schedir.ExecutionError, match="has moved to the host"):
        y.sum().backward()
    held.move(before.view(torch.uint8), away=False)
    y.sum().backward()
    assert torch.equal(x.grad, before)  # type: ignore[arg-type]
    held.tensor = None
    with pytest.raises(RuntimeError, match="freed what was saved"):
        unpacked(held)


@pytest.mark.parametrize("moves", [False, True])
def test_what_has_been_changed_in_place_is_refused_as_ever(moves: bool) -> None:
    class Changes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).exp().mul_(2)

    x, y = batch()
    with executor_of(MOVED if moves else TWICE.format(*[""] * 4), [Changes(4, 4)]) as executor:
        said = message_of(executor.step, x, target=y)
    assert re.search("0B0: .* modified by an inplace operation", said)


def test_a_failure_in_between_leaves_it_usable() -> None:
    class Fails(nn.Linear):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            if self.fails and x[0, 0] == 7:
                raise ValueError("on purpose")
            return super().forward(x).tanh()

    x, y = batch()
    bad = x.clone()
    bad[4:] = 7  # of the last microbatch, while the others' are away
    stage = Fails(4, 4)
    with executor_of(MOVED, [stage]) as executor:
        first = executor.evaluate(x, target=y).loss
        for fails in (False, True, False):
            stage.fails = fails
            said = message_of(executor.step, bad if fails else x, target=y)
            assert ("on purpose" in said) is bool(said) is fails
            stage.zero_grad()
        assert executor.evaluate(x, target=y).loss < first


def test_a_trace_shows_the_copies() -> None:
    x, y = batch()
    with executor_of(MOVED, noisy(1), trace=True) as executor:
        for _ in range(2):
            executor.step(x, target=y)
        line = executor.timelines()[-1]
    places = line.schedule.columns.where(Kind.OFFLOAD, Kind.RELOAD)
    assert len(places) == 4
    assert (line.ends[places] > line.starts[places]).all()
    assert schedir.CostModel.fit([line]) is not None
