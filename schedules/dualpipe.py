"""DualPipe (DeepSeek-V3, arXiv 2412.19437, section 3.2.1), and DualPipeV (deepseek-ai/DualPipe)."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from schedir import (
    Action,
    Pipeline,
    Together,
    backward,
    backward_input,
    backward_weight,
    forward,
    mirrored,
    optim_step,
    reduce_grad,
    schedule,
    together,
    wave,
)

Entries: TypeAlias = Iterator[Action | Together]
Chunk: TypeAlias = tuple[int, range]  # a stage, and the microbatches that it runs


@schedule("dualpipe", placement=mirrored)
def dualpipe(pipe: Pipeline, rank: int) -> Entries:
    """Two pipelines, down and up the ranks: forwards of one overlap backwards of the other.

    8 microbatches on 4 ranks, a backward (B, or I and W apart) twice as long as a forward; two
    actions in both lanes of a rank at once are an overlapped pair:

        rank 0 stage 0  F0 F1 F2             F3------    B0------          B1------       I2 ...
        rank 0 stage 3           F4 I4 W4 F5 B5------    F6------ B6---    F7------ B7---    ...
        rank 1 stage 1     F0    F1    F2       B0------ F3------ B1------       B2---       ...
        rank 1 stage 2        F4    F5    B4--- F6------ B5------ F7------ B6---          I7 ...
        rank 2 stage 1     F4    F5    F6       B4------ F7------ B5------       B6---       ...
        rank 2 stage 2        F0    F1    B0--- F2------ B1------ F3------ B2---          I3 ...
        rank 3 stage 0  F4 F5 F6             F7------    B4------          B5------       I6 ...
        rank 3 stage 3           F0 I0 W0 F1 B1------    F2------ B2---    F3------ B3---    ...

    Stage s is on two ranks, s and ranks - 1 - s. The first half of the microbatches goes down the
    ranks, the second half up. The number of ranks must be even, and each rank needs two
    microbatches or more. With an odd number of microbatches the second half is one short. With
    F&B for an overlapped pair, a rank idles for (ranks / 2 - 1) (F&B + B - 3 W).

    Bubble: (P - 2) / (3 * M + P - 2) if M % 2 == 0
    Memory: P + 1
    Choose it if the model is built to overlap a forward with a backward, as experts that wait
    for all-to-all are, and every rank has room for the weights of two stages.
    """
    ranks, microbatches = pipe.ranks, pipe.microbatches
    if ranks % 2 or microbatches < 2 * ranks or pipe.chunks > 1:
        raise ValueError(
            "dualpipe takes an even number of ranks, one chunk and two or more microbatches for "
            f"each rank; not {ranks} ranks, {pipe.chunks} chunks and {microbatches} microbatches"
        )
    half = (microbatches + 1) // 2
    near = min(rank, ranks - 1 - rank)
    far = ranks - 1 - near
    down, up = range(half), range(half, 2 * half)
    first, second = (down, up) if rank == near else (up, down)
    entries = _eight_steps(ranks // 2, near, (near, first), (far, second))
    yield from _without(microbatches, entries) if microbatches % 2 else entries
    yield reduce_grad(near)
    yield reduce_grad(far)
    yield optim_step(near)
    yield optim_step(far)


@schedule("dualpipev", placement=wave, chunks=2)
def dualpipev(pipe: Pipeline, rank: int) -> Entries:
    """DualPipe folded into a V: each stage is held once, on its way down or back up.

    4 microbatches on 2 ranks, stages 0 and 3 on the first, 1 and 2 on the second; a backward twice
    as long as a forward, `;` between two that run as one:

        rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3;3B1----     3F2;0B0---- 3B2----     3F3;0B1---- ...
        rank 1      1F0 2F0 1F1 2F1 1F2 2B0---- 2F2;1B0---- 1F3;2B1---- 2F3;1B1---- 2B2---- 1...

    It needs two chunks, and two microbatches or more for each rank.

    Bubble: (P - 1) / (3 * M + P - 1)
    Memory: P + 1 / 2
    Choose it over `dualpipe` if the weights of two stages do not fit: it holds each stage once
    and overlaps the same pairs.
    """
    ranks, microbatches = pipe.ranks, pipe.microbatches
    if microbatches < 2 * ranks or pipe.chunks != 2:
        raise ValueError(
            "dualpipev takes two chunks and two or more microbatches for each rank; not "
            f"{pipe.chunks} chunks, {ranks} ranks and {microbatches} microbatches"
        )
    near, far = pipe.stages_of(rank)
    yield from _eight_steps(ranks, rank, (near, range(microbatches)), (far, range(microbatches)))
    yield optim_step(near)
    yield optim_step(far)


def _eight_steps(ranks: int, rank: int, near: Chunk, far: Chunk) -> Entries:
    """The list of a rank of DualPipeV, or half of the list of a rank of DualPipe.

    Chunk 0 is the one nearer to the input, chunk 1 the other one."""
    microbatches, later = len(near[1]), ranks - rank - 1
    forwards = [iter([forward(stage, m) for m in batch]) for stage, batch in (near, far)]
    backwards = [iter([(stage, m) for m in batch]) for stage, batch in (near, far)]
    split: deque[tuple[int, int]] = deque()  # whose gradient of the weights is to come

    def ahead(chunk: int) -> Action:
        return next(forwards[chunk])

    def back(chunk: int) -> Action:
        return backward(*next(backwards[chunk]))

    def back_to_input(chunk: int) -> Action:
        split.append(next(backwards[chunk]))
        return backward_input(*split[-1])

    for _ in range(2 * later):
        yield ahead(0)
    for _ in range(rank + 1):
        yield ahead(0)
        yield ahead(1)
    for _ in range(later):
        yield back_to_input(1)
        yield backward_weight(*split.popleft())
        yield ahead(1)
    for step in range(microbatches - 2 * ranks + rank + 1):
        if step == 0 and rank == ranks - 1:  # the turn: apart, so that the way back starts sooner
            yield ahead(0)
            yield back(1)
        else:
            yield together(ahead(0), back(1))
        yield together(ahead(1), back(0))
    for _ in range(later):
        yield back(1)
        yield together(ahead(1), back(0))
    for step in range(2 * (rank + 1)):
        yield (back if step <= rank else back_to_input)((step + 1) % 2)
    for _ in range(later):
        yield backward_weight(*split.popleft())
        yield back_to_input(0)
    while split:
        yield backward_weight(*split.popleft())


def _without(microbatch: int, entries: Iterable[Action | Together]) -> Entries:
    """The entries without one microbatch."""
    for entry in entries:
        actions = entry.actions if isinstance(entry, Together) else (entry,)
        kept = [action for action in actions if action.microbatch != microbatch]
        if kept:
            yield kept[0] if len(kept) == 1 else entry
