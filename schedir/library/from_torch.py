"""Schedules of torch.distributed.pipelining as schedir's, read from the text of their actions.

torch keeps two dicts of lists by rank, either of which may be absent:

    pipeline_order              0F0 0F1 None 0B0 …                                   compute
    pipeline_order_with_comms   0UNSHARD 0F0 0SEND_F0 … 0REDUCE_GRAD 0RESHARD        all

1F1B and GPipe run loops of their own. The list that torch prints for 1F1B is another: it lacks the
last rank's first forward.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from schedir.errors import LoadError
from schedir.ir import Kind, Schedule, loads_torch_csv
from schedir.ir.schedule import starts_of
from schedir.library.targets import expect_shape, load
from schedir.passes import append_steps, shard
from schedir.passes.steps import insert_reductions

_LOOPS = {"Schedule1F1B": "1f1b", "ScheduleGPipe": "fill-drain"}
_GROUP = re.compile(r"([0-9]+)(UNSHARD|RESHARD|REDUCE_GRAD)")
_TRANSFER = re.compile(r"[0-9]+(SEND|RECV)_[FB][0-9]+")
THEIRS = "theirs"
"""The value of `gathers` for all that torch lists."""


def from_torch(
    theirs: Any,
    *,
    ranks: int | None = None,
    microbatches: int | None = None,
    chunks: int | None = None,
    communication: bool = False,
    gathers: Collection[int] | str = (),
    steps: bool = True,
) -> Schedule:
    """The schedule of a schedule object of torch's, or of its class with a shape.

    A class takes `ranks`, `microbatches` and, if its ranks have several stages, `chunks`, by
    default 2. With `communication`, sends and receives are torch's own, if it has listed them;
    otherwise there are none, and whoever uses the schedule inserts schedir's. Each stage lives on
    the rank that runs its forwards. With `steps`, every stage that is trained gets an OPTIM_STEP at
    the end; torch leaves the update to the caller.

    `gathers` are the stages that `fully_shard` has wrapped. torch lists UNSHARD, RESHARD and
    REDUCE_GRAD for every stage; they are kept for these stages, and listed by `shard` where torch
    has none. `"theirs"` keeps all of torch's.

    torch is not imported. Raises LoadError for anything that is no such schedule, for one without a
    list of actions, for a shape beside an object, and for a shape that the class refuses.

    >>> import schedir
    >>> from torch.distributed.pipelining import ScheduleInterleaved1F1B
    >>> schedir.from_torch(ScheduleInterleaved1F1B, ranks=2, microbatches=2)
    <Schedule ScheduleInterleaved1F1B: 2 ranks, 4 stages, 2 microbatches, 20 actions>
    """
    shape = {"ranks": ranks, "microbatches": microbatches, "chunks": chunks}
    if isinstance(theirs, type):
        theirs = _made(theirs, shape)
    elif given := [f"{what}=" for what, number in shape.items() if number is not None]:
        raise LoadError(
            f"{' and '.join(given)} can only be given with a class; a {type(theirs).__name__} has "
            "its own"
        )
    if isinstance(gathers, str) and gathers != THEIRS:
        raise LoadError(f"gathers must be a collection of stages or {THEIRS!r}, not {gathers!r}")
    loop = _loop_of(type(theirs))
    if loop is None:
        found = loads_torch_csv(
            _text(theirs, communication, gathers), type(theirs).__name__, keeps_gathers=True
        )
    else:
        found = load(loop, ranks=theirs._num_stages, microbatches=theirs._n_microbatches)
    if not steps:
        columns = found.columns
        kept = np.flatnonzero(~columns.is_kind(Kind.OPTIM_STEP))
        found = found.take(kept, starts_of(columns.rank[kept], found.ranks))
    else:
        found = append_steps(found)
    return insert_reductions(found) if isinstance(gathers, str) else shard(found, gathers)


def _loop_of(theirs: type) -> str | None:
    """The built-in schedule with the order of a class that runs a loop of its own."""
    return next((_LOOPS[one.__name__] for one in theirs.__mro__ if one.__name__ in _LOOPS), None)


def _made(theirs: type, shape: Mapping[str, int | None]) -> Any:
    """A schedule of a class of torch's, over stages without modules.

    Raises LoadError if it is no such class, or can't have that shape.
    """
    name, many = theirs.__name__, _loop_of(theirs) is None
    ranks, microbatches, chunks = shape["ranks"], shape["microbatches"], shape["chunks"]
    if ranks is None or microbatches is None:
        raise LoadError(f"{name} is a class, so from_torch needs ranks= and microbatches=")
    expect_shape(shape)
    if chunks is None:
        chunks = 2 if many else 1
    held = range(0, ranks * chunks, ranks)
    stages = [
        SimpleNamespace(
            stage_index=stage,
            num_stages=ranks * chunks,
            group_size=ranks,
            group_rank=0,
            is_first=stage == 0,
            is_last=stage == ranks * chunks - 1,
            has_backward=True,
            submod=None,
        )
        for stage in held
    ]
    try:
        if not many and chunks > 1:
            raise ValueError("it has one stage on each rank")
        return theirs(stages if many else stages[0], microbatches, loss_fn=lambda *_: None)
    except Exception as error:  # of torch
        raise LoadError(
            f"{name} can't be made of {ranks} ranks, {microbatches} microbatches and {chunks} "
            f"chunks: {error}"
        ) from error


def _text(theirs: Any, communication: bool, gathers: Collection[int] | str) -> str:
    """The actions of a schedule as torch's CSV, without those that the caller does not want.

    Raises LoadError if it has none.
    """
    lists = getattr(theirs, "pipeline_order_with_comms", None)
    lists = lists or getattr(theirs, "pipeline_order", None)
    if not isinstance(lists, Mapping) or not any(lists.values()):
        raise LoadError(
            f"from_torch takes a schedule of torch.distributed.pipelining that lists its actions, "
            f"or 1F1B or GPipe; this {type(theirs).__name__} has no list"
        )

    def wanted(text: str) -> bool:
        group = _GROUP.fullmatch(text)
        if group is not None and gathers != THEIRS:
            return int(group[1]) in gathers
        return communication or _TRANSFER.fullmatch(text) is None

    rows = (
        filter(wanted, ("" if one is None else str(one) for one in own))
        for _, own in sorted(lists.items())
    )
    return "".join(",".join(row) + "\n" for row in rows)
