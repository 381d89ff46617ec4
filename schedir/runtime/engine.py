"""Runs one call after the other: cuts its batch, announces it, runs its list, and cleans up."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
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
from schedir.runtime.samples import Losses, Samples
from schedir.runtime.session import Session
from schedir.runtime.stage.stage import Cells, SavedRng, evaluating, stages_of
from schedir.runtime.stage.weights import NEWEST
from schedir.runtime.trace import Recorder, Trace
from schedir.runtime.transports import Transport, Work, wait_for
from schedir.simulator import Timeline

T = TypeVar("T")

_AT_RESULTS = code(RESULTS)


class Engine:
    """Runs a plan, call by call, together with the other processes.

    `steps` is the number of the next call that trains, which seeds its forwards. With several
    processes a failure breaks the engine for good. With `batch`, a call that trains has several
    batches, of `batch` microbatches each. The engine of a segment shares the session and the
    handshake of its executor's engine, `outer`, which closes them.

    Raises ExecutionError if processes differ, or if the others don't come in time.
    """

    def __init__(self, plan: Plan, batch: int | None = None, outer: Engine | None = None) -> None:
        self._plan = plan
        self.steps = plan.arguments.step
        self._accumulates = False
        self._under_way: list[Work] = []  # sends that may not have arrived by the end of a call
        with plan.accelerator.chosen():
            self.session: Session = Session(plan) if outer is None else outer.session
            self.session.take_up(plan)
            with self.session.together("making the executor"):
                self._assemble(batch, None if outer is None else outer._handshake)
        # Decided once, so that a step does not look at features that the plan does not use.
        gradients, stages = self.gradients, self.stages.values()
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
        clock = Recorder(accelerator, traces=False) if accelerator.queues else None
        self._clocks = {True: clock if self.trace is None else self.trace.recorder, False: clock}
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

        def messenger(rank: int, transport: Transport, trains: bool) -> Messenger:
            """What sends and takes a rank's payloads with their description."""
            tagged = transport.tagged if transport.early else session.control.described
            if plan.grid.alone:  # from host to host too
                tagged = session.messages.of(rank).tagged
            return Messenger(tagged(trains), tagged(2 + trains), plan.device, now)

        def programs(trains: bool) -> Programs:
            """The programs of the plan's list, or of its forwards only."""
            trace, clock = self.trace if trains else None, self._clocks[trains]
            messengers = {rank: messenger(rank, own, trains) for rank, own in transports.items()}
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

    def cut(self, given: CallArguments) -> Feed:
        """Cut a step into microbatches. Raises ExecutionError for arguments that don't fit."""
        with self._plan.accelerator.chosen():
            return self._feeder.cut(given, STEP)

    def call(self, kind: Call, given: CallArguments, keeps: Keep | None) -> StepResult:
        """Make a call of one batch; see `results`."""
        (result,) = self.results(kind, given, keeps)
        return result

    def results(
        self,
        kind: Call,
        given: CallArguments,
        keeps: Keep | None = None,
        feed: Feed | None = None,
    ) -> Iterator[StepResult]:
        """Make a call, which every rank makes; yield the result of each of its batches as soon as
        its last OPTIM_STEP here is over. What it is `given` may have been cut before, to `feed`.

        Raises ExecutionError, which names the action that failed, or how the ranks differ.
        """
        if kind.trains and torch.is_inference_mode_enabled():
            raise ExecutionError(
                f"{kind.name} can't train under torch.inference_mode(); call it outside of that, "
                "or call evaluate or infer"
            )
        self.session.check_usable()
        device = self._plan.device
        autocast = tuple(filter(torch.is_autocast_enabled, autocast_kinds(device)))
        precision = torch.get_autocast_dtype(device.type) if device.type in autocast else None
        call = kind.of_number(self.session.calls, self.steps, precision)
        call.keeps, call.autocast = keeps, autocast
        under_way = self._carry_out(call, given, feed)
        try:
            for _ in self._losses:
                # Between two results the generators and modes are the caller's.
                with SavedRng(self._plan.generators), ExitStack() as modes:
                    self._enter(modes, call)
                    result = next(under_way)
                yield result
        except ExecutionError as error:
            raise error.with_traceback(of_the_user(error.__traceback__)) from error.__cause__
        self.steps += kind.trains

    def _enter(self, modes: ExitStack, call: Call) -> None:
        """Enter the modes of a call where the caller's are others: the current device, of gradients
        and modules, and autocast."""
        if self._plan.accelerator.queues:
            modes.enter_context(self._plan.accelerator.chosen())
        if not call.trains:
            modes.enter_context(evaluating(self.stages.values() if call.evaluates else ()))
        elif not torch.is_grad_enabled():
            modes.enter_context(torch.enable_grad())
        if call.autocast:
            set_autocast(call.autocast, enabled=False)
            modes.callback(set_autocast, call.autocast, enabled=True)

    def _carry_out(
        self, call: Call, given: CallArguments, feed: Feed | None
    ) -> Iterator[StepResult]:
        """Carry out a call; yield the result of each batch."""
        session, accelerator = self.session, self._plan.accelerator
        first = began = accelerator.mark(timed=True)
        programs = self.training if call.trains else self.evaluation
        clock = self._clocks[call.trains]
        self._busy[0] = 0.0
        busy: Callable[[], float]
        # A call that is refused here has changed nothing.
        if feed is None:
            feed = self._feeder.cut(given, call)
        if call.trains:
            self.check_frozen()
        try:
            session.begin_call(self._plan, call.trains, self.steps)
            program, exchanges = self._open(programs, call, given, feed)
            cells = program.cells
            for batch in programs.run(program, call):
                losses = self._report(batch, exchanges, feed, cells)
                for weights in self._versioned:
                    weights.install(NEWEST)
                busy = partial(float, self._busy[0])
                if clock is not None:  # with a trace, times are those of the whole call
                    busy = clock.take().busy if self.trace is None else partial(float, math.nan)
                yield self._result(call, self._progress.end(), losses, busy, began)
                began, self._busy[0] = accelerator.mark(timed=True), 0.0
            session.stand(END)
            session.control.settle()
            for end in self._ends if call.trains else ():
                end()
            found = self._report(-1, exchanges, feed, cells) if exchanges else None
            # In a short batch the last microbatches are copies.
            outputs = None
            if call.keeps is not None and cells.last:
                outputs = [cell.result for cell in cells.last[: call.rows]]
            cells.empty()
            if program.learns:
                programs.learn(program, call)
            ended = self._progress.end()
        except BaseException as error:
            failure = self._failed(error, str(call))
            if call.trains:
                self._forget_gradients(failure)
            if failure is error:
                raise
            raise failure from None
        finally:
            for restore in self._restores:
                restore()
            taken = None if clock is None else clock.take()
        session.end_call(None if accelerator.queues else self._busy[0])
        if call.trains:
            self._accumulates = not call.updates
            if self.trace is not None and taken is not None:
                self.trace.keep(call, program.schedule, first, taken, cells)
        programs.post_ahead(call)
        busy = partial(float, self._busy[0]) if taken is None else taken.busy
        yield self._result(call, ended, found, busy, began, outputs)

    def _result(
        self,
        call: Call,
        ended: Callable[[], bool],
        losses: Callable[[], CallLosses] | None,
        busy: Callable[[], float],
        began: Mark,
        outputs: list[Any] | None = None,
    ) -> StepResult:
        """The result of a call, or of a batch of it that began at a mark, once it has `ended`."""
        read = partial(self._read, call, ended)
        elapsed = partial(_between, began, self._plan.accelerator.mark(timed=True))
        clipping, nonfinite = self.gradients.clipping, self.gradients.nonfinite
        norm = clipping.norm if clipping and call.updates else None
        return StepResult(
            losses and partial(read, losses, "loss"),
            norm and partial(read, norm, "norm"),
            outputs,
            nonfinite.skipped if call.updates else (),
            partial(read, busy, "time"),
            partial(read, elapsed, "time"),
            self.session.stragglers,
        )

    def _open(
        self, programs: Programs, call: Call, given: CallArguments, feed: Feed
    ) -> tuple[Program, Sequence[Exchange]]:
        """Announce a call, and prepare its list; returns the program to run, and the exchanges for
        the losses of its batches."""
        self._progress.begin()
        self._plan.accelerator.look()
        exchanges = [losses.expect() for losses in self._losses] if call.has_loss else []
        program = programs.open(call, given.inputs, given.target, feed)
        self.session.stop = call.stop
        cells = program.cells
        cells.fill(feed)
        shares = self._samples.shares(feed.counts, call)
        cells.set_loss_shares(shares)
        for stage in self.stages.values():
            stage.seeds[:] = stage.draws.of(call.step)
        if call.trains:
            self.gradients.begin(call.updates)
            if (scale := self.gradients.nonfinite.scale) != 1:
                cells.set_loss_shares([share * scale for share in shares])
            for begin in self._begins:
                begin()
            for stage in self.stages.values():
                stage.weights.begin(0)
        return program, exchanges

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
