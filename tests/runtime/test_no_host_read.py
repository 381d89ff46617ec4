"""No host read in a step, but for what is not finite before OPTIM_STEPs: everything runs on meta
tensors, which have nothing to read.

The stages are on the device meta, and what stands for it says that it queues its work: whoever asks
for a value in a step, or waits for the device, fails. What is read after the step is made up.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import schedir
from schedir.runtime import Executor
from tests.runtime.far import META, FarDevice
from tests.runtime.kit import MSE, adamw, linear_stages, momentum, noisy_stages, numbered
from tests.runtime.on_ranks import on_ranks
from tests.runtime.test_replicas_on_ranks import pipelines
from tests.sweeps import sweep

MICROBATCHES = 4


class InPlace(nn.Linear):
    """Changes its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.relu_())


class Two(nn.Linear):
    """Returns two tensors, and uses one."""

    def forward(  # type: ignore[override]
        self, x: Tensor, beside: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return super().forward(x), x * 1.0


class One(nn.Linear):
    """Takes two, and uses one."""

    def forward(self, x: Tensor, beside: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


class Idle(nn.Linear):
    """Has a parameter that gets no gradient."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.idle = nn.Parameter(torch.ones(4))


def ends(*kinds: type[nn.Linear]) -> Callable[[int], list[nn.Module]]:
    """Stages of a first, an inner and a last kind."""
    first, inner, last = kinds
    return lambda number: [kind(4, 4) for kind in (first, *[inner] * (number - 2), last)]


def with_statistics(number: int) -> list[nn.Module]:
    return [nn.Sequential(stage, nn.BatchNorm1d(4)) for stage in noisy_stages(number)]


CHANGING, DECLARED, IDLE = (
    ends(nn.Linear, InPlace, InPlace),
    ends(Two, Two, One),
    ends(Idle, Idle, Idle),
)


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "traced": {"trace": True},
    "momentum": {"optimizer": momentum},
    "the caller steps": {"optimizer": None},
    "statistics and dropout": {"stages": with_statistics},
    "recomputed": {"stages": with_statistics, "recompute": True},
    "clipped": {"clip_grad_norm": 1.0},
    "clipped, idle parameters": {"clip_grad_norm": 1.0, "stages": IDLE},
    "tied": {"tied": True},
    "tied and clipped": {"tied": True, "clip_grad_norm": 1.0},
    "counted": {"count": lambda target: target.ne(0).sum()},
    "changed in place": {"stages": CHANGING},
    "declared": {"stages": DECLARED, "boundaries": True},
    "declared and recomputed": {"stages": DECLARED, "boundaries": True, "recompute": True},
}


def schedules(ranks: int) -> dict[str, schedir.Schedule]:
    names = ("1f1b", "interleaved-1f1b", "pipedream")
    built = {n: schedir.build(n, ranks=ranks, microbatches=MICROBATCHES) for n in names}
    text = schedir.dumps(built["interleaved-1f1b"])
    halves = re.sub(r"\b(\d+)B(\d+)\b", r"\1I\2 \1W\2", text)
    return {**built, "in two parts": schedir.loads(halves)}


NAMES = [*schedules(2)]


def runs(name: str, feature: str) -> bool:
    """Whether that may be asked of the schedule; what updates at every microbatch may not wait."""
    options = FEATURES[feature]
    waits = "clip_grad_norm" in options or "tied" in options or not options.get("optimizer", True)
    return name != "pipedream" or not waits


PAIRS = [(name, feature) for name in NAMES for feature in FEATURES if runs(name, feature)]


def runs_of_steps(actions: Sequence[schedir.Action]) -> int:
    """How often a rank comes to OPTIM_STEPs."""
    steps = [action.kind is schedir.Kind.OPTIM_STEP for action in actions]
    return sum(step and not before for before, step in zip([False, *steps], steps, strict=False))


def train(
    far: FarDevice, schedule: schedir.Schedule, feature: str, rank: int | None, **more: Any
) -> None:
    """Train three steps, or one of them without an update, and evaluate, on one rank or on all."""
    options: dict[str, Any] = {"optimizer": adamw, "stages": linear_stages, **FEATURES[feature]}
    whole = options.pop("stages")(schedule.stages)
    last = schedule.stages - 1
    if options.pop("tied", False):
        options["ties"] = [[(0, "0.weight"), (last, "0.weight")]]
    if options.pop("boundaries", False):
        example = (torch.empty(2, 4, device=META), torch.empty(2, 4, device=META))
        options["boundaries"] = dict.fromkeys(range(last), example)
    here = range(schedule.stages) if rank is None else schedule.stages_of(rank)
    stages = {s: module.to(META) for s, module in numbered(whole).items() if s in here}
    x, y = torch.empty(2, 2 * MICROBATCHES, 4, device=META)
    # Once before consecutive OPTIM_STEPs, for what is not finite; with clipping all have one norm.
    waits = sum(map(runs_of_steps, schedule.flat if rank is None else [schedule.flat[rank]]))
    if "clip_grad_norm" in options or options["optimizer"] is None:
        waits = int(options["optimizer"] is not None)
    with Executor(schedule, stages, MSE, in_process=rank is None, **options, **more) as executor:
        for step in range(3):
            with far.step():
                far.reads, expected = 0, waits if step != 1 else 0
                result = executor.step(x, target=y, update=step != 1)
                assert far.reads == expected
                evaluated = executor.evaluate(x, target=y, outputs=True)
                outputs = executor.infer(x)
                assert far.reads == expected
        assert (outputs is not None) is (last in here)
        assert result.loss == evaluated.loss == 1.0
        assert min(result.busy, result.elapsed) > 0
        assert (result.grad_norm is not None) is ("clip_grad_norm" in options)
        if "trace" in options:
            assert len(executor.timelines()) == (0 if rank else 3)
    assert far.fetched or last not in here


PIPELINES = ("plain", "the caller steps", "counted", "declared", "clipped, idle parameters")
FEW = ("plain", "traced", "clipped, idle parameters", "tied", "declared and recomputed")


@sweep("name, feature", PAIRS, quick=[("pipedream", "plain"), *((NAMES[0], each) for each in FEW)])
def test_a_step_of_all_ranks_reads_nothing(far_meta: FarDevice, name: str, feature: str) -> None:
    train(far_meta, schedules(3)[name], feature, None)


@on_ranks(2)
@sweep("name", ["1f1b", "in two parts"], quick=["1f1b"])
@sweep("feature", FEATURES, quick=["plain", "clipped, idle parameters", "tied", "declared"])
def test_a_step_of_one_rank_reads_nothing(
    rank: int, far_meta: FarDevice, name: str, feature: str
) -> None:
    train(far_meta, schedules(2)[name], feature, rank)


@on_ranks(4)
@sweep("name", ["1f1b", "pipedream"], quick=["1f1b"])
@sweep("feature", PIPELINES, quick=["counted", "clipped, idle parameters"])
def test_a_step_of_one_pipeline_reads_nothing(
    rank: int, far_meta: FarDevice, name: str, feature: str
) -> None:
    if runs(name, feature):
        mesh = pipelines()
        train(far_meta, schedules(2)[name], feature, mesh.get_local_rank("pp"), mesh=mesh)
