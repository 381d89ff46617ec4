"""Checkpoints of stages that are sharded or split: any layout of processes loads any other's."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedir.runtime import Executor
from schedir.training import Checkpoint, gathered_state
from tests.runtime.kit import adamw, everyone, message_of, random_batch
from tests.runtime.layouts import LAYOUTS, batch_of, blocks, executor_of
from tests.runtime.on_ranks import on_ranks
from tests.sweeps import sweep
from tests.training.test_checkpoint import step_plainly

SAVED = [layout for layout in LAYOUTS if layout not in ("pp 2 x sp 2", "dp 2 x tp 2")]


def train(executor: Executor, layout: str, steps: Iterable[int]) -> None:
    for step in steps:
        x, y = batch_of(executor, layout, step)
        executor.step(x, target=y)


def plain(steps: Iterable[int], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in steps:
        step_plainly(model, optimizer, random_batch(8, seed=step))


def assert_near(mine: dict[str, Tensor] | None, theirs: nn.Module) -> None:
    if mine is not None:
        for name, value in theirs.state_dict().items():
            assert torch.allclose(mine[name], value, rtol=1e-6, atol=1e-6), name


@on_ranks(4)
@sweep("saved", SAVED, quick=["fsdp 2 x tp 2"])
@sweep("later", [False, True], quick=[True])
def test_a_layout_resumes_what_another_has_saved(
    rank: int, saved: str, later: bool, folder: Path
) -> None:
    reference = nn.Sequential(*blocks())
    optimizer = adamw(reference.parameters())
    plain(range(2), reference, optimizer)
    with executor_of(saved, blocks()) as executor:
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
    whole = nn.Sequential(*blocks(seed=1))
    whole_optimizer = adamw(whole.parameters())
    Checkpoint(whole, whole_optimizer).load(folder)
    assert_near(dict(whole.state_dict()), reference)
    plain(range(2, 4), whole, whole_optimizer)
    plain(range(2, 4), reference, optimizer)
    assert_near(dict(whole.state_dict()), reference)
    for layout in SAVED:
        with executor_of(layout, blocks(seed=1)) as resumed:
            Checkpoint(resumed).load(folder)
            assert resumed.steps == 2
            train(resumed, layout, range(2, 4))
            found = gathered_state(resumed)
        assert_near(found, reference)
        if layout == saved and found is not None and first is not None:
            assert all(torch.equal(found[name], first[name]) for name in first)
    dist.barrier()


@on_ranks(4)
def test_what_can_not_be_put_together_is_refused(rank: int, folder: Path) -> None:
    with executor_of("pp 2 x tp 2", blocks()) as executor:
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
