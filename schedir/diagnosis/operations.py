"""What each rank posted, in order, and which send of one rank a receive of another one meets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import zip_longest

from attrs import define, field, frozen

from schedir.diagnosis.flight_recorder import Dump, Record


@frozen(cache_hash=True)
class Group:
    """The ranks that meet in a collective; a name alone may stand for several such sets.

    `is_known` is False where no dump has the members, as with gloo: they are those that use it.
    """

    name: str
    members: tuple[int, ...]
    words: str = field(default="", eq=False)
    is_known: bool = True

    @property
    def text(self) -> str:
        """What it is called: its name, and what it is for."""
        return f"{self.name} ({self.words})" if self.words else self.name


@define(eq=False)
class Transfer:
    """A send or a receive. `match` is the peer's operation that it meets, None where the peer has
    posted none; `is_past` where the peer's dump has it no more, since the peer has long gone on."""

    is_send: bool
    peer: int
    match: Operation | None = None
    is_past: bool = False


@define(eq=False)
class Operation:
    """A collective, a transfer or a batch of transfers, as a rank posted it.

    `is_finished` is what the dump proves. Of what is not, `is_sure` says that the dump would have
    it if it were: torch never notes the end of transfers that were posted as a batch, unless the
    batch has an entry of its own. `sequence` counts collectives, or transfers.
    """

    rank: int
    group: Group
    name: str
    sequence: int
    created: int
    transfers: list[Transfer]
    is_finished: bool
    is_sure: bool
    has_started: bool
    shape: str

    @property
    def text(self) -> str:
        """What it is called: `all_reduce`, `send 0->3`."""
        words = [
            f"send {self.rank}->{each.peer}" if each.is_send else f"recv {self.rank}<-{each.peer}"
            for each in self.transfers
        ]
        further = f" and {len(words) - 4} more" if len(words) > 4 else ""
        return ", ".join(words[:4]) + further if words else self.name

    def __str__(self) -> str:
        number = "" if self.transfers else f" {self.sequence}"
        return f"{self.text}{number} of group {self.group.text}"

    def is_met_by(self, other: Operation) -> bool:
        """Whether another rank's is the other end of a transfer, or of the same collective."""
        if self.transfers or other.transfers:
            return other is self or any(each.match is other for each in self.transfers)
        return (self.group, self.sequence) == (other.group, other.sequence)


@define(eq=False)
class Job:
    """The operations of all ranks, and the groups in which they met.

    `posted[group, rank]` has a rank's collectives by sequence, `highest` the last sequence that any
    of its entries shows. `carries` are the groups that carry transfers: the last number that a dump
    gives for such a group may be that of a transfer.
    """

    dumps: Mapping[int, Dump]
    operations: dict[int, list[Operation]]
    posted: dict[tuple[Group, int], dict[int, list[Operation]]]
    highest: dict[tuple[Group, int], int]
    carries: set[Group]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the job: those with a dump, and those that the dumps' groups name."""
        return _all_ranks(self.dumps)


def job_of(dumps: Mapping[int, Dump]) -> Job:
    """The operations in the dumps of a job."""
    groups = _groups(dumps)
    local = _numbered_within(dumps, groups)
    job = Job(dumps, {}, defaultdict(dict), {}, set())
    collectives: dict[Group, int] = {}
    for rank, dump in dumps.items():
        for record in dump.records:
            group = groups[rank, record.group]
            collectives[group] = max(collectives.get(group, 0), record.collective)
    for rank, dump in sorted(dumps.items()):
        over = {
            group: _last_transfer(dump, groups[rank, group], collectives)
            for group in {record.group for record in dump.records}
        }
        job.operations[rank] = list(_operations(dump, groups, local, over))
        _finish_earlier(job.operations[rank])
        for operation in job.operations[rank]:
            if not operation.transfers:
                of = job.posted[operation.group, rank]
                of.setdefault(operation.sequence, []).append(operation)
        for record in dump.records:
            group = groups[rank, record.group]
            job.highest[group, rank] = max(job.highest.get((group, rank), 0), record.collective)
            if record.transfer:
                job.carries.add(group)
    _match(job, collectives)
    return job


def _all_ranks(dumps: Mapping[int, Dump]) -> tuple[int, ...]:
    named = {members for dump in dumps.values() for members in dump.groups.values()}
    return tuple(sorted(set(dumps).union(*named)))


def _groups(dumps: Mapping[int, Dump]) -> dict[tuple[int, str], Group]:
    """The group that a rank means by a name: its own, another rank's that names it, or all ranks
    that use the name."""
    configured: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    users: dict[str, set[int]] = defaultdict(set)
    for rank, dump in dumps.items():
        for name, members in dump.groups.items():
            configured[name].add(members)
        for record in dump.records:
            users[record.group].add(rank)
    ranks = _all_ranks(dumps)
    known: dict[Group, Group] = {}
    found = {}
    for rank, dump in dumps.items():
        for name in {*dump.groups, *(record.group for record in dump.records)}:
            members = dump.groups.get(name, ())
            if rank not in members:
                others = [each for each in configured[name] if rank in each]
                members = others[0] if len(others) == 1 else ()
            words = dump.words.get(name, "").replace("undefined", "")
            if not members and words == "default_pg":
                members = ranks
            used = tuple(sorted(users[name] | {rank}))
            group = Group(name, members or used, words, bool(members))
            found[rank, name] = known.setdefault(group, group)
    return found


def _numbered_within(
    dumps: Mapping[int, Dump], groups: Mapping[tuple[int, str], Group]
) -> set[Group]:
    """The groups whose sends and receives are written in numbers within the group, as torch does,
    unless one of them would then be another rank's."""
    elsewhere = set()
    for rank, dump in dumps.items():
        for record in dump.records:
            if record.ends is not None:
                group = groups[rank, record.group]
                if max(record.ends) >= len(group.members) or group.members[record.ends[0]] != rank:
                    elsewhere.add(group)
    return set(groups.values()) - elsewhere


def _operations(
    dump: Dump,
    groups: Mapping[tuple[int, str], Group],
    local: set[Group],
    over: Mapping[str, int],
) -> Iterator[Operation]:
    """The operations of a rank in the order in which it posted them; `over` has the last transfer
    of a group that has ended."""
    batches: dict[tuple[str, int], list[Record]] = defaultdict(list)
    for record in dump.records:
        if record.is_transfer:
            batches[record.group, record.transfer].append(record)
    for record in dump.records:
        group = groups[dump.rank, record.group]
        together = [record]
        if record.is_transfer:
            together = batches.pop((record.group, record.transfer), [])
        transfers = [
            Transfer(
                each.name == "send", group.members[each.ends[1]] if group in local else each.ends[1]
            )
            for each in together
            if each.ends is not None
        ]
        if not together or (record.is_transfer and not transfers):
            continue
        # The entry of the batch as a whole has no ends.
        whole = [each for each in together if each.ends is None] or together
        yield Operation(
            rank=dump.rank,
            group=group,
            name=record.name,
            sequence=record.transfer if transfers else record.collective,
            created=record.created,
            transfers=transfers,
            is_finished=all(each.is_finished for each in whole)
            or (bool(transfers) and record.transfer <= over[record.group]),
            is_sure=len(whole) == 1,
            has_started=any(each.has_started for each in together),
            shape=record.shape,
        )


def _last_transfer(dump: Dump, group: Group, collectives: Mapping[Group, int]) -> int:
    """The last transfer of a group that a rank says has ended; -1 where it does not say.

    Its number may be that of a collective, unless the group has not had so many.
    """
    number = dump.completed.get(group.name, -1)
    return number if number > collectives.get(group, 0) else -1


def _finish_earlier(operations: list[Operation]) -> None:
    """What a stream held before something that has ended has ended as well: a group has one, and
    another for single transfers with each peer."""
    ended: set[tuple[Group, int | None]] = set()
    for operation in reversed(operations):
        single = len(operation.transfers) == 1 and operation.is_sure
        stream = operation.group, operation.transfers[0].peer if single else None
        if operation.is_finished:
            ended.add(stream)
        operation.is_finished = stream in ended


def _match(job: Job, collectives: Mapping[Group, int]) -> None:
    """Have each transfer know what it meets: the n-th send from one rank to another in a group
    meets the n-th receive."""
    ends: dict[tuple[Group, int, int], list[list[tuple[Operation, Transfer]]]]
    ends = defaultdict(lambda: [[], []])
    for rank, operations in job.operations.items():
        for operation in operations:
            for each in operation.transfers:
                way = (rank, each.peer) if each.is_send else (each.peer, rank)
                ends[operation.group, *way][each.is_send].append((operation, each))
    for (group, source, target), (receives, sends) in ends.items():
        if source not in job.dumps or target not in job.dumps:
            continue
        whole = job.dumps[source].is_whole and job.dumps[target].is_whole
        if not whole:
            sends = _left(sends, job.dumps[target])
            receives = _left(receives, job.dumps[source])
        for send, receive in zip_longest(sends, receives):
            if send and receive:
                send[1].match, receive[1].match = receive[0], send[0]
            elif not whole:
                (operation, transfer), peer = (send, target) if send else (receive, source)
                last = _last_transfer(job.dumps[peer], group, collectives)
                transfer.is_past = len(group.members) == 2 and last >= operation.sequence


def _left(ends: list[tuple[Operation, Transfer]], peer: Dump) -> list[tuple[Operation, Transfer]]:
    """The ends that a dump always has: those that are not noted as finished. A batch that is older
    than all that the peer's dump still has is taken to have ended."""
    begin = 0
    if peer.has_ends and not peer.is_whole:
        begin = min(record.created for record in peer.records)
    left = []
    for operation, transfer in ends:
        transfer.is_past = not operation.is_sure and operation.created < begin
        if not transfer.is_past and not (operation.is_finished and operation.is_sure):
            left.append((operation, transfer))
    return left
