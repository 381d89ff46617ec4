"""Torch and schedir as each other's referee: lists of the one train on the runtime of the other as
plain training does."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

import schedir
from schedir import Kind, Schedule
from schedir.cli.export import listed
from schedir.errors import LoadError
from schedir.passes import strip_communication
from schedir.runtime import Executor
from tests.built_in import EVERY, steps_once
from tests.runtime.kit import MSE, numbered
from tests.runtime.on_ranks import on_ranks
from tests.torch_schedules import GENERATORS, computed, lowered

WIDTH, ROWS = 4, 2
FORMATS = {"torch-csv": "compute_only", "torch-csv-comms": "compute_comms"}


def stages(number: int) -> list[nn.Module]:
    """All boundaries have one shape, so that a mis-paired transfer arrives and the step ends."""
    torch.manual_seed(7)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(number)]


def batch(microbatches: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    x, y = torch.randn(2, microbatches * ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return x, y


def assert_plain(local: dict[int, nn.Module], number: int, microbatches: int) -> None:
    """The stages have the gradients of the whole batch's mean loss."""
    whole = stages(number)
    x, y = batch(microbatches)
    MSE(nn.Sequential(*whole)(x), y).backward()
    for stage, module in local.items():
        for mine, right in zip(module.parameters(), whole[stage].parameters(), strict=True):
            torch.testing.assert_close(mine.grad, right.grad, rtol=1e-10, atol=1e-13)


def run_here(schedule: Schedule, rank: int | None) -> None:
    whole = numbered(stages(schedule.stages))
    local = whole if rank is None else {s: whole[s] for s in schedule.stages_of(rank)}
    x, y = batch(schedule.microbatches)
    with Executor(schedule, local, MSE, in_process=rank is None) as executor:
        executor.step(x, target=y)
    assert_plain(local, schedule.stages, schedule.microbatches)


def run_on_torch(schedule: Schedule, rank: int, form: str) -> None:
    """The exported list on torch's own runtime."""
    if form == "torch-csv":
        schedule = strip_communication(schedule)
    written = listed(schedule, form)
    whole = stages(schedule.stages)
    local = {stage: whole[stage] for stage in schedule.stages_of(rank)}
    cpu = torch.device("cpu")
    theirs: Any = _PipelineScheduleRuntime(
        [PipelineStage(module, s, schedule.stages, cpu) for s, module in local.items()],
        schedule.microbatches,
        loss_fn=MSE,
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "list.csv")
        file.write_text(str(written.content))
        theirs._load_csv(str(file), format=FORMATS[form])
    x, y = batch(schedule.microbatches)
    last = schedule.stages - 1 in local
    theirs.step(*((x,) if 0 in local else ()), target=y if last else None)
    assert_plain(local, schedule.stages, schedule.microbatches)


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.filterwarnings("ignore")  # some of torch's schedules warn that they are new
def test_torchs_lists_run_here(name: str, ranks: int) -> None:
    run_here(lowered(name, ranks, 8), None)
    run_here(schedir.insert_communication(computed(name, ranks, 8)), None)


@pytest.mark.filterwarnings("ignore")
@on_ranks(2)
def test_torchs_lists_run_here_on_two_ranks(rank: int) -> None:
    for name in GENERATORS:
        run_here(lowered(name, 2, 4), rank)


def expressible(ranks: int) -> dict[str, Schedule]:
    """The built-in schedules that torch can run: one copy of each stage, one set of weights."""
    found = {}
    for name in EVERY:
        try:
            schedule = schedir.build(name, ranks=ranks, microbatches=2 * ranks)
        except LoadError:
            continue
        kinds = {action.kind for row in schedule.flat for action in row}
        alone = all(len(held) == 1 for held in schedule.placement)
        if alone and steps_once(schedule) and Kind.RECOMPUTE not in kinds:
            found[name] = schedule
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", FORMATS)
@on_ranks(2)
def test_ours_train_on_torch(rank: int, form: str) -> None:
    schedules = expressible(2)
    assert {"1f1b", "fill-drain", "interleaved-1f1b", "dualpipev"} <= set(schedules)
    for schedule in schedules.values():
        run_on_torch(schedule, rank, form)


@pytest.mark.filterwarnings("ignore")
@on_ranks(4)
def test_ours_train_on_torch_on_four_ranks(rank: int) -> None:
    schedules = expressible(4)
    for name in ("1f1b", "dualpipev", "interleaved-zb", "zbv"):
        run_on_torch(schedules[name], rank, "torch-csv-comms")
