"""What was observed, entry by entry: costs are fitted on it, and forecasts drawn from it.

    row        0          1          2          3           4
    cost       forward    forward    transfer   backward    forward      as indices into COSTS
    stage      0          1          0          1           0            of a transfer: its boundary
    step       0          0          0          0           1            counted over all runs
    rank       0          1          0          1           0            of a transfer: its source
    peer      -1         -1          1         -1          -1            its target
    turn       0          0          0          0           0            the how-manieth of its kind
    duration   3.1        2.9        0.1        6.2         3.3

Rows of one step stay recognisable as such, since what slows down a step slows down most of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import attrs
import numpy as np

from schedir.ir import COMPUTE, COPIES, KINDS, Ints
from schedir.simulator.times import Numbers, numbers

COSTS = (
    *(kind.name.lower() for kind in KINDS if kind in COMPUTE),
    "reduce_grad",
    "overlapped",
    "transfer",
    "transfer_within",
    "transfer_delayed",
    "entry",
    *(kind.name.lower() for kind in KINDS if kind in COPIES),
)
"""What is observed: a compute action, a collective, an overlapped pair by the stage of its FORWARD,
a transfer by the boundary that it crosses, a copy.

Of a `transfer_within` the most that it can have taken is known: it had arrived before its receiver
was free to look. A `transfer_delayed` is one that began late, as its receiver was not there yet or
another one was ahead of it, from the compute before it to its arrival. `entry` is when a rank that
waits for nobody began the step, after the first one did."""
TRANSFER = COSTS.index("transfer")
WITHIN, DELAYED, ENTRY = range(TRANSFER + 1, TRANSFER + 4)
_MOST = 10**6  # of stages, of ranks, and of entries of one kind and stage in a step
_EQUAL = attrs.cmp_using(eq=np.array_equal, class_name="Column")


def _integers(values: Any) -> Ints:
    column = np.asarray(values, np.int64)
    column.flags.writeable = False
    return column


# Not slotted, so that what is derived can be cached beside the fields.
@attrs.frozen(slots=False)
class Samples:
    """Observed durations in columns, all of shape [rows], and the numbers of the `steps`.

    `cost` is an index into COSTS; `step` one into `steps`, which holds what the runs themselves
    call their steps. `turn` counts, within a step, the entries of one cost and stage, or the
    transfers of one link, those whose duration is not known too. `duration` is in the unit of the
    timelines; of a `transfer_within` it is a limit.

    Raises ValueError where the columns do not fit each other, or a duration is no number >= 0.
    """

    steps: tuple[int, ...] = attrs.field(repr=False)
    cost: Ints = attrs.field(converter=_integers, eq=_EQUAL, hash=False, repr=False)
    stage: Ints = attrs.field(converter=_integers, eq=_EQUAL, hash=False, repr=False)
    step: Ints = attrs.field(converter=_integers, eq=_EQUAL, hash=False, repr=False)
    rank: Ints = attrs.field(converter=_integers, eq=_EQUAL, hash=False, repr=False)
    peer: Ints = attrs.field(converter=_integers, eq=_EQUAL, hash=False, repr=False)
    turn: Ints = attrs.field(converter=_integers, eq=_EQUAL, hash=False, repr=False)
    duration: Numbers = attrs.field(converter=numbers, eq=_EQUAL, hash=False, repr=False)

    def __attrs_post_init__(self) -> None:
        rows = len(self.duration)
        for name, column in self._columns().items():
            if column.shape != (rows,):
                raise ValueError(f"samples: {name} must have {rows} rows, not {column.shape}")
        limits = dict.fromkeys(("stage", "rank", "turn"), _MOST)
        limits |= {"cost": len(COSTS), "step": len(self.steps)}
        for name, limit in limits.items():
            column = getattr(self, name)
            wrong = (column < 0) | (column >= limit)
            if wrong.any():
                row = int(wrong.argmax())
                raise ValueError(
                    f"samples: {name} of row {row} must be from 0 to {limit - 1}, not {column[row]}"
                )
        wrong = ~(np.isfinite(self.duration) & (self.duration >= 0))
        if wrong.any():
            row = int(wrong.argmax())
            raise ValueError(
                f"samples: duration of row {row} must be finite and >= 0, not {self.duration[row]}"
            )

    def __len__(self) -> int:
        return len(self.duration)

    def _columns(self) -> dict[str, Any]:
        return {
            field.name: getattr(self, field.name)
            for field in attrs.fields(type(self))
            if field.name != "steps"
        }

    @cached_property
    def groups(self) -> Mapping[tuple[str, int], Ints]:
        """The rows of each (cost, stage) that was observed, in the order of the steps."""
        found = _grouped(np.arange(len(self)), self.cost, self.stage)
        return {(COSTS[cost], stage): rows for (cost, stage), rows in found.items()}

    @cached_property
    def links(self) -> Mapping[tuple[int, int], Ints]:
        """The rows of the transfers from one rank to another, the delayed ones last."""
        rows = np.flatnonzero(np.isin(self.cost, (TRANSFER, WITHIN, DELAYED)))
        rows = rows[np.argsort(self.cost[rows] == DELAYED, kind="stable")]
        return _grouped(rows, self.rank[rows], self.peer[rows])

    def plain(self) -> dict[str, Any]:
        """What JSON can hold, exactly; `of_plain` is its inverse."""
        columns = {name: column.tolist() for name, column in self._columns().items()}
        return {"costs": list(COSTS), "steps": list(self.steps), **columns}


def of_plain(content: object) -> Samples:
    """The samples that JSON holds. Raises ValueError or TypeError, naming what is wrong."""
    names = [field.name for field in attrs.fields(Samples)]
    if not isinstance(content, dict) or set(content) != {"costs", *names}:
        raise ValueError(f"samples must have exactly the keys costs, {', '.join(names)}")
    costs, steps = content["costs"], content["steps"]
    if not isinstance(costs, list) or not set(costs) <= set(COSTS):
        raise ValueError(f"samples: costs must be some of {', '.join(COSTS)}, not {costs!r}")
    held = {name: content[name] for name in names}
    for name, column in held.items():
        kinds = (int, float) if name == "duration" else (int,)
        if not isinstance(column, list) or not all(type(value) in kinds for value in column):
            raise ValueError(f"samples: {name} must be a list of numbers")
    # Tables grow: a file knows the costs of its own time.
    renumber = {number: COSTS.index(name) for number, name in enumerate(costs)}
    held["cost"] = [renumber.get(number, -1) for number in held["cost"]]
    return Samples(**held | {"steps": tuple(steps)})


def turns(*keys: Ints) -> Ints:
    """For each row, how many before it have the same keys."""
    order = np.lexsort(keys[::-1])  # stable
    ranked = np.stack(keys)[:, order]
    begins = np.append(True, (ranked[:, 1:] != ranked[:, :-1]).any(axis=0))[: len(order)]
    first = np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))
    found = np.empty(len(order), np.int64)
    found[order] = np.arange(len(order)) - first
    return found


def _grouped(rows: Ints, one: Ints, other: Ints) -> dict[tuple[int, int], Ints]:
    """The rows by two keys, which have one value for each of them, in the order given."""
    order = np.lexsort((other, one))
    keys = np.stack((one, other))[:, order]
    first = np.flatnonzero((keys[:, 1:] != keys[:, :-1]).any(axis=0)) + 1
    parts = np.split(rows[order], first) if len(rows) else []
    heads = keys[:, np.append(0, first)].T.tolist() if len(rows) else []
    return {(a, b): part for (a, b), part in zip(heads, parts, strict=True)}


def median(values: Numbers) -> float:
    """The median; an integer where all values are and it is one of them or their mean is whole."""
    middle = float(np.median(values))
    whole = values.dtype.kind == "i" and middle == math.floor(middle)
    return int(middle) if whole else middle
