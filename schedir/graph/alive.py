"""What is alive when, according to the lists: values, activations, and weight versions.

Each value must be made before it is used, and ended; all else is a fault. Faults are found by
counting. Only the rows of values with several lives, such as an activation that is copied to the
host and back, are sorted.

A stage's weights start at version 0 and each update makes the next. A forward reads `@version` if
given, else the newest version at its place in the list. Every other action that reads the weights
for the microbatch reads the version of its forward (weight stashing, PipeDream, SOSP 2019, section
3.3). A version lives until the last listed action that reads it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import groupby, repeat
from operator import itemgetter
from typing import Literal, TypeAlias

import attrs
import numpy as np

from schedir.graph.compile import Graph, Touch
from schedir.ir import HOMES, KIND_INDEX, READS_WEIGHTS, STEPS, VALUES, Bools, Columns, Ints, Kind

Label: TypeAlias = Literal["late", "missing", "gone", "twice", "unended"]
"""Used before it is made; never made; used after its end; made while there is one; never ended."""


@attrs.frozen(eq=False)
class Fault:
    """Faults with one label, of actions of one kind and values of one name, by place.

    `places` are the places of the actions. `others` are the places that make the value too late,
    ended it, or made it before; -1 for none. Shape [faults].
    """

    label: Label
    value: str
    kind: Kind
    places: Ints
    others: Ints


_Row: TypeAlias = tuple[int, Label, Ints, Ints]
"""The number of a touch, and a label, places and others as a Fault has them."""
LINKED = frozenset(
    name
    for other, value in VALUES.items()
    for name in (other, *(value.link or ())[:1])
    if value.link is not None
)
"""The values that a transfer makes, and the values that it carries."""
OTHERS = frozenset(
    use.value
    for kind in Kind
    for use in kind.meaning.uses
    if use.does != "make" and VALUES[use.value].per == "microbatch" and use.value not in LINKED
)
"""All other values of a (stage, microbatch) that some action reads or ends."""


_ENDED = frozenset(name for name, value in VALUES.items() if value.ended == "always") - LINKED
"""The values that must be ended. Of a linked value the other end of its transfer shows it."""
HELD = frozenset(name for name in _ENDED if VALUES[name].per == "version")
"""The values of a whole stage that must be ended: gathered weights."""


def faults(graph: Graph, names: Iterable[str] = LINKED | OTHERS) -> Iterator[Fault]:
    """What is wrong with values of (stage, microbatch) pairs, of what is linked with all of that;
    or with those of whole stages. Expects a sound structure."""
    touches, entry, given = [*graph.touches(*names)], graph.columns.entry, _given(graph)
    # By value: the places that make it and that end it; the number of actions for none.
    never = len(entry)
    made, ended = np.where(given, -1, never), np.full(len(given), never)
    several = np.full(len(given), names == HELD)
    for touch in touches:
        if touch.use.does != "read":
            # A kind is listed once for each (stage, microbatch), so that no value is there twice.
            known, of = made if touch.use.does == "make" else ended, touch.values
            several[of[known[of] < never]] = True
            known[of] = touch.places
    found: list[_Row] = []
    if several.any():
        found += _followed(touches, entry, several, given)
    entry, nobody = np.append(entry, (never, -1)), np.broadcast_to(-1, len(given))
    for number, touch in enumerate(touches):
        of = touch.values
        wrong: tuple[tuple[Label, Bools, Ints], ...] = ()
        if touch.use.does != "make":
            here, begins, ends = (entry[each] for each in (touch.places, made[of], ended[of]))
            early, after = here <= begins, ends < here
            if (early | after).any():
                wrong = (
                    ("gone", after & (begins < ends), ended),
                    ("late", early & (begins < never), made),
                    ("missing", begins == never, nobody),
                )
        elif touch.use.value in _ENDED:
            wrong = (("unended", ended[of] == never, nobody),)
        for label, where, others in wrong:
            where &= ~several[of]
            if where.any():
                found.append((number, label, touch.places[where], others[of[where]]))
    for number, label, places, beside in sorted(found, key=itemgetter(0, 1)):
        yield Fault(label, touches[number].use.value, touches[number].kind, places, beside)


def _given(graph: Graph) -> Bools:
    """The values that nobody needs to make."""
    given = np.zeros(graph.base[""], np.bool_)
    for name, value in VALUES.items():
        if value.given == "first":
            given[graph.base[name] : graph.base[name] + graph.schedule.microbatches] = True
        if value.link and not graph.schedule.is_complete:
            # What crosses ranks is there: a pass lists its transfer.
            own = graph.base[name] + np.arange(graph.runs.size)
            exists = graph.neighbours(value.link[1]).ravel() >= -1
            given[own[exists & (graph.numbers(name) == own)]] = True
    return given


def _followed(touches: list[Touch], entry: Ints, several: Bools, given: Bools) -> Iterator[_Row]:
    """The faults of values that are made or ended several times, by the number of their touch. Each
    value is followed from entry to entry: what an entry reads before what it ends, and that before
    what it makes."""
    rows: list[tuple[int, int, int, int, int]] = []
    for number, touch in enumerate(touches):
        where = several[touch.values]
        values, places = touch.values[where], touch.places[where]
        turn = ("read", "end", "make").index(touch.use.does)
        columns = entry[places].tolist(), repeat(turn), repeat(number), places.tolist()
        rows += zip(values.tolist(), *columns, strict=False)
    found = defaultdict[tuple[int, Label], list[tuple[int, int]]](list)
    for value, own in groupby(sorted(rows), itemgetter(0)):
        life = [(here, number, place, touches[number].use) for _, here, _, number, place in own]
        makers = [each for each in life if each[-1].does == "make"]
        alive, maker, ender, ends = bool(given[value]), -1, -1, 0
        for here, number, place, use in life:
            if use.does == "make":
                if alive or (maker >= 0 and not VALUES[use.value].again):
                    found[number, "twice"].append((place, maker))
                alive, maker = True, place
                continue
            ends += use.does == "end"
            if not alive:
                later = [made for there, _, made, _ in makers if there >= here]
                label: Label = "late" if later else "gone" if ender >= 0 else "missing"
                found[number, label].append((place, later[0] if later else ender))
            elif use.does == "end":
                alive, ender = False, place
        if alive and makers and use.value in _ENDED and (use.value in HELD or len(makers) > ends):
            found[makers[-1][1], "unended"].append((maker, -1))
    for (number, label), wrong in found.items():
        places, others = np.array(wrong).T
        yield number, label, places, others


HeldUntil: TypeAlias = Literal["W", "I"]
HELD_UNTIL: tuple[HeldUntil, ...] = ("W", "I")
"""Until when an activation of a split backward may count: until its gradient of the weights, or
until its gradient of the input, after which only what the other part needs is left."""


def peak_activations(graph: Graph, until: HeldUntil = "W") -> list[tuple[int, int]]:
    """For each rank, the most (stage, microbatch) activations that live at once in its list, and
    how many actions are listed before the one that makes the last of them (0 if there is none).

    All changes at the start of an entry happen at once, and so do those at its end. An activation
    that is copied to the host no longer counts.
    """
    columns = graph.columns
    units = {name: value.units for name, value in VALUES.items() if value.units}
    if until == "I":  # what is made as an activation ends is the rest of it
        units.pop("deferred")
    points = 2 * len(columns.heads)
    change, maker = np.zeros(points, np.int64), np.full(points, -1)
    for touch in graph.touches(*units):
        point = 2 * columns.entry[touch.places] + (touch.use.at == "end")
        many = units[touch.use.value] * np.bincount(point, minlength=points)
        if touch.use.does == "make":
            maker[point] = touch.places
            change += many
        elif touch.use.does == "end":
            change -= many
    bounds = 2 * np.append(columns.entry, len(columns.heads))[columns.starts]
    peaks = []
    for start, begin, end in zip(columns.starts, bounds[:-1], bounds[1:], strict=False):
        own = np.cumsum(change[begin:end])
        most = int(own.max(initial=0))
        # It begins where something is made.
        peaks.append((most, int(maker[begin + own.argmax()] - start) if most else 0))
    return peaks


@attrs.frozen
class StageVersions:
    """The weight versions of one stage on one rank.

    `reads[microbatch]` is the version that its FORWARD reads. `steps[v]` is the place of the
    OPTIM_STEP after which version v is no longer the newest. `last_read[v]` is the place of the
    last action that reads version v. Places are counted from the start of the rank's list, in
    actions.
    """

    reads: dict[int, int] = attrs.field(factory=dict)
    steps: list[int] = attrs.field(factory=list)
    last_read: dict[int, int] = attrs.field(factory=dict)

    def outlives_its_step(self, version: int) -> bool:
        """True where `version` is still read after the OPTIM_STEP that replaces it."""
        return version < len(self.steps) and self.last_read.get(version, -1) > self.steps[version]

    def peak(self) -> tuple[int, int | None]:
        """The most versions alive at once, the newest included, and the place of the OPTIM_STEP
        that makes the last of them (None if there is never more than one).

        An OPTIM_STEP whose old version nobody reads any more updates in place and adds none.
        """
        # The number alive only grows at an OPTIM_STEP, so it is enough to look right after each.
        ends = sorted(max(step, self.last_read.get(v, -1)) for v, step in enumerate(self.steps))
        alive = [2 + v - bisect_right(ends, step) for v, step in enumerate(self.steps)]
        most = max(alive, default=1)
        return most, self.steps[alive.index(most)] if most > 1 else None


def weight_versions(columns: Columns, rank: int) -> dict[int, StageVersions]:
    """The weight versions of every stage in one rank's list, keyed by stage."""
    start, end = columns.starts[rank : rank + 2].tolist()
    own = start + np.flatnonzero(np.isin(columns.kind[start:end], _CONCERNED))
    stages = defaultdict[int, StageVersions](StageVersions)
    for place, code, number, microbatch, version in zip(
        own.tolist(),
        columns.kind[own].tolist(),
        columns.stage[own].tolist(),
        columns.microbatch[own].tolist(),
        columns.version[own].tolist(),
        strict=True,
    ):
        stage = stages[number]
        if code in _HOMES:
            read = len(stage.steps) if version < 0 else version
            stage.reads[microbatch] = read
            stage.last_read[read] = place - start
        elif code in _STEPS:
            stage.steps.append(place - start)
        elif microbatch in stage.reads:
            stage.last_read[stage.reads[microbatch]] = place - start
    return {**stages}


_HOMES, _STEPS = ({KIND_INDEX[kind] for kind in kinds} for kinds in (HOMES, STEPS))
_CONCERNED = [KIND_INDEX[kind] for kind in (*READS_WEIGHTS, *STEPS)]


def later_versions(graph: Graph) -> dict[int, dict[int, StageVersions]]:
    """The weight versions of every stage on each rank that may have several of one: where something
    of a rank's stages comes after their steps."""
    columns = graph.columns
    reading = columns.is_kind(*READS_WEIGHTS) & (graph.turn > 0)
    return {rank: weight_versions(columns, rank) for rank in set(columns.rank[reading].tolist())}
