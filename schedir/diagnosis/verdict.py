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

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import attrs
import numpy as np
from attrs import field, frozen

from schedir.diagnosis import Diagnosis, Root, Stand, chain, in_words, reached
from schedir.errors import LoadError, ParseError
from schedir.files import write_text
from schedir.graph.compile import Graph, graph_of
from schedir.ir import COMMUNICATION, Action, Ints, Schedule, Ties, dumps, flat, loads, tied_steps
from schedir.passes import forward_only

FILE = "schedir-positions.json"
"""The name of the file in which a job keeps where its ranks stood, for `schedir blame`."""

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
        before = self.phase == "outside" and self.index <= 0
        return self.call, HANDSHAKE - 1 if before else self.index


def _positions(found: Iterable[Any]) -> tuple[Position, ...]:
    return tuple(each if isinstance(each, Position) else Position(*each) for each in found)


@frozen
class Standing:
    """Where all ranks of a job stand, and the list that they run.

    `positions` are those of each rank: slice by slice, pipeline by pipeline; `ranks` has their
    numbers in the default process group. `ties` and `clips` are as in `diagnose`. The `slices` of a
    mesh wait for each other inside their stages, unknown to the list. `evaluating` are the turns of
    those in `ranks` that run only the list's forwards.
    """

    schedule: Schedule
    positions: tuple[Position, ...] = field(converter=_positions)
    ranks: Sequence[int]
    ties: Ties = ()
    clips: bool = False
    slices: int = 1
    evaluating: Collection[int] = ()

    def diagnosis(self) -> Diagnosis:
        """Who is to blame, by the numbers in the default process group."""
        at = dict(zip(self.ranks, self.positions, strict=True))
        forwards = forward_only(self.schedule) if self.evaluating else self.schedule
        # Of those that a rank waits for, the ones that have not come to it, and the ones that have:
        # what they sent is lost, or the connection to them.
        edges: dict[int, set[int]] = defaultdict(set)
        links: dict[int, set[int]] = defaultdict(set)
        actions: dict[int, Action | None] = {}
        waits_for, stands = {}, {}
        for turn, (rank, own) in enumerate(at.items()):
            schedule = forwards if turn in self.evaluating else self.schedule
            for others, needed, is_enough in _waits(self, schedule, turn):
                for other in {*others} - {turn}:
                    there = self.positions[other]
                    waits_there = is_enough and there.phase == "waiting"
                    met = own.cut or (there.reached, waits_there) > (needed, False)
                    (links if met else edges)[rank].add(self.ranks[other])
            entries = schedule.actions[turn % schedule.ranks]
            place, actions[rank] = "", None
            if own.phase != "outside" and 0 <= own.index < len(entries):
                place = f"#{own.index} {entries[own.index]}"
                actions[rank] = next(flat([entries[own.index]]))
            awaited = edges.get(rank, set()) | links.get(rank, set())
            if awaited:
                waits_for[rank] = frozenset(awaited)
            stands[rank] = Stand(_words(own, place, awaited), place)
        to_blame = _to_blame(at, edges, links)
        return Diagnosis(
            tuple(_root(rank, at[rank], actions[rank], links) for rank in sorted(to_blame)),
            chain(waits_for, to_blame),
            waits_for,
            len(to_blame) == 1,
            stands,
            len(at),
        )

    def save(self, folder: Path) -> None:
        """Write the file into a folder, which is made if it is not there."""
        folder.mkdir(parents=True, exist_ok=True)
        content = attrs.asdict(self, recurse=False) | {
            "schedule": dumps(self.schedule),
            "positions": [attrs.astuple(each) for each in self.positions],
        }
        write_text(folder / FILE, json.dumps(content))


def load_standing(folder: str) -> Standing | None:
    """Read the file from a folder; None if there is none. Raises LoadError if it is damaged."""
    path = Path(folder) / FILE
    if not path.is_file():
        return None
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        found["schedule"] = loads(found["schedule"], file=str(path))
        standing = Standing(**found)
        standing.diagnosis()
    except (OSError, ValueError, TypeError, LookupError, ArithmeticError, ParseError) as error:
        raise LoadError(f"{path}: not the positions of a job: {error}") from None
    return standing


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
    listed = positions if isinstance(positions, Mapping) else dict(enumerate(positions))
    ranks = range(schedule.ranks * pipelines)
    if set(listed) != set(ranks):
        said = f"ranks 0 to {len(ranks) - 1}, not {sorted(listed)}"
        raise ValueError(f"diagnose needs the positions of {said}")
    at = [listed[rank] for rank in ranks]
    return Standing(schedule, at, ranks, ties, clips, evaluating=evaluating).diagnosis()


def _to_blame(
    at: Mapping[int, Position], edges: Mapping[int, set[int]], links: Mapping[int, set[int]]
) -> set[int]:
    gone, silent = ({rank for rank in at if at[rank].state == each} for each in ("gone", "silent"))
    # A rank that does not wait is the end of a chain.
    idle = {rank for rank in set().union(*edges.values()) if at[rank].phase != "waiting"}
    cut = {rank for rank in links if at[rank].cut}
    if gone:
        return gone
    if silent:  # which may have been stopped while it waited for another
        return silent | (idle & reached(edges, silent).keys())
    if idle and not cut:
        return idle
    lost = cut or links.keys() - edges.keys()
    return lost.union(*(links[rank] for rank in lost))


def _root(rank: int, at: Position, action: Action | None, links: Mapping[int, set[int]]) -> Root:
    """What is said of a rank that is to blame."""
    if at.cause or at.state in ("gone", "silent"):
        cause = at.cause or at.state
    elif rank in links:
        lost = "its connection to rank {}" if at.cut else "what rank {} sent"
        cause = f"lost {lost.format(min(links[rank]))}"
    elif any(rank in others for others in links.values()):
        cause = "what it sent, or its connection, was lost"
    elif at.phase == "outside":
        cause = "others wait for it to make the call"
    else:
        cause = "others wait for it"
        if action is None:
            cause += f" at {WORDS.get(at.index, 'its place')}"
    if at.behind and action is not None:
        cause += " (at this action or after it)"
    return Root(rank, at.call, None if action is None else at.index, action, cause, at.step)


def _words(at: Position, place: str, others: Collection[int]) -> str:
    """Where a rank stands, in words."""
    step = "" if at.step is None else f" step {at.step}"
    behind = " at or after" if at.behind else " at"
    if at.state != "alive":
        return f"is {at.state},{behind}{step} {place or 'no place of its list'}"
    if at.phase == "outside":
        return f"makes no call: {at.call}{' or more' * at.behind} calls were made"
    if at.phase == "running":
        return f"runs{behind * at.behind}{step}{place and f' {place}'}"
    whom = others and f" for {in_words(others)}"
    return f"waits{behind}{step} {place or WORDS.get(at.index, 'its place')}{whom or ''}"


def _waits(
    standing: Standing, schedule: Schedule, turn: int
) -> Iterator[tuple[Collection[int], tuple[int, int], bool]]:
    """What a rank waits for, by the turns in the standing: the ranks that it waits for, perhaps
    itself among them, the (call, index) that each of these has to pass, and whether to wait there
    is enough. `schedule` is the list that the rank runs."""
    at = standing.positions[turn]
    if at.state == "gone" or not (at.phase == "waiting" or at.cut):
        return
    graph = graph_of(schedule)
    columns, transfers, size = graph.columns, graph.transfers, schedule.ranks
    key = _waits_in, repr(standing.ties), standing.clips
    waiting, awaited, together = schedule.once(key, partial(_waits_in, graph, standing))
    pipelines = len(standing.ranks) // standing.slices // size
    call, index = at.call, at.index
    line, own = divmod(turn, size)
    pipeline, begin = line % pipelines, turn - own
    # The ranks of all pipelines; from a rank on, every `size`-th is that rank's counterpart.
    every = range(begin - pipeline * size, begin + (pipelines - pipeline) * size)
    if index == HANDSHAKE:
        # A rank is told by the one whose number, counted from the first, lacks the last bit.
        speaker = schedule.placement[0][0]
        number = (own - speaker) % size
        told = begin + (speaker + (number & (number - 1))) % size
        if not number:
            told = every[own::size][pipeline & (pipeline - 1)]
        yield [told], (call, HANDSHAKE), False
    elif index == SENDS:
        peers = begin + transfers.target[transfers.source == own]
        yield peers.tolist(), (call - 1, END), True
    elif index in (END, RESULTS):
        ended = call - (index == END)
        for rank in schedule.placement[-1]:
            yield every[rank::size], (ended, END), True
    elif index in (CLOSE, GATHER):
        yield every, (call, index), True
    elif 0 <= index < len(schedule.actions[own]):
        place = columns.place(own, index)
        first, end = np.searchsorted(waiting, (place, columns.last[place] + 1))
        for place in awaited[first:end].tolist():
            # What no rank sends, of a list without communication, its maker has to pass.
            holder, there = columns.position(place)
            is_enough = columns.action(place).kind in COMMUNICATION
            yield [begin + holder], (call, there), is_enough
            for holder, there in map(columns.position, together.get(place, ())):
                yield every[holder::size], (call, there), True


def _waits_in(graph: Graph, standing: Standing) -> tuple[Ints, Ints, Mapping[int, Sequence[int]]]:
    """What a list's places wait for: the places that wait, ascending, of themselves and of what
    they need, the place that each waits for, and for a place those that have to be reached
    together."""
    columns, transfers, steps = graph.columns, graph.transfers, graph.steps
    places = np.arange(len(columns))
    first, other_end = places.copy(), places.copy()
    # Updates that are listed one after the other are made ready together, at the first one.
    run = steps - np.arange(len(steps)) + columns.rank[steps]
    first[steps] = steps[np.searchsorted(run, run)]
    send, receive = transfers.send[transfers.matched], transfers.receive[transfers.matched]
    other_end[send], other_end[receive] = receive, send
    groups = [[*group] for group in graph.collectives]
    groups += [first[[*turn]].tolist() for turn in tied_steps(graph.schedule, standing.ties)]
    if standing.clips:
        _, begins = np.unique(columns.rank[steps], return_index=True)
        groups.append(steps[begins].tolist())
    together: dict[int, list[int]] = defaultdict(list)
    for group in groups:
        for place in group:
            together[place] += group
    user, made = graph.needs
    waiting, awaited = np.append(places, first[user]), np.append(places, made)
    order = np.argsort(waiting, kind="stable")
    return waiting[order], other_end[awaited[order]], together
