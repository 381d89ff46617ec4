"""Name the ranks that are to blame where a job stands still, from the places of all its ranks.

A rank that waits is never to blame: it waits for a send, a sum or a handshake that another rank has
not come to. These waits lead from rank to rank, and end at the roots:

    rank 0   0B0  waits for 0RECV_GRAD0       rank 0 ─▶ rank 1 ─▶ rank 2: the root, which runs 2F0
    rank 1   1B0  waits for 1RECV_GRAD0
    rank 2   2F0  runs, and never returns

They follow the order in which the list was proved, so they make no circle. A list that was proved
can stand still only if a rank is gone, is silent, does not return from its work or does not make
the next call, or if a connection has lost a message.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from attrs import frozen

from schedir.diagnosis.waits_for import chain, sinks
from schedir.graph.compile import Graph, graph_of
from schedir.ir import Action, Columns, Schedule, Ties, tied_steps
from schedir.passes import forward_only

HANDSHAKE, SENDS = -2, -1
END = 1 << 24
RESULTS, CLOSE, GATHER = END + 1, END + 2, END + 3
"""Places in a call beside its list, in the order in which a rank comes to them: the handshake, the
sends of the call before, the end of the list, the results, and the end of all calls; and where all
ranks tell each other something instead."""
WORDS = {
    HANDSHAKE: "the handshake of the call",
    SENDS: "the sends of the call before",
    END: "the end of the call",
    RESULTS: "the results of the call",
    CLOSE: "close",
    GATHER: "what all ranks tell each other",
}

Phase = Literal["outside", "waiting", "running"]
State = Literal["alive", "gone", "ended", "silent"]


@frozen
class Position:
    """Where a rank stands.

    It has come to entry `index` of its list in a call; `call` counts the calls before that one. It
    is `running` the entry, `waiting` at it for other ranks, or `outside`: in the caller's code,
    before the call. The process is `alive`, `gone` without a word, `ended` by an error that says
    that it waited in vain, or `silent`: stopped, so that it does not answer. If its connection was
    `cut`, the rank's wait has failed although nobody is gone. `cause` says in words what has
    happened to the rank. `step` is the number of the training step, None outside of steps. A place
    that is `behind` was read some time ago, on another host: the rank is there or further on.

    >>> from schedir import Position
    >>> Position(call=3, index=7, phase="waiting").state
    'alive'
    """

    call: int
    index: int
    phase: Phase = "running"
    state: State = "alive"
    cause: str = ""
    cut: bool = False
    step: int | None = None
    behind: bool = False

    @property
    def reached(self) -> tuple[int, int]:
        """The call and the place in it, to be compared with others."""
        if self.phase == "outside" and self.index <= 0:
            return self.call, HANDSHAKE - 1
        return self.call, self.index


@frozen
class Root:
    """A rank that is to blame: its place, with the action, and in words what it does there.

    `action` is None outside of the list.

    >>> import schedir
    >>> schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    >>> at = [schedir.Position(0, 4, "waiting"), schedir.Position(0, 1, state="gone")]
    >>> (root,) = schedir.diagnose(schedule, at).roots
    >>> print(root)
    rank 1 #1 1F0: gone
    """

    rank: int
    call: int
    index: int | None
    action: Action | None
    cause: str
    step: int | None = None

    def __str__(self) -> str:
        step = "" if self.step is None else f" step {self.step}"
        place = "–" if self.action is None else f"#{self.index} {self.action}"
        return f"rank {self.rank}{step} {place}: {self.cause}"


@frozen
class Diagnosis:
    """The ranks that are to blame, and who waits for whom.

    `roots` is empty if nobody waits; it has several ranks if the places do not decide between them.
    `chain` is the longest way to a root, each rank waiting for the next. `waits_for` has for each
    rank that waits those that it waits for.

    >>> import schedir
    >>> schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    >>> at = [schedir.Position(0, 4, "waiting"), schedir.Position(0, 1)]
    >>> schedir.diagnose(schedule, at).chain
    (0, 1)
    """

    roots: tuple[Root, ...]
    chain: tuple[int, ...]
    waits_for: Mapping[int, frozenset[int]]


def diagnose(
    schedule: Schedule,
    positions: Sequence[Any] | Mapping[int, Any],
    *,
    ties: Ties = (),
    clips: bool = False,
    pipelines: int = 1,
    evaluating: Collection[int] = (),
) -> Diagnosis:
    """Name the ranks that are to blame where all ranks stand still at these positions.

    >>> import schedir
    >>> schedule = schedir.build("1f1b", ranks=3, microbatches=2)
    >>> at = [(0, 5, "waiting"), (0, 7, "waiting"), (0, 1, "running")]
    >>> found = schedir.diagnose(schedule, at)
    >>> [root.rank for root in found.roots], found.chain
    ([2], (0, 1, 2))

    `schedule` is the list that runs, `executor.schedule`. `positions` has one `Position` for each
    rank, or a tuple of its first fields. They are read after all ranks have come to rest. With
    several `pipelines` side by side, those of the first one's ranks come first. `ties` are the
    stages that share parameters; if the executor `clips`, all ranks wait for each other before
    their first OPTIM_STEP. The ranks that are `evaluating` run only the forwards of the list, and
    their places are those in that shorter one.

    Those that are gone are to blame before those that are silent, and these before those that run
    or are outside while others wait for them. If a wait's own message was sent, or its connection
    was cut, both of its ends are named.

    Raises ValueError if there is not one position for each rank.
    """
    size = schedule.ranks * pipelines
    listed = positions if isinstance(positions, Mapping) else dict(enumerate(positions))
    at = {
        rank: each if isinstance(each, Position) else Position(*each)
        for rank, each in listed.items()
    }
    if set(at) != set(range(size)):
        raise ValueError(f"diagnose needs the positions of ranks 0 to {size - 1}, not {sorted(at)}")
    waits = dict.fromkeys(at, _Waits(schedule, ties, clips, pipelines))
    if evaluating:
        waits |= dict.fromkeys(
            {*at} & {*evaluating}, _Waits(forward_only(schedule), ties, clips, pipelines)
        )
    edges: dict[int, set[int]] = {}
    links: dict[int, set[int]] = {}
    for rank, position in at.items():
        stands = position.phase == "waiting" or position.cut
        if not stands or position.state == "gone":
            continue
        for awaited, (call, index), counts_there in waits[rank].of(rank, position):
            reached = at[awaited].reached
            is_there = reached == (call, index) and (
                counts_there and at[awaited].phase == "waiting"
            )
            met = reached > (call, index) or is_there
            (links if met or position.cut else edges).setdefault(rank, set()).add(awaited)
    found = _roots(at, edges, links)
    graph = {rank: frozenset(edges.get(rank, set()) | links.get(rank, set())) for rank in at}
    return Diagnosis(
        tuple(_root(waits[rank].schedule, rank, at[rank], links) for rank in found),
        tuple(chain(graph, found)),
        {rank: awaited for rank, awaited in graph.items() if awaited},
    )


def _roots(
    at: Mapping[int, Position], edges: Mapping[int, set[int]], links: Mapping[int, set[int]]
) -> list[int]:
    """The ranks to blame, ascending."""
    gone = [rank for rank, position in at.items() if position.state == "gone"]
    if gone:
        return sorted(gone)
    awaited = set().union(*edges.values()) if edges else set()
    ends = {end for ends in sinks(edges) for end in ends} if edges else set()
    idle = {r for r in ends & awaited if at[r].phase != "waiting" or at[r].state == "silent"}
    silent = {rank for rank, position in at.items() if position.state == "silent"}
    if silent:
        held = {r for r in silent if edges.get(r)}  # stopped while it waited for another
        return sorted(silent | _ends_of(held, edges, idle - silent))
    cut = {rank for rank in links if at[rank].cut}
    if idle and not cut:
        return sorted(idle)
    lost = cut or {rank for rank in links if not edges.get(rank)}
    return sorted(lost.union(*(links[rank] for rank in lost)))


def _ends_of(
    ranks: Collection[int], edges: Mapping[int, set[int]], ends: Collection[int]
) -> set[int]:
    """Those of the ends to which the waits of some ranks lead."""
    reached = list(ranks)
    for rank in reached:
        reached += [other for other in edges.get(rank, ()) if other not in reached]
    return {rank for rank in reached if rank in ends}


def _root(schedule: Schedule, rank: int, position: Position, links: Mapping[int, set[int]]) -> Root:
    """What is said of a rank that is to blame."""
    listed = rank % schedule.ranks
    index, action = None, None
    inside = position.phase != "outside"
    if inside and 0 <= position.index < len(schedule.actions[listed]):
        index = position.index
        action = schedule.columns.action(schedule.columns.place(listed, index))
    cause = position.cause
    if not cause and position.state in ("gone", "silent"):
        cause = position.state
    elif not cause and position.cut and rank in links:
        cause = f"lost its connection to rank {min(links[rank])}"
    elif not cause and rank in links:
        cause = f"lost what rank {min(links[rank])} sent"
    elif not cause and any(rank in others for others in links.values()):
        cause = "what it sent, or its connection, was lost"
    elif not cause:
        cause = "others wait for it"
        if not inside:
            cause += " to make the call"
        elif action is None:
            cause += f" at {WORDS.get(position.index, 'its place')}"
    if position.behind and action is not None:
        cause += " (at this action or after it)"
    return Root(rank, position.call, index, action, cause, position.step)


_Awaited = tuple[int, tuple[int, int], bool]
"""A rank, the (call, index) that it has to pass, and whether to wait there is enough."""


class _Waits:
    """The entries of other ranks that a rank waits for at each place of a call."""

    def __init__(self, schedule: Schedule, ties: Ties, clips: bool, pipelines: int) -> None:
        self.schedule, self._pipelines = schedule, pipelines
        self._graph: Graph = graph_of(schedule)
        self._columns: Columns = schedule.columns
        self._clips = clips
        self._tied = {place: group for group in tied_steps(schedule, ties) for place in group}
        self._steps: list[int] = self._graph.steps.tolist()
        self._first_of_run: dict[int, int] = {}
        for step in self._steps:
            starts = step in self._columns.starts
            self._first_of_run[step] = step if starts else self._first_of_run.get(step - 1, step)
        self._collective = {place: met for met in self._graph.collectives for place in met}
        self._gathering = _gathering(self._graph)

    def of(self, rank: int, position: Position) -> Iterator[_Awaited]:
        """The entries of other ranks that a waiting rank needs."""
        ranks = self.schedule.ranks
        pipeline, own = divmod(rank, ranks)
        call, index = position.call, position.index
        if index == HANDSHAKE:
            parent = self._parent(own)
            if parent is not None:
                yield pipeline * ranks + parent, (call, HANDSHAKE), False
            elif pipeline:
                above = (pipeline & (pipeline - 1)) * ranks + own
                yield above, (call, HANDSHAKE), False
        elif index == SENDS:
            transfers = self._graph.transfers
            for peer in sorted({*transfers.target[transfers.source == own].tolist()}):
                yield pipeline * ranks + peer, (call - 1, END), True
        elif index in (END, RESULTS):
            ended = call - (index == END)
            for peer in self._everywhere(self.schedule.placement[-1]):
                if peer != rank:
                    yield peer, (ended, END), True
        elif index in (CLOSE, GATHER):
            for peer in self._everywhere(range(ranks)):
                if peer != rank:
                    yield peer, (call, index), True
        elif 0 <= index < len(self.schedule.actions[own]):
            for place in self._places(own, index):
                yield from self._of_place(rank, place, call)

    def _places(self, rank: int, index: int) -> range:
        first = self._columns.place(rank, index)
        return range(first, int(self._columns.last[first]) + 1)

    def _everywhere(self, ranks: Iterable[int]) -> list[int]:
        """These ranks of all pipelines."""
        size = self.schedule.ranks
        return [line * size + rank for line in range(self._pipelines) for rank in ranks]

    def _of_place(self, rank: int, place: int, call: int) -> Iterator[_Awaited]:
        graph, transfers = self._graph, self._graph.transfers
        pipeline = rank - rank % self.schedule.ranks
        arrival = int(graph.arrivals[place])
        if arrival >= 0:  # the input of compute
            sent = int(transfers.send[arrival])
            is_sent = sent >= 0
            source, index = self._columns.position(
                sent if is_sent else int(transfers.maker[arrival])
            )
            yield pipeline + source, (call, index), is_sent
        other = self._other_end(place)
        if other >= 0:
            peer, index = self._columns.position(other)
            yield pipeline + peer, (call, index), True
        if place not in self._steps:
            met: list[Collection[int]] = [
                self._collective.get(each, ()) for each in (place, self._gathering.get(place, -1))
            ]
        else:  # the updates that are listed one after the other are made ready together
            run = [each for each in self._steps if self._first_of_run[each] == place]
            met = [self._collective.get(graph.sums.get(each, -1), ()) for each in run]
            met += [[self._first_of_run[step] for step in self._tied.get(each, ())] for each in run]
            if self._clips:
                met.append({self._columns.rank[step]: step for step in self._steps[::-1]}.values())
        for places in met:
            for each in places:
                holder, index = self._columns.position(each)
                for peer in self._everywhere([holder]):
                    if peer != rank:
                        yield peer, (call, index), True

    def _other_end(self, place: int) -> int:
        """The place of the other end of a send or receive; -1 for none."""
        transfers = self._graph.transfers
        for mine, other in (
            (transfers.send, transfers.receive),
            (transfers.receive, transfers.send),
        ):
            (found,) = (mine == place).nonzero()
            if len(found):
                return int(other[found[0]])
        return -1

    def _parent(self, rank: int) -> int | None:
        """The rank that passes the announcement of a call on to this one; None for the first."""
        ranks, speaker = self.schedule.ranks, self.schedule.placement[0][0]
        turn = (rank - speaker) % ranks
        return (speaker + (turn & (turn - 1))) % ranks if turn else None


def _gathering(graph: Graph) -> dict[int, int]:
    """Where it is listed that the weights are gathered that the action at a place reads."""
    touched = sorted(
        (place, touch.use.does)
        for touch in graph.touches("gathered")
        for place in touch.places.tolist()
    )
    found: dict[int, int] = {}
    last: dict[int, int] = {}
    for place, does in touched:
        holding = int(graph.holding[place])
        if does == "make":
            last[holding] = place
        elif does == "read" and holding in last:
            found[place] = last[holding]
    return found
