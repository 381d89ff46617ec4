"""What is wrong with a schedule, as columns: how many faults there are, and what each is about.

A list of a million actions can be wrong a million times. So faults are found and compared as
arrays, and put into words only where somebody reads them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import attrs
import numpy as np

from schedir.checker.changes import Change
from schedir.checker.diagnostics import Diagnostic
from schedir.ir import Ints


@attrs.frozen(eq=False)
class Finding:
    """A fault in words, and the changes that may fix it, likely ones first.

    `of_communication` says whether to leave the communication out, for schedir to insert, is one
    more of them, `blocks` whether to join it into batches is.
    """

    diagnostic: Diagnostic
    changes: Iterable[Change] = ()
    of_communication: bool = False
    blocks: bool = False


def _ones(faults: Faults) -> Ints:
    return np.ones(len(faults.keys), np.int64)


def _of_keys(faults: Faults) -> int:
    return len(faults.keys)


@attrs.frozen(eq=False, kw_only=True)
class Faults:
    """Faults against one rule, ordered by place.

    `keys` says what each is about, in a number that stays the same when the lists are reordered,
    and `extents` how much is wrong there; there are none where no order could matter. `findings`
    are made as they are asked for; `many` is their number.
    """

    rule: type[Diagnostic]
    keys: Ints
    findings: Iterable[Finding]
    extents: Ints = attrs.field(default=attrs.Factory(_ones, takes_self=True))
    many: int = attrs.field(default=attrs.Factory(_of_keys, takes_self=True))


def fault(
    diagnostic: Diagnostic, changes: Iterable[Change] = (), *, key: int = 0, extent: int = 1
) -> Faults:
    """A single one."""
    return Faults(
        rule=type(diagnostic),
        keys=np.array([key]),
        extents=np.array([extent]),
        findings=(Finding(diagnostic, changes),),
    )


Tally: TypeAlias = dict[str, tuple[Ints, Ints]]
"""By code, the keys of all faults, ascending, and their extents."""


def tally(found: Iterable[Faults]) -> Tally:
    """Count the faults."""
    by_code: dict[str, list[Faults]] = {}
    for faults in found:
        by_code.setdefault(faults.rule.code, []).append(faults)
    counted = {}
    for code, several in by_code.items():
        keys = np.concatenate([faults.keys for faults in several])
        extents = np.concatenate([faults.extents for faults in several])
        order = np.argsort(keys, kind="stable")
        counted[code] = (keys[order], extents[order])
    return counted


def nothing_new(found: Iterable[Faults], known: Tally) -> bool:
    """Whether all that is found is known, and nowhere more of it."""
    for faults in found:
        if not len(faults.keys):
            continue
        if faults.rule.code not in known:
            return False
        keys, extents = known[faults.rule.code]
        at = np.minimum(np.searchsorted(keys, faults.keys), len(keys) - 1)
        if (keys[at] != faults.keys).any() or (extents[at] < faults.extents).any():
            return False
    return True


def without(known: Tally, code: str, key: int) -> Tally:
    """The faults but for one."""
    keys, extents = known[code]
    kept = keys != key
    others = {other: counted for other, counted in known.items() if other != code}
    return others | ({code: (keys[kept], extents[kept])} if kept.any() else {})
