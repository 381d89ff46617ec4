"""The executor: interprets one rank's list, exactly as it is printed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from time import perf_counter
from types import TracebackType
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from schedir.errors import ExecutionError
from schedir.ir import Schedule, StageVersions, weight_versions
from schedir.passes import forward_only, insert_reductions
from schedir.runtime.boundary import Declared
from schedir.runtime.cells import wait
from schedir.runtime.control import COUNT_TAG, LOSS_TAG, Control, Exchange
from schedir.runtime.fitting import (
    TieOf,
    check_arguments,
    check_clipping,
    check_stages,
    check_stepping,
    device_of,
    loss_groups,
    proved,
    recomputed_stages,
    tied_copies,
)
from schedir.runtime.grid import Grid, Groups, grid, init_process_group
from schedir.runtime.instructions import Stage, StepState
from schedir.runtime.microbatches import Batch, Microbatch, rows, samples, split, weights
from schedir.runtime.nccl import NcclTransport
from schedir.runtime.posting import openings
from schedir.runtime.program import Compiler
from schedir.runtime.result import StepResult
from schedir.runtime.rng import SavedRng
from schedir.runtime.runner import Cells, Runner, cells_of, learns_from_payloads
from schedir.runtime.sharing import Shared
from schedir.runtime.transport import GlooTransport, InProcessTransport, Work
from schedir.runtime.weights import StageWeights
from schedir.runtime.wiring import Wirings

LossFunction = Callable[..., Tensor]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@attrs.frozen(eq=False)
class _Given:
    """The arguments of one call."""

    inputs: Batch | None
    target: Batch | None = None
    stage_inputs: Mapping[int, Batch | None] = {}
    loss_kwargs: Batch | None = None


class Executor:
    """Runs a schedule on this rank; every rank makes one, under torchrun.

    `stages` maps exactly this rank's stages to their modules. `loss_fn(output, target)` returns
    the mean loss over a microbatch, a scalar. `optimizer(parameters)` is called once per local
    stage; None leaves `.grad` to the caller. `boundaries` declares, by example tensors, the output
    of stages whose shape depends on data, the same for every microbatch. `seed` seeds every
    forward, see `schedir.runtime.rng`. `recompute` names the stages, or says that all, keep only
    the input of a forward and run it again in the backward (activation checkpointing). `count`
    says of a microbatch's target how many samples the mean loss is over, where that is not its
    rows: tokens that are not padding, say; microbatches are weighed by it.

    `clip_grad_norm` scales the gradients before every update so that their norm over all stages is
    at most that. `ties` names copies of one parameter that stages share, each as (stage, name in
    the stage's module): they get the sum of their gradients and step together, so their optimisers
    must treat them alike. `mesh`, with dimensions named dp and pp, runs the schedule once for each
    index of dp, on data of its own, as one training: sums are over all.

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
    ExecutionError where it does not fit the arguments or the process group.
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
        in_process: bool = False,
    ) -> None:
        check_arguments(schedule, stages, optimizer, boundaries or (), clip_grad_norm, ties, seed)
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
        check_stages(schedule, stages, local, None if in_process else self.rank)

        self._device = device_of(stages)
        recomputed = recomputed_stages(recompute, schedule.stages)
        tied = tied_copies(schedule, stages, ties)

        talks = not in_process and len(self._grid.everyone) > 1
        self._made_group = talks and not dist.is_initialized()
        if self._made_group:
            init_process_group()
        self._made = Groups(self._grid.everyone)
        self._control = Control(self._grid, self._made) if talks else None
        shared = Shared(schedule, self._grid, stages, tied, self._device, self._control, self._made)
        self._transport = self._connect(schedule) if talks else None

        self._updates = optimizer is not None
        self.optimizers: dict[int, torch.optim.Optimizer] = {}
        if optimizer is not None:
            for stage in local:
                parameters = list(stages[stage].parameters())
                if not parameters:
                    continue
                self.optimizers[stage] = made = optimizer(parameters)
                if not hasattr(made, "step"):
                    raise ExecutionError(
                        f"optimizer must return an optimizer, not {type(made).__name__}"
                    )

        self._closed = False
        self._state = StepState(seed)
        self._last = schedule.stages - 1
        self._boundaries = boundaries or {}
        self._count = count
        mine = {stage: v for rank in here for stage, v in versions[rank].items()}
        read = mine if optimizer is not None else {}
        self._stages = {
            stage: Stage(
                stage,
                stages[stage],
                StageWeights(stages[stage], read.get(stage)),
                self._device,
                loss_fn if stage == self._last else None,
                stage in recomputed,
                shared.reduction(stage, keeps_earlier=optimizer is None),
                self._state,
            )
            for stage in local
        }
        self._reductions = [s.reduction for s in self._stages.values() if s.reduction is not None]
        self._clipping = None if clip_grad_norm is None else shared.clipping(clip_grad_norm)
        self._meetings = shared.meetings(here, self._clipping)
        self._groups = loss_groups(schedule)
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
        self._hub = InProcessTransport()
        self._streams: list[torch.cuda.Stream] = []
        if in_process and self._device.type == "cuda":
            self._streams = [torch.cuda.Stream(self._device) for _ in here]
        self._transports = {
            rank: self._hub.of(rank) if in_process else self._transport for rank in here
        }
        self._training = self._runner(schedule, mine, loss_fn, trains=True)
        forwards = forward_only(schedule)
        read_once = {
            stage: v
            for rank in here
            for stage, v in weight_versions(forwards.columns, rank).items()
        }
        self._evaluation = self._runner(forwards, read_once, loss_fn, trains=False)

    def _connect(self, schedule: Schedule) -> GlooTransport | NcclTransport:
        """The transport of the device, between the ranks of this pipeline."""
        processes = self._grid.processes[self._grid.pipeline]
        if self._device.type == "cpu":
            return GlooTransport(processes, self.rank, self._made)
        transfers = schedule.dataflow.transfers
        channels = set(zip(transfers.source.tolist(), transfers.target.tolist(), strict=True))
        return NcclTransport(processes, self.rank, channels, self._device, self._made)

    def _runner(
        self,
        schedule: Schedule,
        versions: Mapping[int, StageVersions],
        loss_fn: LossFunction,
        trains: bool,
    ) -> Runner:
        modules = {index: stage.module for index, stage in self._stages.items()}
        first_draw = self._grid.pipeline * schedule.microbatches
        cells = cells_of(schedule, tuple(modules), first_draw)
        learns = learns_from_payloads(schedule, self._transport)
        wirings = Wirings(
            schedule,
            tuple(self._transports),
            modules,
            self._device,
            loss_fn,
            self._boundaries,
            self._control,
            trains,
        )
        compiler = Compiler(
            schedule,
            self._stages,
            cells,
            versions,
            self.optimizers,
            self._updates,
            self._meetings,
            openings(schedule) if learns else (),
        )
        return Runner(
            cells,
            wirings,
            compiler,
            self._transports,
            self._control,
            learns,
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

        `inputs` and `target` are a whole batch (a tensor, or a tuple or dict of tensors, split
        along dim 0) or a list or iterator of ready microbatches. The rank of the first stage uses
        `inputs`, that of the last `target`; elsewhere they are ignored. So are `stage_inputs`, what
        stages get beside their input (tensors and tuples by position, dicts by keyword), and
        `loss_kwargs`, what `loss_fn` takes by keyword: batches too, where all that is no tensor
        goes to every microbatch. Pass `stage_inputs` on the first stage's rank as well where their
        shapes may change though the input's do not.

        With `outputs=True` the result has what the last stage returned, on its rank.

        Raises ExecutionError, which names the action that failed. Gradients of a step that failed,
        and the updates of its OPTIM_STEPs before that, stay: go on from a checkpoint.
        """
        self._state.update, self._state.wants_outputs = update, outputs
        given = _Given(inputs, target, stage_inputs or {}, loss_kwargs)
        with torch.enable_grad():
            result = self._pass(self._training, given)
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
        step is counted. Every rank calls it, with the arguments of `step`.

        Raises ExecutionError, which names the action that failed.
        """
        self._state.wants_outputs = outputs
        return self._forwards(_Given(inputs, target, stage_inputs or {}, loss_kwargs))

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
        self._state.wants_outputs, self._state.wants_loss = True, False
        try:
            return self._forwards(_Given(inputs, None, stage_inputs or {})).outputs
        finally:
            self._state.wants_loss = True

    def _forwards(self, given: _Given) -> StepResult:
        """Run the forwards alone, in eval mode."""
        torch.clear_autocast_cache()  # it may hold casts of earlier weights
        stages = [(s.module, s.module.training) for s in self._stages.values()]
        modes = [(m, m.training) for stage, _ in stages for m in stage.modules()]
        try:
            for stage, _ in stages:
                stage.eval()
            with torch.no_grad():
                return self._pass(self._evaluation, given)
        finally:
            for stage, training in stages:
                stage.train(training)  # it may do more than set modes
            for module, training in modes:
                module.training = training

    def _pass(self, runner: Runner, given: _Given) -> StepResult:
        started = perf_counter()
        if self._closed:
            raise ExecutionError("this executor is closed; make another one to go on")
        self._state.busy = 0.0
        trains = runner is self._training
        saved = SavedRng()
        try:
            # What is refused here has moved nothing.
            counts, extras = self._fill(runner.cells, given, trains)
            loss, outputs = self._run(runner, given.inputs, extras, counts)
        finally:
            for stage in self._stages.values():
                stage.weights.restore()
            for reduction in self._reductions:
                reduction.restore()
            for cell in runner.cells.values():
                cell.clear()
            saved.restore()
        norm = self._clipping.norm if self._clipping and trains and self._state.update else None
        return StepResult(loss, norm, outputs, self._state.busy, perf_counter() - started)

    def _run(
        self,
        runner: Runner,
        inputs: Batch | None,
        extras: Mapping[int, Sequence[Microbatch]],
        counts: list[float],
    ) -> tuple[Callable[[], float] | None, list[Any] | None]:
        """Run the list; returns how to get the loss, and the outputs, where they are wanted."""
        trains = runner is self._training
        loss = outputs = None
        try:
            losses = self._expect_losses() if self._state.wants_loss else None
            if trains:
                for stage in self._stages.values():
                    stage.weights.begin(0)
                for reduction in self._reductions:
                    reduction.begin()
            runner.run(inputs, extras)
            if self._control is not None:
                self._control.settle()
            if trains:
                for reduction in self._reductions:
                    reduction.finish()
            if self._state.wants_loss:
                loss = self._share_loss(runner.cells, counts, losses)
            if self._state.wants_outputs and self._last in self._stages:
                number = self.schedule.microbatches
                outputs = [runner.cells[self._last, m].result for m in range(number)]
        except BaseException:
            # Nobody may be left to take what is under way; within one process the next step is new.
            runner.forget()
            self._hub.clear()
            for meeting in self._meetings.all:
                meeting.reset()
            raise
        return loss, outputs

    def close(self) -> None:
        """Give back the process groups that this executor made; safe to call twice."""
        self._closed = True
        if self._control is not None and self._transport is not None:
            wait(self._under_way)
            for _ in range(2):  # what the step before the last one has posted, and what it has
                self._control.settle()
            self._made.close()
            self._control = self._transport = None
        if self._made_group:
            # The ranks leave together: none loses a peer that still talks to it, and gloo's threads
            # have let go of the last collective (while Python shuts down they would abort).
            dist.barrier()
            dist.destroy_process_group()
            self._made_group = False

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

    def _fill(
        self, cells: Cells, given: _Given, trains: bool
    ) -> tuple[list[float], dict[int, list[Microbatch]]]:
        """Put the microbatches into their cells.

        Returns the sample counts on the rank of the loss, and what stages get beside their input.
        """
        number = self.schedule.microbatches
        needs = [(0, given.inputs, "inputs")]
        if self._state.wants_loss:
            needs.append((self._last, given.target, "target"))
        for stage, batch, what in needs:
            if stage in self._stages and batch is None:
                raise ExecutionError(f"stage {stage}, which runs here, needs {what}")
        if 0 in self._stages and given.inputs is not None:
            for m, piece in enumerate(split(given.inputs, number, "inputs")):
                cells[0, m].batch = piece
        extras = self._extras(cells, given.stage_inputs)
        if self._last not in self._stages or given.target is None:
            return [], extras
        pieces = split(given.target, number, "target")
        counts = [samples(self._count, piece) for piece in pieces]
        # Without its updates a step is one group of microbatches.
        groups = self._groups if self._state.update else [list(range(number))]
        totals = [sum(counts[m] for m in group) for group in groups]
        if trains:
            totals = self._over_pipelines(totals)
        for m, (piece, weight) in enumerate(
            zip(pieces, weights(counts, groups, totals), strict=True)
        ):
            cell = cells[self._last, m]
            cell.target, cell.weight = piece, weight
        if given.loss_kwargs is not None:
            for m, keywords in enumerate(split(given.loss_kwargs, number, "loss_kwargs")):
                if not isinstance(keywords, Mapping):
                    raise ExecutionError(
                        "loss_kwargs: each microbatch's is a dict of keyword arguments, not "
                        f"{type(keywords).__name__}"
                    )
                cells[self._last, m].loss_keywords = keywords
        return counts, extras

    def _over_pipelines(self, totals: list[float]) -> list[float]:
        """The sums of `totals` over all pipelines, on the ranks that have them."""
        if self._control is None or self._grid.pipelines == 1:
            return totals
        numbers = [self._grid.number(self.rank, line) for line in range(self._grid.pipelines)]
        own = torch.tensor(totals, dtype=torch.float64)
        sizes = dict.fromkeys(numbers, len(totals))
        heard = self._control.expect(sizes, COUNT_TAG).give(own, numbers).result()
        found: list[float] = torch.stack(heard).sum(0).tolist()
        return found

    def _extras(
        self, cells: Cells, stage_inputs: Mapping[int, Batch | None]
    ) -> dict[int, list[Microbatch]]:
        """Put what stages get beside their input into their cells; those of other ranks are not
        looked at, but on the rank that has the first stage."""
        number = self.schedule.microbatches
        extras = {}
        for stage, batch in stage_inputs.items():
            if stage not in range(self.schedule.stages):
                raise ExecutionError(
                    f"stage_inputs: there is no stage {stage!r}, only 0..{self._last}"
                )
            if batch is None:
                continue
            if stage in self._stages or 0 in self._stages:
                extras[stage] = split(batch, number, f"stage_inputs[{stage}]")
            if stage in self._stages:
                for m, piece in enumerate(extras[stage]):
                    cells[stage, m].extra = piece
        return extras

    def _expect_losses(self) -> Exchange | None:
        """Post the receives of the step's loss, long before it is sent."""
        if self._control is None:
            return None
        return self._control.expect(self._loss_sizes, LOSS_TAG)

    def _share_loss(
        self, cells: Cells, counts: list[float], losses: Exchange | None
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
        return lambda: _mean(losses.result())


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
    with suppress(RuntimeError):  # the other side may be gone
        wait(works)
