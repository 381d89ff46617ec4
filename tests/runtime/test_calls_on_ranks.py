"""Ranks that call an executor differently, or not at all: each is told what, soon.

A failure ends an executor and its connections, but not the process group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import schedir
from schedir.runtime import Executor
from tests.runtime.kit import MSE, adamw, everyone, linear_stages, message_of, random_batch
from tests.runtime.on_ranks import on_ranks
from tests.sweeps import sweep

LONG = 60.0  # seconds, of which none should be waited


def executor_on(rank: int, ranks: int = 2, **options: Any) -> Executor:
    schedule = schedir.build("1f1b", ranks=ranks, microbatches=4)
    stages = {rank: linear_stages(ranks)[rank]}
    return Executor(schedule, stages, MSE, adamw, **{"timeout": LONG, **options})


def step(executor: Executor, rows: int, update: bool = True) -> object:
    x, y = random_batch(rows)
    return executor.step(x, target=y, update=update)


def evaluate(executor: Executor, rows: int) -> object:
    """A rank that only sends is told when it asks for what others have come to."""
    x, y = random_batch(rows)
    return executor.evaluate(x, target=y).loss


CALLS: dict[str, Callable[[Executor, int], object]] = {
    "step": step,
    "step(update=False)": lambda executor, rows: step(executor, rows, update=False),
    "evaluate": evaluate,
    "infer": lambda executor, rows: executor.infer(random_batch(rows)[0]),
    "close": lambda executor, rows: executor.close(),
}


def assert_differing_calls_are_named(
    names: Sequence[str], executor: Executor, rank: int, warm: bool = True, rows: int = 8
) -> None:
    """Each rank makes its own of these calls, and is told of the others'."""
    if warm:  # receives of the next call are posted by the shapes of this one
        step(executor, 8)
        evaluate(executor, 8)
    started = time.monotonic()
    # Calls of an executor's peers end with it; nobody waits for the whole timeout.
    said = message_of(CALLS[names[rank]], executor, rows if rank else 8)
    everyone("all others have failed")
    if names[rank] == "infer" and not said:
        said = message_of(CALLS["infer"], executor, 8)
    assert time.monotonic() - started < LONG / 2
    texts = everyone(said)
    for name, text in zip(names, texts, strict=True):
        assert text or name == "close"
    number = 2 * warm
    assert any(f"call {number}" in text or f"after {number} calls" in text for text in texts)
    for name in set(names):
        assert any(name in text for text in texts), (name, texts)
    again = "is closed" if names[rank] == "close" else "is broken"
    assert again in message_of(step, executor, 8)


@on_ranks(2)
@sweep("warm, rows", [(False, 8), (True, 8), (True, 64)], quick=[(True, 64)])
@pytest.mark.parametrize("names", list(permutations(CALLS, 2)), ids=" and ".join)
def test_differing_calls_are_named(
    rank: int, names: tuple[str, str], warm: bool, rows: int
) -> None:
    assert_differing_calls_are_named(names, executor_on(rank), rank, warm, rows)


ODD_CALLS = list(permutations(("step", "step(update=False)", "evaluate"), 2))


@on_ranks(3)
@sweep("odd_rank", [0, 1, 2], quick=[1])
@sweep("names", ODD_CALLS, quick=ODD_CALLS[1:3], ids=" and ".join)
def test_one_rank_of_three_calls_something_else(
    rank: int, names: tuple[str, str], odd_rank: int
) -> None:
    name, odd = names
    called = [odd if other == odd_rank else name for other in range(3)]
    assert_differing_calls_are_named(called, executor_on(rank, 3), rank)


@on_ranks(4)
@sweep("names", ODD_CALLS, quick=ODD_CALLS[1:2], ids=" and ".join)
def test_one_pipeline_of_two_calls_something_else(rank: int, names: tuple[str, str]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    name, odd = names
    executor = executor_on(mesh.get_local_rank("pp"), mesh=mesh)
    assert_differing_calls_are_named([name, name, odd, odd], executor, rank)


@on_ranks(2)
def test_another_autocast_is_named(rank: int) -> None:
    executor = executor_on(rank)
    with torch.autocast("cpu", torch.bfloat16, enabled=rank == 0):
        said = everyone(message_of(step, executor, 8))
    assert "call 0 is step (" in said[1]
    assert "is step under autocast to torch.bfloat16" in said[1]


@on_ranks(2)
@sweep("limit", [4.0, timedelta(seconds=4)], quick=[4.0], ids=str)
def test_a_rank_that_makes_no_call_is_waited_for_as_long_as_said(
    rank: int, limit: float | timedelta, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # as on two hosts, which have met
    executor = executor_on(rank, timeout=limit)
    step(executor, 8)
    started = time.monotonic()
    said = message_of(step, executor, 8) if rank == 0 else ""
    seconds = time.monotonic() - started
    first, waited = everyone((said, seconds))[0]
    assert "call 1, step: waited 4 s in vain for 0RECV_GRAD0 from rank 1" in first
    assert "GLOO_SOCKET_IFNAME" not in first
    assert 3.9 < waited < LONG
    assert rank == 0 or message_of(step, executor, 8)


@on_ranks(2)
@pytest.mark.parametrize("hosts", [1, 2])
def test_the_timeout_is_that_of_the_process_group_by_default(
    rank: int, hosts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which a rank that never makes its executor shows as well. On several hosts gloo may have
    taken the wrong interface."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(2 // hosts))
    default = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    before = default.options._timeout
    default.options._timeout = timedelta(seconds=2)
    try:
        said = message_of(executor_on, rank, timeout=None) if rank == 0 else ""
    finally:
        default.options._timeout = before
    first = everyone(said)[0]
    assert "waited 2 s in vain for all ranks to make their executors" in first
    assert ("GLOO_SOCKET_IFNAME" in first) == (hosts == 2)
    assert all(everyone(message_of(executor_on, rank, timeout=1.0) if rank else "-"))
