"""What the executor can do, on stages that are sharded or split: as in one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.runtime.kit import random_batch
from tests.runtime.layouts import compare, fitting, pair_of, part_of
from tests.runtime.on_ranks import on_ranks
from tests.sweeps import sweep

SHARDED, SPLIT, BY_ROWS = "pp 2 x fsdp 2", "pp 2 x tp 2", "pp 2 x sp 2"
BOTH, COPIED = "fsdp 2 x tp 2", "dp 2 x tp 2"
ALL = [SHARDED, SPLIT, BY_ROWS, BOTH, COPIED]
QUICK = [("clipping", BY_ROWS), ("scaler", BOTH), ("ties", SHARDED)]
QUICK += [("replicas", SPLIT), ("offload", SHARDED)]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # that torch.compile looks at
@on_ranks(4)
@sweep("feature, layout", [*fitting(ALL)], quick=QUICK)
def test_a_feature_works_on_any_layout(rank: int, feature: str, layout: str) -> None:
    compare(feature, layout)


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
    with pair.executor as executor:
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
    with pair.executor as executor:
        pair.step(0)
        x, _ = random_batch(8, seed=1)
        mine, theirs = executor.infer(part_of(executor, layout, x)), pair.alone.infer(x)
        if mine is not None:
            whole: Tensor = part_of(executor, layout, torch.cat(theirs or []))
            assert torch.allclose(torch.cat(mine), whole, atol=1e-5)


@on_ranks(4)
@sweep("layout", [SHARDED, SPLIT, BOTH], quick=[SHARDED])
def test_sizes_are_measured_whole(rank: int, layout: str) -> None:
    """Of a sharded stage a rank has a part of the weights, and a simulation needs the whole."""
    pair = pair_of(layout, trace=True)
    with pair.executor as executor:
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
