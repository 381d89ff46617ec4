"""What a command writes takes its place when it is whole; until then the file is what it was."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO
from unittest.mock import Mock

import pytest

import schedir
from schedir import files
from schedir.cli import export
from schedir.files import check_writable, replacing, write_text
from schedir.simulator import save_timelines
from tests.command_line import Run
from tests.warm import commands

LINE = schedir.simulate(schedir.build("1f1b", ranks=2, microbatches=2))
SAVES: dict[str, Callable[[Path], object]] = {
    "costs": schedir.CostModel(forward=2).save,
    "timeline": LINE.save,
    "timelines": lambda path: save_timelines([LINE, LINE], path),
    "text": lambda path: write_text(path, "new"),
}


def only(folder: Path) -> list[str]:
    return [one.name for one in folder.iterdir()]


class FullError(OSError):
    pass


class Full:
    """A file on a disk that is full after some characters."""

    def __init__(self, file: TextIO) -> None:
        self.file = file

    def write(self, text: str) -> int:
        self.file.write(text[:5])
        raise FullError(28, "No space left on device")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> Full:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*given: Any, **options: Any) -> Full:
        return Full(open(*given, **options))

    monkeypatch.setattr(files, "open", opened, raising=False)


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
def test_a_save_that_fails_leaves_what_was_there(
    save: Callable[[Path], object], tmp_path: Path
) -> None:
    file = tmp_path / "file.json"
    with pytest.raises(FullError):
        save(file)
    assert only(tmp_path) == []
    file.write_text("old")
    with pytest.raises(FullError):
        save(file)
    assert file.read_text() == "old"
    assert only(tmp_path) == ["file.json"]


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("command", [("export", "1f1b"), ("search", "--seconds", "0.01")])
def test_a_command_that_fails_leaves_what_was_there(command: tuple[str, ...], run: Run) -> None:
    Path("mine.sched").write_text("old")
    code, _, err = run(*command, "-o", "mine.sched")
    assert code == 2
    assert "error: mine.sched: No space left on device" in err
    assert Path("mine.sched").read_text() == "old"
    assert only(Path()) == ["mine.sched"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, schedir.SchedirError("no more")])
def test_an_export_that_ends_while_it_draws_leaves_what_was_there(
    error: Any, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("mine.sched").write_text("old")
    monkeypatch.setattr(export, "plain", Mock(side_effect=error))
    assert run("export", "1f1b", "-o", "mine.sched")[0] in (2, 130)
    assert Path("mine.sched").read_text() == "old"
    assert only(Path()) == ["mine.sched"]


def test_nobody_sees_half_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with replacing(file) as opened:
        opened.write("half")
        opened.flush()
        assert not file.exists()
        opened.write(" and half\n")
    assert file.read_bytes() == b"half and half\n"
    with file.open() as reader:
        with replacing(file) as opened:
            opened.write("other")
            opened.flush()
            assert file.read_bytes() == b"half and half\n"
        assert reader.read() == "half and half\n"  # it was another file
    assert file.read_text() == "other"
    assert only(tmp_path) == ["file"]


def test_permissions_stay_and_new_files_have_the_usual_ones(tmp_path: Path) -> None:
    usual, file = tmp_path / "usual", tmp_path / "file"
    usual.touch()
    write_text(file, "new")
    assert file.stat().st_mode == usual.stat().st_mode
    for mode in (0o600, 0o640, 0o755):
        file.chmod(mode)
        write_text(file, f"{mode}")
        assert stat.S_IMODE(file.stat().st_mode) == mode
        assert file.read_text() == f"{mode}"


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_a_link(there: bool, tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    real, link = tmp_path / "far" / "real", tmp_path / "link"
    if there:
        real.write_text("old")
    link.symlink_to("far/real")
    write_text(link, "new")
    assert link.is_symlink()
    assert real.read_text() == "new"
    assert only(tmp_path / "far") == ["real"]


def test_what_is_no_file_is_written_as_it_is(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(pipe, "through")
        assert os.read(reader, 99) == b"through"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_standard_output_that_is_a_file_is_written_on(tmp_path: Path) -> None:
    """`{ echo head; schedir export …; } > file` keeps the head, and stays one file."""
    code = """import os
from schedir.files import write_text
os.write(1, b"head\\n")
before = os.fstat(1).st_ino
write_text("/dev/stdout", "body")
assert os.stat("file").st_ino == before"""
    with (tmp_path / "file").open("a") as opened:
        subprocess.run([commands() / "python", "-c", code], stdout=opened, cwd=tmp_path, check=True)
    assert only(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text().endswith("body")


def test_what_can_not_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("mine")
    for path, kind in {
        tmp_path: IsADirectoryError,
        tmp_path / "none" / "file": FileNotFoundError,
        tmp_path / "file" / "below": NotADirectoryError,
    }.items():
        for write in (check_writable, lambda path: write_text(path, "new")):
            with pytest.raises(kind) as refused:
                write(path)
            assert refused.value.filename == str(path)
    for denied in (tmp_path / "file", tmp_path):  # which root may write in all the same
        with monkeypatch.context() as patch:
            patch.setattr(os, "access", lambda path, mode, d=denied: Path(path) != d)
            with pytest.raises(PermissionError) as refused:
                write_text(tmp_path / "file", "new")
            assert refused.value.filename == str(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
    assert only(tmp_path) == ["file"]
