"""Go on after the loss of a rank: its peers, which hold its stages too, take its microbatches over.

ReCycle (SOSP 2024, arXiv 2405.14009). Two pipelines of two ranks, and what rank 3 leaves behind:

    rank 0 stage 0  F0 F2 B0 B2          rank 0 stage 0  F0 F2 B0 B2
    rank 1 stage 0  F1 F3 B1 B3          rank 1 stage 0  F1 F3 B1 B3
    rank 2 stage 1  F0 B0 F2 B2          rank 2 stage 1  F0 F1 B0 B1 F2 F3 B2 B3
    rank 3 stage 1  F1 B1 F3 B3          the lists of 2 and 3, merged by when their actions began

Every list is a part of one order of all actions: that of the run before the loss. So no cycle can
exist. But the peers' whole backwards hold up the stages before them. Split in two, the part for the
weights runs in the gaps, at the price of more activations. Of the paper's example (three pipelines
of 4 ranks, 6 microbatches each, F = I = W = 1) this makes, by the lost rank's stage:

    slots                               paper   stage 0   1    2      3
    without a fault                        27
    peers take its microbatches over       36   31-32    33   34-35  36
    with split backwards                   29   27       28   29     30    the least possible
    from one step to the next              27   27       27   27     27    no rank waits for the
                                                                           steps of other stages
"""

from __future__ import annotations

from collections import Counter
from itertools import count

import attrs
import numpy as np

from schedir.errors import LoadError
from schedir.graph.alive import peak_activations
from schedir.graph.board import BACK, DEFERRED, DOWN, QUEUES, WAYS, Board, options, play, steps_of
from schedir.graph.compile import graph_of
from schedir.graph.paths import TEXTBOOK, textbook, waits
from schedir.ir import (
    COMPLETES_GRADIENTS,
    GATHERS,
    RELEASES,
    SUMS,
    VALUES,
    Action,
    Kind,
    Schedule,
    expect_schedule,
    is_number,
    starts_of,
)
from schedir.ir.kinds import STAGE_WIDE
from schedir.passes.communication import insert_communication, strip_communication

_RUN_BY = {
    DOWN: WAYS.index((Kind.FORWARD, False)),
    BACK: WAYS.index((Kind.BACKWARD_INPUT, False)),
    DEFERRED: WAYS.index((Kind.BACKWARD_WEIGHT, False)),
}
"""The way to run what waits in a queue, where all backwards are split."""


def without(schedule: Schedule, rank: int, *, split: bool = False) -> Schedule:
    """The schedule for one rank fewer, after the loss of `rank`: its peers do its work.

    Each (stage, microbatch) that the rank ran goes to the rank with the least to do of those that
    hold the stage. The ranks above `rank` are renumbered, as torchrun numbers those that are left.
    The result trains the same weights, up to the order in which gradients are added. It is
    complete, and clean under every channel model. Transfers that were one batch are single ones.

    By default each action stands where it began before the loss, at the textbook's costs. With
    `split`, every backward becomes a BACKWARD_INPUT and a BACKWARD_WEIGHT, and all ranks are listed
    anew: a BACKWARD_WEIGHT runs where its rank would wait. That is mostly quicker. A rank runs
    no forward of its first stage while it holds twice the activations that any rank held before.

    Raises LoadError if no other rank holds one of the rank's stages, or if a peer updates too late
    to go on with the rank's next microbatch; ValueError for an unknown rank, and with `split` for
    an asynchronous schedule or one that runs forwards again, offloads or is sharded; TypeError for
    anything that is not a Schedule; and everything that `insert_communication` raises.

    >>> import schedir
    >>> schedule = schedir.build("1f1b-rr", ranks=12, microbatches=18, replicas="3,3,3,3")
    >>> fewer = schedir.without(schedule, 7)
    >>> fewer
    <Schedule 1f1b-rr: 11 ranks, 4 stages, 18 microbatches, 382 actions>
    >>> quicker = schedir.without(schedule, 7, split=True)
    >>> [schedir.simulate(each).makespan for each in (schedule, fewer, quicker)]
    [27, 35, 29]
    """
    expect_schedule(schedule)
    if not is_number(rank) or rank >= schedule.ranks:
        raise ValueError(f"{schedule.name} has no rank {rank!r}, only 0..{schedule.ranks - 1}")
    for stage in schedule.stages_of(rank):
        if len(schedule.placement[stage]) == 1:
            raise LoadError(
                f"{schedule.name} can't go on without rank {rank}: no other rank holds stage "
                f"{stage}; build the schedule for {schedule.ranks - 1} ranks"
            )
    before = strip_communication(schedule)
    found = _merged(before, rank)
    if split and before.columns.is_kind(*COMPLETES_GRADIENTS).any():
        most = max(peak for peak, _ in peak_activations(graph_of(before)))
        found = _split(found, 2 * most)
    return insert_communication(found)


def _merged(schedule: Schedule, lost: int) -> Schedule:
    """The lists of the other ranks, with what the lost one ran, by when each action began."""
    graph, columns = graph_of(schedule), schedule.columns
    runs = graph.runs.copy()
    work = Counter(runs.ravel().tolist())
    for stage, microbatch in np.argwhere(runs == lost).tolist():
        peers = (rank for rank in schedule.placement[stage] if rank != lost)
        peer = min(peers, key=lambda rank: (work[rank], rank))
        runs[stage, microbatch] = peer
        work[peer] += 1
    taken = (columns.rank == lost) & (columns.microbatch >= 0)
    rank = np.where(taken, runs[columns.stage, columns.microbatch], columns.rank)
    # The lost rank's sums and updates go with it, and the sums of a stage that one rank holds now,
    # unless stages on one rank are summed as well: over pipelines, or shards.
    sums = columns.is_kind(*SUMS)
    alone, alone_now = (
        np.array([len({*held} - gone) == 1 for held in schedule.placement])[columns.stage]
        for gone in (set(), {lost})
    )
    needless = sums & alone_now & ~(sums & alone).any()
    kept = (rank != lost) & ~needless
    # What takes no time, such as an update, comes before what begins at the same time.
    waiting = waits(schedule, "host")
    node, takes = waiting.node, TEXTBOOK[columns.kind] > 0
    order = np.lexsort((waiting.turn[node], takes, textbook(schedule, "host")[node], rank))
    order = order[kept[order]]
    found = schedule.take(order, starts_of(rank[order], schedule.ranks))
    found = attrs.evolve(
        found,
        placement=[[r - (r > lost) for r in held if r != lost] for held in schedule.placement],
        actions=attrs.evolve(found.columns, starts=np.delete(found.columns.starts, lost)),
        rebuild=None,
    )
    if (graph_of(found).turn != graph.turn[order]).any():
        raise LoadError(
            f"{schedule.name} can't go on without rank {lost}: a rank that holds its stage updates "
            f"later than it did; build the schedule for {schedule.ranks - 1} ranks"
        )
    return found


def _split(schedule: Schedule, most: int) -> Schedule:
    """The lists in which a free rank takes a BACKWARD_INPUT first, then a FORWARD, else a
    BACKWARD_WEIGHT; a BACKWARD_WEIGHT before a FORWARD where it holds `most` activations.

    Microbatches that go the same way from rank to rank are a pipeline of the Board.
    """
    graph, stages = graph_of(schedule), schedule.stages
    known = {*COMPLETES_GRADIENTS, *STAGE_WIDE, Kind.FORWARD, Kind.BACKWARD_INPUT}
    known -= GATHERS | RELEASES
    if schedule.is_asynchronous or not schedule.columns.is_kind(*known).all():
        raise ValueError(
            f"{schedule.name} can't be split: only a schedule with a flush can, before passes that "
            "recompute, offload or shard"
        )
    pipelines: dict[tuple[int, ...], list[int]] = {}
    for microbatch in np.argsort(graph.home[0]).tolist():
        way = tuple(graph.runs[:, microbatch].tolist())
        pipelines.setdefault(way, []).append(microbatch)
    placement = [rank for way in pipelines for rank in way]
    microbatches, number = [*pipelines.values()], len(placement)
    steps = steps_of(
        placement,
        [len(own) for own in microbatches],
        {kind: [kind.meaning.cost] * number for kind, _ in WAYS},
        {value: [(0, 0)] * number for value in QUEUES if VALUES[value].link},
        {"saved": [1] * number, "deferred": [1] * number},
    )
    board = Board.of(steps)

    def choose(rank: int, now: float) -> tuple[float, int]:
        """The step that a rank takes next, and when it can start; -1 for none that it knows of."""
        full = board.held[rank] >= most
        first = (BACK, DEFERRED, DOWN) if full else (BACK, DOWN, DEFERRED)
        found: list[tuple[float, int, float, int]] = []
        for start, value, stage in options(board, rank, now):
            # The microbatch that is furthest finds room on every rank, so that some rank goes on.
            if value == DOWN and full and stage % stages == schedule.stages_of(rank)[0]:
                continue
            # Pipelines take turns, so that all of them are done at the same time.
            turn = board.turns[value * number + stage] / len(microbatches[stage // stages])
            step = _RUN_BY[value] * number + stage
            found.append((start, first.index(value), turn, step))
        start, _, _, step = min(found, default=(-1.0, 0, 0.0, -1))
        return start, step

    order = play(board, choose)
    if order is None:
        raise AssertionError("a microbatch in flight is blocked")
    turns = [count() for _ in steps.queue]
    lists = [[a for a in own if a.kind in STAGE_WIDE] for own in schedule.flat]
    for listed, own in zip(lists, order, strict=False):
        listed[:0] = [
            Action(
                WAYS[step // number][0],
                step % stages,
                microbatches[step % number // stages][next(turns[step])],
            )
            for step in own
        ]
    return attrs.evolve(schedule, actions=lists, sources=None)
