"""The one way to write a file: to a temporary file first, which then replaces the old file."""

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
"""Paths of open files, which other programs may be writing to as well."""


@contextmanager
def replacing(path: str | PathLike[str]) -> Iterator[TextIO]:
    """Open a UTF-8 text file that replaces the file at `path` when the block ends.

    Until then, and if the block raises, `path` stays unchanged. The new file keeps the old
    permissions and, if the user may set it, the old owner. If `path` is a link, the file that it
    points to is replaced. A pipe or /dev/stdout is written to directly.

    Raises OSError if nothing can be written, as `check_writable` does.
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
    """The status of the file at `path`, None if there is no file.

    Raises OSError, with the path, if `path` is a folder, or if the user may not write to it or to
    its folder.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError:
        found = None
    folder = os.path.dirname(os.path.realpath(path))
    if found is not None and stat.S_ISDIR(found.st_mode):
        wrong = errno.EISDIR
    elif _is_stream(path, found):
        return found
    elif found is not None and not os.access(path, os.W_OK):
        wrong = errno.EACCES
    elif not os.path.isdir(folder):
        wrong = errno.ENOENT
    elif not os.access(folder, os.W_OK | os.X_OK):
        # Aside is beside it: another folder may be on another disk.
        raise OSError(errno.EACCES, "its folder can't be written in", os.fspath(path))
    else:
        return found
    raise OSError(wrong, os.strerror(wrong), os.fspath(path))


def _is_stream(path: str | PathLike[str], found: os.stat_result | None) -> bool:
    regular = found is None or stat.S_ISREG(found.st_mode)
    return not regular or os.path.abspath(path).startswith(_STREAMS)
