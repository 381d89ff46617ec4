"""The executor: interprets one rank's list, exactly as it is printed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from schedir.errors import ExecutionError
from schedir.ir import Schedule, is_number
from schedir.runtime.arguments import (
    Arguments,
    Declared,
    LossFunction,
    OptimizerFactory,
    TieOf,
    enabled_scaler,
)
from schedir.runtime.batch.feeding import CallArguments, check_loss
from schedir.runtime.batch.microbatches import Batch, rows
from schedir.runtime.call import ACCUMULATE, EVALUATE, INFER, STEP, Keep
from schedir.runtime.chunk_specs import ChunkSpec
from schedir.runtime.engine import Engine
from schedir.runtime.plan import plan_of
from schedir.runtime.program.compiler import expect_carried_out
from schedir.runtime.result import StepResult
from schedir.runtime.segments import Segments
from schedir.runtime.stage.optimizers import as_one
from schedir.simulator import Timeline


class Executor:
    """Runs a schedule on this rank; every rank makes one, under torchrun.

    `stages` maps exactly this rank's stages to their modules. `loss_fn(output, target)` returns
    the mean loss over a microbatch, a scalar; if it is a module, its parameters are trained with
    the last stage. `optimizer(parameters)`, or a function that needs two arguments,
    `optimizer(named_parameters, stage)`, is called once per local stage: the latter gets a list of
    (name in the whole model, parameter), so that it can make param groups by name. None leaves
    `.grad` to the caller. `boundaries` declares, by example tensors, the output of stages whose
    shape depends on data, the same for every microbatch. `recompute` names the stages, or says that
    all, keep only the input of a forward and run it again before the backward (activation
    checkpointing): the pass `schedir.recompute` lists an R for each of their microbatches that has
    none yet. `count` says of a microbatch's target how many samples the mean loss is over, where
    that is not its rows: tokens that are not padding, or `weight[target].sum()` for a loss weighed
    by class; microbatches are weighed by it. A loss that is seen to sum, or to be the mean over
    something else than what is counted, is refused.

    `clip_grad_norm` scales the gradients before every update so that their norm over all stages is
    at most that. `nonfinite` says what becomes of NaN and infinity, see below. `ties` names copies
    of one parameter that stages share, each as (stage, name in the stage's module): they get the
    sum of their gradients and step together, so their optimisers must treat them alike. Where the
    caller steps, every call of `step` adds the sum of its own gradients to each copy's `.grad`, and
    the caller steps all copies alike. `mesh`, with dimensions named dp and pp, runs the schedule
    once for each index of dp, on data of its own, as one training: sums are over all.

    `seed` seeds every forward, with the number of the step; see `schedir.runtime.rng`. `step` is
    that of the first call of `step`: where a resumed training goes on. `timeout`, in seconds or a
    timedelta, is how long a rank waits for another; by default as long as the default process
    group does. `channel` is the channel model that the list is proved and posted under, where that
    is not to be the transport's own: gloo's is "async", NCCL's "rank". A stricter one is always
    right; on NCCL "pair" and "edge" are at your own risk, which a warning states.

    Of these a rank needs `loss_fn`, `count`, `boundaries` and the chunk specs for its own stages
    only; `recompute`, `batch_dim`, `seed`, `step`, `clip_grad_norm`, `nonfinite`, `scaler`,
    `ties`, `mesh`, `channel`, `trace`, and whether there is an optimizer, are compared.

    What the executor is of can be read: `stages`, `loss_fn`, `ties`, `nonfinite`, `scaler` as
    given, the `device` of the stages, the optimiser of each stage here in `optimizers`; and which
    process this is, `rank` of the schedule in the `pipeline` of that number.

    With `trace` every rank records when each entry of its list runs in each call of `step`; see
    `timelines`. That costs about a microsecond an action. Of several pipelines the first one's
    ranks do.

    What a stage returns goes into the next one's forward, of any structure: a tuple's entries by
    position and a dict's by keyword if forward takes them so, all else as one argument. Tensors
    travel; None, numbers and strings must stay what they were in the first step of an input shape.
    That step learns the shapes: it runs every stage as often as the list says, on real values, and
    is slower than those after it.

    A step equals gradient accumulation in one process bit for bit, in the order of the loss
    stage's backwards; a stage that lists its backwards in another order adds the same gradients
    up in that one, which may round differently, and so do sums over processes: each adds up its own
    first, and of three or more the transport chooses the order. What requires grad must not change
    after the first step: make a new Executor to freeze or thaw a stage.

    Each update is by the mean over its own microbatches. Gradients are accumulated with the weights
    of the loss stage, the share that each microbatch has in the samples of that stage's update; a
    stage that updates after other microbatches (1F1B-RR's replicated ones, once a round) scales
    what it has, summed over its replicas, by one over the sum of those weights. There gradients
    from before a call are refused, as they would be scaled with the rest.

    What is not finite is never applied. By `nonfinite="raise"` the rank that finds it raises
    ExecutionError before it steps: at a loss, with its microbatch, or at the gradients that its
    OPTIM_STEPs would apply, after all sums and before clipping, with stage and parameter. Losses
    are looked at without updates as well; on a GPU that is said by the next call, or `close`.

    By `nonfinite="skip"` such OPTIM_STEPs are left out: their gradients are cleared, and weights
    and optimizer stay what they are. A list that has its OPTIM_STEPs last leaves out all of them
    or none, on all ranks; in another one each goes by its own gradients. Those of a microbatch
    whose loss is not finite are made NaN. `result.skipped` tells which were left out. There must
    be an optimizer, and no `update=False`; ties need a list with its OPTIM_STEPs last. By
    `"ignore"` nothing is looked at.

    `scaler` is a torch.amp.GradScaler, for steps under autocast to float16: backwards start from
    the loss times its scale, gradients are divided by that before they are clipped and looked at,
    and the steps of all stages are left out together, as by "skip", where one is not finite. Then
    the scale shrinks, else it grows, on all ranks alike; the caller calls nothing of it. All ranks
    make it alike. Between calls with `update=False` gradients stay scaled. It needs an optimizer, a
    list with its OPTIM_STEPs last, and parameters that are not float16.

    Uses the default process group, and initialises one where nobody has. With one rank it runs
    without any, and with `in_process` all ranks run in this process, in turn: `stages` are all
    stages then, and nothing of torchrun is needed; for tests and to look inside, not for speed.
    Replicas of a stage then share its module, its optimiser and its buffers (BatchNorm's statistics
    are those of all their microbatches, which on processes each replica takes for itself); each
    adds up gradients of its own until REDUCE_GRAD, and reads the weight versions of its own list.
    A context manager: leaving it calls `close`.

    What `step`, `evaluate` and `infer` are given: `inputs` and `target` are a whole batch (a
    tensor, or a tuple or mapping of tensors, that is cut), or a list or iterator of ready
    microbatches, of which an iterator gives as many as the schedule has. The rank of the first
    stage uses `inputs`, that of the last `target`; elsewhere they are ignored, but where one of
    these two has what the other uses as well, it must be the same. So are `stage_inputs`, what
    stages get beside their input (tensors and tuples by position, mappings by keyword), and
    `loss_kwargs`, what `loss_fn` takes by keyword. All whole batches have the same rows. A last
    stage that has its labels among its `stage_inputs`, and returns the loss itself, needs no
    target: `loss_fn` is given None for it, and `count` those inputs. On a GPU, tensors on the CPU
    are copied to that of the stages, without waiting where they are in pinned memory; those on
    another GPU are refused. Pass `stage_inputs` on the first stage's rank as well where their
    shapes may change though the input's do not.

    Whole batches are cut by `torch.tensor_split`, inputs and target along `batch_dim` (1 for
    sequences first). Other dims are said by chunk specs, as in torch.distributed.pipelining: for
    each tensor a dim, "replicate" to give all of it to every microbatch, or torch's own
    TensorChunkSpec or _Replicate; None is the default. `args_chunk_spec` is for `inputs` that are a
    tensor or a tuple, one for all or one for each entry; `kwargs_chunk_spec`, by name, for the
    keywords of `inputs` that are a mapping, of `stage_inputs` and of `loss_kwargs`. Without a spec
    a tensor in the latter two goes whole to every microbatch where it can't have one entry for each
    row: its dim 0, and its `batch_dim`, differ from the batch's rows. One that may have is refused,
    and so is any where this rank knows no rows. What is no tensor goes to every microbatch, and
    ready microbatches are taken as they are.

    Every rank makes the same calls, in the same order. With several processes the executor is of no
    use any more once a call has failed.

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
        batch_dim: int = 0,
        args_chunk_spec: ChunkSpec = None,
        kwargs_chunk_spec: Mapping[str, ChunkSpec] | None = None,
        clip_grad_norm: float | None = None,
        nonfinite: str = "raise",
        scaler: GradScaler | None = None,
        ties: Sequence[TieOf] = (),
        mesh: DeviceMesh | None = None,
        seed: int = 0,
        step: int = 0,
        timeout: float | timedelta | None = None,
        channel: str | None = None,
        in_process: bool = False,
        trace: bool = False,
    ) -> None:
        scaler = enabled_scaler(scaler, nonfinite)
        if scaler is not None:
            nonfinite = "skip"
        given = Arguments(
            schedule,
            stages,
            loss_fn,
            optimizer,
            boundaries,
            recompute,
            count,
            batch_dim,
            args_chunk_spec,
            kwargs_chunk_spec,
            clip_grad_norm,
            nonfinite,
            scaler,
            ties,
            mesh,
            seed,
            step,
            timeout,
            channel,
            in_process,
            trace,
        )
        plan = plan_of(given)
        check_loss(plan)
        expect_carried_out(plan.schedule)
        self.rank = plan.grid.rank
        self.pipeline = plan.grid.pipeline
        self.device = plan.device
        self.stages = dict(stages)
        self.loss_fn = loss_fn
        self.ties = tuple(ties)
        self._engine = Engine(plan)
        self._segments = Segments(self._engine, plan)
        self.optimizers = self._engine.parts.optimizers
        self._make_optimizer = optimizer
        self.nonfinite, self.scaler = nonfinite, scaler

    @property
    def schedule(self) -> Schedule:
        """The very list that is carried out: complete, with what is recomputed, and its receives
        listed as far ahead as the channel model and the buffers allow, under which it is proved.
        How large those are is known after the first step of an input shape; small ones go further
        ahead."""
        return self._engine.schedule

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimisers of this process's stages as one, for learning-rate schedulers: a view.

        Its i-th param group stands for the i-th of every stage's optimiser: what is written to it
        goes to all, and what is read is the same in all. Every rank makes its scheduler of it, and
        steps that after `step`, whether its stages have parameters or not. `zero_grad` and
        `state_dict` are of this process's stages; `step` is the schedule's.

        Raises ExecutionError where there is none, as the caller steps, or where stages have unlike
        numbers of groups.
        """
        return as_one(self.optimizers, self._make_optimizer, min(self.stages))

    @property
    def steps(self) -> int:
        """The number of the next call of `step`, which seeds its forwards. Set it, on every rank,
        where a resumed training goes on; `step=` of the executor does the same."""
        return self._engine.steps

    @steps.setter
    def steps(self, number: int) -> None:
        if not is_number(number):
            raise ExecutionError(f"steps must be an int of at least 0, not {number!r}")
        self._engine.steps = number

    def step(
        self,
        inputs: Batch | None = None,
        *,
        target: Batch | None = None,
        stage_inputs: Mapping[int, Batch | None] | None = None,
        loss_kwargs: Batch | None = None,
        update: bool = True,
        outputs: bool | Keep = False,
    ) -> StepResult:
        """Run the list once, from beginning to end.

        What the batches are is said of the executor. With `update=False` its OPTIM_STEPs are left
        out, so that gradients accumulate until a call with True: weights stay what they are, and
        each call adds its mean over the batch. With `outputs=True` the result has what the last
        stage returned, on its rank; with a function of (output, target), what that makes of each
        microbatch there, so that no more need be kept: how many it got right, say. Both are copies,
        to be changed freely; the function is called after the loss, in the order of the forwards.

        Raises ExecutionError, which names the action that failed, or what the ranks differ in.
        Gradients of a step that failed, and the updates of its OPTIM_STEPs before that, stay: go on
        from a checkpoint.
        """
        if not update and self.nonfinite == "skip" and self.scaler is None:
            raise ExecutionError(
                'update=False accumulates gradients, of which nonfinite="skip" could leave out '
                'only all: take "raise", a scaler, or more microbatches'
            )
        given = CallArguments(inputs, target, stage_inputs or {}, loss_kwargs)
        keeps = _kept(outputs) if outputs else None
        return self._engine.call(STEP if update else ACCUMULATE, given, keeps)

    def run(
        self,
        batches: Iterable[tuple[Batch, Batch] | Mapping[str, Any]],
        schedule: Callable[[int], Schedule] | None = None,
        segment: int = 256,
    ) -> Iterator[StepResult]:
        """Train on a stream of batches while the pipeline stays full; yields the result of each.

        For lists that step between backwards, such as pipedream. Each batch is what one `step` is
        given, of as many microbatches: a pair (inputs, target), or a dict of `step`'s arguments
        without `update` and `outputs`. The stream is cut into segments of `segment` microbatches,
        a multiple of a batch's, of which the last may be shorter. A segment is one call: its list
        runs once from beginning to end, weight versions begin at 0, and at its end the pipeline is
        drained; `steps` counts it as one, and its random numbers are of that step. Its batches are
        drawn before it begins. `schedule` makes its list for a number of microbatches; by default
        it is made as the executor's own was, by `schedir.build`. Lists and connections are kept
        for each length.

        A batch's result comes once its last OPTIM_STEP on this rank is done: a learning-rate
        scheduler that is stepped then changes the rate of the next batch, on every stage. Its loss
        is the mean over that batch; it has no gradient norm and no outputs. In between the
        module's parameters are the newest ones, but the pipeline is full: any other call of this
        executor is refused. Whoever leaves the loop early has the segment finished first, so that
        the weights are those of a drained pipeline; all ranks leave after the same result. So does
        Ctrl-C, which is raised then; a second one at once.

        Raises ExecutionError for a list that drains after each batch, for batches that differ
        between ranks in number or content, and what `step` raises; what drawing a batch raises is
        raised between two segments, with how many batches were applied.
        """
        return self._segments.run(batches, schedule, segment)

    def evaluate(
        self,
        inputs: Batch | None = None,
        *,
        target: Batch | None = None,
        stage_inputs: Mapping[int, Batch | None] | None = None,
        loss_kwargs: Batch | None = None,
        outputs: bool | Keep = False,
    ) -> StepResult:
        """The loss of a batch at the present weights: the list's forwards, and nothing else.

        The modules are in eval mode meanwhile. No gradient, statistic or weight changes, and no
        step is counted. The batch may have fewer rows than there are microbatches. Arguments,
        result and errors are those of `step`.
        """
        given = CallArguments(inputs, target, stage_inputs or {}, loss_kwargs)
        return self._engine.call(EVALUATE, given, _kept(outputs))

    def infer(
        self,
        inputs: Batch | None = None,
        *,
        stage_inputs: Mapping[int, Batch | None] | None = None,
    ) -> list[Any] | None:
        """What the last stage returns, microbatch by microbatch, as `evaluate` but without a loss.

        On the rank of the last stage; None elsewhere.
        """
        given = CallArguments(inputs, None, stage_inputs or {})
        return self._engine.call(INFER, given, _kept(True)).outputs

    def gather(self, value: Any) -> list[Any]:
        """What each process gives, on all of them: a message beside the pipeline's traffic.

        In the order of their ranks in the default process group. Every rank has to call it, between
        two other calls; values are pickled.

        Raises ExecutionError where other ranks make another call, or do not call it in time.
        """
        return self._engine.gather(value)

    def collect(self, value: Any) -> list[Any] | None:
        """What each process gives, as `gather`, on the first process alone; None elsewhere. For
        what is large: nobody but the first has all values at once."""
        return self._engine.collect(value)

    def hand_out(self, values: Sequence[Any] | None = None) -> Any:
        """Give every rank of a pipeline an object that only the first stage's rank knows.

        There `values` has one for each rank, which can be pickled; elsewhere it is None. Returns
        this rank's own. All ranks call it, between the same two calls. Raises ExecutionError where
        others fail, or don't come in time.
        """
        return self._engine.hand_out(values)

    def timelines(self) -> list[Timeline]:
        """When each entry ran in every call of `step` since this was called last: a measured
        `Timeline` for each, on rank 0; an empty list elsewhere, and on other pipelines.

        Every rank has to call it, between two steps, of an executor that was made with `trace=True`
        and is not closed. What it returns is forgotten here. Of many steps the latest are kept:
        those of some 260,000 actions (on a GPU 32,000) over all ranks, but 8 at least. A step that
        has failed has no timeline.

        Times are in seconds from the beginning of the step, when the first entry of any rank
        starts. Compute starts when what it waits for is there; the parts of an overlapped pair have
        the same times. A transfer starts when both its ends are posted, and ends when the rank that
        waits for it finds it there. Where nobody had to wait, nobody saw it arrive, and its end is
        NaN; so is all of what a step leaves out, as OPTIM_STEPs with `update=False`. Sums of
        gradients start and end likewise; with several pipelines they also last as long as this one
        waits for others, which are not recorded. On a GPU the times are those of the device.

        The clocks of different ranks are read beside each other when the executor is made and
        whenever this is called, and are taken to drift evenly meanwhile; `measured.clock_error`
        says by how much, in seconds, two of them may still be apart. `sizes` are the bytes that the
        first step of its input shape was found to keep, per stage.

        With `in_process` all ranks take turns on one thread: compute takes as long as it does, but
        when it starts tells of the turns rather than of the schedule, and no transfer is waited
        for.

        Raises ExecutionError where nothing is recorded, or other ranks do not call it in time.
        """
        engines = (self._engine, *self._segments.engines)
        return sorted((t for engine in engines for t in engine.timelines()), key=_step_of)

    def close(self) -> None:
        """Give back the process groups that this executor made; safe to call twice."""
        self._segments.close()
        self._engine.close()

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


def _step_of(timeline: Timeline) -> int:
    return -1 if timeline.measured is None else timeline.measured.step


def _kept(outputs: bool | Keep) -> Keep | None:
    if isinstance(outputs, bool):
        return _whole if outputs else None

    def kept(output: Any, target: Any) -> Any:
        return outputs(output, tree_map_only(Tensor, torch.clone, target))

    return kept


def _whole(output: Any, target: Any) -> Any:
    return output
