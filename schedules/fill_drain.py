"""Fill-drain: all forwards, then all backwards (GPipe, arXiv 1811.06965, section 2.3)."""

from collections.abc import Iterator

from schedir import Action, Pipeline, backward, forward, optim_step, schedule


@schedule("fill-drain", aliases=("gpipe",))
def fill_drain(pipe: Pipeline, rank: int, *, order: str = "ascending") -> Iterator[Action]:
    """All forwards, then all backwards; every microbatch is in flight at once.

    4 microbatches on 4 ranks, a backward twice as long as a forward, `*` the optimiser's step:

        rank 0  F0 F1 F2 F3                            B0--- B1--- B2--- B3---*
        rank 1     F0 F1 F2 F3                   B0--- B1--- B2--- B3---*
        rank 2        F0 F1 F2 F3          B0--- B1--- B2--- B3---*
        rank 3           F0 F1 F2 F3 B0--- B1--- B2--- B3---*

    `order` is the order of the backwards: "ascending" as drawn, or "descending" as in torchgpipe,
    which starts with the newest activations.

    Bubble: (P - 1) / (M + P - 1)
    Memory: M
    Choose it for its simplicity, if every activation fits, or to compare with GPipe. `1f1b`
    takes as long and holds less.
    """
    if order not in ("ascending", "descending"):
        raise ValueError(f"order must be 'ascending' or 'descending', not {order!r}")
    (stage,) = pipe.stages_of(rank)
    microbatches = range(pipe.microbatches)
    for m in microbatches:
        yield forward(stage, m)
    for m in microbatches if order == "ascending" else reversed(microbatches):
        yield backward(stage, m)
    yield optim_step(stage)
