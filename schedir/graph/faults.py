"""Faults of a schedule's values: each must be made before it is used, and ended.

Faults are found by counting. Only the rows of values with several lives, such as an activation that
is copied to the host and back, are sorted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray

from schedir.graph.compile import Graph, Touch
from schedir.ir import VALUES, Bools, Ints, Kind

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


@attrs.frozen(eq=False)
class _Lives:
    """By value: a place that makes it and one that ends it, -1 for none, how often each happens,
    and whether the value is given."""

    maker: Ints
    made: NDArray[np.int8]
    ender: Ints
    ends: NDArray[np.int8]
    given: Bools

    @property
    def several(self) -> Bools:
        """Which have more than one life, or end."""
        return (self.made + self.given > 1) | (self.ends > 1)


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


HELD = frozenset(
    name for name, value in VALUES.items() if value.per == "version" and value.ended == "always"
)
"""The values of a whole stage that must be ended: gathered weights."""


def faults(graph: Graph, names: Iterable[str] = LINKED | OTHERS) -> Iterator[Fault]:
    """What is wrong with values of (stage, microbatch) pairs, of what is linked with all of that;
    or with those of whole stages. Expects a sound structure."""
    touches = [*graph.touches(*names)]
    if names == HELD:
        every = np.ones(graph.base[""], np.bool_)
        yield from _of_several_lives(graph, touches, every, ~every)
        return
    lives = _lives(graph, touches)
    entry, several = graph.columns.entry, lives.several
    mixed = bool(several.any())
    for touch in touches:
        if touch.use.does == "make":
            continue
        values, here = touch.values, entry[touch.places]
        maker = lives.maker[values]
        alive = lives.given[values] | ((maker >= 0) & (entry[maker] < here))
        single = ~several[values] if mixed else np.True_
        if not alive.all():
            late, missing = single & ~alive & (maker >= 0), single & ~alive & (maker < 0)
            yield from _fault("late", touch, late, maker)
            yield from _fault("missing", touch, missing, np.full_like(maker, -1))
        if touch.use.does == "read":  # what ends a value is not too late for it
            end = lives.ender[values]
            yield from _fault("gone", touch, single & alive & (end >= 0) & (entry[end] < here), end)
    if mixed:
        yield from _of_several_lives(graph, touches, several, lives.given)
    yield from _unended(touches, lives)


def _fault(label: Label, touch: Touch, where: Bools, others: Ints) -> Iterator[Fault]:
    if where.any():
        yield Fault(label, touch.use.value, touch.kind, touch.places[where], others[where])


def _lives(graph: Graph, touches: list[Touch]) -> _Lives:
    size = graph.base[""]
    maker, ender = np.full(size, -1), np.full(size, -1)
    made, ends = np.zeros(size, np.int8), np.zeros(size, np.int8)
    given = np.zeros(size, np.bool_)
    for touch in touches:
        # A kind is listed once for each (stage, microbatch), so that no value is there twice.
        if touch.use.does == "make":
            maker[touch.values] = touch.places
            made[touch.values] += 1
        elif touch.use.does == "end":
            ender[touch.values] = touch.places
            ends[touch.values] += 1
    for name, value in VALUES.items():
        if value.given == "first":
            given[graph.base[name] : graph.base[name] + graph.schedule.microbatches] = True
        if value.link and not graph.schedule.is_complete:
            # What crosses ranks is there: a pass lists its transfer.
            own = graph.base[name] + np.arange(graph.runs.size)
            exists = graph.neighbours(value.link[1]).ravel() >= -1
            given[own[exists & (graph.numbers(name) == own)]] = True
    return _Lives(maker, made, ender, ends, given)


def _unended(touches: list[Touch], lives: _Lives) -> Iterator[Fault]:
    """Values that are made and never ended although they must be. Values of a transfer are left
    out, because the other end of the transfer shows the fault."""
    for touch in touches:
        name = touch.use.value
        if touch.use.does == "make" and VALUES[name].ended == "always" and name not in LINKED:
            left = lives.made[touch.values] > lives.ends[touch.values]
            yield from _fault("unended", touch, left, np.full(len(touch.places), -1))


def _of_several_lives(
    graph: Graph, touches: list[Touch], several: Bools, given: Bools
) -> Iterator[Fault]:
    """The faults of values that may be made or ended more than once: their rows in list order, what
    an entry reads before what it makes."""
    rows = [
        (number, at, touch.values[at], touch.places[at], touch.use.does)
        for number, touch in enumerate(touches)
        for at in np.flatnonzero(several[touch.values]).tolist()
    ]
    entry = graph.columns.entry
    rows.sort(key=lambda row: (row[2], entry[row[3]], row[4] == "make", row[4] == "end"))
    makers: dict[int, list[int]] = {}
    for _, _, value, place, does in rows:
        if does == "make":
            makers.setdefault(int(value), []).append(int(place))
    maker: dict[int, int] = {}
    ender: dict[int, int] = {}
    found: dict[tuple[Label, int], list[tuple[int, int]]] = {}
    begun: dict[int, tuple[int, int]] = {}  # where each value that is alive was made
    alive = {int(value) for value in np.flatnonzero(several & given)}
    for number, at, key, place, does in rows:
        value = int(key)
        label: Label | None = None
        if does == "make":
            if value in alive or (value in maker and not VALUES[touches[number].use.value].again):
                label, other = "twice", maker.get(value, -1)
            alive.add(value)
            maker[value], begun[value] = int(place), (number, at)
        else:
            if value not in alive:
                later = [made for made in makers.get(value, ()) if entry[made] >= entry[place]]
                label, other = ("late", later[0]) if later else ("gone", ender.get(value, -1))
            if does == "end":
                alive.discard(value)
                ender[value] = int(place)
        if label is not None:
            found.setdefault((label, number), []).append((at, other))
    for value in alive & begun.keys():
        number, at = begun[value]
        if touches[number].use.value in HELD:
            found.setdefault(("unended", number), []).append((at, -1))
    for (label, number), wrong in found.items():
        others = np.full(len(touches[number].places), -1)
        numbers = np.array([at for at, _ in wrong])
        others[numbers] = [other for _, other in wrong]
        where = np.isin(np.arange(len(others)), numbers)
        yield from _fault(label, touches[number], where, others)
