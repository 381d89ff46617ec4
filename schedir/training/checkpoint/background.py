"""Write a checkpoint while the training goes on.

main thread        copies the state to host memory ─▶ step ─▶ step ─▶ wait: all processes agree
another thread     writes this process's files, and leaves their names and hashes in the folder
that of process 0  then waits for what the others leave, and makes the checkpoint valid

These threads send each other no messages: the executor's connections belong to the main thread.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Event, main_thread
from time import monotonic, perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import KeyPath, tree_map_with_path

from schedir.errors import ExecutionError
from schedir.runtime.accelerator import accelerator_of
from schedir.runtime.sharded import local
from schedir.training.checkpoint.collective import everywhere
from schedir.training.checkpoint.storage import Part, Save

logger = logging.getLogger("schedir")

_PAUSE = 0.05  # seconds from look to look for what other processes leave
_PATIENCE = 10.0  # seconds to wait for it after a failure, as another process may be gone


class Snapshot:
    """Host memory that holds one copy of a state, and is used again for the next copy.

    `bytes` is its size, and `seconds` is how long the last copy took.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[KeyPath, Tensor] = {}
        self.seconds = 0.0

    @property
    def bytes(self) -> int:
        """The size of all buffers."""
        return sum(local(buffer).nbytes for buffer in self._buffers.values())

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
        pool = ThreadPoolExecutor(1, "schedir-save")
        self._written = pool.submit(self._write)
        self._published = pool.submit(self._publish)
        pool.shutdown(wait=False)

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

    def _write(self) -> Part:
        part = self._save.write()
        self._save.leave(part)
        return part

    def _publish(self) -> None:
        self._written.result()
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
