"""The one way to write a file: aside, until it is whole, and then in place of what was there."""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import TextIO

_STREAMS = ("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/")
"""What stands for an open file, which others may be writing to as well."""


@contextmanager
def replacing(path: str | PathLike[str]) -> Iterator[TextIO]:
    """Open a file of text, in UTF-8, that replaces the one at `path` when the block ends.

    Until then, and where the block raises, `path` is as it was. The file keeps its permissions and,
    where the user may give it away, its owner; of a link the file it leads to is replaced. What is
    no file, a pipe or /dev/stdout, is written to directly.

    Raises OSError, as `check_writable` where nothing can be written.
    """
    target, before = Path(os.path.realpath(path)), check_writable(path)
    if _is_stream(path, before):
        with open(path, "w", encoding="utf-8", newline="\n") as file:
            yield file
        return
    aside = target.with_name(f".schedir-{uuid.uuid4().hex}")
    try:
        with open(aside, "x", encoding="utf-8", newline="\n") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if before is not None:
            with suppress(OSError):
                os.chown(aside, before.st_uid, before.st_gid)
            aside.chmod(stat.S_IMODE(before.st_mode))
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)


def write_text(path: str | PathLike[str], text: str) -> None:
    """Write a whole file, as `replacing` does."""
    with replacing(path) as file:
        file.write(text)


def check_writable(path: str | PathLike[str]) -> os.stat_result | None:
    """What is at `path`, None where nothing is.

    Raises OSError, with the path, where it is a folder, or neither it nor its folder may be written
    to.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError:
        found = None
    if found is not None and stat.S_ISDIR(found.st_mode):
        raise _error(errno.EISDIR, path)
    if _is_stream(path, found):
        return found
    folder = Path(os.path.realpath(path)).parent
    if found is not None and not os.access(path, os.W_OK):
        raise _error(errno.EACCES, path)
    if not folder.is_dir():
        raise _error(errno.ENOENT, path)
    if not os.access(folder, os.W_OK | os.X_OK):
        # Aside is beside it: another folder may be on another disk.
        raise OSError(errno.EACCES, "its folder can't be written in", os.fspath(path))
    return found


def _is_stream(path: str | PathLike[str], found: os.stat_result | None) -> bool:
    regular = found is None or stat.S_ISREG(found.st_mode)
    return not regular or os.path.abspath(path).startswith(_STREAMS)


def _error(number: int, path: str | PathLike[str]) -> OSError:
    return OSError(number, os.strerror(number), os.fspath(path))
