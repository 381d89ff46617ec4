"""Name the root of a hang: the ranks that wait for nobody while others wait for them.

A job of schedir keeps where its ranks stand (`verdict`); the dumps of torch's flight recorder are
those of any job that uses torch.distributed:

    found = schedir.diagnosis.blame.blame(schedir.diagnosis.flight_recorder.read_dumps("dumps"))
    [root.rank for root in found.roots]

Both end in a `Diagnosis`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from attrs import field, frozen

from schedir.ir import Action

if TYPE_CHECKING:
    from schedir.diagnosis.flight_recorder import Operation


@frozen
class Root:
    """A rank that is to blame: its place, with the action, and in words what it does there.

    `action` is None outside of the list. The dumps of a flight recorder tell neither `call` nor
    `step`, and the action only beside a schedule.

    >>> import schedir
    >>> schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    >>> at = [schedir.Position(0, 4, "waiting"), schedir.Position(0, 1, state="gone")]
    >>> (root,) = schedir.diagnose(schedule, at).roots
    >>> print(root)
    rank 1 #1 1F0: gone
    """

    rank: int
    call: int | None
    index: int | None
    action: Action | None
    cause: str
    step: int | None = None

    @property
    def place(self) -> str:
        """The action with its index: `#1 1F0`; empty outside of the list."""
        return "" if self.action is None else f"#{self.index} {self.action}"

    def __str__(self) -> str:
        step = "" if self.step is None else f" step {self.step}"
        place = self.place or "–" * (self.call is not None)
        return f"rank {self.rank}{step}{place and f' {place}'}: {self.cause}"


@frozen
class Stand:
    """Where a rank stands: in words, the `action` of its list (`#1 1F0`) if that is known, and what
    a flight recorder has noted."""

    words: str
    action: str = ""
    operation: Operation | None = None


@frozen
class Diagnosis:
    """The ranks that are to blame, and who waits for whom.

    `roots` is empty if nobody waits; it has several ranks if the places do not decide between them.
    `chain` is the longest way to a root, each rank waiting for the next. `waits_for` has for each
    rank that waits those that it waits for. `is_sure` is False where one of several roots may be
    innocent. `stands` says where ranks stand, all or those of which something is known, of a job of
    `ranks`.

    Dumps alone have the other fields: what two simple rules over collectives would name, those that
    have left unfinished what a peer has finished, and those that have not posted what a peer waits
    for; the ranks without a dump, of a job that has dumps; and why files could not be read.

    >>> import schedir
    >>> schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    >>> at = [schedir.Position(0, 4, "waiting"), schedir.Position(0, 1)]
    >>> schedir.diagnose(schedule, at).chain
    (0, 1)
    """

    roots: tuple[Root, ...]
    chain: tuple[int, ...]
    waits_for: Mapping[int, frozenset[int]]
    is_sure: bool
    stands: Mapping[int, Stand]
    ranks: int
    by_rules: tuple[int, ...] = ()
    missing_dumps: tuple[int, ...] | None = None
    unreadable: Mapping[str, str] = field(factory=dict)


def reached(edges: Mapping[int, Iterable[int]], starts: Iterable[int]) -> dict[int, int | None]:
    """The ranks to which edges lead from the starts, the nearest first, each with the one before it
    on the shortest way."""
    found: dict[int, int | None] = dict.fromkeys(sorted(starts))
    queue = [*found]
    for rank in queue:  # grows
        for other in sorted(edges.get(rank, ())):
            if other not in found:
                found[other] = rank
                queue.append(other)
    return found


def waiting_for(edges: Mapping[int, Iterable[int]]) -> dict[int, list[int]]:
    """For each rank that is waited for, those that wait for it, ascending."""
    found = defaultdict(list)
    for rank in sorted(edges):
        for other in edges[rank]:
            found[other].append(rank)
    return dict(found)


def sinks(edges: Mapping[int, Iterable[int]]) -> list[tuple[int, ...]]:
    """The sets of ranks that everybody else waits for, and that wait for nobody outside the set.

    `edges[rank]` are the ranks that it waits for. A set of one rank is the end of a chain. In a set
    of several, each waits for all others, over some chain: a circle.
    """
    waiting = waiting_for(edges)
    left = {*edges, *waiting}  # without those that lead to a sink that is found
    found = []
    while left:
        rank = min(left)
        back = reached(waiting, [rank])
        # Those that do not wait for a rank in their turn are nearer to a sink.
        while further := [each for each in reached(edges, [rank]) if each not in back]:
            rank = further[-1]
            back = reached(waiting, [rank])
        found.append(tuple(sorted(reached(edges, [rank]))))
        left -= back.keys()
    return found


def chain(edges: Mapping[int, Iterable[int]], ends: Iterable[int]) -> tuple[int, ...]:
    """The longest of the shortest ways to one of the `ends`: each rank waits for the next one."""
    after = reached(waiting_for(edges), ends)
    way = [*after][-1:]
    while way and (rank := after[way[-1]]) is not None:
        way.append(rank)
    return tuple(way)


def in_words(ranks: Iterable[int]) -> str:
    """Ranks in words, runs of them shortened, at most eight: `ranks 0–3, 8`."""
    runs: list[list[int]] = []
    listed = sorted(ranks)
    for rank in listed:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = [f"{a}" if a == b else f"{a}, {b}" if a + 1 == b else f"{a}–{b}" for a, b in runs]
    return f"rank{'s' * (len(listed) > 1)} {', '.join(words[:8])}{' …' if len(words) > 8 else ''}"
