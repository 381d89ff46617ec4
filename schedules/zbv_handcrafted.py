"""The handcrafted ZB-V: zero bubble on a V, phase by phase (arXiv 2401.10241, section 6)."""

from collections import Counter
from collections.abc import Iterator

from schedir import (
    Action,
    Pipeline,
    backward_input,
    backward_weight,
    forward,
    optim_step,
    schedule,
    wave,
)


@schedule("zbv-handcrafted", aliases=("zbv-zero-bubble",), placement=wave, chunks=2)
def zbv_handcrafted(pipe: Pipeline, rank: int) -> Iterator[Action]:
    """ZB-V as it was first drawn, and as torch lists it, for equal F, I and W.

    Every rank holds a stage of the way down and one of the way up. If there are 2 * ranks - 1
    microbatches or more, and F, I and W take equally long, no rank waits once it has begun, as with
    `zbv`. With fewer microbatches the list leaves out the missing ones, and `zbv` is better. 5
    microbatches on 3 ranks, `W` the gradient of the weights:

        rank 0  0F0 0F1 0F2 0F3 0F4 5F0 5I0 5W0 5F1 5I1 5W1 5F2 5I2 5W2 0I0 0W0 5F3 5I3 5W3 0I1 ...
        rank 1      1F0 1F1 1F2 4F0 1F3 4F1 4I0 4W0 4F2 4I1 4W1 1F4 1I0 1W0 4F3 4I2 4W2 1I1 1W1 ...
        rank 2          2F0 3F0 2F1 3F1 2F2 3F2 3I0 3W0 2F3 2I0 2W0 3F3 3I1 3W1 2F4 2I1 2W1 3F4 ...

    Bubble: (P - 1) / (6 * M + P - 1) if M >= 2 * P - 1
    Bubble of the longest span: 0 if M >= 2 * P - 1
    Memory: min(M, P)
    Choose it to run the list that torch runs. `zbv` is as good at equal costs, and better at
    others or with fewer microbatches.
    """
    if pipe.chunks != 2:
        raise ValueError(f"zbv-handcrafted takes 2 chunks, the arms of its V, not {pipe.chunks}")
    down, up = pipe.stages_of(rank)
    after = pipe.ranks - rank
    full = max(pipe.microbatches, 2 * pipe.ranks - 1)
    f0, i0, w0 = ((make, down) for make in (forward, backward_input, backward_weight))
    f1, i1, w1 = ((make, up) for make in (forward, backward_input, backward_weight))
    phases = [
        [f0] * (2 * after - 1),
        [f1, f0] * rank,
        [f1, i1, w1] * after,
        [f0, i0, w0, f1, i1, w1] * (full - pipe.ranks - after + 1),
        [i0, w0, f1, i1, w1] * (after - 1),
        [i0, i1] * rank,
        [i0, w0] * after,
        [w1] * rank,
        [w0] * rank,
    ]
    done: Counter[object] = Counter()
    for phase in phases:
        for make, stage in phase:
            m = done[make, stage]
            done[make, stage] += 1
            if m < pipe.microbatches:
                yield make(stage, m)
    yield optim_step(down)
    yield optim_step(up)
