"""Draws durations for a schedule from what was observed: what is common to a step stays common.

    duration = what the entry costs × (observed / usual) of any entry of its kind and stage
               ÷ the factors of the step that it was observed in × those of the draw's step

A step has a factor for all that it runs, and on top of that one for each rank. They are shrunk to
the part of their variance that is not chance. How much is, is seen by dealing the observations of
each kind and stage out to the steps anew: where a step has many entries their jitter averages out,
where it has few it does not, and would be drawn twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs
import numpy as np

from schedir.ir import KINDS, Ints, Kind, Plan, Schedule
from schedir.simulator.prices import Prices
from schedir.simulator.samples import COSTS, Samples
from schedir.simulator.steadiness import relative
from schedir.simulator.times import Numbers

_DEALS = 20
_TRANSFER = COSTS.index("transfer")
_INSTEAD = {
    "backward": ("backward_input", "backward_weight"),
    "backward_input": ("backward", "backward_weight"),
    "backward_weight": ("backward", "backward_input"),
    "overlapped": ("backward", "backward_input"),
}
"""Whose jitter a kind has that was not observed."""


def drawn_prices(
    schedule: Schedule, planned: Plan, priced: Prices, samples: Samples, draws: int, seed: int
) -> Iterator[Prices]:
    """The prices of a complete schedule, drawn so many times."""
    chance = np.random.default_rng(seed)
    compute, exchanged = _pools(schedule, planned, samples)
    rank = schedule.columns.rank[planned.compute]
    steps = len(samples.steps)
    ranks = 1 + int(max(rank.max(initial=0), samples.rank.max()))
    common, own = _factors(samples, chance, ranks)
    ratios = relative(samples)
    computes = samples.cost != _TRANSFER
    step, at = samples.step[computes], samples.rank[computes]
    ratios[computes] /= common[step] * own[step, at]
    chosen = chance.integers(steps, size=draws)
    for step, factor in zip(chosen.tolist(), _to_come(common, chosen, chance), strict=True):
        takes = priced.takes * exchanged.picked(ratios, chance)
        yield Prices(
            priced.compute * compute.picked(ratios, chance) * factor * own[step, rank],
            takes,
            np.minimum(priced.holds, takes),
        )


def _to_come(common: Numbers, chosen: Ints, chance: np.random.Generator) -> Numbers:
    """The factors of steps to come, drawn from those that were seen.

    What comes is none of a few values that were seen: a smoothed bootstrap (Silverman & Young,
    Biometrika 74, 1987) draws between and beyond them, at the same variance, which is widened to
    that of Student's t for one more observation: few steps don't tell their mean and variance well.
    """
    steps = len(common)
    middle, spread = common.mean(), common.std()
    width = 1.06 * steps**-0.2
    drawn = common[chosen] - middle + width * spread * chance.standard_normal(len(chosen))
    wider = np.sqrt((steps + 1) / max(steps - 3, 1) / (1 + width**2))
    found: Numbers = np.maximum(middle + wider * drawn, common.min() / 2)
    return found


@attrs.frozen(eq=False)
class _Pools:
    """For each of several entries, the samples that it draws from: `rows[first : first + size]`."""

    rows: Ints
    first: Ints
    size: Ints

    def picked(self, ratios: Numbers, chance: np.random.Generator) -> Numbers:
        """What each draws; 1 where it has none to draw from."""
        at = self.first + (chance.random(len(self.first)) * self.size).astype(np.int64)
        return np.where(self.size > 0, ratios[self.rows[at]], 1.0)


def _pools_of(entries: Sequence[tuple[int, int]], found: Mapping[tuple[int, int], Ints]) -> _Pools:
    keys = sorted(set(entries))
    number = {key: at for at, key in enumerate(keys)}
    parts = [found[key] for key in keys]
    sizes = np.array([len(part) for part in parts], np.int64)
    own = np.array([number[entry] for entry in entries], np.int64)
    rows = np.concatenate([*parts, [0]]).astype(np.int64)
    return _Pools(rows, (np.cumsum(sizes) - sizes)[own], sizes[own])


def _pools(schedule: Schedule, planned: Plan, samples: Samples) -> tuple[_Pools, _Pools]:
    """Those of the compute of a plan, and those of its transfers and collectives."""
    columns, transfers = schedule.columns, schedule.dataflow.transfers
    places = planned.compute
    names = np.array([COSTS.index(k.name.lower()) if k.traits.computes else -1 for k in KINDS])
    cost, stage = names[columns.kind[places]], columns.stage[places].copy()
    pairs = np.flatnonzero(planned.last > np.arange(len(places)))
    forward = pairs + (columns.kind[places[pairs]] != KINDS.index(Kind.FORWARD))
    cost[pairs + 1], stage[pairs + 1] = COSTS.index("overlapped"), stage[forward]
    entries = list(zip(cost.tolist(), stage.tolist(), strict=True))
    compute = _pools_of(entries, {key: _rows(samples, *key) for key in set(entries)})

    links = list(zip(transfers.source.tolist(), transfers.target.tolist(), strict=True))
    every = np.flatnonzero(samples.cost == _TRANSFER)
    found = {link: samples.links.get(link, every) for link in set(links)}
    sums = [(-1, int(columns.stage[group[0]])) for group in planned.collectives]
    found |= {key: samples.groups.get(("reduce_grad", key[1]), every[:0]) for key in sums}
    return compute, _pools_of(links + sums, found)


def _rows(samples: Samples, cost: int, stage: int) -> Ints:
    name = COSTS[cost]
    for instead in (name, *_INSTEAD.get(name, ())):
        if (rows := samples.groups.get((instead, stage))) is not None:
            return rows
    return np.zeros(0, np.int64)


def _factors(samples: Samples, chance: np.random.Generator, ranks: int) -> tuple[Numbers, Numbers]:
    """How much longer all takes in each step, shape [steps], and on top of that on each rank, shape
    [steps, ranks]."""
    computes = np.flatnonzero(samples.cost != _TRANSFER)
    step, rank = samples.step[computes], samples.rank[computes]
    ratios = relative(samples)[computes]
    number = {row: at for at, row in enumerate(computes.tolist())}
    groups = [
        np.array([number[row] for row in rows.tolist()])
        for (name, _), rows in samples.groups.items()
        if name != "transfer"
    ]
    steps = len(samples.steps)
    common = _common(ratios, step, groups, chance, np.ones(steps))
    own = _common(
        ratios / common[step], step * ranks + rank, groups, chance, np.ones(steps * ranks)
    )
    return common, own.reshape(steps, ranks)


def _common(
    ratios: Numbers,
    key: Ints,
    groups: Sequence[Ints],
    chance: np.random.Generator,
    factors: Numbers,
) -> Numbers:
    """The factor that the entries of each key have in common, 1 for keys that have none."""
    keys, medians = _medians(ratios, key)
    dealt = ratios.copy()
    by_chance = 0.0
    for _ in range(_DEALS):
        for rows in groups:
            dealt[rows] = chance.permutation(ratios[rows])
        by_chance += float(_medians(dealt, key)[1].var()) / _DEALS
    varies = float(medians.var())
    share = max(0.0, 1 - by_chance / varies) if varies > 0 else 0.0
    factors[keys] = 1 + np.sqrt(share) * (medians / np.median(medians) - 1)
    return factors


def _medians(values: Numbers, key: Ints) -> tuple[Ints, Numbers]:
    """The keys that there are, ascending, and the median of the values of each."""
    order = np.lexsort((values, key))
    keys, first, sizes = np.unique(key[order], return_index=True, return_counts=True)
    ranked = values[order]
    return keys, (ranked[first + (sizes - 1) // 2] + ranked[first + sizes // 2]) / 2
