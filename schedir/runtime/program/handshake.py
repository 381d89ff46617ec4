"""The handshake before a call: the rank of the first stage announces it, and all others compare.

Ranks that make different calls would wait for each other for ever, and ranks that hold different
batches would train on wrong pairs. So before anything of a call is posted, one message goes to all:

    pipeline 0   rank 0 ─▶ rank 1 ─▶ rank 3        within a pipeline, over a tree of its ranks
                      └──▶ rank 2
    pipeline 1   rank 0 ─▶ …                       between pipelines, and the slices of a mesh

The message goes beside the pipeline's traffic. That is tagged by program, so transfers for one
input signature never meet those for another.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from schedir.errors import ExecutionError
from schedir.runtime.call import KINDS, NOTHING, Call
from schedir.runtime.memory import plain_parts
from schedir.runtime.microbatches import Batch
from schedir.runtime.plan import Plan
from schedir.runtime.processes.control import PIPELINE_TAG, RANK_TAG, Control, Relay
from schedir.runtime.processes.failure import users_line
from schedir.runtime.processes.grid import Grid

_PRECISIONS = (None, torch.bfloat16, torch.float16, torch.float32)
_NAMES = [kind.name for kind in KINDS]
_NUMBERS = "rows", "inputs", "target", "signature"
_SIZE = 5 + len(_NUMBERS)


def _encoded(call: Call) -> Tensor:
    """A call as it is announced: a vector of integers, -1 for None."""
    kind, precision = _NAMES.index(call.name), _PRECISIONS.index(call.precision)
    numbers = [-1 if (n := getattr(call, name)) is None else n for name in _NUMBERS]
    sent = kind, call.number, call.step, precision, call.stop, *numbers
    return torch.tensor(sent, device="cpu")


def _decoded(received: Tensor) -> Call:
    kind, number, step, precision, stop, *numbers = received.tolist()
    call = KINDS[kind].of_number(number, step, _PRECISIONS[precision])
    for name, found in zip(_NUMBERS, numbers, strict=True):
        setattr(call, name, None if found < 0 else found)
    call.stop = bool(stop)
    return call


class Handshake:
    """Sends the announcements of the rank that speaks for each pipeline to all processes.

    `stops` says whether a process has been asked to end.
    """

    def __init__(self, plan: Plan, control: Control, stops: Callable[[], bool]) -> None:
        self._stops = stops
        self._grid = grid = plan.grid
        self._speaker = speaker = plan.schedule.placement[0][0]
        # One rank alone has nobody to compare with; others don't read what they are given.
        first, last = plan.schedule.placement[0], plan.schedule.placement[-1]
        alone = {*first, *last} == {grid.rank}
        self._compares = not alone and not {0, plan.last_stage}.isdisjoint(plan.local_stages)
        # One process may run several ranks.
        ranks = [*dict.fromkeys(grid.number((speaker + i) % grid.ranks) for i in range(grid.ranks))]
        self._within = Relay(control, ranks, _SIZE, RANK_TAG) if len(ranks) > 1 else None
        speakers = [grid.everyone.index(row[speaker]) for layout in grid.slices for row in layout]
        # The number and the name of the process that speaks for all, and for this pipeline.
        of_all = " (the first process)" * (len(grid.slices) > 1)
        self._first = speakers[0], grid.name(speaker, 0) + of_all
        self._own = grid.number(speaker), grid.name(speaker, grid.pipeline)
        speaks = len(speakers) > 1 and grid.rank == speaker
        self._between = Relay(control, speakers, _SIZE, PIPELINE_TAG) if speaks else None

    def open(self, call: Call, inputs: Batch | None, target: Batch | None) -> None:
        """Announce a call on whole batches; see `exchange`."""
        if self._compares:
            call.inputs, call.target = fingerprint(inputs), fingerprint(target)
        call.stop = self._stops()
        self.exchange(call)

    def exchange(self, call: Call) -> None:
        """Compare this process's call with that of the pipeline's speaker, who knows its rows, its
        signature, and whether all are to stop after it.

        Raises ExecutionError if they make different calls, or hold different batches.
        """
        grid, speaker = self._grid, self._speaker
        if self._between is not None:
            first = _decoded(self._between.pass_on(_encoded(call)))
            _check_same_call(call, first, grid, *self._first)
            call.stop = first.stop
        if self._within is None:
            return
        if grid.rank == speaker:
            self._within.pass_on(_encoded(call))
            return
        found = _decoded(self._within.pass_on(None))
        _check_same_call(call, found, grid, *self._own)
        _check_same_batch(call, found, grid, speaker)
        call.rows, call.signature, call.stop = found.rows, found.signature, found.stop

    def last(self, call: Call) -> None:
        """Announce that there is no other call; nobody has to be there to hear it."""
        for relay in (self._between, self._within):
            if relay is not None:
                relay.leave(_encoded(call))


def _check_same_call(own: Call, received: Call, grid: Grid, number: int, speaker: str) -> None:
    """Raise ExecutionError if this rank makes another call than the `speaker` of a pipeline, which
    has that number, or is at another step, and so would draw other dropout."""
    rank, both = grid.rank, (number, grid.number(grid.rank))
    if own.name != received.name or own.precision is not received.precision:
        raise ExecutionError(
            f"call {own.number} of rank {rank} is {own.what} ({users_line()}), but call "
            f"{received.number} of {speaker} is {received.what}; every rank must make the same "
            "calls, in the same order",
            processes=both,
            rank=rank,
        )
    if own.step != received.step:
        raise ExecutionError(
            f"{_where(own)} is at step {own.step} on rank {rank}, but {speaker} is at step "
            f"{received.step}, so they would draw dropout of different steps; set executor.steps "
            "to the same number on every rank",
            processes=both,
            rank=rank,
        )


def _check_same_batch(own: Call, received: Call, grid: Grid, speaker: int) -> None:
    """Raise ExecutionError if this rank holds another batch than the speaker: a step would take the
    inputs from one rank and the target from the other."""
    both = grid.number(speaker), grid.number(grid.rank)
    if None not in (own.rows, received.rows) and own.rows != received.rows:
        cut_here = "stage_inputs" if own.target == NOTHING else "target"
        raise ExecutionError(
            f"{_where(own)}: `{cut_here}` has {own.rows} rows on rank {grid.rank} at step "
            f"{own.step}, but `inputs` {received.rows} on rank {speaker} at its step "
            f"{received.step}; whole batches of a call must have the same rows: draw the same "
            "batches on every rank",
            processes=both,
            rank=grid.rank,
        )
    if own.inputs == received.inputs and own.target == received.target:
        return
    for what in ("inputs", "target"):
        if differ(getattr(own, what), getattr(received, what)):
            raise ExecutionError(
                f"{_where(own)}: `{what}` is another batch on rank {grid.rank} at step {own.step} "
                f"than on rank {speaker} at its step {received.step}, so inputs of one would go "
                "with the target of the other; draw the same batches on every rank (with the same "
                "seed, or by schedir.training.Batches), or pass inputs only on the first stage's "
                "rank and target only on the last one's",
                processes=both,
                rank=grid.rank,
            )


def _where(own: Call) -> str:
    return f"call {own.number}, {own.what} ({users_line()})"


# A fingerprint is a cheap hash of a batch, taken at every step.

_BLOCK = 2048  # words of 8 bytes in a block; a block becomes one weighted sum
_BLOCKS = 256  # blocks that are hashed at most, 4 MiB: all of most batches
_WEIGHTS = np.random.Generator(np.random.PCG64(0)).integers(1 << 62, size=_BLOCK) * 2 + 1
_WHOLE, _READY = 1, 2  # the forms of a batch: whole, or ready microbatches


def fingerprint(batch: Any) -> int:
    """The fingerprint of a whole batch, or of a list of ready microbatches.

    Equal batches have equal fingerprints on every rank; different ones differ. A tensor of up to
    4 MiB counts with all its values, a larger one with a sample of 4 MiB. A tensor on a GPU counts
    only with its shape and type, because the host would have to wait for its values.
    """
    if isinstance(batch, (Tensor, tuple, Mapping)):
        form = _WHOLE
    elif isinstance(batch, Sequence):
        form = _READY
    else:
        return NOTHING
    found = 0
    for part in _parts(batch):
        shape = hash((part.dtype.itemsize, *part.shape))  # of integers: the same everywhere
        found = zlib.crc32(shape.to_bytes(8, "little", signed=True), found)
        if part.device.type == "cpu":
            found = zlib.crc32(_sample(part), found)
    return found << 2 | form


def differ(one: int, other: int) -> bool:
    """Whether two batches are known to differ; only batches of the same form can be compared."""
    return one != other and NOTHING not in (one, other) and (one ^ other) & 3 == 0


def _parts(batch: Any) -> Iterator[Tensor]:
    """The plain tensors of a batch. What a jagged one has computed of itself is empty, and is no
    part: ranks may have asked it for different things."""
    for tensor in (batch,) if isinstance(batch, Tensor) else _tensors(batch):
        for part in plain_parts(tensor):
            if part is tensor or part.numel():
                yield part


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        for value in batch:
            yield from _tensors(value)
    else:  # a container that was made known to torch, or no tensor at all
        for leaf in pytree.tree_leaves(batch):
            if leaf is not batch:
                yield from _tensors(leaf)


def _sample(tensor: Tensor) -> bytes:
    """A tensor's elements in few bytes: weighted sums of blocks, and the rest as it is.

    If a word of a block changes, its sum changes, because the weights are odd. Single elements
    would say too little: padded ids, images with a border and one-hot rows are mostly zeros.
    """
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    tensor = tensor.detach()
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize < 4:  # numpy lacks most of these
        tensor = tensor.view(torch.int16 if tensor.dtype.itemsize == 2 else torch.uint8)
    values = tensor.numpy()
    size = _BLOCK * _WEIGHTS.itemsize // values.itemsize  # of a block, in elements
    number = values.size // size
    if number <= _BLOCKS:
        flat: Any = np.ascontiguousarray(values).reshape(-1)
        blocks = flat[: number * size]
    else:  # one somewhere in each stretch: none at the same place of every image
        stretch = number // _BLOCKS
        starts = (np.arange(_BLOCKS) * stretch + _WEIGHTS[:_BLOCKS] % stretch) * size
        flat = values.reshape(-1) if values.flags.c_contiguous else values.flat  # never copied
        blocks = np.concatenate([flat[start : start + size] for start in starts])
    sums = blocks.view(np.int64).reshape(-1, _BLOCK) @ _WEIGHTS
    return bytes(sums.tobytes() + flat[number * size :].tobytes())
