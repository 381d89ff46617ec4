"""Train a GPT whose first stage is several times as long as the others, on as many ranks.

    torchrun --nproc-per-node 3 examples/train_round_robin.py --verify

The schedule is PipeDream's 1f1b-rr: the ranks that hold a stage take its microbatches in turn. Two
of the three ranks have the first stage; change that with `--set replicas=1,2`. With `--set
flush=false` it trains asynchronously, as in the paper. The blocks are shared out so that all ranks
compute the same amount. With `--schedule 1f1b` the same model is cut into a stage for each rank.
"""

import argparse
from collections.abc import Iterable

import torch
from common import Parser, build, console, fail, run, verify
from gpt import Block, Config, Embedding, Head, batch, corpus, loss_fn
from reference import Reference
from torch import nn

import schedir
from schedir.render import timeline_text
from schedir.runtime import Executor
from schedir.training import deferred, gathered_state, partition


def train(args: argparse.Namespace) -> bool:
    """Train, and print what came of it. False where --verify found a difference."""
    sched = build(args)
    ranks = [len(held) for held in sched.placement]  # of each stage, and so its share of the blocks
    first = [args.layers * sum(ranks[:stage]) // sum(ranks) for stage in range(1, sched.stages)]
    if args.layers < sum(ranks):
        fail(f"--layers {args.layers} are too few for {sum(ranks)} ranks")

    config = Config(args.layers, args.width, args.heads, args.context)
    layers = {
        "embedding": deferred(Embedding, config),
        **{f"block{i}": deferred(Block, config) for i in range(args.layers)},
        "head": deferred(Head, config),
    }
    cut = [f"block{i}" for i in first]
    stages = partition(layers, sched, boundaries=cut, seed=args.seed, device=args.device)
    console.print(f"{stages}\n")

    def optimizer(weights: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(weights, lr=args.lr)

    text, _ = corpus()
    batches = [batch(text, args.batch, args.context, args.seed, i) for i in range(args.steps)]
    with Executor(sched, stages, loss_fn, optimizer, seed=args.seed) as executor:
        losses = [executor.step(inputs, target=target).loss for inputs, target in batches]
        weights = gathered_state(executor)
    costs = schedir.CostModel(forward=tuple(ranks), backward=tuple(2 * cost for cost in ranks))
    console.print(timeline_text(schedir.simulate(sched, costs)).strip())
    console.print(f"\nloss {losses[0]:.3f} → {losses[-1]:.3f}")
    if not args.verify:
        return True
    whole = partition(layers, sched.stages, boundaries=cut, seed=args.seed, device=args.device)
    reference = Reference(sched, list(whole.values()), loss_fn, optimizer, args.seed)
    # Two sums of gradients make one; the order in which more are added up is the transport's.
    return verify(reference, batches, losses, weights, tolerance=0 if max(ranks) < 3 else 1e-3)


if __name__ == "__main__":
    parser = Parser(
        __doc__,
        schedule="1f1b-rr",
        layers=(6, "transformer blocks, over all stages"),
        width=(96, "size of a token's vector"),
        heads=(4, "attention heads per block"),
        context=(64, "bytes per row"),
        batch=(16, "rows per step, over all microbatches"),
        steps=(50, "batches to train on"),
    )
    run(train, parser.arguments())
