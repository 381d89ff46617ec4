"""The executor: interprets one rank's list, exactly as it is printed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from time import perf_counter
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from schedir.errors import ExecutionError
from schedir.ir import Schedule, StageVersions, weight_versions
from schedir.passes import forward_only, insert_reductions
from schedir.runtime.batch.feeding import Feed, Feeder, Given
from schedir.runtime.batch.microbatches import Batch, rows
from schedir.runtime.boundaries.agreement import Wirings
from schedir.runtime.boundaries.boundary import Declared
from schedir.runtime.fitting import (
    TieOf,
    check_arguments,
    check_clipping,
    check_modules,
    check_optimizer,
    check_stages,
    check_stepping,
    device_of,
    proved,
    recomputed_stages,
    tied_copies,
    timeout_of,
)
from schedir.runtime.gradients.sharing import Shared
from schedir.runtime.gradients.stepping import Meetings
from schedir.runtime.processes.control import LOSS_TAG, Control, Exchange
from schedir.runtime.processes.failure import (
    Board,
    OneLineError,
    WaitError,
    end_in_one_line,
    record,
)
from schedir.runtime.processes.grid import Grid, grid
from schedir.runtime.processes.groups import Groups, init_process_group
from schedir.runtime.program.compiler import Compiler
from schedir.runtime.program.opening import UNKNOWN, Opening, Openings
from schedir.runtime.program.posting import awaited
from schedir.runtime.program.runner import Runner
from schedir.runtime.request import ACCUMULATE, CLOSE, EVALUATE, INFER, STEP, Request
from schedir.runtime.result import StepResult
from schedir.runtime.stage.cells import Cells, cells_of, wait
from schedir.runtime.stage.rng import SavedRng
from schedir.runtime.stage.stage import Stage, StepState
from schedir.runtime.stage.weights import StageWeights
from schedir.runtime.transports.gloo import GlooTransport
from schedir.runtime.transports.in_process import InProcessTransport
from schedir.runtime.transports.nccl import NcclTransport
from schedir.runtime.transports.transport import Transport, Work

LossFunction = Callable[..., Tensor]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

_TRAINING, _EVALUATION = 0, 1  # tags: what is sent for one meets nothing of the other


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
        check_arguments(
            schedule, stages, loss_fn, optimizer, boundaries or (), clip_grad_norm, ties, seed, step
        )
        limit = timeout_of(timeout)
        schedule = proved(schedule, [[stage for stage, _ in tie] for tie in ties])
        self._grid = Grid(((0,) * schedule.ranks,)) if in_process else grid(schedule.ranks, mesh)
        if self._grid.pipelines > 1:
            schedule = insert_reductions(schedule)
        self.schedule = schedule
        versions = [weight_versions(schedule.columns, rank) for rank in range(schedule.ranks)]
        check_stepping(schedule, versions, optimizer is not None)
        if clip_grad_norm is not None:
            check_clipping(schedule)
        if optimizer is None and (ties or clip_grad_norm is not None):
            raise ExecutionError(
                "ties= and clip_grad_norm= act between the gradients and the step, so they need an "
                "optimizer"
            )
        self.rank = self._grid.rank
        here = tuple(range(schedule.ranks)) if in_process else (self.rank,)
        local = tuple(stage for rank in here for stage in schedule.stages_of(rank))
        self._last = schedule.stages - 1
        check_stages(schedule, stages, local, None if in_process else self.rank)
        # What holds the parameters of each stage: the loss's are trained with the last stage.
        holders = dict(stages)
        if isinstance(loss_fn, nn.Module) and self._last in stages:
            holders[self._last] = nn.ModuleDict({"stage": stages[self._last], "loss": loss_fn})
        check_modules(holders)
        self._device = device_of(holders)
        recomputed = recomputed_stages(recompute, schedule.stages)
        tied = tied_copies(schedule, stages, ties)

        self._state = StepState(seed, step)
        self._calls = 0
        self._closed = False
        self._broken: str | None = None
        talks = not in_process and len(self._grid.everyone) > 1
        self._made_group = talks and not dist.is_initialized()
        if self._made_group:
            init_process_group(limit)
        self._groups = Groups(self._grid.everyone, limit) if talks else None
        self._control: Control | None = None
        self._openings: Openings | None = None
        self._runners: list[Runner] = []
        self._meetings = Meetings((), ())
        self._hub = InProcessTransport()
        alike = {
            "optimizer": "None" if optimizer is None else "given",
            "clip_grad_norm": clip_grad_norm,
            "ties": [[*map(tuple, tie)] for tie in ties],
            "mesh": self._grid.processes,
            "seed": seed,
            "step": step,
        }
        try:
            if self._groups is not None:
                self._board = Board(self._groups.store)
                self._control = Control(self._grid, self._groups)
            shared = Shared(
                schedule,
                self._grid,
                holders,
                tied,
                alike,
                self._device,
                self._control,
                self._groups,
            )
            if self._control is not None:
                self._openings = Openings(self._control, self._grid, schedule.placement[0][0])
            transport = self._connect(schedule)
            reductions = {
                stage: shared.reduction(stage, keeps_earlier=optimizer is None) for stage in local
            }
            self._clipping = None if clip_grad_norm is None else shared.clipping(clip_grad_norm)
            self._meetings = shared.meetings(here, self._clipping)
        except WaitError as stalled:
            raise self._failed(stalled, "making the executor") from None
        self._shared, self._drift = shared, shared.drift()

        self._updates = optimizer is not None
        self.optimizers: dict[int, torch.optim.Optimizer] = {}
        if optimizer is not None:
            for stage in local:
                parameters = list(holders[stage].parameters())
                if parameters:
                    self.optimizers[stage] = check_optimizer(optimizer(parameters), stage)

        self._boundaries = boundaries or {}
        mine = {stage: v for rank in here for stage, v in versions[rank].items()}
        read = mine if optimizer is not None else {}
        self._stages = {
            stage: Stage(
                stage,
                stages[stage],
                holders[stage],
                StageWeights(holders[stage], read.get(stage)),
                self._device,
                loss_fn if stage == self._last else None,
                stage in recomputed,
                reductions[stage],
                self._state,
            )
            for stage in local
        }
        self._reductions = [r for r in reductions.values() if r is not None]
        self._feeder = Feeder(schedule, local, count, self._grid, self._control)
        # Who has a part of the loss: its sum and the number of its samples.
        self._loss_sizes = {
            self._grid.number(rank, line): 2
            for line in range(self._grid.pipelines)
            for rank in schedule.placement[self._last]
        }
        self._listeners = range(len(self._grid.everyone))
        self._under_way: list[Work] = []
        # Without a close, too, the process must not end before its last sends have arrived.
        weakref.finalize(self, _arrive, self._under_way)
        self._streams: list[torch.cuda.Stream] = []
        if in_process and self._device.type == "cuda":
            self._streams = [torch.cuda.Stream(self._device) for _ in here]

        def transports(tag: int) -> dict[int, Transport | None]:
            if in_process:
                return {rank: self._hub.of(rank) for rank in here}
            return {
                self.rank: transport.tagged(tag)
                if isinstance(transport, GlooTransport)
                else transport
            }

        self._training = self._runner(schedule, mine, loss_fn, transports(_TRAINING), trains=True)
        forwards = forward_only(schedule)
        read_once = {
            stage: v
            for rank in here
            for stage, v in weight_versions(forwards.columns, rank).items()
        }
        self._evaluation = self._runner(
            forwards, read_once, loss_fn, transports(_EVALUATION), trains=False
        )
        self._runners += [self._training, self._evaluation]

    @property
    def steps(self) -> int:
        """The number of the next call of `step`, which seeds its forwards: `step=` of an executor
        that is to go on from here."""
        return self._state.step

    def _connect(self, schedule: Schedule) -> GlooTransport | NcclTransport | None:
        """The transport of the device, between the ranks of this pipeline."""
        if self._groups is None:
            return None
        processes = self._grid.processes[self._grid.pipeline]
        if self._device.type == "cpu":
            return GlooTransport(processes, self.rank, self._groups)
        transfers = schedule.dataflow.transfers
        channels = set(zip(transfers.source.tolist(), transfers.target.tolist(), strict=True))
        return NcclTransport(processes, self.rank, channels, self._device, self._groups)

    def _runner(
        self,
        schedule: Schedule,
        versions: Mapping[int, StageVersions],
        loss_fn: LossFunction,
        transports: Mapping[int, Transport | None],
        trains: bool,
    ) -> Runner:
        modules = {index: stage.module for index, stage in self._stages.items()}
        first_draw = self._grid.pipeline * schedule.microbatches
        cells = cells_of(schedule, tuple(modules), first_draw)
        stepped = {
            p
            for made in self.optimizers.values()
            for group in made.param_groups
            for p in group["params"]
        }
        wirings = Wirings(
            schedule,
            tuple(transports),
            modules,
            self._device,
            loss_fn,
            self._boundaries,
            self._control,
            trains,
            stepped if self._updates else None,
            {i for i, stage in self._stages.items() if stage.recompute or stage.weights.stashes},
        )
        compiler = Compiler(
            schedule,
            self._stages,
            cells,
            versions,
            self.optimizers,
            self._updates,
            self._meetings,
        )
        return Runner(
            cells,
            wirings,
            compiler,
            transports,
            self._control,
            self._openings,
            any(isinstance(transport, GlooTransport) for transport in transports.values()),
            self._state,
            self._streams,
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
        if self._closed:
            raise ExecutionError("this executor is closed; make another one to go on")
        if self._broken is not None:
            raise ExecutionError(
                f"this executor is broken, since {self._broken}; make another one, on every rank, "
                "and go on from a checkpoint"
            )
        runner = self._training if request.trains else self._evaluation
        state, cells = self._state, runner.cells
        state.request, state.keeps_outputs, state.busy = request, outputs, 0.0
        types = {"cpu", self._device.type}
        state.autocast = tuple(kind for kind in types if torch.is_autocast_enabled(kind))
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
            for stage in self._stages.values():
                stage.weights.restore()
            for reduction in self._reductions:
                reduction.restore()
            for cell in cells.values():
                cell.clear()
            saved.restore()
        self._calls += 1
        norm = self._clipping.norm if self._clipping and request.updates else None
        return StepResult(loss, norm, found, state.busy, perf_counter() - started)

    def _run(
        self, runner: Runner, inputs: Batch | None, feed: Feed
    ) -> tuple[Callable[[], float] | None, list[Any] | None]:
        """Run the list; returns how to get the loss, and the outputs, where they are wanted."""
        state, cells = self._state, runner.cells
        request = state.request
        losses = None
        if self._control is not None and request.has_loss:
            # Posted long before it is sent.
            losses = self._control.expect(self._loss_sizes, LOSS_TAG)
        rows_here = UNKNOWN if feed.rows is None else feed.rows
        own = Opening(request, self._calls, self._autocast(), rows_here, *feed.prints)
        ready = runner.open(own, inputs, feed)
        runner.weigh(self._feeder.shares(feed.counts, request))
        if request.trains:
            for stage in self._stages.values():
                stage.weights.begin(0)
            for reduction in self._reductions:
                reduction.begin()
        with state.forwards_apart():
            runner.run(ready)
        if self._control is not None:
            self._control.settle()
        if request.trains:
            for reduction in self._reductions:
                reduction.finish()
            self._drift.step()
        loss = self._share_loss(cells, feed.counts, losses) if request.has_loss else None
        if not state.keeps_outputs or self._last not in self._stages:
            return loss, None
        number = self.schedule.microbatches
        if ready.opening.rows != UNKNOWN:  # of a short batch some microbatches were copies
            number = min(number, ready.opening.rows)
        return loss, [cells[self._last, m].result for m in range(number)]

    def _autocast(self) -> torch.dtype | None:
        """The type that the caller's autocast computes in, which every rank must be under."""
        kind = self._device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def _failed(self, error: BaseException, where: str) -> BaseException:
        """Something has failed that ranks do together; returns what to raise.

        Nobody may be left to take what is under way, so the connections end, and with them the
        waits of all other ranks. Within one process there is nothing but to forget it.
        """
        for runner in self._runners:
            runner.forget()
        self._hub.clear()
        for meeting in self._meetings.all:
            meeting.reset()
        if self._groups is None:
            return error
        found = error
        if isinstance(error, WaitError):
            found = self._explained(error, where)
            error.forget_frames()
        self._broken = f"{where} has failed: {found}"
        if self._board.write(str(found)) or found is error:
            record(found)
        if isinstance(found, OneLineError):
            end_in_one_line(found)
        self._let_go(abort=True)
        return found

    def _explained(self, stalled: WaitError, where: str) -> ExecutionError:
        """Where this rank stands, what it waits for, and why that doesn't come."""
        assert self._groups is not None  # nobody to wait for
        what = stalled.what
        if not what and stalled.action is not None:
            what = awaited(self.schedule, stalled.action)
        seconds = self._groups.timeout.total_seconds()
        how = f"waited {seconds:g} s in vain" if stalled.timed_out else "waited"
        ended = "" if stalled.timed_out else ", but the connection has ended"
        return OneLineError(
            f"{where}: {how} for {what}{ended}{self._board.reasons(self._grid.everyone)}",
            rank=self.rank if stalled.rank is None else stalled.rank,
            index=stalled.index,
            action=stalled.action,
            cause=stalled.cause,
        )

    def _let_go(self, abort: bool) -> None:
        """End the connections to other processes."""
        if self._control is not None:
            self._control.drop()
        if self._openings is not None:
            self._openings.drop()
        if self._groups is not None:
            self._groups.close(abort)

    def close(self) -> None:
        """Give back the process groups that this executor made; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._control is not None and self._broken is None:
                self._leave(self._control)
            if self._made_group and self._broken is None:
                # The ranks leave together: none loses a peer that still talks to it, and gloo's
                # threads have let go of the last collective (while Python shuts down they would
                # abort).
                try:
                    dist.barrier()
                except RuntimeError as error:
                    raise WaitError(error, "the other ranks to close") from error
        except WaitError as stalled:
            raise self._failed(stalled, "close") from None
        finally:
            if self._made_group:
                dist.destroy_process_group()

    def _leave(self, control: Control) -> None:
        """End what is under way, and the connections."""
        wait(self._under_way)
        if self._openings is not None:
            self._openings.last(Opening(CLOSE, self._calls))
        for _ in range(2):  # what the step before the last one has posted, and what it has
            control.settle()
        self._drift.look()
        self._board.leave(self._grid.number(self.rank), self._calls)
        self._let_go(abort=False)

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

    def _share_loss(
        self, cells: Cells, counts: Sequence[float], losses: Exchange | None
    ) -> Callable[[], float]:
        """The step's mean loss, on its way to every process."""
        ran: list[tuple[float, Tensor]] = []
        if self._last in self._stages:
            # By microbatch, not by order of arrival.
            found = [cells[self._last, m].loss for m in range(len(counts))]
            # One without samples has no mean to count.
            ran = [(n, x) for n, x in zip(counts, found, strict=True) if x is not None and n]
        if losses is None:
            return lambda: _mean([_sums(ran)])
        if self._last in self._stages:
            losses.give(_sums(ran), self._listeners)
        where = f"the loss of call {self._calls}, {self._state.request.name}"

        def fetch() -> float:
            try:
                return _mean(losses.result())
            except WaitError as stalled:
                raise self._failed(stalled, where) from None

        return fetch


def _sums(ran: Sequence[tuple[float, Tensor]]) -> Tensor:
    """The sum of the losses over all samples, and their number."""
    if ran and ran[0][1].is_cuda:
        torch.cuda.synchronize(ran[0][1].device)  # whatever stream is current by now
    return torch.tensor(
        [sum(n * float(loss) for n, loss in ran), sum(n for n, _ in ran)], dtype=torch.float64
    )


def _mean(shares: Sequence[Tensor]) -> float:
    """The mean loss, of the sums of the losses and of the samples."""
    total, samples = (sum(share[i].item() for share in shares) for i in (0, 1))
    return float(total / samples)


def _arrive(works: list[Work]) -> None:
    with suppress(WaitError):  # the other side may be gone
        wait(works)
