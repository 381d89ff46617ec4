"""Name the root of a hang from the dumps of torch's flight recorder.

Each rank's first unfinished operation waits for the ranks that have not come to it: members of the
group, or the peer, that have not posted it, or that are held by an earlier operation of their own.
The roots are the sinks of that graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set

from attrs import define, field, frozen

from schedir.diagnosis.flight_recorder import Dumps
from schedir.diagnosis.operations import Group, Job, Operation, Transfer, job_of
from schedir.diagnosis.waits_for import chain, sinks

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
"""What is said of a root."""


@frozen
class Root:
    """A rank that others wait for, and that waits for nobody else.

    `operation` is its own one that does not end, or the one that others wait for it to post.
    `action` is the schedule's, where one is given.
    """

    rank: int
    reason: str
    operation: Operation | None
    waited_for_by: tuple[int, ...]
    action: str = ""


@frozen
class Waiting:
    """A rank that waits for others at its first unfinished operation."""

    rank: int
    operation: Operation
    waits_for: tuple[int, ...]
    action: str = ""


@frozen
class Verdict:
    """Who is the root of a hang.

    `is_sure` is False where the evidence leaves several ranks of which one may be the root. `chain`
    is the longest way to a root, each rank waiting for the next. `by_rules` are the ranks that
    two simple rules over collectives would name: those that have left unfinished what a peer has
    finished, and those that have not posted what a peer waits for. `operations` are those of each
    rank in the order in which it posted them, `whole` the ranks whose dumps have all of these.
    """

    ranks: tuple[int, ...]
    roots: tuple[Root, ...]
    waiting: tuple[Waiting, ...]
    is_sure: bool
    chain: tuple[int, ...]
    by_rules: tuple[int, ...]
    missing_dumps: tuple[int, ...]
    operations: Mapping[int, list[Operation]]
    whole: Set[int]
    unreadable: Mapping[str, str] = field(factory=dict)


def blame(dumps: Dumps) -> Verdict:
    """The roots of the hang that the dumps of a job show, if they show one."""
    job = job_of(dumps.of)
    ranks = job.ranks
    fronts, passed = _fronts(job)
    graph = _Graph(job, fronts)
    graph.connect()
    roots, sure = _roots(job, graph, passed)
    named = {root.rank for root in roots}
    waiting = tuple(
        Waiting(rank, fronts[rank], tuple(sorted(awaited)))
        for rank, awaited in sorted(graph.edges.items())
        if awaited and rank in fronts and rank not in named
    )
    return Verdict(
        ranks=ranks,
        roots=tuple(roots),
        waiting=waiting,
        is_sure=sure and all(job.dumps[rank].shows_ends for rank in named & job.dumps.keys()),
        chain=tuple(chain(graph.edges, named)),
        by_rules=tuple(sorted(_by_rules(job, graph))),
        missing_dumps=tuple(rank for rank in ranks if rank not in job.dumps),
        operations=job.operations,
        whole={rank for rank, dump in job.dumps.items() if dump.is_whole},
        unreadable=dumps.unreadable,
    )


def _fronts(job: Job) -> tuple[dict[int, Operation], dict[int, Operation]]:
    """The operation that each rank waits in: its first unfinished one, but for transfers that the
    peers are past; and the last one of those that were passed over although the rank's own dump
    says that they go on."""
    left = {
        rank: [each for each in of if not each.is_finished] for rank, of in job.operations.items()
    }
    at = dict.fromkeys(left, 0)
    place = {id(each): number for of in left.values() for number, each in enumerate(of)}
    passed: dict[int, Operation] = {}

    def is_met(operation: Operation, transfer: Transfer) -> bool:
        match = transfer.match
        if match is None or match.is_finished:
            return transfer.is_past or match is not None
        # Two ends of a batch, both reached: as torch never notes its end, it is taken to have
        # ended, and the ranks to wait in what they posted later.
        sure = operation.is_sure or match.is_sure
        return not sure and place[id(match)] <= at[match.rank]

    def is_over(operation: Operation) -> bool:
        of = operation.transfers
        return bool(of) and all(is_met(operation, each) for each in of)

    goes_on = True
    while goes_on:
        goes_on = False
        for rank, of in left.items():
            while at[rank] < len(of) and is_over(of[at[rank]]):
                if of[at[rank]].is_sure:
                    passed[rank] = of[at[rank]]
                at[rank] += 1
                goes_on = True
    return {rank: of[at[rank]] for rank, of in left.items() if at[rank] < len(of)}, passed


@define
class _Meeting:
    """How far the members of a group are with its collective of some number."""

    absent: set[int] = field(factory=set)
    """Has not posted it, or left no dump that says so."""
    held: set[int] = field(factory=set)
    """Has posted it behind an operation that it waits in."""
    here: set[int] = field(factory=set)
    past: set[int] = field(factory=set)
    late: set[int] = field(factory=set)
    """Of `here`, those on whose device it has not started, if it may have on others."""
    others: set[int] = field(factory=set)
    """Those that posted another operation in its place than most did."""
    split: set[int] = field(factory=set)
    """Those that posted something, if that was different operations, none of them by most."""
    unknown: set[int] = field(factory=set)
    """Those whose dumps do not say whether they have posted it."""


class _Graph:
    """The edges: who waits for whom."""

    def __init__(self, job: Job, fronts: Mapping[int, Operation]) -> None:
        self.job = job
        self.fronts = fronts
        self.edges: dict[int, Set[int]] = {}
        self.differing: set[int] = set()
        self.unknown: set[int] = set()
        self._meetings: dict[tuple[Group, int], _Meeting] = {}

    def connect(self) -> None:
        """Find all edges."""
        for rank, operation in self.fronts.items():
            if operation.transfers:
                self.edges[rank] = self._awaited_by_transfers(operation)
        met = {
            (operation.group, operation.sequence)
            for operation in self.fronts.values()
            if not operation.transfers
        }
        for group, sequence in sorted(met, key=lambda each: (each[0].name, each[1])):
            self._connect(self.meeting(group, sequence))
        # What differs goes before what the same ranks wait for elsewhere.
        for group, sequence in met:
            meeting = self.meeting(group, sequence)
            if meeting.split:
                self.differing |= meeting.split
                self.edges.update((rank, meeting.split - {rank}) for rank in meeting.split)
            for rank in meeting.others - meeting.held:
                self.differing.add(rank)
                self.edges[rank] = set()

    def _connect(self, meeting: _Meeting) -> None:
        waits_for = meeting.absent | meeting.held | meeting.others
        for rank in meeting.here:
            if waits_for:
                self.edges[rank] = waits_for - {rank}
            else:
                self.edges[rank] = (meeting.late or meeting.here) - {rank} | meeting.unknown
        if not waits_for:
            # They may have gone on long ago, and the root be one of those that are here.
            idle = meeting.unknown - set(self.fronts)
            self.edges.update((rank, meeting.here) for rank in idle)
            self.unknown |= idle

    def _awaited_by_transfers(self, operation: Operation) -> set[int]:
        """The peers that have not come to a transfer; if all have, those that are in it too."""
        absent: set[int] = set()
        here: set[int] = set()
        for each in operation.transfers:
            if each.is_past or (each.match is not None and each.match.is_finished):
                continue
            come = each.match is not None and self.fronts.get(each.peer) is each.match
            (here if come else absent).add(each.peer)
        return absent or here

    def meeting(self, group: Group, sequence: int) -> _Meeting:
        """How far the members of a group are with one of its collectives."""
        if (group, sequence) not in self._meetings:
            self._meetings[group, sequence] = self._met(group, sequence)
        return self._meetings[group, sequence]

    def _met(self, group: Group, sequence: int) -> _Meeting:
        found = _Meeting()
        posted = {}
        for rank in group.members:
            operations = self.job.posted.get((group, rank), {}).get(sequence, [])
            if operations:
                posted[rank] = tuple(sorted((each.name, each.shape) for each in operations))
            self._state(found, group, rank, sequence).add(rank)
        # torch notes a start where it takes the times of collectives.
        started = {
            rank
            for rank in found.here & posted.keys()
            if any(each.has_started for each in self.job.posted[group, rank][sequence])
        }
        if started:
            found.late = found.here - started
        if not group.is_known and not found.absent | found.held:
            found.unknown |= set(self.job.ranks) - set(group.members) - set(self.fronts)
        ways = Counter(posted.values())
        if len(ways) > 1:
            (most, many), *_ = ways.most_common(1)
            if many * 2 > len(posted):
                found.others = {rank for rank, way in posted.items() if way != most}
            else:
                found.split = set(posted)
        return found

    def _state(self, meeting: _Meeting, group: Group, rank: int, sequence: int) -> set[int]:
        job = self.job
        if rank not in job.dumps:
            return meeting.absent
        operations = job.posted.get((group, rank), {}).get(sequence, [])
        left = [each for each in operations if not each.is_finished]
        if left:
            return meeting.here if self.fronts.get(rank) in left else meeting.held
        if operations or job.highest.get((group, rank), -1) >= sequence:
            return meeting.past
        dump = job.dumps[rank]
        listed = dump.has_ends and (group, rank) in job.highest
        if dump.is_whole or listed:
            return meeting.absent
        if group.name not in dump.enqueued:
            return meeting.absent if dump.names_all else meeting.unknown
        if group in job.carries:
            return meeting.unknown
        if dump.enqueued[group.name] < sequence:
            return meeting.absent
        return meeting.past if dump.completed[group.name] >= sequence else meeting.here


def _roots(job: Job, graph: _Graph, passed: Mapping[int, Operation]) -> tuple[list[Root], bool]:
    """The roots by rank, and whether each of them is one for sure."""
    awaited: dict[int, list[int]] = {}
    for rank in sorted(graph.edges):
        for other in graph.edges[rank]:
            awaited.setdefault(other, []).append(rank)
    found: dict[int, str] = {}
    sure = True
    for ranks in sinks(graph.edges):
        sure = sure and len(ranks) == 1
        for rank in ranks:
            found[rank] = _reason(job, graph, ranks, rank)
    if NO_DUMP in found.values():
        # It may have waited in its turn, for a rank that is not seen to wait for any.
        others = set(job.ranks) - graph.fronts.keys() - found.keys() - graph.edges.keys()
        sure = sure and not others
        found.update((rank, MISSING if rank in job.dumps else NO_DUMP) for rank in others)
    # Where a rank's last operation is a batch, whose end torch does not note, it may wait in it.
    ends = {rank: of[-1] for rank, of in job.operations.items() if of and rank not in graph.fronts}
    for rank in [rank for rank in found or ends if rank in ends]:
        last = ends[rank]
        peers = {each.peer for each in last.transfers if ends.get(each.peer) is each.match}
        if peers and not last.is_sure and not last.is_finished:
            sure = False
            found.update((each, found.get(each, STUCK)) for each in (rank, *peers))
    if not found:
        found = dict.fromkeys(passed, STUCK)
    return [
        Root(
            rank,
            reason,
            _about(graph, passed, rank, awaited.get(rank, [])),
            tuple(awaited.get(rank, [])),
        )
        for rank, reason in sorted(found.items())
    ], sure


def _reason(job: Job, graph: _Graph, ranks: tuple[int, ...], rank: int) -> str:
    if rank in graph.differing:
        return DIFFERS
    if rank not in job.dumps:
        return NO_DUMP
    if rank not in graph.fronts:
        return STUCK if rank in graph.edges.keys() - graph.unknown else MISSING
    front = graph.fronts[rank]
    alike = all(_together(front, graph.fronts.get(other)) for other in ranks)
    return STUCK if alike else CIRCLE


def _together(one: Operation, other: Operation | None) -> bool:
    """Whether two operations are the same collective, or two ends of a transfer."""
    if other is None or one is other:
        return True
    if one.transfers or other.transfers:
        return any(each.match is other for each in one.transfers)
    return (one.group, one.sequence) == (other.group, other.sequence)


def _about(
    graph: _Graph, passed: Mapping[int, Operation], rank: int, awaited_by: list[int]
) -> Operation | None:
    own = graph.fronts.get(rank, passed.get(rank))
    if own is not None:
        return own
    waits = [graph.fronts[each] for each in awaited_by if each in graph.fronts]
    return min(waits, key=lambda each: each.created, default=None)


def _by_rules(job: Job, graph: _Graph) -> set[int]:
    stuck, missing = set(), set()
    for rank, operations in job.operations.items():
        first: dict[Group, Operation] = {}
        for each in operations:
            if not each.is_finished and not each.transfers:
                first.setdefault(each.group, each)
        for group, each in first.items():
            meeting = graph.meeting(group, each.sequence)
            if meeting.past:
                stuck.add(rank)
            missing |= meeting.absent & job.dumps.keys()
    return stuck | missing
