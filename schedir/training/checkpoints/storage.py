"""The files of a checkpoint, written and read through torch.distributed.checkpoint (DCP).

    folder/.metadata              what there is, and in which file: takes effect in one go
           __0_5f3a0c1e_0.distcp  what process 0 has saved: every save has files of its own,
           __1_5f3a0c1e_0.distcp  and those of the one before go when the new .metadata stands

So a folder has either no `.metadata`, and is no checkpoint, or is a complete one.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
from collections.abc import Mapping
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

_METADATA = ".metadata"


def write(folder: Path, state: Mapping[str, Any], gather: Gather, number: int) -> None:
    """Write what each process holds of a nested dict of tensors; what several hold is written once.

    `number` is this process's among those that `gather` asks. What the folder held before stays
    good until all is written. Raises ExecutionError, on all processes, where one fails.
    """
    writer, planner = _Writer(folder), DefaultSavePlanner()
    first = number == 0

    def planned() -> SavePlan:
        if first:
            folder.mkdir(parents=True, exist_ok=True)
        planner.set_up_planner(dict(state), is_coordinator=first)
        return planner.create_local_plan()

    def divided() -> tuple[list[SavePlan], Metadata] | None:
        if not first:
            return None
        plans, metadata = planner.create_global_plan(found)
        return writer.prepare_global_plan(plans), metadata

    def written() -> list[WriteResult]:
        return writer.write_data(planner.finish_plan(plans[number]), planner).wait()

    found = everywhere(gather, planned)
    ((plans, metadata),) = filter(None, everywhere(gather, divided))
    try:
        results = everywhere(gather, written)
        everywhere(gather, lambda: writer.finish(metadata, results) if first else None)
    except ExecutionError:
        if first:
            writer.withdraw()
        raise
    if first:
        writer.tidy(metadata)


class _Writer(FileSystemWriter):
    """Gives every save files of its own, and exchanges the metadata in one go."""

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

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make it a checkpoint. DCP itself takes the old metadata away before it has the new."""
        super().finish(metadata, results)
        Path(self._get_metadata_path()).replace(Path(self.path, _METADATA))

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

    `sizes` are the shapes of all its tensors, `paths` where each is in the nested dict, by name.

    Raises ExecutionError where there is none, or files are missing or cut off.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._reader = folder, _Reader(folder)
        if not is_complete(folder):
            raise ExecutionError(f"there is no complete checkpoint in {folder}: {_why(folder)}")
        try:
            self._metadata = self._reader.read_metadata()
        except Exception as error:  # a damaged pickle may raise anything
            raise ExecutionError(
                f"{folder / _METADATA} is damaged, or of no checkpoint: {error}", cause=error
            ) from error
        self._check_files()
        listed = self._metadata.state_dict_metadata.items()
        self._tensors = {k: v for k, v in listed if isinstance(v, TensorStorageMetadata)}
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

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

    def _check_files(self) -> None:
        needed: dict[str, int] = {}
        for info in self._metadata.storage_data.values():
            end = info.offset + info.length
            needed[info.relative_path] = max(end, needed.get(info.relative_path, 0))
        for name, size in needed.items():
            file = self.folder / name
            found = file.stat().st_size if file.exists() else None
            if found is None or found < size:
                has = "is missing" if found is None else f"has {found} bytes of {size}"
                raise ExecutionError(f"the checkpoint in {self.folder} is incomplete: {name} {has}")


def is_complete(folder: Path) -> bool:
    """Whether a checkpoint is there."""
    return (folder / _METADATA).is_file()


def _why(folder: Path) -> str:
    if not folder.is_dir():
        return "there is no such folder"
    if any(folder.glob("*.distcp")):
        return f"it has data, but no {_METADATA}, as after a save that was interrupted"
    return f"it has no {_METADATA}"


class _Reader(FileSystemReader):
    """Reads the metadata, which DCP pickles, without running what a pickle may ask for."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What there is."""
        with Path(self.path, _METADATA).open("rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"it holds a {type(metadata).__name__}")
        return metadata


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
