"""The session: the processes that train together, started by torchrun, or a single process.

They compare what they hold before anything runs, connect, and end together: in order, or by the
first failure. A session of one process, which runs all ranks, has the same parts: its `control`
answers itself, and nothing waits.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import zip_longest

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from schedir.diagnosis import Root
from schedir.diagnosis.verdict import GATHER, HANDSHAKE, Standing
from schedir.errors import ExecutionError
from schedir.ir import Schedule, dumps, loads
from schedir.runtime.accelerator import Host
from schedir.runtime.plan import Plan
from schedir.runtime.processes.control import Control
from schedir.runtime.processes.failure import (
    WaitError,
    describe,
    end_in_silence,
    end_quietly,
    in_one_line,
    record,
    says_all,
    waiting,
    within_stage,
)
from schedir.runtime.processes.groups import ABORT, Groups
from schedir.runtime.processes.monitor import MONITOR
from schedir.runtime.processes.noticeboard import (
    BROKEN,
    BUSY,
    BUSY_OF,
    CALL,
    CODE,
    OUTSIDE,
    STEP,
    Noticeboard,
    Verdict,
    code,
    hello,
    init_process_group,
)
from schedir.runtime.processes.watch import Watch, host
from schedir.runtime.sharded import local
from schedir.runtime.transports import (
    Endpoint,
    GlooTransport,
    InProcessTransport,
    NcclTransport,
    Transport,
    communicators_of,
)

logger = logging.getLogger("schedir")

_AT_HANDSHAKE = code(HANDSHAKE)


class Session:
    """The processes of one executor; this one runs the plan's ranks.

    It provides the transports between ranks, the groups for sums, and `control`, the messages
    beside the pipeline's traffic. With several processes, a failure of any of them ends their
    connections, and the session is broken for good. The segments of a stream have plans and groups
    of their own, and share the session; `plan` is the one that is made or run now.

    This process stands on the `board` in the call after `calls` others, and the `watch` sees the
    other processes, if there are any. `stop` says whether all are to stop, as of the latest
    call.

    Raises ExecutionError if the other processes do not come in time.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.grid = plan, plan.grid
        self.own = plan.grid.number(plan.grid.rank)
        self.broken: str | None = None
        self.paused: str | None = None  # the reason why no call can be made now
        self.closed = self.stop = False
        self.calls = self._trained = 0  # calls before this one, and of these, those that trained
        self._made_group = not self.grid.alone and not dist.is_initialized()
        if self._made_group:
            init_process_group(plan.timeout)
        if not self.grid.alone:
            end_quietly()  # after torch's hook, which prints in front of each line the rank
        self.groups = Groups(self.grid.everyone, plan.timeout)
        # A connection of its own: on another one a call would wait for that of another thread.
        clone = getattr(self.groups.store, "clone", lambda: self.groups.store)
        self.board = Noticeboard(clone())
        seconds = self.groups.timeout.total_seconds()
        self.watch = Watch(self.board, self.own, partial(empty_standing, plan), seconds)
        self._hub = InProcessTransport(plan.accelerator)
        self.messages = InProcessTransport(Host(torch.device("cpu")))
        self.control = Control(self.grid)
        with self.together("making the executor"):
            if not self.grid.alone:
                self._come_together()
            self.control.connect(self.groups)

    @property
    def spans_hosts(self) -> bool:
        """Whether the processes are on several hosts."""
        return bool(self.board.far)

    def _come_together(self) -> None:
        """Wait for all others, show them where this process stands, and begin to watch them."""
        said = host(), os.getpid(), secrets.token_hex(8)
        everyone, timeout = self.grid.everyone, self.groups.timeout
        with self.gathering():
            heard = hello(self.groups.store, everyone, everyone[self.own], said, timeout)
        hosts, processes, (token, *_) = zip(*heard, strict=True)
        far = [number for number, each in enumerate(hosts) if each != said[0]]
        self.board.open(token, self.own, far)
        if hasattr(os, "pidfd_open"):
            away = {*far, self.own}
            self.watch.others = {n: p for n, p in enumerate(processes) if n not in away}
        MONITOR.add(self.watch)

    def set_timeout(self, timeout: timedelta) -> None:
        """Wait as long as this for other processes from the next call on."""
        if timeout != self.groups.timeout:
            self.groups.set_timeout(timeout)
            self.watch.timeout = timeout.total_seconds()

    def stand(self, index: int) -> None:
        """This process has come to a place beside its list; see `schedir.diagnosis.verdict`."""
        self.board.words[CODE] = code(index)

    def take_up(self, plan: Plan) -> None:
        """From now on this plan is made, or run."""
        if plan is not self.plan:
            self.plan, self.watch.empty = plan, partial(empty_standing, plan)

    def begin_call(self, plan: Plan, trains: bool, step: int) -> None:
        """A call of a plan begins here."""
        self.take_up(plan)
        words = self.board.words
        words[CALL] = self.calls << 1 | trains
        words[STEP] = step + 1 if trains else 0
        words[CODE] = _AT_HANDSHAKE

    def end_call(self, busy: float | None) -> None:
        """A call has ended here; `busy` are its seconds of compute, where they are known."""
        words = self.board.words
        trained = words[CALL] & 1
        if trained and busy is not None:
            words[BUSY + self._trained % BUSY_OF] = int(busy * 1e9)
        self._trained += trained
        words[STEP] += trained  # the step that comes next, after one that trained
        self.end_message()

    def end_message(self) -> None:
        """All ranks have told each other something here, as one call."""
        self.calls += 1
        self.board.words[CODE] = OUTSIDE
        self.board.words[CALL] = self.calls << 1

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Inside, this process waits for all others to come to the same place."""
        self.stand(GATHER)
        yield
        self.board.words[CODE] = OUTSIDE

    def stops(self) -> bool:
        """Whether a process has been asked to end."""
        return self.watch.stop

    def stop_requested(self) -> bool:
        """Whether all ranks are to stop, as of the latest call. From now on SIGTERM asks them to,
        and ends none."""
        self.watch.stops_on_signal = True
        return self.stop

    def stragglers(self) -> tuple[tuple[int, float], ...]:
        """The processes that have been slower in compute lately; see `StepResult.stragglers`."""
        return self.watch.stragglers()

    def transports(self) -> Mapping[int, Transport]:
        """The transport of each rank here, connected to all others."""
        plan, choice, rank = self.plan, self.plan.transport, self.grid.rank
        if choice is Endpoint:
            return {rank: self._hub.of(rank) for rank in plan.local_ranks}
        processes = self.grid.processes[self.grid.pipeline]
        if choice is GlooTransport:
            return {rank: GlooTransport(processes, rank, self.groups)}
        if choice is not NcclTransport:
            raise NotImplementedError(f"{choice.__name__} is chosen, but not made here")
        found = communicators_of(plan.schedule)
        return {rank: NcclTransport(processes, rank, found, plan.device, self.groups)}

    def warm_up(self) -> None:
        """Connect the processes within stages, all groups in one order, while nothing else is under
        way: a process that makes its connection in a forward may find others in other work."""
        for group in self.plan.groups_of_stages:
            with waiting("the connections within stages"):
                dist.all_reduce(torch.zeros(1, device=self.plan.device), group=group)

    def connect(self, processors: int) -> None:
        """Make NCCL's communicators for transfers and sums; then wait until all processes have all
        their groups, since one that closed earlier would break a connection that another still
        makes. `processors` are the multiprocessors of the smallest GPU."""
        if self.plan.transport is NcclTransport:
            self.groups.connect(self.control.gather, self.control.meet, processors)
        if not self.grid.alone:
            with self.gathering():
                self.control.meet(self.grid.everyone)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Name the work inside, in the error if a wait for other processes fails there. Any failure
        there ends the session."""
        try:
            yield
        except Exception as error:
            failure = self.failure(error, what)
            if failure is error:
                raise
            raise failure from None

    def check_usable(self) -> None:
        """Raise ExecutionError if no call can be made now."""
        if self.closed:
            raise ExecutionError("this executor is closed; make another one to go on")
        if self.broken is not None:
            raise ExecutionError(
                f"this executor is broken, since {self.broken}; make another one, on every rank, "
                "and go on from a checkpoint"
            )
        if self.paused is not None:
            raise ExecutionError(f"this executor is {self.paused}")

    def break_off(self, reason: str) -> None:
        """End for good. The other processes notice, because their connections end."""
        if self.broken is None:
            self.broken = reason
            self._let_go(abort=True)

    def failure(self, error: BaseException, what: str) -> BaseException:
        """End the session after a failure; returns the error to raise.

        Transfers under way may find no receiver, so the connections end, and with them the waits
        of all other processes. A session of one process only drops the transfers.
        """
        self._hub.clear()
        self.messages.clear()
        if self.grid.alone:
            return error
        if self.plan.groups_of_stages:
            error = within_stage(error)
        found, verdict = error, self._verdict(error)
        roots = () if verdict is None else verdict.roots
        if isinstance(error, WaitError):
            found = self._explained(error, what, verdict)
            # The frames hold a work, and so a connection.
            error.__traceback__ = error.cause.__traceback__ = None
            if verdict is None and self.board.is_open:  # so that the others know as much
                verdict = self.watch.blame([], str(found))
        if isinstance(found, ExecutionError):
            found.roots = roots
        self.broken = f"{what} has failed: {found}"
        elsewhere = bool(roots) and self.own not in {root.rank for root in roots}
        if verdict is None or verdict.by == self.own or (found is error and not elsewhere):
            record(found)
        self.board.become(BROKEN)
        told = says_all(error) or isinstance(error, (WaitError, KeyboardInterrupt))
        if roots and (told or (elsewhere and isinstance(error, ExecutionError) and error.roots)):
            others = self.watch.others
            # The verdict has said it.
            end_in_silence(found, [others[r.rank] for r in roots if r.rank in others])
        if self.groups.aborts:  # an abort may not return: log the failure before it
            said = in_one_line(found if isinstance(found, ExecutionError) else describe(found))
            logger.error("%s; aborting NCCL's communicators now, in at most %g s", said, ABORT)
        self._let_go(abort=True)
        return found

    def _verdict(self, error: BaseException) -> Verdict | None:
        """Who is to blame for an error here: this process, unless it waited for others."""
        if not self.board.is_open:
            if isinstance(error, WaitError):
                return self.board.verdict()
            return self.board.give(Verdict((), str(error), self.own))
        if isinstance(error, WaitError):
            if self.plan.transport.queues and error.index is not None:
                self.board.words[CODE] = code(error.index)  # of the device, behind the host
            peer = error.process
            if peer is None and error.peer is not None:
                peer = self.grid.number(error.peer)
            cut_from = None if error.timed_out else peer
            return self.watch.explain(cut_from, error.timed_out, self.closed)
        own = self.root(error)
        roots = [own]
        if isinstance(error, ExecutionError):
            if error.roots:  # all ranks know them
                roots = [attrs.evolve(root, call=own.call, step=own.step) for root in error.roots]
            # Of two sides that differ nobody knows which is wrong.
            roots += [attrs.evolve(own, rank=n) for n in error.processes if n != own.rank]
        return self.watch.blame(sorted(roots, key=lambda root: root.rank), str(error))

    def root(self, error: BaseException) -> Root:
        """This process, as the one to blame for an error."""
        at = self.board.read(self.own).position
        inner = error.cause if isinstance(error, ExecutionError) and error.cause else error
        cause, index, action = describe(inner), None, None
        if isinstance(inner, ExecutionError):
            cause = f"differs: {inner.message}" if inner.processes else str(inner)
        if isinstance(error, ExecutionError):
            index, action = error.index, error.action
        return Root(self.own, at.call, index, action, in_one_line(cause), at.step)

    def abandon(self, error: BaseException) -> None:
        """The caller's own code has failed: end the session, and with it the other processes."""
        if self.grid.alone or self.closed or self.broken is not None:
            return
        if not (isinstance(error, SystemExit) and not error.code):
            self.failure(error, "the caller's code")

    def _explained(self, stalled: WaitError, what: str, verdict: Verdict | None) -> ExecutionError:
        """An error that says where this rank stands, what it waits for, and why that won't come."""
        awaited = stalled.what or "the other ranks"
        reason = None if verdict is None or verdict.by == self.own else verdict.reason
        left = None if self.closed or reason else self.watch.left()
        if left is not None:
            said = (
                f"process {left.rank} has closed its executor, or ended, after {left.call} calls, "
                f"but every rank must make the same calls; waited for {awaited}"
            )
        elif stalled.timed_out:
            said = f"waited {self.groups.timeout.total_seconds():g} s in vain for {awaited}"
        elif isinstance(stalled.cause, dist.DistBackendError):  # NCCL's own message says more
            said = f"waited for {awaited}, but {describe(stalled.cause)}"
        else:
            said = f"waited for {awaited}, but the connection has ended"
        if reason:
            said += f"; the first to fail was {reason}"
        elif stalled.timed_out and stalled.advice:
            said += f"; {stalled.advice}"
        return ExecutionError(
            f"{what}: {said}",
            rank=self.grid.rank if stalled.rank is None else stalled.rank,
            index=stalled.index,
            action=stalled.action,
            cause=stalled.cause,
            processes=() if left is None else (left.rank, self.own),
            one_line=left is None,
        )

    @contextmanager
    def closing(self) -> Iterator[bool]:
        """Close the session. The context's value says whether the others can still be told."""
        first, self.closed = not self.closed, True
        try:
            with self.together("close"):
                yield first and self.broken is None
                if first and self._made_group and self.broken is None:
                    # The ranks leave together: none loses a peer that still talks to it, and
                    # gloo's threads are done with the last collective. (While Python shuts down
                    # they would abort the process.)
                    with waiting("the other ranks to close"):
                        dist.barrier()
        finally:
            self.watch_no_longer()
            if first and self._made_group:
                dist.destroy_process_group()

    def watch_no_longer(self) -> None:
        """Stop watching the other processes."""
        MONITOR.remove(self.watch)
        self.board.close()

    def leave(self) -> None:
        """Tell the others that this process makes no more calls, and end its connections."""
        self.board.leave()
        self._let_go(abort=False)

    def _let_go(self, abort: bool) -> None:
        """End the connections to other processes."""
        self.control.courier.stop()
        self.groups.close(abort)


def empty_standing(plan: Plan) -> Standing:
    """What the ranks of a plan run, and wait for, without where they stand."""
    number = plan.grid.everyone.index
    ranks = [number(process) for layout in plan.grid.slices for row in layout for process in row]
    ties = tuple(tuple(stage for stage, _ in tie) for tie in plan.arguments.ties)
    clips = plan.arguments.clip_grad_norm is not None or plan.arguments.nonfinite == "skip"
    return Standing(plan.schedule, (), ranks, ties, clips, len(plan.grid.slices))


_MUST_BE_EQUAL = {
    "torch": "{what} is {here} on process {first}, but {there} on process {other}; it must be the "
    "same on every rank",
    "argument": "the ranks were given different arguments: {what} is {here} on process {first}, "
    "but {there} on process {other}",
    "schedule": "the ranks hold different schedules: {what}; build the schedule from the same "
    "target with the same parameters on every rank",
    "device": "the stages must all be on GPUs or all on the CPU, but of processes {first}: {here}, "
    "{other}: {there}",
    "cut": "the model was cut into stages {here} on process {first}, but into {there} on process "
    "{other}, so layers would be left out or run twice; cut the same layers in the same way on "
    "every rank",
    "dtype": "{what} is {here} on process {first}, but {there} on process {other}; copies of one "
    "stage or parameter must have the same dtype",
    "copies": "{what} differs between processes {first} and {other}; load the same values, or seed "
    "equally, before you make the executor",
}
"""What all processes that have it must have alike, and what is said where two don't."""


@attrs.frozen
class Claim:
    """What a process tells the others before the first call, for all to compare.

    `alike` has what must be equal, by a kind of `_MUST_BE_EQUAL` and by name: the schedule as its
    hash, tensors as their digests. `gpu` identifies the GPU and its host; empty if it doesn't
    matter. `processors` is the number of kernels that run there at once. `sizes` is the number of
    gradients of each stage here, and `doubles` says whether any is in double precision. `described`
    are the boundaries that are marked there; the mark of one process suffices.
    """

    alike: Mapping[str, Mapping[str, object]]
    gpu: str
    processors: int = 1
    sizes: Mapping[int, int] = {}
    doubles: bool = False
    described: frozenset[int] = frozenset()


def agree(control: Control, own: Claim, schedule: Schedule) -> Sequence[Claim]:
    """Exchange the claims of all processes; returns them by number.

    Raises ExecutionError if processes have different arguments or schedules, another torch, other
    devices, cuts or copies of what they share, or if two share a GPU.
    """
    claims: list[Claim] = control.gather(own)
    lists: list[str] = []
    if any(claim.alike["schedule"] != own.alike["schedule"] for claim in claims):
        lists = control.gather(dumps(schedule))
    compare(claims, lists)
    return claims


def compare(claims: Sequence[Claim], lists: Sequence[str] = ()) -> None:
    """Raise ExecutionError if claims differ, or two processes share a GPU; `lists` are the texts of
    all schedules where these differ."""
    for kind, words in _MUST_BE_EQUAL.items():
        found: dict[str, tuple[int, object]] = {}
        for other, claim in enumerate(claims):
            for what, there in claim.alike.get(kind, {}).items():
                first, here = found.setdefault(what, (other, there))
                if there != here:
                    if kind == "schedule":
                        what = _difference(loads(lists[first]), loads(lists[other]), other)
                    raise ExecutionError(
                        words.format(what=what, here=here, there=there, first=first, other=other),
                        processes=(first, other),
                    )
    gpus = [claim.gpu for claim in claims]
    for process, gpu in enumerate(gpus):
        if gpu and (other := gpus.index(gpu)) != process:
            raise ExecutionError(
                f"processes {other} and {process} have their stages on one GPU, {gpu}, which NCCL "
                "takes for a mistake; move each process's stages to its own GPU, "
                'torch.device("cuda", int(os.environ["LOCAL_RANK"])), or, if you mean it, set '
                "NCCL_HOSTID to another value for each process"
            )


def _difference(one: Schedule, other: Schedule, process: int) -> str:
    for what in ("name", "ranks", "microbatches", "stages", "placement"):
        here, there = getattr(one, what), getattr(other, what)
        if here != there:
            return f"{what} {here} on process 0, {there} on process {process}"
    return next(
        f"rank {rank} #{index} is {mine} on process 0, but {theirs} on process {process}"
        for rank, lists in enumerate(zip(one.actions, other.actions, strict=True))
        for index, (mine, theirs) in enumerate(zip_longest(*lists, fillvalue="nothing"))
        if mine != theirs
    )


def digest(tensor: Tensor) -> int:
    """A hash of a tensor's bytes."""
    content = local(tensor.detach()).reshape(-1).view(torch.uint8).cpu().numpy().data
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())
