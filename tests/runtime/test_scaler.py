"""A GradScaler, whose scale and verdict all stages share: as torch trains in one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

import schedir
from schedir.runtime import Executor
from schedir.runtime.plan import steps_last
from tests.built_in import EVERY
from tests.runtime.far import FarDevice
from tests.runtime.kit import (
    MSE,
    Batch,
    adamw,
    assert_equal_stages,
    everyone,
    linear_stages,
    message_of,
    microbatches_of,
    numbered,
    random_batch,
    random_batches,
    sgd,
)
from tests.runtime.on_ranks import on_ranks
from tests.runtime.test_replicas_on_ranks import pipelines

MICROBATCHES = 4
HALF = torch.autocast("cpu", torch.float16)
HUGE = 3e4  # a target by which gradients overflow at the scales below
NAMES = [
    name
    for name in EVERY
    if steps_last(made := schedir.build(name, ranks=2, microbatches=MICROBATCHES))
    and all(len(held) == 1 for held in made.placement)
]


def scaler(**given: Any) -> GradScaler:
    """One that grows every second step, so that a test sees it grow and shrink."""
    return GradScaler("cpu", **{"init_scale": 2.0**12, "growth_interval": 2, **given})


def batches(steps: int = 8) -> list[Batch]:
    """Of which two overflow."""
    found = random_batches(steps)
    for at in (2, 5):
        x, y = found[at]
        found[at] = x, y + HUGE
    return found


def executor_of(
    stages: Sequence[nn.Module], mine: Any, optimizer: Any = adamw, loss_fn: Any = None, **more: Any
) -> Executor:
    """Of all stages, in this process."""
    name = more.pop("name", "1f1b")
    given = {"scaler": mine, "in_process": True, **more}
    return Executor(built(name), numbered(stages), loss_fn or loss_in_float, optimizer, **given)


def built(name: str = "1f1b") -> schedir.Schedule:
    return schedir.build(name, ranks=2, microbatches=MICROBATCHES)


def scaled_backward(model: nn.Module, scale: GradScaler, batch: Batch) -> None:
    """As torch's examples do."""
    for x, y in microbatches_of(batch, MICROBATCHES):
        with HALF:
            loss = MSE(model(x).float(), y)
        scale.scale(loss / MICROBATCHES).backward()


def plain(
    stages: Sequence[nn.Module], scale: GradScaler, given: Sequence[Batch], clip: float | None
) -> list[tuple[float, bool]]:
    """Train the whole model; after each step the scale, and whether it was left out."""
    model = nn.Sequential(*stages)
    optimizer = adamw(model.parameters())
    found = []
    for batch in given:
        scaled_backward(model, scale, batch)
        if clip is not None:
            scale.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        before = scale.get_scale()
        scale.step(optimizer)
        scale.update()
        optimizer.zero_grad(set_to_none=True)
        found.append((scale.get_scale(), scale.get_scale() < before))
    return found


def loss_in_float(output: Tensor, target: Tensor) -> Tensor:
    return MSE(output.float(), target)


def piped(
    executor: Executor, scale: GradScaler, given: Sequence[Batch]
) -> list[tuple[float, bool]]:
    found = []
    for x, y in given:
        with HALF:
            result = executor.step(x, target=y)
        found.append((scale.get_scale(), bool(result.skipped)))
    return found


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("name", NAMES)
def test_it_equals_plain_training(name: str, clip: float | None) -> None:
    stages = built(name).stages
    own, whole, mine, theirs = linear_stages(stages), linear_stages(stages), scaler(), scaler()
    with executor_of(own, mine, clip_grad_norm=clip, name=name) as executor:
        found = piped(executor, mine, batches())
    assert found == plain(whole, theirs, batches(), clip)
    assert {skipped for _, skipped in found} == {False, True}
    assert max(scale for scale, _ in found) > 2.0**12
    assert mine.state_dict() == theirs.state_dict()
    assert_equal_stages(numbered(own), whole)


@on_ranks(2)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_both_ranks_equal_plain_training(rank: int, clip: float | None) -> None:
    own, whole, mine = linear_stages(), linear_stages(), scaler()
    options: dict[str, Any] = {"scaler": mine, "clip_grad_norm": clip}
    with Executor(built(), {rank: own[rank]}, loss_in_float, adamw, **options) as executor:
        found = piped(executor, mine, batches())
    assert found == plain(whole, scaler(), batches(), clip)
    assert_equal_stages({rank: own[rank]}, whole)


@on_ranks(2)
def test_an_overflow_on_one_rank_alone_is_skipped_by_both(rank: int) -> None:
    own = linear_stages()
    if rank == 0:
        own[0][0].bias.register_hook(lambda grad: grad * math.inf)  # type: ignore[index]
    before, mine = copy.deepcopy(own), scaler()
    x, y = random_batch()
    with Executor(built(), {rank: own[rank]}, loss_in_float, sgd, scaler=mine) as executor, HALF:
        assert executor.step(x, target=y).skipped == ((rank, 0),)
    assert everyone(mine.get_scale()) == [2.0**11] * 2
    assert_equal_stages({rank: own[rank]}, before)


@on_ranks(4)
def test_pipelines_share_the_verdict(rank: int) -> None:
    mesh = pipelines()
    place = mesh.get_local_rank("pp")
    schedule, own, mine = schedir.build("1f1b", ranks=2, microbatches=2), linear_stages(), scaler()
    x, y = random_batch(rows=4, seed=mesh.get_local_rank("dp"))
    given: dict[str, Any] = {"scaler": mine, "mesh": mesh}
    with Executor(schedule, {place: own[place]}, loss_in_float, adamw, **given) as executor, HALF:
        assert executor.step(x, target=y).skipped == ()
        assert executor.step(x, target=y + HUGE * mesh.get_local_rank("dp")).skipped
    assert everyone(mine.get_scale()) == [2.0**11] * 4


@pytest.mark.parametrize("spoiled", [False, True])
def test_gradients_accumulate_over_calls(spoiled: bool) -> None:
    """They stay scaled until the call that applies them, or leaves all of them out."""
    own, whole, mine, theirs = linear_stages(), linear_stages(), scaler(), scaler()
    first, second = random_batches(2)
    if spoiled:
        first = first[0], first[1] + HUGE
    with executor_of(own, mine, sgd) as executor, HALF:
        assert executor.step(first[0], target=first[1], update=False).skipped == ()
        assert mine.get_scale() == 2.0**12
        assert bool(executor.step(second[0], target=second[1]).skipped) is spoiled
    model = nn.Sequential(*whole)
    optimizer = sgd(model.parameters())
    for batch in (first, second):
        scaled_backward(model, theirs, batch)
    theirs.step(optimizer)
    theirs.update()
    assert mine.state_dict() == theirs.state_dict()
    assert_equal_stages(numbered(own), whole)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_on_a_device_the_verdict_is_the_same(clip: float | None, far: FarDevice) -> None:
    """An infinite gradient, a loss that is not finite, and a step that is applied."""
    mine = scaler()
    x, y = random_batch()
    with executor_of(linear_stages(), mine, sgd, MSE, clip_grad_norm=clip) as executor:
        for target, scale in ((y * 3e36, 2.0**11), (y * math.inf, 2.0**10), (y, 2.0**10)):
            assert bool(executor.step(x, target=target).skipped) is (target is not y)
            assert mine.get_scale() == scale


def test_one_that_is_not_enabled_is_none() -> None:
    with executor_of(linear_stages(), GradScaler("cpu", enabled=False)) as executor:
        assert (executor.scaler, executor.nonfinite) == (None, "raise")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"mine": 2.0**16}, "scaler must be a torch.amp.GradScaler, not float"),
        ({"nonfinite": "ignore"}, 'nonfinite="ignore" checks no gradients'),
        ({"optimizer": None}, "a scaler leaves OPTIM_STEPs out"),
        ({"name": "pipedream"}, "a scaler needs all gradients before any rank steps"),
        ({"stages": [stage.half() for stage in linear_stages()]}, "0.weight of stage 0 is float16"),
    ],
)
def test_what_can_not_be_is_refused(given: dict[str, Any], text: str) -> None:
    options = {"stages": linear_stages(), "mine": scaler(), **given}
    assert text in message_of(executor_of, **options)


@on_ranks(2)
def test_ranks_with_other_scales_are_refused(rank: int) -> None:
    stages = {rank: linear_stages()[rank]}
    given = scaler(init_scale=2.0 ** (8 + rank))
    assert "scaler is {" in message_of(Executor, built(), stages, MSE, sgd, scaler=given)
