"""The executor's promises, each a scenario run on 2 ranks, and how it fails."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn

import schedir
from schedir.runtime import Executor
from tests.runtime import (
    aliasing_scenarios,
    corner_scenarios,
    difference_scenarios,
    layout_scenarios,
    scenarios,
    shared_scenarios,
)
from tests.runtime.launch import json_lines, merged, torchrun

RANKS = {
    (module.__name__, name): ranks
    for module in (
        scenarios,
        shared_scenarios,
        difference_scenarios,
        aliasing_scenarios,
        corner_scenarios,
        layout_scenarios,
    )
    for name, (ranks, _) in module.SCENARIOS.items()
}


@cache
def faults(module: str, ranks: int) -> dict[str, list[str]]:
    lines = json_lines(torchrun(ranks, "-m", module))
    return merged(ranks, lines, "scenario", "faults")


@pytest.mark.parametrize(("module", "name"), RANKS)
def test_scenario(module: str, name: str) -> None:
    assert faults(module, RANKS[module, name])[name] == []


def failed(how: str) -> tuple[list[list[str]], str]:
    """What each of 3 ranks has printed when rank 1 failed so, by line; and what torchrun has."""
    # torchrun looks after its processes every so many seconds, and ends all when one has failed:
    # so late that each has said what it has to say.
    worker = ("-m", "tests.runtime.failing_worker", how)
    result = torchrun(3, "--monitor-interval", "5", *worker, timeout=60)
    assert result.returncode != 0
    return [errors.splitlines() for errors in result.errors], result.summary


def test_a_failing_module_is_named_with_its_action() -> None:
    """By one traceback of its own, a line on every other rank, and torchrun's root cause."""
    (first, failing, last), box = failed("raise")
    root = "rank 1 #4 1F1: ValueError: no more of this"
    assert failing[-1].endswith(f"schedir.errors.ExecutionError: {root}")
    assert sum("Traceback" in line for line in failing) == 1
    assert any('raise ValueError("no more of this")' in line for line in failing)
    for innocent in (first, last):
        assert len(innocent) == 1, innocent
        assert innocent[0].startswith("ExecutionError: rank ")
        assert innocent[0].endswith(f"the first to fail was {root}")
    cause = box[box.index("Root Cause") :]
    assert root in cause
    assert 'raise ValueError("no more of this")' in cause


def test_a_rank_that_dies_is_named_by_its_neighbours() -> None:
    (first, _, last), box = failed("die")
    assert "Signal 9 (SIGKILL)" in box
    for neighbour, waits in ((first, "0RECV_GRAD"), (last, "2RECV_ACT")):
        assert len(neighbour) == 1, neighbour
        (line,) = neighbour
        assert "call 0, step: waited for " in line
        assert waits in line
        assert "from rank 1, but the connection has ended" in line


def test_calls_that_differ_are_a_line_on_every_rank() -> None:
    ranks, _ = failed("call")
    for said in ranks:
        assert len(said) == 1, said
        assert said[0].startswith("ExecutionError: ")
        assert "rank 1: its call 0 is evaluate (" in said[0]
        assert "but call 0 of rank 0 is step;" in said[0]


def test_executors_follow_each_other() -> None:
    """Each makes a process group anew; gloo finds stale addresses where the keys are the same."""
    result = torchrun(2, "-m", "tests.runtime.again_worker", timeout=60)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.outputs == ["rank 0 is done\n", "rank 1 is done\n"]


def test_a_wrong_schedule_is_refused_before_any_process_group() -> None:
    wrong = schedir.loads(
        "schedir 1\nname x\nmicrobatches 1\nplacement 0 1\nrank 0: 0B0 0F0\nrank 1: 1F0 1B0\n"
    )
    with pytest.raises(schedir.ScheduleError, match="S201") as found:
        Executor(wrong, {0: nn.Linear(1, 1)}, nn.functional.mse_loss)
    assert [d.code for d in found.value.diagnostics] == ["S201"]
    assert not dist.is_initialized()


def test_outside_torchrun_the_mend_is_named() -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    with pytest.raises(schedir.ExecutionError, match="torchrun --nproc-per-node 2"):
        Executor(schedule, {0: nn.Linear(1, 1)}, nn.functional.mse_loss)


def test_one_rank_needs_no_process_group() -> None:
    schedule = schedir.build("1f1b", ranks=1, microbatches=2)
    model = nn.Linear(3, 1)
    with Executor(schedule, {0: model}, nn.functional.mse_loss, torch.optim.SGD) as executor:
        x, y = torch.randn(4, 3), torch.randn(4, 1)
        first = executor.step(x, target=y)
        assert executor.step(x, target=y).loss < first.loss
        assert 0 < first.busy <= first.elapsed
    assert not dist.is_initialized()
