"""A checkpoint that is not what was saved is refused before anything changes."""

from __future__ import annotations

import copy
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from schedir.training import Checkpoint
from schedir.training.checkpoint.saving import Save
from tests.runtime.kit import adamw, everyone, message_of
from tests.runtime.on_ranks import on_ranks
from tests.training.test_checkpoint import assert_same, built, executor_of, layers


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def saved(folder: Path, seed: int = 1) -> nn.Module:
    """Save a checkpoint of a model and its optimiser after a step; the model."""
    model = model_of(seed)
    optimizer = adamw(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    Checkpoint(model, optimizer).save(folder)
    return model


def flip(file: Path, other: Path, draw: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)


def cut(file: Path, other: Path, draw: random.Random) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: draw.randrange(len(content))])


def lengthen(file: Path, other: Path, draw: random.Random) -> None:
    with file.open("ab") as opened:
        opened.write(draw.randbytes(draw.randrange(1, 100)))


def remove(file: Path, other: Path, draw: random.Random) -> None:
    file.unlink()


def mix(file: Path, other: Path, draw: random.Random) -> None:
    """Put the same file of another checkpoint in its place, under the name of this one."""
    shutil.copy(other, file)


def mix_under_its_name(file: Path, other: Path, draw: random.Random) -> None:
    """Put a file in place of the one that another checkpoint's `.metadata` asks for."""
    shutil.copy(other.parent / ".metadata", file.parent)
    if file.name != ".metadata":
        for own, wanted in zip(data_of(file.parent), data_of(other.parent), strict=True):
            own.rename(file.parent / wanted.name)


DAMAGES = (flip, cut, lengthen, remove, mix, mix_under_its_name)


def data_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.distcp"))


def files_of(folder: Path) -> list[Path]:
    return [folder / ".metadata", *data_of(folder)]


def loaded_after_damage(folder: Path, trials: int, load: Callable[[Path], object]) -> list[str]:
    """Damage copies of the checkpoint `a`, with files of `b`, and load them: which damage has
    loaded, or was refused without the folder's name."""
    draw = random.Random(20)
    first, second, work = folder / "a", folder / "b", folder / "c"
    found = []
    for trial in range(trials):
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(first, work)
        damage = draw.choice(DAMAGES)
        file, other = draw.choice(list(zip(files_of(work), files_of(second), strict=True)))
        damage(file, other, draw)
        said = message_of(load, work)
        if str(work) not in said:
            found.append(f"{trial}: {damage.__name__} {file.name}: {said}")
    return found


def test_of_500_checkpoints_damaged_at_random_none_loads(tmp_path: Path) -> None:
    expected = saved(tmp_path / "a")
    saved(tmp_path / "b", seed=2)
    model = model_of(3)
    optimizer = adamw(model.parameters())
    before = copy.deepcopy(model.state_dict())
    checkpoint = Checkpoint(model, optimizer)
    assert not loaded_after_damage(tmp_path, 500, checkpoint.load)
    assert not loaded_after_damage(tmp_path, 50, checkpoint.load_weights)
    assert_same(model.state_dict(), before)
    assert not optimizer.state
    checkpoint.load(tmp_path / "a")
    assert_same(model.state_dict(), expected.state_dict())


def test_what_is_damaged_is_named_with_the_way_on(tmp_path: Path) -> None:
    checkpoint = Checkpoint(saved(tmp_path))
    (data,) = data_of(tmp_path)
    for file in files_of(tmp_path):
        content = file.read_bytes()
        flipped = bytes([content[0] ^ 1]) + content[1:]
        for damaged in (flipped, content[:-1], content + b" ", None):
            if damaged is None:
                file.unlink()
            else:
                file.write_bytes(damaged)
            said = message_of(checkpoint.load, tmp_path)
            assert "load the checkpoint before this one" in said
            assert str(tmp_path) in said
            assert file.name in said
            if damaged is None:
                assert f"{data.name} is missing" in said or file != data
            else:
                assert f"{file} is damaged" in said
        file.write_bytes(content)
    checkpoint.load(tmp_path)


def test_a_checkpoint_without_hashes_is_refused(tmp_path: Path) -> None:
    """As torch.distributed.checkpoint writes it, and as schedir did before there were hashes."""
    saved(tmp_path)
    metadata = tmp_path / ".metadata"
    content = metadata.read_bytes()
    metadata.write_bytes(content[: content.rindex(b'\n{"schedir checkpoint"')])
    said = message_of(Checkpoint(model_of(1)).load, tmp_path)
    assert str(metadata) in said
    assert "torch.distributed.checkpoint reads" in said


def test_a_folder_that_can_not_be_one_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    checkpoint = Checkpoint(model_of(1))
    for folder in (file, file / "below"):
        for call in (checkpoint.save, checkpoint.load):
            said = message_of(call, folder)
            assert str(folder) in said
            assert "Errno" not in said
            assert ("is a file, not a folder" in said) == (folder == file)
        assert not Checkpoint.is_at(folder)
    assert file.read_text() == "mine"


def test_hashes_are_those_of_what_was_meant(tmp_path: Path) -> None:
    """What a disk makes of it between the writing and the end of the save is noticed too."""
    publish = Save.publish

    def damaging(self: Save, *given: Any) -> None:
        (file,) = data_of(tmp_path)
        flip(file, file, random.Random(1))
        publish(self, *given)

    with mock.patch.object(Save, "publish", damaging):
        saved(tmp_path)
    assert "is damaged" in message_of(Checkpoint(model_of(1)).load, tmp_path)


@on_ranks(2)
def test_damage_of_files_of_several_ranks_is_found_by_all(rank: int, folder: Path) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        with executor_of(built("1f1b")) as executor:
            for module in executor.stages.values():
                for parameter in module.parameters():
                    nn.init.normal_(parameter, generator=torch.Generator().manual_seed(seed))
            Checkpoint(executor).save(folder / name)
    first = folder / "a"
    if rank == 0:
        assert len(data_of(first)) == 2
        plain = Checkpoint(nn.Sequential(*layers()))
        assert not loaded_after_damage(folder, 60, plain.load)
    everyone(None)
    with executor_of(built("1f1b")) as executor:
        checkpoint = Checkpoint(executor)
        before = copy.deepcopy([module.state_dict() for module in executor.stages.values()])
        for file in files_of(first):
            content = file.read_bytes()
            everyone(None)
            if rank == 0:
                file.write_bytes(content[:-9] + bytes([content[-9] ^ 4]) + content[-8:])
            everyone(None)
            said = message_of(checkpoint.load, first)
            assert f"{file} is damaged" in said
            assert everyone(said) == [said] * 2
            if rank == 0:
                file.write_bytes(content)
            everyone(None)
        said = message_of(checkpoint.load, folder / "ab"[rank])
        assert "is another one for process 1" in said
        assert everyone(said)[0].replace("/a", "") == everyone(said)[1].replace("/b", "")
        for module, state in zip(executor.stages.values(), before, strict=True):
            assert_same(module.state_dict(), state)
        checkpoint.load(first)
