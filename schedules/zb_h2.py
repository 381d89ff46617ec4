"""ZB-H2: zero bubble for twice the memory (Qi et al., arXiv 2401.10241, section 2.2)."""

from collections.abc import Iterator

from schedir import Action, Pipeline, backward_input, backward_weight, forward, optim_step, schedule


@schedule("zb-h2")
def zb_h2(pipe: Pipeline, rank: int) -> Iterator[Action]:
    """Forwards fill the wait for the first backward, and weight gradients fill the drain.

    8 microbatches on 4 ranks, I the gradient of the input and W that of the weights:

        rank 0  F0 F1 F2 F3 F4 F5 F6 I0 W0 F7 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 I6 W6 I7 W7*
        rank 1     F0 F1 F2 F3 F4 I0 F5 I1 F6 I2 W0 F7 I3 W1 I4 W2 I5 W3 I6 W4 I7 W5 W6 W7*
        rank 2        F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 F6 I4 W0 F7 I5 W1 I6 W2 I7 W3 W4 W5 W6 W7*
        rank 3           F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 F6 I6 W0 F7 I7 W1 W2 W3 W4 W5 W6 W7*

    If F, I and W cost the same, no rank idles between its first action and its last. If
    F + I >= 2 W, the longest span has (ranks - 1) (F + I - 2 W) of idle time. Every rank holds at
    most 2 * ranks - 1 activations until their W.

    Bubble: (P - 1) / (3 * M + P - 1) if M >= 2 * P - 1
    Bubble of the longest span: 0 if M >= 2 * P - 1
    Memory: min(M, 2 * P - 1)
    Choose it over `zb-h1` if there is memory for twice the activations, and nothing makes the
    ranks wait for each other between steps.
    """
    (stage,) = pipe.stages_of(rank)
    microbatches = pipe.microbatches
    warmup = min(2 * (pipe.ranks - rank) - 1, microbatches)
    kept = min(2 * rank, microbatches)
    for m in range(warmup):
        yield forward(stage, m)
    for m in range(microbatches):
        yield backward_input(stage, m)
        if m >= kept:
            yield backward_weight(stage, m - kept)
        if m + warmup < microbatches:
            yield forward(stage, m + warmup)
    for m in range(microbatches - kept, microbatches):
        yield backward_weight(stage, m)
    yield optim_step(stage)
