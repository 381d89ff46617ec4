"""The files of a checkpoint, written and read through torch.distributed.checkpoint (DCP).

    folder/.metadata              what there is, in which file, and each file's hash: valid at once
           __0_5f3a0c1e_0.distcp  what process 0 has saved: every save has files of its own,
           __1_5f3a0c1e_0.distcp  and those of the one before go when the new .metadata stands

So a folder has either no `.metadata`, and is no checkpoint, or is a complete one. No tensor is read
before all hashes have been found right.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
from collections.abc import Mapping, Sequence
from enum import EnumType
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from schedir.errors import ExecutionError
from schedir.training.checkpoints.agreeing import Gather, everywhere
from schedir.training.checkpoints.manifest import (
    Entry,
    HashingFiles,
    check_content,
    check_size,
    damaged,
    sealed,
    unreadable,
    unsealed,
)

_METADATA = ".metadata"
_FILE = "it is a file, not a folder"


def write(folder: Path, state: Mapping[str, Any], gather: Gather, number: int) -> None:
    """Write what each process holds of a nested dict of tensors; what several hold is written once.

    `number` is this process's among those that `gather` asks. What the folder held before stays
    good until all is written. Raises ExecutionError, on all processes, where one fails.
    """
    writer, planner = _Writer(folder), DefaultSavePlanner()
    first = number == 0

    def planned() -> SavePlan:
        if first:
            make_folder(folder)
        planner.set_up_planner(dict(state), is_coordinator=first)
        return planner.create_local_plan()

    def divided() -> tuple[list[SavePlan], Metadata] | None:
        if not first:
            return None
        plans, metadata = planner.create_global_plan(found)
        return writer.prepare_global_plan(plans), metadata

    def written() -> tuple[list[WriteResult], dict[str, Entry]]:
        results = writer.write_data(planner.finish_plan(plans[number]), planner).wait()
        return results, writer.files.entries({one.storage_data.relative_path for one in results})

    found = everywhere(gather, planned)
    ((plans, metadata),) = filter(None, everywhere(gather, divided))
    try:
        results, entries = zip(*everywhere(gather, written), strict=True)
        files = {name: entry for own in entries for name, entry in own.items()}
        everywhere(gather, lambda: writer.publish(metadata, results, files) if first else None)
    except ExecutionError:
        if first:
            writer.withdraw()
        raise
    if first:
        writer.tidy(metadata)


def make_folder(folder: Path) -> None:
    """Make the folder of a checkpoint, if need be.

    Raises ExecutionError where it can't be made, or nothing can be written in it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = _FILE if folder.is_file() else f"the folder can't be made: {error.strerror}"
    else:
        if os.access(folder, os.W_OK | os.X_OK):
            return
        why = "the folder can't be written in"
    raise ExecutionError(f"no checkpoint can be saved in {folder}: {why}")


class _Writer(FileSystemWriter):
    """Gives every save files of its own, and exchanges the metadata in one go."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=False)
        self.fs = self.files = HashingFiles()  # which sync themselves

    @property
    def _mark(self) -> str:
        return self.save_id[:8]

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name the processes' files."""
        return [
            dataclasses.replace(
                plan,
                storage_data=dataclasses.replace(
                    plan.storage_data, prefix=f"{plan.storage_data.prefix}{self._mark}_"
                ),
            )
            for plan in super().prepare_global_plan(plans)
        ]

    def _get_metadata_path(self, rank: int | None = None) -> os.PathLike[str]:
        return Path(self.path, f"{_METADATA}.{self._mark}")

    def publish(
        self,
        metadata: Metadata,
        results: Sequence[list[WriteResult]],
        files: Mapping[str, Entry],
    ) -> None:
        """Make it a checkpoint. DCP itself takes the old metadata away before it has the new."""
        self.finish(metadata, list(results))
        file = Path(self._get_metadata_path())
        content = sealed(file.read_bytes(), files)
        with self.files.create_stream(file, "wb") as stream:
            stream.write(content)
        file.replace(Path(self.path, _METADATA))

    def withdraw(self) -> None:
        """Leave nothing of this save."""
        for file in Path(self.path).glob(f"*{self._mark}*"):
            file.unlink(missing_ok=True)

    def tidy(self, metadata: Metadata) -> None:
        """Remove what earlier saves have left, whole or not."""
        kept = {info.relative_path for info in metadata.storage_data.values()}
        for pattern in ("*.distcp", f"{_METADATA}.*"):
            for file in Path(self.path).glob(pattern):
                if file.name not in kept:
                    file.unlink(missing_ok=True)


class Stored:
    """A complete checkpoint in a folder, of which nothing but the metadata has been read.

    `sizes` are the shapes of all its tensors, `paths` where each is in the nested dict, by name;
    `mark` tells checkpoints apart. What tensors hold may be read after `check` alone.

    Raises ExecutionError where there is none, DamagedError where files are missing or cut off, or
    the metadata are not what was saved.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        file = folder / _METADATA
        if not is_complete(folder):
            raise _incomplete(folder)
        try:
            content = file.read_bytes()
        except OSError as error:
            raise unreadable(file, error) from error
        pickled, self._files = unsealed(content, file)
        for name in self._files:
            if Path(name).name != name:
                raise _elsewhere(file, name)
        for name, entry in self._files.items():
            check_size(folder / name, entry)
        self.mark = content[-64:]
        self._reader = FileSystemReader(folder)
        try:
            self._metadata = _metadata(pickled)
        except Exception as error:  # a pickle may raise anything
            raise ExecutionError(f"{file} is of no checkpoint: {error}", cause=error) from error
        for info in self._metadata.storage_data.values():
            if info.relative_path not in self._files:
                raise _elsewhere(file, info.relative_path)
        listed = self._metadata.state_dict_metadata.items()
        self._tensors = {k: v for k, v in listed if isinstance(v, TensorStorageMetadata)}
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def check(self, number: int, processes: int) -> None:
        """Compare a process's share of the files with their hashes: each file is read by one.

        Raises DamagedError where one is not what was saved.
        """
        for name in sorted(self._files, key=lambda name: self._files[name].size)[number::processes]:
            check_content(self.folder / name, self._files[name])

    @property
    def sizes(self) -> dict[str, torch.Size]:
        """The shapes of all tensors, by name."""
        return {name: one.size for name, one in self._tensors.items()}

    @property
    def paths(self) -> Mapping[str, tuple[str, ...]]:
        """The keys that lead to each tensor in the nested dict."""
        return dict(self._metadata.planner_data or {})

    def empty(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """A tensor to read one into."""
        one = self._tensors[name]
        return torch.empty(one.size, dtype=one.properties.dtype, device=device)

    def read_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors, by name; nothing else is read."""
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner(dict(tensors), self._metadata, is_coordinator=True)
        plan = planner.finish_plan(planner.create_local_plan())
        self._reader.read_data(plan, planner).wait()


def _elsewhere(file: Path, name: str) -> ExecutionError:
    return ExecutionError(f"{file} names a file elsewhere: {name!r}")


def is_complete(folder: Path) -> bool:
    """Whether a checkpoint is there."""
    return (folder / _METADATA).is_file()


def _incomplete(folder: Path) -> ExecutionError:
    what = f"there is no complete checkpoint in {folder}: "
    if not folder.is_dir():
        return ExecutionError(what + (_FILE if folder.exists() else "there is no such folder"))
    why = f"it has no {_METADATA}"
    if any(folder.glob("*.distcp")):
        why = f"it has data, but no {_METADATA}, as after a save that was interrupted"
    return damaged(what + why)


def _metadata(pickled: bytes) -> Metadata:
    """What DCP has pickled, read without running what a pickle may ask for."""
    found = _Unpickler(io.BytesIO(pickled)).load()
    if not isinstance(found, Metadata):
        raise TypeError(f"it holds a {type(found).__name__}")
    return found


class _Unpickler(pickle.Unpickler):
    _MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")

    def find_class(self, module: str, name: str) -> Any:
        """Only what describes tensors, and where they are."""
        if module in ("pathlib", "pathlib._local") and name.endswith("Path"):
            return lambda *parts: os.path.join(*parts)  # where it was saved
        if (module, name) == ("torch.serialization", "_get_layout"):
            return torch.serialization._get_layout
        found = super().find_class(module, name) if module in ("torch", *self._MODULES) else None
        if isinstance(found, torch.dtype) or found is torch.Size:
            return found
        is_data = dataclasses.is_dataclass(found) or isinstance(found, EnumType)
        if is_data and getattr(found, "__module__", "") in self._MODULES:
            return found
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")
