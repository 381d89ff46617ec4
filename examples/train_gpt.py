"""Train a byte-level GPT with any pipeline schedule, each process holding a part of the model.

    torchrun --nproc-per-node 2 examples/train_gpt.py --schedule 1f1b --verify
    python examples/train_gpt.py --in-process 4 --schedule interleaved-1f1b --verify

The schedule is the name of a built-in one, or your own file: `mine.py`, `mine.sched`. `--verify`
repeats the training in a single process and checks that every weight is equal, bit for bit. At the
end it writes a page (`--page`) with the predicted step above the measured one.
"""

import argparse
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import RANK, RANKS, Losses, Parser, build, console, fail, run, verify
from gpt import Config, batch, build_stage, corpus, loss_fn, size, windows
from reference import Reference
from torch import Tensor, nn
from torch.utils.data import DataLoader

import schedir
from schedir.files import write_text
from schedir.render import timeline_text
from schedir.render.html import html_page
from schedir.runtime import Executor, StepResult
from schedir.simulator import median_step
from schedir.training import Batches, Callback, History, Trainer, evaluate, gathered_state


def train(args: argparse.Namespace) -> bool:
    """Train, and print what came of it. False where --verify found a difference."""
    # The schedule: one list of actions per rank, communication included.
    sched = build(args)
    if args.layers < sched.stages:
        fail(f"--layers {args.layers} are too few for {sched.stages} stages")

    # The model: the schedule says how many stages there are, and which of them this rank holds.
    config = Config(args.layers, args.width, args.heads, args.context, args.dropout)
    here = range(sched.stages) if args.in_process else sched.stages_of(RANK)
    stages = {i: build_stage(config, i, sched.stages, args.seed).to(args.device) for i in here}

    def optimizer(weights: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(weights, lr=args.lr)

    text, held_out = corpus()
    test = windows(held_out, config.context)
    draw = partial(batch, text, args.batch, config.context, args.seed)
    steps: Any = range(args.steps)
    batches = Batches(DataLoader(steps, batch_size=None, collate_fn=draw))

    timeline = schedir.simulate(sched)
    meter = Meter(args.log_every, args.batch * config.context, timeline.bubble_fraction)
    losses = Losses()

    console.print(
        f"{sched.name}: {sched.stages} stages on {sched.ranks} ranks, {sched.microbatches} "
        f"microbatches; {size(config) / 1e6:.1f} M parameters, {len(text) / 1e6:.1f} MB of text"
    )
    with Executor(
        sched,
        stages=stages,
        loss_fn=loss_fn,
        optimizer=optimizer,
        seed=args.seed,
        in_process=bool(args.in_process),
        trace=not args.in_process,  # ranks that take turns do not wait as a pipeline's do
    ) as executor:
        trainer = Trainer(
            executor,
            batches,
            epochs=1,
            evaluation=test,
            callbacks=[meter, losses],
        )
        before = evaluate(executor, test).loss
        console.print(f"held-out loss {before:.3f}")
        after = trainer.fit()[-1].evaluation_loss
        weights = gathered_state(executor)
        measured = [] if args.in_process else executor.timelines()

    console.print(f"\n{timeline_text(timeline).strip()}\n")
    console.print(f"held-out loss {before:.3f} → {after:.3f}, {meter.summary()}")
    equal = True
    if args.verify:
        initial = [
            build_stage(config, i, sched.stages, args.seed).to(args.device)
            for i in range(sched.stages)
        ]
        reference = Reference(sched, initial, loss_fn, optimizer, args.seed)
        equal = verify(reference, batches, losses, weights)
    if measured:  # on rank 0
        predict(measured, args.page, "nccl" if args.device == "cuda" else "gloo")
    return equal


def predict(measured: Sequence[schedir.Timeline], page: Path, transport: str) -> None:
    """Predict the second half of the steps from the first, and draw both: on rank 0."""
    half = max(1, len(measured) // 2)
    costs = schedir.CostModel.fit(measured[:half])
    line = median_step(measured[half:] or measured)
    predicted = schedir.simulate(line.schedule, costs, channel=transport)
    try:
        band = schedir.forecast(line.schedule, costs, channel=transport)
        low, high = 1e3 * band.quantile(0.05), 1e3 * band.quantile(0.95)
        spread = f"9 of 10 between {low:.1f} and {high:.1f}"
    except schedir.SchedirError as error:
        spread = f"no band: {error}"
    console.print(
        f"makespan of a step, predicted for {transport} from the first half of the steps: "
        f"{1e3 * predicted.makespan:.1f} ms at their medians, {spread}\n"
        f"makespan of a step, measured in the second half, the median: {1e3 * line.makespan:.1f} ms"
    )
    write_text(page, html_page(predicted, line))
    console.print(f"predicted above measured, to look at in a browser: {page}")


class Meter(Callback):
    """Prints how fast the training is, and the share of time that ranks wait (the bubble).

    It prints a line every `every` steps. `tokens` is the tokens in a step, and `simulated` the
    bubble in the simulation of the schedule.
    """

    def __init__(self, every: int, tokens: int, simulated: float) -> None:
        self.every, self.tokens, self.simulated = every, tokens, simulated
        self.steps = 0
        self.recent = torch.zeros(3, dtype=torch.float64)  # steps, seconds busy, seconds in all
        self.total = torch.zeros(3, dtype=torch.float64)

    def after_step(self, result: StepResult) -> None:
        self.steps += 1
        if self.steps > 1:  # the first step also finds the tensors' shapes
            self.recent += torch.tensor([1, result.busy, result.elapsed])
        if self.steps % self.every == 0:
            speed = self._line(self._summed_up())
            console.print(f"step {self.steps:>4}  loss {result.loss:.3f}  {speed}")

    def after_epoch(self, history: History) -> None:
        self._summed_up()

    def summary(self) -> str:
        """The summary of all epochs."""
        return self._line(self.total)

    def _summed_up(self) -> Tensor:
        """The figures since the last call, over all ranks. Every rank calls it."""
        found, self.recent = self.recent, torch.zeros(3, dtype=torch.float64)
        if RANKS > 1:
            dist.all_reduce(found)
        self.total += found
        return found

    def _line(self, sums: Tensor) -> str:
        steps, busy, elapsed = sums.tolist()
        if not steps:
            return "nothing measured yet"
        return (
            f"{self.tokens * steps / elapsed:,.0f} tokens/s  {elapsed / steps * 1e3:.0f} ms/step  "
            f"bubble {1 - busy / elapsed:.1%} measured, {self.simulated:.1%} simulated"
        )


def parse_arguments() -> argparse.Namespace:
    """The command line's arguments."""
    parser = Parser(
        __doc__,
        layers=(8, "transformer blocks, over all stages"),
        width=(192, "size of a token's vector"),
        heads=(6, "attention heads per block"),
        context=(64, "bytes per row"),
        batch=(16, "rows per step, over all microbatches"),
        steps=(200, "batches to train on"),
        log_every=(10, "steps per line of progress"),
    )
    add = parser.add_argument
    add("--dropout", type=float, default=0.0, metavar="X", help="share of values dropped (0)")
    add(
        "--page",
        type=Path,
        default=Path("train_gpt.html"),
        metavar="FILE",
        help="where the predicted and the measured step are drawn (train_gpt.html)",
    )
    args = parser.arguments()
    if args.width % args.heads:
        parser.error(f"--width {args.width} is no multiple of --heads {args.heads}")
    if not 0 <= args.dropout < 1:
        parser.error("--dropout has to be from 0 to below 1")
    return args


if __name__ == "__main__":
    run(train, parse_arguments())
