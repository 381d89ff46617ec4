# schedir check examples/broken/1_hangs_on_nccl.py --ranks 2 --microbatches 4
"""1F1B whose author placed the communication: right after each forward, right before each use.

It trains on gloo. On GPUs, with torch's isend and irecv, it hangs in the first step. Why, and which
line has to move?
"""

from collections.abc import Iterator

from schedir import (
    Action,
    Pipeline,
    backward,
    forward,
    optim_step,
    recv_act,
    recv_grad,
    schedule,
    send_act,
    send_grad,
)


@schedule("hangs-on-nccl")
def hangs_on_nccl(pipe: Pipeline, rank: int) -> Iterator[Action]:
    """1F1B, each send behind what makes it and each receive before what uses it."""
    (stage,) = pipe.stages_of(rank)
    first, last = stage == 0, stage == pipe.stages - 1

    def run_forward(m: int) -> Iterator[Action]:
        if not first:
            yield recv_act(stage, m)
        yield forward(stage, m)
        if not last:
            yield send_act(stage, m)

    def run_backward(m: int) -> Iterator[Action]:
        if not last:
            yield recv_grad(stage, m)
        yield backward(stage, m)
        if not first:
            yield send_grad(stage, m)

    warmup = min(pipe.ranks - rank - 1, pipe.microbatches)
    for m in range(warmup):
        yield from run_forward(m)
    for m in range(warmup, pipe.microbatches):
        yield from run_forward(m)
        yield from run_backward(m - warmup)
    for m in range(pipe.microbatches - warmup, pipe.microbatches):
        yield from run_backward(m)
    yield optim_step(stage)
