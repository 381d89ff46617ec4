"""Train a masked language model on lines of Python's source, some of whose bytes are hidden.

    torchrun --nproc-per-node 2 examples/train_masked.py --verify

Its layers pass a mask on, its embedding and its head share their weights, and padding does not
count in the loss.
"""

import argparse
from collections.abc import Callable, Iterable
from functools import partial

import torch
from common import Losses, Parser, build, run, show, verify
from masked import Config, counted, hide, lines, loss_fn, masked_model
from reference import Reference
from torch import nn
from torch.utils.data import DataLoader

from schedir.runtime import Executor
from schedir.training import Batches, Trainer, accuracy, gathered_state, partition


def train(args: argparse.Namespace) -> bool:
    """Train, and print what came of it. False where --verify found a difference."""
    text, held_out = lines(args.lines, args.context)
    read: Callable[..., DataLoader[bytes]] = partial(
        DataLoader, batch_size=args.batch, collate_fn=partial(hide, context=args.context)
    )
    loader = read(text, shuffle=True, drop_last=True)

    sched = build(args)
    layers = masked_model(Config(args.layers, args.width, args.heads, args.context))
    cut = partial(partition, layers, by=args.partition, seed=args.seed, device=args.device)
    stages = cut(sched)
    show(sched, stages)

    def optimizer(weights: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(weights, lr=args.lr)

    losses = Losses()
    with Executor(
        *(sched, stages, loss_fn, optimizer),
        count=counted,
        ties=stages.ties,
        seed=args.seed,
        in_process=bool(args.in_process),
    ) as executor:
        trainer = Trainer(
            executor,
            Batches(loader, seed=args.seed),
            epochs=args.epochs,
            evaluation=Batches(read(held_out)),
            metrics={"accuracy": accuracy},
            callbacks=[losses],
        )
        trainer.fit()
        weights = gathered_state(executor)

    if not args.verify:
        return True
    whole = cut(sched.stages)
    reference = Reference(
        *(sched, list(whole.values()), loss_fn, optimizer, args.seed),
        count=counted,
        ties=whole.ties,
    )
    return verify(reference, Batches(loader, seed=args.seed, repeat=True), losses, weights)


def parse_arguments() -> argparse.Namespace:
    """The command line's arguments."""
    parser = Parser(
        __doc__,
        microbatches=4,
        lr=2e-3,
        layers=(4, "transformer blocks, over all stages"),
        width=(64, "size of a byte's vector"),
        heads=(4, "attention heads per block"),
        context=(48, "bytes of the longest line; shorter ones are padded"),
        batch=(32, "lines per step, over all microbatches"),
        lines=(4096, "lines to train on; a tenth as many are held out"),
        epochs=(4, "times to go through them"),
    )
    add = parser.add_argument
    add("--partition", default="uniform", metavar="BY", help="how to cut (uniform)")
    args = parser.arguments()
    if args.width % args.heads:
        parser.error(f"--width {args.width} is no multiple of --heads {args.heads}")
    return args


if __name__ == "__main__":
    run(train, parse_arguments())
