"""Shared by the examples: the options of a schedule, one-line errors, and `--verify`.

Training needs nothing of it: all that a training needs is in the example's own file.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from reference import Reference
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

import schedir
from schedir.render import legible, timeline_text
from schedir.runtime import StepResult
from schedir.training import Callback, Stages

RANK = int(os.environ.get("RANK", "0"))
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))

console = Console(quiet=RANK != 0, highlight=False, markup=False, soft_wrap=True)


class Parser(argparse.ArgumentParser):
    """The options of all examples, and `sizes`: more options, each with a default and a help text.

    `schedule`, `microbatches`, `chunks` and `lr` are defaults. Errors are one line, from one rank.
    """

    def __init__(
        self,
        description: str | None,
        *,
        schedule: str = "1f1b",
        microbatches: int | None = None,
        chunks: int | None = None,
        lr: float = 1e-3,
        **sizes: tuple[int | None, str],
    ) -> None:
        super().__init__(description=(description or "").partition("\n")[0])
        add = self.add_argument
        add(
            "--schedule",
            default=schedule,
            help=f"a name that `schedir list` shows, or a file ({schedule}); Python is run",
        )
        self._number("microbatches", microbatches, "parts of a batch", shown="8")
        self._number("chunks", chunks, "stages per rank", shown="the schedule's default")
        add(
            "--set",
            type=setting,
            nargs="+",
            action="extend",
            default=[],
            metavar="KEY=VALUE",
            help="a parameter of the schedule, such as vertical_sync=true",
        )
        for name, (default, text) in sizes.items():
            self._number(name.replace("_", "-"), default, text)
        add("--lr", type=float, default=lr, metavar="X", help=f"learning rate ({lr:g})")
        add("--seed", type=int, default=0, metavar="N", help="of weights, data and dropout (0)")
        add("--device", choices=("cpu", "cuda"), default="cpu", help="over gloo, or NCCL (cpu)")
        add("--in-process", type=positive, metavar="P", help="run P ranks in this process, in turn")
        add("--verify", action="store_true", help="train again in one process, and compare")

    def _number(self, name: str, default: int | None, text: str, shown: str = "") -> None:
        shown = shown if default is None else str(default)
        text += f" ({shown})" * bool(shown)
        self.add_argument(f"--{name}", type=positive, default=default, metavar="N", help=text)

    def arguments(self) -> argparse.Namespace:
        """The command line's options; `ranks` are those of the schedule: all, unless it is one."""
        legible(sys.stdout)
        legible(sys.stderr)
        args = self.parse_args()
        args.set = dict(args.set)
        if args.device == "cuda":
            if not torch.cuda.is_available():
                self.error("--device cuda: torch sees no GPU")
            args.device = f"cuda:{LOCAL_RANK}"
        args.ranks = args.in_process or getattr(args, "ranks", RANKS)
        args.verify &= RANK == 0  # it is the one that has all weights
        if args.in_process and RANKS > 1:
            self.error("--in-process runs all ranks in one process: start it without torchrun")
        if not (args.lr > 0 and 0 <= args.seed < 1 << 40):
            self.error("--lr has to be above 0, --seed from 0 to 2^40")
        return args

    def error(self, message: str) -> NoReturn:
        """Print the error and end."""
        fail(message)


def run(train: Callable[[argparse.Namespace], bool], args: argparse.Namespace) -> NoReturn:
    """Train, and end the process: with 1 where `train` says that --verify found a difference."""
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


def build(args: argparse.Namespace) -> schedir.Schedule:
    """The schedule of the options: one list of actions per rank, with communication."""
    sched = schedir.build(
        args.schedule,
        ranks=args.ranks,
        microbatches=args.microbatches,
        chunks=args.chunks,
        **args.set,
    )
    if args.batch < sched.microbatches:
        fail(f"--batch {args.batch} has too few rows for {sched.microbatches} microbatches")
    return sched


def show(sched: schedir.Schedule, stages: Stages) -> None:
    """Print the timeline of the schedule, and the layers of each stage."""
    console.print(f"{timeline_text(schedir.simulate(sched)).strip()}\n\n{stages}\n")


class Losses(Callback, list[float]):
    """The loss of every step, for `verify`: a callback of the Trainer."""

    def after_step(self, result: StepResult) -> None:
        self.append(result.loss)


def verify(
    reference: Reference,
    batches: Iterable[tuple[Any, ...]],
    losses: Sequence[float],
    weights: Mapping[str, Tensor] | None,
    tolerance: float = 0.0,
) -> bool:
    """Train `reference` on the same batches, and compare, on rank 0.

    `losses` are those of the pipeline's steps, `weights` its `gathered_state` at the end. They may
    differ by `tolerance`, relative to the value, or to 1 if that is larger. By default all weights
    must be equal bit for bit, and losses equal up to the order in which a mean is added up.
    """
    assert weights is not None, "it is rank 0 that has all weights"
    expected = []
    with progress_bar() as bar:
        console.print("verify: the same training in one process …")
        task = bar.add_task("verify", total=len(losses))
        for _, (inputs, target) in zip(losses, batches, strict=False):
            expected.append(reference.step(inputs, target))
            bar.advance(task)
    difference = "; ".join(_differences(reference, expected, losses, weights, tolerance))
    within = f"to {tolerance:g}" if tolerance else "bit for bit"
    same = f"all {len(losses)} losses and {len(weights)} tensors equal, {within}"
    console.print(f"verify: {difference or same}")
    return not difference


def _differences(
    reference: Reference,
    expected: Sequence[float],
    losses: Sequence[float],
    weights: Mapping[str, Tensor],
    tolerance: float,
) -> Iterable[str]:
    """Describe the first loss that differs, and the first weight."""
    for step, (ours, theirs) in enumerate(zip(losses, expected, strict=True), 1):
        if not abs(ours - theirs) <= max(tolerance, 1e-12) * max(1, abs(theirs)):
            yield f"the loss of step {step} is {ours!r}, not {theirs!r}"
            break
    whole = {name: w.cpu() for stage in reference.stages for name, w in stage.state_dict().items()}
    if missing := whole.keys() ^ weights.keys():
        yield f"only one of the two has {', '.join(sorted(missing))}"
        return
    for name, weight in weights.items():
        off = (weight - whole[name]).abs().max().item() if weight.numel() else 0.0
        if not off <= tolerance * max(1.0, whole[name].abs().max().item()):
            yield f"{name} differs, by up to {off:.3g}"
            break


def progress_bar() -> Progress:
    """A bar on rank 0's terminal, nothing elsewhere."""
    return Progress(console=console, transient=True, disable=RANK != 0 or not console.is_terminal)


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
