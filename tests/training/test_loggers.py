"""What loggers write is read back by the libraries that it is for, also of a training resumed."""

from __future__ import annotations

import csv
import json
import math
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing import event_accumulator  # type: ignore[import-untyped]

from schedir.training import CSV, Batches, History, JSONLines, Logger, Monitor, TensorBoard, WandB
from tests.runtime.kit import everyone, message_of
from tests.runtime.on_ranks import on_ranks
from tests.test_architecture import imported_by
from tests.training.test_trainer import EVALUATED, TRAINED, Ends, an_executor, trainer_of

Rows = dict[int, dict[str, float]]


class Held(Logger):
    """What any logger is told, by step."""

    def __init__(self) -> None:
        self.rows: Rows = {}

    def after_log(self, step: int, figures: Mapping[str, float]) -> None:
        self.rows.setdefault(step, {}).update(figures)


def fit(
    logger: Logger, ends: int | None = None, folder: Path | None = None, rank: int | None = None
) -> tuple[Rows, History]:
    """Ten steps, logged every two and evaluated every five, which may be interrupted before."""
    held = Held()
    every = {"max_steps": 10, "eval_every": 5, "save_every": 3, "log_every": 2}
    with an_executor(rank) as executor:
        callbacks = [held, logger, Monitor(executor)]
        callbacks += [] if ends is None else [Ends(executor, ends)]
        options: dict[str, Any] = {"callbacks": callbacks, "checkpoint": folder, **EVALUATED}
        trainer = trainer_of(executor, Batches(TRAINED, repeat=True), **every, **options)
        with nullcontext() if ends is None else pytest.raises(KeyboardInterrupt):
            trainer.fit()
        return held.rows, trainer.history


def by_step(rows: Iterable[dict[str, Any]]) -> Rows:
    """The figures of rows that have a step, and nothing twice."""
    found: Rows = {}
    for row in rows:
        here = found.setdefault(int(row.pop("step")), {})
        assert not here.keys() & row.keys(), "twice"
        here.update(row)
    return found


def of_csv(path: Path) -> Rows:
    rows = csv.DictReader(path.read_text().splitlines())
    return by_step({name: float(x) for name, x in row.items() if x} for row in rows)


def of_json_lines(path: Path) -> Rows:
    return by_step(map(json.loads, path.read_text().splitlines()))


def of_tensorboard(path: Path) -> Rows:
    events = event_accumulator.EventAccumulator(str(path))
    events.Reload()
    scalars = ((name, x) for name in events.Tags()["scalars"] for x in events.Scalars(name))
    return by_step({"step": x.step, name: x.value} for name, x in scalars)


FILES: dict[str, tuple[Callable[[Path], Logger], Callable[[Path], Rows]]] = {
    "csv": (CSV, of_csv),
    "json": (JSONLines, of_json_lines),
    "tensorboard": (TensorBoard, of_tensorboard),
}


def rounded(rows: Rows, exact: bool) -> Rows:
    """TensorBoard has single precision."""
    return {
        step: {name: x if exact else float(torch.tensor(x)) for name, x in row.items()}
        for step, row in rows.items()
    }


@pytest.mark.parametrize("kind", FILES)
def test_a_file_has_the_figures_of_logs_and_entries(kind: str, tmp_path: Path) -> None:
    make, read = FILES[kind]
    path = tmp_path / "logs" / "run"
    told, history = fit(make(path))
    assert [*told] == [2, 4, 5, 6, 8, 10]
    of_logs = {"loss", "lr", "samples_per_second", "peak_memory_gib"}
    of_entries = {"record/loss", "record/lr", "evaluation/loss", "evaluation/accuracy"}
    expected = dict.fromkeys((2, 4, 6, 8), of_logs) | {5: of_entries, 10: of_logs | of_entries}
    assert {step: row.keys() for step, row in told.items()} == expected
    assert told[10]["evaluation/loss"] == history[-1].evaluation_loss
    assert told[10]["record/loss"] == history[-1].loss
    assert read(path) == rounded(told, exact=kind != "tensorboard")


@pytest.mark.parametrize("kind", FILES)
def test_a_training_that_goes_on_goes_on_with_its_file(kind: str, tmp_path: Path) -> None:
    """What it wrote after its last checkpoint, at step 6, is there once, as it is made anew."""
    make, read = FILES[kind]
    path = tmp_path / "run"
    before, _ = fit(make(path), ends=9, folder=tmp_path / "saved")
    assert [*read(path)] == [2, 4, 5, 6, 8] or kind == "tensorboard"
    after, _ = fit(make(path), folder=tmp_path / "saved")
    assert [*after] == [8, 10]
    told = {step: before[step] for step in (2, 4, 5, 6)} | after
    assert read(path) == rounded(told, exact=kind != "tensorboard")
    anew, _ = fit(make(path))
    assert read(path) == rounded(anew, exact=kind != "tensorboard")


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_a_line_that_was_cut_off_is_dropped(kind: str, tmp_path: Path) -> None:
    make, read = FILES[kind]
    path = tmp_path / "run"
    fit(make(path), ends=9, folder=tmp_path / "saved")
    whole = path.read_bytes()
    cut = whole.splitlines(keepends=True)[-1][:4]  # enough of it to be a row, or none
    path.write_bytes(whole + cut)
    fit(make(path), folder=tmp_path / "saved")
    assert [*read(path)] == [2, 4, 5, 6, 8, 10]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (JSONLines, '{"step": 3, "loss": null, "lr": 0.5}\n'),
        (CSV, "step,loss,lr\n3,nan,0.5\n"),
    ],
)
def test_tensors_are_numbers_and_json_has_null_for_nan(
    make: Callable[[Path], Logger], text: str, tmp_path: Path
) -> None:
    figures: dict[str, Any] = {"loss": math.nan, "lr": torch.tensor([0.5])}
    make(tmp_path / "run").after_log(3, figures)
    assert (tmp_path / "run").read_text() == text


@pytest.mark.parametrize("make", [CSV, JSONLines])
def test_a_file_of_something_else_is_left_alone(
    make: Callable[[Path], Logger], tmp_path: Path
) -> None:
    path = tmp_path / "mine"
    path.write_text("my,own\n1,2\n")
    assert f"{make.__name__} can't continue the file {path}: " in message_of(fit, make(path))
    assert path.read_text() == "my,own\n1,2\n"
    assert "can't continue the file" in message_of(fit, make(tmp_path))


def records(content: bytes) -> Iterator[bytes]:
    """Of a run's file: after a header records, in parts, each behind its checksum, its length and
    which part it is, in blocks of 32 KiB (LevelDB's log)."""
    at, record = 7, b""
    while at < len(content):
        if (left := -at % 2**15) < 7:
            at += left
            continue
        size, part = struct.unpack("<HB", content[at + 4 : at + 7])
        record += content[at + 7 : at + 7 + size]
        at += 7 + size
        if part in (1, 4):  # the whole, or its last
            yield record
            record = b""


@pytest.mark.timeout(120)
def test_weights_and_biases_has_the_figures_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    told, _ = fit(WandB(project="tried", mode="offline", dir=tmp_path, name="one"))
    import_module("wandb").teardown()  # its own process writes the file, and ends then
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    messages: Any = import_module("wandb.proto.wandb_internal_pb2")
    found: Rows = {}
    projects = []
    for content in records(file.read_bytes()):
        record = messages.Record.FromString(content)
        if record.HasField("run"):
            projects.append(record.run.project)
        for item in record.history.item:
            name = item.key or ".".join(item.nested_key)
            if not name.startswith("_"):
                row = found.setdefault(record.history.step.num, {})
                row[name] = json.loads(item.value_json)
    assert set(projects) == {"tried"}
    assert found == told


@on_ranks(2)
def test_the_first_process_alone_writes(rank: int, folder: Path) -> None:
    told, _ = fit(CSV(folder / f"{rank}.csv"), rank=rank)
    everyone(None)
    assert (not told) == (rank == 1)
    assert [one.name for one in folder.iterdir()] == ["0.csv"]
    if rank == 0:
        assert of_csv(folder / "0.csv") == told
        assert all("bubble" in row for step, row in told.items() if step % 2 == 0)


def test_a_library_that_is_not_there_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: dict[str, Any] = {"tensorboard": partial(TensorBoard, "run")}
    for name, make in {**made, "wandb": partial(WandB, project="tried")}.items():
        monkeypatch.setitem(sys.modules, name, None)
        said = message_of(make)
        assert said == f"{name} is not installed: pip install 'schedir[{name}]'"


def test_nothing_is_imported_for_loggers_that_are_not_used() -> None:
    assert not imported_by("import schedir.training") & {"tensorboard", "wandb"}


@pytest.mark.parametrize("make", [CSV, JSONLines])
def test_a_new_training_moves_the_log_of_an_earlier_one_aside(
    make: Callable[[Path], Logger], tmp_path: Path
) -> None:
    file = tmp_path / "log.txt"
    fit(make(file))
    first = file.read_text()
    for number in (1, 2):
        fit(make(file), ends=4 * number)
        assert (tmp_path / "log-1.txt").read_text() == first
        assert (tmp_path / "log-2.txt").exists() == (number > 1)
    assert len(file.read_text()) > len((tmp_path / "log-2.txt").read_text()) > 0
