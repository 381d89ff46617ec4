"""Forecasts: run a schedule many times on measured durations, and give a band instead of one
number.

A makespan is a maximum over ranks that wait for each other, and the maximum of random delays is
larger than the maximum of their medians:

    measured    rank 0  F----- F---  F--- ...     each microbatch takes the longer one of two; with
                rank 1  F---   F---- F--- ...     the medians of both it would take a median

So each draw gives every entry of the schedule a duration that was measured (`bootstrap`). The
forecast of the measured schedule matches the measurement: its median is the median of the steps.

A measured run must be steady: its costs must not change while it is measured.

    step           0    1    2    3    4    5    6    7    8    9
    2F on rank 2   3.0  3.1  3.0  2.9  3.0  3.8  3.9  3.8  3.7  3.8      turned slow at step 5

Each stage on each rank has one number per step, its speed: the median of its entries' durations,
each divided by the usual duration of such an entry. One slow step or one slow entry is a random
delay, which a forecast draws again. A run whose level changes is two runs, and no number is right
for both.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np

from schedir.display import Displayed
from schedir.errors import SchedirError
from schedir.graph.compile import graph_of
from schedir.graph.paths import finish
from schedir.ir import Ints, Schedule
from schedir.simulator.bootstrap import drawn_prices, medians_by
from schedir.simulator.costs import CostModel, unmeasured
from schedir.simulator.samples import TRANSFER, Samples
from schedir.simulator.simulation import completed, posting_of, waits_of
from schedir.simulator.values import Numbers, numbers

FEWEST = 5
"""The fewest steps besides the first one of a run: fewer don't show how much steps vary."""
_EQUAL = attrs.cmp_using(eq=np.array_equal, class_name="Makespans")


def _ascending(values: Numbers) -> Numbers:
    return numbers(np.sort(values))


@attrs.frozen(repr=False)
class Band(Displayed):
    """The makespans of the drawn runs, ascending, in the unit of the costs.

    `unmeasured` names the costs of the schedule that no run has shown, such as backward_input if no
    backward was split. The band is only as good as what was used for these costs.

    >>> import schedir
    >>> band = schedir.Band([10.0, 11.0, 12.0, 13.0, 14.0])
    >>> band.median, band.mean, band.quantile(0.75)
    (12.0, 12.0, 13.0)
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

        Raises ValueError if `q` is not between 0 and 1.
        """
        if not 0 <= q <= 1:
            raise ValueError(f"a quantile is between 0 and 1, not {q}")
        return float(np.quantile(self.makespans, q))


def forecast(
    schedule: Schedule,
    costs: CostModel,
    draws: int = 200,
    seed: int = 0,
    *,
    channel: str | None = None,
) -> Band:
    """Predict how long the schedule will take: a band of `draws` runs on resampled durations.

    `costs` come from `CostModel.fit`; the durations are drawn from their samples. Each duration is
    scaled by the current cost of its kind and stage, so a cost that you change by hand counts.
    Kinds that were not observed vary as the backward does. Durations of one step stay together:
    each draw uses one measured step, and further steps at its pace if the schedule has more
    microbatches. For the schedule that was measured, the median is the median of the measured
    steps. With fewer than 10 steps the band is wide, because few steps show little. The same `seed`
    draws the same runs. `channel` is that of `simulate`.

    Raises SchedirError if the costs have no samples, or samples of fewer than 5 steps besides the
    first one of a run; if the run was not steady, or its ranks took turns in one process; and for
    everything that `simulate` refuses. Raises ValueError if `draws` is below 1.

    >>> import schedir
    >>> schedule = schedir.build("1f1b", ranks=2, microbatches=4)
    >>> once = schedir.simulate(schedule, schedir.CostModel(unit="ms"))  # stands for measured steps
    >>> costs = schedir.CostModel.fit([once] * 10)
    >>> schedir.forecast(schedule, costs).median
    15.0
    """
    if draws < 1:
        raise ValueError(f"draws must be at least 1, not {draws}")
    complete = completed(schedule, costs, channel)
    priced = costs.prices(complete)
    if costs.samples is None:
        raise SchedirError(
            "these costs have no samples to draw from: fit them with CostModel.fit(timelines), or "
            "use schedir.simulate(schedule, costs).makespan"
        )
    _expect_enough(costs.samples)
    _expect_steady(costs.samples)
    posting, receives = posting_of(complete, costs, channel), graph_of(complete).transfers.receive
    held = priced if posting is None else priced.by_ends(receives)
    waiting, makespans, steps = waits_of(complete, costs, held, posting), [], []
    for step, one in drawn_prices(complete, waiting.node, costs, priced, draws, seed):
        if posting is not None:
            one = one.by_ends(receives)
        starts = finish(waiting, one.takes, one.holds)[: len(one.takes)]
        makespans.append(float((starts + one.takes).max(initial=0)))
        steps.append(step)
    to_come = _to_come(np.array(makespans), np.array(steps), len(costs.samples.steps), seed)
    return Band(to_come, unmeasured(complete, costs))


def _expect_enough(samples: Samples) -> None:
    """Raise SchedirError if the samples are too few for a forecast, or not of a parallel run."""
    steps = len(samples.steps)
    if steps < FEWEST:
        raise SchedirError(
            f"{steps} measured step{'s are' if steps != 1 else ' is'} too few for a forecast: "
            f"trace at least {FEWEST + 1} (the first step of a run does not count), or use "
            "schedir.simulate(schedule, costs).makespan"
        )
    if samples.links and not (samples.cost == TRANSFER).any():
        raise SchedirError(
            "no rank waited for another one while these costs were measured, for example because "
            "all ranks took turns in one process. So the duration of transfers is unknown: measure "
            "with one process for each rank"
        )


def _to_come(makespans: Numbers, drawn: Ints, steps: int, seed: int) -> Numbers:
    """Makespans of future runs, from the drawn makespans of measured steps; `drawn` are the steps.

    Future makespans are not limited to the few measured values. A smoothed bootstrap (Silverman &
    Young, Biometrika 74, 1987) draws between and beyond them at the same variance. The variance is
    widened to that of Student's t for one more observation, because few steps determine their
    middle and variance poorly. The middle is the median of the steps, because a single slow step
    moves the mean, and with it all other values.
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


# Whether the run was steady.

_TOLERATED = 0.05
"""How much a stage's level may change, as a share: less than the error that forecasts are trusted
to."""

_SURE = 5.0
"""How many standard errors a change must have so that it is not chance: it is sought at every step.
More if few steps determine the standard error, and if many stages are looked at."""
_SHORTEST = 4
"""Steps: fewer in a row are jitter. In long runs, fewer than a seventh are, such as two of forty
that another process slowed down. In a run shorter than twice that, the halves are compared."""
_FEWEST = 6
"""Steps: shorter runs can't be told from jitter."""


def _expect_steady(samples: Samples) -> None:
    """Raise SchedirError if the run was not steady, with the rank, stage and step of the largest
    change."""
    found = list(_changes(samples))
    if not found:
        return
    ratio, rank, stage, step = max(found, key=lambda change: abs(np.log(change[0])))
    turned = f"{abs(ratio - 1):.0%} {'slower' if ratio > 1 else 'faster'}"
    others = len(found) - 1
    more = f", and {others} other stage{'s' * (others > 1)} changed too" if others else ""
    raise SchedirError(
        f"the run was not steady: stage {stage} on rank {rank} is {turned} from step {step} on"
        f"{more}; no cost fits both parts. Measure again, longer or on a quiet machine, "
        f"or fit only the steps before step {step} or only the steps from it on"
    )


def _changes(samples: Samples) -> Iterator[tuple[float, int, int, int]]:
    """The changes of a stage's level by more than _TOLERATED that are not chance: (level after /
    level before, rank, stage, first step).

    Runs of fewer than 6 steps can't be told from jitter, so they show no change.
    """
    series = _speeds(samples)
    for (rank, stage), (steps, speeds) in series.items():
        sure = (1 + 8 / len(steps)) * np.sqrt(_SURE**2 + 2 * np.log(len(series)))
        at = _turn(speeds, sure)
        ratio = _ratio(speeds, at) if at else 1.0
        if abs(ratio - 1) > _TOLERATED:
            yield ratio, rank, stage, samples.steps[steps[at]]


def _speeds(samples: Samples) -> dict[tuple[int, int], tuple[Numbers, Numbers]]:
    """For each stage on each rank, the steps in which it ran, and its speed in each."""
    computes = np.flatnonzero(samples.cost < TRANSFER)
    rank, stage, step = (c[computes] for c in (samples.rank, samples.stage, samples.step))
    stages, steps = 1 + int(stage.max()), len(samples.steps)
    keys, speeds = medians_by(samples.ratios[computes], (rank * stages + stage) * steps + step)
    lanes, step = np.divmod(keys, steps)
    first = np.flatnonzero(np.diff(lanes, prepend=-1))
    parts = zip(np.split(step, first[1:]), np.split(speeds, first[1:]), strict=True)
    return {
        divmod(lane, stages): part for lane, part in zip(lanes[first].tolist(), parts, strict=True)
    }


def _turn(speeds: Numbers, sure: float) -> int:
    """The step at which the level most likely changes, 0 if no change is sure.

    This is the largest difference of the means before and after a step, in standard errors (a CUSUM
    test: Page, Biometrika 41, 1954). Neighbouring steps determine how much a step varies, so a
    change of level does not hide itself. Outliers are clipped.
    """
    steps = len(speeds)
    if steps < _FEWEST:
        return 0
    shortest = max(min(_SHORTEST, steps // 2), steps // 7)
    spread = 1.4826 * float(np.median(np.abs(np.diff(speeds)))) / np.sqrt(2)
    # Equal speeds but for rounding have no spread: any change is one then.
    spread = max(spread, 1e-9 * float(np.median(speeds)))
    middle = np.median(speeds)
    reach = max(5 * spread, 2 * _TOLERATED * middle)
    clipped = np.clip(speeds, middle - reach, middle + reach)
    at = np.arange(1, steps)
    before = np.cumsum(clipped)[at - 1]
    difference = (clipped.sum() - before) / (steps - at) - before / at
    errors = np.abs(difference) / (spread * np.sqrt(1 / at + 1 / (steps - at)))
    # Whether there is a change is told by long parts; where, even close to the ends.
    told = shortest + int(errors[shortest - 1 : steps - shortest].argmax())
    if errors[told - 1] <= sure or abs(_ratio(speeds, told) - 1) <= _TOLERATED:
        return 0
    return int(at[errors.argmax()])


def _ratio(speeds: Numbers, at: int) -> float:
    """The level after a step divided by the level before it; 1 if that is zero."""
    before, after = (float(np.median(part)) for part in (speeds[:at], speeds[at:]))
    return after / before if before > 0 else 1.0
