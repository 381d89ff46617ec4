"""PipeDream beside 1F1B and fill-drain: time per microbatch, and the loss after the same time.

    torchrun --nproc-per-node 2 examples/compare_pipedream.py
    torchrun --nproc-per-node 2 examples/compare_pipedream.py --verify

The same GPT learns the same rows in the same order, five times. A batch is `--microbatches`
microbatches, and

    one by one      each of them goes through all stages and updates them before the next one starts
    fill-drain      all are in the pipeline together, and make one update
    1f1b            the same, in an order that keeps less in memory (`--schedule`)
    pipedream       each makes an update of its own, from weights that are some updates old
    vertical sync   the same, from weights that are equally old on all stages

The first three call `step`, batch by batch, and drain the pipeline each time; the last two call
`run`, which keeps it full for a segment of `--batches` batches. So the first and the last two make
the same number of updates, and per sample only the age of the weights makes a difference.
Fill-drain and 1F1B make fewer updates, at their own rate (`--lr-batch`).

The trainings take turns of a segment each, so that other load on the machine slows all of them.
After a turn the pipeline is drained, and the loss on held-out text is computed, outside of the
timing. Each training goes on until its turns have taken `--seconds`.
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from statistics import mean, median, quantiles
from time import perf_counter
from typing import TypeAlias

import attrs
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

Batch: TypeAlias = tuple[Tensor, Tensor]


@attrs.frozen
class Task:
    """What all trainings share: the model, the text and the seed."""

    args: argparse.Namespace
    segment: int  # microbatches of a turn
    text: Tensor
    test: Batch

    def stage(self, number: int, stages: int) -> nn.Module:
        """A stage of the model with its initial weights."""
        args = self.args
        config = Config(args.layers, args.width, args.heads, args.context)
        return build_stage(config, number, stages, args.seed).to(args.device)

    def batches(self, turn: int, microbatches: int) -> list[Batch]:
        """The rows of a turn, as batches."""
        args = self.args
        rows = batch(self.text, args.batch * args.batches, args.context, args.seed, turn)
        each = (part.tensor_split(self.segment // microbatches) for part in rows)
        return [*zip(*each, strict=True)]


@attrs.define
class Training:
    """One of the trainings, and how it has gone so far."""

    task: Task
    name: str
    schedule: schedir.Schedule  # of a batch
    lr: float
    segment: int = 0  # microbatches of a segment of `run`; 0 where `step` is called
    losses: list[list[float]] = attrs.field(factory=list)  # of the batches, turn by turn
    tested: list[float] = attrs.field(factory=list)  # before the first turn, and after each
    measured: list[float] = attrs.field(factory=list)  # seconds of each turn

    def optimizer(self, weights: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of a stage."""
        return torch.optim.AdamW(weights, lr=self.lr, fused=True)

    def executor(self) -> Executor:
        """The executor that trains it."""
        sched, args = self.schedule, self.task.args
        here = range(sched.stages) if args.in_process else sched.stages_of(RANK)
        return Executor(
            sched,
            {number: self.task.stage(number, sched.stages) for number in here},
            loss_fn,
            self.optimizer,
            seed=args.seed,
            in_process=bool(args.in_process),
        )

    def test(self, executor: Executor) -> None:
        """Find the loss on held-out text."""
        inputs, target = self.task.test
        self.tested.append(executor.evaluate(inputs, target=target).loss)

    def take_turn(self, executor: Executor) -> None:
        """Train on the batches of a turn. The first rank takes the time, for all."""
        batches = self.task.batches(len(self.losses), self.schedule.microbatches)
        executor.gather(None)  # all ranks begin together
        began = perf_counter()
        if self.segment:
            losses = [result.loss for result in executor.run(batches, segment=self.segment)]
        else:
            losses = [executor.step(inputs, target=target).loss for inputs, target in batches]
        self.measured.append(executor.gather(perf_counter() - began)[0])
        self.losses.append(losses)

    @property
    def seconds(self) -> list[float]:
        """The seconds of each turn. The first turn also connects the ranks and learns shapes, so it
        counts as the median of the others."""
        others = self.measured[1:]
        return [median(others or self.measured), *others] if self.measured else []

    @property
    def curve(self) -> Curve:
        """The held-out losses over samples and seconds."""
        args = self.task.args
        samples = [turn * args.batch * args.batches for turn in range(len(self.tested))]
        return Curve(self.name, self.tested, samples, [*accumulate(self.seconds, initial=0.0)])

    @property
    def row(self) -> Sequence[str]:
        """Its line of the table."""
        curve, until = self.curve, self.task.args.until
        each = [1e3 * seconds / self.task.segment for seconds in self.seconds]
        low, middle, high = quantiles(each, method="inclusive") if len(each) > 1 else each * 3
        updates = self.segment or len(self.losses[-1])  # of a turn
        reached = next((turn for turn, loss in enumerate(self.tested) if loss <= until), None)
        return (
            self.name,
            f"{middle:.2f}",
            f"{low:.2f} to {high:.2f}",
            f"{len(self.losses) * updates:,}",
            f"{mean(self.losses[-1]):.3f}",
            f"{self.tested[-1]:.3f}",
            "-" if reached is None else f"{curve.samples[reached]:,}",
            "-" if reached is None else f"{curve.seconds[reached]:.1f}",
        )

    def equals_one_process(self, weights: Mapping[str, Tensor] | None) -> bool:
        """Train again in this process, segment by segment, and compare."""
        task, sched = self.task, self.schedule
        losses = [loss for turn in self.losses for loss in turn]
        if self.segment:
            assert sched.rebuild is not None
            sched, losses = sched.rebuild(self.segment), [mean(turn) for turn in self.losses]
        initial = [task.stage(number, sched.stages) for number in range(sched.stages)]
        reference = Reference(sched, initial, loss_fn, self.optimizer, task.args.seed)
        turns = range(len(self.losses))
        batches = (pair for turn in turns for pair in task.batches(turn, sched.microbatches))
        return verify(reference, batches, losses, weights)


def compare(args: argparse.Namespace) -> bool:
    """Train all five, print and draw the results. False if --verify has found a difference."""
    base = build(args)
    if args.batch % base.microbatches:
        fail(f"--batch {args.batch} is no multiple of {base.microbatches} microbatches")
    text, held_out = corpus()
    test = batch(held_out, args.test_rows, args.context, args.seed, 0)
    task = Task(args, args.batches * base.microbatches, text, test)
    trainings = all_five(task, base)
    with ExitStack() as stack:
        executors = [stack.enter_context(training.executor()) for training in trainings]
        take_turns(trainings, executors, args)
        weights = [gathered_state(executor) for executor in executors]
    report(trainings, args)
    pairs = zip(trainings, weights, strict=True)
    equal = [each.equals_one_process(found) for each, found in pairs] if args.verify else []
    return all(equal)


def all_five(task: Task, base: schedir.Schedule) -> list[Training]:
    """The trainings that are compared; `base` updates once a batch."""
    lr, lr_batch = task.args.lr, task.args.lr_batch

    def built(name: str, microbatches: int = base.microbatches, **more: bool) -> schedir.Schedule:
        return schedir.build(name, ranks=base.ranks, microbatches=microbatches, **more)

    synced = built("pipedream", vertical_sync=True)
    return [
        Training(task, "one by one", built("1f1b", 1), lr),
        Training(task, "fill-drain", built("fill-drain"), lr_batch),
        Training(task, base.name, base, lr_batch),
        Training(task, "pipedream", built("pipedream"), lr, task.segment),
        Training(task, "vertical sync", synced, lr, task.segment),
    ]


def take_turns(
    trainings: Sequence[Training], executors: Sequence[Executor], args: argparse.Namespace
) -> None:
    """Each trains for a segment in its turn, until it has had its seconds."""
    with progress_bar() as bar:
        task = bar.add_task("training", total=args.seconds * len(trainings))
        for training, executor in zip(trainings, executors, strict=True):
            training.test(executor)
        for _ in range(args.rounds):
            for training, executor in zip(trainings, executors, strict=True):
                if sum(training.seconds) < args.seconds:
                    training.take_turn(executor)
                    training.test(executor)
                    bar.advance(task, training.seconds[-1])


def report(trainings: Sequence[Training], args: argparse.Namespace) -> None:
    """Print and draw how they went."""
    loss = f"{args.until:g}"
    header = "", "ms/microbatch", "middle half", "updates", "loss", "held-out", f"samples to {loss}"
    rows = [(*header, f"seconds to {loss}"), *(training.row for training in trainings)]
    console.print(f"after {args.seconds:g} s each:\n\n{table(rows, align='<>>>>>>>')}")
    if RANK == 0:
        curves = [training.curve for training in trainings]
        title = f"PipeDream beside {trainings[2].name} and fill-drain, {args.ranks} ranks"
        write_text(args.picture, picture(curves, args.until, title))
        save(curves, args.until, title, args.picture.with_suffix(".json"))
        console.print(f"\nthe held-out loss over samples and seconds: {args.picture}")


if __name__ == "__main__":
    parser = Parser(
        __doc__,
        microbatches=4,
        lr=5e-4,
        layers=(4, "transformer blocks, over all stages"),
        width=(96, "size of a token's vector"),
        heads=(4, "attention heads per block"),
        context=(32, "bytes per row"),
        batch=(32, "rows of an update of 1F1B, over all microbatches"),
        batches=(16, "batches per turn, which are a segment of PipeDream"),
        rounds=(1000, "turns at most, whatever the seconds"),
        test_rows=(256, "rows of held-out text"),
    )
    add = parser.add_argument
    add("--seconds", type=float, default=15, metavar="X", help="time to train, for each (15)")
    add("--until", type=float, default=2.8, metavar="X", help="held-out loss to look for (2.8)")
    add("--lr-batch", type=float, default=1e-3, metavar="X", help="of fill-drain and 1F1B (0.001)")
    add(
        "--picture",
        type=Path,
        default=Path("compare_pipedream.svg"),
        metavar="FILE",
        help="where the losses are drawn, and kept as JSON beside it (compare_pipedream.svg)",
    )
    run(compare, parser.arguments())
