"""Cuts a call's arguments into microbatches for the stages here, and a call into its batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import attrs
import torch
from torch import Tensor

from schedir.errors import ExecutionError
from schedir.ir import COMPLETES_GRADIENTS, Kind, Schedule, flat
from schedir.runtime.call import Call
from schedir.runtime.microbatches import (
    Batch,
    ChunkSpecs,
    Dim,
    DimsOf,
    Microbatch,
    Pieces,
    checked,
    cut,
    is_whole,
    placed,
)
from schedir.runtime.plan import Plan
from schedir.runtime.samples import SUMS, Count, Samples


@attrs.frozen(eq=False)
class CallArguments:
    """The arguments of one call; see `Executor.step`."""

    inputs: Batch | None
    target: Batch | None = None
    stage_inputs: Mapping[int, Batch | None] = {}
    loss_kwargs: Batch | None = None


@attrs.frozen(eq=False)
class Feed:
    """The data of a call for the stages here, by microbatch; empty for other ranks' data.

    `extras` is what stages get beside their input, by stage, as far as this rank was given it.
    `counts` are the samples of each microbatch, on a rank of the last stage. `rows` are the rows of
    the whole batches that were cut here, None if none was cut.
    """

    inputs: Sequence[Microbatch]
    extras: Mapping[int, Sequence[Microbatch]]
    targets: Sequence[Microbatch]
    loss_keywords: Sequence[Mapping[str, Any]]
    counts: Sequence[Count]
    rows: int | None


class Feeder:
    """Cuts the arguments of calls into microbatches for the stages here."""

    def __init__(self, plan: Plan, samples: Samples) -> None:
        given = plan.arguments
        self._plan, self._samples, self._weigh = plan, samples, given.weigh
        self._microbatches, self._last = plan.schedule.microbatches, plan.last_stage
        self._local, self._device = plan.local_stages, plan.device
        self._specs = ChunkSpecs(
            given.batch_dim,
            checked(given.args_chunk_spec, "args_chunk_spec"),
            checked(dict(given.kwargs_chunk_spec or {}), "kwargs_chunk_spec"),
        )
        self._has_first, self._has_last = 0 in self._local, self._last in self._local
        self._of_target = ChunkSpecs(given.batch_dim)
        has_specs = given.args_chunk_spec is not None or bool(given.kwargs_chunk_spec)
        self._is_plain = self._device.type == "cpu" and not samples.asks and not has_specs

    def cut(self, given: CallArguments, kind: Call) -> Feed:
        """Cut a call into microbatches. Raises ExecutionError for arguments that don't fit."""
        if self._is_plain and kind.trains and not given.stage_inputs and not given.loss_kwargs:
            feed = self._cut_tensors(given.inputs, given.target)
            if feed is not None:
                return feed
        extras = self._extras(given.stage_inputs)
        # A stage that gets its labels itself, and returns the loss, needs no target.
        alone = kind.has_loss and given.target is None and self._last in extras
        needs = [(0, given.inputs, "inputs")]
        if kind.has_loss and not alone:
            needs.append((self._last, given.target, "target"))
        for stage, batch, what in needs:
            if stage in self._local and batch is None:
                raise ExecutionError(
                    f"stage {stage}, which runs here, needs {what}{self._who_needs(kind)}"
                )
        pieces: dict[str, Pieces] = {}

        def beside(batch: Batch, what: str) -> Sequence[Dim]:
            return self._specs.beside(batch, what, _common_rows(pieces))

        has_target = self._has_last and given.target is not None
        # Where inputs are not used, they have the rows.
        tell_rows = bool(extras) and not has_target and is_whole(given.inputs)
        has_loss = has_target or (self._has_last and alone)
        read: list[tuple[str, Batch | None, DimsOf]] = [
            (
                "inputs",
                given.inputs if self._has_first or tell_rows else None,
                self._specs.along,
            ),
            ("target", given.target if has_target else None, self._of_target.along),
            *((name_of_extra(stage), batch, beside) for stage, batch in extras.items()),
            ("loss_kwargs", given.loss_kwargs if has_loss else None, beside),
        ]
        for what, batch, dims_of in read:
            if batch is not None:
                short = not kind.trains
                pieces[what] = cut(batch, self._microbatches, what, dims_of, may_be_short=short)
        rows = _common_rows(pieces)
        counts: Sequence[Count] = ()
        if has_loss:
            _check_keywords(pieces.get("loss_kwargs"), self._weigh)
            counted = name_of_extra(self._last) if alone else "target"
            counts = self._samples.of(pieces[counted], counted, rows)
        if not self._has_first:
            pieces.pop("inputs", None)
        # They were counted before: for data on the CPU the host does not wait for the GPU.
        moved = {what: placed(own.microbatches, self._device, what) for what, own in pieces.items()}
        return Feed(
            moved.get("inputs", ()),
            {stage: moved[name_of_extra(stage)] for stage in extras},
            moved.get("target", ()),
            moved.get("loss_kwargs", ()),
            counts,
            rows,
        )

    def _cut_tensors(self, inputs: Batch | None, target: Batch | None) -> Feed | None:
        """The result of `cut`, but faster, for inputs and target of one tensor each; otherwise
        None."""
        dim, parts = self._specs.batch_dim, self._microbatches
        here: list[Any] = [inputs] * self._has_first + [target] * self._has_last
        for batch in here:
            if type(batch) is not Tensor or batch.layout is not torch.strided or batch.is_nested:
                return None
            if dim >= batch.dim() or not parts <= batch.shape[dim] == here[0].shape[dim]:
                return None
        rows: Any = here[0].shape[dim] if here else None
        pieces = [batch.tensor_split(parts, dim) for batch in here]
        counts = self._samples.of_rows(rows) if self._has_last else ()
        return Feed(
            pieces[0] if self._has_first else (),
            {},
            pieces[-1] if self._has_last else (),
            (),
            counts,
            rows,
        )

    def _extras(self, stage_inputs: Mapping[int, Batch | None]) -> dict[int, Batch]:
        """The `stage_inputs` to read: of all stages on the rank of the first stage, because shapes
        depend on them; on other ranks those of their own stages."""
        for stage in stage_inputs:
            if stage not in range(self._last + 1):
                raise ExecutionError(
                    f"stage_inputs: there is no stage {stage!r}, only 0..{self._last}"
                )
        return {
            stage: batch
            for stage, batch in stage_inputs.items()
            if batch is not None and (self._has_first or stage in self._local)
        }

    def _who_needs(self, kind: Call) -> str:
        """The ranks that need inputs and target; empty if this rank needs all."""
        first, last = self._plan.schedule.placement[0], self._plan.schedule.placement[-1]
        if {*first, *last} <= {*self._plan.local_ranks}:
            return ""
        target = f", target to {_ranks(last)} for the last one" if kind.has_loss else ""
        return (
            f": inputs go to {_ranks(first)} for the first stage{target}; other ranks ignore what "
            "they are given"
        )


def _check_keywords(given: Pieces | None, weigh: str | None) -> None:
    """Raise ExecutionError for `loss_kwargs` that the loss can't be called with."""
    for piece in [] if given is None else given.microbatches:
        if not isinstance(piece, Mapping):
            raise ExecutionError(
                "loss_kwargs: each microbatch needs a dict of keyword arguments, not "
                f"{type(piece).__name__}"
            )
        if piece.get("reduction") == "sum" and weigh is not None:
            raise ExecutionError(SUMS)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {' and '.join(map(str, ranks))}"


def name_of_extra(stage: int) -> str:
    """What a stage gets beside its input, as messages name it."""
    return f"stage_inputs[{stage}]"


def _common_rows(pieces: Mapping[str, Pieces]) -> int | None:
    """The rows of all whole batches; None if all microbatches came ready-made.

    Raises ExecutionError for different rows: they would not belong together, and a loss might even
    broadcast them.
    """
    found = {what: held.rows for what, held in pieces.items() if held.rows is not None}
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{what} {rows}" for what, rows in found.items())
        raise ExecutionError(
            "whole batches of a call must have the same number of rows, but their rows differ: "
            f"{listed}; pass a batch with other rows as a list of ready microbatches"
        )
    return next(iter(found.values()), None)


def batches_of(microbatches: int, size: int) -> list[range]:
    """The microbatches of each batch, `size` a batch."""
    return [range(first, first + size) for first in range(0, microbatches, size)]


# Of a call that has several batches, a list says where each is applied:
#
#     microbatches of a batch: 2     1F1B that steps after each backward, rank 0 of 2
#
#     0F0 0F1 0B0 0OPTIM_STEP 0F2 0B1 0OPTIM_STEP │ 0F3 0B2 0OPTIM_STEP 0B3 0OPTIM_STEP │
#                                     batch 0 is in the weights               batch 1 is


def ends_of_batches(schedule: Schedule, rank: int, size: int) -> list[int]:
    """For each batch but the last, of `size` microbatches, the number of entries in the rank's list
    up to the last OPTIM_STEP that applies any of it."""
    ends = [0] * -(-schedule.microbatches // size)
    for index, _, batches in _steps(schedule, rank, size):
        for batch in batches:
            ends[batch] = index + 1
    return [*accumulate(ends, max)][:-1]  # a replica may have nothing of one


def check_batches(schedule: Schedule, size: int) -> None:
    """Raise ExecutionError unless a list applies its batches one after the other: each OPTIM_STEP
    applies microbatches of one batch, and each rank applies a batch before the next one."""
    for rank in range(schedule.ranks):
        latest = 0
        for index, stage, batches in _steps(schedule, rank, size):
            if len(batches) > 1 or min(batches, default=latest) < latest:
                first, *others = sorted({*batches, latest})
                what = (
                    f"applies microbatches of batches {first} and {others[-1]} at once"
                    if len(batches) > 1
                    else f"applies batch {first} after another stage's has applied {others[-1]}"
                )
                raise ExecutionError(
                    f"{schedule.name}: OPTIM_STEP of stage {stage} {what}, {size} microbatches "
                    "each, so the batches could not have different learning rates; take batches of "
                    "another number of microbatches, or a schedule= whose updates fit them",
                    rank=rank,
                    index=index,
                )
            latest = max(batches, default=latest)


def _steps(schedule: Schedule, rank: int, size: int) -> list[tuple[int, int, set[int]]]:
    """The OPTIM_STEPs of a rank: the index, the stage and the applied batches of each."""
    pending: dict[int, set[int]] = {}
    found = []
    for index, entry in enumerate(schedule.actions[rank]):
        for action in flat([entry]):
            if action.kind in COMPLETES_GRADIENTS and action.microbatch is not None:
                pending.setdefault(action.stage, set()).add(action.microbatch // size)
            elif action.kind is Kind.OPTIM_STEP:
                found.append((index, action.stage, pending.pop(action.stage, set())))
    return found
