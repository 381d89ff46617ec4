"""Runs one call after the other: cuts its batch, announces it, runs its list, and cleans up."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

import torch

from schedir.diagnosis.verdict import CLOSE as CLOSE_PLACE
from schedir.diagnosis.verdict import END, HANDSHAKE, RESULTS
from schedir.diagnosis.verdict import GATHER as GATHER_PLACE
from schedir.errors import ExecutionError
from schedir.ir import Schedule
from schedir.passes import forward_only
from schedir.runtime.accelerator import Accelerator, Mark, streams_of
from schedir.runtime.call import (
    CLOSE,
    COLLECT,
    GATHER,
    RUN,
    STEP,
    TIMELINES,
    Call,
    CallLosses,
    Keep,
    Now,
    StepResult,
    autocast_kinds,
)
from schedir.runtime.feeding import CallArguments, Feed, Feeder, batches_of
from schedir.runtime.gradients.gradients import Gradients, compared
from schedir.runtime.plan import Plan
from schedir.runtime.processes.control import Control, Courier, Exchange
from schedir.runtime.processes.failure import (
    WaitError,
    describe,
    of_the_user,
    says_all,
    users_line,
)
from schedir.runtime.processes.noticeboard import CALL, CODE, OUTSIDE, code
from schedir.runtime.program.compiler import Parts, set_autocast
from schedir.runtime.program.compute import on_several_streams
from schedir.runtime.program.handshake import Handshake
from schedir.runtime.program.instruction import Progress
from schedir.runtime.program.program import Program, Programs
from schedir.runtime.program.transfers import Messenger
from schedir.runtime.recorder import Recorder
from schedir.runtime.samples import Losses, Samples
from schedir.runtime.session import Session
from schedir.runtime.stage.stage import Cells, SavedRng, evaluating, stages_of
from schedir.runtime.stage.weights import NEWEST
from schedir.runtime.trace import Trace
from schedir.runtime.transports import Transport, Work, wait_for
from schedir.simulator import Timeline

T = TypeVar("T")

_AT_RESULTS = code(RESULTS)


class Engine:
    """Runs a plan, call by call, together with the other processes.

    `steps` is the number of the next call that trains, which seeds its forwards. With several
    processes a failure breaks the engine for good. With `batch`, a call that trains has several
    batches, of `batch` microbatches each; `stream` runs it. The engine of a segment shares
    the session and the handshake of its executor's engine, `outer`, which closes them.

    Raises ExecutionError if processes differ, or if the others don't come in time.
    """

    def __init__(self, plan: Plan, batch: int | None = None, outer: Engine | None = None) -> None:
        self._plan = plan
        self.steps = plan.arguments.step
        self._generators = plan.generators
        self._device_type = plan.device.type
        self._autocast_kinds = autocast_kinds(plan.device)
        self._accumulates = False
        self._under_way: list[Work] = []  # sends that may not have arrived by the end of a call
        with plan.accelerator.chosen():
            self.session: Session = Session(plan) if outer is None else outer.session
            self.session.take_up(plan)
            with self.session.together("making the executor"):
                self._assemble(batch, None if outer is None else outer._handshake)
        # Decided once, so that a step does not look at features that the plan does not use.
        gradients, stages = self.gradients, self.stages.values()
        self._queues = plan.accelerator.queues
        self._marks = self._queues or plan.traced
        self._follows = self._progress.follows
        self._versioned = [stage.weights for stage in stages if stage.weights.stashes]
        self._checks = [gradients.check]
        self._checks += [s.check_frozen for s in stages if plan.updates and not s.optimizer]
        replicas = [stage.replicas for stage in stages if stage.replicas is not None]
        self._begins = [each.begin for each in replicas]
        self._ends = [
            *(each.restore for each in replicas),
            *(stage.sharded.end for stage in stages if stage.sharded is not None),
            gradients.end,
        ]
        self._restores = [
            *(weights.restore for weights in self._versioned),
            *(each.restore for each in replicas),
            gradients.restore,
        ]
        # Even without a close, the process must not end before its last sends have arrived.
        courier = self.session.control.courier
        self._leave = weakref.finalize(
            self, _arrive, self._under_way, self._progress, courier, plan.accelerator
        )
        if outer is None:
            weakref.finalize(self, self.session.watch_no_longer)

    def _assemble(self, batch: int | None, handshake: Handshake | None) -> None:
        """Compare with the other processes, connect to them, and make what runs the plan; the
        `handshake` may be there already.

        The order is the same on all processes, because both sides make a connection. Raises
        ExecutionError if processes differ, or don't come in time.
        """
        plan, session, accelerator = self._plan, self.session, self._plan.accelerator
        patience, posted = session.groups.patience, session.groups.posted
        self.optimizers = plan.optimizers()
        self._progress = Progress(patience, posted, accelerator, follows=plan.transport.queues)
        claims = compared(plan, session)
        session.warm_up()
        self._handshake = handshake or Handshake(plan, session.control, session.stops)
        transports = session.transports()
        self.gradients = Gradients(
            plan, session.groups, claims, self.optimizers, self._progress.reach
        )
        self._busy = [0.0]  # the seconds that the host computes; a recorder has a device's
        streams = streams_of(accelerator)
        self.stages = stages_of(
            plan, self.gradients, self.optimizers, self._busy, streams, on_several_streams(plan)
        )
        self.trace = Trace(plan, session, self.stages) if plan.traced else None
        self._recorder = Recorder(accelerator, traces=False) if accelerator.queues else None
        self._clock = self._recorder if self.trace is None else self.trace.recorder
        self._samples = Samples(plan, session.groups)
        self._feeder = Feeder(plan, self._samples)
        session.connect(min(claim.processors for claim in claims))
        microbatches = plan.schedule.microbatches
        self._losses = [
            Losses(plan, session.control, own)
            for own in batches_of(microbatches, batch or microbatches)
        ]
        now = Now(session.board.words)
        # The mark of a boundary, by any process, counts before an example.
        described = frozenset[int]().union(*(claim.described for claim in claims))
        given = plan.arguments.boundaries or {}
        declared = {stage: given[stage] for stage in given if stage not in described}
        beside = session.control.beside() if accelerator.queues and not plan.grid.alone else None

        def programs(trains: bool) -> Programs:
            """The programs of the plan's list, or of its forwards only."""
            trace = self.trace if trains else None
            clock = self._clock if trains else self._recorder
            messengers = _messengers(session, transports, plan, trains, now)
            parts = Parts(
                accelerator,
                self.stages,
                self.gradients,
                messengers,
                described,
                declared,
                [self._progress] if clock is None else [clock, self._progress],
                beside,
                trains,
                now,
                streams,
            )
            return Programs(
                plan,
                plan.schedule if trains else forward_only(plan.schedule),
                parts,
                transports,
                session.control,
                self._handshake,
                self._under_way,
                None if trace is None else trace.observers,
                batch if trains else None,
            )

        self.training, self.evaluation = programs(trains=True), programs(trains=False)

    @property
    def schedule(self) -> Schedule:
        """The list that the latest step has run, or that the first one would run."""
        return self.training.schedule

    def check_frozen(self) -> None:
        """Raise ExecutionError where a parameter was frozen or thawed that must not be."""
        for check in self._checks:
            check()

    @property
    def stop_requested(self) -> bool:
        """Whether all ranks are to stop, as of the latest call; see `Executor.stop_requested`."""
        self.session.stop_on_signal()
        return self.session.stop

    def agree_to_stop(self) -> None:
        """Find out, with all ranks, whether one of them has been asked to stop."""
        session = self.session
        if not self._plan.grid.alone:
            session.stop = any(self.gather(session.stops(), RUN))

    def cut(self, given: CallArguments) -> Feed:
        """Cut a step into microbatches. Raises ExecutionError for arguments that don't fit."""
        with self._plan.accelerator.chosen():
            return self._feeder.cut(given, STEP)

    def call(self, kind: Call, given: CallArguments, keeps: Keep | None) -> StepResult:
        """Make a call; every rank makes the same one.

        Raises ExecutionError, which names the action that failed, or how the ranks differ.
        """
        try:
            if self._queues:
                with self._plan.accelerator.chosen():
                    return self._in_mode(kind, given, keeps)
            return self._in_mode(kind, given, keeps)
        except ExecutionError as error:
            raise error.with_traceback(of_the_user(error.__traceback__)) from error.__cause__

    def _in_mode(self, kind: Call, given: CallArguments, keeps: Keep | None) -> StepResult:
        """Make a call, with gradients on if it trains, otherwise off."""
        if not kind.trains:
            with evaluating(self.stages.values() if kind.evaluates else ()), torch.no_grad():
                return self._call(kind, given, keeps)
        if torch.is_inference_mode_enabled():
            raise ExecutionError(
                "step can't train under torch.inference_mode(); call it outside of that, or call "
                "evaluate or infer"
            )
        if torch.is_grad_enabled():
            result = self._call(kind, given, keeps)
        else:
            with torch.enable_grad():
                result = self._call(kind, given, keeps)
        self.steps += 1
        return result

    def stream(self, feed: Feed) -> Iterator[StepResult]:
        """Make a call that trains on several batches, cut by `cut`; yield the result of each as
        soon as its last OPTIM_STEP here is over. Between two results the modules, generators and
        autocast are as the caller left them."""
        if torch.is_inference_mode_enabled():
            raise ExecutionError(
                "run can't train under torch.inference_mode(); call it outside of that"
            )
        given = CallArguments([*feed.inputs] or None, [*feed.targets] or None)
        under_way = self._carry_out(RUN, given, None, feed)
        while True:
            with self._plan.accelerator.chosen(), torch.enable_grad():
                result = next(under_way, None)
            if result is None:
                break
            yield result
        self.steps += 1

    def _call(self, kind: Call, given: CallArguments, keeps: Keep | None) -> StepResult:
        for result in self._carry_out(kind, given, keeps):
            last = result
        return last

    def _carry_out(
        self,
        kind: Call,
        given: CallArguments,
        keeps: Keep | None,
        feed: Feed | None = None,
    ) -> Iterator[StepResult]:
        """Make a call; yield the result of each of its batches when the batch is over, and the last
        one when the call is over. What it is given may have been cut before."""
        session = self.session
        if session.closed or session.broken is not None or session.paused is not None:
            session.check_usable()
        began, started = self._moment()
        first = began
        autocast = tuple(filter(torch.is_autocast_enabled, self._autocast_kinds))
        precision = None
        if self._device_type in autocast:
            precision = torch.get_autocast_dtype(self._device_type)
        call = kind.of_number(session.calls, self.steps, precision)
        call.keeps, call.autocast = keeps, autocast
        programs, clock = self.training, self._clock
        if not kind.trains:
            programs, clock = self.evaluation, self._recorder
        self._busy[0] = 0.0
        saved = SavedRng(self._generators)
        try:
            # A call that is refused here has changed nothing.
            if feed is None:
                feed = self._feeder.cut(given, kind)
            if kind.trains:
                self.check_frozen()
            try:
                session.begin_call(self._plan, kind.trains, self.steps)
                program, exchanges = self._open(programs, kind, call, given, feed)
                cells = program.cells
                if autocast:
                    set_autocast(autocast, enabled=False)
                try:
                    for batch in programs.run(program, call):
                        losses = self._report(batch, exchanges, feed, cells)
                        result = self._of_batch(call, losses, began, started)
                        for weights in self._versioned:
                            weights.install(NEWEST)
                        set_autocast(autocast, enabled=True)
                        saved.restore()
                        yield result
                        saved = SavedRng(self._generators)
                        set_autocast(autocast, enabled=False)
                        began, started = self._moment()
                finally:
                    if autocast:
                        set_autocast(autocast, enabled=True)
                found, outputs = self._finish(programs, program, call, exchanges, feed)
                ended = self._progress.end() if self._follows else _at_once
            except BaseException as error:
                failure = self._failed(error, str(call))
                if kind.trains:
                    self._forget_gradients(failure)
                if failure is error:
                    raise
                raise failure from None
        finally:
            for restore in self._restores:
                restore()
            saved.restore()
            taken = None if clock is None else clock.take()
            busy = self._busy[0] if taken is None else taken.busy
        session.end_call(busy)
        if kind.trains:
            self._accumulates = not kind.updates
        if kind.trains and self.trace is not None and first is not None and taken is not None:
            self.trace.keep(call, program.schedule, first, taken, cells)
        programs.post_ahead(call)
        clipping, nonfinite = self.gradients.clipping, self.gradients.nonfinite
        norm = clipping.norm if clipping and kind.updates else None
        skipped = nonfinite.skipped if kind.updates else ()
        read = partial(self._read, call, ended)
        elapsed = self._since(began, started)
        yield StepResult(
            found, norm, outputs, skipped, busy, elapsed, read, self.session.stragglers
        )

    def _moment(self) -> tuple[Mark | None, float]:
        """The current time: a mark on the device if one is needed, and the host's clock."""
        mark = self._plan.accelerator.mark(timed=True) if self._marks else None
        return mark, perf_counter()

    def _since(self, began: Mark | None, started: float) -> float | Callable[[], float]:
        """The seconds since a moment, by the device's clock if it queues its work."""
        if began is not None and self._queues:
            return partial(_between, began, self._plan.accelerator.mark(timed=True))
        return perf_counter() - started

    def _of_batch(
        self,
        call: Call,
        losses: Callable[[], CallLosses] | None,
        began: Mark | None,
        started: float,
    ) -> StepResult:
        """The result of a finished batch in a call that goes on."""
        ended = self._plan.accelerator.mark().query if self._follows else _at_once
        busy: float | Callable[[], float] = math.nan
        if self._clock is None:
            busy, self._busy[0] = self._busy[0], 0.0
        elif self.trace is None:  # with a trace, times are those of the whole call
            busy = self._clock.take().busy
        read = partial(self._read, call, ended)
        return StepResult(losses, None, None, (), busy, self._since(began, started), read)

    def _open(
        self, programs: Programs, kind: Call, call: Call, given: CallArguments, feed: Feed
    ) -> tuple[Program, Sequence[Exchange]]:
        """Announce a call, and prepare its list; returns the program to run, and the exchanges for
        the losses of its batches."""
        if self._follows:
            self._progress.begin()
        if self._queues:
            self._plan.accelerator.look()
        exchanges = [losses.expect() for losses in self._losses] if kind.has_loss else []
        program = programs.open(call, given.inputs, given.target, feed)
        self.session.stop = call.stop
        cells = program.cells
        cells.fill(feed)
        shares = self._samples.shares(feed.counts, kind)
        cells.set_loss_shares(shares)
        for stage in self.stages.values():
            stage.seeds[:] = stage.draws.of(call.step)
        if kind.trains:
            self.gradients.begin(kind.updates)
            if (scale := self.gradients.nonfinite.scale) != 1:
                cells.set_loss_shares([share * scale for share in shares])
            for begin in self._begins:
                begin()
            for stage in self.stages.values():
                stage.weights.begin(0)
        return program, exchanges

    def _finish(
        self,
        programs: Programs,
        program: Program,
        call: Call,
        exchanges: Sequence[Exchange],
        feed: Feed,
    ) -> tuple[Callable[[], CallLosses] | None, list[Any] | None]:
        """Clean up after the list; returns a function that gets the losses of the last batch, and
        the outputs if they are wanted."""
        self.session.stand(END)
        self.session.control.settle()
        if call.trains:
            for end in self._ends:
                end()
        cells = program.cells
        losses = self._report(-1, exchanges, feed, cells) if exchanges else None
        # In a short batch the last microbatches are copies.
        outputs = None
        if call.keeps is not None and cells.last:
            outputs = [cell.result for cell in cells.last[: call.rows]]
        cells.empty()
        if program.learns:
            programs.learn(program, call)
        return losses, outputs

    def _report(
        self, batch: int, exchanges: Sequence[Exchange], feed: Feed, cells: Cells
    ) -> Callable[[], CallLosses]:
        """Send the losses of a batch; returns a function that gets those of all ranks."""
        ran = [cell.loss for cell in cells.last] if feed.counts else ()
        return self._losses[batch].report(exchanges[batch], feed.counts, ran)

    def _read(self, call: Call, ended: Callable[[], bool], fetch: Callable[[], T], what: str) -> T:
        """Read a value of a call, once the call has `ended`; `what` names it if that fails."""
        words = self.session.board.words
        place, number = words[CODE], words[CALL]
        if is_between := place == OUTSIDE:  # or another thread is in the midst of a call
            words[CALL], words[CODE] = call.number << 1 | call.trains, _AT_RESULTS
        try:
            self._progress.reach(ended)
            return fetch()
        except WaitError as stalled:
            raise self._failed(stalled, f"the {what} of {call}") from None
        finally:
            if is_between and words[CODE] == _AT_RESULTS:
                words[CODE], words[CALL] = place, number

    def _failed(self, error: BaseException, where: str) -> BaseException:
        """Clean up after a call that failed; returns the error to raise. With several processes the
        executor is broken."""
        for programs in (self.training, self.evaluation):
            programs.reset()
        self.gradients.reset()
        for stage in self.stages.values():
            if stage.replicas is not None:
                stage.replicas.reset()
            if stage.sharded is not None:
                stage.sharded.reset()
        self._progress.drop()
        failure = self.session.failure(error, where)
        if self.session.broken is not None:
            self._leave.detach()  # what is under way will not arrive
        return failure

    def _forget_gradients(self, failure: BaseException) -> None:
        """Drop what a call that failed has added to the gradients, or the next one would add more.

        Where earlier calls have left gradients, they have been added to in place, and go as well.
        """
        for stage in self.stages.values():
            stage.weights.forget_gradients()
        if self._accumulates and not self.gradients.accumulated:
            self._accumulates = False
            failure.add_note(
                "the gradients that earlier calls with update=False had accumulated are lost: "
                "repeat those calls"
            )

    @contextmanager
    def _message(self, what: str) -> Iterator[Control]:
        """Send messages beside the pipeline's traffic. If it fails here, no other rank waits."""
        self.session.check_usable()
        try:
            yield self.session.control
            self.session.end_message()
        except Exception as error:
            if isinstance(error, WaitError) or says_all(error):
                raise self._failed(error, what) from None
            rank = self._plan.grid.rank
            named = ExecutionError(f"{what}: {describe(error)}", rank=rank, cause=error)
            raise self._failed(named, what) from error
        finally:
            self.session.board.words[CODE] = OUTSIDE

    def gather(self, value: Any, kind: Call = GATHER, what: str = "") -> list[Any]:
        """The values of all processes, by number, on each of them; all make the same request, for
        `what`."""
        what = what or kind.name
        with self._message(what) as control:
            self._announce(kind)
            said, values = zip(*control.gather((what, value), self._gathers), strict=True)
            for number, other in enumerate(said):
                if other != what:
                    grid, call = self._plan.grid, self.session.calls
                    raise ExecutionError(
                        f"call {call} of process {grid.number(grid.rank)} is {what} "
                        f"({users_line()}), but call {call} of process {number} is {other}; every "
                        "rank must make the same calls, in the same order",
                        processes=(number, grid.number(grid.rank)),
                        rank=grid.rank,
                    )
            return [*values]

    def collect(self, value: Any) -> list[Any] | None:
        """The values of all processes, by number, on the first one; None on the others."""
        with self._message("collect") as control:
            self._announce(COLLECT)
            return control.collect(value, self._gathers)

    def _gathers(self) -> None:
        self.session.stand(GATHER_PLACE)

    def _announce(self, kind: Call) -> None:
        """Raise ExecutionError if another rank makes another call now."""
        session = self.session
        session.stand(HANDSHAKE)
        self._handshake.exchange(kind.of_number(session.calls, self.steps))
        session.board.words[CODE] = OUTSIDE

    def timelines(self) -> list[Timeline]:
        """The timelines of the steps since the last call, on rank 0; see `Executor.timelines`."""
        self.session.check_usable()
        if not self._plan.arguments.trace:
            raise ExecutionError(
                "nothing is recorded: make the executor with trace=True, on every rank"
            )
        with self._plan.accelerator.chosen(), self._message("timelines"):
            self._announce(TIMELINES)
            if self.trace is None:
                return []
            self._gathers()
            self._progress.settle()
            return self.trace.timelines()

    def close(self, segments: Sequence[Engine]) -> None:
        """Release the process groups that were made for this and the engines of its `segments`;
        safe to call twice."""
        engines = (*segments, self)
        for engine in engines:
            for stage in engine.stages.values():
                stage.close()
        session = self.session
        with self._plan.accelerator.chosen(), session.closing() as still_works:
            if still_works:
                session.stand(CLOSE_PLACE)
                # Finish what is under way, and announce that there is no other call.
                for engine in engines:
                    engine._leave.detach()
                    engine._progress.settle()  # on failure it names the place
                    wait_for(engine._under_way)
                session.control.courier.finish()
                self._handshake.last(CLOSE.of_number(session.calls))
                for _ in range(2):  # the messages of the last step, and of the one before
                    session.control.settle()
                for engine in engines:
                    engine.gradients.settle()
                    for programs in (engine.training, engine.evaluation):
                        programs.reset()  # receives posted ahead would hold connections
                session.leave()
                for engine in engines:
                    engine._plan.accelerator.look(wait=True)


def _at_once() -> bool:
    """Whether the device has come to the end of a call: always true on the CPU."""
    return True


def _between(began: Mark, ended: Mark) -> float:
    """The seconds from one mark to another."""
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3


def _arrive(
    works: list[Work], progress: Progress, courier: Courier, accelerator: Accelerator
) -> None:
    with suppress(WaitError):  # the other side may be gone: the device would wait for ever
        progress.settle()
        wait_for(works)
        accelerator.synchronize()
        courier.finish()


def _messengers(
    session: Session, transports: Mapping[int, Transport], plan: Plan, trains: bool, now: Now
) -> dict[int, Messenger]:
    """The messenger of each rank here, for payloads with their description."""
    found = {}
    for rank, transport in transports.items():
        tagged = transport.tagged if transport.early else session.control.described
        if plan.grid.alone:  # from host to host too
            tagged = session.messages.of(rank).tagged
        found[rank] = Messenger(tagged(trains), tagged(2 + trains), plan.device, now)
    return found
