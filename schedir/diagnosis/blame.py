"""Name the root of a hang from the dumps of torch's flight recorder.

Each rank's first unfinished operation waits for the ranks that have not come to it: members of the
group, or the peer, that have not posted it, or that are held by an earlier operation of their own.
The roots are the sinks of that graph.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Set
from functools import cache, partial
from itertools import islice
from operator import attrgetter
from typing import TypeAlias

from schedir.diagnosis import Diagnosis, Root, Stand, chain, in_words, sinks, waiting_for
from schedir.diagnosis.flight_recorder import Dumps, Group, Job, Operation, job_of
from schedir.graph.compile import graph_of
from schedir.ir import COMMUNICATION, SENDS, Action, Schedule, flat

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
    edges, known = _connected(fronts, meet)
    reasons, is_sure = _reasons(job, fronts, passed, edges, known)
    waits_for = {rank: frozenset(edges[rank]) for rank in sorted(fronts) if edges.get(rank)}
    awaited = {
        rank: min((fronts[each] for each in waiting), key=attrgetter("record.created"))
        for rank, waiting in waiting_for(waits_for).items()
    }
    operations = awaited | passed | fronts
    roots, stands = [], {}
    for rank in sorted(reasons.keys() | waits_for.keys()):
        operation, reason = operations.get(rank), reasons.get(rank, "")
        at = None
        if schedule is not None:
            at = _action_at(job, schedule, rank, operation, reason == MISSING)
        index, action = at or (None, None)
        root = Root(rank, None, index, action, reason)
        words = f"waits at {root.place and f'{root.place}, '}{operation}, for "
        stands[rank] = Stand(words + in_words(waits_for.get(rank, ())), root.place, operation)
        if reason:
            roots.append(root)
    return Diagnosis(
        tuple(roots),
        chain(edges, reasons),
        waits_for,
        is_sure and all(dump.shows_ends for rank, dump in job.dumps.items() if rank in reasons),
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
    reached = {of[0] for of in left.values() if of}
    passed: dict[int, Operation] = {}

    def is_over(operation: Operation) -> bool:
        # Two ends of a batch, both reached: as torch never notes its end, it is taken to have
        # ended, and the ranks to wait in what they posted later.
        return bool(operation.transfers) and all(
            each.is_past
            or (each.match in reached and not (operation.is_sure or each.match.is_sure))
            for each in operation.transfers
        )

    while over := [of for of in left.values() if of and is_over(of[0])]:
        for of in over:
            last = of.popleft()
            if last.is_sure:
                passed[last.rank] = last
            reached.update(islice(of, 1))
    return {rank: of[0] for rank, of in left.items() if of}, passed


# How far a rank is with a collective: it has not posted it, or left no dump that says so; has
# posted it behind an operation that it waits in; waits in it; is past it; or does not say.
_ABSENT, _HELD, _HERE, _PAST, _UNKNOWN = "absent", "held", "here", "past", "unknown"

_Meet: TypeAlias = Callable[[Group, int], Mapping[str, set[int]]]


def _meeting(
    job: Job, fronts: Mapping[int, Operation], group: Group, sequence: int
) -> Mapping[str, set[int]]:
    """The ranks by how far they are with a group's collective of some number."""

    def state_of(rank: int) -> str:
        posted = group.posted.get(sequence, {}).get(rank, ())
        left = [each for each in posted if not each.is_finished]
        if left:
            return _HERE if fronts.get(rank) in left else _HELD
        dump, highest = job.dumps.get(rank), group.highest.get(rank)
        if posted or (highest is not None and highest >= sequence):
            return _PAST
        if dump is None or dump.is_whole or (dump.has_ends and highest is not None):
            return _ABSENT
        if group.name not in dump.last:
            return _ABSENT if dump.names_all else _UNKNOWN
        if group.has_transfers:
            return _UNKNOWN
        enqueued, completed = dump.last[group.name]
        if enqueued < sequence:
            return _ABSENT
        return _PAST if completed >= sequence else _HERE

    found = defaultdict(set)
    for rank in group.members:
        found[state_of(rank)].add(rank)
    if not (group.is_known or found[_ABSENT] or found[_HELD]):
        found[_UNKNOWN] |= {*job.ranks} - fronts.keys() - {*group.members}
    return found


def _connected(
    fronts: Mapping[int, Operation], meet: _Meet
) -> tuple[Mapping[int, Set[int]], Mapping[int, str]]:
    """Whom each rank waits for, at its front if it has one, and the reason why it would be a root,
    where that is neither NO_DUMP nor MISSING."""
    edges: dict[int, Set[int]] = {}
    differing: dict[int, Set[int]] = {}
    unknown: set[int] = set()  # nobody knows whether these wait
    for rank, operation in fronts.items():
        if operation.transfers:
            # The peers that have not come to it; if all have, those that are in it too.
            left = [each for each in operation.transfers if not each.is_past]
            absent = {each.peer for each in left if fronts.get(each.peer, each) is not each.match}
            edges[rank] = absent or {each.peer for each in left}
    met = {(each.group, each.sequence) for each in fronts.values() if not each.transfers}
    for group, sequence in sorted(met, key=lambda each: (each[0].name, each[0].members, each[1])):
        meeting, posted = meet(group, sequence), group.posted[sequence]
        here, held, silent = meeting[_HERE], meeting[_HELD], meeting[_UNKNOWN]
        awaited = held | meeting[_ABSENT]
        ways = {
            rank: tuple(sorted((each.record.name, each.record.shape) for each in of))
            for rank, of in posted.items()
        }
        ((most, many),) = Counter(ways.values()).most_common(1)
        if 2 * many <= len(ways):  # each may be the one that differs
            differing |= {rank: posted.keys() - {rank} for rank in posted}
        else:
            others = {rank for rank, way in ways.items() if way != most}
            differing |= dict.fromkeys(others - held, frozenset())
            awaited |= others
        # torch notes a start where it takes the times of collectives. If it has started on some
        # devices, those wait for the others.
        started = {
            rank for rank in here for each in posted.get(rank, ()) if each.record.has_started
        }
        for rank in here:
            edges[rank] = (awaited or (here - started or here) | silent) - {rank}
        if not awaited:
            # They may have gone on long ago, and the root be one of those that are here.
            silent = silent - fronts.keys()
            edges |= dict.fromkeys(silent, here)
            unknown |= silent
    # What differs goes before what the same ranks wait for elsewhere.
    reasons = dict.fromkeys(edges.keys() - unknown, STUCK) | dict.fromkeys(differing, DIFFERS)
    return edges | differing, reasons


def _reasons(
    job: Job,
    fronts: Mapping[int, Operation],
    passed: Mapping[int, Operation],
    edges: Mapping[int, Set[int]],
    known: Mapping[int, str],
) -> tuple[dict[int, str], bool]:
    """The roots with why they are ones, and whether each of them is one for sure."""
    found: dict[int, str] = {}
    sure = True
    for ranks in sinks(edges):
        sure = sure and len(ranks) == 1
        others = [fronts[each] for each in ranks if each in fronts]
        for rank in ranks:
            reason = known.get(rank, MISSING if rank in job.dumps else NO_DUMP)
            if reason == STUCK and rank in fronts and not all(map(fronts[rank].is_met_by, others)):
                reason = CIRCLE
            found[rank] = reason
    if NO_DUMP in found.values():
        # It may have waited in its turn, for a rank that is not seen to wait for any.
        unseen = {*job.ranks} - fronts.keys() - found.keys() - edges.keys()
        sure = sure and not unseen
        found |= {rank: MISSING if rank in job.dumps else NO_DUMP for rank in unseen}
    # Where a rank's last operation is a batch, whose end torch does not note, it may wait in it.
    ends = {rank: of[-1] for rank, of in job.operations.items() if of and rank not in fronts}
    for rank in [rank for rank in found or ends if rank in ends]:
        last = ends[rank]
        peers = {each.peer for each in last.transfers if ends.get(each.peer) is each.match}
        if peers and not last.is_sure and not last.is_finished:
            sure = False
            found = dict.fromkeys((rank, *peers), STUCK) | found
    return found or dict.fromkeys(passed, STUCK), sure


def _by_rules(job: Job, meet: _Meet) -> set[int]:
    first = {
        (rank, each.group): each.sequence
        for rank, operations in job.operations.items()
        for each in reversed(operations)
        if not (each.is_finished or each.transfers)
    }
    found = set()
    for (rank, group), sequence in first.items():
        meeting = meet(group, sequence)
        found |= meeting[_ABSENT] & job.dumps.keys()
        if meeting[_PAST]:
            found.add(rank)
    return found


def _action_at(
    job: Job, schedule: Schedule, rank: int, operation: Operation | None, is_missing: bool
) -> tuple[int, Action] | None:
    """The index and the action of what a rank has posted, or, of one that `is_missing`, of the
    first transfer that it has not posted, in a complete schedule.

    The transfers of a rank, in the order in which it posted them, are the sends and receives of its
    list, step after step. Where a dump has lost the first ones, the peers tell where in the list it
    begins. The job may have as many ranks as the schedule, or pipelines of as many, each in a
    group. None where a rank's transfers are not those of its list.
    """
    posted = [each for each in job.operations.get(rank, ()) if each.transfers]
    groups = [job.ranks, *(each.group.members for each in (*posted, operation) if each)]
    members = next((each for each in groups if len(each) == schedule.ranks), ())
    if rank not in members:
        return None
    within = {each: number for number, each in enumerate(members)}
    transfers = [
        (each, (transfer.is_send, within[transfer.peer]))
        for each in posted
        for transfer in each.transfers
        if transfer.peer in within
    ]
    graph = graph_of(schedule)
    listed = [
        ((action.kind in SENDS, graph.peer(action)), (index, action))
        for index, entry in enumerate(schedule.actions[within[rank]])
        for action in flat([entry])
        if action.kind in COMMUNICATION
    ]
    dump = job.dumps.get(rank)
    begins = [
        begin
        for begin in range(len(listed))[: 1 if dump and dump.is_whole else None]
        if all(
            listed[(begin + number) % len(listed)][0] == way
            for number, (_, way) in enumerate(transfers)
        )
    ]
    at = len(transfers)
    if not is_missing:
        at = next((n for n, (each, _) in enumerate(transfers) if each is operation), -1)
    return None if len(begins) != 1 or at < 0 else listed[(begins[0] + at) % len(listed)][1]
