"""What each rank posted, in order, and which send of one rank a receive of another one meets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import zip_longest

from attrs import define, field, frozen

from schedir.diagnosis.flight_recorder import Dump, Record


@define(eq=False)
class Group:
    """The ranks that meet in a collective; a name alone may stand for several such sets.

    `is_known` is False where no dump has the members, as with gloo: they are those that use it.
    `posted[sequence][rank]` has a rank's collectives of that number, `highest[rank]` the last such
    number that any of its entries shows, `collectives` that of all ranks. If the group
    `has_transfers`, the last number that a dump gives for it may be that of a transfer. If it
    `has_global_ends`, they are written in ranks of the job; torch writes them in numbers within the
    group.
    """

    name: str
    members: tuple[int, ...]
    is_known: bool
    words: str
    posted: dict[int, dict[int, list[Operation]]] = field(factory=dict)
    highest: dict[int, int] = field(factory=dict)
    collectives: int = 0
    has_transfers: bool = False
    has_global_ends: bool = False

    @property
    def text(self) -> str:
        """What it is called: its name, and what it is for."""
        return f"{self.name} ({self.words})" if self.words else self.name


@define(eq=False)
class Transfer:
    """A send or a receive. `match` is the peer's operation that it meets, None where the peer has
    posted none; `is_past` where the peer has ended that operation, or its dump has it no more, as
    the peer has long gone on."""

    is_send: bool
    peer: int
    match: Operation | None = None
    is_past: bool = False


@define(eq=False)
class Operation:
    """A collective, a transfer or a batch of transfers, as a rank posted it.

    `record` is its entry, the first one of a batch. `is_finished` is what the dump proves. Of what
    is not, `is_sure` says that the dump would have it if it were: torch never notes the end of
    transfers that were posted as a batch, unless the batch has an entry of its own. `sequence`
    counts collectives, or transfers.
    """

    rank: int
    group: Group
    record: Record
    sequence: int
    transfers: list[Transfer]
    is_finished: bool
    is_sure: bool

    @property
    def text(self) -> str:
        """What it is called: `all_reduce`, `send 0->3`."""
        words = [
            f"send {self.rank}->{each.peer}" if each.is_send else f"recv {self.rank}<-{each.peer}"
            for each in self.transfers
        ]
        further = f" and {len(words) - 4} more" if len(words) > 4 else ""
        return ", ".join(words[:4]) + further if words else self.record.name

    def __str__(self) -> str:
        number = "" if self.transfers else f" {self.sequence}"
        return f"{self.text}{number} of group {self.group.text}"

    def is_met_by(self, other: Operation) -> bool:
        """Whether another rank's is the other end of a transfer, or of the same collective."""
        if self.transfers or other.transfers:
            return other is self or any(each.match is other for each in self.transfers)
        return (self.group, self.sequence) == (other.group, other.sequence)


@frozen
class Job:
    """The operations of all ranks that have a dump, in the order in which each posted them.

    `ranks` are all ranks of the job: those with a dump, and those that the dumps' groups name.
    """

    dumps: Mapping[int, Dump]
    ranks: tuple[int, ...]
    operations: Mapping[int, list[Operation]]


def job_of(dumps: Mapping[int, Dump]) -> Job:
    """The operations in the dumps of a job."""
    named = {members for dump in dumps.values() for members, _ in dump.groups.values()}
    ranks = tuple(sorted({*dumps}.union(*named)))
    groups = _groups(dumps, ranks)
    for rank, dump in dumps.items():
        for record in dump.records:
            group, number = groups[rank, record.group], record.collective
            group.highest[rank] = max(group.highest.get(rank, 0), number)
            group.collectives = max(group.collectives, number)
            group.has_transfers |= record.transfer != 0
            if record.ends:
                members = group.members
                group.has_global_ends |= (
                    max(record.ends) >= len(members) or members[record.ends[0]] != rank
                )
    operations = {rank: list(_operations(dumps[rank], groups)) for rank in sorted(dumps)}
    for rank, own in operations.items():
        # What a stream held before something that has ended has ended as well: a group has one
        # stream, and another for single transfers with each peer.
        ended: set[tuple[Group, int | None]] = set()
        for operation in reversed(own):
            single = len(operation.transfers) == 1 and operation.is_sure
            stream = operation.group, operation.transfers[0].peer if single else None
            if operation.is_finished:
                ended.add(stream)
            operation.is_finished = stream in ended
            if not operation.transfers:
                of = operation.group.posted.setdefault(operation.sequence, {})
                of.setdefault(rank, []).append(operation)
    _match(dumps, operations)
    return Job(dumps, ranks, operations)


def _groups(dumps: Mapping[int, Dump], ranks: tuple[int, ...]) -> dict[tuple[int, str], Group]:
    """The group that a rank means by a name: its own, another rank's that names it, or all ranks
    that use the name."""
    configured: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    users: dict[str, set[int]] = defaultdict(set)
    for rank, dump in dumps.items():
        for name, (members, _) in dump.groups.items():
            configured[name].add(members)
        for record in dump.records:
            users[record.group].add(rank)
    known: dict[object, Group] = {}
    found = {}
    for name, using in users.items():
        for rank in sorted(using):
            own, words = dumps[rank].groups[name]
            fits = [own] if rank in own else [each for each in configured[name] if rank in each]
            members = fits[0] if len(fits) == 1 else ()
            words = words.replace("undefined", "")
            if words == "default_pg":
                members = members or ranks
            key = name, members or tuple(sorted(using)), bool(members)
            found[rank, name] = known.setdefault(key, Group(*key, words))
    return found


def _operations(dump: Dump, groups: Mapping[tuple[int, str], Group]) -> Iterator[Operation]:
    """The operations of a rank in the order in which it posted them."""
    batches: dict[object, list[Record]] = defaultdict(list)
    for record in dump.records:
        together = (record.group, record.transfer) if record.is_transfer else id(record)
        batches[together].append(record)
    for records in batches.values():
        record, group = records[0], groups[dump.rank, records[0].group]
        transfers = [
            Transfer(
                each.name == "send",
                each.ends[1] if group.has_global_ends else group.members[each.ends[1]],
            )
            for each in records
            if each.ends is not None
        ]
        if record.is_transfer and not transfers:
            continue
        # The entry of the batch as a whole has no ends.
        whole = [each for each in records if each.ends is None] or records
        yield Operation(
            dump.rank,
            group,
            record,
            sequence=record.transfer if transfers else record.collective,
            transfers=transfers,
            is_finished=all(each.is_finished for each in whole)
            or (bool(transfers) and record.transfer <= _last_transfer(dump, group)),
            is_sure=len(whole) == 1,
        )


def _last_transfer(dump: Dump, group: Group) -> int:
    """The last transfer of a group that a rank says has ended; -1 where it does not say.

    Its number may be that of a collective, unless the group has not had so many.
    """
    _, number = dump.last.get(group.name, (-1, -1))
    return number if number > group.collectives else -1


def _match(dumps: Mapping[int, Dump], operations: Mapping[int, list[Operation]]) -> None:
    """Have each transfer know what it meets: the n-th send from one rank to another in a group
    meets the n-th receive.

    If a dump lacks some entries, those are matched that it always has, which are not noted as
    finished. A batch that is older than all that the peer's dump still has is taken to have ended.
    """
    ends: dict[tuple[Group, bool, int, int], list[list[tuple[Operation, Transfer]]]]
    ends = defaultdict(lambda: [[], []])
    for rank, own in operations.items():
        for operation in own:
            for each in operation.transfers:
                if each.peer not in dumps:
                    continue
                peer = dumps[each.peer]
                whole = peer.is_whole and dumps[rank].is_whole
                each.is_past = not operation.is_sure and operation.record.created < peer.begin
                if whole or not (each.is_past or (operation.is_finished and operation.is_sure)):
                    way = (rank, each.peer) if each.is_send else (each.peer, rank)
                    ends[operation.group, whole, *way][each.is_send].append((operation, each))
    for (group, whole, _, _), (receives, sends) in ends.items():
        for receive, send in zip_longest(receives, sends):
            if send and receive:
                send[1].match, receive[1].match = receive[0], send[0]
                send[1].is_past, receive[1].is_past = receive[0].is_finished, send[0].is_finished
            elif not whole:
                operation, transfer = send or receive
                last = _last_transfer(dumps[transfer.peer], group)
                transfer.is_past = len(group.members) == 2 and last >= operation.sequence
