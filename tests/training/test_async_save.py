"""A checkpoint that is written while the training goes on is that of the moment of its save."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, current_thread, main_thread
from typing import Any

import pytest
import torch
from torch import nn

from schedir import ExecutionError
from schedir.runtime import Executor, StepResult
from schedir.training import Checkpoint, Saving, Trainer
from schedir.training.checkpoint import saving
from schedir.training.checkpoint.saving import Part, Save
from tests.runtime.kit import everyone, message_of
from tests.runtime.on_ranks import on_ranks
from tests.training.killed_saves import async_save, checkpoint_of, values_in
from tests.training.test_checkpoint import assert_same
from tests.training.test_damaged_checkpoints import data_of
from tests.training.test_resuming import assert_goes_on, folders, rates_and_weights
from tests.training.test_trainer import TRAINED, Calls, Ends, noisy_executor, trainer_of
from tests.warm import commands


@pytest.fixture
def may_write(monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """Nothing is written before this is set."""
    event, write = Event(), Save.write

    def waits(self: Save) -> Part:
        assert current_thread() is not main_thread()
        event.wait()
        return write(self)

    monkeypatch.setattr(Save, "write", waits)
    yield event
    event.set()


def state_of(executor: Executor) -> dict[str, Any]:
    """The weights and the optimisers' tensors here, copied."""
    found = {}
    for stage, module in executor.stages.items():
        for at, state in enumerate(executor.optimizers[stage].state.values()):
            found.update({f"{stage}.{at}.{key}": x for key, x in state.items()})
        found.update({f"{stage}.{name}": x for name, x in module.state_dict().items()})
    return copy.deepcopy(found)


def train(executor: Executor, steps: int) -> None:
    for x, y in (TRAINED * 9)[:steps]:
        executor.step(x, target=y)


def test_all_is_of_the_moment(tmp_path: Path, may_write: Event) -> None:
    with noisy_executor(None) as executor:
        train(executor, 2)
        expected, drawn = state_of(executor), torch.get_rng_state()
        saving = Checkpoint(executor).async_save(tmp_path)
        train(executor, 3)
        torch.rand(3)
        assert not any(torch.equal(x, expected[name]) for name, x in state_of(executor).items())
        assert not Checkpoint.is_at(tmp_path)
        may_write.set()
        saving.wait()
        assert Checkpoint.is_at(tmp_path)
    with noisy_executor(None) as executor:
        Checkpoint(executor).load(tmp_path)
        assert executor.steps == 2
        assert_same(state_of(executor), expected)
        assert torch.equal(torch.get_rng_state(), drawn)


@on_ranks(2)
def test_it_is_complete_without_a_word_between_ranks(
    rank: int, folder: Path, may_write: Event
) -> None:
    """A thread of the first process finds what the others have written, and tells when all is."""
    complete = Event()
    with noisy_executor(rank) as executor:
        train(executor, 1)
        expected = state_of(executor)
        saving = Checkpoint(executor).async_save(folder, then=complete.set)
        train(executor, 1)
        may_write.set()
        if rank == 0:
            complete.wait()
            assert Checkpoint.is_at(folder)
            assert len([*folder.iterdir()]) == 3  # .metadata, and a file of each rank
        everyone(None)
        saving.wait()
        assert complete.is_set() == (rank == 0)
        saving.wait()
        Checkpoint(executor).load(folder)
        assert_same(state_of(executor), expected)


def test_one_copy_is_kept_and_used_again(
    tmp_path: Path, may_write: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second save waits for the first one, which still reads from there."""
    wait = Saving.wait

    def lets(self: Saving) -> None:
        may_write.set()
        wait(self)

    monkeypatch.setattr(Saving, "wait", lets)
    with noisy_executor(None) as executor:
        train(executor, 1)
        checkpoint = Checkpoint(executor)
        first = checkpoint.async_save(tmp_path / "1")
        places = {name: x.data_ptr() for name, x in checkpoint._snapshot._buffers.items()}
        weights = sum(x.nbytes for x in state_of(executor).values())
        assert weights < first.bytes < weights + 20_000  # and the random states
        assert first.seconds > 0
        train(executor, 1)
        may_write.clear()
        second = checkpoint.async_save(tmp_path / "2")
        assert Checkpoint.is_at(tmp_path / "1")
        found = {name: x.data_ptr() for name, x in checkpoint._snapshot._buffers.items()}
        of_tensors = [name for name in places if str(name[0]) in ("['model']", "['optimizer']")]
        assert len(of_tensors) == 16
        assert all(found[name] == places[name] for name in of_tensors)
        second.wait()
        for number in (1, 2):
            checkpoint.load(tmp_path / str(number))
            assert executor.steps == number


def test_a_model_that_grows_is_copied_anew(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    checkpoint = Checkpoint(model)
    checkpoint.async_save(tmp_path).wait()
    model[0].weight = nn.Parameter(torch.randn(5, 2))
    checkpoint.async_save(tmp_path).wait()
    wider = nn.Sequential(nn.Linear(2, 2))
    wider[0].weight = nn.Parameter(torch.zeros(5, 2))
    Checkpoint(wider).load(tmp_path)
    assert torch.equal(wider[0].weight, model[0].weight)


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """No file of this process may be larger: the system refuses to write, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def saved_twice(checkpoint: Checkpoint, folder: Path) -> None:
    """The next save says what was wrong with the one before."""
    saving = checkpoint.async_save(folder)
    assert saving._published.exception() is not None  # waits until it has failed
    checkpoint.save(folder)


@pytest.mark.parametrize("share", [0, 0.001, 0.03, 0.5, 0.999])
@pytest.mark.parametrize("save", [Checkpoint.save, async_save, saved_twice])
def test_a_full_disk_is_named_and_the_old_checkpoint_stays(
    save: Callable[[Checkpoint, Path], None], share: float, tmp_path: Path
) -> None:
    """Wherever in the file it is full."""
    checkpoint_of(1).save(tmp_path)
    room = int(share * data_of(tmp_path)[0].stat().st_size)
    before = folders(tmp_path)
    checkpoint = checkpoint_of(2)
    with full_disk(room):
        said = message_of(save, checkpoint, tmp_path)
    assert said.startswith(f"{tmp_path}/__0_")
    assert "_0.distcp can't be written: File too large; make room there, or save in" in said
    assert folders(tmp_path) == before
    assert values_in(tmp_path) == {1.0}
    checkpoint.async_save(tmp_path).wait()  # there is room again
    assert values_in(tmp_path) == {2.0}


@on_ranks(2)
@pytest.mark.parametrize("save", [Checkpoint.save, async_save])
@pytest.mark.parametrize("full", [0, 1])
def test_a_full_disk_of_one_rank_is_told_to_all(
    full: int, save: Callable[[Checkpoint, Path], None], rank: int, folder: Path
) -> None:
    with noisy_executor(rank) as executor:
        checkpoint = Checkpoint(executor)
        checkpoint.save(folder)
        before = folders(folder)
        train(executor, 1)
        with full_disk(300 if rank == full else resource.RLIM_INFINITY):
            said = message_of(save, checkpoint, folder)
        assert everyone(said) == [said] * 2
        assert said.startswith(f"process {full} of 2: {folder}/__{full}_")
        assert folders(folder) == before
        everyone(None)
        checkpoint.load(folder)
        assert executor.steps == 0


@pytest.mark.parametrize("options", [{}, {"save_every": 2, "keep": 1}])
def test_a_trainer_goes_on_from_it(options: dict[str, Any], tmp_path: Path) -> None:
    """And its checkpoints are complete when it ends, with the same names as else."""
    expected = rates_and_weights(None, None, 4)
    rates_and_weights(None, tmp_path / "run", 2, async_save=True, **options)
    rates_and_weights(None, tmp_path / "else", 2, **options)
    assert folders(tmp_path / "run") == folders(tmp_path / "else")
    assert_goes_on(None, tmp_path / "run", expected, async_save=True, **options)


def saving_trainer(executor: Executor, folder: Path, save_every: int, *callbacks: Any) -> Trainer:
    options = {"checkpoint": folder, "save_every": save_every, "callbacks": callbacks}
    return trainer_of(executor, epochs=2, async_save=True, **options)


def test_after_an_error_it_is_completed(tmp_path: Path, may_write: Event) -> None:
    with noisy_executor(None) as executor:

        def lets(result: StepResult) -> None:
            if executor.steps == 3:
                may_write.set()

        callbacks = Calls(after_step=lets), Ends(executor, 3, RuntimeError)
        with pytest.raises(RuntimeError):
            saving_trainer(executor, tmp_path, 2, *callbacks).fit()
    assert folders(tmp_path) == ["step-2"]
    with noisy_executor(None) as executor:
        Checkpoint(executor).load(tmp_path / "step-2")
        assert executor.steps == 2


@on_ranks(2)
def test_after_the_loss_of_a_rank_nobody_waits_for_its_files(
    rank: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    may_write: Event,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Rank 1 fails, and never writes; rank 0 says what is missing, and the old one stays."""
    monkeypatch.setattr(saving, "_PATIENCE", 0.2)
    if rank == 0:
        may_write.set()
    with noisy_executor(rank) as executor:
        trainer = saving_trainer(executor, folder, 2, *[Ends(executor, 3, RuntimeError)] * rank)
        if rank == 1:
            monkeypatch.setattr(Saving, "end", lambda self: None)  # as if it were killed
        with pytest.raises(RuntimeError if rank == 1 else ExecutionError):
            trainer.fit()
        executor.close()
    if rank == 0:
        (said,) = (one.getMessage() for one in caplog.records if one.levelno == logging.WARNING)
        lacking = f"{folder}/step-2: not all processes have written"
        assert said == f"a checkpoint was not completed: {lacking}"
        assert folders(folder) == []
    everyone(None)  # only then may rank 1 write


GONE = """
from torch import nn
from schedir.training import Checkpoint
from schedir.training.checkpoint import saving

saving._PATIENCE, saving.Save.found = 0.1, lambda self: None  # another process never writes
Checkpoint(nn.Linear(4, 1)).async_save("new")
"""


def test_python_ends_without_the_files_of_others(tmp_path: Path) -> None:
    subprocess.run([commands() / "python", "-c", GONE], cwd=tmp_path, check=True, timeout=200)
    assert [file.name for file in tmp_path.iterdir()] == [".new.saving"]


def test_a_full_disk_ends_a_training_at_its_next_save(tmp_path: Path) -> None:
    with noisy_executor(None) as executor:
        with full_disk(300):
            said = message_of(saving_trainer(executor, tmp_path, 1).fit)
        assert executor.steps == 2  # the save after step 1 has failed; that after step 2 says so
        assert said.startswith(f"{tmp_path}/.step-1.saving/__0_")


def test_a_full_disk_at_the_end_is_told_too(tmp_path: Path) -> None:
    with noisy_executor(None) as executor:
        trainer = trainer_of(executor, checkpoint=tmp_path, epochs=1, async_save=True)
        with full_disk(300):
            assert "make room there" in message_of(trainer.fit)
        assert trainer.fit() is trainer.history
        assert folders(tmp_path) == []


def test_the_log_has_the_time_and_size_of_a_copy(tmp_path: Path) -> None:
    logged: list[Any] = []
    keeps = Calls(after_log=lambda step, figures: logged.append(figures))
    options = {"checkpoint": tmp_path, "save_every": 1, "log_every": 1, "callbacks": [keeps]}
    with noisy_executor(None) as executor:
        trainer_of(executor, epochs=1, async_save=True, **options).fit()
    assert "copy_seconds" not in logged[0]  # nothing has been saved yet
    assert logged[1]["copy_seconds"] > 0
    assert 0 < logged[1]["copy_gib"] < 1e-3


def test_what_a_process_leaves_runs_no_code(tmp_path: Path, may_write: Event) -> None:
    ran = tmp_path / "ran"
    saving = Checkpoint(nn.Linear(2, 2)).async_save(tmp_path / "run")

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(ran),)

    file = saving._save._left(0)
    file.parent.mkdir()
    file.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(pickle.UnpicklingError, match=r"refers to posix\.mkdir"):
        saving._save.found()
    assert not ran.exists()
