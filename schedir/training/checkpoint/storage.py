"""The files of a checkpoint, in the format of torch.distributed.checkpoint (DCP).

    folder/.metadata              the tensors, their files, and each file's hash
           __0_5f3a0c1e_0.distcp  saved by process 0; every save writes new files, and removes
           __1_5f3a0c1e_0.distcp  those of the save before once the new .metadata is in place

A folder without `.metadata` is no checkpoint, and a folder with it is a complete one; a new folder
is made aside, and renamed at the end. No tensor is read before all hashes are checked. DCP pickles
its own data into `.metadata`, and does not read behind it. There stand the size and the SHA-256 of
every other file, so one rename makes both valid:

    {"schedir checkpoint": 2, "step": 90,
     "files": {"__0_5f3a0c1e_0.distcp": {"size": 9, "sha256": "…"}}}   (on one line)
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
import math
import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import EnumType
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.tensor import DTensor

from schedir.errors import ExecutionError

METADATA = ".metadata"
VERSION = 2
"""The version of a checkpoint's content and of the hashes behind its metadata."""

Entry: TypeAlias = dict[str, Any]
"""A file's `size` in bytes, and its `sha256` in hexadecimal."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FILE = "it is a file, not a folder"
_KEY = "schedir checkpoint"
_OTHER = "it does not have the hash that was saved with it"
_SEAL = 64  # characters of a SHA-256


class DamagedError(ExecutionError):
    """A checkpoint is damaged; the one before it may be whole."""


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


def make_folder(folder: Path, at: Path) -> None:
    """Make a folder, if needed, perhaps `at` another place first.

    Raises ExecutionError if it can't be made, or if it is not writable.
    """
    try:
        at.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = _FILE if folder.is_file() else f"the folder can't be made: {error.strerror}"
    else:
        if os.access(at, os.W_OK | os.X_OK):
            return
        why = "the folder is not writable"
    raise ExecutionError(f"no checkpoint can be saved in {folder}: {why}")


def is_complete(folder: Path) -> bool:
    """Whether a checkpoint is there."""
    return (folder / METADATA).is_file()


def step_of(folder: Path) -> float:
    """The number of the step after which a checkpoint was saved; infinity if it can't be read."""
    file = folder / METADATA
    with suppress(OSError, ValueError, ExecutionError):
        _, manifest = unsealed(file.read_bytes(), file)
        # A file had it before the manifest did.
        return float(manifest["step"] if "step" in manifest else (folder / "steps").read_text())
    return math.inf


class Stored:
    """A complete checkpoint in a folder; only its metadata has been read.

    `sizes` are the shapes of all its tensors and `paths` their places in the nested dict, by name;
    `mark` tells checkpoints apart. Call `check` before you read tensors.

    Raises ExecutionError if there is none, DamagedError if the metadata has changed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        file = folder / METADATA
        if not is_complete(folder):
            what = f"there is no complete checkpoint in {folder}: "
            if folder.is_dir():
                raise _damaged(f"{what}it has no .metadata, as after a save that was interrupted")
            raise ExecutionError(what + (_FILE if folder.exists() else "there is no such folder"))
        with _reading(file):
            content = file.read_bytes()
        pickled, manifest = unsealed(content, file)
        self._files: dict[str, Entry] = manifest["files"]
        self.mark = content[-_SEAL:]
        try:
            self._metadata = unpickled(pickled)
            if not isinstance(self._metadata, Metadata):
                raise TypeError(f"it holds a {type(self._metadata).__name__}")
        except Exception as error:  # a pickle may raise anything
            raise ExecutionError(
                f"{file} is not the metadata of a checkpoint: {error}", cause=error
            ) from error
        used = {info.relative_path for info in self._metadata.storage_data.values()}
        for name in used | self._files.keys():
            if name not in self._files or Path(name).name != name:
                raise ExecutionError(
                    f"{file} names a file elsewhere: {name!r}; a checkpoint reads files of its "
                    "folder only"
                )
        self._tensors = {
            name: one
            for name, one in self._metadata.state_dict_metadata.items()
            if isinstance(one, TensorStorageMetadata)
        }
        self.sizes = {name: one.size for name, one in self._tensors.items()}
        self.paths: Mapping[str, tuple[str, ...]] = self._metadata.planner_data or {}
        self._reader = FileSystemReader(folder)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def check(self, number: int, processes: int) -> None:
        """Compare a process's share of the files with their hashes: one process reads each file.

        Raises DamagedError if a file is missing or has changed.
        """
        by_size = sorted(self._files, key=lambda name: self._files[name]["size"])
        for name in by_size[number::processes]:
            file = self.folder / name
            with _reading(file), file.open("rb") as opened:
                found = hashlib.file_digest(opened, "sha256").hexdigest()  # piece by piece
            if found != self._files[name]["sha256"]:
                raise _damaged(f"{file} is damaged: {_OTHER}")

    def empty(self, name: str, like: Tensor | None = None) -> Tensor:
        """Make an empty tensor to read a saved one into, split and placed as another one is.
        Numbers, such as the steps of Adam, are on the CPU."""
        one = self._tensors[name]
        dtype = one.properties.dtype
        if isinstance(like, DTensor) and one.size:
            return torch.empty_like(like, dtype=dtype)
        device = "cpu" if like is None or not one.size else like.device
        return torch.empty(one.size, dtype=dtype, device=device)

    def read_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors, by name; nothing else is read."""
        planner = _TensorPlanner(flatten_state_dict=False)
        planner.set_up_planner(dict(tensors), self._metadata, is_coordinator=True)
        plan = planner.finish_plan(planner.create_local_plan())
        self._reader.read_data(plan, planner).wait()

    @cached_property
    def training(self) -> Any:
        """The plain values of the training, such as its step and its optimisers' options."""
        return self.value("training")

    def value(self, *names: str) -> Any:
        """Read the plain value of the first of these names that is there; None if none is."""
        for name in names:
            if name in self._tensors:
                content = self.empty(name)
                self.read_into({name: content})
                return _unpacked(content, f"{name} of {self.folder}")
        return None


class _TensorPlanner(DefaultLoadPlanner):
    """Loads tensors only: DCP itself unpickles plain values, which can run code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Refuse a value that is no tensor."""
        raise ExecutionError(f"{read_item.dest_index.fqn} is no tensor in the checkpoint")


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


def sealed(metadata: bytes, manifest: Mapping[str, Any]) -> bytes:
    """Write the manifest of the other files behind the metadata."""
    body = metadata + f"\n{json.dumps({_KEY: VERSION, **manifest})}\n".encode()
    return body + hashlib.sha256(body).hexdigest().encode()


def unsealed(content: bytes, file: Path) -> tuple[bytes, dict[str, Any]]:
    """Separate the metadata and the manifest in `file`.

    Raises DamagedError if they have changed, ExecutionError if another version of schedir wrote
    them.
    """
    body, seal = content[:-_SEAL], content[-_SEAL:]
    if hashlib.sha256(body).hexdigest().encode() != seal:
        raise _damaged(
            f"{file} is damaged: {_OTHER}; or it is not schedir's, or older than schedir's hashes "
            "(torch.distributed.checkpoint reads such a folder unchecked)"
        )
    metadata, last = body[:-1].rsplit(b"\n", 1)
    manifest = json.loads(last)
    if manifest[_KEY] != VERSION:
        raise ExecutionError(
            f"{file} has format {manifest[_KEY]}, but this version of schedir reads format "
            f"{VERSION}: load it with the version that saved it"
        )
    return metadata, manifest


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


def unpickled(content: bytes) -> Any:
    """Read a pickle of DCP's classes. Raises UnpicklingError if it refers to anything else."""
    return _Unpickler(io.BytesIO(content)).load()


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
