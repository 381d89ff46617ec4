"""Faults of a schedule's values: each must be made before it is used, and ended.

Faults are found by counting. Only the rows of values with several lives, such as an activation that
is copied to the host and back, are sorted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import groupby, repeat
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


_ENDED = frozenset(name for name, value in VALUES.items() if value.ended == "always") - LINKED
"""The values that must be ended. Of a linked value the other end of its transfer shows it."""
HELD = frozenset(name for name in _ENDED if VALUES[name].per == "version")
"""The values of a whole stage that must be ended: gathered weights."""


def faults(graph: Graph, names: Iterable[str] = LINKED | OTHERS) -> Iterator[Fault]:
    """What is wrong with values of (stage, microbatch) pairs, of what is linked with all of that;
    or with those of whole stages. Expects a sound structure."""
    touches, entry, given = [*graph.touches(*names)], graph.columns.entry, _given(graph)
    # By value: an entry that makes it and one that ends it; the number of actions for none.
    never = len(entry)
    made, ended = np.where(given, -1, never), np.full(len(given), never)
    doubtful = np.full(len(given), names == HELD)
    for touch in touches:
        if touch.use.does != "read":
            # A kind is listed once for each (stage, microbatch), so that no value is there twice.
            known, of = made if touch.use.does == "make" else ended, touch.values
            doubtful[of] |= known[of] < never
            known[of] = entry[touch.places]
    for touch in touches:
        here, of = entry[touch.places], touch.values
        if touch.use.does != "make":
            doubtful[of] |= (made[of] >= here) | (ended[of] < here)
        elif touch.use.value in _ENDED:
            doubtful[of] |= ended[of] == never
    if doubtful.any():
        yield from _followed(touches, entry, doubtful, given)


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


def _followed(touches: list[Touch], entry: Ints, doubtful: Bools, given: Bools) -> Iterator[Fault]:
    """The faults of the doubtful values, each of which is followed from entry to entry: what an
    entry reads before what it ends, and that before what it makes."""
    rows: list[tuple[int, int, int, int, int]] = []
    for number, touch in enumerate(touches):
        where = doubtful[touch.values]
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
        name = use.value
        if name in HELD:
            left = makers[-1:] if alive else []
        else:
            left = makers if name in _ENDED and len(makers) > ends else []
        for _, number, place, _ in left:
            found[number, "unended"].append((place, -1))
    for (number, label), wrong in sorted(found.items()):
        touch = touches[number]
        yield Fault(label, touch.use.value, touch.kind, *np.array(wrong).T)
