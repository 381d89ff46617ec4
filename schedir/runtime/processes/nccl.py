"""The one module that talks to torch's ProcessGroupNCCL.

What it does is in torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, of which schedir builds on:

- `pointToPoint`: a send or receive alone goes over a communicator of its two ranks, those within
  `startCoalescing` and `endCoalescing` over one of the whole group, as collectives do; each has a
  stream of its own. So one group uses one of the two ways alone. Inside, no call returns a work;
  the one at the end is of all, and holds none of their tensors once it is waited for, as that of
  a transfer or sum alone would (`batch_isend_irecv` and `_coalescing_manager`, which do that for
  torch's own groups, are in torch/distributed/distributed_c10d.py).
- It calls `recordStream` for what a transfer uses: what is freed then goes to nobody before the
  host has seen the transfer's stream come past; see `schedir.runtime.program.transfers`.
- A work's `wait` has the current stream wait, not the host. `is_completed` is true of a work that
  has failed as well; `wait` then aborts its communicator and raises.
- What is posted first makes the communicator, and blocks the host until all of its processes have
  come; no time limit holds for that, and the watchdog does not see it.
- `shutdown` waits for what is under way, `abort` does not. Each ends its kernels first and then
  frees memory, which waits for the kernels of all communicators, and does so on a thread of its
  own that the caller waits for: several are aborted at the same time, or the first one waits for
  what only the others would end. (A group of NCCL's calls around them, as `_abort_process_group`
  of distributed_c10d.py has, does not reach those threads.) An abort may never return, where it
  joins a thread of NCCL's that waits for the network (nccl, issues 863 and 1777).
- The destructor joins the watchdog, which sleeps for a minute once it has seen an error, to let
  others write their flight recorders.
- The first group of a process, of whatever library, tells it its rank (`globalRank`).
- The watchdog ends the process where a work is not done in time, counted from its post.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count
from threading import Thread
from time import monotonic
from typing import Any

import attrs
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # public, unlisted

_WATCHDOG = timedelta(minutes=10)  # torch's own default
_MOST_OF_A_TRANSFER = 8  # multiprocessors; more make no single transfer faster
ABORT = 20.0
"""Seconds that all aborts together may take."""


@attrs.frozen
class Shares:
    """The multiprocessors of a GPU that a communicator may take, for transfers and for sums."""

    transfer: int
    sum: int


def shares(processors: int, transfers: int, sums: int) -> Shares:
    """The shares of a process with these numbers of communicators for transfers and for sums.

    The kernels of all communicators run at the same time, because a receive is a kernel that runs
    until its data has come. Half of the GPU is left for compute, which the receives wait for. NCCL
    rounds the number of blocks of a transfer up to a power of two (`ncclTopoComputeP2pChannels`;
    nccl, issue 1598), so a transfer's share is a power of two. Sums take what transfers leave. On
    132 multiprocessors, four communicators for transfers may take 8 each, and three for sums 11
    each. If a GPU has too few for that, each takes one.
    """
    half = processors // 2
    for_transfers = half // 2 if sums else half
    each = max(1, min(_MOST_OF_A_TRANSFER, for_transfers // max(1, transfers)))
    transfer = 1 << (each.bit_length() - 1)
    return Shares(transfer, max(1, (half - transfers * transfer) // max(1, sums)))


def rounds(groups: Sequence[Collection[int]]) -> list[list[int]]:
    """The numbers of the groups by the round in which they are made; a group is given by its
    members.

    All processes of a communicator must come to make it, and none goes on before. One after the
    other, the communicators of a pipeline would take long. In a round each process makes at most
    one, so many are made at the same time:

        ring of 4 ranks    round 0   0─1   2─3
                           round 1   1─2   3─0     as many rounds as a rank has groups, or some more

    Each group goes to the first round in which none of its members has another group, so processes
    that list the groups in the same order get the same rounds. Groups of two members, with at most
    n groups a process, take fewer than 2 n rounds (an edge colouring); neighbours that are listed
    in turn take about n.
    """
    found: list[list[int]] = []
    taken: dict[int, set[int]] = {}  # by member, the rounds in which it has a group
    for number, members in enumerate(groups):
        busy = set().union(*(taken.setdefault(member, set()) for member in members))
        turn = next(turn for turn in count() if turn not in busy)
        for member in members:
            taken[member].add(turn)
        if turn == len(found):
            found.append([])
        found[turn].append(number)
    return found


def in_turn(groups: Sequence[Collection[int]], own: int) -> list[int]:
    """The numbers of the groups that a process is in, in the order in which it makes them."""
    return [n for together in rounds(groups) for n in together if own in groups[n]]


def nccl_backend(
    store: Store,
    position: int,
    processes: Sequence[int],
    name: str,
    timeout: timedelta,
    max_ctas: int | None = None,
) -> Any:
    """A process group of NCCL of some processes, by their ranks in the default process group.

    A kernel of its communicator takes at most `max_ctas` of a GPU's multiprocessors; see `shares`.
    """
    # High priority: results are sent before more is computed.
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    # The watchdog counts from the post, which may be a call ahead of the device, and ends the
    # process without saying where it stands. It is only for a host that hangs.
    options._timeout = max(2 * timeout, _WATCHDOG)
    # The flight recorder uses these names in its files.
    options.group_name = name
    options.global_ranks_in_group = list(processes)
    if max_ctas is not None and hasattr(options, "config"):  # of NCCL 2.17
        options.config.max_ctas = max_ctas
    return dist.ProcessGroupNCCL(store, position, len(processes), options)


def end(backends: Sequence[Any], abort: bool) -> None:
    """Destroy communicators, which would outlive their groups: after the work under way or, with
    `abort`, at once.

    Aborts that have not ended after 20 seconds are left to their threads, which end with the
    process.
    """
    if not abort:
        for backend in backends:
            backend.shutdown()
        return
    threads = [Thread(target=_abort, args=(backend,), daemon=True) for backend in backends]
    for thread in threads:
        thread.start()
    until = monotonic() + ABORT
    for thread in threads:
        thread.join(max(0.0, until - monotonic()))
    for backend in backends:  # never free it: the process might not end for a minute
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))


def _abort(backend: Any) -> None:
    with suppress(RuntimeError):  # it has failed already
        backend.abort()
