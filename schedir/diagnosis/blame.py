"""Name the root of a hang from the dumps of torch's flight recorder.

Each rank's first unfinished operation waits for the ranks that have not come to it: members of the
group, or the peer, that have not posted it, or that are held by an earlier operation of their own.
The roots are the sinks of that graph.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Set
from functools import cache, partial
from itertools import islice
from operator import attrgetter, itemgetter
from typing import TypeAlias

from attrs import frozen

from schedir.diagnosis import Diagnosis, Root, Stand, chain, in_words, sinks, waiting_for
from schedir.diagnosis.flight_recorder import Dumps
from schedir.diagnosis.operations import Group, Job, Operation, Transfer, job_of
from schedir.diagnosis.schedule_actions import action_at
from schedir.ir import Schedule

MISSING = "missing"
STUCK = "stuck"
NO_DUMP = "no dump"
DIFFERS = "differs"
CIRCLE = "circle"
REASONS = {
    MISSING: "it never posted what others wait for",
    STUCK: "it does not finish an operation that all others have come to",
    NO_DUMP: "it left no readable dump, and others wait for it",
    DIFFERS: "it posted another operation than its group did",
    CIRCLE: "it waits for ranks that wait for it",
}
"""What is said of a root, by its cause."""


def blame(dumps: Dumps, schedule: Schedule | None = None) -> Diagnosis:
    """The roots of the hang that the dumps of a job show, if they show one. Of the complete
    `schedule` that the job ran, if that is given, the actions are named."""
    job = job_of(dumps.of)
    fronts, passed = _fronts(job)
    meet = cache(partial(_meeting, job, fronts))
    graph = _connected(fronts, meet)
    reasons, is_sure = _reasons(job, graph, passed)
    waits_for = {
        rank: frozenset(graph.edges[rank]) for rank in sorted(fronts) if graph.edges.get(rank)
    }
    operations = passed | fronts
    for rank, waiting in waiting_for(waits_for).items():
        operations.setdefault(
            rank, min((fronts[each] for each in waiting), key=attrgetter("created"))
        )
    roots, stands = [], {}
    for rank in sorted(reasons.keys() | waits_for.keys()):
        operation, reason = operations.get(rank), reasons.get(rank, "")
        at = None
        if schedule is not None:
            at = action_at(job, schedule, rank, operation, reason == MISSING)
        index, action = at or (None, None)
        root = Root(rank, None, index, action, reason)
        words = f"waits at {root.place and f'{root.place}, '}{operation}, for "
        stands[rank] = Stand(words + in_words(waits_for.get(rank, ())), root.place, operation)
        if reason:
            roots.append(root)
    return Diagnosis(
        tuple(roots),
        chain(graph.edges, reasons),
        waits_for,
        is_sure and all(job.dumps[each].shows_ends for each in reasons.keys() & job.dumps.keys()),
        stands,
        len(job.ranks),
        tuple(sorted(_by_rules(job, meet))),
        tuple(rank for rank in job.ranks if rank not in job.dumps),
        dumps.unreadable,
    )


def _fronts(job: Job) -> tuple[dict[int, Operation], dict[int, Operation]]:
    """The operation that each rank waits in: its first unfinished one, but for transfers that the
    peers are past; and the last one of those that were passed over although the rank's own dump
    says that they go on."""
    left = {
        rank: deque(each for each in of if not each.is_finished)
        for rank, of in job.operations.items()
    }
    behind = {each for of in left.values() for each in islice(of, 1, None)}
    passed: dict[int, Operation] = {}

    def is_met(operation: Operation, transfer: Transfer) -> bool:
        match = transfer.match
        if match is None:
            return transfer.is_past
        # Two ends of a batch, both reached: as torch never notes its end, it is taken to have
        # ended, and the ranks to wait in what they posted later.
        return match.is_finished or not (operation.is_sure or match.is_sure or match in behind)

    def is_over(operation: Operation) -> bool:
        of = operation.transfers
        return bool(of) and all(is_met(operation, each) for each in of)

    while over := [of for of in left.values() if of and is_over(of[0])]:
        for of in over:
            last = of.popleft()
            if last.is_sure:
                passed[last.rank] = last
            behind.difference_update(islice(of, 1))
    return {rank: of[0] for rank, of in left.items() if of}, passed


# How far a rank is with a collective: it has not posted it, or left no dump that says so; has
# posted it behind an operation that it waits in; waits in it; is past it; or does not say.
_ABSENT, _HELD, _HERE, _PAST, _UNKNOWN = "absent", "held", "here", "past", "unknown"


@frozen
class _Meeting:
    """How far ranks are with a group's collective of some number.

    `late` are those that wait in it on whose device it has not started, if it may have on others.
    `differing` are those that posted another operation in its place than most did; if none was
    posted by most, those that posted any, and the meeting `is_split`.
    """

    states: Mapping[int, str]
    late: Set[int]
    differing: Set[int]
    is_split: bool

    def where(self, *states: str) -> set[int]:
        """The ranks in one of these states."""
        return {rank for rank, state in self.states.items() if state in states}


_Meet: TypeAlias = Callable[[Group, int], _Meeting]


def _meeting(job: Job, fronts: Mapping[int, Operation], group: Group, sequence: int) -> _Meeting:
    posted = {rank: job.posted.get((group, rank), {}).get(sequence, []) for rank in group.members}

    def state_of(rank: int) -> str:
        left = [each for each in posted[rank] if not each.is_finished]
        if left:
            return _HERE if fronts.get(rank) in left else _HELD
        dump, highest = job.dumps.get(rank), job.highest.get((group, rank))
        if posted[rank] or (highest is not None and highest >= sequence):
            return _PAST
        if dump is None or dump.is_whole or (dump.has_ends and highest is not None):
            return _ABSENT
        last = dump.enqueued.get(group.name)
        if last is None:
            return _ABSENT if dump.names_all else _UNKNOWN
        if group in job.carries:
            return _UNKNOWN
        if last < sequence:
            return _ABSENT
        return _PAST if dump.completed[group.name] >= sequence else _HERE

    states = {rank: state_of(rank) for rank in posted}
    if not group.is_known and not {_ABSENT, _HELD} & {*states.values()}:
        states = dict.fromkeys({*job.ranks} - fronts.keys(), _UNKNOWN) | states
    here = {rank for rank in posted if states[rank] == _HERE}
    # torch notes a start where it takes the times of collectives.
    started = {rank for rank in here if any(each.has_started for each in posted[rank])}
    ways = {
        rank: tuple(sorted((each.name, each.shape) for each in of))
        for rank, of in posted.items()
        if of
    }
    most, many = max(Counter(ways.values()).items(), key=itemgetter(1), default=((), 0))
    is_split = 2 * many <= len(ways)
    return _Meeting(
        states,
        late=here - started if started else set(),
        differing={rank for rank, way in ways.items() if is_split or way != most},
        is_split=is_split,
    )


@frozen
class _Graph:
    """Who waits for whom: `edges[rank]` are those that a rank waits for, at its front if it has
    one. `unknown` are those of which nobody knows whether they wait."""

    fronts: Mapping[int, Operation]
    edges: Mapping[int, Set[int]]
    differing: Set[int]
    unknown: Set[int]


def _connected(fronts: Mapping[int, Operation], meet: _Meet) -> _Graph:
    edges: dict[int, Set[int]] = {}
    differing: dict[int, Set[int]] = {}
    unknown: set[int] = set()
    for rank, operation in fronts.items():
        if operation.transfers:
            edges[rank] = _peers(operation, fronts)
    met = {(each.group, each.sequence) for each in fronts.values() if not each.transfers}
    for group, sequence in sorted(met, key=lambda each: (each[0].name, each[0].members, each[1])):
        meeting = meet(group, sequence)
        here, held, silent = map(meeting.where, (_HERE, _HELD, _UNKNOWN))
        if meeting.is_split:
            awaited = held | meeting.where(_ABSENT)
            differing |= {rank: meeting.differing - {rank} for rank in meeting.differing}
        else:
            awaited = held | meeting.where(_ABSENT) | meeting.differing
            differing |= {rank: frozenset() for rank in meeting.differing - held}
        for rank in here:
            edges[rank] = (awaited or (meeting.late or here) | silent) - {rank}
        if not awaited:
            # They may have gone on long ago, and the root be one of those that are here.
            silent -= fronts.keys()
            edges |= dict.fromkeys(silent, here)
            unknown |= silent
    # What differs goes before what the same ranks wait for elsewhere.
    return _Graph(fronts, edges | differing, differing.keys(), unknown)


def _peers(operation: Operation, fronts: Mapping[int, Operation]) -> set[int]:
    """The peers that have not come to a transfer; if all have, those that are in it too."""
    left = [
        each
        for each in operation.transfers
        if not each.is_past and not (each.match is not None and each.match.is_finished)
    ]
    absent = {e.peer for e in left if e.match is None or fronts.get(e.peer) is not e.match}
    return absent or {each.peer for each in left}


def _reasons(
    job: Job, graph: _Graph, passed: Mapping[int, Operation]
) -> tuple[dict[int, str], bool]:
    """The roots with why they are ones, and whether each of them is one for sure."""
    found: dict[int, str] = {}
    sure = True
    for ranks in sinks(graph.edges):
        sure = sure and len(ranks) == 1
        found |= {rank: _reason(job, graph, ranks, rank) for rank in ranks}
    if NO_DUMP in found.values():
        # It may have waited in its turn, for a rank that is not seen to wait for any.
        others = {*job.ranks} - graph.fronts.keys() - found.keys() - graph.edges.keys()
        sure = sure and not others
        found |= {rank: MISSING if rank in job.dumps else NO_DUMP for rank in others}
    # Where a rank's last operation is a batch, whose end torch does not note, it may wait in it.
    ends = {rank: of[-1] for rank, of in job.operations.items() if of and rank not in graph.fronts}
    for rank in [rank for rank in found or ends if rank in ends]:
        last = ends[rank]
        peers = {each.peer for each in last.transfers if ends.get(each.peer) is each.match}
        if peers and not last.is_sure and not last.is_finished:
            sure = False
            found = dict.fromkeys((rank, *peers), STUCK) | found
    return found or dict.fromkeys(passed, STUCK), sure


def _reason(job: Job, graph: _Graph, ranks: tuple[int, ...], rank: int) -> str:
    """Why a rank is a root, of the `ranks` that wait for each other."""
    fronts = graph.fronts
    if rank in graph.differing:
        return DIFFERS
    if rank not in job.dumps:
        return NO_DUMP
    if rank not in fronts:
        return STUCK if rank in graph.edges.keys() - graph.unknown else MISSING
    front = fronts[rank]
    others = [fronts[each] for each in ranks if each in fronts]
    return STUCK if all(front.is_met_by(other) for other in others) else CIRCLE


def _by_rules(job: Job, meet: _Meet) -> set[int]:
    first: dict[tuple[int, Group], int] = {}
    for rank, operations in job.operations.items():
        for each in operations:
            if not each.is_finished and not each.transfers:
                first.setdefault((rank, each.group), each.sequence)
    found = set()
    for (rank, group), sequence in first.items():
        meeting = meet(group, sequence)
        found |= meeting.where(_ABSENT) & job.dumps.keys()
        if meeting.where(_PAST):
            found.add(rank)
    return found
