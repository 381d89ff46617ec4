"""Schedules beside each other: what each costs, what speaks against it, and which is best."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import cached_property

import attrs

from schedir.checker import CHANNELS, prove
from schedir.ir import Schedule
from schedir.simulator import Unit


@attrs.frozen
class Problem:
    """Why a schedule can't be chosen: the code of the rule that it breaks, None where it could not
    be made in this shape at all, and a sentence."""

    code: str | None
    message: str


@attrs.frozen(kw_only=True)
class Row:
    """One schedule of a comparison in one shape; what is not known of it is None.

    `target` is what the user named; `chunks`, the stages per rank, is None for a list or a
    timeline, which has its own. `peak_activations` are the most (stage, microbatch) activations of
    any rank, `peak_bytes` the most that one keeps; `delay` is the most updates between the weight
    version that a gradient is computed at and the one that it is applied to. `fits` says whether
    its peak is within the memory limit. Where there is no time, `problem` says why; a schedule that
    deadlocks under the chosen channel model has both. `unmeasured` names the costs that it has and
    no run has shown, where costs were fitted: its time is no surer than what was taken for them.
    """

    target: str
    microbatches: int
    chunks: int | None = None
    ranks: int | None = None
    stages: int | None = None
    unit: Unit | None = None
    makespan: float | None = None
    bubble_fraction: float | None = None
    span_bubble_fraction: float | None = None
    peak_activations: int | None = None
    peak_bytes: float | None = None
    delay: int | None = None
    fits: bool | None = None
    problem: Problem | None = None
    unmeasured: tuple[str, ...] = ()
    make: Callable[[], Schedule] = attrs.field(repr=False, eq=False)

    @property
    def time_per_microbatch(self) -> float | None:
        """Its makespan, shared out over its microbatches."""
        return None if self.makespan is None else self.makespan / self.microbatches

    @property
    def share(self) -> Fraction:
        """How large a stage is beside one of as many as there are ranks."""
        return Fraction(self.ranks, self.stages) if self.ranks and self.stages else Fraction(1)

    def build(self) -> Schedule:
        """The complete schedule, made anew: a comparison of many would not fit in memory.

        Raises LoadError or ScheduleError where it can't be made.
        """
        return prove(self.make(), CHANNELS[-1]).proved()


# Not slotted, so that what is derived can be cached beside the fields.
@attrs.frozen(slots=False)
class Comparison:
    """Schedules compared, the quickest first: what `schedir.compare` returns.

    `rows` are in the order of their makespans; where they have unequal numbers of microbatches, and
    so do unequal work, in that of their time per microbatch. What has no time comes last. Of those
    that are equally quick, what keeps less comes first, then what has less delay. `channel` is the
    model that they have to run under, `memory_limit` the most bytes that a rank may keep, None for
    no limit.
    """

    rows: tuple[Row, ...]
    channel: str
    memory_limit: float | None
    unit: Unit | None = None

    @cached_property
    def per_microbatch(self) -> bool:
        """Whether the schedules have unequal numbers of microbatches: time per one is compared."""
        return len({row.microbatches for row in self.rows}) > 1

    @cached_property
    def best(self) -> Row | None:
        """The quickest that runs under the channel model and is within the memory limit, if any."""
        allowed = (True,) if self.memory_limit is not None else (None, True)
        return next((row for row in self.rows if row.problem is None and row.fits in allowed), None)

    @cached_property
    def measured(self) -> Row | None:
        """As `best`, of those alone whose costs are all given or measured."""
        rows = tuple(row for row in self.rows if not row.unmeasured)
        return attrs.evolve(self, rows=rows).best

    def time(self, row: Row) -> float | None:
        """What rows are compared by: the makespan, or the time per microbatch."""
        return row.time_per_microbatch if self.per_microbatch else row.makespan

    def ratio(self, row: Row) -> float | None:
        """The row's time as a multiple of the best one's; of the quickest one's without a best."""
        time, least = self.time(row), self.time(self.best or self.rows[0])
        return time / least if time is not None and least else None


def ranked(rows: list[Row], channel: str, memory_limit: float | None) -> Comparison:
    """The comparison of these rows."""
    per_microbatch = len({row.microbatches for row in rows}) > 1

    def order(row: Row) -> tuple[float, ...]:
        time = row.time_per_microbatch if per_microbatch else row.makespan
        if time is None:
            return (math.inf,)
        activations = (row.peak_activations or 0) * float(row.share)
        # Sums of floats in another order are no reason to be before another.
        return float(f"{time:.9g}"), row.peak_bytes or 0, activations, row.delay or 0

    unit = next((row.unit for row in rows if row.unit is not None), None)
    return Comparison(tuple(sorted(rows, key=order)), channel, memory_limit, unit)
