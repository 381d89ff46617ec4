"""The best schedule there is, for small work: `exact`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import reduce
from math import ceil, floor, lcm
from typing import Literal, TypeAlias

import attrs

from schedir.checker import prove
from schedir.errors import SchedirError
from schedir.finder.bounds import Objective
from schedir.finder.exact_model import Kept, Solved, Task, solve
from schedir.finder.stage_costs import StageCosts, by_stage
from schedir.ir import DEFAULT_CHANNEL, Action, Schedule, expect_channel
from schedir.library import Pipeline, wave, wrapped
from schedir.passes import append_steps
from schedir.simulator import CostModel

Named: TypeAlias = Literal["wrapped", "wave"]
"""A placement that has a name."""

_PLACEMENTS = {"wrapped": wrapped, "wave": wave, "v": wave}
_FINEST = (
    10**6
)  # parts of the largest cost: all that is told apart where costs are no round numbers


def exact(
    ranks: int,
    microbatches: int,
    chunks: int = 1,
    *,
    costs: CostModel | None = None,
    placement: Named | Literal["v"] | None = None,
    memory_limit: float | None = None,
    max_activations: int | None = None,
    objective: Objective = "makespan",
    split: bool = True,
    recompute: bool = False,
    seconds: float = 60,
    seed: int = 0,
    channel: str = DEFAULT_CHANNEL,
) -> Schedule:
    """The schedule that no other is better than, proved under the `channel` model.

    It takes what `schedir.search` takes: `ranks` ranks of `chunks` stages each, whose costs are
    those of a stage, by default the textbook's; a `placement`, all of them if None; the most bytes
    or (stage, microbatch) activations that a rank may keep, the latter held until their backward is
    complete; whether backwards may be `split` and forwards run again (`recompute`). Buffers of
    boundaries are not counted.

    It is for small work: 40 actions take seconds. Costs that are no round numbers are taken to a
    millionth of the largest. OR-Tools solves it (CP-SAT, Perron and Furnon), which has to be
    installed: pip install 'schedir[exact]'.

    Raises SchedirError where OR-Tools is missing, where no schedule is within the limits, where
    `seconds` are too few to prove that one is the best, for costs of other stages, and for compute
    that costs nothing, whose order no time tells; ValueError or TypeError for a bad argument.
    """
    expect_channel(channel)
    _expect_counts(ranks=ranks, microbatches=microbatches, chunks=chunks)
    if objective not in ("makespan", "span"):
        raise ValueError(f'objective must be "makespan" or "span", not {objective!r}')
    costs = CostModel() if costs is None else costs
    found: list[tuple[Fraction, Schedule]] = []
    for named in _placements(placement, chunks):
        shape = Pipeline(ranks, microbatches, chunks, placement=())
        placed = tuple(held[0] for held in _PLACEMENTS[named](shape))
        of_stages = StageCosts.of(placed, costs)
        _expect_time(of_stages, split, recompute)
        whole, scale = _whole_costs(of_stages)
        kept = [*_counted(placed, max_activations), *_in_bytes(placed, costs, memory_limit)]
        task = Task(whole, microbatches, objective, split, recompute, kept)
        solved = solve(task, seconds, seed)
        if solved is not None:
            found.append((solved.value / scale, _schedule(solved, placed, microbatches, channel)))
    if not found:
        raise SchedirError(
            f"no schedule of {ranks} ranks, {chunks} chunks and {microbatches} microbatches keeps "
            "no more than the limits: raise them, or allow recomputation"
        )
    return min(found, key=lambda each: each[0])[1]


def _expect_counts(**counts: int) -> None:
    for name, count in counts.items():
        if type(count) is not int or count < 1:
            raise ValueError(f"{name} must be an int >= 1, not {count!r}")


def _placements(placement: str | None, chunks: int) -> Iterable[str]:
    if placement is None:
        return ("wrapped", "wave") if chunks > 1 else ("wrapped",)
    if placement not in _PLACEMENTS:
        raise ValueError(f"placement must be {', '.join(_PLACEMENTS)} or None, not {placement!r}")
    return (placement,)


def _expect_time(costs: StageCosts, split: bool, recompute: bool) -> None:
    """Raise SchedirError where compute takes no time."""
    names = ["forward", "backward"]
    names += ["backward_input", "backward_weight"] * split + ["recompute"] * recompute
    for name in names:
        if not min(getattr(costs, name)):
            raise SchedirError(
                f"{name} costs nothing on some stage, so that no time tells its order: give it one"
            )


def _whole_costs(costs: StageCosts) -> tuple[StageCosts, Fraction]:
    """The costs as whole numbers, and how many of these are one of theirs."""
    times = {
        name: values
        for name, values in attrs.asdict(costs, recurse=False).items()
        if name != "placement"
    }
    scale = _scale([value for values in times.values() for value in values])
    scaled = {
        name: tuple(round(Fraction(str(value)) * scale) for value in values)
        for name, values in times.items()
    }
    return attrs.evolve(costs, **scaled), scale


def _scale(values: Sequence[float]) -> Fraction:
    """What makes all whole, or all as fine as they need be."""
    exactly = [Fraction(str(value)) for value in values]
    whole = reduce(lcm, (value.denominator for value in exactly), 1)
    most = max(exactly)
    return Fraction(whole) if whole * most <= 10**3 * _FINEST else _FINEST / most


def _counted(placement: Sequence[int], most: int | None) -> list[Kept]:
    """A limit on the number of activations."""
    if most is None:
        return []
    ones, none = (1,) * len(placement), (0,) * len(placement)
    return [Kept(ones, none, none, (most,) * (1 + max(placement)))]


def _in_bytes(placement: Sequence[int], costs: CostModel, most: float | None) -> list[Kept]:
    """A limit on bytes, of which weights and the optimiser's state take their part at all times."""
    if most is None:
        return []
    sizes = {
        name: by_stage(name, getattr(costs, f"{name}_bytes"), len(placement))
        for name in ("weight", "optimizer", "activation", "input", "gradient")
    }
    left = [
        most - sum(sizes[name][s] for name in ("weight", "optimizer") for s in stages)
        for stages in _stages_by_rank(placement)
    ]
    scale = _scale([1, *sizes["activation"], *sizes["input"], *sizes["gradient"]])
    full, lean, gradient = (
        [ceil(Fraction(str(size)) * scale) for size in sizes[name]]
        for name in ("activation", "input", "gradient")
    )
    return [Kept(full, lean, gradient, [floor(Fraction(str(room)) * scale) for room in left])]


def _stages_by_rank(placement: Sequence[int]) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(1 + max(placement))]
    for stage, rank in enumerate(placement):
        found[rank].append(stage)
    return found


def _schedule(
    solved: Solved, placement: Sequence[int], microbatches: int, channel: str
) -> Schedule:
    """The complete schedule, proved."""
    lists = [[Action(*action) for action in actions] for actions in solved.lists]
    bare = Schedule.of("exact", placement=placement, lists=lists, microbatches=microbatches)
    return prove(append_steps(bare), channel).proved()
