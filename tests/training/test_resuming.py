"""A Trainer that is started again goes on from its last good checkpoint, with all that steps."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor
from torch.optim import lr_scheduler

from schedir.runtime import Executor, StepResult
from schedir.training import Callback, Checkpoint, History, gathered_state
from tests.runtime.kit import everyone, message_of
from tests.runtime.on_ranks import on_ranks
from tests.sweeps import sweep
from tests.training.test_checkpoint import Kept, assert_same
from tests.training.test_damaged_checkpoints import cut, data_of, files_of, flip, lengthen
from tests.training.test_trainer import HELD_OUT, noisy_executor, trainer_of


def rates_and_weights(
    rank: int | None, folder: Path | None, epochs: int, **options: Any
) -> tuple[list[float], dict[str, Tensor] | None]:
    """Of each epoch so far, and of the whole model then."""
    with noisy_executor(rank) as executor:
        history = trainer_of(executor, checkpoint=folder, epochs=epochs, **options).fit()
        return [epoch.lr for epoch in history], gathered_state(executor)


def assert_goes_on(rank: int | None, folder: Path, expected: Any, **options: Any) -> None:
    rates, weights = rates_and_weights(rank, folder, len(expected[0]), **options)
    assert rates == expected[0]
    assert_same(weights, expected[1])


def folders(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


@pytest.mark.parametrize("raises", [False, True])
def test_others_that_callbacks_step_go_on(raises: bool, tmp_path: Path) -> None:
    """After steps, and after epochs; what a callback raises does not undo the epoch."""

    def trained(folder: Path | None, epochs: int, ends: int | None = None) -> Any:
        average = Kept(mean=0.0, epochs=0)  # a mean of the losses so far, and epochs that are over
        with noisy_executor(None) as executor:
            scheduler = lr_scheduler.StepLR(executor.optimizer, 2, gamma=0.5)

            class Steps(Callback):
                def after_step(self, result: StepResult) -> None:
                    average.state["mean"] = 0.9 * average.state["mean"] + 0.1 * result.loss

                def after_epoch(self, history: Any) -> None:
                    scheduler.step()
                    average.state["epochs"] += 1
                    if len(history) == ends:
                        raise RuntimeError("enough")

            others = {"rates": scheduler, "average": average}
            options = {"checkpoint": folder, "callbacks": [Steps()], "others": others}
            trainer = trainer_of(executor, epochs=epochs, **options)
            with nullcontext() if ends is None else pytest.raises(RuntimeError, match="enough"):
                trainer.fit()
            return [epoch.lr for epoch in trainer.history], average.state

    expected = trained(None, 6)
    assert len(set(expected[0])) == 3
    trained(tmp_path, *((6, 3) if raises else (3,)))
    assert folders(tmp_path) == ["epoch-2", "epoch-3"]
    assert trained(tmp_path, 6) == expected


@pytest.mark.parametrize(
    ("keep", "kept"), [(1, [4]), (2, [3, 4]), (3, [2, 3, 4]), (9, [1, 2, 3, 4])]
)
def test_the_last_checkpoints_are_kept(keep: int, kept: list[int], tmp_path: Path) -> None:
    (tmp_path / "epoch-of-mine").mkdir()
    (tmp_path / "epoch-9.txt").write_text("mine")
    (tmp_path / ".step-9.saving").mkdir()  # as a kill leaves it
    rates_and_weights(None, tmp_path, 4, keep=keep)
    for name in ("epoch-of-mine", "epoch-9.txt"):
        assert (tmp_path / name).exists()
    assert not (tmp_path / ".step-9.saving").exists()
    found = [one for one in folders(tmp_path) if one.removeprefix("epoch-").isdigit()]
    assert found == [f"epoch-{number}" for number in kept]
    for number in kept:
        with noisy_executor(None) as executor:
            Checkpoint(executor).load(tmp_path / f"epoch-{number}")
            assert executor.steps == 3 * number


def lose_metadata(file: Path, other: Path, draw: random.Random) -> None:
    (file.parent / ".metadata").unlink()


def lose_all(file: Path, other: Path, draw: random.Random) -> None:
    for own in files_of(file.parent):
        own.unlink()


def damaged(folder: Path, epoch: int, damage: Any = flip, of: int = 0) -> Path:
    """Damage an epoch's checkpoint; the data file of a rank."""
    file = data_of(folder / f"epoch-{epoch}")[of]
    damage(file, file, random.Random(3))
    return file


@pytest.mark.parametrize("damage", [flip, cut, lengthen, lose_metadata, lose_all])
def test_a_damaged_last_checkpoint_does_not_end_a_run(
    damage: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = rates_and_weights(None, None, 4)
    rates_and_weights(None, tmp_path, 3)
    damaged(tmp_path, 3, damage)
    assert_goes_on(None, tmp_path, expected)
    (said,) = (record.getMessage() for record in caplog.records)
    assert str(tmp_path / "epoch-3") in said
    assert said.endswith(f"the training goes on from {tmp_path / 'epoch-2'}")
    caplog.clear()
    assert folders(tmp_path) == ["epoch-3", "epoch-4"]
    shutil.rmtree(tmp_path / "epoch-4")
    assert_goes_on(None, tmp_path, expected)  # the damaged one has been replaced by a good one
    assert not caplog.records


@contextmanager
def interrupted_at(place: Any, name: str) -> Iterator[None]:
    """As if the process were killed at this call."""
    killed = mock.patch.object(place, name, side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt), killed:
        yield


def test_the_only_good_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    """Whenever a save ends, with the fewest that can be kept, and the last one damaged."""
    expected = rates_and_weights(None, None, 4)
    rates_and_weights(None, tmp_path, 3)
    damaged(tmp_path, 3)
    for place, name in ((Path, "replace"), (shutil, "rmtree"), (Path, "rename")):
        with interrupted_at(place, name):
            rates_and_weights(None, tmp_path, 4, keep=1)
        with noisy_executor(None) as executor:
            Checkpoint(executor).load(tmp_path / "epoch-2")
    assert_goes_on(None, tmp_path, expected, keep=1)
    assert folders(tmp_path) == ["epoch-4"]


def test_damaged_checkpoints_are_not_kept_in_place_of_the_next_good_one(tmp_path: Path) -> None:
    """Of epochs that are to be trained again, further on than what is saved next."""
    rates_and_weights(None, tmp_path, 4, keep=3)
    for number in (3, 4):
        damaged(tmp_path, number)
    rates_and_weights(None, tmp_path, 3, keep=1)
    assert folders(tmp_path) == ["epoch-3", "epoch-4"]
    with noisy_executor(None) as executor:
        Checkpoint(executor).load(tmp_path / "epoch-3")


def test_where_all_are_damaged_nothing_begins_anew(tmp_path: Path) -> None:
    rates_and_weights(None, tmp_path, 2)
    before = {data: data.read_bytes() for data in (damaged(tmp_path, n) for n in (1, 2))}
    with noisy_executor(None) as executor:
        said = message_of(trainer_of(executor, checkpoint=tmp_path, epochs=3).fit)
        assert executor.steps == 0
    assert f"no checkpoint in {tmp_path} can be loaded: " in said
    for data, content in before.items():
        assert str(data) in said
        assert data.read_bytes() == content


def test_a_folder_that_can_not_be_used_is_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with noisy_executor(None) as executor:
        Checkpoint(executor).save(tmp_path / "one")
        for folder, text in {
            tmp_path / "file": "it is a file, not a folder",
            tmp_path / "file" / "below": "the folder can't be made: Not a directory",
            tmp_path / "one": "is a checkpoint itself",
        }.items():
            said = message_of(trainer_of(executor, checkpoint=folder, epochs=1).fit)
            assert str(folder) in said
            assert text in said
        assert executor.steps == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"keep": 0}, "keep must be an int of at least 1, not 0"),
        ({"scheduler_by": "batch"}, 'must be "step", "epoch" or "evaluation", not \'batch\''),
        ({"others": {"progress": Kept()}}, "the Trainer itself uses 'progress'"),
        ({"others": {"mean": 3}}, "mean must have state_dict and load_state_dict"),
    ],
)
def test_what_can_not_be_kept_is_refused(options: Any, text: str, tmp_path: Path) -> None:
    with noisy_executor(None) as executor:
        assert text in message_of(trainer_of, executor, epochs=1, checkpoint=tmp_path, **options)


@on_ranks(2)
@pytest.mark.parametrize("damage", [flip, lose_metadata])
def test_ranks_agree_on_the_checkpoint_before_a_damaged_one(
    damage: Callable[..., None], rank: int, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = rates_and_weights(rank, None, 4)
    rates_and_weights(rank, folder, 3)
    if rank == 0:
        damaged(folder, 3, damage, of=1)
    everyone(None)
    assert_goes_on(rank, folder, expected)
    assert len(caplog.records) == (rank == 0)
    everyone(None)
    assert folders(folder) == ["epoch-3", "epoch-4"]


def asked_after(step: int) -> Any:
    """Let executors be asked to stop, as by the runtime, from the end of a step on."""
    stop = property(lambda self: self.steps >= step)
    return mock.patch.object(Executor, "stop_requested", stop)


def stopped_and_resumed(
    rank: int | None, folder: Path, step: int, **options: Any
) -> tuple[History, Any]:
    options |= {"checkpoint": folder, "epochs": 3}
    with asked_after(step), noisy_executor(rank) as executor:
        trainer = trainer_of(executor, **options)
        trainer.fit()
        assert executor.steps == step
        assert trainer.stopped
    with noisy_executor(rank) as executor:
        trainer = trainer_of(executor, **options)
        history = trainer.fit()
        assert not trainer.stopped
        return history, gathered_state(executor)


def trained(rank: int | None, **options: Any) -> tuple[History, Any]:
    with noisy_executor(rank) as executor:
        history = trainer_of(executor, epochs=3, **options).fit()
        return history, gathered_state(executor)


@pytest.mark.parametrize(
    "options",
    [{}, {"save_every": 4}, {"eval_every": 2, "evaluation": HELD_OUT, "async_save": True}],
)
@sweep("step", range(1, 9), quick=(2, 3))  # within an epoch, and at its end
def test_a_stopped_training_goes_on_as_if_it_had_not(
    step: int, options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = stopped_and_resumed(None, tmp_path, step, **options)
    expected = trained(None, **{**options, "async_save": False})
    assert found[0] == expected[0]
    assert_same(found[1], expected[1])
    (said,) = (record.getMessage() for record in caplog.records)
    assert said == f"the training stops after step {step}, as asked, and has saved a checkpoint"


def test_a_training_that_is_over_has_not_stopped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with asked_after(9), noisy_executor(None) as executor:
        trainer = trainer_of(executor, checkpoint=tmp_path, epochs=3)
        assert len(trainer.fit()) == 3
        assert not trainer.stopped
    assert not caplog.records


def test_a_stop_waits_for_the_end_of_a_segment(tmp_path: Path) -> None:
    """Of 2 steps, as a call of the executor is one: the pipeline is full before."""
    found = []
    for folder, asked in ((None, False), (tmp_path, True), (tmp_path, False)):
        with asked_after(0 if asked else 99), noisy_executor(None, segment=8) as executor:
            trainer = trainer_of(executor, checkpoint=folder, epochs=2, segment=8)
            found.append((trainer.fit(), gathered_state(executor)))
            assert trainer.stopped == asked
            assert not asked or folders(tmp_path) == ["step-2"]
    assert found[2][0] == found[0][0]
    assert_same(found[2][1], found[0][1])


def test_without_checkpoints_a_stop_saves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with asked_after(2), noisy_executor(None) as executor:
        trainer = trainer_of(executor, epochs=3)
        assert not trainer.fit()
        assert trainer.stopped
    assert caplog.messages == ["the training stops after step 2, as asked"]


@on_ranks(2)
def test_ranks_stop_after_the_same_step(rank: int, folder: Path) -> None:
    expected = trained(rank)
    history, weights = stopped_and_resumed(rank, folder, 4, async_save=True)
    assert history == expected[0]
    assert_same(weights, expected[1])
