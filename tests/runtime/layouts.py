"""Layouts of four processes, each of which trains the same model on the same batches, beside one
process; on any device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from attrs import frozen
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import schedir
from schedir.runtime import Executor
from schedir.training import gathered_state, partition
from tests.runtime.kit import MSE, adamw, random_batch

WIDTH = 4
LONG = 60.0
LAYOUTS = {
    "pp 2 x dp 2": ("pp", "dp"),
    "pp 2 x fsdp 2": ("pp", "fsdp"),
    "pp 2 x tp 2": ("pp", "tp"),
    "pp 2 x sp 2": ("pp", "sp"),
    "dp 2 x tp 2": ("dp", "tp"),
    "fsdp 2 x tp 2": ("fsdp", "tp"),
}


class Block(nn.Module):
    """Two linear layers behind a norm, on a residual path."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return y


def blocks(number: int = 2, seed: int = 5) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [Block() for _ in range(number)]


def split_up(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Split for tensor parallelism: what is not split is a plain tensor in each process."""
    return parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def split_by_rows(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The norm takes a part of the rows in each process, which so makes a part of its gradient."""
    plan = {
        "norm": SequenceParallel(sequence_dim=0, use_local_output=False),
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(),
    }
    found = parallelize_module(block, mesh, plan)

    def by_rows(_: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
        whole = DTensor.from_local(given[0], mesh, [Replicate()], run_check=False)
        return (whole.redistribute(placements=[Shard(0)]),)

    found.get_submodule("norm").register_forward_pre_hook(by_rows, prepend=True)
    return found


SPLIT = {"tp": split_up, "sp": split_by_rows}


def executor_of(
    layout: str, layers: list[nn.Module], schedule: schedir.Schedule | None = None, **options: Any
) -> Executor:
    """An executor on this process; the list is sharded if the layout is."""
    dims = LAYOUTS[layout]
    (device,) = {p.device.type for layer in layers for p in layer.parameters()}
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=dims)
    schedule = schedule or schedir.build("1f1b", ranks=2 if "pp" in dims else 1, microbatches=4)
    for dim, split in SPLIT.items():
        if dim in dims:
            layers = [split(layer, mesh[dim]) for layer in layers]
    rank = mesh["pp"].get_local_rank() if "pp" in dims else 0
    stages = partition(layers, schedule, rank=rank)
    if "fsdp" in dims:
        schedule = schedir.shard(schedule)
        for stage in stages.values():
            fully_shard(stage, mesh=mesh["fsdp"])
    options = {"data_dims": ("fsdp",) if "fsdp" in dims else ("dp",), "timeout": LONG, **options}
    return Executor(schedule, stages, MSE, adamw, mesh=mesh, **options)


def batch_of(executor: Executor, layout: str, step: int) -> tuple[Tensor, Tensor]:
    """This process's part of a batch of 8 rows: a half where there are two pipelines."""
    x, y = random_batch(8, seed=step)
    return part_of(executor, layout, x), part_of(executor, layout, y)


def part_of(executor: Executor, layout: str, tensor: Tensor) -> Tensor:
    halves = {"dp", "fsdp"} & {*LAYOUTS[layout]}
    return tensor.chunk(2)[executor.pipeline] if halves else tensor


@frozen
class Pair:
    """An executor on these processes, and one in this process alone, of equal models."""

    layout: str
    device: str
    executor: Executor
    alone: Executor

    def step(self, step: int, **options: Any) -> None:
        x, y = batch_of(self.executor, self.layout, step)
        mine = self.executor.step(x.to(self.device), target=y.to(self.device), **options)
        x, y = random_batch(8, seed=step)
        theirs = self.alone.step(x.to(self.device), target=y.to(self.device), **options)
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-5)

    def assert_equal(self) -> None:
        """Sums over processes round differently, and AdamW divides by their roots."""
        mine, theirs = gathered_state(self.executor), gathered_state(self.alone)
        assert theirs is not None
        for name, value in (mine or {}).items():
            assert torch.allclose(value, theirs[name], rtol=1e-5, atol=1e-5), name


def pair_of(layout: str, feature: str = "plain", device: str = "cpu", **options: Any) -> Pair:
    options |= OPTIONS.get(feature, {})
    name = SCHEDULES.get(feature, "1f1b")
    schedule = schedir.build(name, ranks=2 if "pp" in layout else 1, microbatches=4)
    if feature == "offload":
        schedule = schedir.offload(schedule, stages=range(schedule.stages))

    def layers() -> list[nn.Module]:
        made = blocks()
        if "ties" in options:
            made[1].load_state_dict(made[0].state_dict())
        return [layer.to(device) for layer in made]

    def own() -> dict[str, Any]:
        scaler = GradScaler(torch.device(device).type, init_scale=16.0)
        return {**options, **({"scaler": scaler} if feature == "scaler" else {})}

    alone = partition(layers(), schedule.stages)
    there = Executor(schedule, alone, MSE, adamw, in_process=True, **own())
    here = layers()
    for layer in here if feature == "compiled" else ():
        layer.compile(backend="aot_eager")  # the tracing, without a compiler of C++
    return Pair(layout, device, executor_of(layout, here, schedule, **own()), there)


_TIES = [[(0, f"0.{name}"), (1, f"1.{name}")] for name in ("norm.weight", "up.weight")]
FEATURES = ["plain", "zb-h1", "clipping", "scaler", "recompute", "offload", "compiled", "ties"]
FEATURES += ["replicas"]
SCHEDULES = {"zb-h1": "zb-h1", "replicas": "chimera"}
OPTIONS: dict[str, dict[str, Any]] = {
    "clipping": {"clip_grad_norm": 0.05},
    "recompute": {"recompute": True},
    "ties": {"ties": _TIES},
}


def fitting(layouts: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each feature with each layout: copies and ties need two ranks, and replicas whole stages."""
    for feature in FEATURES:
        for layout in layouts:
            alone = "pp" not in layout and feature in ("ties", "replicas", "zb-h1")
            if not alone and not (feature == "replicas" and "fsdp" in layout):
                yield feature, layout


def compare(feature: str, layout: str, device: str = "cpu", **options: Any) -> None:
    """Train with a feature on a layout and in one process; raises AssertionError where they
    differ."""
    pair = pair_of(layout, feature, device, **options)
    with pair.executor:
        for step in range(3):
            pair.step(step)
        pair.assert_equal()
