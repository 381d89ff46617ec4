"""The executor: interprets one rank's list, exactly as it is printed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from time import perf_counter
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from schedir.errors import ExecutionError
from schedir.ir import Schedule
from schedir.passes import forward_only
from schedir.runtime.batch.feeding import Feed, Feeder, Given
from schedir.runtime.batch.losses import Losses
from schedir.runtime.batch.microbatches import Batch, rows
from schedir.runtime.boundaries.agreement import Wirings
from schedir.runtime.boundaries.boundary import Declared
from schedir.runtime.fitting import TieOf
from schedir.runtime.gradients.sharing import Shared
from schedir.runtime.plan import (
    Arguments,
    LossFunction,
    OptimizerFactory,
    Plan,
    optimizers_of,
    planned,
)
from schedir.runtime.processes.failure import WaitError
from schedir.runtime.program.compiler import Compiler
from schedir.runtime.program.opening import UNKNOWN, Opening, Openings
from schedir.runtime.program.runner import Runner
from schedir.runtime.request import ACCUMULATE, CLOSE, EVALUATE, INFER, STEP, Request
from schedir.runtime.result import StepResult
from schedir.runtime.stage.cells import cells_of, wait
from schedir.runtime.stage.rng import SavedRng
from schedir.runtime.stage.stage import Stage, StepState
from schedir.runtime.stage.weights import StageWeights
from schedir.runtime.transports.transport import Transport, Work
from schedir.runtime.world import World


class Executor:
    """Runs a schedule on this rank; every rank makes one, under torchrun.

    `stages` maps exactly this rank's stages to their modules. `loss_fn(output, target)` returns
    the mean loss over a microbatch, a scalar; if it is a module, its parameters are trained with
    the last stage. `optimizer(parameters)` is called once per local stage; None leaves `.grad` to
    the caller. `boundaries` declares, by example tensors, the output of stages whose shape depends
    on data, the same for every microbatch. `recompute` names the stages, or says that all, keep
    only the input of a forward and run it again in the backward (activation checkpointing). `count`
    says of a microbatch's target how many samples the mean loss is over, where that is not its
    rows: tokens that are not padding, say; microbatches are weighed by it.

    `clip_grad_norm` scales the gradients before every update so that their norm over all stages is
    at most that. `ties` names copies of one parameter that stages share, each as (stage, name in
    the stage's module): they get the sum of their gradients and step together, so their optimisers
    must treat them alike. `mesh`, with dimensions named dp and pp, runs the schedule once for each
    index of dp, on data of its own, as one training: sums are over all.

    `seed` seeds every forward, with the number of the step; see `schedir.runtime.rng`. `step` is
    that of the first call of `step`: where a resumed training goes on. `timeout`, in seconds or a
    timedelta, is how long a rank waits for another; by default as long as the default process
    group does.

    Of these a rank needs `loss_fn`, `count`, `boundaries` and `recompute` for its own stages only;
    `seed`, `step`, `clip_grad_norm`, `ties`, `mesh`, and whether there is an optimizer, are
    compared.

    What a stage returns goes into the next one's forward, of any structure: a tuple's entries by
    position and a dict's by keyword if forward takes them so, all else as one argument. Tensors
    travel; None, numbers and strings are agreed at the first step of each input shape.

    A step equals gradient accumulation in one process bit for bit, in the order of the loss
    stage's backwards; a stage that lists its backwards in another order adds the same gradients
    up in that one, which may round differently. What requires grad must not change after the
    first step: make a new Executor to freeze or thaw a stage.

    Uses the default process group, and initialises one where nobody has. With one rank it runs
    without any, and with `in_process` all ranks run in this process, in turn: `stages` are all
    stages then, and nothing of torchrun is needed; for tests and to look inside, not for speed.
    A context manager: leaving it calls `close`.

    Raises ScheduleError where the schedule is wrong, before anything is initialised, and
    ExecutionError where it does not fit the arguments, the other ranks or the process group.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, nn.Module],
        loss_fn: LossFunction,
        optimizer: OptimizerFactory | None = None,
        *,
        boundaries: Mapping[int, Declared] | None = None,
        recompute: bool | Collection[int] = False,
        count: Callable[[Any], float | Tensor] = rows,
        clip_grad_norm: float | None = None,
        ties: Sequence[TieOf] = (),
        mesh: DeviceMesh | None = None,
        seed: int = 0,
        step: int = 0,
        timeout: float | timedelta | None = None,
        in_process: bool = False,
    ) -> None:
        plan = planned(
            Arguments(
                schedule,
                stages,
                loss_fn,
                optimizer,
                boundaries=boundaries or {},
                recompute=recompute,
                count=count,
                clip_grad_norm=clip_grad_norm,
                ties=ties,
                mesh=mesh,
                seed=seed,
                step=step,
                timeout=timeout,
                in_process=in_process,
            )
        )
        self.schedule, self.rank = plan.schedule, plan.grid.rank
        self._world = World(plan.grid, plan.here, plan.device, plan.timeout)
        self._state = StepState(seed, step)
        self._calls = 0
        self._under_way: list[Work] = []
        # Without a close, too, the process must not end before its last sends have arrived.
        weakref.finalize(self, _arrive, self._under_way)
        with self._world.together("making the executor"):
            self._connect(plan)
        self._build(plan)

    def _connect(self, plan: Plan) -> None:
        """Compare with the other processes, and make what connects them, in one order on all."""
        world, grid = self._world, plan.grid
        self._shared = Shared(plan.schedule, plan.holders, plan.tied, plan.alike, world)
        self._openings = Openings(world.control, grid, plan.schedule.placement[0][0])
        self._transports = world.transports(plan.schedule)
        self._reductions = self._shared.reductions(keeps_earlier=plan.asked.optimizer is None)
        clip = plan.asked.clip_grad_norm
        self._clipping = None if clip is None else self._shared.clipping(clip)
        self._meetings = self._shared.meetings(plan.here, self._clipping)
        self._drift = self._shared.drift()

    def _build(self, plan: Plan) -> None:
        """Make the stages, and the runners of their lists."""
        asked, schedule = plan.asked, plan.schedule
        self.optimizers = optimizers_of(plan)
        read = plan.versions(schedule) if asked.optimizer is not None else {}
        self._stages = {
            stage: Stage(
                stage,
                asked.stages[stage],
                plan.holders[stage],
                StageWeights(plan.holders[stage], read.get(stage)),
                plan.device,
                asked.loss_fn if stage == schedule.stages - 1 else None,
                stage in plan.recomputed,
                self._reductions.get(stage),
                self._state,
            )
            for stage in plan.local
        }
        self._feeder = Feeder(schedule, plan.local, asked.count, plan.grid, self._world.control)
        self._losses = Losses(schedule, plan.grid, self._world.control)
        training, evaluation = self._transports
        self._training = self._runner(plan, schedule, training, trains=True)
        self._evaluation = self._runner(plan, forward_only(schedule), evaluation, trains=False)

    @property
    def steps(self) -> int:
        """The number of the next call of `step`, which seeds its forwards: `step=` of an executor
        that is to go on from here."""
        return self._state.step

    def _runner(
        self, plan: Plan, schedule: Schedule, transports: Mapping[int, Transport], trains: bool
    ) -> Runner:
        cells = cells_of(schedule, plan.local, plan.grid.pipeline * schedule.microbatches)
        updates = plan.asked.optimizer is not None
        groups = (g for optimizer in self.optimizers.values() for g in optimizer.param_groups)
        wirings = Wirings(
            schedule,
            plan.here,
            {index: stage.module for index, stage in self._stages.items()},
            plan.device,
            plan.asked.loss_fn,
            plan.asked.boundaries,
            self._world.control,
            trains,
            {p for group in groups for p in group["params"]} if updates else None,
            {i for i, stage in self._stages.items() if stage.recompute or stage.weights.stashes},
        )
        compiler = Compiler(
            schedule,
            self._stages,
            cells,
            plan.versions(schedule),
            self.optimizers,
            updates,
            self._meetings,
        )
        return Runner(
            cells,
            wirings,
            compiler,
            transports,
            self._world.control,
            self._openings,
            self._state,
            self._under_way,
        )

    def step(
        self,
        inputs: Batch | None = None,
        *,
        target: Batch | None = None,
        stage_inputs: Mapping[int, Batch | None] | None = None,
        loss_kwargs: Batch | None = None,
        update: bool = True,
        outputs: bool = False,
    ) -> StepResult:
        """Run the list once, from beginning to end.

        With `update=False` its OPTIM_STEPs are left out, so that gradients accumulate until a call
        with True: weights stay what they are, and each call adds its mean over the batch.

        `inputs` and `target` are a whole batch (a tensor, or a tuple or mapping of tensors, split
        along dim 0), or a list or iterator of ready microbatches, of which an iterator gives as
        many as the schedule has. The rank of the first stage uses `inputs`, that of the last
        `target`; elsewhere they are ignored, but where one of these two has what the other uses as
        well, it must be the same. So are `stage_inputs`, what stages get beside their input
        (tensors and tuples by position, mappings by keyword), and `loss_kwargs`, what `loss_fn`
        takes by keyword: batches too, where all that is no tensor goes to every microbatch. All
        whole batches have the same rows. Pass `stage_inputs` on the first stage's rank as well
        where their shapes may change though the input's do not.

        With `outputs=True` the result has what the last stage returned, on its rank.

        Every rank makes the same calls, in the same order. Raises ExecutionError, which names the
        action that failed, or what the ranks differ in. Gradients of a step that failed, and the
        updates of its OPTIM_STEPs before that, stay: go on from a checkpoint. With several
        processes the executor is of no use any more then.
        """
        if torch.is_inference_mode_enabled():
            raise ExecutionError(
                "step trains, which torch.inference_mode() rules out; leave it, or call evaluate "
                "or infer"
            )
        given = Given(inputs, target, stage_inputs or {}, loss_kwargs)
        with torch.enable_grad():
            result = self._call(STEP if update else ACCUMULATE, given, outputs)
        self._state.step += 1
        return result

    def evaluate(
        self,
        inputs: Batch | None = None,
        *,
        target: Batch | None = None,
        stage_inputs: Mapping[int, Batch | None] | None = None,
        loss_kwargs: Batch | None = None,
        outputs: bool = False,
    ) -> StepResult:
        """The loss of a batch at the present weights: the list's forwards, and nothing else.

        The modules are in eval mode meanwhile. No gradient, statistic or weight changes, and no
        step is counted. The batch may have fewer rows than there are microbatches. Every rank calls
        it, with the arguments of `step`.

        Raises ExecutionError, which names the action that failed.
        """
        given = Given(inputs, target, stage_inputs or {}, loss_kwargs)
        return self._forwards(EVALUATE, given, outputs)

    def infer(
        self,
        inputs: Batch | None = None,
        *,
        stage_inputs: Mapping[int, Batch | None] | None = None,
    ) -> list[Any] | None:
        """What the last stage returns, microbatch by microbatch, as `evaluate` but without a loss.

        On the rank of the last stage; None elsewhere. Every rank calls it.

        Raises ExecutionError, which names the action that failed.
        """
        return self._forwards(INFER, Given(inputs, None, stage_inputs or {}), True).outputs

    def _forwards(self, request: Request, given: Given, outputs: bool) -> StepResult:
        """Run the forwards alone, in eval mode."""
        torch.clear_autocast_cache()  # it may hold casts of earlier weights
        roots = [(root, root.training) for stage in self._stages.values() for root in stage.roots]
        modes = [(m, m.training) for root, _ in roots for m in root.modules()]
        try:
            for root, _ in roots:
                root.eval()
            with torch.no_grad():
                return self._call(request, given, outputs)
        finally:
            for root, training in roots:
                root.train(training)  # it may do more than set modes
            for module, training in modes:
                module.training = training

    def _call(self, request: Request, given: Given, outputs: bool) -> StepResult:
        started = perf_counter()
        self._world.check_usable()
        runner = self._training if request.trains else self._evaluation
        self._state.begin(request, outputs, {"cpu", self._world.device.type})
        saved = SavedRng()
        try:
            # What is refused here has moved nothing.
            feed = self._feeder.cut(given, request)
            runner.fill(feed)
            if request.trains:
                self._shared.check_frozen()
            try:
                loss, found = self._run(runner, given.inputs, feed)
            except BaseException as error:
                failure = self._failed(error, f"call {self._calls}, {request.name}")
                if failure is error:
                    raise
                raise failure from None
        finally:
            self._tidy(runner)
            saved.restore()
        self._calls += 1
        norm = self._clipping.norm if self._clipping and request.updates else None
        return StepResult(loss, norm, found, self._state.busy, perf_counter() - started)

    def _run(
        self, runner: Runner, inputs: Batch | None, feed: Feed
    ) -> tuple[Callable[[], float] | None, list[Any] | None]:
        """Run the list; returns how to get the loss, and the outputs, where they are wanted."""
        state, request = self._state, self._state.request
        exchange = self._losses.expect() if request.has_loss else None
        rows_here = UNKNOWN if feed.rows is None else feed.rows
        own = Opening(request, self._calls, self._autocast(), rows_here, *feed.prints)
        ready = runner.open(own, inputs, feed)
        runner.weigh(self._feeder.shares(feed.counts, request))
        if request.trains:
            self._begin()
        with state.forwards_apart():
            runner.run(ready)
        self._world.control.settle()
        if request.trains:
            for reduction in self._reductions.values():
                reduction.finish()
            self._drift.step()
        loss = None
        if exchange is not None:
            ran = runner.losses() if feed.counts else []
            loss = self._told(self._losses.share(exchange, feed.counts, ran))
        return loss, runner.results(ready.opening.rows) if state.keeps_outputs else None

    def _begin(self) -> None:
        """Begin to train: at the present weights, with no gradients of this call."""
        for stage in self._stages.values():
            stage.weights.begin(0)
        for reduction in self._reductions.values():
            reduction.begin()

    def _tidy(self, runner: Runner) -> None:
        """Leave nothing of a call behind but weights and gradients."""
        for stage in self._stages.values():
            stage.weights.restore()
        for reduction in self._reductions.values():
            reduction.restore()
        for cell in runner.cells.values():
            cell.clear()

    def _told(self, fetch: Callable[[], float]) -> Callable[[], float]:
        """How to get the loss, which may be waited for in vain."""
        where = f"the loss of call {self._calls}, {self._state.request.name}"

        def told() -> float:
            try:
                return fetch()
            except WaitError as stalled:
                raise self._failed(stalled, where) from None

        return told

    def _autocast(self) -> torch.dtype | None:
        """The type that the caller's autocast computes in, which every rank must be under."""
        kind = self._world.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def _failed(self, error: BaseException, where: str) -> BaseException:
        """A call has failed, and with several processes the executor; returns what to raise."""
        for runner in (self._training, self._evaluation):
            runner.forget()
        for meeting in self._meetings.all:
            meeting.reset()
        return self._world.failure(error, where)

    def close(self) -> None:
        """Give back the process groups that this executor made; safe to call twice."""
        with self._world.closing() as still_works:
            if still_works:
                # End what is under way, and say that there is no other call.
                wait(self._under_way)
                self._openings.last(Opening(CLOSE, self._calls))
                for _ in range(2):  # what the step before the last one has posted, and what it has
                    self._world.control.settle()
                self._drift.look()
                self._world.leave(self._calls)

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # After a failure the other ranks may never answer; the process is about to end anyway.
        if error is None:
            self.close()


def _arrive(works: list[Work]) -> None:
    with suppress(WaitError):  # the other side may be gone
        wait(works)
