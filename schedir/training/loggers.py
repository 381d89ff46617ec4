"""Loggers, which write the figures of a training to a file, to a service, or on the terminal.

They write at once, so a training that is killed loses nothing. A logger for another service takes
the same few lines as `WandB`.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from itertools import chain, count
from math import isfinite
from os import PathLike
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from schedir.display import rounded
from schedir.errors import ExecutionError
from schedir.files import replacing
from schedir.runtime import StepResult
from schedir.runtime.processes.failure import describe
from schedir.training.callbacks import Logger
from schedir.training.history import History


class _File(Logger):
    """A file of rows, in a format of a subclass. A resumed training appends to it."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = Path(path)
        self._names = ["step"]

    def before_training(self, step: int) -> None:
        """Drop the rows of later steps, and a last line that was cut off. A training that begins
        moves the file of an earlier one aside: `log.csv` becomes `log-1.csv`."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            rows = self._rows()
            kept = [row for row in rows if int(row["step"]) <= step]
            if rows and not step:
                names = (self._path.with_stem(f"{self._path.stem}-{n}") for n in count(1))
                self._path.rename(next(name for name in names if not name.exists()))
            self._replace(kept)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ExecutionError(
                f"{type(self).__name__} can't continue the file {self._path}: {describe(error)}; "
                "give another path, or move the file away"
            ) from error

    def after_log(self, step: int, figures: Mapping[str, float]) -> None:
        """Add a row."""
        if new := [name for name in figures if name not in self._names]:
            self._names += new
            self._replace(self._rows())
        numbers = {name: float(value) for name, value in figures.items()}  # of tensors too
        with self._path.open("a", encoding="utf-8", newline="") as file:
            self._write(file, [{"step": step, **numbers}])

    def _rows(self) -> list[dict[str, Any]]:
        text = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
        return self._parsed(line for line in text.splitlines(True) if line.endswith("\n"))

    def _replace(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._names = [*dict.fromkeys(chain(self._names, *rows[:1]))]
        with replacing(self._path) as file:
            self._write(file, rows)

    def _parsed(self, lines: Iterable[str]) -> list[dict[str, Any]]:
        raise NotImplementedError

    def _write(self, file: TextIO, rows: Sequence[Mapping[str, Any]]) -> None:
        raise NotImplementedError


class JSONLines(_File):
    """Writes each log as a line of JSON: the step and the figures, null for NaN and infinity.

    >>> from pathlib import Path
    >>> from schedir.training import JSONLines
    >>> JSONLines("log.jsonl").after_log(10, {"loss": 0.5})
    >>> Path("log.jsonl").read_text()
    '{"step": 10, "loss": 0.5}\\n'

    Pass it in the `callbacks` of a Trainer. A resumed training appends to the file, and drops the
    lines of later steps; a new one moves an earlier file aside.
    """

    def _parsed(self, lines: Iterable[str]) -> list[dict[str, Any]]:
        return [json.loads(line) for line in lines]

    def _write(self, file: TextIO, rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows:
            known = {name: x if x is None or isfinite(x) else None for name, x in row.items()}
            print(json.dumps(known), file=file)


class CSV(_File):
    """Writes each log as a row with the step and the figures. New figures extend the header.

    >>> from pathlib import Path
    >>> from schedir.training import CSV
    >>> CSV("log.csv").after_log(10, {"loss": 0.5})
    >>> Path("log.csv").read_text().splitlines()
    ['step,loss', '10,0.5']

    Pass it in the `callbacks` of a Trainer. A resumed training appends to the file, and drops the
    rows of later steps; a new one moves an earlier file aside.
    """

    def _parsed(self, lines: Iterable[str]) -> list[dict[str, Any]]:
        return [*csv.DictReader(lines)]

    def _write(self, file: TextIO, rows: Sequence[Mapping[str, Any]]) -> None:
        writer = csv.DictWriter(file, self._names)
        if not file.tell():
            writer.writeheader()
        writer.writerows(rows)


class TensorBoard(Logger):
    """Writes each log as scalars for TensorBoard into a folder.

    >>> from schedir.training import TensorBoard
    >>> log = TensorBoard("runs/digits")  # Trainer(…, log_every=10, callbacks=[log])

    If the folder has scalars of later steps, TensorBoard drops them (`purge_step`). Raises
    ExecutionError if tensorboard is not installed.
    """

    _writer: Any

    def __init__(self, folder: str | PathLike[str]) -> None:
        _needs("tensorboard")
        self._folder = folder

    def before_training(self, step: int) -> None:
        """Begin a file of events."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(self._folder, purge_step=step + 1)

    def after_log(self, step: int, figures: Mapping[str, float]) -> None:
        """Add scalars."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def after_training(self, history: History) -> None:
        """Close the file."""
        self._writer.close()


class WandB(Logger):
    """Logs to Weights & Biases. Its arguments are those of `wandb.init`: `project` and so on.

    >>> from schedir.training import WandB
    >>> log = WandB(project="digits", mode="offline")  # Trainer(…, log_every=10, callbacks=[log])

    With `mode="offline"` the run is a folder, which you sync later. A resumed training is a new
    run, unless you pass the `id` of the first one, with `resume="allow"`; then wandb keeps the
    figures that it has already. Raises ExecutionError if wandb is not installed.
    """

    _run: Any

    def __init__(self, **init: Any) -> None:
        _needs("wandb")
        self._init = init

    def before_training(self, step: int) -> None:
        """Begin a run."""
        import wandb

        self._run = wandb.init(**self._init)

    def after_log(self, step: int, figures: Mapping[str, float]) -> None:
        """Log the figures of a step."""
        self._run.log(figures, step=step)

    def after_training(self, history: History) -> None:
        """End the run."""
        self._run.finish()


class ProgressBar(Logger):
    """Prints a line for each log and each entry of the history.

    On a terminal it shows a bar of the steps, of `total` if that is known, and the log beside it.
    """

    def __init__(self, total: int | None) -> None:
        # The stdout of this moment, in any locale.
        self._console = Console(file=sys.stdout, highlight=False, markup=False, soft_wrap=True)
        self._bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total)

    def before_training(self, step: int) -> None:
        """Begin the bar, and say where a resumed training goes on."""
        if step:
            self._console.print(f"resumes after step {step}")
        self._bar.update(self._task, completed=step)
        self._bar.start()

    def after_step(self, result: StepResult) -> None:
        """Advance the bar."""
        self._bar.advance(self._task)

    def after_log(self, step: int, figures: Mapping[str, float]) -> None:
        """Show the figures."""
        line = "  ".join(f"{name} {_short(float(value))}" for name, value in figures.items())
        if self._console.is_terminal:
            self._bar.update(self._task, description=line)
        else:
            self._console.print(f"step {step}  {line}")

    def after_record(self, history: History) -> None:
        """Print the new entry."""
        line = str(history[-1])
        if history.best and history.stale:
            line += f"  {history.stale} after the best"
        self._console.print(line)

    def after_training(self, history: History) -> None:
        """Remove the bar."""
        self._bar.stop()


def _needs(library: str) -> None:
    """Raise ExecutionError, with the command to run, if a library is not installed."""
    if find_spec(library) is None:
        raise ExecutionError(f"{library} is not installed: pip install 'schedir[{library}]'")


def _short(value: float) -> str:
    return rounded(value, 4) if abs(value) < 9999.5 else f"{value:,.0f}"
