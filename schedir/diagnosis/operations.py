"""What each rank posted, in order, and which send of one rank a receive of another one meets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cached_property
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
    of its entries shows, `collectives` that of all ranks. `carries` are the groups that carry
    transfers: the last number that a dump gives for such a group may be that of a transfer.
    `global_ends` are those whose transfers are written in ranks of the job; torch writes them in
    numbers within the group.
    """

    dumps: Mapping[int, Dump]
    operations: dict[int, list[Operation]] = field(factory=dict)
    posted: dict[tuple[Group, int], dict[int, list[Operation]]] = field(factory=dict)
    highest: dict[tuple[Group, int], int] = field(factory=dict)
    collectives: dict[Group, int] = field(factory=dict)
    carries: set[Group] = field(factory=set)
    global_ends: set[Group] = field(factory=set)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the job: those with a dump, and those that the dumps' groups name."""
        named = {members for dump in self.dumps.values() for members in dump.groups.values()}
        return tuple(sorted({*self.dumps}.union(*named)))

    def last_transfer(self, rank: int, group: Group) -> int:
        """The last transfer of a group that a rank says has ended; -1 where it does not say.

        Its number may be that of a collective, unless the group has not had so many.
        """
        number = self.dumps[rank].completed.get(group.name, -1)
        return number if number > self.collectives.get(group, 0) else -1


def job_of(dumps: Mapping[int, Dump]) -> Job:
    """The operations in the dumps of a job."""
    job = Job(dumps)
    groups = _groups(job)
    for rank, dump in dumps.items():
        for record in dump.records:
            group, number = groups[rank, record.group], record.collective
            job.highest[group, rank] = max(job.highest.get((group, rank), 0), number)
            job.collectives[group] = max(job.collectives.get(group, 0), number)
            if record.transfer:
                job.carries.add(group)
            if record.ends:
                members = group.members
                if max(record.ends) >= len(members) or members[record.ends[0]] != rank:
                    job.global_ends.add(group)
    for rank in sorted(dumps):
        job.operations[rank] = list(_operations(job, rank, groups))
        _finish_earlier(job.operations[rank])
        for operation in job.operations[rank]:
            if not operation.transfers:
                of = job.posted.setdefault((operation.group, rank), {})
                of.setdefault(operation.sequence, []).append(operation)
    _match(job)
    return job


def _groups(job: Job) -> dict[tuple[int, str], Group]:
    """The group that a rank means by a name: its own, another rank's that names it, or all ranks
    that use the name."""
    configured: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    users: dict[str, set[int]] = defaultdict(set)
    for rank, dump in job.dumps.items():
        for name, members in dump.groups.items():
            configured[name].add(members)
        for record in dump.records:
            users[record.group].add(rank)
    ranks = job.ranks
    known: dict[Group, Group] = {}
    found = {}
    for name, using in users.items():
        for rank in sorted(using):
            dump = job.dumps[rank]
            own = dump.groups.get(name, ())
            fits = [own] if rank in own else [each for each in configured[name] if rank in each]
            members = fits[0] if len(fits) == 1 else ()
            words = dump.words.get(name, "").replace("undefined", "")
            if words == "default_pg":
                members = members or ranks
            group = Group(name, members or tuple(sorted(using)), words, bool(members))
            found[rank, name] = known.setdefault(group, group)
    return found


def _operations(
    job: Job, rank: int, groups: Mapping[tuple[int, str], Group]
) -> Iterator[Operation]:
    """The operations of a rank in the order in which it posted them."""
    batches: dict[tuple[object, ...], list[Record]] = defaultdict(list)
    for record in job.dumps[rank].records:
        together = (
            (record.group, record.transfer) if record.is_transfer else (record.id, id(record))
        )
        batches[together].append(record)
    for records in batches.values():
        record, group = records[0], groups[rank, records[0].group]
        transfers = [
            Transfer(
                each.name == "send",
                each.ends[1] if group in job.global_ends else group.members[each.ends[1]],
            )
            for each in records
            if each.ends is not None
        ]
        if record.is_transfer and not transfers:
            continue
        # The entry of the batch as a whole has no ends.
        whole = [each for each in records if each.ends is None] or records
        yield Operation(
            rank=rank,
            group=group,
            name=record.name,
            sequence=record.transfer if transfers else record.collective,
            created=record.created,
            transfers=transfers,
            is_finished=all(each.is_finished for each in whole)
            or (bool(transfers) and record.transfer <= job.last_transfer(rank, group)),
            is_sure=len(whole) == 1,
            has_started=any(each.has_started for each in records),
            shape=record.shape,
        )


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


def _match(job: Job) -> None:
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
        dumps = [job.dumps[rank] for rank in (source, target) if rank in job.dumps]
        if len(dumps) < 2:
            continue
        whole = all(dump.is_whole for dump in dumps)
        if not whole:
            receives, sends = map(_left, (receives, sends), dumps)
        for receive, send in zip_longest(receives, sends):
            if send and receive:
                send[1].match, receive[1].match = receive[0], send[0]
            elif not whole:
                operation, transfer = send or receive
                last = job.last_transfer(transfer.peer, group)
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
