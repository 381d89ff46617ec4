"""torch's own schedules train wrong on gloo exactly where check finds a mis-paired transfer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from schedir import check
from tests.runtime.kit import MSE, gradients
from tests.runtime.on_ranks import on_ranks
from tests.runtime.test_torch_referee import batch, stages
from tests.sweeps import long
from tests.torch_schedules import CHUNKS, GENERATORS, lowered, stages_of

# Measured in double precision: at most 3e-15 where torch is right, at least 0.6 where it is wrong.
RIGHT_BELOW = 1e-9
WRONG_ABOVE = 1e-3


def run_torch(case: dict[str, Any], local: dict[int, nn.Module], x: Tensor, y: Tensor) -> None:
    """Leave torch's gradients in the `local` stages."""
    number = CHUNKS * dist.get_world_size()
    cpu = torch.device("cpu")
    schedule = getattr(torch_schedules, case["schedule"])(
        [PipelineStage(module, stage, number, cpu) for stage, module in local.items()],
        case["microbatches"],
        loss_fn=MSE,
        defer_pp_recv=case["deferred"],
    )
    inputs = (x,) if 0 in local else ()
    schedule.step(*inputs, target=y if number - 1 in local else None)


def largest_error(case: dict[str, Any]) -> Tensor:
    """The largest relative error in this rank's stages, where a missing gradient counts as zero;
    NaN where one holds that."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = stages(CHUNKS * ranks)
    local = {s: copy.deepcopy(whole[s]) for s in stages_of(rank, ranks, case["schedule"])}
    x, y = batch(case["microbatches"])
    MSE(nn.Sequential(*whole)(x), y).backward()
    run_torch(case, local, x, y)
    found = [torch.zeros(()) if grad is None else grad for grad in gradients(local.values())]
    expected: Any = gradients(whole[s] for s in local)
    errors = [(a - b).abs().max() / b.abs().max() for a, b in zip(found, expected, strict=True)]
    return torch.stack(errors).max()


def cases(ranks: int) -> list[dict[str, Any]]:
    """ZBV goes wrong from ranks + 1 microbatches on; torch refuses other counts here and there."""
    return [
        {"schedule": name, "microbatches": microbatches, "deferred": deferred}
        for name in GENERATORS
        for microbatches in sorted({ranks, ranks + 1, 2 * ranks, 6, 8, 12})
        if name != "ScheduleDualPipeV" or microbatches >= CHUNKS * ranks
        for deferred in (False, True)
    ]


def mis_paired(ranks: int, case: dict[str, Any]) -> bool:
    schedule = lowered(case["schedule"], ranks, case["microbatches"], case["deferred"])
    return any(d.code == "S303" for d in check(schedule, "edge").diagnostics)


@long
@pytest.mark.filterwarnings("ignore")  # some of torch's schedules warn that they are new
@pytest.mark.timeout(300)
@on_ranks(2, 3, 4)
def test_torch_is_wrong_exactly_where_check_says_so(rank: int, ranks: int) -> None:
    """By the gradient that is the furthest off on any rank, relative to its largest element."""
    expected = [(case, mis_paired(ranks, case)) for case in cases(ranks)]
    assert {wrong for _, wrong in expected} == {False, True}
    errors = []
    for case, _ in expected:
        error = largest_error(case)
        everywhere = [torch.empty_like(error) for _ in range(ranks)]
        dist.all_gather(everywhere, error)
        errors.append(torch.stack(everywhere).max().item())
    contradictions = [
        f"{case}: error {error:.2g}, S303 {'' if wrong else 'not '}reported"
        for error, (case, wrong) in zip(errors, expected, strict=True)
        if not (error > WRONG_ABOVE if wrong else error < RIGHT_BELOW)
    ]
    assert contradictions == []
