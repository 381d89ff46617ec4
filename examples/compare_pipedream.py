"""PipeDream beside 1F1B, to the same held-out loss: per sample and per second.

    torchrun --nproc-per-node 2 examples/compare_pipedream.py
    torchrun --nproc-per-node 2 examples/compare_pipedream.py --verify

The same GPT learns the same rows in the same order, four times. A batch is `--microbatches`
minibatches, and

    one by one      each of them goes through all stages and updates them before the next one starts
    1f1b            all are in the pipeline together, and make one update (`--schedule`)
    pipedream       each makes an update of its own, from weights that are some updates old
    vertical sync   the same, from weights that are equally old on all stages

So the first and the last two make the same number of updates, and what sets them apart per sample
is the age of the weights alone; 1F1B makes fewer and may learn faster (`--lr-batch`). A training
ends with the round in which the loss on held-out text comes down to `--until`.
"""

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from common import RANK, Parser, build, console, fail, progress_bar, run, verify
from curves import Curve, picture, save
from gpt import Config, batch, build_stage, corpus, loss_fn
from reference import Reference
from torch import Tensor, nn

import schedir
from schedir.files import write_text
from schedir.render.text import table
from schedir.runtime import Executor
from schedir.training import gathered_state


def compare(args: argparse.Namespace) -> bool:
    """Train all four, print and draw how they went. False where --verify found a difference."""
    base = build(args)
    if args.batch % base.microbatches:
        fail(f"--batch {args.batch} is no multiple of {base.microbatches} microbatches")

    def pipedream(**settings: bool) -> schedir.Schedule:
        minibatches = args.batches * base.microbatches
        return schedir.build("pipedream", ranks=args.ranks, microbatches=minibatches, **settings)

    runs = [
        ("one by one", schedir.build("1f1b", ranks=args.ranks, microbatches=1), 1, args.lr),
        (base.name, base, base.microbatches, args.lr_batch or args.lr),
        ("pipedream", pipedream(), 1, args.lr),
        ("vertical sync", pipedream(vertical_sync=True), 1, args.lr),
    ]
    texts = corpus()
    curves, equal = [], True
    rows = [("", "updates", "samples", "seconds", "samples/s", "held-out loss")]
    for name, sched, minibatches, lr in runs:
        curve, same = train(args, texts, name, sched, args.batch // base.microbatches, lr)
        curves.append(curve)
        equal &= same
        samples, seconds, loss = curve.samples[-1], curve.seconds[-1], curve.losses[-1]
        updates = samples / (args.batch // base.microbatches * minibatches)
        reached = f"{loss:.3f}{'' if loss <= args.until else ', not reached'}"
        cells = f"{updates:,.0f}", f"{samples:,}", f"{seconds:.1f}", f"{samples / seconds:,.0f}"
        rows.append((name, *cells, reached))
    console.print(f"\nto a held-out loss of {args.until:g}:\n\n{table(rows, align='<>>>>>')}")
    if RANK == 0:
        title = f"PipeDream beside {base.name}, {args.ranks} ranks"
        write_text(args.picture, picture(curves, args.until, title))
        save(curves, args.until, title, args.picture.with_suffix(".json"))
        console.print(f"the loss over samples and seconds: {args.picture}")
    return equal


def train(
    args: argparse.Namespace,
    texts: tuple[Tensor, Tensor],
    name: str,
    sched: schedir.Schedule,
    rows: int,
    lr: float,
) -> tuple[Curve, bool]:
    """Train until the loss is reached; False where --verify found a difference.

    `texts` are that to train on and the one held out, `rows` those of a minibatch.
    """
    config = Config(args.layers, args.width, args.heads, args.context)
    here = range(sched.stages) if args.in_process else sched.stages_of(RANK)
    stages = {i: build_stage(config, i, sched.stages, args.seed).to(args.device) for i in here}
    text, held_out = texts
    test_inputs, test_target = batch(held_out, args.test_rows, config.context, args.seed, 0)
    calls = args.batches * args.batch // (rows * sched.microbatches)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for turn in range(args.rounds):
            both = batch(text, args.batches * args.batch, config.context, args.seed, turn)
            yield from zip(*(part.tensor_split(calls) for part in both), strict=True)

    def optimizer(weights: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(weights, lr=lr)

    losses: list[float] = []
    elapsed: list[float] = []
    tested: list[float] = []
    with (
        Executor(
            sched, stages, loss_fn, optimizer, seed=args.seed, in_process=bool(args.in_process)
        ) as executor,
        progress_bar() as bar,
    ):
        task = bar.add_task(name, total=args.rounds)
        for inputs, target in batches():
            if len(losses) % calls == 0:
                tested.append(executor.evaluate(test_inputs, target=test_target).loss)
                bar.advance(task)
                if tested[-1] <= args.until:
                    break
            result = executor.step(inputs, target=target)
            losses.append(result.loss)
            elapsed.append(result.elapsed)
        else:
            tested.append(executor.evaluate(test_inputs, target=test_target).loss)
        weights = gathered_state(executor)
    elapsed[0] = elapsed[-1]  # the first call finds the shapes of all tensors too
    done = range(0, len(losses) + 1, calls)
    samples = [call * rows * sched.microbatches for call in done]
    curve = Curve(name, tested, samples, [sum(elapsed[:call]) for call in done])
    console.print(f"{name}: held-out loss {tested[0]:.3f} → {tested[-1]:.3f}")
    if not args.verify:
        return curve, True
    initial = [
        build_stage(config, i, sched.stages, args.seed).to(args.device) for i in range(sched.stages)
    ]
    reference = Reference(sched, initial, loss_fn, optimizer, args.seed)
    return curve, verify(reference, batches(), losses, weights)


if __name__ == "__main__":
    parser = Parser(
        __doc__,
        layers=(4, "transformer blocks, over all stages"),
        width=(96, "size of a token's vector"),
        heads=(4, "attention heads per block"),
        context=(32, "bytes per row"),
        batch=(32, "rows of an update of 1F1B, over all microbatches"),
        batches=(4, "batches per round, after which the held-out loss is found"),
        rounds=(60, "rounds to train on at most"),
        test_rows=(512, "rows of held-out text"),
    )
    parser.add_argument("--until", type=float, default=2.8, metavar="X", help="loss to reach (2.8)")
    parser.add_argument("--lr-batch", type=float, metavar="X", help="learning rate of 1F1B (--lr)")
    parser.add_argument(
        "--picture",
        type=Path,
        default=Path("compare_pipedream.svg"),
        metavar="FILE",
        help="where the losses are drawn, and kept as JSON beside it (compare_pipedream.svg)",
    )
    run(compare, parser.arguments())
