"""Forecasts: a schedule run many times on durations that were observed, a band and no number.

A makespan is a maximum over ranks that wait for each other, and the maximum of what jitters lies
above the maximum of the medians:

    measured    rank 0  F----- F---  F--- ...     each microbatch takes the longer one of two; with
                rank 1  F---   F---- F--- ...     the medians of both it would take a median

So each draw gives every entry of the schedule what its kind and stage cost, times the jitter of one
that was observed (`draws`).
"""

from __future__ import annotations

import attrs
import numpy as np

from schedir.errors import SchedirError
from schedir.ir import Plan, Schedule
from schedir.simulator.costs import CostModel
from schedir.simulator.draws import drawn_prices
from schedir.simulator.prices import Prices
from schedir.simulator.run import prepared, run_priced
from schedir.simulator.steadiness import expect_steady
from schedir.simulator.times import Numbers, numbers

_EQUAL = attrs.cmp_using(eq=np.array_equal, class_name="Makespans")


def _ascending(values: Numbers) -> Numbers:
    return numbers(np.sort(values))


@attrs.frozen
class Band:
    """The makespans of the drawn runs, ascending, in the unit of the costs."""

    makespans: Numbers = attrs.field(converter=_ascending, eq=_EQUAL, hash=False)

    @property
    def mean(self) -> float:
        """The mean makespan."""
        return float(self.makespans.mean())

    @property
    def median(self) -> float:
        """The makespan that half of all runs stay below."""
        return self.quantile(0.5)

    def quantile(self, q: float) -> float:
        """The makespan that the share `q` of all runs stays below.

        Raises ValueError for what is not between 0 and 1.
        """
        if not 0 <= q <= 1:
            raise ValueError(f"a quantile is between 0 and 1, not {q}")
        return float(np.quantile(self.makespans, q))


def forecast(schedule: Schedule, costs: CostModel, draws: int = 200, seed: int = 0) -> Band:
    """How long the schedule will take: a band of `draws` runs on resampled durations.

    `costs` are those of `CostModel.fit`, whose samples are drawn from. Each is scaled by the cost
    that the model has now, so that one that was changed by hand counts; kinds that were not
    observed jitter as the backward does. What was observed in one step stays together: each draw
    is made of one, and where the schedule has more microbatches, of further ones at its pace. With
    fewer than 10 steps the band is wide, as they don't tell much. The same `seed` draws the same.

    Raises SchedirError where the costs have no samples, or the run that they were fitted on was not
    steady, and what `simulate` raises; ValueError where there are no draws.
    """
    if draws < 1:
        raise ValueError(f"draws must be at least 1, not {draws}")
    complete, planned, priced = prepared(schedule, costs)
    if costs.samples is None:
        raise SchedirError(
            "these costs have no samples to draw from: fit them, CostModel.fit(timelines), or take "
            "schedir.simulate(schedule, costs).makespan for a number"
        )
    expect_steady(costs.samples)
    drawn = drawn_prices(complete, planned, priced, costs.samples, draws, seed)
    makespans = np.array([_makespan(complete, planned, one) for one in drawn])
    return Band(_to_come(makespans, len(costs.samples.steps), seed))


def _to_come(makespans: Numbers, steps: int, seed: int) -> Numbers:
    """Makespans of runs to come, from those drawn of so many observed steps.

    What comes is none of a few values: a smoothed bootstrap (Silverman & Young, Biometrika 74,
    1987) draws between and beyond them, at the same variance, which is widened to that of Student's
    t for one more observation, as few steps don't tell their mean and variance well.
    """
    middle, spread = makespans.mean(), makespans.std()
    if not spread:
        return makespans
    # Silverman's width, which a few slow steps don't make larger.
    low, high = np.quantile(makespans, (0.25, 0.75))
    width = 0.9 * min(spread, (high - low) / 1.34) * steps**-0.2
    smooth = makespans + width * np.random.default_rng(seed).standard_normal(len(makespans))
    wider = np.sqrt((steps + 1) / max(steps - 3, 1) / (1 + (width / spread) ** 2))
    found: Numbers = np.maximum(middle + wider * (smooth - middle), 0)
    return found


def _makespan(complete: Schedule, planned: Plan, priced: Prices) -> float:
    times = run_priced(complete, planned, priced)
    arrivals = np.array(times.begins[: len(priced.takes)]) + priced.takes
    return float(max(max(times.ends, default=0), arrivals.max(initial=0)))
