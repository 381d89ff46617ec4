"""Gather the weights of sharded stages before they are used, and give them up after.

    0F0 4F0 0B0 4B0 0OPTIM_STEP 4OPTIM_STEP

    one stage at a time   0UNSHARD 0F0 0RESHARD 4UNSHARD 4F0 4RESHARD 0UNSHARD 0B0 0RESHARD …
    both fit              0UNSHARD 4UNSHARD 0F0 4F0 0B0 0RESHARD 0REDUCE_GRAD 4B0 4RESHARD …

A stage stays gathered from its first use to its last before its update. If that is too much memory,
the stage goes whose next use is furthest away (Belady 1966). A gathering is listed ahead of its
first use, so that it runs beside the compute before (FSDP, arXiv 2304.11277, section 3.3).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from typing import TypeAlias

import numpy as np
from attrs import define, field, frozen

from schedir.display import rounded
from schedir.graph.compile import Graph, graph_of
from schedir.ir import (
    COMPUTE,
    GATHERS,
    KIND_INDEX,
    READS_WEIGHTS,
    RECEIVES,
    RELEASES,
    SENDS,
    STEPS,
    Kind,
    Schedule,
    expect_schedule,
    is_number,
)
from schedir.ir.schedule import expect_stages
from schedir.passes.communication import inserted
from schedir.passes.steps import insert_reductions

(_GATHER,), (_RELEASE,) = GATHERS, RELEASES


def shard(
    schedule: Schedule,
    stages: Collection[int] | None = None,
    *,
    ahead: int = 1,
    limit: float | None = None,
    weight_bytes: float | Sequence[float] = 1,
) -> Schedule:
    """List an UNSHARD before the first use of each of these stages' weights, and a RESHARD after
    the last use before an OPTIM_STEP; by default of all stages.

    Each UNSHARD stands `ahead` compute entries before the use. `limit` is the most bytes of
    gathered weights that a rank holds at once, where a stage has `weight_bytes`: one number, or one
    for each stage; by default the limit counts stages. Within the limit a stage stays gathered.
    Otherwise the stage whose next use is furthest away is given up until then. A REDUCE_GRAD is
    listed for every OPTIM_STEP that lacks one. A stage that already has an UNSHARD stays unchanged.

    Raises TypeError for anything that is not a Schedule or not a collection of stages. Raises
    ValueError for an unknown stage, a negative `ahead`, other sizes, a limit that a single entry
    exceeds, a stage on several ranks, and a stage whose backwards use older weights than the
    newest: of these a rank has only its shard.

    >>> import schedir
    >>> schedule = schedir.Schedule.of("mine", [0], ["0F0 0F1 0B0 0B1 0OPTIM_STEP"])
    >>> print(*schedir.shard(schedule).actions[0])
    0UNSHARD 0F0 0F1 0B0 0B1 0RESHARD 0REDUCE_GRAD 0OPTIM_STEP
    """
    expect_schedule(schedule)
    stages = range(schedule.stages) if stages is None else stages
    expect_stages(schedule, stages, "shard")
    if not is_number(ahead):
        raise ValueError(f"ahead must be a number of entries of at least 0, not {ahead!r}")
    sizes = _sizes(weight_bytes, schedule.stages)
    graph = graph_of(schedule)
    wanted = {stage for stage in stages if not graph.sharded[stage]}
    if not wanted:
        return schedule
    for stage in sorted(wanted):
        if len(schedule.placement[stage]) > 1:
            holders = " and ".join(map(str, schedule.placement[stage]))
            raise ValueError(
                f"stage {stage} of {schedule.name} can't be sharded: ranks {holders} run it, and "
                "would gather its weights at different times; leave it out of stages=, or take a "
                "schedule that has each stage on one rank"
            )
    _expect_newest(graph, wanted)
    schedule = insert_reductions(schedule, wanted)
    graph = graph_of(schedule)
    most = math.inf if limit is None else limit
    new = []
    for rank in range(schedule.ranks):
        walk = _Rank(rank, _entries(graph, rank, wanted), sizes, most)
        new += [(at, rank, KIND_INDEX[kind], stage) for at, kind, stage in walk.listed(ahead)]
    before, ranks, kinds, numbers = np.array(new, np.int64).reshape(-1, 4).T
    return inserted(schedule, kinds, numbers, ranks, before)


def _sizes(weight_bytes: float | Sequence[float], stages: int) -> list[float]:
    sizes = [*weight_bytes] if isinstance(weight_bytes, Sequence) else [weight_bytes] * stages
    if len(sizes) != stages or not all(
        isinstance(size, int | float) and not isinstance(size, bool) and 0 <= size < math.inf
        for size in sizes
    ):
        raise ValueError(
            f"weight_bytes must be one number of bytes, or one for each of {stages} stages, not "
            f"{weight_bytes!r}"
        )
    return sizes


def _expect_newest(graph: Graph, stages: Collection[int]) -> None:
    """Raise ValueError if an action of these stages uses weights that are not the newest."""
    columns = graph.columns
    places = columns.where(*READS_WEIGHTS)
    places = places[np.isin(columns.stage[places], [*stages])]
    pair = columns.stage[places], columns.microbatch[places]
    old = places[(graph.reads[pair] != graph.turn[places]) | (columns.version[places] >= 0)]
    if len(old):
        rank, index = columns.position(int(old[0]))
        action = columns.action(int(old[0]))
        raise ValueError(
            f"stage {action.stage} of {graph.schedule.name} can't be sharded: rank {rank} #{index} "
            f"{action} names a weight version, or uses one that an OPTIM_STEP has replaced, but "
            "only the newest weights of a sharded stage can be gathered"
        )


@frozen
class _Entry:
    """An entry of compute, and the sharded stages whose weights it uses, or updates.

    `begin` is the place before the receives that directly precede it, which would hold a gathering
    up; `end` the place after the sends that directly follow it, which somebody may wait for.
    """

    begin: int
    end: int
    used: tuple[int, ...]
    stepped: tuple[int, ...]


def _entries(graph: Graph, rank: int, wanted: Collection[int]) -> list[_Entry]:
    columns, (start, stop) = graph.columns, graph.columns.starts[rank : rank + 2].tolist()
    if start == stop:
        return []
    stage, reads, steps, computes, sends, receives = (
        each[start:stop]
        for each in (
            columns.stage,
            *(columns.is_kind(*k) for k in (READS_WEIGHTS, STEPS, COMPUTE, SENDS, RECEIVES)),
        )
    )
    heads = np.flatnonzero(~columns.joined[start:stop])
    bounds = [*heads.tolist(), stop - start]
    sent, received, computed = (
        np.logical_and.reduceat(each, heads) for each in (sends, receives, computes)
    )
    found = []
    for number in np.flatnonzero(computed).tolist():
        first, after = number, number + 1
        while first and received[first - 1]:
            first -= 1
        while after < len(heads) and sent[after]:
            after += 1
        parts = range(bounds[number], bounds[number + 1])
        used, stepped = (
            tuple(int(stage[part]) for part in parts if which[part] and stage[part] in wanted)
            for which in (reads, steps)
        )
        found.append(_Entry(start + bounds[first], start + bounds[after], used, stepped))
    return found


_New: TypeAlias = tuple[int, Kind, int]
"""A new action: the place that it stands before, its kind and its stage."""


@define
class _Rank:
    """The walk through a rank's compute that lists what is gathered and given up.

    `held` has the stages that are gathered, each with the place after its last use so far.
    """

    rank: int
    entries: list[_Entry]
    sizes: Sequence[float]
    limit: float
    uses: dict[int, list[int]] = field(factory=dict)
    steps: dict[int, list[int]] = field(factory=dict)
    held: dict[int, int] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        for number, entry in enumerate(self.entries):
            for stage in entry.used:
                self.uses.setdefault(stage, []).append(number)
            for stage in entry.stepped:
                self.steps.setdefault(stage, []).append(number)

    def next_use(self, stage: int, number: int) -> float:
        """The next entry, from this number on, that uses the weights before they are updated."""
        use, step = (_next(of.get(stage, []), number) for of in (self.uses, self.steps))
        return use if use < step else math.inf

    def listed(self, ahead: int) -> Iterator[_New]:
        """The new actions."""
        for number, entry in enumerate(self.entries):
            for use in range(number, min(number + ahead + 1, len(self.entries))):
                for stage in self.entries[use].used:
                    if stage not in self.held and self.next_use(stage, number) == use:
                        yield from self._made_room_and_gathered(stage, number, use)
            self.held |= dict.fromkeys(entry.used, entry.end)
            for stage in [*self.held]:
                if self.next_use(stage, number + 1) == math.inf:
                    yield self._released(stage)
        yield from [self._released(stage) for stage in [*self.held]]

    def _made_room_and_gathered(self, stage: int, number: int, use: int) -> Iterator[_New]:
        """Gather a stage before an entry, for its use at this or a later one. What is used last,
        and after that, makes room for it."""
        spare = {other: self.next_use(other, number) for other in self.held}
        spare = {other: needed for other, needed in spare.items() if needed > use}
        out: list[int] = []
        while sum(self.sizes[s] for s in {*self.held, stage} - {*out}) > self.limit:
            if not spare:
                if use == number:
                    self._expect_room({*self.entries[number].used})
                return  # there is room later, or somebody makes it
            out.append(max(spare, key=lambda other: spare[other]))
            del spare[out[-1]]
        yield from map(self._released, out)
        yield self._gathered(stage, self.entries[number].begin)

    def _gathered(self, stage: int, place: int) -> _New:
        self.held[stage] = place
        return place, _GATHER, stage

    def _released(self, stage: int) -> _New:
        return self.held.pop(stage), _RELEASE, stage

    def _expect_room(self, needed: set[int]) -> None:
        """Raise ValueError if what is needed at once is more than the limit."""
        many = sum(self.sizes[stage] for stage in needed)
        if many > self.limit:
            raise ValueError(
                f"rank {self.rank} needs the weights of stages {sorted(needed)} at once, "
                f"{rounded(many)} bytes, but the limit is {rounded(self.limit)}: allow "
                f"{rounded(many)}, or cut the model into more stages"
            )


def _next(numbers: list[int], number: int) -> float:
    at = bisect_left(numbers, number)
    return numbers[at] if at < len(numbers) else math.inf
