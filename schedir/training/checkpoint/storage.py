"""Write and read the files of a checkpoint through torch.distributed.checkpoint (DCP).

    folder/.metadata              the tensors, their files, and each file's hash
           __0_5f3a0c1e_0.distcp  saved by process 0; every save writes new files, and removes
           __1_5f3a0c1e_0.distcp  those of the save before once the new .metadata is in place

So a folder without `.metadata` is no checkpoint, and a folder with it is a complete one. No tensor
is read before all hashes are checked. DCP pickles its own data into `.metadata`, and does not read
behind it. There stand the size and the SHA-256 of every other file, so one rename makes both valid:

    {"schedir checkpoint": 2, "files": {"__0_5f3a0c1e_0.distcp": {"size": 9, "sha256": "…"}}}
    the SHA-256 of all above

Plain values are kept as bytes in a tensor: DCP itself would pickle them, and reading a pickle can
run code.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import io
import json
import os
import pickle
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import EnumType
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
    _StoragePrefix,
)
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from schedir.errors import ExecutionError
from schedir.training.checkpoint.collective import Gather, everywhere

VERSION = 2
"""The version of a checkpoint's content and of the hashes behind its metadata."""

Entry: TypeAlias = dict[str, Any]
"""A file's `size` in bytes, and its `sha256` in hexadecimal."""

Part: TypeAlias = tuple[list[WriteResult], dict[str, Entry]]
"""What a process has written: where its tensors are, and its files."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_METADATA = ".metadata"
_FILE = "it is a file, not a folder"
_KEY = "schedir checkpoint"
_OTHER = "it does not have the hash that was saved with it"
_SEAL = 64  # characters of a SHA-256


class DamagedError(ExecutionError):
    """A checkpoint is damaged; the one before it may be whole."""


def write(folder: Path, state: Mapping[str, Any], gather: Gather, number: int) -> None:
    """Write a nested dict of tensors, each process its part; a part of several is written once.

    `number` is this process's number among those of `gather`. An older checkpoint in the folder
    stays valid until everything is written. Raises ExecutionError on all processes if one fails.
    """
    save = Save(folder, state, gather, number)
    try:
        parts = everywhere(gather, save.write)
        everywhere(gather, lambda: save.publish(parts))
    except ExecutionError:
        save.discard()
        raise


class Save:
    """One save, which all processes plan together when they make it.

    Then each process calls `write`, in any thread, and the first one calls `publish` with the parts
    of all. A process can leave its part in the folder (`leave`) for the first one (`found`).
    """

    def __init__(self, folder: Path, state: Mapping[str, Any], gather: Gather, number: int) -> None:
        self.is_first = first = number == 0
        self.folder, self._number = folder, number
        self._writer, self._planner = _Writer(folder), DefaultSavePlanner()
        self._is_published = False

        def planned() -> SavePlan:
            if first:
                make_folder(folder)
            self._planner.set_up_planner(dict(state), is_coordinator=first)
            return self._planner.create_local_plan()

        def divided() -> tuple[list[SavePlan], Metadata] | None:
            if not first:
                return None
            plans, metadata = self._planner.create_global_plan(found)
            return self._writer.prepare_global_plan(plans), metadata

        found = everywhere(gather, planned)
        ((self._plans, self._metadata),) = filter(None, everywhere(gather, divided))

    def write(self) -> Part:
        """Write the files of this process. Raises ExecutionError if that fails."""
        plan = self._planner.finish_plan(self._plans[self._number])
        results = self._writer.write_data(plan, self._planner).wait()
        names = {one.storage_data.relative_path for one in results}
        return results, {name: self._writer.files.streams[name].entry for name in names}

    def leave(self, part: Part) -> None:
        """Leave this process's part, which `write` has returned, in the folder."""
        file = self._left()[self._number]
        aside = file.with_name(f"{file.name}.tmp")
        with self._writer.files.create_stream(aside, "wb") as stream:
            pickle.dump(part, stream)
        aside.replace(file)

    def found(self) -> list[Part] | None:
        """The parts of all processes; None until all have left theirs."""
        files = self._left()
        if not all(file.exists() for file in files):
            return None
        return [_Unpickler(io.BytesIO(file.read_bytes())).load() for file in files]

    def publish(self, parts: Sequence[Part]) -> None:
        """Make the checkpoint valid, and remove the files of earlier saves, complete or not; on the
        first process only."""
        if not self.is_first:
            return
        files = {name: entry for _, own in parts for name, entry in own.items()}
        results = [results for results, _ in parts]
        self._writer.publish(self._metadata, results, files)
        self._is_published = True
        kept = {result.storage_data.relative_path for own in results for result in own}
        _remove(self.folder, "*.distcp", f"{_METADATA}.*", but=kept)

    def discard(self) -> None:
        """Remove what a save that failed has written; on the first process only."""
        if self.is_first and not self._is_published:
            _remove(self.folder, f"*{self._writer.mark}*")

    def _left(self) -> list[Path]:
        """The files in which the processes leave their parts."""
        return [self.folder / f"{_METADATA}.{p.storage_data.prefix}" for p in self._plans]


@contextmanager
def writing(file: str | os.PathLike[str]) -> Iterator[None]:
    """Raise ExecutionError, with the file's name, if it can't be written."""
    try:
        yield
    except OSError as error:
        mend = "make room there, or save" if error.errno in _FULL else "save"
        raise ExecutionError(
            f"{file} can't be written: {error.strerror}; {mend} in another folder (a checkpoint "
            "that was complete before is still good)",
            cause=error,
        ) from error


def make_folder(folder: Path) -> None:
    """Make the folder of a checkpoint, if needed.

    Raises ExecutionError if it can't be made, or if it is not writable.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = _FILE if folder.is_file() else f"the folder can't be made: {error.strerror}"
    else:
        if os.access(folder, os.W_OK | os.X_OK):
            return
        why = "the folder is not writable"
    raise ExecutionError(f"no checkpoint can be saved in {folder}: {why}")


def is_complete(folder: Path) -> bool:
    """Whether a checkpoint is there."""
    return (folder / _METADATA).is_file()


class Stored:
    """A complete checkpoint in a folder; only its metadata has been read.

    `sizes` are the shapes of all its tensors and `paths` their places in the nested dict, by name;
    `mark` tells checkpoints apart. Call `check` before you read tensors.

    Raises ExecutionError if there is none, DamagedError if files are missing or cut off, or if the
    metadata has changed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        file = folder / _METADATA
        if not is_complete(folder):
            what = f"there is no complete checkpoint in {folder}: "
            if not folder.is_dir():
                what += _FILE if folder.exists() else "there is no such folder"
                raise ExecutionError(what)
            if any(folder.glob("*.distcp")):
                what += "it has data but no .metadata, as after a save that was interrupted"
            else:
                what += "it has no .metadata"
            raise _damaged(what)
        with _reading(file):
            content = file.read_bytes()
        pickled, self._files = unsealed(content, file)
        self.mark = content[-_SEAL:]
        for name, entry in self._files.items():
            if Path(name).name != name:
                raise _elsewhere(file, name)
            with _reading(folder / name):
                size = (folder / name).stat().st_size
            if size != entry["size"]:
                raise _damaged(
                    f"{folder / name} is damaged: it has {size} bytes, and had {entry['size']}"
                )
        try:
            self._metadata = _Unpickler(io.BytesIO(pickled)).load()
            if not isinstance(self._metadata, Metadata):
                raise TypeError(f"it holds a {type(self._metadata).__name__}")
        except Exception as error:  # a pickle may raise anything
            raise ExecutionError(
                f"{file} is not the metadata of a checkpoint: {error}", cause=error
            ) from error
        for info in self._metadata.storage_data.values():
            if info.relative_path not in self._files:
                raise _elsewhere(file, info.relative_path)
        listed = self._metadata.state_dict_metadata.items()
        self._tensors = {k: v for k, v in listed if isinstance(v, TensorStorageMetadata)}
        self.sizes = {name: one.size for name, one in self._tensors.items()}
        self.paths: Mapping[str, tuple[str, ...]] = self._metadata.planner_data or {}
        self._reader = FileSystemReader(folder)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def check(self, number: int, processes: int) -> None:
        """Compare a process's share of the files with their hashes: one process reads each file.

        Raises DamagedError if a file has changed.
        """
        for name in sorted(self._files, key=lambda name: self._files[name]["size"])[
            number::processes
        ]:
            file = self.folder / name
            with _reading(file), file.open("rb") as opened:
                found = hashlib.file_digest(opened, "sha256").hexdigest()  # piece by piece
            if found != self._files[name]["sha256"]:
                raise _damaged(f"{file} is damaged: {_OTHER}")

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a saved tensor."""
        return self._tensors[name].properties.dtype

    def empty(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """Make an empty tensor to read a saved one into."""
        one = self._tensors[name]
        return torch.empty(one.size, dtype=self.dtype(name), device=device)

    def read_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors, by name; nothing else is read."""
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner(dict(tensors), self._metadata, is_coordinator=True)
        plan = planner.finish_plan(planner.create_local_plan())
        self._reader.read_data(plan, planner).wait()

    @cached_property
    def training(self) -> dict[str, Any]:
        """The plain values of the training, such as its step and its optimisers' options."""
        found: dict[str, Any] = self.value("training")
        return found

    def value(self, *names: str) -> Any:
        """Read the plain value of the first of these names that is there; None if none is."""
        for name in names:
            if name in self._tensors:
                content = self.empty(name)
                self.read_into({name: content})
                return _unpacked(content, f"{name} of {self.folder}")
        return None


def packed(value: Any, what: str) -> Tensor:
    """Turn numbers, strings, tensors, and lists, tuples and dicts of them into a vector of bytes.

    Raises ExecutionError if the value holds anything else: reading it back would run code from a
    file.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        _unpacked(
            content := torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8), what
        )
    except (pickle.PicklingError, AttributeError, TypeError, ExecutionError) as error:
        raise ExecutionError(
            f"{what} can't be kept in a checkpoint, which takes only tensors, numbers, strings, "
            f"and lists, tuples and dicts of them: {error}",
            cause=error,
        ) from error
    return content


def sealed(metadata: bytes, files: dict[str, Entry]) -> bytes:
    """Write the manifest of the other files behind the metadata."""
    body = metadata + f"\n{json.dumps({_KEY: VERSION, 'files': files})}\n".encode()
    return body + hashlib.sha256(body).hexdigest().encode()


def unsealed(content: bytes, file: Path) -> tuple[bytes, dict[str, Entry]]:
    """Separate the metadata and the manifest in `file`.

    Raises DamagedError if they have changed, ExecutionError if another version of schedir wrote
    them.
    """
    body, seal = content[:-_SEAL], content[-_SEAL:]
    if hashlib.sha256(body).hexdigest().encode() != seal:
        if f'\n{{"{_KEY}"'.encode() in content:
            raise _damaged(f"{file} is damaged: {_OTHER}")
        raise _damaged(
            f"{file} has no hash: it is damaged, older than schedir's hashes, or not schedir's "
            "(torch.distributed.checkpoint reads such a folder unchecked)"
        )
    metadata, manifest = body[:-1].rsplit(b"\n", 1)
    held = json.loads(manifest)
    if held[_KEY] != VERSION:
        raise ExecutionError(
            f"{file} has format {held[_KEY]}, but this version of schedir reads format {VERSION}: "
            "load it with the version that saved it"
        )
    return metadata, held["files"]


def _unpacked(content: Tensor, what: str) -> Any:
    """Read a packed value, on the CPU. Raises ExecutionError if the bytes are no packed value."""
    try:
        return torch.load(
            io.BytesIO(content.numpy().tobytes()), map_location="cpu", weights_only=True
        )
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).splitlines()[0]
        raise ExecutionError(f"{what} can't be read: {reason}", cause=error) from error


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Raise DamagedError if a file is missing or can't be read."""
    try:
        yield
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        why = "is missing" if missing else f"can't be read: {error.strerror}"
        raise _damaged(f"{file} {why}", error) from error


def _damaged(what: str, cause: BaseException | None = None) -> DamagedError:
    """The error for a damaged checkpoint, with advice."""
    return DamagedError(f"{what}; load the checkpoint before this one", cause=cause)


class _Writer(FileSystemWriter):
    """Writes new files in every save, and replaces the metadata in one go."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=False)
        self.fs = self.files = _HashingFiles()  # they sync themselves

    @property
    def mark(self) -> str:
        """The part that all names of this save's files share."""
        return self.save_id[:8]

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name the processes' files."""
        return [
            dataclasses.replace(plan, storage_data=_StoragePrefix(f"__{number}_{self.mark}_"))
            for number, plan in enumerate(plans)
        ]

    def _get_metadata_path(self, rank: int | None = None) -> os.PathLike[str]:
        return Path(self.path, f"{_METADATA}.{self.mark}")

    def publish(
        self,
        metadata: Metadata,
        results: Sequence[list[WriteResult]],
        files: dict[str, Entry],
    ) -> None:
        """Rename the new metadata into place. DCP itself would remove the old metadata first."""
        self.finish(metadata, list(results))
        file = Path(self._get_metadata_path())
        content = sealed(file.read_bytes(), files)
        with self.files.create_stream(file, "wb") as stream:
            stream.write(content)
        file.replace(Path(self.path, _METADATA))


def _remove(folder: Path, *patterns: str, but: Container[str] = ()) -> None:
    for pattern in patterns:
        for file in folder.glob(pattern):
            if file.name not in but:
                file.unlink(missing_ok=True)


class _HashingFiles(FileSystem):
    """Writes files and hashes their content. A closed file is on the disk."""

    def __init__(self) -> None:
        self.streams: dict[str, _Hashing] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a new file for writing, whatever the mode."""
        with writing(path), _Hashing(path) as stream:
            self.streams[Path(path).name] = stream
            try:
                yield cast(io.IOBase, stream)
            except RuntimeError as error:  # torch.save's own words, in place of the system's
                raise stream.failure or error from error


class _Hashing(io.BufferedWriter):
    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(io.FileIO(path, "w"))
        self._size, self._hash = 0, hashlib.sha256()
        self.failure: OSError | None = None

    def write(self, data: bytes | memoryview, /) -> int:  # type: ignore[override]
        self._hash.update(data)
        self._size += len(data)
        try:
            return super().write(data)
        except OSError as error:
            self.failure = error
            raise

    def close(self) -> None:
        try:
            if not self.closed:
                self.flush()
                os.fsync(self.fileno())
        finally:
            super().close()

    @property
    def entry(self) -> Entry:
        return {"size": self._size, "sha256": self._hash.hexdigest()}


def _elsewhere(file: Path, name: str) -> ExecutionError:
    return ExecutionError(
        f"{file} names a file elsewhere: {name!r}; a checkpoint reads files of its folder only"
    )


class _Unpickler(pickle.Unpickler):
    """Reads DCP's pickle without running code from it."""

    _MODULES = tuple(
        f"torch.distributed.checkpoint.{of}" for of in ("metadata", "filesystem", "storage")
    )

    def find_class(self, module: str, name: str) -> Any:
        """Find only the classes that describe tensors and their places."""
        if module in ("pathlib", "pathlib._local") and name.endswith("Path"):
            return lambda *parts: os.path.join(*parts)  # the folder that it was saved in
        if (module, name) == ("torch.serialization", "_get_layout"):
            return torch.serialization._get_layout
        if (module, name) == ("builtins", "getattr"):
            return EnumType.__getitem__  # how Python before 3.11.4 pickles members
        found = super().find_class(module, name) if module in ("torch", *self._MODULES) else None
        if isinstance(found, torch.dtype) or found is torch.Size:
            return found
        is_data = dataclasses.is_dataclass(found) or isinstance(found, EnumType)
        if is_data and getattr(found, "__module__", "") in self._MODULES:
            return found
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")
