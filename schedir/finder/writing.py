"""Between orders, which name no microbatches, and schedules, which do."""

from __future__ import annotations

import numpy as np

from schedir.finder.task import BACKWARD, FORWARD, INPUT, LEAN, RECOMPUTE, WEIGHT, Task
from schedir.graph.board import Order
from schedir.graph.compile import graph_of
from schedir.ir import COMPUTE, KIND_INDEX, KINDS, Columns, Kind, Schedule, starts_of
from schedir.passes import append_steps

_KINDS = {
    FORWARD: Kind.FORWARD,
    LEAN: Kind.FORWARD,
    BACKWARD: Kind.BACKWARD,
    INPUT: Kind.BACKWARD_INPUT,
    WEIGHT: Kind.BACKWARD_WEIGHT,
    RECOMPUTE: Kind.RECOMPUTE,
}
_INDEX = [KIND_INDEX[_KINDS[kind]] for kind in range(len(_KINDS))]
_STEPS = {KINDS.index(kind): step for step, kind in _KINDS.items() if step != LEAN}


def schedule_of(task: Task, order: Order, name: str) -> Schedule:
    """The schedule of an order, with an OPTIM_STEP for every stage, its communication left out."""
    steps = np.array([step for own in order for step in own], np.int64)
    kind, stage = np.divmod(steps, task.stages)
    lengths = np.array([len(own) for own in order], np.int64)
    rank = np.repeat(np.arange(len(order)), lengths)
    forwards, lean = kind <= LEAN, kind == LEAN
    backwards, split = (kind == BACKWARD) | (kind == INPUT), kind == INPUT
    microbatch = np.zeros(len(steps), np.int64)
    for each in range(task.stages):
        own = stage == each
        for which in (forwards, backwards):
            microbatch[own & which] = np.arange(task.microbatches)
        microbatch[own & (kind == WEIGHT)] = microbatch[own & split]
        microbatch[own & (kind == RECOMPUTE)] = microbatch[own & lean]
    columns = Columns(
        starts_of(rank, task.ranks),
        np.array(_INDEX)[kind],
        stage,
        microbatch,
        np.full(len(steps), -1),
        np.zeros(len(steps), np.bool_),
    )
    return append_steps(Schedule(name, task.microbatches, task.placement, columns))


def order_of(task: Task, schedule: Schedule) -> Order | None:
    """The order of a synchronous schedule; None for any other, for one that has replicas or
    overlapped pairs, or is of another placement or number of microbatches."""
    columns = schedule.columns
    steps = columns.where(Kind.OPTIM_STEP)
    if (
        schedule.placement != tuple((rank,) for rank in task.placement)
        or schedule.microbatches != task.microbatches
        or columns.joined[columns.is_kind(*COMPUTE)].any()
        or columns.stage[steps].tolist() != [s for held in task.stages_of for s in held]
    ):
        return None
    order: Order = []
    lean = np.zeros(len(columns), np.bool_)
    for touch in graph_of(schedule).touches("kept"):
        lean[touch.places] |= touch.use.does == "make"
    for begin, end in zip(columns.starts[:-1].tolist(), columns.starts[1:].tolist(), strict=True):
        own = []
        for place in range(begin, end):
            kind = _STEPS.get(int(columns.kind[place]))
            if kind is not None:
                kind = LEAN if lean[place] else kind
                own.append(kind * task.stages + int(columns.stage[place]))
        order.append(own)
    return order
