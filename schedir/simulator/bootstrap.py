"""Draws durations for a schedule from measurements: what happened together stays together.

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
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import attrs
import numpy as np

from schedir.graph.compile import Transfers, graph_of
from schedir.graph.paths import Prices
from schedir.ir import COMPUTE, COPIES, HOMES, Bools, Ints, Schedule
from schedir.ir.kinds import STAGE_WIDE
from schedir.simulator.costs import CostModel
from schedir.simulator.fit import usual_links
from schedir.simulator.samples import (
    COST_OF_KIND,
    COSTS,
    DELAYED,
    ENTRY,
    TRANSFER,
    WITHIN,
    Samples,
    turns,
)
from schedir.simulator.values import Numbers

_NOTHING = np.zeros(0, np.int64)
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


def drawn_prices(
    schedule: Schedule, node: Ints, costs: CostModel, priced: Prices, draws: int, seed: int
) -> Iterator[tuple[int, Prices]]:
    """The prices of a complete schedule, drawn several times, and the step of each draw. Every step
    is equally often the first. `node` gives the node of each place (see `Waits`)."""
    samples = costs.samples
    assert samples is not None
    chance = np.random.default_rng(seed)
    graph, columns = graph_of(schedule), schedule.columns
    transfers = graph.transfers
    heads = np.flatnonzero(columns.is_kind(*COMPUTE) & ~columns.joined)
    entries = np.concatenate((heads, columns.where(*COPIES)))
    sums = np.array([places[0] for places in graph.collectives], np.int64)
    exchanges = node[np.concatenate((transfers.send, sums))]
    links = usual_links(samples, costs.boundary_bytes)
    own_links = zip(*_ends(transfers), strict=True)
    usual = attrs.evolve(costs, latency=links.latencies(own_links), bandwidth=links.bandwidth)
    lasts, cost, busy = priced.takes[entries], priced.takes[exchanges], priced.holds[exchanges]
    dearer = cost - usual.prices(schedule).takes[exchanges]
    behind, ahead = transfers.in_turn
    summed = np.arange(len(exchanges)) >= len(transfers)
    pace = _pace(samples, chance, schedule.ranks)
    ratios = samples.ratios
    computed = _lenders(_keys_of_compute(schedule, entries), _rows, samples)
    exchanged = _lenders(
        [*zip(*_ends(transfers), strict=True), *_keys_of_collectives(schedule, sums)],
        _rows_of_link,
        samples,
    )
    rank = columns.rank[entries]
    alone = ~np.isin(heads, transfers.user)
    first, entered = _entered(rank[: len(heads)], alone, samples)
    of_row = pace[samples.step, samples.rank]
    steps = len(samples.steps)
    blocks = max(computed.blocks, exchanged.blocks)
    for draw in range(draws):
        if draw % steps == 0:
            turns_of_steps = chance.permutation(steps)
        chosen = np.append(turns_of_steps[draw % steps], chance.integers(steps, size=blocks))
        rows, _ = computed.drawn(chosen, chance)
        own = np.where(rows >= 0, ratios[rows], 1.0)
        other = (rows >= 0) & (samples.step[rows] != chosen[0])
        own[other] *= pace[chosen[0], rank[other]] / of_row[rows[other]]
        takes = priced.takes.astype(np.float64)
        takes[entries] = lasts * own
        takes[heads[first]] += entered[:, chosen[0]]
        sample, known = exchanged.drawn(chosen, chance)
        took = np.maximum(samples.duration[sample] + dearer, 0)
        took[summed] = (cost * ratios[sample])[summed]
        within = samples.cost[sample] == WITHIN
        took = np.where(within, np.minimum(took, cost), took)
        took = np.where(known, took, cost)
        held = np.minimum(busy, took)
        # What one has waited for its channel is part of what it took.
        delayed = known & (samples.cost[sample] == DELAYED)
        held[ahead[delayed[behind]]] = 0
        holds = takes.copy()
        takes[exchanges], holds[exchanges] = took, held
        yield int(chosen[0]), Prices(takes[node], holds[node])


@attrs.frozen(eq=False)
class _Lenders:
    """What each of several entries draws from: the `turn`-th of `wanted` ones of its key.

    `table[first + t × most + k]` is the sample of the k-th one of step t, -1 where it is not known;
    `pool[begin : begin + size]` are all samples of the key.
    """

    table: Ints
    first: Ints
    most: Ints
    turn: Ints
    wanted: Ints
    pool: Ints
    begin: Ints
    size: Ints

    @property
    def blocks(self) -> int:
        """How many further steps it takes at most."""
        return int((self.turn // self.most).max(initial=0))

    def drawn(self, steps: Ints, chance: np.random.Generator) -> tuple[Ints, Bools]:
        """The sample of each, of these steps one after the other, and where there is one. Where
        there is none, it is any, -1 if there are none at all."""
        block, turn = np.divmod(self.turn, self.most)
        # Some that follow each other, where a block needs fewer than a step has.
        spare = self.most - np.minimum(self.wanted - block * self.most, self.most)
        turn = turn + (chance.random() * (spare + 1)).astype(np.int64)
        found = self.table[self.first + steps[block] * self.most + turn]
        at = self.begin + (chance.random(len(self.begin)) * self.size).astype(np.int64)
        anyone = np.where(self.size > 0, self.pool[at], -1)
        return np.where(found >= 0, found, anyone), found >= 0


def _lenders(
    entries: Sequence[tuple[int, int]], found: Callable[[Samples, int, int], Ints], samples: Samples
) -> _Lenders:
    """Those of entries by key, of which `found` has the samples, in the order of their steps."""
    steps = len(samples.steps)
    numbers: dict[tuple[int, int], int] = {}
    own = np.array([numbers.setdefault(entry, len(numbers)) for entry in entries], np.int64)
    wanted = np.bincount(own, minlength=len(numbers))
    tables, pools, most = [], [], []
    for key in numbers:
        rows = found(samples, *key)
        most.append(1 + int(samples.turn[rows].max(initial=0)))
        table = np.full((steps, most[-1]), -1)
        table[samples.step[rows], samples.turn[rows]] = rows
        tables.append(table.ravel())
        pools.append(rows)
    sizes, lengths = ([len(part) for part in parts] for parts in (pools, tables))
    firsts, begins = (np.cumsum(sums) - sums for sums in (lengths, sizes))
    nothing = np.zeros(1, np.int64)
    return _Lenders(
        np.concatenate([*tables, nothing]),
        firsts[own].astype(np.int64),
        np.array(most, np.int64)[own],
        turns(own),
        wanted[own],
        np.concatenate([*pools, nothing]),
        begins[own].astype(np.int64),
        np.array(sizes, np.int64)[own],
    )


def _keys_of_compute(schedule: Schedule, heads: Ints) -> list[tuple[int, int]]:
    """The cost and the stage of each entry of compute, and of copies."""
    columns = schedule.columns
    pair = columns.shared[heads]
    cost = np.where(pair, COSTS.index("overlapped"), COST_OF_KIND[columns.kind[heads]])
    home = heads + (pair & ~columns.is_kind(*HOMES)[heads])
    return list(zip(cost.tolist(), columns.stage[home].tolist(), strict=True))


def _keys_of_collectives(schedule: Schedule, places: Ints) -> list[tuple[int, int]]:
    """The cost, with all bits turned over to be below 0, and the stage of each collective."""
    columns = schedule.columns
    cost = COST_OF_KIND[columns.kind[places]]
    return list(zip((~cost).tolist(), columns.stage[places].tolist(), strict=True))


def _rows_of_link(samples: Samples, source: int, target: int) -> Ints:
    """The samples of a link, or, with a source below 0, of a collective of a stage."""
    if source < 0:
        return samples.groups.get((COSTS[~source], target), _NOTHING)
    if (source, target) in samples.links:
        return samples.links[source, target]
    return np.concatenate([_NOTHING, *samples.links.values()])


def _ends(transfers: Transfers) -> tuple[list[int], list[int]]:
    """The source and the target rank of each transfer."""
    return transfers.source.tolist(), transfers.target.tolist()


def _entered(ranks: Ints, alone: Bools, samples: Samples) -> tuple[Ints, Numbers]:
    """The first compute of each rank that is `alone` and waits for nobody, and how long after the
    first rank it began in each step, shape [these, steps]. `ranks` are those of all compute."""
    own, first = np.unique(ranks, return_index=True)
    waits = ~alone[first]
    rows = np.flatnonzero(samples.cost == ENTRY)
    entered = np.zeros((1 + max(int(own.max()), int(samples.rank.max())), len(samples.steps)))
    entered[samples.rank[rows], samples.step[rows]] = samples.duration[rows]
    return first[~waits], entered[own[~waits]]


def _rows(samples: Samples, cost: int, stage: int) -> Ints:
    name, groups = COSTS[cost], samples.groups
    if (name, stage) in groups:
        return groups[name, stage]
    instead = [groups[each, stage] for each in _INSTEAD.get(name, ()) if (each, stage) in groups]
    longest = max(instead, key=lambda rows: float(np.median(samples.duration[rows])), default=None)
    return _NOTHING if longest is None else longest


def _pace(samples: Samples, chance: np.random.Generator, ranks: int) -> Numbers:
    """How much longer everything takes in each step on each rank, shape [steps, ranks]."""
    computes = np.flatnonzero(samples.cost < TRANSFER)
    step, rank = samples.step[computes], samples.rank[computes]
    ratios = samples.ratios[computes]
    number = np.zeros(len(samples), np.int64)
    number[computes] = np.arange(len(computes))
    groups = [number[rows] for rows in samples.groups.values() if samples.cost[rows[0]] < TRANSFER]
    steps, ranks = len(samples.steps), max(ranks, 1 + int(samples.rank.max()))
    common = _common(ratios, step, groups, chance, np.ones(steps))
    key = step * ranks + rank
    own = _common(ratios / common[step], key, groups, chance, np.ones(steps * ranks))
    found: Numbers = common[:, None] * own.reshape(steps, ranks)
    return found


def _common(
    ratios: Numbers,
    key: Ints,
    groups: Sequence[Ints],
    chance: np.random.Generator,
    factors: Numbers,
) -> Numbers:
    """The factor that the entries of each key have in common, 1 for keys that have none."""
    keys, medians = medians_by(ratios, key)
    dealt = ratios.copy()
    by_chance = 0.0
    for _ in range(_DEALS):
        for rows in groups:
            dealt[rows] = chance.permutation(ratios[rows])
        by_chance += float(medians_by(dealt, key)[1].var()) / _DEALS
    varies = float(medians.var())
    share = max(0.0, 1 - by_chance / varies) if varies > 0 else 0.0
    middle = float(np.median(medians))
    if middle > 0:
        factors[keys] = np.maximum(1 + np.sqrt(share) * (medians / middle - 1), _FASTEST)
    return factors


def medians_by(values: Numbers, key: Ints) -> tuple[Ints, Numbers]:
    """The keys that occur, ascending, and the median of the values of each."""
    order = np.lexsort((values, key))
    keys, first, sizes = np.unique(key[order], return_index=True, return_counts=True)
    ranked = values[order]
    return keys, (ranked[first + (sizes - 1) // 2] + ranked[first + sizes // 2]) / 2
