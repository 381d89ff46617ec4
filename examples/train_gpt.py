"""Train a byte-level GPT with any pipeline schedule, each process holding a part of the model.

    torchrun --nproc-per-node 2 examples/train_gpt.py --schedule 1f1b --verify
    python examples/train_gpt.py --in-process 4 --schedule interleaved-1f1b --verify

The schedule is the name of a built-in one, or a file of your own: `mine.py`, `mine.sched`. With
`--verify` the same training is done once more in a single process, and every weight has to come
out the same, bit for bit. It ends with a page (`--page`) on which the step that was predicted
stands above the one that was measured.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from gpt import Config, batch, build_stage, corpus, evaluate, loss_fn
from reference import Reference
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

import schedir
from schedir.render import legible, timeline_text
from schedir.render.html import html_page
from schedir.runtime import Executor, StepResult
from schedir.simulator import median_step

RANK = int(os.environ.get("RANK", "0"))
RANKS = int(os.environ.get("WORLD_SIZE", "1"))

console = Console(quiet=RANK != 0, highlight=False, markup=False, soft_wrap=True)


def main() -> None:
    """Train as the command line says."""
    legible(sys.stdout)
    legible(sys.stderr)
    args = parse_arguments()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // RANKS))
    try:
        equal = train(args)
    except schedir.ExecutionError as error:
        if error.action is None:
            fail(str(error))
        sys.exit(f"error: {error}")  # from the rank that it struck
    except schedir.SchedirError as error:
        fail(str(error))
    sys.exit(0 if equal else 1)


def train(args: argparse.Namespace) -> bool:
    """Train, and print what came of it. False where --verify found a difference."""
    # The schedule: one list of actions per rank, communication included.
    ranks = args.in_process or RANKS
    sched = schedir.build(
        args.schedule, ranks=ranks, microbatches=args.microbatches, chunks=args.chunks, **args.set
    )
    if args.batch < sched.microbatches:
        fail(f"--batch {args.batch} has too few rows for {sched.microbatches} microbatches")
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
        model = gather(sched, config, stages)
        size = sum(weight.numel() for part in model for weight in part.parameters())
        console.print(
            f"{sched.name}: {sched.stages} stages on {sched.ranks} ranks, {sched.microbatches} "
            f"microbatches; {size / 1e6:.1f} M parameters, {len(text) / 1e6:.1f} MB of text"
        )
        before = evaluate(model, held_out, config.context) if model else 0.0
        console.print(f"held-out loss {before:.3f}")
        with progress_bar() as bar:
            task = bar.add_task("train", total=args.steps)
            for step in range(args.steps):
                inputs, target = data(step)
                result = executor.step(inputs, target=target)
                if step > 0 or args.steps == 1:  # the first step also finds the tensors' shapes
                    meter.add(result)
                bar.advance(task)
                if (step + 1) % args.log_every == 0 or step + 1 == args.steps:
                    speed = meter.report()
                    console.print(f"step {step + 1:>4}  loss {result.loss:.3f}  {speed}")
        model = gather(sched, config, stages)
        measured = [] if args.in_process else executor.timelines()

    if RANK != 0:
        return True
    after = evaluate(model, held_out, config.context)
    equal, verdict = True, ""
    if args.verify:
        initial = [build_stage(config, i, sched.stages, args.seed) for i in range(sched.stages)]
        reference = Reference(sched, initial, loss_fn, optimizer, args.seed)
        with progress_bar() as bar:
            console.print("verify: the same training in one process …")
            for step in bar.track(range(args.steps), description="verify"):
                reference.step(*data(step))
        equal, verdict = compare(model, reference.stages)
    console.print(f"\n{timeline_text(timeline).strip()}\n")
    console.print(f"held-out loss {before:.3f} → {after:.3f}, {meter.summary()}")
    if verdict:
        console.print(verdict)
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


def progress_bar() -> Progress:
    """A bar on rank 0's terminal, nothing elsewhere."""
    return Progress(console=console, transient=True, disable=RANK != 0 or not console.is_terminal)


def gather(
    sched: schedir.Schedule, config: Config, stages: dict[int, nn.Sequential]
) -> list[nn.Sequential]:
    """The whole model with the ranks' present weights, on rank 0; nothing elsewhere."""
    weights = {i: stage.state_dict() for i, stage in stages.items()}
    gathered = [weights] * RANKS
    if RANKS > 1:
        dist.gather_object(weights, gathered if RANK == 0 else None)
    whole = {i: state for part in gathered for i, state in part.items()} if RANK == 0 else {}
    model = []
    for i in sorted(whole):
        model.append(build_stage(config, i, sched.stages))
        model[i].load_state_dict(whole[i])
    return model


def compare(model: Iterable[nn.Module], reference: Iterable[nn.Module]) -> tuple[bool, str]:
    """Whether all weights are equal, bit for bit, and the sentence that says so."""
    count = 0
    for ours, theirs in zip(model, reference, strict=True):
        expected = theirs.state_dict()
        for name, weight in ours.state_dict().items():
            if not torch.equal(weight, expected[name]):
                off = (weight - expected[name]).abs().max().item()
                return False, f"verify: {name} differs, by up to {off:.3g}"
            count += 1
    return True, f"verify: all {count} tensors equal, bit for bit"


def parse_arguments() -> argparse.Namespace:
    """The command line's arguments."""
    parser = Parser(description="Train a byte-level GPT with any pipeline schedule.")
    add = parser.add_argument
    add("--schedule", default="1f1b", help="a name that `schedir list` shows, or a file (1f1b)")
    add("--microbatches", type=positive, metavar="M", help="parts of a batch (8)")
    add("--chunks", type=positive, metavar="V", help="stages per rank (the schedule's default)")
    add(
        "--set",
        type=setting,
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="a parameter of the schedule, such as vertical_sync=true",
    )
    for name, default, help in (
        ("layers", 8, "transformer blocks, over all stages"),
        ("width", 192, "size of a token's vector"),
        ("heads", 6, "attention heads per block"),
        ("context", 64, "bytes per row"),
        ("batch", 16, "rows per step, over all microbatches"),
        ("steps", 200, "batches to train on"),
        ("log-every", 10, "steps per line of progress"),
    ):
        add(f"--{name}", type=positive, default=default, metavar="N", help=f"{help} ({default})")
    add("--lr", type=float, default=1e-3, metavar="X", help="learning rate of AdamW (0.001)")
    add("--dropout", type=float, default=0.0, metavar="X", help="share of values dropped (0)")
    add("--seed", type=int, default=0, metavar="N", help="of weights, data and dropout (0)")
    add(
        "--page",
        type=Path,
        default=Path("train_gpt.html"),
        metavar="FILE",
        help="where the predicted and the measured step are drawn (train_gpt.html)",
    )
    add("--in-process", type=positive, metavar="P", help="run P ranks in this process, in turn")
    add("--verify", action="store_true", help="train again in one process and compare all weights")
    args = parser.parse_args()
    args.set = dict(args.set)
    if args.in_process and RANKS > 1:
        parser.error("--in-process runs all ranks in one process: start it without torchrun")
    if args.width % args.heads:
        parser.error(f"--width {args.width} is no multiple of --heads {args.heads}")
    if not (args.lr > 0 and 0 <= args.dropout < 1 and 0 <= args.seed < 1 << 40):
        parser.error("--lr has to be above 0, --dropout from 0 to below 1, --seed from 0 to 2^40")
    return args


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, from one rank."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and end."""
        fail(message)


def positive(text: str) -> int:
    """An int from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")
    return int(text)


def setting(text: str) -> tuple[str, str | int | bool]:
    """A parameter of the schedule: `key=value`."""
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier() or key in ("target", "ranks", "microbatches", "chunks"):
        raise argparse.ArgumentTypeError(f"{text!r} is no KEY=VALUE for a schedule's parameter")
    if value.lower() in ("true", "false"):
        return key, value.lower() == "true"
    return key, int(value) if value.removeprefix("-").isdecimal() else value


def fail(message: str) -> NoReturn:
    """End with one line, from rank 0: torchrun ends the others as soon as that one has."""
    if RANK != 0:
        time.sleep(10)
    else:
        print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
