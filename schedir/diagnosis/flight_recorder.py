"""Read the dumps of torch's flight recorder: what each rank has posted, how far, and what meets.

A dump is a pickle or JSON, one file a rank, whose name ends with the rank: `nccl_trace_rank_3`. It
comes from a machine that may be damaged, so nothing in it is believed before its type is looked at,
and a file that can't be read is named, with why.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice, zip_longest
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

from schedir.diagnosis.plain_pickle import read_plain_pickle
from schedir.errors import LoadError

_MOST_BYTES = 64 << 20  # of a file
_MOST_BRACKETS = 2_000_000  # lists and objects of a JSON file; each takes some 60 bytes
_MOST_FILES = 1 << 16
_MOST_ENTRIES = 50_000  # of a file, the last ones
_MOST_MEMBERS = 4_000_000  # of all groups of a file
_MOST_TENSORS, _MOST_SIZES = 16, 8  # of an operation that are compared
_NAME = re.compile(r"(.*?)([0-9]{1,6})(?:\.(?:json|pkl|pickle|bin))?")
_ENDS = re.compile(r"(send|recv) ([0-9]{1,9})(->|<-)([0-9]{1,9})")
_SAME_SIZE = {
    "all_reduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "_all_gather_base",
    "_reduce_scatter_base",
}
"""Collectives to which every member of the group brings as many elements."""


@frozen
class Record:
    """One operation that a rank posted, as its dump has it.

    `local` is the number of its group within the process, `words` what the group is for. `ends` are
    the poster and its peer of a send or receive, which may be numbered within the group. `shape` is
    what all members of the group have to agree on: elements and types, "" if nothing.
    """

    id: int
    local: str
    group: str
    words: str
    collective: int
    transfer: int
    name: str
    ends: tuple[int, int] | None
    is_transfer: bool
    is_finished: bool
    has_started: bool
    created: int
    shape: str


@frozen(slots=False)
class Dump:
    """What one rank said of itself.

    `groups` has the ranks of each group by its name, none where they are not known, and what the
    group is for. `last` has the numbers of the last operation of a group, collective or transfer,
    that was posted and that has ended; `names_all` is False where it is not known of which group
    some of these numbers are. A dump that `is_whole` has all that its rank ever posted; one that
    `has_ends` has finished operations too, since torch can write the active ones alone.
    """

    rank: int
    groups: Mapping[str, tuple[tuple[int, ...], str]]
    last: Mapping[str, tuple[int, int]]
    records: tuple[Record, ...]
    names_all: bool
    is_whole: bool
    has_ends: bool

    @property
    def shows_ends(self) -> bool:
        """Whether an operation that it lacks has not been posted, rather than been left out."""
        return self.has_ends or self.is_whole or not self.records

    @cached_property
    def begin(self) -> int:
        """When the first operation that it has was posted, in ns; 0 where it may have begun
        earlier, or lacks none."""
        known = self.has_ends and not self.is_whole
        return min(record.created for record in self.records) if known else 0


@frozen
class Dumps:
    """All dumps of a job: those that were read by rank, and why others were not, by file name."""

    of: Mapping[int, Dump] = field(factory=dict)
    unreadable: Mapping[str, str] = field(factory=dict)


def read_dumps(directory: str) -> Dumps:
    """The dumps in a directory. Raises LoadError where it has none, readable or not."""
    folder = Path(directory)
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise LoadError(f"{directory}: {error.strerror}: name the directory of the dumps") from None
    if len(paths) > _MOST_FILES:
        raise LoadError(f"{directory}: {len(paths)} files are more than a job's dumps")
    named = [(path, found) for path in paths if (found := _NAME.fullmatch(path.name))]
    prefixes = Counter(found[1] for _, found in named)
    if not prefixes:
        raise LoadError(
            f"{directory}: no dump of a flight recorder, which is a file whose name ends with the "
            "rank: set TORCH_NCCL_DUMP_ON_TIMEOUT=1 and TORCH_FR_DUMP_TEMP_FILE=DIR/rank_"
        )
    prefix, _ = prefixes.most_common(1)[0]
    of: dict[int, Dump] = {}
    unreadable = {}
    for path, found in named:
        try:
            rank = int(found[2])
            if found[1] != prefix:
                raise ValueError(f"its name does not begin with {prefix!r}, as most do")
            if rank in of:
                raise ValueError(f"it is a second dump of rank {rank}")
            of[rank] = dump_of(rank, _content(path))
        except ValueError as error:
            unreadable[path.name] = str(error)
        except OSError as error:
            unreadable[path.name] = error.strerror or "it can't be read"
    return Dumps(of, unreadable)


def dump_of(rank: int, content: object) -> Dump:
    """The dump of a rank, of the value that its file holds. Raises ValueError."""
    if not isinstance(content, dict) or not isinstance(content.get("pg_config"), dict):
        raise ValueError("it is no dump of a flight recorder")
    groups = {}
    members = 0
    for name, config in _by_name(content["pg_config"]).items():
        ranks = _ranks(config.get("ranks"), _MOST_MEMBERS - members)
        groups[name] = ranks, _text(config.get("desc"))
        members += 1 + len(ranks)
    entries = _listed(content.get("entries"))[-_MOST_ENTRIES:]
    records = [record for record in map(_record, entries) if record is not None]
    ordered = tuple(sorted(records, key=attrgetter("id")))
    numbers = _by_name(content.get("pg_status"))
    names = _names(numbers, groups, {record.local: record.group for record in records})
    return Dump(
        rank,
        {record.group: ((), record.words) for record in reversed(records)} | groups,
        {
            names[local]: (
                _whole(each.get("last_enqueued_collective"), -1),
                _whole(each.get("last_completed_collective"), -1),
            )
            for local, each in numbers.items()
            if local in names
        },
        ordered,
        names.keys() >= numbers.keys(),
        bool(ordered) and all(record.id == at for at, record in enumerate(ordered)),
        any(record.is_finished for record in ordered),
    )


def _content(path: Path) -> object:
    if not path.is_file():
        raise ValueError("it is no file")
    with path.open("rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if not data:
        raise ValueError("it is empty")
    if len(data) > _MOST_BYTES:
        raise ValueError(f"it is larger than {_MOST_BYTES >> 20} MiB")
    if not data.lstrip(b" \t\r\n").startswith(b"{"):
        return read_plain_pickle(data)
    if sum(map(data.count, (b"[", b"{", b","))) > 2 * _MOST_BRACKETS:
        raise ValueError("it holds more than can be read")
    try:
        return json.loads(data.decode("utf-8", "replace"))
    except RecursionError:
        raise ValueError("it is JSON nested too deeply") from None
    except ValueError:
        raise ValueError("it is damaged JSON, or ends too early") from None


def _record(entry: Any) -> Record | None:
    """What an entry says; None if it is none."""
    if not isinstance(entry, dict):
        return None
    group = entry.get("process_group")
    name = entry.get("profiling_name")
    if not isinstance(group, list | tuple) or len(group) < 2 or not isinstance(name, str):
        return None
    name = name.rpartition(":")[2][:80]
    ends = _ENDS.fullmatch(name)
    state = entry.get("state")
    started, ended = (entry.get(f"time_discovered_{what}_ns") for what in ("started", "completed"))
    return Record(
        id=_whole(entry.get("record_id")),
        local=_text(entry.get("pg_id")),
        group=_text(group[0]),
        words=_text(group[1]),
        collective=_whole(entry.get("collective_seq_id")),
        transfer=_whole(entry.get("p2p_seq_id")),
        name=ends[1] if ends else name,
        ends=(int(ends[2]), int(ends[4])) if ends else None,
        is_transfer=ends is not None or entry.get("is_p2p") is True,
        is_finished=state == "completed" or bool(ended) or entry.get("retired") is True,
        has_started=state == "started" or bool(started),
        created=_whole(entry.get("time_created_ns")),
        shape=_shape(entry) if name in _SAME_SIZE else "",
    )


def _shape(entry: Mapping[str, Any]) -> str:
    """How many elements of what types an operation reads."""
    sizes, types = entry.get("input_sizes"), entry.get("input_dtypes")
    many = sum(
        prod(_whole(each) for each in _listed(size)[:_MOST_SIZES])
        for size in _listed(sizes)[:_MOST_TENSORS]
    )
    return f"{many} {'+'.join(sorted({_text(each) for each in _listed(types)[:_MOST_TENSORS]}))}"


def _names(
    numbers: Mapping[str, object], groups: Mapping[str, object], seen: Mapping[str, str]
) -> Mapping[str, str]:
    """The names of groups by the numbers that they have within a process.

    An entry has both. For the groups without one: both count up as groups are made, so that they
    are alike in order, if a dump has as many of them.
    """
    if len(numbers) == len(groups) and all(
        each.isdecimal() and len(each) < 10 for each in (*numbers, *groups)
    ):
        ordered = dict(zip(sorted(numbers, key=int), sorted(groups, key=int), strict=True))
        if all(ordered.get(local, name) == name for local, name in seen.items()):
            return {**ordered, **seen}
    return seen


def _ranks(value: object, most: int) -> tuple[int, ...]:
    """The ranks of a group, which are text in a dump: "[0, 1]". Raises ValueError."""
    if isinstance(value, str):
        found = islice(re.finditer("[0-9]+", value), most + 1)
        value = [int(each[0]) for each in found if len(each[0]) < 7]
    ranks = _listed(value)
    if len(ranks) > most:
        raise ValueError("its groups are larger than can be read")
    return tuple(dict.fromkeys(each for each in ranks if type(each) is int and each >= 0))


def _listed(value: object) -> Sequence[object]:
    return value if isinstance(value, list | tuple) else ()


def _by_name(value: object) -> dict[str, dict[Any, Any]]:
    """What a dict has as further dicts."""
    items = value.items() if isinstance(value, dict) else ()
    return {_text(name): each for name, each in items if isinstance(each, dict)}


def _whole(value: object, default: int = 0) -> int:
    """A number, which JSON dumps have as text in some places."""
    if isinstance(value, str) and re.fullmatch("-?[0-9]{1,18}", value):
        value = int(value)
    return value if type(value) is int and abs(value) < 1 << 63 else default


def _text(value: object) -> str:
    return str(value)[:120] if isinstance(value, str | int) else ""


# The operations in the dumps: what each rank posted, in order, and which send of one rank a receive
# of another one meets.


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
