"""Run by torchrun on 2, 3 or 4 ranks: what ranks may do differently, and what they are told.

As tests/runtime/scenarios.py, one function per promise. A failure ends an executor and its
connections, but not the process group, so one launch goes on with the next.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import permutations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import schedir
from schedir.runtime import Executor
from tests.runtime.registry import Scenarios
from tests.runtime.scenarios import MSE, adamw, linear_stages, main, raises

SCENARIOS = Scenarios()
LONG = 60.0  # seconds, of which none should be waited


def batch(rows: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, rows, 4, generator=torch.Generator().manual_seed(seed))
    return x, y


def told(call: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """What an ExecutionError says; empty where there is none."""
    try:
        call(*arguments, **options)
    except schedir.ExecutionError as error:
        return str(error)
    return ""


def everyone(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def made(rank: int, ranks: int = 2, name: str = "1f1b", **options: Any) -> Executor:
    schedule = schedir.build(name, ranks=ranks, microbatches=4)
    stages = {rank: linear_stages(ranks)[rank]}
    return Executor(schedule, stages, MSE, adamw, **{"timeout": LONG, **options})


CALLS: dict[str, Callable[[Executor, int], object]] = {
    "step": lambda e, rows: e.step(batch(rows)[0], target=batch(rows)[1]),
    "step(update=False)": lambda e, rows: e.step(
        batch(rows)[0], target=batch(rows)[1], update=False
    ),
    # A rank that only sends is told when it asks for what others have come to.
    "evaluate": lambda e, rows: e.evaluate(batch(rows)[0], target=batch(rows)[1]).loss,
    "infer": lambda e, rows: e.infer(batch(rows)[0]),
    "close": lambda e, rows: e.close(),
}


def call_differently(
    names: Sequence[str], executor: Executor, rank: int, warm: bool, rows: int
) -> list[str]:
    """Each rank makes its own of these calls; what is wrong with what they are told."""
    if warm:  # receives of the next call are posted by the shapes of this one
        CALLS["step"](executor, 8)
        CALLS["evaluate"](executor, 8)
    started = time.monotonic()
    # Calls of an executor's peers end with it; nobody waits for the whole timeout.
    said = told(CALLS[names[rank]], executor, rows if rank else 8)
    everyone("the other has failed")
    if names[rank] == "infer" and not said:
        said = told(CALLS["infer"], executor, 8)
    seconds = time.monotonic() - started
    texts = everyone(said)
    case = f"{names}, {'warm' if warm else 'cold'}, {rows} rows"
    faults = [] if seconds < LONG / 2 else [f"{case}: took {seconds:.1f} s"]
    for other, (name, text) in enumerate(zip(names, texts, strict=True)):
        if not text and name != "close":
            faults.append(f"{case}: rank {other} is told nothing")
    number = 2 * warm
    if not any(f"call {number}" in text or f"after {number} calls" in text for text in texts):
        faults.append(f"{case}: no call is named: {texts}")
    for name in set(names) - {"close"}:
        if not any(name in text for text in texts):
            faults.append(f"{case}: {name} is not named: {texts}")
    if "close" in names and not any("close" in text for text in texts):
        faults.append(f"{case}: close is not named: {texts}")
    again = "is closed" if names[rank] == "close" else "is broken"
    if again not in told(CALLS["step"], executor, 8):
        faults.append(f"{case}: it goes on")
    return faults


@SCENARIOS.on(2)
def every_pair_of_differing_calls_is_named(rank: int) -> list[str]:
    faults = []
    for names in permutations(CALLS, 2):
        for warm, rows in ((False, 8), (True, 8), (True, 64)):
            faults += call_differently(names, made(rank), rank, warm, rows)
    return faults


@SCENARIOS.on(3)
def one_rank_of_three_calls_something_else(rank: int) -> list[str]:
    faults = []
    for name, odd in permutations(("step", "step(update=False)", "evaluate"), 2):
        for at in range(3):
            names = [odd if other == at else name for other in range(3)]
            faults += call_differently(names, made(rank, 3), rank, True, 8)
    return faults


@SCENARIOS.on(4)
def pipelines_that_call_different_things(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    place = mesh.get_local_rank("pp")
    faults = []
    for name, odd in permutations(("step", "step(update=False)", "evaluate"), 2):
        names = [name, name, odd, odd]
        faults += call_differently(names, made(place, mesh=mesh), rank, True, 8)
    return faults


@SCENARIOS.on(2)
def another_autocast_is_named(rank: int) -> list[str]:
    executor = made(rank)
    with torch.autocast("cpu", torch.bfloat16, enabled=rank == 0):
        texts = everyone(told(CALLS["step"], executor, 8))
    wanted = "call 0 is step (", "is step under autocast to torch.bfloat16"
    return [] if all(part in texts[1] for part in wanted) else texts


@SCENARIOS.on(2)
def ranks_that_hold_different_batches_are_told(rank: int) -> list[str]:
    """What one draws for itself is not what the other has; what nobody else reads may be."""
    faults = []
    x, y = batch()
    own = batch(seed=rank)
    listed = [list(t.chunk(4)) for t in own]
    different: dict[str, tuple[Any, Any]] = {
        "inputs": (own[0], y),
        "target": (x, own[1]),
        "nested": ({"a": (own[0],)}["a"], y),
        "ready": (listed[0], listed[1]),
        "a column": (torch.cat([x[:, :3], own[0][:, 3:]], 1), y),
        "large": (torch.cat([x, torch.randn(8, 4000, generator=seeded(rank))], 1)[:, -4:], y),
        "in half": (own[0].bfloat16(), y.bfloat16()),
    }
    for case, (inputs, target) in different.items():
        executor = made(rank)
        if case == "in half":
            executor.close()
            schedule = schedir.build("1f1b", ranks=2, microbatches=4)
            stages = {rank: linear_stages()[rank].bfloat16()}
            executor = Executor(schedule, stages, MSE, adamw)
        texts = everyone(told(executor.step, inputs, target=target))
        what = "target" if case == "target" else "inputs"
        if "rank 1: call 0, step (" not in texts[1] or f"`{what}` is another batch" not in texts[1]:
            faults.append(f"{case}: {texts}")
        if "the first to fail was rank 1" not in texts[0]:
            faults.append(f"{case}: {texts}")
    harmless: dict[str, tuple[Any, Any]] = {
        "each its own": (x if rank == 0 else None, y if rank == 1 else None),
        "an iterator": (iter(x.chunk(4)), iter(y.chunk(4))),
        "whole and ready": (x if rank else list(x.chunk(4)), y if rank else list(y.chunk(4))),
        "both alike": (x.clone(), y.clone()),
    }
    executor = made(rank)
    for case, (inputs, target) in harmless.items():
        text = told(executor.step, inputs, target=target)
        faults += [f"{case}: {text}"] if text else []
    executor.close()
    return faults


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@SCENARIOS.on(2)
def rows_that_differ_are_found_before_the_step(rank: int) -> list[str]:
    x, y = batch()
    executor = made(rank)
    inputs, target = (x, None) if rank == 0 else (None, y[:6])
    texts = everyone(told(executor.step, inputs, target=target))
    return [] if "the batch has 6 rows here, but 8 on rank 0" in texts[1] else texts


@SCENARIOS.on(3)
def ranks_between_may_hold_anything(rank: int) -> list[str]:
    """What only the first and the last rank read is theirs alone to have alike."""
    x, y = batch(seed=7 if rank == 1 else 0)
    with made(rank, 3) as executor:
        executor.step(x, target=y)
    return []


@SCENARIOS.on(2)
def a_rank_that_does_not_come_is_waited_for_as_long_as_said(rank: int) -> list[str]:
    faults = []
    limits: tuple[Any, ...] = (1.0, timedelta(seconds=1))
    for limit in limits:
        executor = made(rank, timeout=limit)
        CALLS["step"](executor, 8)
        started = time.monotonic()
        said = told(CALLS["step"], executor, 8) if rank == 0 else ""
        seconds = time.monotonic() - started
        (first, _) = everyone((said, seconds))
        if "call 1, step: waited 1 s in vain for 0RECV_GRAD0 from rank 1" not in first[0]:
            faults.append(first[0])
        if not 0.9 < first[1] < 15:
            faults.append(f"rank 0 waited for {first[1]:.1f} s")
        if rank and not told(CALLS["step"], executor, 8):
            faults.append("rank 1 goes on alone")
    return faults


@SCENARIOS.on(2)
def the_timeout_of_the_process_group_is_used(rank: int) -> list[str]:
    """Which a rank that never makes its executor shows as well."""
    default = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    before = default.options._timeout
    default.options._timeout = timedelta(seconds=2)
    try:
        said = told(made, rank, timeout=None) if rank == 0 else ""
    finally:
        default.options._timeout = before
    texts = everyone(said)
    late = told(made, rank, timeout=1.0) if rank else "-"
    texts = [*texts, *everyone(late)]
    wanted = "waited 2 s in vain for all ranks to make their executors"
    return [] if wanted in texts[0] and all(texts[2:]) else texts


OTHERS: dict[str, dict[str, Any]] = {
    "clip_grad_norm": {"clip_grad_norm": 1.0},
    "seed": {"seed": 1},
    "step": {"step": 3},
    "optimizer": {"optimizer": None},
    "ties": {"ties": [[(0, "0.bias"), (1, "0.bias")]]},
}


@SCENARIOS.on(2)
def every_argument_that_differs_is_named(rank: int) -> list[str]:
    schedule = schedir.build("1f1b", ranks=2, microbatches=4)
    faults = []
    for name, other in OTHERS.items():
        for odd in range(2):
            options = {"optimizer": adamw, **(other if rank == odd else {})}
            stages = {rank: linear_stages()[rank]}
            text = told(Executor, schedule, stages, MSE, **options)
            if f"different arguments: {name} is" not in text or "but" not in text:
                faults.append(f"{name} on rank {odd}: {text}")
    return faults


@SCENARIOS.on(2)
def schedules_that_differ_are_told_apart(rank: int) -> list[str]:
    def one(**shape: Any) -> schedir.Schedule:
        return schedir.build("1f1b", **{"ranks": 2, "microbatches": 4, **shape})

    text = schedir.dumps(one())
    moved = schedir.loads(text.replace("0SEND_ACT1 0RECV_GRAD0", "0RECV_GRAD0 0SEND_ACT1"))
    shorter = one(microbatches=3)
    renamed = schedir.loads(text.replace("name 1f1b", "name mine"))
    fill = schedir.loads(
        schedir.dumps(schedir.build("fill-drain", ranks=2, microbatches=4)).replace(
            "name fill-drain", "name 1f1b"
        )
    )
    faults = []
    for other, wanted in (
        (moved, "rank 0 #3 is 0SEND_ACT1 on process 0, but 0RECV_GRAD0 on process 1"),
        (shorter, "microbatches 4 on process 0, 3 on process 1"),
        (renamed, "name 1f1b on process 0, mine on process 1"),
        (fill, "rank 0 #4 is 0RECV_GRAD0 on process 0, but 0F2 on process 1"),
    ):
        if other == one():
            faults.append("nothing was changed")
        schedule = other if rank else one()
        stages = {rank: linear_stages()[rank]}
        text = told(Executor, schedule, stages, MSE, adamw)
        if "different schedules: " not in text or wanted not in text:
            faults.append(f"{wanted!r}: {text}")
    return faults


def drifting(rank: int, part: Callable[[Executor, nn.Module], None], **options: Any) -> list[str]:
    """Two pipelines of one rank, of which one parts from the other after some steps."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    schedule = schedir.build("1f1b", ranks=1, microbatches=2)
    module = linear_stages()[0]
    executor = Executor(schedule, {0: module}, MSE, sgd, mesh=mesh, timeout=LONG, **options)
    x, y = batch()

    def train() -> None:
        for step in range(40):
            if step == 5 and rank == 1:
                part(executor, module)
            executor.step(x, target=y)

    return everyone(told(train))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


@SCENARIOS.on(2)
def copies_that_part_after_the_start_are_found(rank: int) -> list[str]:
    @torch.no_grad()
    def load(_: Executor, module: nn.Module) -> None:
        module[0].weight.add_(1e-3)  # type: ignore[index]

    def other_rate(executor: Executor, _: nn.Module) -> None:
        executor.optimizers[0].param_groups[0]["lr"] = 0.02

    faults = []
    for part in (load, other_rate):
        texts = drifting(rank, part)
        if not any("stage 0 differs between processes" in text for text in texts):
            faults += [f"{part.__name__}: {text}" for text in texts]
    return faults


@SCENARIOS.on(2)
def what_is_thawed_on_one_replica_is_named(rank: int) -> list[str]:
    def thaw(_: Executor, module: nn.Module) -> None:
        module[0].bias.requires_grad_(False)  # type: ignore[index]

    texts = drifting(rank, thaw)
    return [] if "0.bias of stage 0 was frozen since" in texts[1] else texts


@SCENARIOS.on(2)
def copies_that_stay_equal_train_on(rank: int) -> list[str]:
    texts = drifting(rank, lambda executor, module: None)
    return [text for text in texts if text]


@SCENARIOS.on(2)
def tied_copies_that_part_are_found(rank: int) -> list[str]:
    schedule = schedir.build("1f1b", ranks=2, microbatches=4)
    first = linear_stages()[0]
    module = copy.deepcopy(first)
    ties = [[(0, "0.weight"), (1, "0.weight")]]
    x, y = batch()

    def train() -> None:
        with Executor(schedule, {rank: module}, MSE, sgd, ties=ties, timeout=LONG) as executor:
            executor.optimizers[rank].param_groups[0]["lr"] = 0.01 * (1 + rank)
            for _ in range(3):
                executor.step(x, target=y)

    texts = everyone(told(train))
    found = any("tied as 0:0.weight and 1:0.weight differs between" in text for text in texts)
    return [] if found else texts


@SCENARIOS.on(2)
def what_is_frozen_on_one_replica_is_named_at_the_start(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    schedule = schedir.build("1f1b", ranks=1, microbatches=2)
    module = linear_stages()[0]
    module[0].bias.requires_grad_(rank == 0)  # type: ignore[index]
    return raises(
        schedir.ExecutionError,
        "what is frozen of stage 0 differs between processes 0 and 1",
        lambda: Executor(schedule, {0: module}, MSE, sgd, mesh=mesh),
    )


if __name__ == "__main__":
    main(SCENARIOS)
