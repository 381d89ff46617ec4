"""Faults of a schedule's values: each must be made before it is used, and ended.

Faults are found by counting. Only the rows of values with several lives, such as an activation that
is copied to the host and back, are sorted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import Literal, TypeAlias

import attrs
import numpy as np

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
    size, entry = graph.base[""], graph.columns.entry
    if names == HELD:
        every = np.ones(size, np.bool_)
        yield from _of_several_lives(touches, entry, every, ~every)
        return
    # By value: a place that makes it and one that ends it, -1 for none, and how often each happens.
    places = {does: np.full(size, -1) for does in ("make", "end")}
    times = {does: np.zeros(size, np.int8) for does in places}
    for touch in touches:
        if touch.use.does in places:
            # A kind is listed once for each (stage, microbatch), so that no value is there twice.
            places[touch.use.does][touch.values] = touch.places
            times[touch.use.does][touch.values] += 1
    given = _given(graph)
    several = (times["make"] + given > 1) | (times["end"] > 1)
    for touch in touches:
        if touch.use.does == "make":
            continue
        here, single = entry[touch.places], ~several[touch.values]
        maker, end = (places[does][touch.values] for does in ("make", "end"))
        alive = given[touch.values] | ((maker >= 0) & (entry[maker] < here))
        if not alive.all():
            yield from _fault("late", touch, single & ~alive & (maker >= 0), maker)
            yield from _fault("missing", touch, single & ~alive & (maker < 0), maker)
        if touch.use.does == "read":  # what ends a value is not too late for it
            yield from _fault("gone", touch, single & alive & (end >= 0) & (entry[end] < here), end)
    if several.any():
        yield from _of_several_lives(touches, entry, several, given)
    for touch in touches:
        name = touch.use.value
        # The other end of a transfer shows the faults of its values.
        if touch.use.does == "make" and VALUES[name].ended == "always" and name not in LINKED:
            left = times["make"][touch.values] > times["end"][touch.values]
            yield from _fault("unended", touch, left, np.full_like(touch.places, -1))


def _fault(label: Label, touch: Touch, where: Bools, others: Ints) -> Iterator[Fault]:
    if where.any():
        yield Fault(label, touch.use.value, touch.kind, touch.places[where], others[where])


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


def _of_several_lives(
    touches: list[Touch], entry: Ints, several: Bools, given: Bools
) -> Iterator[Fault]:
    """The faults of values that may be made or ended more than once: their rows in list order, what
    an entry reads before what it makes."""
    order = "read", "end", "make"
    rows = [
        (int(value), int(entry[place]), order.index(touch.use.does), number, at, int(place))
        for number, touch in enumerate(touches)
        for at in np.flatnonzero(several[touch.values]).tolist()
        for value, place in [(touch.values[at], touch.places[at])]
    ]
    found: dict[tuple[Label, int], list[tuple[int, int]]] = {}
    for value, own in groupby(sorted(rows), itemgetter(0)):
        life, alive, maker, ender = [*own], bool(given[value]), -1, -1
        makers = [(here, place) for _, here, does, _, _, place in life if order[does] == "make"]
        begun: list[tuple[int, int]] = []  # where the value was made, while it is alive
        for _, here, does, number, at, place in life:
            label: Label | None = None
            if order[does] == "make":
                if alive or (maker >= 0 and not VALUES[touches[number].use.value].again):
                    label, other = "twice", maker
                alive, maker, begun = True, place, [(number, at)]
            else:
                if not alive:
                    later = [made for there, made in makers if there >= here]
                    label, other = ("late", later[0]) if later else ("gone", ender)
                if order[does] == "end":
                    alive, ender, begun = False, place, []
            if label is not None:
                found.setdefault((label, number), []).append((at, other))
        for number, at in begun:
            if touches[number].use.value in HELD:
                found.setdefault(("unended", number), []).append((at, -1))
    for (label, number), wrong in found.items():
        touch, (at, others) = touches[number], np.array(sorted(wrong)).T
        yield Fault(label, touch.use.value, touch.kind, touch.places[at], others)
