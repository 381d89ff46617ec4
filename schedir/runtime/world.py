"""The processes that train together: made by torchrun, or this one alone, which runs all ranks.

A world of one process has the same parts: its `control` answers itself, and nothing is waited for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from schedir.errors import ExecutionError
from schedir.runtime.plan import Plan
from schedir.runtime.processes.control import Control
from schedir.runtime.processes.failure import (
    Board,
    OneLineError,
    WaitError,
    describe,
    end_in_one_line,
    record,
)
from schedir.runtime.processes.groups import Groups, init_process_group
from schedir.runtime.transports.communicators import communicators_of, ranks_of
from schedir.runtime.transports.gloo import GlooTransport
from schedir.runtime.transports.in_process import Endpoint, InProcessTransport
from schedir.runtime.transports.nccl import NcclTransport
from schedir.runtime.transports.transport import Transport

_OTHERS = 3
"""The groups on a device beside those of transfers and gradients: for norms, samples and scales."""


class World:
    """The processes of one executor, of which this one runs the plan's ranks.

    Hands out the transports between ranks, the groups for sums, and `control`, the messages beside
    the pipeline's traffic. With several processes a failure of any ends their connections, and the
    world is broken for good. `calls` are those that were made.

    Raises ExecutionError where the others do not come in time.
    """

    def __init__(self, plan: Plan) -> None:
        grid = plan.grid
        self.grid, self.accelerator, self.device = grid, plan.accelerator, plan.device
        self._schedule, self._ranks = plan.schedule, plan.local_ranks
        self._transport = plan.transport
        self.broken: str | None = None
        self.closed = False
        self.calls = 0
        self._made_group = not grid.alone and not dist.is_initialized()
        if self._made_group:
            init_process_group(plan.timeout)
        self.groups = Groups(grid.everyone, plan.timeout)
        self._board = Board(self.groups.store)
        self._hub = InProcessTransport(plan.accelerator)
        self.control = Control(grid)
        with self.together("making the executor"):
            self.control.connect(self.groups)

    def transports(
        self, sums: Sequence[Collection[int]], processors: int
    ) -> Mapping[int, Transport]:
        """How each rank here sends to others and receives.

        `sums` are the processes of each group for sums, which is made after this. `processors` are
        those of the smallest GPU.
        """
        choice, device, rank = self._transport, self.device, self.grid.rank
        if choice is Endpoint:
            return {rank: self._hub.of(rank) for rank in self._ranks}
        processes = self.grid.processes[self.grid.pipeline]
        if choice is GlooTransport:
            return {rank: GlooTransport(processes, rank, self.groups)}
        if choice is not NcclTransport:
            raise NotImplementedError(f"{choice.__name__} is chosen, but not made here")
        found = communicators_of(self._schedule)
        # In every pipeline the ranks are in as many as in this one.
        held = Counter(processes[rank] for channels in found for rank in ranks_of(channels))
        held.update(process for members in sums for process in members)
        self.groups.share_gpu(processors, most=max(held.values(), default=0) + _OTHERS)
        return {rank: NcclTransport(processes, rank, found, device, self.groups)}

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """What this process waits for others in, said if that ends in vain."""
        try:
            yield
        except WaitError as stalled:
            raise self.failure(stalled, what) from None

    def check_usable(self) -> None:
        """Raise ExecutionError where there can be no further call."""
        if self.closed:
            raise ExecutionError("this executor is closed; make another one to go on")
        if self.broken is not None:
            raise ExecutionError(
                f"this executor is broken, since {self.broken}; make another one, on every rank, "
                "and go on from a checkpoint"
            )

    def failure(self, error: BaseException, what: str) -> BaseException:
        """Something has failed that processes do together; returns what to raise.

        Nobody may be left to take what is under way, so the connections end, and with them the
        waits of all others. One process alone just drops what was sent.
        """
        self._hub.clear()
        if self.grid.alone:
            return error
        found = error
        if isinstance(error, WaitError):
            found = self._explained(error, what)
            error.forget_frames()
        self.broken = f"{what} has failed: {found}"
        if self._board.write(str(found)) or found is error:
            record(found)
        if isinstance(found, OneLineError):
            end_in_one_line(found)
        self._let_go(abort=True)
        return found

    def _explained(self, stalled: WaitError, what: str) -> ExecutionError:
        """Where this rank stands, what it waits for, and why that doesn't come."""
        awaited = stalled.what or "the other ranks"
        reason = self._board.reason()
        fewest = None if reason or self.closed else self._board.fewest_calls(self.grid.everyone)
        if fewest is not None:
            process, calls = fewest
            said = (
                f"process {process} has closed its executor, or ended, after {calls} calls, but "
                f"every rank must make the same; waited for {awaited}"
            )
        elif stalled.timed_out:
            said = f"waited {self.groups.timeout.total_seconds():g} s in vain for {awaited}"
        elif isinstance(stalled.cause, dist.DistBackendError):  # NCCL says more than that
            said = f"waited for {awaited}, but {describe(stalled.cause)}"
        else:
            said = f"waited for {awaited}, but the connection has ended"
        if reason:
            said += f"; the first to fail was {reason}"
        return OneLineError(
            f"{what}: {said}",
            rank=self.grid.rank if stalled.rank is None else stalled.rank,
            index=stalled.index,
            action=stalled.action,
            cause=stalled.cause,
        )

    @contextmanager
    def closing(self) -> Iterator[bool]:
        """Tell the others inside, if it says that they are still there to be told."""
        first, self.closed = not self.closed, True
        try:
            with self.together("close"):
                yield first and self.broken is None
                if first and self._made_group and self.broken is None:
                    # The ranks leave together: none loses a peer that still talks to it, and
                    # gloo's threads have let go of the last collective (while Python shuts down
                    # they would abort).
                    self._wait_for_all()
        finally:
            if first and self._made_group:
                dist.destroy_process_group()

    def leave(self) -> None:
        """Say that this process makes no other call, and end its connections."""
        self.say_calls()
        self._let_go(abort=False)

    def say_calls(self) -> None:
        """Write down for others that this process has made its last call."""
        self._board.leave(self.grid.number(self.grid.rank), self.calls)

    def _wait_for_all(self) -> None:
        try:
            dist.barrier()
        except RuntimeError as error:
            raise WaitError(error, "the other ranks to close") from error

    def _let_go(self, abort: bool) -> None:
        """End the connections to other processes."""
        self.control.drop()
        self.groups.close(abort)
