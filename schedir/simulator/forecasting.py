"""Forecasts: a schedule run many times on durations that were observed, a band and no number.

A makespan is a maximum over ranks that wait for each other, and the maximum of what jitters lies
above the maximum of the medians:

    measured    rank 0  F----- F---  F--- ...     each microbatch takes the longer one of two; with
                rank 1  F---   F---- F--- ...     the medians of both it would take a median

So each draw gives every entry of the schedule what one took that was observed (`bootstrap`). What
was measured itself is forecast as it was: its median is that of its steps.
"""

from __future__ import annotations

import attrs
import numpy as np

from schedir.errors import SchedirError
from schedir.graph.paths import finish
from schedir.ir import Ints, Schedule
from schedir.simulator.bootstrap import drawn_prices
from schedir.simulator.costs import CostModel
from schedir.simulator.samples import TRANSFER, Samples
from schedir.simulator.simulation import completed, prices, waits_of
from schedir.simulator.steadiness import expect_steady
from schedir.simulator.times import Numbers, numbers
from schedir.simulator.unmeasured import unmeasured

FEWEST = 5
"""Steps, beside the first one of a run: fewer don't tell how far another one may lie from them."""
_EQUAL = attrs.cmp_using(eq=np.array_equal, class_name="Makespans")


def _ascending(values: Numbers) -> Numbers:
    return numbers(np.sort(values))


@attrs.frozen
class Band:
    """The makespans of the drawn runs, ascending, in the unit of the costs.

    `unmeasured` names the costs of the schedule that no run has shown, such as backward_input where
    all backwards were whole: the band is no surer than what was taken for them.
    """

    makespans: Numbers = attrs.field(converter=_ascending, eq=_EQUAL, hash=False)
    unmeasured: tuple[str, ...] = ()

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
    is made of one, and where the schedule has more microbatches, of further ones at its pace. Of
    the schedule that was measured, the median is that of the measured steps. With fewer than 10
    steps the band is wide, as they don't tell much. The same `seed` draws the same.

    Raises SchedirError where the costs have no samples, or those of fewer than 5 steps beside the
    first one of a run; where the run that they were fitted on was not steady, or its ranks took
    turns in one process; and what `simulate` raises. ValueError where there are no draws.
    """
    if draws < 1:
        raise ValueError(f"draws must be at least 1, not {draws}")
    complete = completed(schedule, costs)
    priced = prices(complete, costs)
    if costs.samples is None:
        raise SchedirError(
            "these costs have no samples to draw from: fit them, CostModel.fit(timelines), or take "
            "schedir.simulate(schedule, costs).makespan for a number"
        )
    _expect_enough(costs.samples)
    expect_steady(costs.samples)
    waiting, makespans, steps = waits_of(complete, costs, priced), [], []
    for step, one in drawn_prices(complete, waiting.node, costs, priced, draws, seed):
        starts = finish(waiting, one.takes, one.holds)[: len(one.takes)]
        makespans.append(float((starts + one.takes).max(initial=0)))
        steps.append(step)
    to_come = _to_come(np.array(makespans), np.array(steps), len(costs.samples.steps), seed)
    return Band(to_come, unmeasured(complete, costs))


def _expect_enough(samples: Samples) -> None:
    """Raise SchedirError where the samples are too few to tell of, or of no parallel run."""
    steps = len(samples.steps)
    if steps < FEWEST:
        raise SchedirError(
            f"{steps} measured step{'s are' if steps != 1 else ' is'} too few to tell what another "
            f"one takes: trace at least {FEWEST + 1}, as the first one of a run does not count, or "
            "take schedir.simulate(schedule, costs).makespan for a number"
        )
    if samples.links and not (samples.cost == TRANSFER).any():
        raise SchedirError(
            "no rank waited for another one while these costs were measured, as where all ranks "
            "take turns in one process: how long transfers take is not known. Measure with a "
            "process for each rank"
        )


def _to_come(makespans: Numbers, drawn: Ints, steps: int, seed: int) -> Numbers:
    """Makespans of runs to come, from those drawn of so many observed steps; `drawn` are the steps.

    What comes is none of a few values: a smoothed bootstrap (Silverman & Young, Biometrika 74,
    1987) draws between and beyond them, at the same variance, which is widened to that of Student's
    t for one more observation, as few steps don't tell their middle and variance well. That is the
    median of the steps: a single slow one moves the mean, and widened about it, all the others.
    """
    middle = np.median([np.median(makespans[drawn == step]) for step in np.unique(drawn)])
    spread = makespans.std()
    if not spread:
        return makespans
    # Silverman's width, which a few slow steps don't make larger.
    low, high = np.quantile(makespans, (0.25, 0.75))
    width = 0.9 * min(spread, (high - low) / 1.34) * steps**-0.2
    smooth = makespans + width * np.random.default_rng(seed).standard_normal(len(makespans))
    wider = np.sqrt((steps + 1) / max(steps - 3, 1) / (1 + (width / spread) ** 2))
    found: Numbers = np.maximum(middle + wider * (smooth - np.median(smooth)), 0)
    return found
