"""S301: deadlock, decided in one linear pass.

Merge each send with its receive (and the k-th REDUCE_GRADs of a stage) into one node, add what a
channel model keeps of the lists' order as edges: the schedule deadlocks exactly if there is a
cycle. One pass decides for every interleaving, because each channel has one writer and one reader
and control flow is fixed (Kahn networks; Siegel & Avrunin 2003; Liao et al., arXiv 0709.3693).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import attrs

from schedir.check import rules
from schedir.check.channels import CHANNELS, queue_of
from schedir.check.communication import communication
from schedir.check.diagnostics import Diagnostic, locate
from schedir.check.ordering import ordering
from schedir.ir import (
    COMPUTE,
    RECEIVES,
    Action,
    Dataflow,
    Kind,
    Position,
    Schedule,
    trace,
    transfer_of,
)

QUEUED = "queued behind"
AFTER = "comes after"
NEEDS = "needs"
MEETS = "waits for"


_Edge: TypeAlias = tuple[int, int, str]
"""The fields of a _Wait, bare: there are several for each action."""


class _Wait(NamedTuple):
    """`later` can't happen before `earlier` has; both are places in the flattened lists."""

    later: int
    earlier: int
    why: str


@attrs.frozen
class _Program:
    """The lists laid end to end, and the node that each place belongs to.

    `makers` is where each compute action of a compute-only schedule stands, empty for others.
    """

    schedule: Schedule
    dataflow: Dataflow
    starts: list[int]
    nodes: list[int]
    makers: dict[tuple[Kind, int, int | None], int]

    def position(self, place: int) -> Position:
        """The rank and index of a place."""
        rank = bisect_right(self.starts, place) - 1
        return rank, place - self.starts[rank]

    def show(self, place: int) -> str:
        """A place as the lines of a wait cycle name it."""
        return str(locate(self.schedule, *self.position(place)))


def clean_channels(schedule: Schedule) -> tuple[str, ...]:
    """The channel models under which the schedule runs to its end, strictest first.

    Expects matched communication.
    """
    program = _program(schedule)
    for strictest, channel in enumerate(CHANNELS):
        if not _stuck(program, list(_waits(program, channel))):
            return CHANNELS[strictest:]  # each enforces a part of the one before
    return ()


def deadlock(schedule: Schedule, channel: str, clean: tuple[str, ...]) -> Iterator[Diagnostic]:
    """The shortest wait cycle under `channel`, if there is one; `clean` are the models without.

    A compute-only schedule is judged by its compute alone: its cycle exists under every model.
    """
    program = _program(schedule)
    waits = list(_waits(program, channel))
    stuck = _stuck(program, waits)
    if not stuck:
        return
    cycle = _shortest_cycle(program, waits, stuck)
    rows = _rows(program, cycle)
    positions = [program.position(place) for place, _, _ in rows]
    ranks = sorted({rank for rank, _ in positions})
    if len(ranks) == 1:
        who = f"rank {ranks[0]} waits on itself"
    else:
        who = f"ranks {_listed(ranks)} wait on {'each other' if len(ranks) == 2 else 'one another'}"
    if not schedule.is_complete:
        note = "under every channel model"
    elif clean:
        note = f"under --channel {channel}; clean under {_listed(clean)}"
    else:
        note = f"under --channel {channel}, and under every other"
    yield rules.WAIT_CYCLE.found(
        f"deadlock: {who}",
        *(locate(schedule, *position) for position in positions),
        notes=(note,),
        help=_mend(program, channel, cycle),
        trace=tuple((program.show(a), why, program.show(b)) for a, why, b in rows),
    )


def _listed(items: Sequence[object]) -> str:
    *most, last = map(str, items)
    return f"{', '.join(most)} and {last}" if most else last


def _program(schedule: Schedule) -> _Program:
    starts = [0]
    for actions in schedule.actions:
        starts.append(starts[-1] + len(actions))
    nodes = list(range(starts.pop()))
    first_end: dict[Hashable, int] = {}
    turns: dict[tuple[int, int], int] = {}
    for rank, actions in enumerate(schedule.actions):
        for index, action in enumerate(actions):
            key: Hashable
            if action.kind in COMPUTE:
                continue
            if action.kind is Kind.REDUCE_GRAD:
                turn = turns[rank, action.stage] = turns.get((rank, action.stage), 0) + 1
                key = (action.stage, turn)
            else:
                key = transfer_of(action)
            place = starts[rank] + index
            nodes[place] = first_end.setdefault(key, place)
    makers = {}
    if not schedule.is_complete:
        makers = {
            (action.kind, action.stage, action.microbatch): start + index
            for start, actions in zip(starts, schedule.actions, strict=True)
            for index, action in enumerate(actions)
        }
    return _Program(schedule, trace(schedule), starts, nodes, makers)


def _waits(program: _Program, channel: str) -> Iterator[_Edge]:
    """Every reason for which one place waits for another, but for the meeting of two ends."""
    dataflow = program.dataflow
    complete = program.schedule.is_complete
    for rank, actions in enumerate(program.schedule.actions):
        start = program.starts[rank]
        compute = -1  # the last compute so far
        queues: dict[Hashable, int] = {}
        receives: dict[Action, int] = {}
        reduces: dict[int, int] = {}
        for index, action in enumerate(actions):
            place = start + index
            kind = action.kind
            if channel == "host" and index:
                # The whole list is one queue, which says all that compute's order could.
                computes = kind in COMPUTE or actions[index - 1].kind in COMPUTE
                yield place, place - 1, AFTER if computes else QUEUED
            if kind in COMPUTE:
                if channel != "host":
                    if compute >= 0:
                        yield place, compute, AFTER
                    compute = place
                    if kind is Kind.OPTIM_STEP and action.stage in reduces:
                        yield place, reduces[action.stage], NEEDS
                    need = dataflow.needs(action, rank)
                    if need in receives:
                        yield place, receives[need], NEEDS
                if not complete:
                    yield from _direct(program, action, rank, place)
                continue
            if kind in RECEIVES:
                receives[action] = place
            elif kind is Kind.REDUCE_GRAD:
                reduces[action.stage] = place
            if channel == "host":
                continue
            if compute >= 0 and not (channel == "async" and kind in RECEIVES):
                yield place, compute, AFTER
            queue = queue_of(channel, action, rank, dataflow)
            if queue is not None:
                if queue in queues:
                    yield place, queues[queue], QUEUED
                queues[queue] = place


def _direct(program: _Program, action: Action, rank: int, place: int) -> Iterator[_Edge]:
    """In a compute-only schedule: the compute on another rank that makes an action's input."""
    need = program.dataflow.needs(action, rank)
    if need is None:
        return
    if need.kind is Kind.RECV_ACT:
        producers = [(Kind.FORWARD, action.stage - 1)]
    else:
        producers = [(kind, action.stage + 1) for kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)]
    for kind, stage in producers:
        maker = program.makers.get((kind, stage, need.microbatch))
        if maker is not None:
            yield place, maker, NEEDS


def _stuck(program: _Program, waits: list[_Edge]) -> set[int]:
    """The nodes that never happen: those on a cycle, and those that wait for one."""
    nodes = program.nodes
    waiting_for = [0] * len(nodes)
    waiters: list[list[int]] = [[] for _ in nodes]
    for later, earlier, _ in waits:
        waiting_for[nodes[later]] += 1
        waiters[nodes[earlier]].append(nodes[later])
    # A place that was merged into another's node is no node; nothing waits for it.
    left = {node for node in nodes if waiting_for[node]}
    ready = deque(node for node in set(nodes) if not waiting_for[node])
    while ready:
        for waiter in waiters[ready.popleft()]:
            waiting_for[waiter] -= 1
            if not waiting_for[waiter]:
                left.discard(waiter)
                ready.append(waiter)
    return left


# Enough to search every start in any schedule that a person reads; a longer search would be
# quadratic, and the cycle found by then is as good an explanation.
_SEARCH_BUDGET = 1_000_000


def _shortest_cycle(program: _Program, waits: list[_Edge], stuck: set[int]) -> list[_Wait]:
    """A shortest cycle among the stuck nodes, as waits that lead from each node to the next.

    In a huge schedule, the shortest of those that the budget allows to look for.
    """
    nodes = program.nodes
    leads: dict[int, list[_Wait]] = {node: [] for node in stuck}
    for later, earlier, why in waits:
        if nodes[later] in stuck and nodes[earlier] in stuck:
            leads[nodes[later]].append(_Wait(later, earlier, why))
    best: list[_Wait] = []
    budget = _SEARCH_BUDGET
    for start in sorted(stuck):
        if best and budget <= 0:
            break
        # Breadth first from `start` back to itself, no deeper than the best cycle so far.
        came_by: dict[int, _Wait] = {}
        layer = [start]
        depth = 0
        while layer and start not in came_by and not (best and depth + 1 >= len(best)):
            depth += 1
            following = []
            for node in layer:
                for wait in leads[node]:
                    target = nodes[wait.earlier]
                    if target not in came_by:
                        came_by[target] = wait
                        following.append(target)
            budget -= len(following)
            layer = following
        if start in came_by:
            best = [came_by[start]]
            while nodes[best[0].later] != start:
                best.insert(0, came_by[nodes[best[0].later]])
    return best


def _rows(program: _Program, cycle: list[_Wait]) -> list[tuple[int, str, int]]:
    """The cycle with both kinds of edge: within a list, and between the ends of a transfer.

    It starts at the place that comes first in the lists.
    """
    rows = []
    for before, wait in zip([cycle[-1], *cycle], cycle, strict=False):
        if before.earlier != wait.later:
            rows.append((before.earlier, MEETS, wait.later))
        rows.append((wait.later, wait.why, wait.earlier))
    first = min(range(len(rows)), key=lambda row: (rows[row][0], rows[row][1] != MEETS))
    return rows[first:] + rows[:first]


def _mend(program: _Program, channel: str, cycle: list[_Wait]) -> str | None:
    """A single move that mends the schedule, found by trying those that break the cycle."""
    schedule = program.schedule
    # A receive can always be posted earlier as far as data goes, so those are tried first.
    moves = [wait for wait in cycle if wait.why in (QUEUED, AFTER)]
    moves.sort(key=lambda wait: not _is_receive(program, wait.later))
    for wait in moves:
        rank, index = program.position(wait.later)
        _, before = program.position(wait.earlier)
        moved = _move(schedule, rank, index, before)
        matched = not schedule.is_complete or not any(communication(moved))
        if matched and not any(ordering(moved)):
            candidate = _program(moved)
            if not _stuck(candidate, list(_waits(candidate, channel))):
                verb = "move" if schedule.actions[rank][index].kind in COMPUTE else "post"
                return f"{verb} rank {rank} #{index} before rank {rank} #{before}"
    if schedule.is_complete:
        return "no single move mends it; leave the communication out, and schedir inserts it"
    return None


def _is_receive(program: _Program, place: int) -> bool:
    rank, index = program.position(place)
    return program.schedule.actions[rank][index].kind in RECEIVES


def _move(schedule: Schedule, rank: int, index: int, before: int) -> Schedule:
    """The schedule with one action moved ahead in its list."""
    actions = list(schedule.actions[rank])
    actions.insert(before, actions.pop(index))
    lists = (*schedule.actions[:rank], tuple(actions), *schedule.actions[rank + 1 :])
    return attrs.evolve(schedule, actions=lists, sources=())
