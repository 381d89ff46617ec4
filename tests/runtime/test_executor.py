"""How an executor fails and what it refuses, and that one rank needs no process group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import schedir
from schedir.runtime import Executor
from tests.literals import listed
from tests.runtime.kit import MSE, refused
from tests.runtime.launch import torchrun
from tests.sweeps import long


def failed(how: str) -> tuple[list[list[str]], str]:
    """What each of 3 ranks has printed when rank 1 failed so, by line; and what torchrun has."""
    result = torchrun(3, "-m", "tests.runtime.failing_worker", how)
    assert result.returncode != 0
    return [errors.splitlines() for errors in result.errors], result.summary


def test_a_failing_module_is_named_with_its_action() -> None:
    """By a line of each rank, one traceback of its own, and torchrun's root cause."""
    (first, failing, last), box = failed("raise")
    root = "rank 1 #4 1F1: ValueError: no more of this"
    assert failing[0] == "schedir: root: rank 1 step 0 #4 1F1: ValueError: no more of this"
    assert failing[-2].endswith(f"schedir.errors.ExecutionError: {root}")
    assert failing[-1].endswith("and what else there is to say")
    assert sum("Traceback" in line for line in failing) == 1
    assert failing[1].endswith("Traceback (most recent call last):")
    assert any('raise ValueError("no more of this' in line for line in failing)
    assert first == ["schedir: rank 0 ended: root is rank 1"]
    assert last == ["schedir: rank 2 ended: root is rank 1"]
    cause = box[box.index("Root Cause") :]
    assert root in cause
    assert 'raise ValueError("no more of this' in cause


def test_a_rank_that_dies_is_the_root() -> None:
    (first, _, last), box = failed("die")
    assert "Signal 9 (SIGKILL)" in box
    told, other = sorted((first, last), key=len, reverse=True)
    assert told[0] == "schedir: root: rank 1 step 0 #4 1F1: killed by SIGKILL"
    assert told[1].startswith("schedir: chain: ")
    assert len(told) == 5
    assert len(other) == 1
    assert other[0].endswith(" ended: root is rank 1")


@long
def test_a_rank_that_calls_too_rarely_is_named_first() -> None:
    """In a line of the others, and in torchrun's root cause, where gloo's words say less."""
    (first, rare, last), box = failed("leave")
    assert rare == []
    assert "call 0, step: process 1 has closed its executor, or ended, after 0 calls" in box
    assert sorted((first, last), key=lambda lines: lines[0])[1] == [
        "schedir: root: rank 1 –: has closed its executor, or ended, after 0 calls; all ranks must "
        "make the same"
    ]
    assert "gloo" not in "".join([*first, *last, box])


@long
def test_calls_that_differ_are_two_roots_of_a_line_each() -> None:
    ranks, box = failed("call")
    one_line, other, told = sorted(ranks, key=len)
    assert [line.rpartition(": ")[2] for line in (*one_line, *other)] == [
        "roots are ranks 0, 1"
    ] * 2
    assert [line.split()[:4] for line in told] == [["schedir:", "root:", "rank", n] for n in "01"]
    for said in (*told, box):
        assert "call 0 of rank 1 is evaluate (" in said
        assert "but call 0 of rank 0 is step;" in said


def test_a_wrong_schedule_is_refused_before_any_process_group() -> None:
    wrong = listed(1, "0 1", "0B0 0F0", "1F0 1B0")
    with pytest.raises(schedir.ScheduleError, match="S201") as found:
        Executor(wrong, {0: nn.Linear(1, 1)}, MSE)
    assert [d.code for d in found.value.diagnostics] == ["S201"]
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("ranks", "world", "said"),
    [
        (2, None, "torchrun --nproc-per-node 2"),
        (2, 1, "torchrun --nproc-per-node 2"),
        (2, 3, "torchrun --nproc-per-node 2"),
        # One rank is not trained once in each process.
        (1, 2, r"1 ranks, but 2 processes run; .*pass mesh="),
    ],
)
def test_for_other_numbers_of_processes_the_fix_is_named(
    ranks: int, world: int | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if world is not None:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", str(world))
    schedule = schedir.build("1f1b", ranks=ranks, microbatches=2)
    stages = {s: nn.Linear(1, 1) for s in range(ranks)}
    with refused(said):
        Executor(schedule, {0: stages[0]}, MSE)
    Executor(schedule, stages, MSE, in_process=True).close()


def test_one_rank_needs_no_process_group() -> None:
    schedule = schedir.build("1f1b", ranks=1, microbatches=2)
    model = nn.Linear(3, 1)
    with Executor(schedule, {0: model}, MSE, torch.optim.SGD) as executor:
        x, y = torch.randn(4, 3), torch.randn(4, 1)
        first = executor.step(x, target=y)
        assert executor.step(x, target=y).loss < first.loss
        assert 0 < first.busy <= first.elapsed
    assert not dist.is_initialized()
