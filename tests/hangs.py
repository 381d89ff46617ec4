"""Random jobs that hang, and what torch's flight recorder would dump of them.

It knows nothing of `schedir.diagnosis`: a job is one list of events in a global order. Each rank
carries out those that it takes part in, one after the other. A host may post some operations ahead;
each starts once those before it on the same rank have ended.
"""

from __future__ import annotations

import json
import pickle
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

COLLECTIVES = ("all_reduce", "_all_gather_base", "_reduce_scatter_base", "all_to_all")
FAULTS = ("stop", "kernel", "unending", "skip", "differ")


@frozen
class Event:
    """What some ranks do together: a collective, a transfer, or batches that exchange."""

    kind: str
    group: int
    ranks: tuple[int, ...]
    name: str = ""
    size: int = 0
    number: int = 0


@define(eq=False)
class Posted:
    """An event as one rank posted it."""

    event: Event
    name: str
    size: int
    time: int
    collective: int
    transfer: int
    started: bool = False
    ended: int | None = None


@frozen
class Fault:
    rank: int
    event: int
    kind: str


@define
class Job:
    """A job: its groups (the first has all ranks), its events, its faults."""

    ranks: int
    groups: list[tuple[int, ...]]
    events: list[Event]
    faults: list[Fault]
    ahead: int
    done: dict[int, list[Posted]] = field(factory=lambda: defaultdict(list))
    at: dict[int, int] = field(factory=dict)
    effective: set[int] = field(factory=set)
    clock: int = 0

    def run(self, order: random.Random) -> None:
        """Go on until nothing changes any more."""
        lists = {r: [event for event in self.events if r in event.ranks] for r in range(self.ranks)}
        faults = {(fault.rank, fault.event): fault.kind for fault in self.faults}
        counts: dict[tuple[int, int, str], int] = defaultdict(int)
        self.at = dict.fromkeys(lists, 0)
        changed = True
        while changed:
            changed = False
            for rank in order.sample(range(self.ranks), self.ranks):
                self.clock += 1
                while self._posts(rank, lists[rank], faults, counts):
                    changed = True
            for rank in range(self.ranks):
                changed |= self._ends(rank, faults)

    def _left(self, rank: int) -> list[Posted]:
        return [each for each in self.done[rank] if each.ended is None]

    def _posts(self, rank: int, of: list[Event], faults: Any, counts: Any) -> bool:
        if self.at[rank] == len(of) or len(self._left(rank)) >= self.ahead:
            return False
        event = of[self.at[rank]]
        kind = faults.get((rank, event.number))
        if kind == "stop":
            self.effective.add(rank)
            return False
        self.at[rank] += 1
        if kind == "skip" and event.kind in ("all", "root"):
            self.effective.add(rank)
            return True
        is_collective = event.kind in ("all", "root")
        counts[rank, event.group, "c" if is_collective else "t"] += 1
        name, size = event.name, event.size
        if kind == "differ" and is_collective:
            self.effective.add(rank)
            name, size = ("all_gather", size) if name == "all_to_all" else (name, size + 1)
        self.clock += 1
        numbers = [counts[rank, event.group, each] for each in "ct"]
        self.done[rank].append(Posted(event, name, size, self.clock, *numbers))
        return True

    def _ends(self, rank: int, faults: Any) -> bool:
        """Whether the first unfinished operation of a rank ends now, or starts."""
        head = next(iter(self._left(rank)), None)
        if head is None:
            return False
        event = head.event
        kind = faults.get((rank, event.number))
        if kind == "kernel":
            self.effective.add(rank)
            return False
        started, head.started = head.started, True
        if not self._is_met(rank, head):
            return not started
        if kind == "unending":
            self.effective.add(rank)
            return not started
        self.clock += 1
        head.ended = self.clock
        return True

    def _is_met(self, rank: int, own: Posted) -> bool:
        """Whether all that an operation waits for are there."""
        event = own.event
        if event.kind in ("all", "root"):
            needed = set(self.groups[event.group])
            if event.kind == "root":
                needed = set() if rank == event.ranks[0] else {event.ranks[0]}
            same = [
                posted
                for other in needed
                for posted in self.done[other]
                if posted.event.kind in ("all", "root")
                and posted.event.group == event.group
                and posted.collective == own.collective
                and posted.started
            ]
            alike = {(each.name, each.size) for each in (own, *same)}
            return len(same) == len(needed) and len(alike) == 1
        return all(
            any(each.event is event and each.started for each in self.done[other])
            for other in event.ranks
        )


def random_job(seed: int, faults: tuple[str, ...] = ("stop",), events: int = 30) -> Job:
    """A job of a seed, which has run until it hung, or to its end."""
    draw = random.Random(seed)
    ranks = draw.randint(2, 8)
    groups = [tuple(range(ranks))]
    for _ in range(draw.randint(1, 5)):
        group = tuple(sorted(draw.sample(range(ranks), draw.randint(2, ranks))))
        if group not in groups:
            groups.append(group)
    single: list[tuple[str, ...]] = [("all",), ("all", "root"), ("pair",), ("all", "pair")]
    kinds = draw.choice([*single, ("batch",), ("all", "root", "pair", "batch")])
    listed = []
    for number in range(draw.randint(4, events)):
        kind = draw.choice(kinds)
        at = draw.randrange(len(groups))
        if kind in ("all", "root"):
            members = list(groups[at])
            if kind == "root":
                draw.shuffle(members)
            name = "broadcast" if kind == "root" else draw.choice(COLLECTIVES)
            listed.append(Event(kind, at, tuple(members), name, draw.choice((4, 8)), number))
        else:
            pair = tuple(draw.sample(groups[at], 2))
            listed.append(Event(kind, at, pair, "", 4, number))
    job = Job(ranks, groups, listed, [], draw.choice((1, 1, 2, 4)))
    for kind in faults:
        some = [
            (event, rank)
            for event in listed
            for rank in event.ranks
            if (kind not in ("skip", "differ", "unending") or event.kind == "all")
            and (kind != "kernel" or event.kind != "root")
            and all(fault.rank != rank and fault.event != event.number for fault in job.faults)
        ]
        if some:
            event, rank = draw.choice(some)
            job.faults.append(Fault(rank, event.number, kind))
    job.run(draw)
    return job


@frozen
class Style:
    """How a job's dumps are written."""

    ring: int = 2000
    active: bool = False
    clocks: bool = False
    whole: bool = True
    """Whether a batch has an entry of its own."""
    hashed: bool = False
    unlike: bool = False
    """Whether transfers are written in ranks of the job."""
    json: bool = False
    lost: tuple[int, ...] = ()


def dumps_of(job: Job, style: Style) -> dict[int, dict[str, Any]]:
    return {rank: _dump(job, style, rank) for rank in range(job.ranks) if rank not in style.lost}


def write(job: Job, style: Style, folder: Path) -> None:
    for rank, dump in dumps_of(job, style).items():
        path = folder / f"trace_{rank}"
        path.write_bytes(
            json.dumps(dump).encode() if style.json else pickle.dumps(dump, rank % 4 + 2)
        )


def name_of(job: Job, style: Style, group: int) -> str:
    return f"{hash((group, 7)) & 0xFFFFFF:x}x" if style.hashed else str(3 * group)


def _dump(job: Job, style: Style, rank: int) -> dict[str, Any]:
    own = [number for number, group in enumerate(job.groups) if rank in group]
    entries: list[dict[str, Any]] = []
    status: dict[str, dict[str, int]] = {}
    for each in job.done[rank]:
        group = each.event.group
        local = own.index(group)
        is_collective = each.event.kind in ("all", "root")
        sequence = each.collective if is_collective else each.transfer
        reached = {f"last_{what}_collective": -1 for what in ("enqueued", "started", "completed")}
        of = status.setdefault(str(local), reached)
        of["last_enqueued_collective"] = sequence
        if each.ended is not None:
            of["last_completed_collective"] = sequence
        made = [
            _entry(job, style, rank, local, each, name, len(entries) + at)
            for at, name in enumerate(_names(job, style, rank, each))
        ]
        if each.event.kind == "batch":
            for entry in made[: len(made) - style.whole]:
                entry.update(state="scheduled", time_discovered_completed_ns=None, retired=False)
                entry["time_discovered_started_ns"] = None
        entries += made
    entries = entries[-style.ring :]
    if style.active:
        entries = [entry for entry in entries if entry["state"] != "completed"]
    groups = {}
    for number in own:
        name = name_of(job, style, number)
        ranks = str(list(job.groups[number]))
        groups[name] = {"name": name, "desc": f"group{number}", "ranks": ranks}
    return {"version": "2.10", "pg_config": groups, "pg_status": status, "entries": entries}


def _names(job: Job, style: Style, rank: int, each: Posted) -> list[str]:
    event = each.event
    if event.kind in ("all", "root"):
        return [f"nccl:{each.name}"]
    source, target = event.ranks
    if not style.unlike:
        members = job.groups[event.group]
        source, target = members.index(source), members.index(target)
    send, receive = f"nccl:send {source}->{target}", f"nccl:recv {target}<-{source}"
    if event.kind == "pair":
        return [send if rank == event.ranks[0] else receive]
    back = [f"nccl:recv {source}<-{target}", f"nccl:send {target}->{source}"]
    ends = [send, back[0]] if rank == event.ranks[0] else [receive, back[1]]
    return ends + ["nccl:coalesced"] * style.whole


def _entry(
    job: Job, style: Style, rank: int, local: int, each: Posted, name: str, record: int
) -> dict[str, Any]:
    ended = each.ended is not None
    started = style.clocks and each.started
    state = "completed" if ended else "started" if started else "scheduled"
    return {
        "record_id": record,
        "pg_id": local,
        "process_group": (name_of(job, style, each.event.group), f"group{each.event.group}"),
        "collective_seq_id": each.collective,
        "p2p_seq_id": each.transfer,
        "op_id": record,
        "profiling_name": name,
        "time_created_ns": 1_700_000_000_000_000_000 + each.time * 1_000_000 + rank * 1000,
        "input_sizes": [[each.size, 2]],
        "input_dtypes": ["Float"],
        "output_sizes": [[each.size, 2]],
        "output_dtypes": ["Float"],
        "state": state,
        "time_discovered_started_ns": 1 if started else None,
        "time_discovered_completed_ns": 2 if ended else None,
        "retired": ended,
        "timeout_ms": 600000,
        "is_p2p": each.event.kind in ("pair", "batch"),
    }
