"""The costs of the same model cut into another number of stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from schedir.errors import SchedirError
from schedir.simulator.costs import CostModel
from schedir.simulator.values import PerStage

OF_A_PART = (
    "forward",
    "backward",
    "backward_input",
    "backward_weight",
    "recompute",
    "reduce_grad",
    "optim_step",
    "overlapped",
    "activation_bytes",
    "deferred_bytes",
    "weight_bytes",
    "gradient_bytes",
    "optimizer_bytes",
)
"""What a stage made of two takes or keeps is what both do. The rest is of a boundary or a link."""


def recut(costs: CostModel, stages: int, of: int) -> CostModel:
    """The costs of a model that is cut into `stages` stages, where `costs` are by stage or, where
    they are one number, those of one of `of` equal stages.

        4 stages        1   1   1   2        of forward = (1, 1, 1, 2)
        2 stages          2       3          exact: the sums
        8 stages       ½ ½ ½ ½ ½ ½ 1 1       as if each were made of equal parts

    A boundary that is new has the bytes of the next old one, or of the last; the input that a new
    part keeps is that of the next old stage, or of the last. What was observed of other stages, the
    samples, is left behind.

    Raises SchedirError where neither number of stages is a multiple of the other.
    """
    changed: dict[str, Any] = {}
    for name in OF_A_PART:
        changed[name] = _parts(name, getattr(costs, name), stages, of)
    for name, every in (("input_bytes", 0), ("boundary_bytes", 1)):
        changed[name] = _edges(name, getattr(costs, name), stages, every)
    found = attrs.evolve(costs, **changed)
    return costs if found == costs else attrs.evolve(found, samples=None)


def _parts(name: str, value: PerStage | None, stages: int, of: int) -> PerStage | None:
    if value is None:
        return None
    if not isinstance(value, tuple):
        return _share(value * of, stages)
    if len(value) == stages:
        return value
    many, rest = divmod(len(value), stages)
    if not rest:
        return tuple(sum(value[s * many : (s + 1) * many]) for s in range(stages))
    many = _multiple(name, len(value), stages)
    return tuple(_share(one, many) for one in value for _ in range(many))


def _edges(name: str, value: PerStage, stages: int, every: int) -> PerStage:
    """What stands at the beginning of each stage (`every` 0), or between two of them (1)."""
    if not isinstance(value, tuple) or len(value) == stages - every:
        return value
    had = len(value) + every
    many, rest = divmod(had, stages)
    if not rest:
        return value[every * (many - 1) :: many][: stages - every]
    many = _multiple(name, had, stages)
    # Stage s becomes `many`: where the first of them begins and the last ends was known before.
    return tuple(_edge(value, s, many, every) for s in range(stages - every))


def _edge(value: Sequence[float], stage: int, many: int, every: int) -> float:
    old, part = divmod(stage, many)
    known = part == (many - 1 if every else 0)
    after = old if known or every else old + 1
    return value[min(after, len(value) - 1)]


def _multiple(name: str, had: int, stages: int) -> int:
    many, rest = divmod(stages, had)
    if rest:
        raise SchedirError(
            f"{name} is given for {had} stages, which can't be made {stages}: neither is a "
            "multiple of the other"
        )
    return many


def _share(value: float, many: int) -> float:
    """A part of a cost, whole where that is exact."""
    return value // many if isinstance(value, int) and value % many == 0 else value / many
