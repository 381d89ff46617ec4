"""What is wrong with a schedule, as columns: how many faults there are, and what each is about.

A list of a million actions can be wrong a million times. So faults are found and compared as
arrays, and put into words only where somebody reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import attrs
import numpy as np

from schedir.checker.changes import Change
from schedir.checker.diagnostics import Diagnostic, Rule
from schedir.ir import Ints


@attrs.frozen(eq=False)
class Finding:
    """A fault in words, and the changes that may fix it, likely ones first.

    `of_communication` says whether to leave the communication out, for schedir to insert, is one
    more of them, `blocks` whether to join it into batches is. `otherwise` ends the fault whatever
    else is wrong, or comes of it: the change where none of the others is known to be right.
    `blocks_less` makes the changes anew, one of which may end a deadlock that is not the only one.
    """

    diagnostic: Diagnostic
    changes: Iterable[Change] = ()
    otherwise: Change | None = None
    of_communication: bool = False
    blocks: bool = False
    blocks_less: Callable[[], Iterable[Change]] | None = None


def _ones(faults: Faults) -> Ints:
    return np.ones(len(faults.keys), np.int64)


def _of_keys(faults: Faults) -> int:
    return len(faults.keys)


@attrs.frozen(eq=False, kw_only=True)
class Faults:
    """Faults against one rule, ordered by place.

    `keys` says what each is about, in a number that stays the same when a change is made, and
    `extents` how much is wrong there; there are none where the structure is wrong. What several are
    about is as wrong as all of them together. `findings` are made as they are asked for; `many` is
    their number.
    """

    rule: Rule
    keys: Ints
    findings: Iterable[Finding]
    extents: Ints = attrs.field(default=attrs.Factory(_ones, takes_self=True))
    many: int = attrs.field(default=attrs.Factory(_of_keys, takes_self=True))


def fault(
    diagnostic: Diagnostic,
    changes: Iterable[Change] = (),
    *,
    otherwise: Change | None = None,
    key: int = 0,
    extent: int = 1,
) -> Faults:
    """A single one."""
    return Faults(
        rule=diagnostic.rule,
        keys=np.array([key]),
        extents=np.array([extent]),
        findings=(Finding(diagnostic, changes, otherwise),),
    )


Tally: TypeAlias = dict[str, tuple[Ints, Ints]]
"""By code, the keys of all faults, ascending, and their extents."""


def tally(found: Iterable[Faults]) -> Tally:
    """Count the faults."""
    by_code: dict[str, list[Faults]] = {}
    for faults in found:
        by_code.setdefault(faults.rule.code, []).append(faults)
    return {
        code: _by_key(
            np.concatenate([faults.keys for faults in several]),
            np.concatenate([faults.extents for faults in several]),
        )
        for code, several in by_code.items()
    }


def _by_key(keys: Ints, extents: Ints) -> tuple[Ints, Ints]:
    """The keys, ascending and each once, with all of its extents together."""
    distinct, number = np.unique(keys, return_inverse=True)
    summed = np.zeros(len(distinct), np.int64)
    np.add.at(summed, number, extents)
    return distinct, summed


def nothing_new(found: Iterable[Faults], known: Tally) -> bool:
    """Whether all that is found is known, and nowhere more of it."""
    for faults in found:
        if not len(faults.keys):
            continue
        if faults.rule.code not in known:
            return False
        keys, extents = known[faults.rule.code]
        own, own_extents = _by_key(faults.keys, faults.extents)
        at = np.minimum(np.searchsorted(keys, own), len(keys) - 1)
        if (keys[at] != own).any() or (extents[at] < own_extents).any():
            return False
    return True


def without(known: Tally, code: str, key: int, extent: int) -> Tally:
    """The faults but for one."""
    keys, extents = known[code]
    left = extents - extent * (keys == key)
    others = {other: counted for other, counted in known.items() if other != code}
    return others | ({code: (keys[left > 0], left[left > 0])} if (left > 0).any() else {})
