"""Write the files of a checkpoint, at once or while the training goes on.

main thread        copies the state to host memory ─▶ step ─▶ step ─▶ wait: all processes agree
another thread     writes this process's file, and leaves its name and hash in the folder
that of process 0  then waits for what the others leave, and makes the checkpoint valid

These threads send each other no messages: the executor's connections belong to the main thread.
DCP's planner and writer do the work, but for the way that processes meet, and for the hashes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import logging
import math
import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread, main_thread
from time import monotonic, perf_counter
from typing import Any, TypeAlias, cast
from uuid import uuid4

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter, _StoragePrefix
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.utils._pytree import KeyPath, tree_map_with_path

from schedir.errors import ExecutionError
from schedir.runtime.accelerator import accelerator_of
from schedir.runtime.sharded import local
from schedir.training.checkpoint.storage import (
    METADATA,
    Entry,
    make_folder,
    sealed,
    unpickled,
    writing,
)
from schedir.training.collective import Gather, everywhere

logger = logging.getLogger("schedir")

Part: TypeAlias = tuple[list[WriteResult], dict[str, Entry]]
"""What a process has written: where its tensors are, and its files."""

_PAUSE = 0.05  # seconds from look to look for what other processes leave
_PATIENCE = 10.0  # seconds to wait for it after a failure, as another process may be gone


class Save:
    """One save of a nested dict, which all processes plan together when they make it.

    Each process writes its part; a part that several have is written once. `step` is that of the
    training. An older checkpoint in the folder stays valid until the new one is complete.

    Call `complete`; or each process calls `write_and_leave`, in any thread, and the first one calls
    `publish` with the parts that all have left (`found`).
    """

    def __init__(self, folder: Path, state: Mapping[str, Any], gather: Gather, step: int) -> None:
        self.folder, self.gather, self._step = folder, gather, step
        self._files, self._planner = _HashingFiles(), DefaultSavePlanner()
        self._is_published = False
        own = uuid4().hex

        def planned() -> tuple[SavePlan, str, bool]:
            self._planner.set_up_planner(dict(state))
            return self._planner.create_local_plan(), own, folder.exists()

        self._plans, marks, exist = zip(*everywhere(gather, planned), strict=True)
        self._number, self._mark, self._is_new = marks.index(own), marks[0][:8], not exist[0]
        self.is_first = self._number == 0
        self._at = folder.with_name(f".{folder.name}.saving") if self._is_new else folder

    def complete(self) -> None:
        """Write and publish. Raises ExecutionError on all processes if one fails."""
        try:
            parts = everywhere(self.gather, self.write)
            everywhere(self.gather, lambda: self.publish(parts))
        except ExecutionError:
            self.discard()
            raise

    def write(self) -> Part:
        """Write the file of this process. Raises ExecutionError if that fails."""
        make_folder(self.folder, self._at)
        plans, self._metadata = self._planner.create_global_plan([*self._plans])
        prefix = _StoragePrefix(f"__{self._number}_{self._mark}_")
        plan = dataclasses.replace(plans[self._number], storage_data=prefix)
        writer = FileSystemWriter(self._at)
        writer.fs = self._files
        results = writer.write_data(self._planner.finish_plan(plan), self._planner).wait()
        entries = {
            name: {"size": file.size, "sha256": file.hash.hexdigest()}
            for name, file in self._files.written.items()
        }
        return results, entries

    def write_and_leave(self) -> Part:
        """Write, and leave this process's part in the folder too."""
        part = self.write()
        self._replace(self._left(self._number), pickle.dumps(part))
        return part

    def found(self) -> list[Part] | None:
        """The parts of all processes; None until all have left theirs."""
        files = [self._left(number) for number in range(len(self._plans))]
        if not all(file.exists() for file in files):
            return None
        return [unpickled(file.read_bytes()) for file in files]

    def _left(self, number: int) -> Path:
        """The file in which a process leaves its part."""
        return self._at / f"{METADATA}.{self._mark}.{number}"

    def publish(self, parts: Sequence[Part]) -> None:
        """Make the checkpoint valid, and remove the files of earlier saves, complete or not; on the
        first process only."""
        if not self.is_first:
            return
        files = {name: entry for _, own in parts for name, entry in own.items()}
        places = {one.index: one.storage_data for results, _ in parts for one in results}
        metadata = dataclasses.replace(self._metadata, storage_data=places)
        content = sealed(pickle.dumps(metadata), {"step": self._step, "files": files})
        self._replace(self._at / METADATA, content)
        for file in (*self._at.glob("*.distcp"), *self._at.glob(f"{METADATA}.*")):
            if file.name not in files:
                file.unlink()
        if self._is_new:
            with writing(self.folder):
                self._at.rename(self.folder)
        self._is_published = True

    def _replace(self, file: Path, content: bytes) -> None:
        """Write a file anew, at once."""
        aside = self._at / f"{METADATA}.{self._mark}.{self._number}.tmp"
        with self._files.create_stream(aside, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        aside.replace(file)

    def discard(self) -> None:
        """Remove what a save that failed has written; on the first process only."""
        if not self.is_first or self._is_published:
            return
        for file in self._at.glob(f"*{self._mark}*"):
            file.unlink(missing_ok=True)
        if self._is_new:
            shutil.rmtree(self._at, ignore_errors=True)


class Snapshot:
    """Host memory that holds one copy of a state, and is used again for the next copy.

    `bytes` is its size, and `seconds` is how long the last copy took.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[KeyPath, Tensor] = {}
        self.seconds, self.bytes = 0.0, 0

    def copy(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Copy a nested dict of tensors, and of plain values, which are not copied."""
        began, kept = perf_counter(), self._buffers
        self._buffers = {}

        def copied(path: KeyPath, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            buffer, own = kept.get(path), local(value)
            if buffer is None or (local(buffer).shape, buffer.dtype) != (own.shape, own.dtype):
                if isinstance(value, DTensor):
                    buffer = value.to("cpu", copy=True)
                else:
                    buffer = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
            local(buffer).copy_(own, non_blocking=True)
            self._buffers[path] = buffer
            return buffer

        found: dict[str, Any] = tree_map_with_path(copied, state)
        accelerator_of(self._device).synchronize()
        self.seconds = perf_counter() - began
        self.bytes = sum(local(buffer).nbytes for buffer in self._buffers.values())
        return found


class Saving:
    """A checkpoint that is being written; `Checkpoint.async_save` returns it.

    >>> from tempfile import TemporaryDirectory
    >>> from torch import nn
    >>> from schedir.training import Checkpoint
    >>> with TemporaryDirectory() as folder:
    ...     saving = Checkpoint(nn.Linear(4, 1)).async_save(folder)
    ...     saving.wait()
    ...     Checkpoint.is_at(folder)
    True

    `seconds` is how long the copy to host memory took, and `bytes` its size on this process.
    """

    def __init__(self, save: Save, snapshot: Snapshot, then: Callable[[], object] | None) -> None:
        self.seconds, self.bytes = snapshot.seconds, snapshot.bytes
        self._save, self._then = save, then
        self._parts: list[Part] | None = None
        self._deadline = math.inf
        self._news = Event()  # of these two
        self._is_over = False
        self._written, self._published = Future[Part](), Future[None]()
        # At the end of Python a pool's thread still sees the main thread alive, which waits for it.
        Thread(target=self._run, name="schedir-save").start()

    def wait(self) -> None:
        """Wait until the checkpoint is complete. Every rank calls it, between two steps.

        Raises ExecutionError on all ranks if any rank has failed to write: of a full disk, say. It
        is raised once.
        """
        if self._is_over:
            return
        self._is_over = True
        try:
            self._parts = everywhere(self._save.gather, self._written.result)
            self._news.set()
            everywhere(self._save.gather, self._published.result)
        except ExecutionError:
            self._give_up_at(monotonic())
            raise

    def end(self) -> None:
        """Wait on this process alone, after a failure: others may be gone. An error is logged."""
        if self._is_over:
            return
        self._is_over = True
        error = self._give_up_at(monotonic() + _PATIENCE)
        if error is not None:
            logger.warning("a checkpoint was not completed: %s", error)

    def _give_up_at(self, deadline: float) -> BaseException | None:
        self._deadline = deadline
        self._news.set()
        error = self._published.exception()  # waits for it
        if error is not None:
            self._save.discard()
        return error

    def _run(self) -> None:
        try:
            self._written.set_result(self._save.write_and_leave())
            self._publish()
            self._published.set_result(None)
        except BaseException as error:
            for future in (self._written, self._published):
                if not future.done():
                    future.set_exception(error)

    def _publish(self) -> None:
        if not self._save.is_first:
            return
        while (parts := self._parts or self._save.found()) is None:
            if not main_thread().is_alive():
                self._deadline = min(self._deadline, monotonic() + _PATIENCE)
            if monotonic() > self._deadline:
                raise ExecutionError(f"{self._save.folder}: not all processes have written")
            self._news.wait(_PAUSE)
            self._news.clear()
        self._save.publish(parts)
        if self._then is not None:
            self._then()


class _HashingFiles(FileSystem):
    """Writes files, and hashes their content; `written` has them by name."""

    def __init__(self) -> None:
        self.written: dict[str, _Hashing] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a new file for writing, whatever the mode."""
        with writing(path), _Hashing(path) as stream:
            self.written[Path(path).name] = stream
            try:
                yield cast(io.IOBase, stream)
            except RuntimeError as error:  # torch.save's own words, in place of the system's
                raise error.__context__ or error from error


class _Hashing(io.BufferedWriter):
    """A new file that hashes what is written to it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(io.FileIO(path, "w"))
        self.size, self.hash = 0, hashlib.sha256()

    def write(self, data: bytes | memoryview, /) -> int:  # type: ignore[override]
        self.hash.update(data)
        self.size += len(data)
        return super().write(data)
