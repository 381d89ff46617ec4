"""What is decided before there is an order: where layers are cut into stages, and how many ranks
each stage gets.

Both cut a line into consecutive parts, as cheaply as possible (`least_cut`): a line of layers, or
of ranks. `Cuts` are those of a schedule's layers:

    layers   embedding  t  t  t  t  t  t  head          each with its own times and bytes
    cut      |  stage 0  |  stage 1  |  stage 2  |      boundaries (3, 6)

The first is the cut that balances the time; others move layers between stages. The most likely cuts
have a low lower bound and a quick list schedule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from heapq import heappop, heappush
from itertools import accumulate, combinations, islice, pairwise
from random import Random
from typing import Any, TypeAlias

import attrs
import numpy as np

from schedir.errors import SchedirError
from schedir.finder.list_scheduling import scheduled, styles
from schedir.finder.terms import SCHEDULED, Budget, Terms
from schedir.simulator import CostModel
from schedir.simulator.values import Numbers, one_each

_OF_PARAMETERS = ("weight_bytes", "gradient_bytes", "early_gradient_bytes", "optimizer_bytes")
_TIMES = "forward", "backward", "backward_input", "backward_weight", "recompute", "optim_step"
_STYLES = 4  # list schedules of a cut that is tried


def least_cut(
    parts: Sequence[Numbers], join: np.ufunc = np.maximum
) -> tuple[float, tuple[int, ...]]:
    """Cut a line into consecutive parts as cheaply as possible: what that costs, and where the
    parts but the first begin.

    `parts[p][a, b]` is the cost of part p, if it goes from place a to just before place b; inf if
    it can't. `join` says whether the greatest of these costs counts, or their sum. Where a part may
    end at several places with no difference to that part and all after it, it ends at the last.
    """
    least, ends = parts[-1][:, -1], []
    for part in reversed(parts[:-1]):
        totals = join(part, least)
        # Of equal ones the last: argmin gives the first.
        ends.append(totals.shape[1] - 1 - totals[:, ::-1].argmin(axis=1))
        least = totals.min(axis=1)
    starts = accumulate(reversed(ends), lambda start, end: int(end[start]), initial=0)
    return float(least[0]), tuple(starts)[1:]


def balanced_cut(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Where stages but the first begin, if the most costly of them costs the least; of equal cuts
    the one with the least sum of squares, and then the one whose earlier stages are longer."""
    if not any(costs):
        costs = [1] * len(costs)
    # Sums and squares must be numbers too; a power of two changes no comparison.
    scaled = np.ldexp(np.asarray(costs, dtype=np.float64), -math.frexp(max(costs))[1])
    before = np.concatenate([[0.0], np.cumsum(scaled)])
    cost = before[None, :] - before[:, None]  # of a part from the row to the column
    cost[np.tril_indices(len(before))] = np.inf
    least, _ = least_cut([cost] * stages)
    return least_cut([np.where(cost <= least, cost, np.inf) ** 2] * stages, np.add)[1]


# Ranks for stages: PipeDream's planner (SOSP 2019, section 3.1).


@attrs.frozen
class ReplicaPlan:
    """`replicas[s]` ranks for each stage s. At best a microbatch comes out every `period`, in the
    costs' unit of time.

    >>> import schedir
    >>> plan = schedir.ReplicaPlan(replicas=(3, 1), period=4.0)
    >>> plan.throughput
    0.25
    """

    replicas: tuple[int, ...]
    period: float

    @property
    def throughput(self) -> float:
        """How many microbatches come out in a unit of time at best; infinite if everything is
        free."""
        return 1 / self.period if self.period else math.inf


def plan_replicas(costs: CostModel, ranks: int, stages: int | None = None) -> ReplicaPlan:
    """Divide `ranks` among the stages, each on one or more, so that the slowest stage is as quick
    as possible.

    A stage on r ranks takes 1 / r of its forward, backward and update for a microbatch, because its
    replicas take turns; with more than one replica, a `reduce_grad` is added to each. A boundary
    takes boundary_bytes / bandwidth, at the lowest bandwidth if links differ. The `period` is the
    largest of these times. This is the paper's dynamic program: the best use of some ranks for the
    first stages is the best use of fewer ranks for all but the last of them, and the rest for that
    one. Of equally good plans, the one with more ranks for earlier stages is chosen.

    The paper also cuts the layers into stages. Here the stages are given, and `stages` is their
    number if each cost is one number; `schedir.search` cuts layers. All ranks are used.

    Raises ValueError if the number of stages is unknown or larger than the number of ranks, and
    SchedirError for costs of other stages.

    >>> import schedir
    >>> costs = schedir.CostModel(forward=(3, 1), backward=(6, 2))
    >>> schedir.plan_replicas(costs, ranks=4)
    ReplicaPlan(replicas=(3, 1), period=3.0)
    """
    stages = costs.stages if stages is None else stages
    if stages is None:
        raise ValueError("each cost is one number for all stages: pass the number of `stages`")
    if not 1 <= stages <= ranks:
        raise ValueError(f"{stages} stages need at least {stages} ranks, one each")
    once = np.sum(
        [costs.by_stage(name, stages) for name in ("forward", "backward", "optim_step")], axis=0
    )
    sums = costs.by_stage("reduce_grad", stages)
    place = np.arange(ranks + 1)
    replicas = place[None, :] - place[:, None]  # from the row to the column
    parts = [
        np.where(replicas > 0, (of_one + (replicas > 1) * summed) / np.maximum(replicas, 1), np.inf)
        for of_one, summed in zip(once, sums, strict=True)
    ]
    slowest = costs.bandwidth
    if isinstance(slowest, Mapping):
        slowest = min(slowest.values(), default=math.inf)
    sizes = costs.by_stage("boundary_bytes", stages - 1)
    period = max(least_cut(parts)[0], *(size / slowest for size in sizes), 0)
    # What is as quick as the slowest is quick enough.
    _, starts = least_cut([np.where(part <= period, 0, np.inf) for part in parts])
    return ReplicaPlan(tuple(b - a for a, b in pairwise([0, *starts, ranks])), period)


# Layers for stages.


def stage_costs(
    layers: CostModel, boundaries: Iterable[int], ties: Iterable[Iterable[int]] = ()
) -> CostModel:
    """The costs of stages, from those of their layers.

    `layers` has a number for each layer in place of each stage, and one number stands for every
    layer. `boundaries` are the first layers of all stages but the first. The times and bytes of a
    stage are the sums over its layers; its input is that of its first layer, and a boundary that
    between the layers around it. `ties` are groups of layers that share their parameters, such as
    an embedding and a head. Each layer's bytes count its copy, and each stage holds one copy: of
    tied layers in one stage, those with the most bytes count.

    Raises SchedirError if no cost has a number for each layer, and for boundaries that leave a
    stage empty.

    >>> import schedir
    >>> layers = schedir.CostModel(forward=(1, 3, 3, 2), boundary_bytes=(8, 4, 4))
    >>> costs = schedir.finder.stage_costs(layers, boundaries=[2])
    >>> costs.forward, costs.boundary_bytes
    ((4, 5), (4,))
    """
    many = _number_of(layers)
    starts = tuple(boundaries)
    spans = list(pairwise([0, *starts, many]))
    whole = all(isinstance(start, int) for start in starts)
    if not whole or any(first >= end for first, end in spans):
        raise SchedirError(
            f"boundaries must be the first layers of the stages after the first, rising, from 1 to "
            f"{many - 1} at most, not {list(starts)}: no stage is empty"
        )
    sizes = layers.by_stage("boundary_bytes", many - 1)
    crossed = tuple(sizes[start - 1] for start in starts) or 0
    return attrs.evolve(_of_spans(layers, spans, ties), boundary_bytes=crossed)


def _number_of(layers: CostModel) -> int:
    if layers.stages is None:
        raise SchedirError(
            "layers: each cost is one number, so the number of layers is unknown; give at least "
            "the forward one number for each layer"
        )
    return layers.stages


def _of_spans(
    layers: CostModel, spans: Sequence[tuple[int, int]], ties: Iterable[Iterable[int]]
) -> CostModel:
    """What each span of layers costs as a stage, but for boundaries; spans may overlap."""
    many = _number_of(layers)
    groups = [sorted(set(tie)) for tie in ties]
    if any(layer not in range(many) for group in groups for layer in group):
        raise SchedirError(f"ties must name layers from 0 to {many - 1}, not {groups}")
    changed: dict[str, Any] = {"samples": None}
    for name, field in attrs.fields_dict(CostModel).items():
        what, value = field.metadata.get("by"), getattr(layers, name)
        if value is None or what not in ("stage", "start"):
            continue
        each = one_each(name, value, many, f"there are {many} layers")
        if what == "start":
            changed[name] = tuple(each[first] for first, _ in spans)
            continue
        sums = [sum(each[first:end]) for first, end in spans]
        for group in groups if name in _OF_PARAMETERS else ():
            for number, (first, end) in enumerate(spans):
                copies = [each[layer] for layer in group if first <= layer < end]
                sums[number] -= sum(copies) - max(copies, default=0)
        changed[name] = tuple(sums)
    return attrs.evolve(layers, **changed, boundary_bytes=0)


Cut: TypeAlias = tuple[int, ...]
"""The first layer of every stage but the first."""


# Not slotted, so that what is derived can be cached beside the fields.
@attrs.frozen(eq=False, slots=False)
class Cuts:
    """The cuts of layers into the stages of a search. The costs of its `terms` are those of the
    layers."""

    terms: Terms

    @cached_property
    def layers(self) -> int:
        """How many layers there are. Raises SchedirError for fewer than stages."""
        terms, layers = self.terms, _number_of(self.terms.costs)
        stages = terms.ranks * terms.chunks
        if stages > layers:
            raise SchedirError(
                f"{stages} stages can't be made of {layers} layers, because no stage may be empty: "
                "take fewer ranks or chunks, or give the costs of more and smaller layers"
            )
        return layers

    @cached_property
    def balanced(self) -> Cut:
        """The cut whose slowest stage takes the least time for a forward and a backward."""
        costs, layers = self.terms.costs, self.layers
        times = np.add(costs.by_stage("forward", layers), costs.by_stage("backward", layers))
        return balanced_cut(times.tolist(), self.terms.ranks * self.terms.chunks)

    def terms_of(self, cut: Cut) -> Terms:
        """The terms of the search with a cut."""
        return attrs.evolve(self.terms, costs=stage_costs(self.terms.costs, cut), boundaries=cut)

    @property
    def join(self) -> np.ufunc:
        """How the `parts` make a lower bound. With several chunks it is their sum, as the busiest
        rank needs at least the average."""
        return np.maximum if self.terms.chunks == 1 else np.add

    @cached_property
    def parts(self) -> list[Numbers]:
        """What each stage needs at least of the objective, if it goes from the row's layer to the
        column's; inf where that does not fit the limit."""
        terms, layers = self.terms, self.layers
        spans = list(combinations(range(layers + 1), 2))
        first, end = np.array(spans).T
        costs = _of_spans(terms.costs, spans, [])
        forward, whole, split, weights, again, step = (
            np.array(costs.by_stage(name, len(spans))) for name in _TIMES
        )
        inputs = np.minimum(whole, split) if terms.split else whole
        whole = np.minimum(whole, split + weights) if terms.split else whole
        # The way of one microbatch, down to each layer and back from it; and what follows that.
        down, up = (
            np.concatenate([[0], np.cumsum(each[end == first + 1])]) for each in (forward, inputs)
        )
        last = (whole - inputs + step)[first == 0].min()
        # The ways between stages, at the least.
        of_stages = self.terms_of(self.balanced)
        smallest = min(terms.costs.by_stage("boundary_bytes", layers - 1))
        nearest = attrs.evolve(of_stages.costs, boundary_bytes=smallest)
        links = attrs.evolve(of_stages, costs=nearest).task(terms.placements[0]).costs
        sent, returned = np.cumsum(links.down), np.cumsum((0, *links.up[:-1]))
        memory = attrs.evolve(terms, costs=costs).memory(range(len(spans)))
        full, lean, rest, most = map(
            np.array, (memory.full, memory.lean, memory.rest, memory.limit)
        )
        many, makespan, found = terms.microbatches, terms.objective == "makespan", []
        for stage in range(len(sent)):
            head = (sent[stage] + down[first]) * (makespan and stage < terms.ranks)
            need = head + many * (forward + whole) + step
            if terms.chunks == 1:
                below = sent[-1] - sent[stage] + returned[-1] - returned[stage]
                turn = forward + down[-1] - down[end] + up[-1] - up[end] + below
                back = (returned[stage] + up[first] + last) * (makespan and stage > 0)
                held = full * (turn + inputs)
                if terms.may_recompute:
                    short = full * (again + inputs) + lean * np.maximum(0, turn - again)
                    held = np.minimum(held, short)
                held = (held + rest * (whole - inputs)) / np.where(most > 0, most, np.inf)
                for other in (many * (forward + inputs) + back, many * held):
                    need = np.maximum(need, head + other)
                need = np.maximum(need, down[-1] + up[-1] + sent[-1] + returned[-1] + last)
            table = np.full((layers + 1, layers + 1), np.inf)
            table[first, end] = np.where(most < full, np.inf, need)
            found.append(table if terms.chunks == 1 else table / terms.ranks)
        return found

    def likely(self, first: Iterable[Cut], budget: Budget, known: float) -> list[tuple[float, Cut]]:
        """The lower bounds of the cuts that are tried, and these, the most likely first.

        A cut with a bound of `known` or more can't be better. The others are tried by a few list
        schedules: the `first` ones, and then always those beside the best.
        """
        seen: set[Cut] = set()
        tried: list[tuple[float, float, float, Cut]] = []
        waiting: list[tuple[float, float, float, Cut]] = []
        beside, at = first, (0.0, 0.0)
        while True:
            for cut in {*beside} - seen:
                seen.add(cut)
                if (bound := self._bound(cut)) < known:
                    heappush(waiting, (*at, bound, cut))
            if not waiting or budget.over:
                return [(bound, cut) for _, _, bound, cut in sorted(tried)]
            _, _, bound, cut = heappop(waiting)
            at = self._try(cut, budget)
            tried.append((*at, bound, cut))
            beside = self._beside(cut)

    def _bound(self, cut: Cut) -> float:
        spans = pairwise([0, *cut, self.layers])
        each = [part[span] for part, span in zip(self.parts, spans, strict=True)]
        return float(self.join.reduce(each))

    def _beside(self, cut: Cut) -> Iterator[Cut]:
        """The cuts in which a layer moves from one stage to another, and those between move on."""
        for low, high in combinations(range(len(cut) + 1), 2):
            for by in (-1, 1):
                moved = *cut[:low], *(start + by for start in cut[low:high]), *cut[high:]
                if all(a < b for a, b in pairwise([0, *moved, self.layers])):
                    yield moved

    def _try(self, cut: Cut, budget: Budget) -> tuple[float, float]:
        """The objective of a cut's best list schedule, of a few, and what orders equal ones."""
        terms, best = self.terms_of(cut), (math.inf, math.inf)
        for task in map(terms.task, terms.placements):
            for style in islice(styles(task, Random(0)), _STYLES):
                budget.spend(task.actions * SCHEDULED)
                run = scheduled(task, style)
                if run is not None:
                    best = min(best, run.rank)
        return best
