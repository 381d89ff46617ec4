"""What may end a fault: changes of a list, made from the places that a finding names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import reduce
from itertools import chain, islice, zip_longest
from typing import TypeAlias

import attrs
import numpy as np

from schedir.checker import rules
from schedir.checker.diagnostics import (
    Add,
    AsSent,
    Batch,
    Change,
    Diagnostic,
    Edit,
    LeaveOut,
    Location,
    Move,
    Remove,
    Reorder,
    Several,
    Side,
    Verb,
    Write,
)
from schedir.checker.structure import WAYS
from schedir.graph.compile import Graph, Transfers, graph_of, pairs_of
from schedir.graph.paths import previous_of_queue
from schedir.ir import (
    BACKWARDS,
    COMMUNICATION,
    COMPLETES_GRADIENTS,
    COMPUTE,
    GATHERS,
    GROUPS,
    HOMES,
    KINDS,
    READS_WEIGHTS,
    RECEIVES,
    RELEASES,
    SENDS,
    STEPS,
    SUMS,
    VALUES,
    Action,
    Columns,
    Ints,
    Kind,
    Schedule,
    Sources,
    columns_of,
)
from schedir.ir.kinds import STAGE_WIDE, uses_of
from schedir.passes import batch_communication, strip_communication


def changed(schedule: Schedule, change: Change) -> Schedule:
    """The schedule after a change."""
    if isinstance(change, LeaveOut):
        return strip_communication(schedule)
    if isinstance(change, Batch):
        return batch_communication(schedule)
    if isinstance(change, Several):
        return reduce(changed, change.changes, schedule)
    columns, new = schedule.columns, len(schedule.columns)
    rank = change.target if isinstance(change, AsSent) else change.rank
    first = int(np.searchsorted(columns.heads, columns.starts[rank]))
    # By place: where it goes among the entries of all ranks, nowhere for nan, and the place whose
    # action stands there then. A new action has the place after all others.
    goes, what, like = np.append(columns.entry, np.nan), np.arange(new + 1), -1
    if isinstance(change, AsSent):
        # What runs together are slots: the receives change places, and nothing else does.
        transfers = graph_of(schedule).transfers
        channel = (transfers.source == change.source) & (transfers.target == rank)
        receives = transfers.receive[transfers.beside(int(channel.argmax()))]
        what[np.sort(receives)] = receives
    elif isinstance(change, Reorder):
        moved = [goes == first + index for index in change.indices]
        for index, own in zip(sorted(change.indices), moved, strict=True):
            goes[own] = first + index
    elif isinstance(change, Move | Add):
        own = goes == first + change.index if isinstance(change, Move) else new
        goes[own] = first + _gap(change)
    else:  # one of the parts of an entry
        wanted = change.action if isinstance(change, Remove) else change.old
        parts = np.flatnonzero(goes == first + change.index).tolist()
        like = next(place for place in parts if columns.action(place) == wanted)
        if isinstance(change, Write):
            what[like] = new
        else:
            goes[like] = np.nan
    row = columns_of([[change.action if isinstance(change, Edit) else columns.action(0)]])
    order = goes.argsort(kind="stable")[: np.count_nonzero(~np.isnan(goes))]
    starts = columns.starts + (len(order) - new) * (np.arange(columns.ranks + 1) > rank)
    kind, stage, microbatch, version = (
        np.append(getattr(columns, name), getattr(row, name))[what]
        for name in ("kind", "stage", "microbatch", "version")
    )
    joined = np.append(columns.joined, False)
    listed = Columns(columns.starts, kind, stage, microbatch, version, joined).take(order, starts)
    sources = schedule.sources
    if sources is not None:
        lines = np.append(sources.line_of, -1 if like < 0 else sources.line_of[like])
        sources = Sources(sources.lines, lines[what][order])
    return attrs.evolve(schedule, actions=listed, sources=sources)


def _gap(change: Move | Add) -> float:
    """Between which entries of its rank something goes: 1.5 between #1 and #2."""
    return (change.target or 0) - 0.5 + (change.side == "after")


def several(edits: Iterable[Edit]) -> Edit | Several:
    """The changes, ordered so that no change renumbers an entry that a later one names."""

    def position(edit: Edit) -> tuple[int, float]:
        return edit.rank, -(_gap(edit) if isinstance(edit, Add) else edit.index)

    ordered = sorted(edits, key=position)
    return ordered[0] if len(ordered) == 1 else Several(tuple(ordered))


def removal(schedule: Schedule, place: int) -> Remove:
    """The change that takes out the action at a place."""
    rank, index = schedule.columns.position(place)
    return Remove(schedule.columns.action(place), rank, index)


def rewriting(schedule: Schedule, place: int, action: Action) -> Write:
    """The change that writes an action in place of the one at a place."""
    rank, index = schedule.columns.position(place)
    return Write(action, schedule.columns.action(place), rank, index)


def beside(schedule: Schedule, action: Action, side: Side, place: int) -> Add:
    """The change that adds an action next to a place."""
    rank, index = schedule.columns.position(place)
    return Add(action, rank, side, index)


def moved_beside(schedule: Schedule, place: int, side: Side, target: int) -> Change:
    """The change that moves the action at a place next to another place of its rank, without the
    other parts of its entry."""
    columns = schedule.columns
    if columns.shared[place]:
        out = removal(schedule, place)
        return several((out, beside(schedule, out.action, side, target)))
    rank, index = columns.position(place)
    return Move(rank, index, side, columns.position(target)[1])


@attrs.frozen
class Slide:
    """The moves of an entry to one side of each of the `targets`, nearest first."""

    rank: int
    index: int
    side: Side
    targets: range
    verb: Verb = "move"

    def move(self, target: int) -> Move:
        """The move to one of the targets."""
        return Move(self.rank, self.index, self.side, target, self.verb)


def slide(schedule: Schedule, place: int, side: Side, target: int, limit: int = -1) -> Slide:
    """The moves of the entry at `place` to before or after `target`, or further that way, up to
    `limit` if that is on the rank."""
    columns, step = schedule.columns, 1 if side == "after" else -1
    rank, index = columns.position(place)
    start, end = columns.starts[[rank, rank + 1]].tolist()
    bound = columns.position(end - 1)[1] if side == "after" else 0
    nearest = bound + step
    if start <= target < end:
        ends = columns.position(target)[1], index + step
        nearest = max(ends) if side == "after" else min(ends)
    if start <= limit < end:
        bound = columns.position(limit)[1] - step
    posted = KINDS[columns.kind[place]] in COMMUNICATION | GROUPS
    return Slide(
        rank, index, side, range(nearest, bound + step, step), "post" if posted else "move"
    )


def windows(graph: Graph) -> dict[Side, Ints]:
    """By side and place, the place up to which an entry can move as far as its channel or group and
    its data go: no send passes its maker, no receive its user. A number that is no place for no
    limit. Expects matched communication."""
    transfers, size = graph.transfers, len(graph.columns)
    # One more, for what a list without communication lacks.
    before = np.append(previous_of_queue(graph, "edge"), -1)
    after = np.full(size + 1, size)
    known = np.flatnonzero(before >= 0)
    after[before[known]] = known
    before[transfers.send] = np.maximum(before[transfers.send], transfers.maker)
    after[transfers.receive] = np.minimum(after[transfers.receive], transfers.user)
    return {"before": before, "after": after}


def anywhere(schedule: Schedule, places: Iterable[int]) -> Iterator[Move]:
    """The moves of any of the places within its list, likely ones first."""
    sides: tuple[tuple[Side, int], ...] = ("after", 1), ("before", -1)
    return in_turn(slide(schedule, p, side, p + step) for p in places for side, step in sides)


def in_turn(slides: Iterable[Slide]) -> Iterator[Move]:
    """The moves of all slides, likely ones first: the nearest of each, then the furthest of each
    (which puts a send right after its maker, for example), then the others, nearer ones first."""
    slides = [slide for slide in slides if slide.targets]
    yield from (slide.move(slide.targets[0]) for slide in slides)
    yield from (slide.move(slide.targets[-1]) for slide in slides if len(slide.targets) > 1)
    rows = zip_longest(*(map(slide.move, slide.targets[1:-1]) for slide in slides))
    yield from (move for move in chain.from_iterable(rows) if move is not None)


# A text that lists more actions than these is no help.
_MOST_LISTED = 8


def reorder(schedule: Schedule, places: Ints) -> Iterator[Reorder]:
    """The change that puts places of a rank into another order. Nothing if there are too many for a
    help line, or if some are parts of an entry."""
    columns = schedule.columns
    if len(places) <= _MOST_LISTED and not columns.shared[places].any():
        rank, _ = columns.position(int(places[0]))
        yield Reorder(rank, tuple(columns.position(place)[1] for place in places.tolist()))


# Where an action belongs: after what it uses, before what uses it, in the order of its kind.


def _uses(kind: Kind) -> Iterator[tuple[Kind, int]]:
    for use in kind.meaning.uses:
        value = VALUES[use.value]
        if use.does != "make" and value.per == "microbatch":
            made = (use.value, 0), *((value.link,) if value.link else ())
            for name, further in made:
                yield from ((maker, further) for maker in Kind if uses_of(maker, "make", name))


_USES = {kind: frozenset(_uses(kind)) for kind in Kind}
"""By kind, the kinds on the same rank that make its inputs, and how many stages further on each
is."""
_USERS = {
    used: [(kind, -further) for kind, uses in _USES.items() for by, further in uses if by is used]
    for used in Kind
}


def additions(
    schedule: Schedule,
    action: Action,
    rank: int,
    least: int = 0,
    most: int | None = None,
) -> Iterator[Add]:
    """The changes that add a missing action to the list of a rank, between the places `least` and
    `most` if possible: first at its most likely place, then everywhere else between its inputs and
    its use."""
    start, end = schedule.columns.starts[[rank, rank + 1]].tolist()
    uses, users = _around(schedule, action, rank)
    first = max([start, least, *(1 + place for place in uses)])
    last = min([end if most is None else most, *users])
    likely = first if action.kind in SENDS else last
    if action.kind not in COMMUNICATION:
        own = BACKWARDS if action.kind in BACKWARDS else (action.kind,)
        listed = pairs_of(schedule).listed
        microbatch = action.microbatch or 0
        before, after = (
            [p for kind in own if start <= (p := listed(kind, action.stage, other)) < end]
            for other in (microbatch - 1, microbatch + 1)
        )
        beside = [1 + max(before)] if before else after or [last if last < end else first]
        likely = max(first, min(*beside, last))
    for place in (likely, *range(last, first - 1, -1)):
        yield at_gap(schedule, action, rank, place, ahead=place == last)


def _around(schedule: Schedule, action: Action, rank: int) -> tuple[list[int], list[int]]:
    """The places on a rank that make an action's inputs, and the places there that use its
    result."""
    listed = pairs_of(schedule).listed
    start, end = schedule.columns.starts[[rank, rank + 1]].tolist()
    uses, users = (
        [listed(kind, action.stage + further, action.microbatch or 0) for kind, further in of]
        for of in (_USES[action.kind], _USERS[action.kind])
    )
    return [p for p in uses if start <= p < end], [p for p in users if start <= p < end]


def _is_misplaced(schedule: Schedule, place: int) -> bool:
    """True if the action at a place comes before its inputs on its rank, or after its use."""
    columns = schedule.columns
    uses, users = _around(schedule, columns.action(place), int(columns.rank[place]))
    return max(uses, default=-1) > place or min(users, default=place) < place


def at_gap(schedule: Schedule, action: Action, rank: int, place: int, *, ahead: bool) -> Add:
    """The change that adds an action before a place: ahead of the entry there, or after the entry
    before it."""
    columns = schedule.columns
    start, end = int(columns.starts[rank]), int(columns.starts[rank + 1])
    if start == end:
        return Add(action, rank, "before", None)
    if place == start or (ahead and place < end):
        return beside(schedule, action, "before", place)
    return beside(schedule, action, "after", place - 1)


def last_of_stage(columns: Columns, stage: int, rank: int, *kinds: Kind) -> int:
    """The last place of these kinds of a stage on a rank, -1 for none."""
    own = slice(columns.starts[rank], columns.starts[rank + 1])
    found = (columns.is_kind(*kinds)[own] & (columns.stage[own] == stage)).nonzero()[0]
    return int(columns.starts[rank] + found[-1]) if len(found) else -1


def after_stage(schedule: Schedule, action: Action, rank: int, *kinds: Kind) -> Add:
    """The change that adds an action after the last of these kinds of its stage on a rank, or at
    the end of the list."""
    last = last_of_stage(schedule.columns, action.stage, rank, *kinds)
    place = last + 1 if last >= 0 else int(schedule.columns.starts[rank + 1])
    return at_gap(schedule, action, rank, place, ahead=False)


# What may end a fault: what it lacks is added, what is one too many goes, what stands on a wrong
# rank is taken to the right one, and what is late moves.

Repairs: TypeAlias = tuple[Change | None, Iterable[Change]]
"""The change that ends a fault whatever else is wrong, None if none is known, and the changes that
may end it, likely ones first."""

(_STEP,), (_SUM,), (_HOME,) = STEPS, SUMS, HOMES
# What a stage has on a rank, but for what it computes first: the last of it is a step.
_ENDS_WITH_A_STEP = (*COMPLETES_GRADIENTS, _SUM, _STEP)


def repairs(schedule: Schedule, finding: Diagnostic) -> Repairs:
    """What may end a fault, made from its locations."""
    rule, facts = finding.rule, finding.facts
    places = [_place(schedule.columns, at) for at in finding.locations if at.index is not None]
    if rule in (rules.UNKNOWN_STAGE, rules.UNKNOWN_MICROBATCH):
        return removal(schedule, places[0]), ()
    if rule in (rules.DUPLICATE_ACTION, rules.MIXED_BACKWARD):
        return removal(schedule, _spare(schedule, *places)), ()
    if rule in (rules.WRONG_RANK, rules.SPLIT_MICROBATCH, rules.NO_PEER):
        return None if "placed" in facts else _at_home(schedule, places), ()
    if rule is rules.MISSING_ACTION:
        return next(additions(schedule, finding.action, finding.rank)), ()
    if rule is rules.SHARDED_ON_SEVERAL:
        listed = schedule.columns.where(*GATHERS, *RELEASES)
        own = listed[schedule.columns.stage[listed] == finding.action.stage].tolist()
        return _removals(schedule, own) if len(own) <= _MOST_LISTED else None, ()
    if rule in (
        rules.VERSION_NOT_AVAILABLE,
        rules.RECOMPUTE_AT_ANOTHER_VERSION,
        rules.VERSION_OF_SHARDED,
        rules.TIED_VERSIONS_DISAGREE,
    ):
        return _reading(schedule, finding, places), ()
    graph = graph_of(schedule)
    if rule is rules.MIS_PAIRED:
        return _paired(graph, places[0])
    if rule is rules.UNMATCHED and "peer" in facts:
        return _of_group(graph, places[0], facts["peer"])
    if rule is rules.UNMATCHED or (rule is rules.MISSING_RECEIVE and len(places) == 1):
        adds = _other_end(graph, places[0])
        likely = next(adds)
        return likely, chain((likely,), adds)
    if "value" in facts:
        late = facts["case"] == "late"
        return _beside(schedule, places) if late else _living(schedule, finding, places)
    if rule is rules.GROUP_ORDER:
        return None, anywhere(schedule, places[:1])
    return _of_round(graph, finding, places) if rule.code < "S3" else (None, ())


def _place(columns: Columns, at: Location) -> int:
    """The place of a location."""
    head = columns.place(at.rank, at.index or 0)
    entry = range(head, int(columns.last[head]) + 1)
    return next(place for place in entry if columns.action(place) == at.action)


def _removals(schedule: Schedule, places: Iterable[int]) -> Change:
    return several(removal(schedule, place) for place in places)


# Single actions.


def _spare(schedule: Schedule, one: int, other: int) -> int:
    """Of two places that exclude each other, the one to empty: of equal actions the first, unless
    only that one is where it belongs; of two ways to a gradient the one that is not complete."""
    columns, listed = schedule.columns, pairs_of(schedule).listed
    action = columns.action(one)
    stage, microbatch = action.stage, action.microbatch or 0
    if columns.kind[one] == columns.kind[other]:
        home = _home(schedule, stage, microbatch)
        astray = [columns.rank[p] != home or _is_misplaced(schedule, p) for p in (one, other)]
        return other if astray == [False, True] else one
    (way,) = (way for way in WAYS if action.kind in way)
    return other if all(listed(part, stage, microbatch) >= 0 for part in way) else one


def _home(schedule: Schedule, stage: int, microbatch: int) -> int | None:
    """The rank that has most of a stage's work on a microbatch, of those that hold the stage; the
    one of the forward, of several."""
    listed, ranks = pairs_of(schedule).listed, schedule.columns.rank
    places = (listed(kind, stage, microbatch) for kind in (_HOME, *KINDS))
    found = [int(ranks[place]) for place in places if place >= 0]
    held = [rank for rank in found if rank in schedule.placement[stage]]
    return max(held, key=held.count, default=None)


def _at_home(schedule: Schedule, places: list[int]) -> Change:
    """The change that takes one of the places to the rank that has most of its microbatch's work,
    or a stage-wide action to a rank that has none after its gradients; or that removes it, if there
    is no use for it."""
    columns = schedule.columns
    action = columns.action(places[0])
    stage, microbatch, held = action.stage, action.microbatch, schedule.placement[action.stage]
    if microbatch is None:
        out = removal(schedule, places[0])
        for rank in held:
            gradient = last_of_stage(columns, stage, rank, *COMPLETES_GRADIENTS)
            after = last_of_stage(columns, stage, rank, *COMPLETES_GRADIENTS, *SUMS)
            if gradient >= 0 and last_of_stage(columns, stage, rank, action.kind) < gradient:
                target = gradient if action.kind in SUMS else after
                return several((out, beside(schedule, action, "after", target)))
        return out
    home = _home(schedule, stage, microbatch)
    rank = held[0] if home is None else home
    place = next((each for each in places if columns.rank[each] != rank), places[0])
    action, out = columns.action(place), removal(schedule, place)
    if pairs_of(schedule).listed(action.kind, stage, microbatch) != place:
        return out
    if action.kind in COMMUNICATION:
        other = action.counterpart
        if other is None or other.stage >= schedule.stages:
            return out
        if _home(schedule, other.stage, microbatch) == rank:
            return out
    return several((out, next(additions(schedule, action, rank))))


def _reading(schedule: Schedule, finding: Diagnostic, places: list[int]) -> Change:
    """The change that names the newest version, or none; or of two versions the older."""
    facts, version = finding.facts, finding.facts.get("newest")
    if finding.rule is rules.TIED_VERSIONS_DISAGREE:
        both = facts["version"], facts["other_version"]
        version = min(both)
        places = [place for place, own in zip(places, both, strict=True) if own > version]
    else:
        places = places[:1]
    return several(
        rewriting(schedule, at, attrs.evolve(schedule.columns.action(at), version=version))
        for at in places
    )


# Values and transfers.


def _beside(schedule: Schedule, places: list[int]) -> Repairs:
    """What is late and what it is late for, the first and the last place, are brought together."""
    late, maker = places[0], places[-1]
    ways: list[tuple[int, Side, int]] = [(late, "after", maker), (maker, "before", late)]
    if schedule.columns.action(maker).kind in RECEIVES:
        ways.reverse()
    return moved_beside(schedule, *ways[0]), in_turn(slide(schedule, *way) for way in ways)


def _living(schedule: Schedule, finding: Diagnostic, places: list[int]) -> Repairs:
    """What makes or ends a value and nobody lists is added; or what is one too many goes, but for
    compute, of which nothing is."""
    columns, case, value = schedule.columns, finding.facts["case"], finding.facts["value"]
    adds = [*_unlisted(schedule, places[0], "end" if case == "unended" else "make", value)]
    spare = [place for place in places[::-1] if columns.action(place).kind not in COMPUTE]
    outs = [removal(schedule, place) for place in spare]
    sure: list[Change] = [*adds, *outs]
    return next(iter(sure), None), chain(adds, anywhere(schedule, places), outs)


def _unlisted(schedule: Schedule, place: int, does: str, value: str) -> Iterator[Add]:
    """The actions that would make or end a value of a place's stage and microbatch, and that nobody
    lists, but nothing that would end it beside a backward; those of a whole stage, before or after
    what uses the value."""
    action, listed = schedule.columns.action(place), pairs_of(schedule).listed
    rank = int(schedule.columns.rank[place])
    kinds = [kind for kind in Kind if uses_of(kind, does, value)]
    backwards = BACKWARDS.intersection(kinds) if does == "end" else ()
    if any(listed(kind, action.stage, action.microbatch or 0) >= 0 for kind in backwards):
        return
    for kind in kinds:
        if kind in STAGE_WIDE:
            last = last_of_stage(schedule.columns, action.stage, rank, *READS_WEIGHTS)
            side: Side = "before" if does == "make" else "after"
            target = place if does == "make" else max(place, last)
            yield beside(schedule, Action(kind, action.stage), side, target)
        elif listed(kind, action.stage, action.microbatch or 0) < 0:
            missing = attrs.evolve(action, kind=kind, version=None)
            yield next(additions(schedule, missing, rank))


def _other_end(graph: Graph, place: int) -> Iterator[Add]:
    """The change that adds what a send or a receive lacks, or the receive that compute lacks, in
    the order of its channel if the other end is known."""
    transfers, least, most = graph.transfers, 0, None
    action = graph.columns.action(place).counterpart
    number = int(graph.crossing[place])
    if action is None:  # compute
        kind, stage, microbatch = transfers.kind, transfers.stage, transfers.microbatch
        action = Action(KINDS[kind[number]], int(stage[number]), int(microbatch[number]))
    known, lacked, rank = transfers.receive, transfers.send, transfers.source[number]
    if action.kind in RECEIVES:
        known, lacked, rank = lacked, known, transfers.target[number]
    if known[number] >= 0:
        before, after = between(transfers, number, known, lacked)
        least, most = before + 1, after if after >= 0 else None
    return additions(graph.schedule, action, int(rank), least, most)


def between(transfers: Transfers, number: int, known: Ints, ends: Ints) -> tuple[int, int]:
    """The places in `ends` of the transfers before and after one on its channel, in the order of
    the end `known`; -1 for none."""
    beside = transfers.beside(number)
    beside = beside[np.argsort(known[beside])]
    first = np.searchsorted(known[beside], known[number])
    end = np.searchsorted(known[beside], known[number], side="right")
    before, after = np.append(-1, ends[beside[:first]])[-1], np.append(ends[beside[end:]], -1)[0]
    return int(before), int(after)


def _paired(graph: Graph, place: int) -> Repairs:
    """One end of a channel moved past others, or its receives or sends reordered."""
    schedule, transfers = graph.schedule, graph.transfers
    number = int(graph.crossing[place])
    sent, received, wrong = transfers.orders(number)
    slides = []
    for places in (transfers.receive[received], transfers.send[sent]):
        low, high = int(places[wrong[0]]), int(places[wrong[-1]])
        slides += [slide(schedule, high, "before", low), slide(schedule, low, "after", high)]
    orders = transfers.receive[sent[wrong]], transfers.send[received[wrong]]
    reordered = (change for places in orders for change in reorder(schedule, places))
    whole = AsSent(int(transfers.source[number]), int(transfers.target[number]))
    moves = in_turn(slides)
    # Those in between are many, and leave no trials for anything else.
    return whole, chain(islice(moves, 2 * len(slides)), reordered, moves)


# Steps and sums, each once in a round: from one step of a stage on its rank to the next.


def _of_round(graph: Graph, finding: Diagnostic, places: list[int]) -> Repairs:
    """What is one too many in a round goes, if the stage has more of it than others; else it moves,
    or gets what it lacks."""
    rule, facts, place, stage = finding.rule, finding.facts, places[0], finding.action.stage
    schedule, turns, steps, many = graph.schedule, graph.turn, graph.steps, graph.steps_of
    number = int(graph.holding[place])
    # As many steps as most of the other stages, and the replicas of this one, have.
    others = np.delete(many, number).tolist()
    usual = max({*others}, key=lambda each: (others.count(each), each), default=0)
    out, moves = removal(schedule, place), anywhere(schedule, places)
    total = beside(schedule, Action(_SUM, stage), "before" if len(steps) else "after", place)
    sure: Change
    if rule is rules.EMPTY_STEP:
        if many[number] > (usual or 1):
            return out, chain((out,), moves)
        filled = turns[graph.weight_gradients[stage]] == turns[place]  # on some rank
        replicated = len(schedule.placement[stage]) > 1
        sure = total if replicated and filled.any() else _removals(schedule, _alike(graph, place))
        return sure, chain(moves, (sure, out))
    if rule is rules.STEP_WITHOUT_REDUCE:
        sums = graph.columns.where(_SUM)
        sums = sums[graph.holding[sums] == number]
        at = int(np.searchsorted(sums, place))
        near = [place, *sums[max(0, at - 1) : at + 1].tolist()]
        return total, chain(anywhere(schedule, near) if len(sums) else (), (total,))
    if rule is rules.EMPTY_REDUCE:
        sure = _removals(schedule, places)
        return sure, chain((sure,), moves)
    if rule is rules.REDUCE_ACROSS_STEPS:
        first = turns[places].min()
        behind = [each for each in places if turns[each] == first]
        ends = [graph.holding[each] for each in places if turns[each] > first]
        ends = [int(steps[graph.holding[steps] == held][first]) for held in ends]
        sure = several(beside(schedule, finding.action, "before", end) for end in ends)
        changes = [sure, _removals(schedule, behind)]
        if len(_alike(graph, behind[0])) > len(schedule.placement[stage]):  # one is in excess
            changes.reverse()
        return changes[0], chain(changes, moves)
    if rule is rules.UNEVEN_STEPS:
        # The step that applies less goes, so that the next applies its gradients too.
        fewer = sorted(
            places, key=lambda each: len(facts["applied" if each == place else "expected"])
        )
        outs = [_removals(schedule, _alike(graph, each)) for each in fewer]
        return outs[0], chain(moves, outs)
    near_by, ways = _beside(schedule, places)
    together = iter(ways)
    if rule is rules.REDUCE_BEFORE_GRADIENTS:
        met = next((each for each in graph.collectives if place in each), places[:1])
        return near_by, chain(islice(together, 1), (out, _removals(schedule, met)), together)
    rank = facts.get("least", int(graph.columns.rank[place]))
    add = after_stage(schedule, Action(_STEP, stage), rank, *_ENDS_WITH_A_STEP)
    if rule is rules.UNEVEN_REPLICAS:
        own = steps[graph.holding[steps] == number].tolist()
        changes = [_removals(schedule, own[facts["fewest"] :]), add]
        if (many == facts["fewest"]).sum() <= (many == facts["steps"]).sum():
            changes.reverse()
        return changes[0], chain(changes, (removal(schedule, each) for each in own))
    if many[number] < usual or rule is rules.GRADIENT_NEVER_APPLIED:
        return add, chain((add,), together)
    return near_by, together


def _alike(graph: Graph, place: int) -> list[int]:
    """The actions of the kind and stage of a place in its round, on all ranks."""
    columns = graph.columns
    alike = columns.where(KINDS[columns.kind[place]])
    alike = alike[columns.stage[alike] == columns.stage[place]]
    places: list[int] = alike[graph.turn[alike] == graph.turn[place]].tolist()
    return places


def _of_group(graph: Graph, place: int, other: int) -> Repairs:
    """A collective is added on the other rank, or goes, or another one of its stage there does."""
    schedule, columns, steps = graph.schedule, graph.columns, graph.steps
    action, rank = columns.action(place), int(columns.rank[place])
    steps = steps[(columns.stage[steps] == action.stage) & (graph.turn[steps] == graph.turn[place])]
    there, here = (steps[columns.rank[steps] == each] for each in (other, rank))
    ends = (*COMPLETES_GRADIENTS, *GROUPS, *STEPS) if len(here) else COMPLETES_GRADIENTS
    sure = after_stage(schedule, action, other, *ends)
    if len(there):
        sure = beside(schedule, action, "before", int(there[0]))
    every = graph.collectives_of[action.stage][rank]
    return sure, chain((sure,), (removal(schedule, each) for each in (place, *every)))
