"""ZB-H1: 1F1B whose weight gradients fill the drain (Qi et al., arXiv 2401.10241, section 2.1)."""

from collections.abc import Iterator

from schedir import Action, Pipeline, backward_input, backward_weight, forward, optim_step, schedule


@schedule("zb-h1")
def zb_h1(pipe: Pipeline, rank: int) -> Iterator[Action]:
    """1F1B with split backwards: rank r keeps r weight gradients, and fills its drain with them.

    6 microbatches on 4 ranks, I the gradient of the input and W that of the weights:

        rank 0  F0 F1 F2 F3          I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5*
        rank 1     F0 F1 F2       I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5*
        rank 2        F0 F1    I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5*
        rank 3           F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5*

    Every rank holds at most `ranks` activations, as rank 0 of 1F1B does. A rank idles for
    (ranks - 1) (F + I - W): a third of 1F1B's idle time if F, I and W cost the same.

    Bubble: (P - 1) / (3 * M + P - 1) if M >= P
    Memory: min(M, P)
    Choose it over `1f1b` at the same memory, if backwards can be split: a third of its idle time.
    """
    (stage,) = pipe.stages_of(rank)
    microbatches = pipe.microbatches
    warmup = min(pipe.ranks - 1 - rank, microbatches)
    kept = min(rank, microbatches)
    for m in range(warmup):
        yield forward(stage, m)
    for m in range(microbatches):
        if m + warmup < microbatches:
            yield forward(stage, m + warmup)
        yield backward_input(stage, m)
        if m >= kept:
            yield backward_weight(stage, m - kept)
    for m in range(microbatches - kept, microbatches):
        yield backward_weight(stage, m)
    yield optim_step(stage)
