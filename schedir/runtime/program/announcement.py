"""What a rank is about to do, so that others can compare it with what they are.

Ranks that make different calls would wait for each other for ever, and those that hold different
batches train on wrong pairs.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from schedir.runtime.batch import fingerprint
from schedir.runtime.batch.feeding import Feed
from schedir.runtime.call import REQUESTS, Call, Request
from schedir.runtime.processes.failure import OneLineError, users_line
from schedir.runtime.processes.grid import Grid

UNKNOWN = -1
_PRECISIONS = (None, torch.bfloat16, torch.float16, torch.float32)


@attrs.frozen
class Announcement:
    """One call, as one rank makes it.

    `call` counts the calls before this one and `step` those of `step`, which seed its forwards;
    `precision` is what the caller's autocast computes in.
    `rows` are those of the whole batches that are cut here, `inputs` and `target` the fingerprints
    of what was given. The first stage's rank knows the number of the input `signature`.
    """

    request: Request
    call: int
    step: int = 0
    precision: torch.dtype | None = None
    rows: int = UNKNOWN
    inputs: int = fingerprint.NOTHING
    target: int = fingerprint.NOTHING
    signature: int = UNKNOWN

    def __str__(self) -> str:
        under = "" if self.precision is None else f" under autocast to {self.precision}"
        return f"{self.request.name}{under}"


SIZE = len(attrs.fields(Announcement))
"""How many integers an announcement is sent as."""


def announcement_of(call: Call, feed: Feed, signature: int | None) -> Announcement:
    """This rank's own; `signature` is None where the first stage is elsewhere."""
    return Announcement(
        call.request,
        call.number,
        call.step,
        call.precision,
        UNKNOWN if feed.rows is None else feed.rows,
        *feed.fingerprints,
        UNKNOWN if signature is None else signature,
    )


def encoded(a: Announcement) -> Tensor:
    """As it is sent: SIZE integers."""
    kind, precision = REQUESTS.index(a.request), _PRECISIONS.index(a.precision)
    sent = kind, a.call, a.step, precision, a.rows, a.inputs, a.target, a.signature
    return torch.tensor(sent, device="cpu")


def decoded(received: Tensor) -> Announcement:
    """What was sent."""
    request, call, step, precision, *rest = received.tolist()
    return Announcement(REQUESTS[request], call, step, _PRECISIONS[precision], *rest)


def check_same_call(
    own: Announcement, received: Announcement, grid: Grid, speaker: int, pipeline: int
) -> None:
    """Raise OneLineError where this rank makes another call than the speaker of a pipeline, or
    would draw other dropout in it."""
    if (own.request, own.precision) != (received.request, received.precision):
        raise OneLineError(
            f"its call {own.call} is {own} ({users_line()}), but call {received.call} of "
            f"{grid.name(speaker, pipeline)} is {received}; every rank must make the same "
            "calls, in the same order",
            rank=grid.rank,
        )
    if own.step != received.step:
        raise OneLineError(
            f"{_where(own)} is at step {own.step} here, but {grid.name(speaker, pipeline)} is at "
            f"step {received.step}, so they would draw dropout of different steps; set "
            "executor.steps alike on every rank",
            rank=grid.rank,
        )


def check_same_batch(own: Announcement, received: Announcement, rank: int, speaker: int) -> None:
    """Raise OneLineError where this rank holds another batch than the speaker: a step would take
    the inputs from one rank and the target from the other."""
    if UNKNOWN not in (own.rows, received.rows) and own.rows != received.rows:
        cut_here = "stage_inputs" if own.target == fingerprint.NOTHING else "target"
        raise OneLineError(
            f"{_where(own)}: `{cut_here}` has {own.rows} rows here at step {own.step}, but "
            f"`inputs` {received.rows} on rank {speaker} at its step {received.step}; all whole "
            "batches of a call are cut alike, so they must have the same rows",
            rank=rank,
        )
    for what in ("inputs", "target"):
        if fingerprint.differ(getattr(own, what), getattr(received, what)):
            raise OneLineError(
                f"{_where(own)}: `{what}` is another batch here at step {own.step} than on rank "
                f"{speaker} at its step {received.step}, so inputs of one would go with the target "
                "of the other; draw the same batches on every rank (seed alike, or read them by "
                "schedir.training.Batches), or pass inputs only on the first stage's rank and "
                "target only on the last one's",
                rank=rank,
            )


def _where(own: Announcement) -> str:
    return f"call {own.call}, {own} ({users_line()})"
