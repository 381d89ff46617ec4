"""Zero bubble for given costs and memory (Qi et al., arXiv 2401.10241, section 3.1)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import inf
from typing import TYPE_CHECKING

from schedir import (
    Action,
    Pipeline,
    backward_input,
    backward_weight,
    forward,
    optim_step,
    schedule,
)

if TYPE_CHECKING:
    from schedir import CostModel


@schedule("zb")
def zb(
    pipe: Pipeline,
    rank: int,
    *,
    max_activations: int | None = None,
    held_until: str | None = None,
    costs: CostModel,
) -> Iterator[Action]:
    """A heuristic places each F, I and W for the given costs, within a memory limit.

    8 microbatches on 4 ranks, I the gradient of the input and W that of the weights:

        rank 0  F0 F1 F2 F3 F4 F5 F6 I0 F7 W0 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 I6 W6 I7 W7*
        rank 1     F0 F1 F2 F3 F4 I0 F5 I1 F6 I2 F7 I3 W0 I4 W1 I5 W2 I6 W3 I7 W4 W5 W6 W7*
        rank 2        F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 F6 I4 F7 I5 W0 I6 W1 I7 W2 W3 W4 W5 W6 W7*
        rank 3           F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 F6 I6 F7 I7 W0 W1 W2 W3 W4 W5 W6 W7*

    Before its first I, a rank runs as many forwards as it has time and memory for. Then it runs
    forwards and I in turn, and a W when it would wait or its memory is full. Of several such lists
    `zb` takes the one whose longest span is the shortest: steps without a flush follow each other
    at that distance.

    `max_activations` limits the activations that a rank holds, by default to 2 * ranks. An
    activation counts in full until its I. Between its I and its W it counts by the costs'
    `deferred_bytes`, or as half if the costs have no bytes. With `held_until=W` it counts in full
    until its W, with `held_until=I` only until its I.

    Bubble: (P - 1) / (3 * M + P - 1) if M >= P
    Bubble of the longest span: 0 if M >= 2 * P - 1
    Memory: min(M, 2 * P)
    Choose it if your costs are known and unequal, or your memory lies between that of `zb-1p`
    and `zb-2p`. It is a heuristic: these formulas hold at equal costs; at others see `schedir
    compare`, and how far `schedir search` gets.
    """
    limit = 2 * pipe.ranks if max_activations is None else max_activations
    return _listed(pipe, rank, limit, held_until, costs)


@schedule("zb-1p")
def zb_1p(pipe: Pipeline, rank: int, *, costs: CostModel) -> Iterator[Action]:
    """`zb` with the memory of 1F1B: `ranks` activations on each rank.

    6 microbatches on 4 ranks, I the gradient of the input and W that of the weights:

        rank 0  F0 F1 F2 F3          I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5*
        rank 1     F0 F1 F2       I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5*
        rank 2        F0 F1    I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5*
        rank 3           F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5*

    Bubble: (P - 1) / (3 * M + P - 1) if M >= P
    Memory: min(M, P)
    Choose it over `zb-h1` if F, I and W take unequally long. It is a heuristic, and the
    formulas hold at equal costs.
    """
    return _listed(pipe, rank, pipe.ranks, None, costs)


@schedule("zb-2p")
def zb_2p(pipe: Pipeline, rank: int, *, costs: CostModel) -> Iterator[Action]:
    """`zb` with twice the memory of 1F1B: 2 * `ranks` activations on each rank.

    6 microbatches on 4 ranks, I the gradient of the input and W that of the weights:

        rank 0  F0 F1 F2 F3 F4 F5    I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5*
        rank 1     F0 F1 F2 F3 F4 I0 F5 I1 W0 I2 W1 I3 W2 I4 W3 I5 W4 W5*
        rank 2        F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 W0 I4 W1 I5 W2 W3 W4 W5*
        rank 3           F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 W0 W1 W2 W3 W4 W5*

    Bubble: (P - 1) / (3 * M + P - 1) if M >= P
    Bubble of the longest span: 0 if M >= 2 * P - 1
    Memory: min(M, 2 * P)
    Choose it over `zb-h2` if F, I and W take unequally long. It is a heuristic, and the
    formulas hold at equal costs.
    """
    return _listed(pipe, rank, 2 * pipe.ranks, None, costs)


def _listed(
    pipe: Pipeline, rank: int, limit: int, held_until: str | None, costs: CostModel
) -> Iterator[Action]:
    (stage,) = pipe.stages_of(rank)
    if type(limit) is not int or limit < 1:
        raise ValueError(f"max_activations must be an int >= 1, not {limit!r}")
    if held_until not in (None, "I", "W"):
        raise ValueError(f"held_until must be 'I' or 'W', not {held_until!r}")
    yield from _lists(pipe, costs, limit, held_until)[rank]
    yield optim_step(stage)


@lru_cache(maxsize=4)
def _lists(
    pipe: Pipeline, costs: CostModel, limit: int, held_until: str | None
) -> tuple[tuple[Action, ...], ...]:
    """The lists of all ranks without updates, made once, for the first rank that asks."""
    shares = _shares(costs, pipe.stages, held_until)
    in_full = (1.0,) * pipe.stages  # holds less, and may be no slower
    drafts = [
        _Draft(pipe, costs, limit, counted, forwards)
        for counted in dict.fromkeys((shares, in_full))
        for forwards in dict.fromkeys(_warm_ups(pipe, costs, limit))
    ]
    return tuple(map(tuple, min(drafts, key=lambda draft: draft.worth).lists))


def _shares(costs: CostModel, stages: int, held_until: str | None) -> tuple[float, ...]:
    """The part of an activation that each stage holds between its I and its W."""
    if held_until is not None:
        return (float(held_until == "W"),) * stages
    names = "deferred_bytes", "activation_bytes"
    both = zip(*(costs.by_stage(name, stages) for name in names), strict=True)
    return tuple(part / whole if whole else 0.5 for part, whole in both)


def _warm_ups(pipe: Pipeline, costs: CostModel, limit: int) -> Iterator[tuple[int, ...]]:
    """How many forwards each rank may run before its first I, to be tried.

    As many as in ZB-H1, as in ZB-H2, as are done before the first gradient arrives, and one
    more.
    """
    ranks, most = range(pipe.ranks), min(limit, pipe.microbatches)
    yield tuple(min(most, pipe.ranks - rank) for rank in ranks)
    yield tuple(min(most, 2 * (pipe.ranks - rank) - 1) for rank in ranks)
    times = costs.by_stage("forward", pipe.ranks)
    back = costs.by_stage("backward_input", pipe.ranks)
    first = [times[0]]  # when the first forward is done
    for rank in ranks[1:]:
        first.append(first[-1] + sum(_link(pipe, costs, rank - 1, rank)) + times[rank])
    for beyond in (False, True):
        forwards = [1] * pipe.ranks
        gradient = first[-1] + back[-1]
        for rank in reversed(ranks[:-1]):
            gradient += sum(_link(pipe, costs, rank + 1, rank))
            clock = first[rank]
            while forwards[rank] < most and clock + (0 if beyond else times[rank]) <= gradient:
                forwards[rank] += 1
                clock += times[rank]
            gradient = max(clock, gradient) + back[rank]
        for rank in ranks[1:]:  # as many as the rank before has ready by then
            before = forwards[rank - 1]
            forwards[rank] = max(1, min(forwards[rank], before - (before < pipe.microbatches)))
        yield tuple(forwards)


def _link(pipe: Pipeline, costs: CostModel, rank: int, to: int) -> tuple[float, float]:
    """How long a transfer occupies the channel, and how much later it arrives."""
    size = costs.by_stage("boundary_bytes", pipe.ranks - 1)[min(rank, to)]
    return costs.way(rank, to, size)[1], costs.way(rank, to, 0)[0]


FORWARD, INPUT, WEIGHT = range(3)
_MAKE = forward, backward_input, backward_weight


class _Draft:
    """Lists of all ranks as they grow, and their clocks."""

    def __init__(
        self,
        pipe: Pipeline,
        costs: CostModel,
        limit: int,
        shares: tuple[float, ...],
        forwards: tuple[int, ...],
    ) -> None:
        self.limit, self.microbatches = limit, pipe.microbatches
        self.ranks = ranks = range(pipe.ranks)
        names = "forward", "backward_input", "backward_weight"
        of_kinds = [costs.by_stage(name, pipe.ranks) for name in names]
        self.times = [list(of_rank) for of_rank in zip(*of_kinds, strict=True)]
        self.change = [(1.0, share - 1, -share) for share in shares]  # in what a rank holds
        self.lists: list[list[Action]] = [[] for _ in ranks]
        self.done = [[0, 0, 0] for _ in ranks]
        self.held, self.clock = [0.0] * pipe.ranks, [0.0] * pipe.ranks
        self.span = [pipe.microbatches * sum(times) for times in self.times]  # with the idle so far
        self.longest = max(self.span)
        self.peak = 0
        # By kind and rank: how long an output occupies its channel, and how much later it arrives;
        # when the channel is free again; when inputs arrive.
        self.links = [
            [
                _link(pipe, costs, rank, rank + to) if rank + to in ranks else (0.0, 0.0)
                for rank in ranks
            ]
            for to in (1, -1)
        ]
        self.free = [[0.0] * pipe.ranks for _ in (FORWARD, INPUT)]
        self.arrivals: list[list[list[float]]] = [[[] for _ in ranks] for _ in (FORWARD, INPUT)]
        self.run(forwards)

    @property
    def worth(self) -> tuple[float, float, int]:
        """The sort key: longest span, makespan, most activations that wait for a W."""
        return max(self.span), max(self.clock), self.peak

    def run(self, forwards: tuple[int, ...]) -> None:
        """Place the first forwards of each rank, then I and F in turn, and Ws between."""
        for rank in self.ranks:
            for _ in range(forwards[rank]):
                self.add(rank, FORWARD)
        for microbatch in range(self.microbatches):
            for rank in self.ranks:
                if microbatch and self.done[rank][FORWARD] < self.microbatches:
                    self.fill(rank, FORWARD)
                    self.add(rank, FORWARD)
            for rank in reversed(self.ranks):
                self.fill(rank, INPUT)
                self.add(rank, INPUT)
        for rank in self.ranks:
            while self.deferred(rank):
                self.add(rank, WEIGHT)

    def fill(self, rank: int, kind: int) -> None:
        """Run Ws when memory is full and while the rank would wait, even one that takes longer than
        the wait if waiting would make its span the longest."""
        ready = self.ready(rank, kind)
        if rank == 0 and self.done[rank][FORWARD] == self.microbatches:
            ready = inf  # nobody waits for its Is
        while self.deferred(rank):
            wait = ready - self.clock[rank]
            full = self.held[rank] + self.change[rank][kind] > self.limit + 1e-6
            fits = self.times[rank][WEIGHT] <= wait
            if not (full or fits or wait > max(0, self.longest - self.span[rank])):
                break
            self.add(rank, WEIGHT)

    def deferred(self, rank: int) -> bool:
        """True if a W could run."""
        return self.done[rank][WEIGHT] < self.done[rank][INPUT]

    def ready(self, rank: int, kind: int) -> float:
        """When the next action of a kind has its input."""
        arrivals = self.arrivals[kind][rank] if kind != WEIGHT else []
        return arrivals[self.done[rank][kind]] if arrivals else 0.0

    def add(self, rank: int, kind: int) -> None:
        """Run the next action of a kind, and send its result."""
        waited = max(0.0, self.ready(rank, kind) - self.clock[rank])
        self.clock[rank] += waited
        if self.lists[rank]:
            self.span[rank] += waited
            self.longest = max(self.longest, self.span[rank])
        self.clock[rank] += self.times[rank][kind]
        self.lists[rank].append(_MAKE[kind](rank, self.done[rank][kind]))
        self.done[rank][kind] += 1
        self.held[rank] += self.change[rank][kind]
        self.peak = max(self.peak, self.done[rank][FORWARD] - self.done[rank][WEIGHT])
        to = rank + 1 - 2 * kind
        if kind != WEIGHT and to in self.ranks:
            occupied, latency = self.links[kind][rank]
            self.free[kind][rank] = max(self.clock[rank], self.free[kind][rank]) + occupied
            self.arrivals[kind][to].append(self.free[kind][rank] + latency)
