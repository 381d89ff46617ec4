"""Forecasts: run a schedule many times on measured durations, and give a band instead of one
number.

A makespan is a maximum over ranks that wait for each other, and the maximum of random delays is
larger than the maximum of their medians:

    measured    rank 0  F----- F---  F--- ...     each microbatch takes the longer one of two; with
                rank 1  F---   F---- F--- ...     the medians of both it would take a median

So each draw gives every entry of the schedule a duration that was measured, and what happened
together stays together. The forecast of the measured schedule matches the measurement: its median
is the median of the steps.

A draw takes one measured step. The k-th entry of a kind and stage in that step lends its jitter to
the k-th such entry of the schedule. So a pause that held up all ranks at once does so again, and
nothing varies twice. If the schedule has more entries, they come from further steps:

    observed, step 4    1F: 3.0 3.1 3.6 3.0       drawn  1F: 3.0 3.1 3.6 3.0 | 3.0 3.2
    observed, step 9    1F: 3.9 3.9 4.2 4.0                  of step 4       | of step 9, at the
                                                                               pace of step 4

If it has fewer, they are consecutive entries of the step. So a step drawn for the schedule that was
measured equals the measured step.

Compute is scaled by its current cost, because a pause is longer in a longer action. A transfer
keeps its measured time, plus what its link costs now beyond what it was seen to cost: a delay is
equally long on a quick link. A transfer that had arrived before anybody looked takes the usual
time, but no longer than it can have taken.

The pace of a step is that of everything it runs, times that of each rank. Both are shrunk to the
part of their variance that is not chance. To find this part, the measurements of each kind and
stage are dealt out to the steps at random: the jitter of many entries in a step averages out, but
the jitter of few entries does not, and would be mistaken for pace.

A measured run must be steady: its costs must not change while it is measured.

    step           0    1    2    3    4    5    6    7    8    9
    2F on rank 2   3.0  3.1  3.0  2.9  3.0  3.8  3.9  3.8  3.7  3.8      turned slow at step 5

Each stage on each rank has one number per step, its speed: the median of its entries' durations,
each divided by the usual duration of such an entry. One slow step or one slow entry is a random
delay, which a forecast draws again. A run whose level changes is two runs, and no number is right
for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import attrs
import numpy as np

from schedir.display import Displayed, rounded
from schedir.errors import SchedirError
from schedir.graph.compile import graph_of
from schedir.graph.paths import Prices, finish
from schedir.ir import COMPUTE, COPIES, HOMES, Bools, Ints, Schedule
from schedir.ir.kinds import STAGE_WIDE
from schedir.simulator.costs import CostModel, unmeasured
from schedir.simulator.fit import usual_links
from schedir.simulator.samples import (
    COSTS,
    DELAYED,
    ENTRY,
    TRANSFER,
    WITHIN,
    Samples,
    costs_and_stages,
    grouped,
    turns,
)
from schedir.simulator.simulation import completed, posting_of, waits_of
from schedir.simulator.values import Numbers, numbers

FEWEST = 5
"""The fewest steps besides the first one of a run: fewer don't show how much steps vary."""


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

    makespans: Numbers = attrs.field(
        converter=_ascending, eq=attrs.cmp_using(eq=np.array_equal), hash=False
    )
    unmeasured: tuple[str, ...] = ()

    def __str__(self) -> str:
        least, usual, most = (rounded(self.quantile(q), 5) for q in (0.05, 0.5, 0.95))
        runs = f"{len(self.makespans)} run{'s' * (len(self.makespans) != 1)}"
        return f"makespan {usual} (the median of {runs}), {least} to {most} in nine of ten"

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
    samples = costs.samples
    if samples is None:
        raise SchedirError(
            "these costs have no samples to draw from: fit them with CostModel.fit(timelines), or "
            "use schedir.simulate(schedule, costs).makespan"
        )
    _expect_enough(samples)
    _expect_steady(samples)
    waiting = waits_of(complete, costs, priced, posting_of(complete, costs, channel))
    makespans, steps = [], []
    for step, one in _drawn_prices(complete, waiting.node, costs, samples, priced, draws, seed):
        starts = finish(waiting, one.takes, one.holds)[: len(one.takes)]
        makespans.append(float((starts + one.takes).max(initial=0)))
        steps.append(step)
    to_come = _to_come(np.array(makespans), np.array(steps), len(samples.steps), seed)
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
    middle = np.median(_medians_by(makespans, drawn)[1])
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


# Draws of durations.

_DEALS = 20
_FASTEST = 0.1  # a step that took no time at all is no measure of another one's pace
_INSTEAD = {
    **{kind.cost_name: ("forward",) for kind in COMPUTE - HOMES - STAGE_WIDE},
    "backward": ("backward_input", "backward_weight"),
    "backward_input": ("backward", "backward_weight"),
    "backward_weight": ("backward", "backward_input"),
    "overlapped": ("backward", "backward_input"),
}
"""The kinds whose jitter stands in for that of a kind that was not observed: the longest of the
observed ones, because jitter is large beside an action that takes no time."""


def _drawn_prices(
    schedule: Schedule,
    node: Ints,
    costs: CostModel,
    samples: Samples,
    priced: Prices,
    draws: int,
    seed: int,
) -> Iterator[tuple[int, Prices]]:
    """The prices of a complete schedule, drawn several times, and the step of each draw. Every step
    is equally often the first. `node` gives the node of each place (see `Waits`)."""
    chance, steps = np.random.default_rng(seed), len(samples.steps)
    graph, columns = graph_of(schedule), schedule.columns
    transfers = graph.transfers
    heads = columns.computes
    entries = np.concatenate((heads, columns.where(*COPIES)))
    sums = np.array([places[0] for places in graph.collectives], np.int64)
    exchanges = node[np.concatenate((transfers.send, sums))]
    ends = list(zip(transfers.source.tolist(), transfers.target.tolist(), strict=True))
    usual = attrs.evolve(costs, **usual_links(samples, costs.boundary_bytes, ends))
    cost, busy = priced.takes[exchanges], priced.holds[exchanges]
    dearer = cost - usual.prices(schedule).takes[exchanges]
    behind, ahead = transfers.in_turn
    summed = np.arange(len(exchanges)) >= len(transfers)
    rank, ratios = columns.rank[entries], samples.ratios
    pace = _pace(samples, chance, schedule.ranks)
    own_pace = pace[samples.step, samples.rank]
    blocks, computed = _lenders(_keys(schedule, entries), samples)
    more, exchanged = _lenders([*ends, *_keys(schedule, sums)], samples)

    # The first compute of each rank that waits for nobody, and how long after the first rank it
    # began in each step.
    begins, first = np.unique(rank[: len(heads)], return_index=True)
    alone = ~np.isin(heads[first], transfers.user)
    begins, first = begins[alone], heads[first[alone]]
    rows = np.flatnonzero(samples.cost == ENTRY)
    entered = np.zeros_like(pace)
    entered[samples.step[rows], samples.rank[rows]] = samples.duration[rows]

    for draw in range(draws):
        if draw % steps == 0:
            turns_of_steps = chance.permutation(steps)
        step = int(turns_of_steps[draw % steps])
        chosen = np.append(step, chance.integers(steps, size=max(blocks, more)))
        sample, known = computed(chosen, chance)
        other = np.where(samples.step[sample] == step, 1, pace[step, rank] / own_pace[sample])
        takes = priced.takes.astype(np.float64)
        takes[entries] *= np.where(sample >= 0, ratios[sample] * other, 1)
        takes[first] += entered[step, begins]
        sample, known = exchanged(chosen, chance)
        took = np.maximum(samples.duration[sample] + dearer, 0)
        took = np.select(
            [~known, summed, samples.cost[sample] == WITHIN],
            [cost, cost * ratios[sample], np.minimum(took, cost)],
            took,
        )
        held = np.minimum(busy, took)
        # What one has waited for its channel is part of what it took.
        delayed = known & (samples.cost[sample] == DELAYED)
        held[ahead[delayed[behind]]] = 0
        holds = takes.copy()
        takes[exchanges], holds[exchanges] = took, held
        yield step, Prices(takes[node], holds[node])


_Key = tuple[str | int, int]
"""What an entry draws from: the cost and the stage of compute, a copy or a collective; the source
and the target of a transfer."""


def _keys(schedule: Schedule, heads: Ints) -> list[_Key]:
    """The keys of entries of compute, copies and collectives."""
    costs, stages = (column.tolist() for column in costs_and_stages(schedule.columns, heads))
    return [(COSTS[cost], stage) for cost, stage in zip(costs, stages, strict=True)]


def _rows_of(samples: Samples, what: str | int, where: int) -> Ints:
    """The samples of a key, in the order of their steps; of what was not observed, those that stand
    in for it."""
    groups, links, none = samples.groups, samples.links, np.zeros(0, np.int64)
    if not isinstance(what, str):
        found = [links[what, where]] if (what, where) in links else links.values()
        return np.concatenate([none, *found])
    if (what, where) in groups:
        return groups[what, where]
    instead = [(each, where) for each in _INSTEAD.get(what, ()) if (each, where) in groups]
    return groups[max(instead, key=samples.medians.__getitem__)] if instead else none


# Its generator is named as text, because numpy.random takes a while to import.
_Draw: TypeAlias = Callable[[Ints, "np.random.Generator"], tuple[Ints, Bools]]
"""Draws a sample for each of several entries, given the steps to take it from, one after the other;
and says where there is one. Where there is none, it is any, -1 if there are none at all."""


def _lenders(keys: Sequence[_Key], samples: Samples) -> tuple[int, _Draw]:
    """Draws for entries with these keys, and how many steps they need after the first.

    An entry takes the sample of its key at a `turn` of the `block`-th step, or of one up to `spare`
    turns later. `table[key, step, turn]` is the sample of an entry that was observed, -1 where none
    is known. `pool[key]` holds all samples of a key, of which there are `size`.
    """
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    own = np.array([numbers[key] for key in keys], np.int64)
    found = [_rows_of(samples, *key) for key in numbers]
    size, most = (
        np.array([(len(rows), 1 + samples.turn[rows].max(initial=0)) for rows in found], np.int64)
        .reshape(-1, 2)
        .T
    )
    table = np.full((len(found), len(samples.steps), most.max(initial=1)), -1)
    pool = np.full((len(found), 1 + size.max(initial=0)), -1)
    for number, rows in enumerate(found):
        table[number, samples.step[rows], samples.turn[rows]] = rows
        pool[number, : len(rows)] = rows
    wanted, most = np.bincount(own)[own], most[own]
    block, turn = np.divmod(turns(own), most)
    spare = np.maximum(most - wanted + block * most, 0)

    def drawn(steps: Ints, chance: np.random.Generator) -> tuple[Ints, Bools]:
        # Some that follow each other, where a block needs fewer than a step has.
        later = (chance.random() * (spare + 1)).astype(np.int64)
        lent = table[own, steps[block], turn + later]
        anyone = (chance.random(len(own)) * size[own]).astype(np.int64)
        return np.where(lent >= 0, lent, pool[own, anyone]), lent >= 0

    return int(block.max(initial=0)), drawn


def _pace(samples: Samples, chance: np.random.Generator, ranks: int) -> Numbers:
    """How much longer everything takes in each step on each rank, shape [steps, ranks]."""
    groups = [rows for rows in samples.groups.values() if samples.cost[rows[0]] < TRANSFER]
    rows, steps = np.concatenate(groups), len(samples.steps)
    bounds = np.cumsum([len(group) for group in groups])[:-1]
    ranks, step = max(ranks, 1 + int(samples.rank.max())), samples.step[rows]
    common = _common(samples.ratios[rows], step, steps, bounds, chance)
    key = step * ranks + samples.rank[rows]
    own = _common(samples.ratios[rows] / common[step], key, steps * ranks, bounds, chance)
    found: Numbers = common[:, None] * own.reshape(steps, ranks)
    return found


def _common(
    ratios: Numbers, key: Ints, keys: int, bounds: Ints, chance: np.random.Generator
) -> Numbers:
    """The factor that the entries of each key have in common, 1 for keys that have none. The
    entries of one kind and stage lie between two `bounds`."""
    some, medians = _medians_by(ratios, key)
    by_chance = 0.0
    for _ in range(_DEALS):
        dealt = np.concatenate([chance.permutation(own) for own in np.split(ratios, bounds)])
        by_chance += float(_medians_by(dealt, key)[1].var()) / _DEALS
    varies = float(medians.var())
    share = max(0.0, 1 - by_chance / varies) if varies > 0 else 0.0
    middle, factors = float(np.median(medians)), np.ones(keys)
    if middle > 0:
        factors[some] = np.maximum(1 + np.sqrt(share) * (medians / middle - 1), _FASTEST)
    return factors


def _medians_by(values: Numbers, key: Ints) -> tuple[Ints, Numbers]:
    """The keys that occur, ascending, and the median of the values of each."""
    order = np.lexsort((values, key))
    keys, first, sizes = np.unique(key[order], return_index=True, return_counts=True)
    ranked = values[order]
    return keys, (ranked[first + (sizes - 1) // 2] + ranked[first + sizes // 2]) / 2


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
    """Raise SchedirError if the run was not steady: if the level of some stage changes by more than
    _TOLERATED, which is not chance. It names the rank, stage and step of the largest change.

    Runs of fewer than 6 steps can't be told from jitter, so they show no change.
    """
    rows, found = np.flatnonzero(samples.cost < TRANSFER), []
    lanes = grouped(rows, samples.rank[rows], samples.stage[rows])
    for (rank, stage), own in lanes.items():
        steps, speeds = _medians_by(samples.ratios[own], samples.step[own])
        sure = (1 + 8 / len(steps)) * np.sqrt(_SURE**2 + 2 * np.log(len(lanes)))
        at = _turn(speeds, sure)
        ratio = _ratio(speeds, at) if at else 1.0
        if abs(ratio - 1) > _TOLERATED:
            found.append((ratio, rank, stage, samples.steps[steps[at]]))
    if not found:
        return
    with np.errstate(divide="ignore"):  # what takes no time any more
        ratio, rank, stage, step = max(found, key=lambda change: abs(np.log(change[0])))
    turned = f"{abs(ratio - 1):.0%} {'slower' if ratio > 1 else 'faster'}"
    others = len(found) - 1
    more = f", and {others} other stage{'s' * (others > 1)} changed too" if others else ""
    raise SchedirError(
        f"the run was not steady: stage {stage} on rank {rank} is {turned} from step {step} on"
        f"{more}; no cost fits both parts. Measure again, longer or on a quiet machine, "
        f"or fit only the steps before step {step} or only the steps from it on"
    )


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
