"""What the executor can do, on stages that are sharded or split: as in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from attrs import frozen
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

import schedir
from schedir.runtime import Executor
from schedir.training import gathered_state, partition
from tests.runtime.kit import MSE, adamw, random_batch
from tests.runtime.layouts import batch_of, blocks, executor_of, part_of
from tests.runtime.on_ranks import on_ranks
from tests.sweeps import sweep

SHARDED, SPLIT, BY_ROWS = "pp 2 x fsdp 2", "pp 2 x tp 2", "pp 2 x sp 2"
BOTH, COPIED = "fsdp 2 x tp 2", "dp 2 x tp 2"
ALL = [SHARDED, SPLIT, BY_ROWS, BOTH, COPIED]
TIES = [[(0, f"0.{name}"), (1, f"1.{name}")] for name in ("norm.weight", "up.weight")]


@frozen
class Pair:
    """An executor on these processes, and one in this process alone, of equal models."""

    layout: str
    executor: Executor
    alone: Executor

    def step(self, step: int, **options: Any) -> None:
        x, y = batch_of(self.executor, self.layout, step)
        mine = self.executor.step(x, target=y, **options)
        x, y = random_batch(8, seed=step)
        theirs = self.alone.step(x, target=y, **options)
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-5)

    def assert_equal(self) -> None:
        """Sums over processes round differently, and AdamW divides by their roots."""
        mine, theirs = gathered_state(self.executor), gathered_state(self.alone)
        assert theirs is not None
        for name, value in (mine or {}).items():
            assert torch.allclose(value, theirs[name], rtol=1e-5, atol=1e-5), name


def pair_of(
    layout: str,
    name: str = "1f1b",
    change: Callable[[schedir.Schedule], schedir.Schedule] = lambda schedule: schedule,
    tied: bool = False,
    **options: Any,
) -> Pair:
    ranks = 2 if "pp" in layout else 1
    schedule = change(schedir.build(name, ranks=ranks, microbatches=4))

    def layers() -> list[nn.Module]:
        made = blocks()
        if tied:
            made[1].load_state_dict(made[0].state_dict())
        return made

    def scaled() -> dict[str, Any]:
        return {"scaler": GradScaler("cpu", init_scale=16.0)} if "scaler" in options else {}

    alone = partition(layers(), schedule.stages)
    there = Executor(schedule, alone, MSE, adamw, in_process=True, **{**options, **scaled()})
    here = executor_of(layout, layers(), name, change, **{**options, **scaled()})
    return Pair(layout, here, there)


def offloaded(schedule: schedir.Schedule) -> schedir.Schedule:
    return schedir.offload(schedule, stages=range(schedule.stages))


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "zb-h1": {"name": "zb-h1"},
    "clipping": {"clip_grad_norm": 0.05},
    "scaler": {"scaler": True},
    "recompute": {"recompute": True},
    "offload": {"change": offloaded},
    "ties": {"tied": True, "ties": TIES},
    "replicas": {"name": "chimera"},
}


def fitting(features: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Each feature with each layout: copies and ties need two ranks, and replicas whole stages."""
    for feature in features:
        for layout in ALL:
            alone = "pp" not in layout and feature in ("ties", "replicas", "zb-h1")
            if not alone and not (feature == "replicas" and "fsdp" in layout):
                yield feature, layout


QUICK = [
    ("clipping", BY_ROWS),
    ("clipping", COPIED),
    ("scaler", BOTH),
    ("ties", SHARDED),
    ("ties", SPLIT),
    ("replicas", SPLIT),
    ("offload", SHARDED),
]


@on_ranks(4)
@sweep("feature, layout", [*fitting(FEATURES)], quick=QUICK)
def test_a_feature_works_on_any_layout(rank: int, feature: str, layout: str) -> None:
    pair = pair_of(layout, **FEATURES[feature])
    with pair.executor:
        for step in range(3):
            pair.step(step)
        pair.assert_equal()


@on_ranks(4)
@sweep("layout", ALL, quick=[SHARDED, BY_ROWS])
def test_gradients_add_up_over_calls(rank: int, layout: str) -> None:
    pair = pair_of(layout)
    with pair.executor:
        for step in range(4):
            pair.step(step, update=step % 2 == 1)
        pair.assert_equal()


@on_ranks(4)
@sweep("layout", ALL, quick=[BOTH])
def test_a_step_that_is_not_finite_is_left_out_everywhere(rank: int, layout: str) -> None:
    """Only the second pipeline's batch has the NaN, where there are two."""
    pair = pair_of(layout, nonfinite="skip")
    executor = pair.executor
    with executor:
        pair.step(0)
        x, y = random_batch(8, seed=1)
        x[-1, 0] = torch.nan
        found = executor.step(part_of(executor, layout, x), target=part_of(executor, layout, y))
        assert found.skipped
        pair.alone.step(x, target=y)
        pair.step(2)
        pair.assert_equal()


@on_ranks(4)
@sweep("layout", ALL, quick=[SHARDED])
def test_inference_and_outputs(rank: int, layout: str) -> None:
    pair = pair_of(layout)
    executor = pair.executor
    with executor:
        pair.step(0)
        x, _ = random_batch(8, seed=1)
        mine, theirs = executor.infer(part_of(executor, layout, x)), pair.alone.infer(x)
        assert theirs is not None
        if mine is not None:
            whole: Tensor = part_of(executor, layout, torch.cat(theirs))
            assert torch.allclose(torch.cat(mine), whole, atol=1e-5)


@on_ranks(4)
@sweep("layout", [SHARDED, SPLIT, BOTH], quick=[SHARDED])
def test_sizes_are_measured_whole(rank: int, layout: str) -> None:
    """Of a sharded stage a rank has a part of the weights, and a simulation needs the whole."""
    pair = pair_of(layout, trace=True)
    executor = pair.executor
    with executor:
        for step in range(2):
            pair.step(step)
        measured = executor.timelines()
    for timeline in measured[1:]:
        assert timeline.sizes is not None
        assert timeline.sizes.shard_ways == (2 if "fsdp" in layout else 1)
        assert timeline.sizes.weight == timeline.sizes.gradient
        if layout == SHARDED:
            (theirs, *_) = pair.alone.timelines()
            assert theirs.sizes is not None
            assert timeline.sizes.weight == theirs.sizes.weight
            assert timeline.sizes.optimizer == pytest.approx(theirs.sizes.optimizer, abs=100)
