"""The executor: interprets one rank's list, exactly as it is printed."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from itertools import count
from time import perf_counter
from types import TracebackType
from typing import Any, TypeAlias

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public, unlisted
from torch.distributed.rendezvous import rendezvous

from schedir.check import check
from schedir.errors import ExecutionError, ScheduleError
from schedir.ir import Kind, Schedule, StageVersions, weight_versions
from schedir.passes import forward_only, insert_communication
from schedir.runtime.boundary import Declared
from schedir.runtime.cells import Cell, wait
from schedir.runtime.control import Control
from schedir.runtime.instructions import Stage, StepState
from schedir.runtime.microbatches import Batch, Microbatch, rows, samples, split, weights
from schedir.runtime.program import Compiler, Instruction
from schedir.runtime.result import StepResult
from schedir.runtime.rng import SavedRng
from schedir.runtime.transport import GlooTransport, InProcessTransport, Work
from schedir.runtime.weights import StageWeights
from schedir.runtime.wiring import Wirings

LossFunction = Callable[..., Tensor]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

_NO_RANGE = nullcontext()
_SMALL_CHANGE = 1 << 20
"""Bytes of receive buffers beyond what the list needs: nothing beside a model, and small transfers,
which would wait for a timer tick rather than for data, are all posted ahead."""

Cells: TypeAlias = dict[tuple[int, int], Cell]
"""The cells of the stages here, by stage and microbatch."""


@attrs.frozen(eq=False)
class _Given:
    """The arguments of one call."""

    inputs: Batch | None
    target: Batch | None = None
    stage_inputs: Mapping[int, Batch] = {}
    loss_kwargs: Batch | None = None


@attrs.frozen(eq=False)
class _Runner:
    """A list that is run again and again: for training, or its forwards for evaluation.

    `programs` holds the compiled lists by the number of the agreement on the boundaries.
    """

    cells: Cells
    wirings: Wirings
    compiler: Compiler
    programs: dict[int, list[list[Instruction]]] = attrs.field(factory=dict)


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
        seed: int = 0,
        in_process: bool = False,
    ) -> None:
        schedule = _proved(schedule)
        self.schedule = schedule
        versions = [weight_versions(schedule.columns, rank) for rank in range(schedule.ranks)]
        _check_stepping(schedule, versions, optimizer is not None)
        self.rank = 0 if in_process else _rank(schedule.ranks)
        here = tuple(range(schedule.ranks)) if in_process else (self.rank,)
        local = tuple(stage for rank in here for stage in schedule.stages_of(rank))
        _check_stages(stages, local, None if in_process else self.rank)

        talks = schedule.ranks > len(here)
        self._made_group = talks and not dist.is_initialized()
        if self._made_group:
            _init_process_group()
        self._transport: GlooTransport | None = None
        self._control: Control | None = None
        if talks:
            self._transport = GlooTransport()
            self._control = Control(self.rank, schedule.ranks)
            self._control.compare(schedule)

        self.optimizers: dict[int, torch.optim.Optimizer] = {}
        if optimizer is not None:
            for stage in local:
                parameters = list(stages[stage].parameters())
                if parameters:
                    self.optimizers[stage] = optimizer(parameters)

        self._state = StepState(seed)
        self._last = schedule.stages - 1
        self._devices = {stage: _device(stages[stage]) for stage in local}
        self._boundaries = boundaries or {}
        self._count = count
        recomputed = _recomputed(recompute, schedule.stages)
        mine = {stage: v for rank in here for stage, v in versions[rank].items()}
        read = mine if optimizer is not None else {}
        self._stages = {
            stage: Stage(
                stage,
                stages[stage],
                StageWeights(stages[stage], read.get(stage)),
                self._devices[stage],
                loss_fn if stage == self._last else None,
                stage in recomputed,
                self._state,
            )
            for stage in local
        }
        self._groups = _groups(schedule)
        self._under_way: list[Work] = []
        # Without a close, too, the process must not end before its last sends have arrived.
        weakref.finalize(self, _arrive, self._under_way)
        self._hub = InProcessTransport()
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

    def _runner(
        self,
        schedule: Schedule,
        versions: Mapping[int, StageVersions],
        loss_fn: LossFunction,
        trains: bool,
    ) -> _Runner:
        modules = {index: stage.module for index, stage in self._stages.items()}
        cells = _cells(schedule, tuple(modules))
        wirings = Wirings(
            schedule,
            tuple(self._transports),
            modules,
            self._devices,
            loss_fn,
            self._boundaries,
            self._control,
            trains,
        )
        compiler = Compiler(schedule, self._stages, cells, versions, self.optimizers)
        return _Runner(cells, wirings, compiler)

    def step(
        self,
        inputs: Batch | None = None,
        *,
        target: Batch | None = None,
        stage_inputs: Mapping[int, Batch] | None = None,
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
        stage_inputs: Mapping[int, Batch] | None = None,
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
        stage_inputs: Mapping[int, Batch] | None = None,
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
        modes = [(m, m.training) for s in self._stages.values() for m in s.module.modules()]
        try:
            for module, _ in modes:
                module.training = False
            with torch.no_grad():
                return self._pass(self._evaluation, given)
        finally:
            for module, training in modes:
                module.training = training

    def _pass(self, runner: _Runner, given: _Given) -> StepResult:
        started = perf_counter()
        self._state.busy = 0.0
        counts, extras = self._fill(runner.cells, given)
        saved = SavedRng()
        loss: Callable[[], float] | None = None
        outputs = None
        try:
            number = runner.wirings.apply(runner.cells, given.inputs, extras)
            if number not in runner.programs:
                runner.programs[number] = self._compile(runner)
            if runner is self._training:
                for stage in self._stages.values():
                    stage.weights.begin(0)
            self._run(runner.programs[number], runner.cells)
            if self._state.wants_loss:
                loss = self._share_loss(runner.cells, counts)
            if self._state.wants_outputs and self._last in self._stages:
                number = self.schedule.microbatches
                outputs = [runner.cells[self._last, m].result for m in range(number)]
        except BaseException:
            # Nobody may be left to take what is under way; within one process the next step is new.
            self._under_way.clear()
            self._hub.clear()
            for cell in runner.cells.values():
                cell.drop()
            raise
        finally:
            for stage in self._stages.values():
                stage.weights.restore()
            for cell in runner.cells.values():
                cell.clear()
            saved.restore()
        return StepResult(loss, outputs, self._state.busy, perf_counter() - started)

    def close(self) -> None:
        """Give back the process groups that this executor made; safe to call twice."""
        if self._control is not None and self._transport is not None:
            wait(self._under_way)
            self._control.settle()
            self._control.close()
            self._transport.close()
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

    def _fill(self, cells: Cells, given: _Given) -> tuple[list[float], dict[int, list[Microbatch]]]:
        """Put the microbatches into their cells.

        Returns the sample counts on the rank of the loss, and what stages get beside their input.
        """
        number = self.schedule.microbatches
        needs = [(0, given.inputs, "inputs")]
        if self._state.wants_loss:
            needs.append((self._last, given.target, "target"))
        for stage, batch, what in needs:
            if stage in self._stages and batch is None:
                raise ExecutionError(f"rank {self.rank} holds stage {stage} and needs {what}")
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
        for m, (piece, weight) in enumerate(zip(pieces, weights(counts, groups), strict=True)):
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

    def _extras(
        self, cells: Cells, stage_inputs: Mapping[int, Batch]
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
            if stage in self._stages or 0 in self._stages:
                extras[stage] = split(batch, number, f"stage_inputs[{stage}]")
            if stage in self._stages:
                for m, piece in enumerate(extras[stage]):
                    cells[stage, m].extra = piece
        return extras

    def _compile(self, runner: _Runner) -> list[list[Instruction]]:
        """The ranks' instructions for the boundaries that the cells have now."""
        largest = max(cell.wiring.largest() for cell in runner.cells.values())
        more = min(_SMALL_CHANGE // max(largest, 1), 2 * len(runner.cells))
        return [
            runner.compiler.compile(rank, transport, more)
            for rank, transport in self._transports.items()
        ]

    def _run(self, programs: list[list[Instruction]], cells: Cells) -> None:
        if len(programs) == 1:
            self._advance(programs[0])
        else:
            self._take_turns(programs)
        # What was sent last may still be under way; by the end of the next step it has arrived.
        wait(self._under_way)
        for cell in cells.values():
            self._under_way += cell.outputs_going
            self._under_way += cell.grads_going
            cell.outputs_going.clear()
            cell.grads_going.clear()

    def _advance(self, program: Sequence[Instruction]) -> None:
        """Run a rank's instructions, or as many as are given."""
        instruction = None
        profiled = torch.autograd.profiler._is_profiler_enabled  # a range costs what a send does
        try:
            for instruction in program:
                with record_function(str(instruction.action)) if profiled else _NO_RANGE:
                    instruction.run()
        except Exception as error:
            if instruction is None:
                raise
            raise ExecutionError(
                str(error) if isinstance(error, ExecutionError) else _describe(error),
                rank=instruction.rank,
                index=instruction.index,
                action=instruction.action,
                cause=error,
            ) from error

    def _take_turns(self, programs: list[list[Instruction]]) -> None:
        """Run the ranks of this process in turn, each as far as it gets until it waits."""
        reached = [0] * len(programs)
        progress = True
        while progress:
            progress = False
            for turn, program in enumerate(programs):
                first = reached[turn]
                while reached[turn] < len(program) and not program[reached[turn]].waits():
                    self._advance(program[reached[turn] : reached[turn] + 1])
                    reached[turn] += 1
                progress |= reached[turn] > first
        for at, program in zip(reached, programs, strict=True):
            if at < len(program):
                raise ExecutionError(
                    "what it waits for never comes",
                    rank=program[at].rank,
                    index=program[at].index,
                    action=program[at].action,
                )

    def _share_loss(self, cells: Cells, counts: list[float]) -> Callable[[], float]:
        """The step's mean loss, on its way to every rank."""
        source = self.schedule.placement[self._last][0]
        loss = None
        if self._last in self._stages:
            # By microbatch, not by order of arrival.
            losses = [cells[self._last, m].loss for m in range(len(counts))]
            total = sum(n * float(x) for n, x in zip(counts, losses, strict=True) if x is not None)
            loss = total / sum(counts)
        if self._control is not None:
            self._control.settle()
            return self._control.share_loss(source, loss)
        if loss is None:
            raise ExecutionError("no rank has the loss")
        return lambda: loss


def _arrive(works: list[Work]) -> None:
    with suppress(RuntimeError):  # the other side may be gone
        wait(works)


def _proved(schedule: Schedule) -> Schedule:
    """The complete schedule, checked; no process group is touched before."""
    report = check(schedule)
    if not report.ok:
        if os.environ.get("RANK", "0") == "0":
            report.raise_if_errors()
        # Rank 0 says what is wrong; the others need not repeat it.
        raise ScheduleError("the schedule is wrong; rank 0 says why", report.diagnostics)
    replicated = [s for s, held in enumerate(schedule.placement) if len(held) > 1]
    if replicated:
        raise ExecutionError(
            f"stage {replicated[0]} lives on several ranks; the executor can't run replicated "
            "stages yet"
        )
    return insert_communication(schedule)


def _check_stepping(
    schedule: Schedule, versions: list[dict[int, StageVersions]], has_optimizer: bool
) -> None:
    """An optimiser and the schedule's OPTIM_STEPs must go together."""
    steps = {stage: len(v.steps) for by_stage in versions for stage, v in by_stage.items()}
    if has_optimizer and not any(steps.values()):
        raise ExecutionError(
            f"{schedule.name} has no OPTIM_STEP, so the optimizer would never step; pass "
            "optimizer=None and step yourself"
        )
    if has_optimizer:
        return
    for stage, number in sorted(steps.items()):
        if number > 1:
            raise ExecutionError(
                f"{schedule.name} steps stage {stage} {number} times a call, so it needs an "
                "optimizer"
            )
    for rank, actions in enumerate(schedule.actions):
        for index, action in enumerate(actions):
            if action.version is not None:
                raise ExecutionError(
                    "a named weight version needs an optimizer",
                    rank=rank,
                    index=index,
                    action=action,
                )


def _rank(ranks: int) -> int:
    """This process's rank, from the process group or torchrun's environment."""
    if dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
    elif ranks == 1:
        return 0
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    else:
        raise ExecutionError(
            f"the schedule has {ranks} ranks, but this process has no rank; start it with "
            f"torchrun --nproc-per-node {ranks}, or pass in_process=True and all stages"
        )
    if world != ranks:
        raise ExecutionError(f"the schedule has {ranks} ranks, but {world} processes run")
    return rank


_groups_made = count()


def _init_process_group() -> None:
    """Join the ranks that torchrun has started, on keys of the store that no group has used.

    gloo would find the addresses of an earlier group of this job, or of the run before a restart.
    """
    store, rank, world = next(rendezvous("env://"))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    own = PrefixStore(f"schedir/{attempt}/{next(_groups_made)}", store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=world)


def _check_stages(
    stages: Mapping[int, nn.Module], local: tuple[int, ...], rank: int | None
) -> None:
    if rank is None and set(stages) != set(local):
        raise ExecutionError(
            f"in one process all stages are needed, 0..{len(local) - 1}, but modules were given "
            f"for {sorted(stages)}"
        )
    if set(stages) != set(local):
        raise ExecutionError(
            f"rank {rank} holds stages {list(local)}, but modules were given for "
            f"{sorted(stages)}; pass stages={{i: module for i in schedule.stages_of(rank)}}"
        )
    for stage, module in stages.items():
        if not isinstance(module, nn.Module):
            raise ExecutionError(f"stage {stage} is no nn.Module but {type(module).__name__}")
        if _device(module).type != "cpu":
            raise ExecutionError(
                f"stage {stage} is on {_device(module)}; the executor moves tensors with gloo, on "
                "the CPU only, as yet"
            )


def _recomputed(recompute: bool | Collection[int], stages: int) -> Collection[int]:
    """The stages whose forwards are run again."""
    if isinstance(recompute, bool):
        return range(stages) if recompute else ()
    unknown = [stage for stage in recompute if stage not in range(stages)]
    if unknown:
        raise ExecutionError(f"recompute: there is no stage {unknown[0]!r}, only 0..{stages - 1}")
    return recompute


def _device(module: nn.Module) -> torch.device:
    tensors = [*module.parameters(), *module.buffers()]
    return tensors[0].device if tensors else torch.device("cpu")


def _cells(schedule: Schedule, local: tuple[int, ...]) -> Cells:
    cells = {(s, m): Cell(s, m) for s in sorted(local) for m in range(schedule.microbatches)}
    for (stage, m), cell in cells.items():
        following = cells.get((stage + 1, m))
        if following is not None and schedule.placement[stage] == schedule.placement[stage + 1]:
            cell.following, following.previous = following, cell
    return cells


def _groups(schedule: Schedule) -> list[list[int]]:
    """The microbatches that the loss stage accumulates into each of its OPTIM_STEPs."""
    last = schedule.stages - 1
    groups: list[list[int]] = [[]]
    for action in schedule.actions[schedule.placement[last][0]]:
        if action.stage != last:
            continue
        if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT) and action.microbatch is not None:
            groups[-1].append(action.microbatch)
        elif action.kind is Kind.OPTIM_STEP:
            groups.append([])
    return [group for group in groups if group]


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
