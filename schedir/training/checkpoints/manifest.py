"""The size and the SHA-256 of every file of a checkpoint, written behind its metadata.

    what torch.distributed.checkpoint pickles into .metadata; it reads no further
    {"schedir checkpoint": 2, "files": {"__0_5f3a0c1e_0.distcp": {"size": 9, "sha256": "…"}}}
    the SHA-256 of all above

They share a file so that one rename makes both valid.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import attrs
from torch.distributed.checkpoint.filesystem import FileSystem

from schedir.errors import ExecutionError

VERSION = 2
"""Of a checkpoint's content and its manifest."""

_KEY = "schedir checkpoint"
_OTHER = "it does not have the hash that was saved with it"
_SEAL = 64  # characters of a SHA-256


class DamagedError(ExecutionError):
    """A checkpoint is not what was saved; the one before it may be."""


@attrs.frozen
class Entry:
    """A file's size in bytes, and its SHA-256 in hexadecimal."""

    size: int
    sha256: str


class HashingFiles(FileSystem):
    """Writes files, hashing what is written, and has them on the disk when they are closed."""

    def __init__(self) -> None:
        self._streams: dict[str, _Hashing] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a file to write it anew, whatever the mode."""
        with _Hashing(path) as stream:
            self._streams[Path(path).name] = stream
            yield cast(io.IOBase, stream)

    def entries(self, names: Iterable[str]) -> dict[str, Entry]:
        """The entries of files that have been written."""
        return {name: self._streams[name].entry for name in names}


class _Hashing(io.BufferedWriter):
    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(io.FileIO(path, "w"))
        self._size, self._hash = 0, hashlib.sha256()

    def write(self, data: bytes | memoryview, /) -> int:  # type: ignore[override]
        self._hash.update(data)
        self._size += len(data)
        return super().write(data)

    def close(self) -> None:
        try:
            if not self.closed:
                self.flush()
                os.fsync(self.fileno())
        finally:
            super().close()

    @property
    def entry(self) -> Entry:
        return Entry(self._size, self._hash.hexdigest())


def sealed(metadata: bytes, files: Mapping[str, Entry]) -> bytes:
    """Metadata with the manifest of the other files behind it."""
    held = {name: attrs.asdict(entry) for name, entry in files.items()}
    body = metadata + f"\n{json.dumps({_KEY: VERSION, 'files': held})}\n".encode()
    return body + hashlib.sha256(body).hexdigest().encode()


def unsealed(content: bytes, file: Path) -> tuple[bytes, dict[str, Entry]]:
    """The metadata and the manifest that `file` holds.

    Raises DamagedError where they are not what was written, ExecutionError where another version of
    schedir wrote them.
    """
    body, seal = content[:-_SEAL], content[-_SEAL:]
    if hashlib.sha256(body).hexdigest().encode() != seal:
        if f'\n{{"{_KEY}"'.encode() in content:
            raise damaged(f"{file} is damaged: {_OTHER}")
        raise damaged(
            f"{file} is damaged, or from before checkpoints had hashes, or not schedir's: there is "
            "no hash in it (torch.distributed.checkpoint reads such a folder unchecked)"
        )
    metadata, manifest = body[:-1].rsplit(b"\n", 1)
    held = json.loads(manifest)
    if held[_KEY] != VERSION:
        raise ExecutionError(
            f"{file} is of format {held[_KEY]}, and this version of schedir knows format {VERSION}"
        )
    return metadata, {name: Entry(**entry) for name, entry in held["files"].items()}


def check_size(file: Path, entry: Entry) -> None:
    """Raise DamagedError unless a file is there and as long as it was."""
    try:
        size = file.stat().st_size
    except OSError as error:
        raise unreadable(file, error) from error
    if size != entry.size:
        raise damaged(f"{file} is damaged: it has {size} bytes, and had {entry.size}")


def check_content(file: Path, entry: Entry) -> None:
    """Raise DamagedError unless a file holds what it held; it is read piece by piece."""
    try:
        with file.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise unreadable(file, error) from error
    if found != entry.sha256:
        raise damaged(f"{file} is damaged: {_OTHER}")


def unreadable(file: Path, error: OSError) -> DamagedError:
    """The error for a file that is missing, or that the disk does not give back."""
    missing = isinstance(error, FileNotFoundError)
    why = "is missing" if missing else f"can't be read: {error.strerror}"
    return damaged(f"{file} {why}", error)


def damaged(what: str, cause: BaseException | None = None) -> DamagedError:
    """The error for a checkpoint that can't be loaded, with the way on."""
    return DamagedError(f"{what}; load the checkpoint before this one", cause=cause)
