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
from collections.abc import Collection, Iterable, Iterator, Sequence

import attrs
import numpy as np

from schedir.display import rounded
from schedir.graph.compile import Graph, graph_of
from schedir.graph.paths import last_before
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
from schedir.passes.communication import inserted, past
from schedir.passes.steps import insert_reductions

_GATHER, _RELEASE = (KIND_INDEX[kind] for (kind,) in (GATHERS, RELEASES))


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
    new = [
        action
        for rank, entries in enumerate(_entries(graph, wanted))
        for action in _listed(rank, entries, sizes, most, ahead)
    ]
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


@attrs.frozen
class _Entry:
    """An entry of compute, and the sharded stages whose weights it uses, or updates.

    `begin` is the place before the receives that directly precede it, which would hold a gathering
    up; `end` the place after the sends that directly follow it, which somebody may wait for.
    """

    begin: int
    end: int
    used: list[int]
    stepped: list[int]


def _entries(graph: Graph, wanted: Collection[int]) -> list[list[_Entry]]:
    """The entries of compute of every rank."""
    columns = graph.columns
    sharded = np.isin(columns.stage, [*wanted])
    reads, steps = ((sharded & columns.is_kind(*of)).tolist() for of in (READS_WEIGHTS, STEPS))
    before = last_before(columns, frozenset(Kind) - RECEIVES)
    begin = np.where(before < 0, columns.starts[columns.rank], columns.last[before] + 1)
    end = past(columns, SENDS)
    stage, rank = columns.stage.tolist(), columns.rank.tolist()
    found: list[list[_Entry]] = [[] for _ in range(columns.ranks)]
    for head in columns.heads[columns.is_kind(*COMPUTE)[columns.heads]].tolist():
        parts = range(head, int(columns.last[head]) + 1)
        used, stepped = ([stage[part] for part in parts if which[part]] for which in (reads, steps))
        found[rank[head]].append(_Entry(int(begin[head]), int(end[head]), used, stepped))
    return found


def _listed(
    rank: int, entries: list[_Entry], sizes: Sequence[float], limit: float, ahead: int
) -> Iterator[tuple[int, ...]]:
    """What is gathered and given up on a rank: for each new action the place that it stands before,
    the rank, the index of its kind and its stage."""
    then: dict[tuple[int, int], float] = {}  # after a use: the next one before an update
    following: dict[int, float] = {}
    for number, entry in reversed([*enumerate(entries)]):
        then |= {(number, stage): following.get(stage, math.inf) for stage in entry.used}
        following |= dict.fromkeys(entry.used, number) | dict.fromkeys(entry.stepped, math.inf)
    # The stages that are gathered: the place after the last use so far, and the next use.
    held: dict[int, tuple[int, float]] = {}

    def released(stages: Iterable[int]) -> Iterator[tuple[int, ...]]:
        yield from [(held.pop(stage)[0], rank, _RELEASE, stage) for stage in stages]

    for number, entry in enumerate(entries):
        met: set[int] = set()
        for use, coming in enumerate(entries[number : number + ahead + 1], number):
            for stage in coming.used:
                if stage in held or stage in met:
                    continue
                # Room is made by the stages that are used last, after this one.
                spare = [other for other in held if held[other][1] > use]
                spare.sort(key=lambda other: -held[other][1])
                for many in range(len(spare) + 1):
                    if sum(sizes[kept] for kept in {*held, stage} - {*spare[:many]}) <= limit:
                        yield from released(spare[:many])
                        yield entry.begin, rank, _GATHER, stage
                        held[stage] = entry.begin, use
                        break
                else:
                    if use > number:
                        continue
                    used = sorted({*entry.used})
                    least = rounded(sum(sizes[stage] for stage in used))
                    raise ValueError(
                        f"rank {rank} needs the weights of stages {used} at once, {least} bytes, "
                        f"but the limit is {rounded(limit)}: allow {least}, or cut the model into "
                        "more stages"
                    )
            met.update(coming.used, coming.stepped)
        held |= {stage: (entry.end, then[number, stage]) for stage in entry.used}
        yield from released([stage for stage in held if held[stage][1] == math.inf])
