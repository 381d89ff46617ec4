"""Checkpoints of stages that are sharded or split: any layout of processes loads any other's."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import schedir
from schedir.runtime import Executor
from schedir.training import Checkpoint, gathered_state, partition
from tests.runtime.kit import MSE, adamw, everyone, message_of, random_batch
from tests.runtime.on_ranks import on_ranks
from tests.runtime.test_meshes_on_ranks import Block, split_up
from tests.sweeps import sweep

LONG = 60.0
LAYOUTS = {
    "pp 2 x dp 2": ("pp", "dp"),
    "pp 2 x fsdp 2": ("pp", "fsdp"),
    "pp 2 x tp 2": ("pp", "tp"),
    "fsdp 2 x tp 2": ("fsdp", "tp"),
}


def blocks(seed: int) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [Block(), Block()]


def executor_of(layout: str, seed: int = 0, **options: Any) -> Executor:
    dims = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=dims)
    rank = mesh["pp"].get_local_rank() if "pp" in dims else 0
    schedule = schedir.build("1f1b", ranks=2 if "pp" in dims else 1, microbatches=4)
    layers = blocks(seed)
    if "tp" in dims:
        layers = [split_up(layer, mesh["tp"]) for layer in layers]
    stages = partition(layers, schedule, rank=rank)
    if "fsdp" in dims:
        schedule = schedir.shard(schedule)
        for stage in stages.values():
            fully_shard(stage, mesh=mesh["fsdp"])
    options |= {"data_dims": ("fsdp",) if "fsdp" in dims else ("dp",), "timeout": LONG}
    return Executor(schedule, stages, MSE, adamw, mesh=mesh, **options)


def train(executor: Executor, layout: str, steps: Iterable[int], **options: Any) -> None:
    """On the same batches whatever the layout: each pipeline has its part."""
    for step in steps:
        x, y = random_batch(8, seed=step)
        if layout != "pp 2 x tp 2":
            x, y = (tensor.chunk(2)[executor.pipeline] for tensor in (x, y))
        executor.step(x, target=y, **options)


def plain(steps: Iterable[int], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in steps:
        x, y = random_batch(8, seed=step)
        MSE(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_near(mine: dict[str, Tensor] | None, theirs: nn.Module) -> None:
    if mine is not None:
        for name, value in theirs.state_dict().items():
            assert torch.allclose(mine[name], value, rtol=1e-6, atol=1e-6), name


@on_ranks(4)
@sweep("saved", [*LAYOUTS], quick=["fsdp 2 x tp 2"])
@pytest.mark.parametrize("later", [False, True])
def test_a_layout_resumes_what_another_has_saved(
    rank: int, saved: str, later: bool, tmp_path: Path
) -> None:
    (folder, *_) = everyone(str(tmp_path))
    reference = nn.Sequential(*blocks(0))
    optimizer = adamw(reference.parameters())
    plain(range(2), reference, optimizer)
    with executor_of(saved) as executor:
        checkpoint = Checkpoint(executor)
        train(executor, saved, range(2))
        if later:
            saving = checkpoint.async_save(folder)
            train(executor, saved, range(2, 4))
            saving.wait()
        else:
            checkpoint.save(folder)
            assert_near(gathered_state(executor), reference)
            train(executor, saved, range(2, 4))
        first = gathered_state(executor)
    whole = nn.Sequential(*blocks(1))
    whole_optimizer = adamw(whole.parameters())
    Checkpoint(whole, whole_optimizer).load(folder)
    assert_near(dict(whole.state_dict()), reference)
    plain(range(2, 4), whole, whole_optimizer)
    plain(range(2, 4), reference, optimizer)
    assert_near(dict(whole.state_dict()), reference)
    for layout in LAYOUTS:
        with executor_of(layout, seed=1) as resumed:
            Checkpoint(resumed).load(folder)
            assert resumed.steps == 2
            train(resumed, layout, range(2, 4))
            found = gathered_state(resumed)
        assert_near(found, reference)
        if layout == saved and found is not None and first is not None:
            assert all(torch.equal(found[name], first[name]) for name in first)
    dist.barrier()


@on_ranks(4)
def test_what_can_not_be_put_together_is_refused(rank: int, tmp_path: Path) -> None:
    (folder, *_) = everyone(str(tmp_path))
    with executor_of("pp 2 x tp 2") as executor:
        (stage,) = executor.stages.values()
        assert "only a part of this model" in message_of(Checkpoint, stage)
        norm = next(p for name, p in stage.named_parameters() if "norm.weight" in name)
        with torch.no_grad():
            norm.add_(executor.slice)
        said = message_of(Checkpoint(executor).save, folder)
        assert "norm.weight of stage" in said
        assert "differs between tp 0 and tp 1: make what is split a DTensor" in said
        assert not Checkpoint.is_at(folder)
        with torch.no_grad():
            norm.sub_(executor.slice)
        train(executor, "pp 2 x tp 2", range(1))
        (optimizer,) = executor.optimizers.values()
        (state,) = (of for parameter, of in optimizer.state.items() if parameter.shape == (8,))
        state["exp_avg"] = state["exp_avg"].full_tensor()
        assert "exp_avg of" in (said := message_of(Checkpoint(executor).save, folder))
        assert "is not split as its parameter is" in said
    everyone("all are refused")
