"""Forecasts: a schedule run many times on durations that were observed, a band and no number.

A makespan is a maximum over ranks that wait for each other, and the maximum of what jitters lies
above the maximum of the medians. So each draw gives every entry of the schedule a duration that
its kind and stage were seen to take:

    observed    step 0   1F: 3.0 3.1 3.0       the slow step 1 is slow everywhere: a factor of the
                step 1   1F: 3.6 3.8 3.6       step, which all entries of a draw share
                step 2   1F: 3.1 3.0 3.4       3.4 is jitter, which each entry draws on its own

    duration = cost of the kind and stage × (observed / median) of any entry of that kind and stage
               ÷ the factor of the step that it was observed in × the factor of the draw's step
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
    observed jitter as the backward does. What was observed in one step stays together as far as it
    is common to the whole step, or to a rank in it. The same `seed` draws the same durations.

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
    return Band(np.array([_makespan(complete, planned, one) for one in drawn]))


def _makespan(complete: Schedule, planned: Plan, priced: Prices) -> float:
    times = run_priced(complete, planned, priced)
    arrivals = np.array(times.begins[: len(priced.takes)]) + priced.takes
    return float(max(max(times.ends, default=0), arrivals.max(initial=0)))
