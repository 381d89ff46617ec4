"""Checkpoints of several processes: resumed bit for bit, by other numbers of them, and by none."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import schedir
from schedir.runtime import Executor
from schedir.training import Batches, Checkpoint, deferred, gathered_state, partition
from schedir.training.checkpoint import saving, storage
from tests.literals import listed
from tests.runtime.kit import MSE, adamw, everyone, message_of, momentum, random_batches
from tests.runtime.on_ranks import on_ranks
from tests.training.test_checkpoint import assert_same, built, executor_of, layers, step_plainly

_REST = "0REDUCE_GRAD 0OPTIM_STEP"
# Each rank has all stages, and no rank all microbatches.
REPLICATED = listed(4, "0,1", f"0F0 0B0 0F2 0B2 {_REST}", f"0F1 0B1 0F3 0B3 {_REST}")


@on_ranks(2)
@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "pipedream"])
def test_a_resumed_run_is_the_uninterrupted_one(name: str, rank: int, folder: Path) -> None:
    """With dropout, with a loader that shuffles, and noise that is drawn between the steps."""
    schedule, make = built(name), adamw if name == "1f1b" else momentum

    def trained(begin: int, end: int, resume: bool) -> tuple[list[float], Any]:
        x, y = torch.randn(2, 24, 4, generator=torch.Generator().manual_seed(1))
        torch.manual_seed(begin)  # what is loaded counts
        random.seed(begin)
        np.random.seed(begin)
        loader = DataLoader(TensorDataset(x, y), 8, shuffle=True)
        batches = Batches(loader, repeat=True)
        losses = []
        with executor_of(schedule, make, layers(dropout=0.5), seed=7) as executor:
            scheduler = lr_scheduler.CosineAnnealingLR(executor.optimizer, 6)
            checkpoint = Checkpoint(executor, scheduler=scheduler, batches=batches)
            if resume:
                checkpoint.load(folder)
            assert executor.steps == begin
            for inputs, target in batches:
                noise = torch.randn(8, 4) * random.random() + float(np.random.rand())
                losses.append(executor.step(inputs + noise, target=target).loss)
                scheduler.step()
                if executor.steps == 4 and not resume:
                    checkpoint.save(folder)
                if executor.steps == end:
                    break
            return losses, gathered_state(executor)

    losses, expected = trained(0, 7, resume=False)
    resumed, found = trained(4, 7, resume=True)
    assert resumed == losses[4:]
    assert_same(found, expected)


@on_ranks(2)
def test_any_number_of_processes_goes_on(rank: int, folder: Path) -> None:
    """From two to one, to one that has all stages, and back from a plain model to two."""
    batches = random_batches(6)
    model = nn.Sequential(*layers())
    optimizer = adamw(model.parameters())

    def train(executor: Executor, *steps: int) -> None:
        for step in steps:
            executor.step(batches[step][0], target=batches[step][1])
            step_plainly(model, optimizer, batches[step])

    with executor_of(built("1f1b")) as executor:
        train(executor, 0, 1)
        Checkpoint(executor).save(folder / "two")
    own = nn.Sequential(*layers())
    checkpoint = Checkpoint(own, adamw(own.parameters()))
    checkpoint.load(folder / "two")  # every rank by itself
    assert checkpoint.step == 2
    assert_same(own.state_dict(), model.state_dict())
    with executor_of(built("interleaved-1f1b", 3, chunks=2), in_process=True) as alone:
        Checkpoint(alone).load(folder / "two")
        train(alone, 2, 3)
        assert_same(gathered_state(alone), model.state_dict())
    if rank == 0:
        saved = Checkpoint(model, optimizer)
        saved.step = 4
        saved.save(folder / "plain")
    everyone(None)
    with executor_of(built("interleaved-1f1b", chunks=3)) as executor:
        Checkpoint(executor).load(folder / "plain")
        assert executor.steps == 4
        train(executor, 4, 5)
        assert_same(gathered_state(executor), None if rank else model.state_dict())


@on_ranks(2)
def test_a_rank_without_parameters_goes_on(rank: int, folder: Path) -> None:
    """Its scheduler does as well, and it reads no tensor of another rank's stages."""

    def rates(begin: int, end: int, load: bool) -> list[tuple[float, float]]:
        with executor_of(built("1f1b"), of=[nn.Linear(4, 4), nn.Tanh()]) as executor:
            scheduler = lr_scheduler.OneCycleLR(executor.optimizer, 0.1, total_steps=9)
            checkpoint = Checkpoint(executor, scheduler=scheduler)
            if load:
                checkpoint.load(folder)
            found = []
            for x, y in random_batches(6)[begin:end]:
                executor.step(x, target=y)
                scheduler.step()
                (group,) = executor.optimizer.param_groups
                found.append((group["lr"], group["betas"][0]))
                if executor.steps == 3 and not load:
                    checkpoint.save(folder)
            return found

    expected = rates(0, 6, load=False)
    watched: Any = {"autospec": True, "side_effect": storage.Stored.read_into}
    with mock.patch.object(storage.Stored, "read_into", **watched) as read:
        assert rates(3, 6, load=True) == expected[3:]
    assert everyone(expected)[0] == expected
    reads = [name for call in read.call_args_list for name in call.args[1]]
    of_tensors = [name for name in reads if name.startswith(("model.", "optimizer."))]
    assert len(of_tensors) == (0 if rank else 2 + 2 * 3)


@on_ranks(2)
def test_pipelines_in_parallel_are_kept_once(rank: int, folder: Path) -> None:
    """The weights, and the first one's statistics; each one's generators and place in the data."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    torch.manual_seed(rank)
    batches = Batches([(x + rank, y) for x, y in random_batches(2)])
    with executor_of(built("1f1b", 1), mesh=mesh) as executor:
        for x, y in batches:
            executor.step(x, target=y)
        batches.epoch += rank
        Checkpoint(executor, batches=batches).save(folder)
        drawn = torch.randn(3)
        first = everyone(executor.stages[0].state_dict())[0]
        assert_same(gathered_state(executor), None if rank else first)
    own = Batches(random_batches(2))
    with executor_of(built("1f1b", 1), mesh=mesh) as executor:
        Checkpoint(executor, batches=own).load(folder)
        assert_same(executor.stages[0].state_dict(), first)
        assert torch.equal(torch.randn(3), drawn)
        assert own.epoch == 1 + rank
    with executor_of(built("1f1b", 2)) as executor:  # in one pipeline both go on as the first did
        Checkpoint(executor, batches=own).load(folder)
        assert own.epoch == 1
        assert torch.equal(torch.randn(3), everyone(drawn)[0])


@on_ranks(2)
def test_replicas_of_a_stage_are_kept_once(rank: int, folder: Path) -> None:
    with executor_of(REPLICATED) as executor:
        for x, y in random_batches(2):
            executor.step(x, target=y)
        Checkpoint(executor).save(folder)
        first = everyone(executor.stages[0].state_dict())[0]
    with executor_of(REPLICATED) as executor:
        Checkpoint(executor).load(folder)
        assert_same(executor.stages[0].state_dict(), first)
    model = nn.Sequential(*layers())
    Checkpoint(model, adamw(model.parameters())).load(folder)
    assert_same(model.state_dict(), first)


@on_ranks(2)
def test_ties_have_all_their_names(rank: int, folder: Path) -> None:
    """A plain model with one parameter in two places, and two ranks with a copy each."""
    *batches, last = random_batches(4)
    table = deferred(nn.Linear, 4, 4, bias=False).tied("table")
    tied: list[Any] = [table, nn.Tanh(), deferred(nn.Linear, 4, 4), table]
    with executor_of(built("1f1b"), momentum, tied) as executor:
        assert len(executor.ties) == 1
        for x, y in batches:
            executor.step(x, target=y)
        Checkpoint(executor).save(folder / "ranks")
        found = gathered_state(executor)
    model = partition(tied, 1)[0]
    optimizer = momentum(model.parameters())
    Checkpoint(model, optimizer).load(folder / "ranks")
    assert len(optimizer.state) == 3
    state = model.state_dict()
    assert_same(found, None if rank else state)
    assert state["0.weight"].data_ptr() == state["3.weight"].data_ptr()
    step_plainly(model, optimizer, last)
    if rank == 0:
        Checkpoint(model, optimizer).save(folder / "plain")
    everyone(None)
    one, other = (executor_of(built("1f1b"), momentum, tied) for _ in range(2))
    with one as executor, other:
        Checkpoint(executor).load(folder / "ranks")
        executor.step(last[0], target=last[1])
        Checkpoint(other).load(folder / "plain")
        for stage, module in executor.stages.items():
            for name, value in module.state_dict().items():
                torch.testing.assert_close(value, other.stages[stage].state_dict()[name])
        for own in other.optimizers.values():
            assert all("momentum_buffer" in own.state[p] for p in own.param_groups[0]["params"])


@on_ranks(2)
@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_that_all_ranks_raise_has_the_one_that_failed_as_its_root(
    failing: int, rank: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no more of this")

    executor = executor_of(built("1f1b"))
    checkpoint = Checkpoint(executor)
    if rank == failing:
        monkeypatch.setattr(FileSystemWriter, "write_data", fail)

    def save() -> None:
        try:
            checkpoint.save(folder / "a")
        finally:
            if rank == failing:
                everyone("the other has ended, and has said who is to blame")

    with pytest.raises(schedir.ExecutionError) as found, executor:
        save()
    if rank != failing:
        everyone("this one has ended")
    cause = (failing, "OSError: no more of this")
    assert [(root.rank, root.cause) for root in found.value.roots] == [cause]


@on_ranks(2)
def test_what_fails_on_one_rank_fails_on_all_and_spoils_nothing(
    rank: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with executor_of(built("1f1b")) as executor:
        checkpoint = Checkpoint(executor)
        checkpoint.save(folder)
        before = copy.deepcopy([m.state_dict() for m in executor.stages.values()])
        x, y = random_batches(1)[0]
        executor.step(x, target=y)

        def full(*_: object) -> None:
            raise OSError("no space left")

        with monkeypatch.context() as patch:
            if rank:
                patch.setattr(FileSystemWriter, "write_data", full)
            assert message_of(checkpoint.save, folder) == "process 1 of 2: OSError: no space left"
        with monkeypatch.context() as patch:
            if rank == 0:
                patch.setattr(saving.Save, "publish", full)
            assert message_of(checkpoint.save, folder) == "process 0 of 2: OSError: no space left"
        assert sorted(file.name for file in folder.iterdir())[0] == ".metadata"
        everyone(None)
        assert len(list(folder.iterdir())) == 3
        checkpoint.load(folder)
        for module, state in zip(executor.stages.values(), before, strict=True):
            assert_same(module.state_dict(), state)
        executor.step(x, target=y)  # the executor goes on
        with monkeypatch.context() as patch:
            if rank:
                patch.setattr(nn.Module, "load_state_dict", full)
            found = message_of(checkpoint.load, folder)
            assert found.startswith("process 1 of 2: ")
            assert "in part only, OSError: no space left" in found
    with executor_of(built("1f1b"), of=layers(width=8)) as executor:
        found = message_of(Checkpoint(executor).load, folder)
        assert "another model: 0.weight is [4, 4] there and [8, 4] here" in found
        assert found == everyone(found)[0]
    stages = {rank: nn.Linear(4, 4)}
    with Executor(built("1f1b"), stages, MSE, adamw) as executor:
        found = "weight is the name of two things, in stage 0 and stage 1"
        assert found in message_of(Checkpoint(executor).save, folder)
        assert found in message_of(gathered_state, executor)
