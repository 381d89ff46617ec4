"""Whether a measured run was steady: what it costs must not change while it is measured.

    step           0    1    2    3    4    5    6    7    8    9
    2F on rank 2   3.0  3.1  3.0  2.9  3.0  3.8  3.9  3.8  3.7  3.8      turned slow at step 5

Of each stage on each rank there is one number per step, its speed: the median of how long its
entries take, each over what such an entry usually takes. One slow step, or one slow entry, is
jitter, which a forecast draws again; a run whose level changes is two runs, and no number is right
for both.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np

from schedir.errors import SchedirError
from schedir.simulator.samples import TRANSFER, Samples
from schedir.simulator.times import Numbers

TOLERATED = 0.05
"""How much a stage's level may change, as a share: less than what forecasts are trusted to."""

_SURE = 5.0
"""How many standard errors a change must have, to be none of chance: it is sought at every step.
More where few steps tell what a standard error is, and where many stages are looked at."""
_SHORTEST = 4
"""Steps: fewer in a row are jitter; in long runs fewer than a seventh, such as two of forty that
another process slowed down. Of a run shorter than twice that the halves are compared."""
_FEWEST = 6
"""Steps: in shorter runs nothing can be told from jitter."""


@attrs.frozen
class Change:
    """From which step on a stage on a rank is slower, or faster: `before` and `after` are the
    levels of its speed."""

    rank: int
    stage: int
    step: int
    before: float
    after: float

    @property
    def ratio(self) -> float:
        """What it takes after the change over what it took before."""
        return self.after / self.before

    def __str__(self) -> str:
        turned = "slower" if self.ratio > 1 else "faster"
        return (
            f"stage {self.stage} on rank {self.rank} is {abs(self.ratio - 1):.0%} {turned} from "
            f"step {self.step} on"
        )


def expect_steady(samples: Samples) -> None:
    """Raise SchedirError where the run was not steady, with rank, stage and step of the largest
    change."""
    found = list(changes(samples))
    if not found:
        return
    worst = max(found, key=lambda change: abs(np.log(change.ratio)))
    more = f", and so are {len(found) - 1} other stages" if len(found) > 1 else ""
    raise SchedirError(
        f"the run was not steady: {worst}{more}; no number is right for both parts. Measure again, "
        f"longer or on a quiet machine, or fit the steps on one side of step {worst.step} alone"
    )


def changes(samples: Samples) -> Iterator[Change]:
    """Where the level of a stage changes by more than TOLERATED, and not by chance.

    Runs of fewer than 6 steps can't be told from jitter: nothing is found in them.
    """
    series = _speeds(samples)
    for (rank, stage), (steps, speeds) in series.items():
        sure = (1 + 8 / len(steps)) * np.sqrt(_SURE**2 + 2 * np.log(len(series)))
        at = _turn(speeds, sure)
        if at and _differ(speeds, at):
            before, after = (float(np.median(part)) for part in (speeds[:at], speeds[at:]))
            yield Change(rank, stage, samples.steps[steps[at]], before, after)


def relative(samples: Samples) -> Numbers:
    """Each duration over the median of its kind and stage; 1 where that is 0."""
    found = np.ones(len(samples))
    for rows in samples.groups.values():
        usual = np.median(samples.duration[rows])
        if usual > 0:
            found[rows] = samples.duration[rows] / usual
    return found


def _speeds(samples: Samples) -> dict[tuple[int, int], tuple[Numbers, Numbers]]:
    """For each stage on each rank, the steps in which it ran, and its speed in each."""
    computes = np.flatnonzero(samples.cost < TRANSFER)
    own = relative(samples)[computes]
    rank, stage, step = (c[computes] for c in (samples.rank, samples.stage, samples.step))
    order = np.lexsort((step, stage, rank))
    keys = np.stack((rank, stage, step))[:, order]
    first = np.flatnonzero(np.append(True, (keys[:, 1:] != keys[:, :-1]).any(axis=0)))
    found: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for at, rows in zip(first.tolist(), np.split(order, first[1:]), strict=True):
        key = int(keys[0, at]), int(keys[1, at])
        found.setdefault(key, []).append((int(keys[2, at]), float(np.median(own[rows]))))
    return {
        key: (np.array([s for s, _ in series]), np.array([v for _, v in series]))
        for key, series in found.items()
    }


def _turn(speeds: Numbers, sure: float) -> int:
    """The step at which the level most likely changes, 0 where that is not sure.

    The largest difference of the means before and after a step, in standard errors (a CUSUM test:
    Page, Biometrika 41, 1954). What a step varies by is told by neighbouring ones, so that a change
    of level does not hide itself, and outliers count as far ones at most.
    """
    steps = len(speeds)
    if steps < _FEWEST:
        return 0
    shortest = max(min(_SHORTEST, steps // 2), steps // 7)
    spread = 1.4826 * float(np.median(np.abs(np.diff(speeds)))) / np.sqrt(2)
    # Equal speeds but for rounding have no spread: any change is one then.
    spread = max(spread, 1e-9 * float(np.median(speeds)))
    middle = np.median(speeds)
    reach = max(5 * spread, 2 * TOLERATED * middle)
    clipped = np.clip(speeds, middle - reach, middle + reach)
    at = np.arange(1, steps)
    before = np.cumsum(clipped)[at - 1]
    difference = (clipped.sum() - before) / (steps - at) - before / at
    errors = np.abs(difference) / (spread * np.sqrt(1 / at + 1 / (steps - at)))
    # Whether there is a change is told by long parts; where, even close to the ends.
    told = shortest + int(errors[shortest - 1 : steps - shortest].argmax())
    if errors[told - 1] <= sure or not _differ(speeds, told):
        return 0
    return int(at[errors.argmax()])


def _differ(speeds: Numbers, at: int) -> bool:
    """Whether the levels before and after a step are further apart than is tolerated."""
    before, after = (float(np.median(part)) for part in (speeds[:at], speeds[at:]))
    return before > 0 and abs(after / before - 1) > TOLERATED
