"""Ranks that call an executor differently, or not at all: each is told what, soon.

A failure ends an executor and its connections, but not the process group.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import permutations
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import schedir
from schedir.runtime import Executor
from schedir.training import Checkpoint
from tests.runtime.kit import MSE, adamw, everyone, linear_stages, message_of, random_batch
from tests.runtime.on_ranks import name_of, on_ranks
from tests.sweeps import sweep

LONG = 60.0  # seconds, of which none should be waited


def executor_on(rank: int, ranks: int = 2, name: str = "1f1b", **options: Any) -> Executor:
    schedule = schedir.build(name, ranks=ranks, microbatches=4)
    stages = {rank: linear_stages(ranks)[rank]}
    return Executor(schedule, stages, MSE, adamw, **{"timeout": LONG, **options})


def step(executor: Executor, rows: int, update: bool = True) -> object:
    x, y = random_batch(rows)
    return executor.step(x, target=y, update=update)


def evaluate(executor: Executor, rows: int) -> object:
    """A rank that only sends is told when it asks for what others have come to."""
    x, y = random_batch(rows)
    return executor.evaluate(x, target=y).loss


def save(executor: Executor, rows: int) -> None:
    with TemporaryDirectory() as folder:
        Checkpoint(executor).save(folder)


CALLS: dict[str, Callable[[Executor, int], object]] = {
    "step": step,
    "step(update=False)": partial(step, update=False),
    "evaluate": evaluate,
    "infer": lambda executor, rows: executor.infer(random_batch(rows)[0]),
    "run": lambda executor, rows: [
        result.loss for result in executor.run([random_batch(rows)] * 2, segment=8)
    ],
    "gather": Executor.gather,
    "collect": Executor.collect,
    "timelines": lambda executor, rows: executor.timelines(),
    "save": save,
    "close": lambda executor, rows: executor.close(),
}
ENDS = "ends"  # without a close
LEAVES = "close", ENDS


def names_both(text: str, own: str, other: str, number: int) -> bool:
    """Whether an error has the calls of two ranks. Within a save there are only gathers."""
    ended = f"has closed its executor, or ended, after {number} calls"
    theirs = ended if other in LEAVES else other
    within = {"save": "is gather", "close": "is close"}
    mine = own in text or within.get(own, own) in text
    return mine and (theirs in text or within.get(other, theirs) in text)


def assert_differing_calls_are_named(
    names: Sequence[str], executor: Executor, rank: int, warm: bool = True, rows: int = 8
) -> None:
    """Each rank makes its own of these calls, and is told of the others'."""
    if warm:  # receives of the next call are posted by the shapes of this one
        step(executor, 8)
        evaluate(executor, 8)
    name = names[rank]
    started = time.monotonic()
    # Calls of an executor's peers end with it; nobody waits for the whole timeout.
    said = ""
    if name == ENDS:
        del executor
        gc.collect()
    else:
        said = message_of(CALLS[name], executor, rows if rank else 8)
    everyone("all others have failed")
    if name in ("infer", "collect") and not said:
        said = message_of(CALLS[name], executor, 8)  # who only sends is told in the next call
    assert time.monotonic() - started < LONG / 4
    texts = everyone(said)
    others, number = {*names}, 2 * warm
    for own, text in zip(names, texts, strict=True):
        if own not in LEAVES:
            assert any(names_both(text, own, other, number) for other in others - {own}), texts
    assert any(f"call {number}" in text or f"after {number} calls" in text for text in texts)
    if name != ENDS:
        again = "is closed" if name == "close" else "is broken"
        assert again in message_of(step, executor, 8)


PAIRS = [*permutations(CALLS, 2)]
PAIRS += [pair for name in CALLS if name != "close" for pair in ((name, ENDS), (ENDS, name))]
QUICK = [pair for pair in PAIRS if "step" in pair] + [("gather", "save"), ("save", "gather")]


@on_ranks(2)
@sweep("warm, rows", [(False, 8), (True, 64)], quick=[(True, 64)])
@sweep("names", PAIRS, quick=QUICK, ids=" and ".join)
def test_differing_calls_are_named(
    rank: int, names: tuple[str, str], warm: bool, rows: int
) -> None:
    executor_here = partial(executor_on, rank, name="pipedream", trace=True)
    assert_differing_calls_are_named(names, executor_here(), rank, warm, rows)


ODD_CALLS = list(permutations(("step", "step(update=False)", "evaluate"), 2))
OTHERS = [pair for pair in PAIRS if "step" in pair and "step(update=False)" not in pair]
ODD_ONES = [(3, odd, names) for odd in range(3) for names in ODD_CALLS]
ODD_ONES += [(4, odd, names) for odd in (0, 2) for names in OTHERS]
QUICK_ONES = [(3, 1, ODD_CALLS[1]), (3, 1, ODD_CALLS[2])]
QUICK_ONES += [(4, 2, ("step", "collect")), (4, 2, ("gather", "step"))]


@on_ranks()
@sweep("ranks, odd_rank, names", ODD_ONES, quick=QUICK_ONES, ids=name_of)
def test_one_rank_calls_something_else(
    rank: int, ranks: int, odd_rank: int, names: tuple[str, str]
) -> None:
    name, odd = names
    called = [odd if other == odd_rank else name for other in range(ranks)]
    options: dict[str, Any] = {"name": "pipedream", "trace": True} if ranks == 4 else {}
    assert_differing_calls_are_named(called, executor_on(rank, ranks, **options), rank)


@on_ranks(4)
@sweep("names", ODD_CALLS, quick=ODD_CALLS[1:2], ids=" and ".join)
def test_one_pipeline_of_two_calls_something_else(rank: int, names: tuple[str, str]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    name, odd = names
    executor = executor_on(mesh.get_local_rank("pp"), mesh=mesh)
    assert_differing_calls_are_named([name, name, odd, odd], executor, rank)


@on_ranks(2)
def test_no_rank_closes_while_another_still_connects(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 gives rank 0 time to run ahead, after each of its groups."""
    store = dist.distributed_c10d._get_default_store()
    make, ahead = dist.ProcessGroupGloo, []

    def slow(*place: Any) -> dist.ProcessGroupGloo:
        group = make(*place)
        with suppress(RuntimeError):
            store.wait(["closing"], timedelta(seconds=0.5))
        ahead.append(store.check(["closing"]))
        return group

    if rank == 1:
        monkeypatch.setattr(dist, "ProcessGroupGloo", slow)
    executor = executor_on(rank)
    if rank == 0:
        store.set("closing", "")
    executor.close()
    assert ahead == [False] * 3 * rank  # for control, and for transfers up and down


@on_ranks(2)
def test_another_autocast_is_named(rank: int) -> None:
    executor = executor_on(rank)
    with torch.autocast("cpu", torch.bfloat16, enabled=rank == 0):
        said = everyone(message_of(step, executor, 8))
    assert "call 0 of rank 1 is step (" in said[1]
    assert "is step under autocast to torch.bfloat16" in said[1]


@on_ranks(2)
@sweep("limit", [4.0, timedelta(seconds=4)], quick=(), ids=str)
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
@sweep("hosts", [1, 2], quick=[2])
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
    assert "in vain for all ranks to make their executors; missing: process 1; make" in first
    assert ("GLOO_SOCKET_IFNAME" in first) == (hosts == 2)
    assert all(everyone(message_of(executor_on, rank, timeout=1.0) if rank else "-"))
