"""Train a byte-level GPT with any pipeline schedule, each process holding a part of the model.

    torchrun --nproc-per-node 2 examples/train_gpt.py --schedule 1f1b --verify
    python examples/train_gpt.py --in-process 4 --schedule interleaved-1f1b --verify

The schedule is the name of a built-in one, or a file of your own: `mine.py`, `mine.sched`. With
`--verify` the same training is done once more in a single process, and every weight has to come
out the same, bit for bit. It ends with a page (`--page`) on which the step that was predicted
stands above the one that was measured.
"""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from common import RANK, RANKS, Parser, build, console, fail, gather, progress_bar, run, verify
from gpt import Config, batch, build_stage, corpus, evaluate, loss_fn
from reference import Reference
from torch import Tensor, nn

import schedir
from schedir.render import timeline_text
from schedir.render.html import html_page
from schedir.runtime import Executor, StepResult
from schedir.simulator import median_step


def train(args: argparse.Namespace) -> bool:
    """Train, and print what came of it. False where --verify found a difference."""
    # The schedule: one list of actions per rank, communication included.
    sched = build(args)
    if args.layers < sched.stages:
        fail(f"--layers {args.layers} are too few for {sched.stages} stages")

    # The model: the schedule says how many stages there are, and which of them this rank holds.
    config = Config(args.layers, args.width, args.heads, args.context, args.dropout)
    here = range(sched.stages) if args.in_process else sched.stages_of(RANK)
    stages = {i: build_stage(config, i, sched.stages, args.seed) for i in here}

    def optimizer(weights: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(weights, lr=args.lr)

    text, held_out = corpus()

    def data(step: int) -> tuple[Tensor, Tensor]:
        return batch(text, args.batch, config.context, args.seed, step)

    def held_out_loss(weights: dict[str, Tensor]) -> float:
        if not weights:
            return 0.0  # only rank 0 has the whole model
        model = build_stage(config, 0, 1)
        model.load_state_dict(weights)
        return evaluate([model], held_out, config.context)

    timeline = schedir.simulate(sched)
    meter = Meter(tokens=args.batch * config.context, simulated=timeline.bubble_fraction)

    with Executor(
        sched,
        stages=stages,
        loss_fn=loss_fn,
        optimizer=optimizer,
        seed=args.seed,
        in_process=bool(args.in_process),
        trace=not args.in_process,  # ranks that take turns do not wait as a pipeline's do
    ) as executor:
        model = gather(stages.values())
        size = sum(weight.numel() for weight in model.values())
        console.print(
            f"{sched.name}: {sched.stages} stages on {sched.ranks} ranks, {sched.microbatches} "
            f"microbatches; {size / 1e6:.1f} M parameters, {len(text) / 1e6:.1f} MB of text"
        )
        before = held_out_loss(model)
        console.print(f"held-out loss {before:.3f}")
        losses = []
        with progress_bar() as bar:
            task = bar.add_task("train", total=args.steps)
            for step in range(args.steps):
                inputs, target = data(step)
                result = executor.step(inputs, target=target)
                if step > 0 or args.steps == 1:  # the first step also finds the tensors' shapes
                    meter.add(result)
                losses.append(result.loss)
                bar.advance(task)
                if (step + 1) % args.log_every == 0 or step + 1 == args.steps:
                    speed = meter.report()
                    console.print(f"step {step + 1:>4}  loss {result.loss:.3f}  {speed}")
        model = gather(stages.values())
        measured = [] if args.in_process else executor.timelines()

    if RANK != 0:
        return True
    equal = True
    console.print(f"\n{timeline_text(timeline).strip()}\n")
    after = held_out_loss(model)
    console.print(f"held-out loss {before:.3f} → {after:.3f}, {meter.summary()}")
    if args.verify:
        initial = [build_stage(config, i, sched.stages, args.seed) for i in range(sched.stages)]
        reference = Reference(sched, initial, loss_fn, optimizer, args.seed)
        equal = verify(reference, map(data, range(args.steps)), losses, model)
    if measured:
        predict(measured, args.page)
    return equal


def predict(measured: Sequence[schedir.Timeline], page: Path) -> None:
    """Predict the second half of the steps from the first, and draw both: on rank 0."""
    half = max(1, len(measured) // 2)
    costs = schedir.CostModel.fit(measured[:half])
    line = median_step(measured[half:] or measured)
    predicted = schedir.simulate(line.schedule, costs)
    try:
        band = schedir.forecast(line.schedule, costs)
        low, high = 1e3 * band.quantile(0.05), 1e3 * band.quantile(0.95)
        spread = f"9 of 10 between {low:.1f} and {high:.1f}"
    except schedir.SchedirError as error:
        spread = f"no band: {error}"
    console.print(
        f"makespan of a step, predicted from the first half of the steps: "
        f"{1e3 * predicted.makespan:.1f} ms at their medians, {spread}\n"
        f"makespan of a step, measured in the second half, the median: {1e3 * line.makespan:.1f} ms"
    )
    page.write_text(html_page(predicted, line), encoding="utf-8")
    console.print(f"predicted above measured, to look at in a browser: {page}")


class Meter:
    """How fast the training is, and the share of their time that the ranks wait (the bubble).

    `tokens` is the number of tokens in a step, `simulated` the bubble that the schedule promises.
    """

    def __init__(self, tokens: int, simulated: float) -> None:
        self.tokens = tokens
        self.simulated = simulated
        self.recent = torch.zeros(3, dtype=torch.float64)  # steps, seconds busy, seconds in all
        self.total = torch.zeros(3, dtype=torch.float64)

    def add(self, result: StepResult) -> None:
        """Count a step of this rank."""
        self.recent += torch.tensor([1, result.busy, result.elapsed])

    def report(self) -> str:
        """What happened since the last report, over all ranks: every rank has to call it."""
        if RANKS > 1:
            dist.all_reduce(self.recent)
        self.total += self.recent
        line = self._line(self.recent)
        self.recent.zero_()
        return line

    def summary(self) -> str:
        """What happened up to the last report."""
        return self._line(self.total)

    def _line(self, sums: Tensor) -> str:
        steps, busy, elapsed = sums.tolist()
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
