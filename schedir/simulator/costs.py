"""What actions and transfers cost in time, and what is kept in bytes: by stage and by link."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import attrs

from schedir.ir import Kind

PerStage: TypeAlias = float | tuple[float, ...]
"""One number for all stages, or one for each."""
PerLink: TypeAlias = float | Mapping[tuple[int, int], float]
"""One number for all links, or one for each (source rank, target rank)."""
Unit: TypeAlias = Literal["s", "ms", "us"]
"""What one unit of time is: a second, a millisecond, a microsecond."""

_MOST = 10**15


def _number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, not {value!r}")
    # Sums over millions of actions must stay far from overflow.
    if not 0 <= value <= _MOST:
        raise ValueError(f"{name} must be finite and >= 0 (at most {_MOST:.0e}), not {value}")


def _per_stage(default: float | None) -> Any:
    def check(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is None and default is None:
            return
        if not isinstance(value, tuple):
            _number(attribute.name, value)
            return
        if not value:
            raise ValueError(f"{attribute.name} must have one number for each stage, not none")
        for stage, one in enumerate(value):
            _number(f"{attribute.name} of stage {stage}", one)

    def tupled(value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    return attrs.field(default=default, validator=check, converter=tupled)


def _per_link(default: float) -> Any:
    def check(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        links = value.items() if isinstance(value, Mapping) else [(None, value)]
        for link, one in links:
            name = attribute.name if link is None else f"{attribute.name} of link {link}"
            if attribute.name == "bandwidth" and one == math.inf:
                continue
            _number(name, one)
            if attribute.name == "bandwidth" and one == 0:
                raise ValueError(f"{name} must be above 0")

    return attrs.field(default=default, validator=check, hash=False)


@attrs.frozen
class Sizes:
    """What is kept, in bytes: each one number, or one per stage (`boundary`: per boundary)."""

    boundary: PerStage = 0
    input: PerStage = 0
    activation: PerStage = 0
    weight: PerStage = 0
    gradient: PerStage = 0
    optimizer: PerStage = 0

    @property
    def known(self) -> bool:
        """Whether any is above 0."""
        return any(
            any(v) if isinstance(v, tuple) else v for v in attrs.astuple(self, recurse=False)
        )


@attrs.frozen(kw_only=True)
class CostModel:
    """The cost of every kind of action and transfer, and the bytes of what is kept.

    Times are in any unit, the same for all: `unit` says which where that is known. Each is one
    number for all stages, or one per stage. `recompute` of None is as `forward`; `overlapped`, that
    of an overlapped pair, by the stage of its FORWARD, is by default the sum of the two.

    A transfer occupies its channel for `boundary_bytes` / `bandwidth`, and arrives `latency` after
    that: each of these two is one number, or one per link, {(source rank, target rank): number}.
    `boundary_bytes` are those of one microbatch between stage s and s + 1.

    A (stage, microbatch) keeps `activation_bytes` from its FORWARD to its backward, or
    `input_bytes` until it is recomputed. `weight_bytes`, `gradient_bytes` and `optimizer_bytes` are per stage;
    each weight version counts.

    The defaults are the textbook's: a backward takes twice as long as a forward, half of it for
    the input and half for the weights, and the rest is free.

    Raises TypeError or ValueError for what is no finite number >= 0, with the name of the field.
    """

    forward: PerStage = _per_stage(Kind.FORWARD.traits.cost)
    backward: PerStage = _per_stage(Kind.BACKWARD.traits.cost)
    backward_input: PerStage = _per_stage(Kind.BACKWARD_INPUT.traits.cost)
    backward_weight: PerStage = _per_stage(Kind.BACKWARD_WEIGHT.traits.cost)
    recompute: PerStage | None = _per_stage(None)
    reduce_grad: PerStage = _per_stage(Kind.REDUCE_GRAD.traits.cost)
    optim_step: PerStage = _per_stage(Kind.OPTIM_STEP.traits.cost)
    overlapped: PerStage | None = _per_stage(None)
    latency: PerLink = _per_link(0)
    bandwidth: PerLink = _per_link(math.inf)
    boundary_bytes: PerStage = _per_stage(0)
    input_bytes: PerStage = _per_stage(0)
    activation_bytes: PerStage = _per_stage(0)
    weight_bytes: PerStage = _per_stage(0)
    gradient_bytes: PerStage = _per_stage(0)
    optimizer_bytes: PerStage = _per_stage(0)
    unit: Unit | None = attrs.field(
        default=None, validator=attrs.validators.in_((None, "s", "ms", "us"))
    )

    @property
    def sizes(self) -> Sizes:
        """The bytes alone."""
        return Sizes(
            self.boundary_bytes,
            self.input_bytes,
            self.activation_bytes,
            self.weight_bytes,
            self.gradient_bytes,
            self.optimizer_bytes,
        )
