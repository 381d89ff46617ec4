"""A checkpoint that is not what was saved is refused before anything changes."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from schedir import ExecutionError
from schedir.training import Checkpoint
from tests.runtime.kit import adamw, everyone, message_of
from tests.runtime.on_ranks import on_ranks
from tests.training.test_checkpoint import assert_same
from tests.training.test_checkpoint_on_ranks import built, executor_of, shared
from tests.training.test_checkpoint_on_ranks import layers as layers_on_ranks

TRIALS = 500


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def saved(folder: Path, seed: int = 1) -> Path:
    """A checkpoint of a model and its optimiser after a step."""
    model = model_of(seed)
    optimizer = adamw(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    Checkpoint(model, optimizer).save(folder)
    return folder


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
    if file.name != ".metadata":
        shutil.copy(other.parent / ".metadata", file.parent)
        for own, wanted in zip(data_of(file.parent), data_of(other.parent), strict=True):
            own.rename(file.parent / wanted.name)
    else:
        shutil.copy(other, file)


DAMAGES: tuple[Callable[[Path, Path, random.Random], None], ...] = (
    flip,
    cut,
    lengthen,
    remove,
    mix,
    mix_under_its_name,
)


def data_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.distcp"))


def files_of(folder: Path) -> list[Path]:
    return [folder / ".metadata", *data_of(folder)]


def loaded_after_damage(
    first: Path, second: Path, work: Path, trials: int, load: Callable[[Path], None]
) -> list[str]:
    """Damage copies of `first`, with files of `second`, and load them: which damage has loaded, or
    was refused without the folder's name."""
    draw = random.Random(20)
    contents = {file.name: file.read_bytes() for file in files_of(first)}
    work.mkdir(exist_ok=True)
    found = []
    for trial in range(trials):
        for file in work.iterdir():
            file.unlink()
        for name, content in contents.items():
            (work / name).write_bytes(content)
        damage = draw.choice(DAMAGES)
        file, other = draw.choice(list(zip(files_of(work), files_of(second), strict=True)))
        damage(file, other, draw)
        said = message_of(load, work)
        if str(work) not in said:
            found.append(f"{trial}: {damage.__name__} {file.name}: {said}")
    return found


def test_of_500_checkpoints_damaged_at_random_none_loads(tmp_path: Path) -> None:
    first, second = saved(tmp_path / "a"), saved(tmp_path / "b", seed=2)
    model = model_of(3)
    optimizer = adamw(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    checkpoint = Checkpoint(model, optimizer)
    assert not loaded_after_damage(first, second, tmp_path / "c", TRIALS, checkpoint.load)
    assert not loaded_after_damage(first, second, tmp_path / "c", 50, checkpoint.load_weights)
    assert_same(model.state_dict(), before)
    assert not optimizer.state
    checkpoint.load(first)
    assert_same(model.state_dict(), _after_a_step(1))


def _after_a_step(seed: int) -> dict[str, torch.Tensor]:
    model = model_of(seed)
    optimizer = adamw(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return model.state_dict()


def test_what_is_damaged_is_named_with_the_way_on(tmp_path: Path) -> None:
    folder = saved(tmp_path / "run")
    checkpoint = Checkpoint(model_of(1))
    (data,) = data_of(folder)
    metadata = folder / ".metadata"

    def refusal() -> str:
        with pytest.raises(ExecutionError) as refused:
            checkpoint.load(folder)
        return str(refused.value)

    way = "load the checkpoint before this one"
    for file in (data, metadata):
        content = file.read_bytes()
        for damaged in (bytes([content[0] ^ 1]) + content[1:], content[:-1], content + b" "):
            file.write_bytes(damaged)
            said = refusal()
            assert str(file) in said
            assert way in said
        file.unlink()
        said = refusal()
        assert str(folder) in said
        assert file.name in said
        assert way in said
        file.write_bytes(content)
    checkpoint.load(folder)


def test_a_checkpoint_without_hashes_is_refused(tmp_path: Path) -> None:
    """As torch.distributed.checkpoint writes it, and as schedir did before there were hashes."""
    folder = saved(tmp_path)
    metadata = folder / ".metadata"
    content = metadata.read_bytes()
    metadata.write_bytes(content[: content.rindex(b'\n{"schedir checkpoint"')])
    with pytest.raises(ExecutionError) as refused:
        Checkpoint(model_of(1)).load(folder)
    assert str(metadata) in str(refused.value)
    assert "torch.distributed.checkpoint reads" in str(refused.value)


def test_a_folder_that_can_not_be_one_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    checkpoint = Checkpoint(model_of(1))
    for folder in (file, file / "below"):
        for call in (checkpoint.save, checkpoint.load):
            with pytest.raises(ExecutionError) as refused:
                call(folder)
            assert str(folder) in str(refused.value)
            assert "Errno" not in str(refused.value)
        assert not Checkpoint.is_at(folder)
    assert "is a file, not a folder" in message_of(checkpoint.save, file)
    assert "is a file, not a folder" in message_of(checkpoint.load, file)
    assert file.read_text() == "mine"


def test_hashes_are_those_of_what_was_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a disk makes of it between the writing and the end of the save is noticed too."""
    finish = FileSystemWriter.finish

    def damaging(self: FileSystemWriter, *given: object) -> None:
        (file,) = data_of(Path(self.path))
        flip(file, file, random.Random(1))
        finish(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(FileSystemWriter, "finish", damaging)
    saved(tmp_path)
    with pytest.raises(ExecutionError, match="is damaged"):
        Checkpoint(model_of(1)).load(tmp_path)


@on_ranks(2)
def test_damage_of_files_of_several_ranks_is_found_by_all(rank: int, tmp_path: Path) -> None:
    folder = shared(tmp_path)
    for name, seed in (("a", 1), ("b", 2)):
        with executor_of(built("1f1b")) as executor:
            for module in executor.stages.values():
                for parameter in module.parameters():
                    nn.init.normal_(parameter, generator=torch.Generator().manual_seed(seed))
            Checkpoint(executor).save(folder / name)
    first, second = folder / "a", folder / "b"
    if rank == 0:
        assert len(data_of(first)) == 2
        plain = Checkpoint(nn.Sequential(*layers_on_ranks()))
        assert not loaded_after_damage(first, second, folder / "c", 60, plain.load)
    everyone(None)
    with executor_of(built("1f1b")) as executor:
        checkpoint = Checkpoint(executor)
        before = [
            {name: value.clone() for name, value in module.state_dict().items()}
            for module in executor.stages.values()
        ]
        for file in files_of(first):
            content = file.read_bytes()
            everyone(None)
            if rank == 0:
                file.write_bytes(content[:-9] + bytes([content[-9] ^ 4]) + content[-8:])
            everyone(None)
            said = message_of(checkpoint.load, first)
            assert f"{file} is damaged" in said
            assert everyone(said) == [said] * 2
            everyone(None)
            if rank == 0:
                file.write_bytes(content)
            everyone(None)
        said = message_of(checkpoint.load, folder / "ab"[rank])
        assert "is another one for process 1" in said
        assert everyone(said)[0].replace("/a", "") == everyone(said)[1].replace("/b", "")
        for module, state in zip(executor.stages.values(), before, strict=True):
            assert_same(module.state_dict(), state)
        checkpoint.load(first)
