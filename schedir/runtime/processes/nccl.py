"""Process groups of NCCL: all that is said to torch's ProcessGroupNCCL is said here.

What they do is in torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, of which this builds on:

- `pointToPoint`: a send or receive alone goes over a communicator of its two ranks, those within
  `startCoalescing` and `endCoalescing` over one of the whole group, as collectives do; each has a
  stream of its own. So one group uses one of the two ways alone. Inside, no call returns a work;
  the one at the end is of all, and holds none of their tensors once it is waited for, as that of a
  transfer or sum alone would (`batch_isend_irecv` and `_coalescing_manager`, which do that for
  torch's own groups, are in torch/distributed/distributed_c10d.py).
- It calls `recordStream` for what a transfer uses: what is freed then goes to nobody before the
  host has seen the transfer's stream come past; see `schedir.runtime.transports.buffers`.
- A work's `wait` has the current stream wait, not the host.
- `shutdown` waits for what is under way, `abort` does not. Each ends its kernels first and then
  frees memory, which waits for the kernels of all communicators, and does so on a thread of its own
  that the caller waits for: several are aborted at the same time, or the first one waits for what
  only the others would end. (A group of NCCL's calls around them, as `_abort_process_group` of
  distributed_c10d.py has, does not reach those threads.)
- The first group of a process, of whatever library, tells it its rank (`globalRank`).
- The watchdog ends the process where a work is not done in time, counted from its post.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import Any

import attrs
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # public, unlisted

_WATCHDOG = timedelta(minutes=10)  # torch's own default


@attrs.frozen
class Settings:
    """What the process groups of an executor have in common.

    A kernel of one communicator takes at most `max_ctas` of a GPU's multiprocessors; see `shares`.
    """

    timeout: timedelta
    max_ctas: int | None = None


def shares(processors: int, communicators: int) -> int:
    """How many of a GPU's multiprocessors each of its communicators may take.

    The kernels of all of them run at once, for a receive is a kernel that runs until its data has
    come; half of the GPU is left to compute, which they wait for. Of 132 multiprocessors, ten
    communicators may take 6 each.
    """
    return max(1, processors // 2 // communicators)


def nccl_backend(
    store: Store, position: int, processes: Sequence[int], name: str, settings: Settings
) -> Any:
    """A process group of NCCL of some processes, by their ranks in the default process group."""
    # Of high priority: what has been computed goes on its way before more is computed.
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    # The watchdog counts from the post, which may be a call ahead of the device, and ends the
    # process without a word of where it stands: it is there for a host that hangs.
    options._timeout = max(2 * settings.timeout, _WATCHDOG)
    # By these the flight recorder names what is in its files.
    options.group_name = name
    options.global_ranks_in_group = list(processes)
    if settings.max_ctas is not None and hasattr(options, "config"):  # of NCCL 2.17
        options.config.max_ctas = settings.max_ctas
    return dist.ProcessGroupNCCL(store, position, len(processes), options)


def end(backends: Iterable[Any], abort: bool) -> None:
    """Let communicators go, which would outlive their groups: once what is under way is done, or
    at once."""
    own = list(backends)
    if not own:
        return
    if not abort:
        for backend in own:
            backend.shutdown()
        return
    threads = [Thread(target=_abort, args=(backend,)) for backend in own]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _abort(backend: Any) -> None:
    with suppress(RuntimeError):  # it has failed already
        backend.abort()
