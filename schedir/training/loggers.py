"""Loggers: callbacks that hand the figures of a training to a file or a service, and a monitor.

They write at once, so that a training that is killed loses none of it. Each is a few lines over its
library; another service's would be as well.
"""

from __future__ import annotations

import csv
import json
import math
import resource
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from schedir.errors import ExecutionError
from schedir.files import replacing
from schedir.runtime import Executor
from schedir.runtime.processes.failure import describe
from schedir.training.callbacks import Callback, Logger
from schedir.training.history import History


class _File(Logger):
    """A file of rows, which a training that goes on goes on with."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = Path(path)

    def before_training(self, step: int) -> None:
        """Drop what is of later steps, and a line that was cut off."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._replace([row for row in self._rows() if int(row["step"]) <= step])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ExecutionError(
                f"{type(self).__name__} can't go on with {self._path}: {describe(error)}"
            ) from error

    def _rows(self) -> list[dict[str, Any]]:
        text = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
        return self._parsed(line for line in text.splitlines(True) if line.endswith("\n"))

    def _parsed(self, lines: Iterable[str]) -> list[dict[str, Any]]:
        return [json.loads(line) for line in lines]

    def _replace(self, rows: Sequence[Mapping[str, Any]]) -> None:
        with replacing(self._path) as file:
            file.writelines(f"{json.dumps(row)}\n" for row in rows)


class JSONLines(_File):
    """Writes a line of JSON with the step and the figures, null for what is not finite.

    A file that is there is gone on with: of it the lines of later steps are dropped.
    """

    def after_log(self, step: int, figures: Mapping[str, float]) -> None:
        """Add a line."""
        known = {name: value if math.isfinite(value) else None for name, value in figures.items()}
        with self._path.open("a", encoding="utf-8") as file:
            print(json.dumps({"step": step, **known}), file=file)


class CSV(_File):
    """Writes a row with the step and the figures, under a header, which grows as figures come.

    A file that is there is gone on with: of it the rows of later steps are dropped.
    """

    _names: Sequence[str] = ("step",)

    def after_log(self, step: int, figures: Mapping[str, float]) -> None:
        """Add a row."""
        if new := [name for name in figures if name not in self._names]:
            self._names = [*self._names, *new]
            self._replace(self._rows())
        with self._path.open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, self._names).writerow({"step": step, **figures})

    def _parsed(self, lines: Iterable[str]) -> list[dict[str, Any]]:
        return [*csv.DictReader(lines)]

    def _replace(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._names = [*dict.fromkeys([*self._names, *(rows[0] if rows else ())])]
        with replacing(self._path) as file:
            writer = csv.DictWriter(file, self._names)
            writer.writeheader()
            writer.writerows(rows)


class TensorBoard(Logger):
    """Writes scalars for TensorBoard into a folder: a step's own, which those of later steps that
    are there already give way to (`purge_step`)."""

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
    """Logs to Weights & Biases: a run of what `wandb.init` is given here, the `project` and so on.

    With `mode="offline"` it is a folder, to be synced later. A training that goes on is another
    run, unless it is given the `id` of the first one, with `resume="allow"`; of steps that this one
    has already, wandb keeps what it has.
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


class Monitor(Callback):
    """Adds "peak_memory_gib" to the figures of every log: of the process that has used most.

    It is what tensors on the executor's device took at once, or the memory of a process where that
    is the CPU. Processes tell each other at every log.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def figures(self) -> Mapping[str, float]:
        """The largest peak of all processes so far, in GiB."""
        device = self._executor.device
        if device.type == "cpu":
            peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        else:
            peak = torch.get_device_module(device).max_memory_allocated(device)
        return {"peak_memory_gib": max(self._executor.gather(peak)) / 2**30}


def _needs(library: str) -> None:
    """Raise ExecutionError, with what helps, where a library is not installed."""
    if find_spec(library) is None:
        raise ExecutionError(f"{library} is not installed: pip install 'schedir[{library}]'")
