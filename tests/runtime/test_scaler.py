"""A GradScaler, whose scale and verdict all stages share: as torch trains in one process."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

import schedir
from schedir import ExecutionError
from schedir.runtime import Executor
from schedir.runtime.plan import steps_last
from schedir.training import Checkpoint
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


def plain(
    stages: Sequence[nn.Module], scale: GradScaler, given: Sequence[Batch], clip: float | None
) -> list[tuple[float, bool]]:
    """Train the whole model as torch's examples do; after each step the scale, and whether it was
    left out."""
    model = nn.Sequential(*stages)
    optimizer = adamw(model.parameters())
    found = []
    for batch in given:
        for x, y in microbatches_of(batch, MICROBATCHES):
            with HALF:
                loss = MSE(model(x).float(), y)
            scale.scale(loss / MICROBATCHES).backward()
        if clip is not None:
            scale.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        before = scale.get_scale()
        scale.step(optimizer)
        scale.update()
        optimizer.zero_grad(set_to_none=True)
        found.append((scale.get_scale(), scale.get_scale() < before))
    return found


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
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
    schedule = schedir.build(name, ranks=2, microbatches=MICROBATCHES)
    own, whole = linear_stages(schedule.stages), linear_stages(schedule.stages)
    mine, theirs = scaler(), scaler()
    with Executor(
        schedule, numbered(own), loss_fn, adamw, scaler=mine, clip_grad_norm=clip, in_process=True
    ) as executor:
        found = piped(executor, mine, batches())
    expected = plain(whole, theirs, batches(), clip)
    assert found == expected
    assert {skipped for _, skipped in found} == {False, True}
    assert max(scale for scale, _ in found) > 2.0**12
    assert mine.state_dict() == theirs.state_dict()
    assert_equal_stages(numbered(own), whole)


@on_ranks(2)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_both_ranks_equal_plain_training(rank: int, clip: float | None) -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=MICROBATCHES)
    own, whole = linear_stages(), linear_stages()
    mine = scaler()
    with Executor(
        schedule, {rank: own[rank]}, loss_fn, adamw, scaler=mine, clip_grad_norm=clip
    ) as executor:
        found = piped(executor, mine, batches())
    assert found == plain(whole, scaler(), batches(), clip)
    assert_equal_stages({rank: own[rank]}, whole)


@on_ranks(2)
def test_an_overflow_on_one_rank_alone_is_skipped_by_both(rank: int) -> None:
    own = linear_stages()
    if rank == 0:
        own[0][0].bias.register_hook(lambda grad: grad * math.inf)  # type: ignore[index]
    before, mine = copy.deepcopy(own), scaler()
    schedule = schedir.build("1f1b", ranks=2, microbatches=MICROBATCHES)
    x, y = random_batch()
    with Executor(schedule, {rank: own[rank]}, loss_fn, sgd, scaler=mine) as executor, HALF:
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
    with Executor(schedule, {place: own[place]}, loss_fn, adamw, **given) as executor, HALF:
        assert executor.step(x, target=y).skipped == ()
        assert executor.step(x, target=y + HUGE * mesh.get_local_rank("dp")).skipped
    assert everyone(mine.get_scale()) == [2.0**11] * 4


@pytest.mark.parametrize("spoiled", [False, True])
def test_gradients_accumulate_over_calls(spoiled: bool) -> None:
    """They stay scaled until the call that applies them, or leaves all of them out."""
    schedule = schedir.build("1f1b", ranks=2, microbatches=MICROBATCHES)
    own, whole, mine, theirs = linear_stages(), linear_stages(), scaler(), scaler()
    first, second = random_batches(2)
    if spoiled:
        first = first[0], first[1] + HUGE
    with (
        Executor(schedule, numbered(own), loss_fn, sgd, scaler=mine, in_process=True) as executor,
        HALF,
    ):
        assert executor.step(first[0], target=first[1], update=False).skipped == ()
        assert mine.get_scale() == 2.0**12
        assert bool(executor.step(second[0], target=second[1]).skipped) is spoiled
    model = nn.Sequential(*whole)
    optimizer = sgd(model.parameters())
    for batch in (first, second):
        for x, y in microbatches_of(batch, MICROBATCHES):
            with HALF:
                loss = MSE(model(x).float(), y)
            theirs.scale(loss / MICROBATCHES).backward()
    theirs.step(optimizer)
    theirs.update()
    assert mine.state_dict() == theirs.state_dict()
    assert_equal_stages(numbered(own), whole)


def test_a_checkpoint_holds_it(tmp_path: Path) -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=MICROBATCHES)

    def train(given: Sequence[Batch], mine: GradScaler, load: bool = False) -> list[nn.Module]:
        torch.manual_seed(0)
        own: list[nn.Module] = [
            nn.Sequential(OrderedDict({f"layer{i}": nn.Linear(4, 4)})) for i in range(2)
        ]
        with Executor(
            schedule, numbered(own), loss_fn, adamw, scaler=mine, in_process=True
        ) as executor:
            if load:
                Checkpoint(executor).load(tmp_path / "saved")
            piped(executor, mine, given)
            if not load:
                Checkpoint(executor).save(tmp_path / "saved")
        return own

    through, resumed = scaler(), scaler()
    whole = train(batches(), through)
    train(batches()[:3], scaler())
    assert_equal_stages(numbered(train(batches()[3:], resumed, load=True)), whole)
    assert resumed.state_dict() == through.state_dict()


@pytest.mark.parametrize("clip", [None, 0.5])
def test_on_a_device_the_verdict_is_the_same(clip: float | None, far: FarDevice) -> None:
    """An infinite gradient, a loss that is not finite, and a step that is applied."""
    schedule = schedir.build("1f1b", ranks=2, microbatches=MICROBATCHES)
    own, mine = linear_stages(), scaler()
    x, y = random_batch()
    with Executor(
        schedule, numbered(own), MSE, sgd, scaler=mine, clip_grad_norm=clip, in_process=True
    ) as executor:
        for target, scale in ((y * 3e36, 2.0**11), (y * math.inf, 2.0**10), (y, 2.0**10)):
            assert bool(executor.step(x, target=target).skipped) is (target is not y)
            assert mine.get_scale() == scale


def test_one_that_is_not_enabled_is_none() -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=MICROBATCHES)
    off = GradScaler("cpu", enabled=False)
    with Executor(
        schedule, numbered(linear_stages()), MSE, sgd, scaler=off, in_process=True
    ) as executor:
        assert (executor.scaler, executor.nonfinite) == (None, "raise")


@pytest.mark.parametrize(
    ("name", "given", "text"),
    [
        ("1f1b", {"scaler": 2.0**16}, "scaler must be a torch.amp.GradScaler, not float"),
        (
            "1f1b",
            {"scaler": scaler(), "nonfinite": "ignore"},
            'nonfinite="ignore" checks no gradients',
        ),
        ("1f1b", {"scaler": scaler(), "optimizer": None}, "a scaler leaves OPTIM_STEPs out"),
        ("pipedream", {"scaler": scaler()}, "a scaler needs all gradients before any rank steps"),
    ],
)
def test_what_can_not_be_is_refused(name: str, given: dict[str, Any], text: str) -> None:
    schedule = schedir.build(name, ranks=2, microbatches=MICROBATCHES)
    options: dict[str, Any] = {"optimizer": sgd, "in_process": True, **given}
    assert text in message_of(Executor, schedule, numbered(linear_stages()), MSE, **options)


def test_parameters_in_float16_are_refused() -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=MICROBATCHES)
    halves = numbered(stage.half() for stage in linear_stages())
    with pytest.raises(ExecutionError, match=r"0\.weight of stage 0 is float16"):
        Executor(schedule, halves, MSE, sgd, scaler=scaler(), in_process=True)


@on_ranks(2)
def test_ranks_with_other_scales_are_refused(rank: int) -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=MICROBATCHES)
    stages = {rank: linear_stages()[rank]}
    given = scaler(init_scale=2.0 ** (8 + rank))
    assert "scaler is {" in message_of(Executor, schedule, stages, MSE, sgd, scaler=given)
