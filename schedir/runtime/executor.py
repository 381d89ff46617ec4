"""The executor: runs one rank's list exactly as it is printed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
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
from schedir.runtime.call import ACCUMULATE, EVALUATE, INFER, STEP, Keep, StepResult
from schedir.runtime.engine import Engine
from schedir.runtime.feeding import CallArguments
from schedir.runtime.microbatches import Batch, ChunkSpec, rows
from schedir.runtime.plan import plan_of
from schedir.runtime.processes.noticeboard import declining
from schedir.runtime.program.compiler import expect_carried_out
from schedir.runtime.samples import check_loss
from schedir.runtime.segments import Segments
from schedir.runtime.stage.optimizers import as_one
from schedir.simulator import Timeline


class Executor:
    """Runs a schedule on this rank. Every rank makes an executor of its own, under torchrun.

    >>> import torch
    >>> from torch import nn
    >>> from schedir import build
    >>> from schedir.runtime import Executor
    >>> schedule = build("1f1b", ranks=2, microbatches=4)
    >>> stages = {0: nn.Linear(8, 8), 1: nn.Linear(8, 2)}
    >>> sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    >>> with Executor(schedule, stages, nn.MSELoss(), sgd, in_process=True, trace=True) as executor:
    ...     trained = executor.step(torch.ones(8, 8), target=torch.zeros(8, 2))
    ...     evaluated = executor.evaluate(torch.ones(8, 8), target=torch.zeros(8, 2))
    ...     outputs = executor.infer(torch.ones(8, 8))
    ...     (timeline,) = executor.timelines()
    >>> evaluated.loss < trained.loss, len(outputs), timeline.measured.step
    (True, 4, 0)

    The model and its training:

    - `schedule`: a `Schedule`. It is proved before anything is initialised.
    - `stages`: a mapping from each stage of this rank to its module. It has exactly the stages of
      `schedule.stages_of(rank)`; in one process, all stages.
    - `loss_fn`: `loss_fn(output, target)` returns the mean loss over a microbatch, a scalar tensor.
      If `loss_fn` is a module, its parameters are trained with the last stage.
    - `optimizer`: a function that makes the optimiser of a stage, called once for each stage here.
      It is `optimizer(parameters)` or, if it needs two arguments, `optimizer(named_parameters,
      stage)` with a list of (name in the whole model, parameter), for param groups by name.
      None leaves the gradients in `.grad`, and you step.
    - `weigh`: how the microbatches of an update are weighted. With "samples" each has its share of
      their samples. With "equal" all have the same weight, 1 / their number over all pipelines.
      With None losses that are normalised already are summed as they are; see below.
    - `gathers`: with "listed" the weights of stages that fully_shard has wrapped are gathered and
      given up only where the list says so; what a module gathers besides is refused. With "free"
      it may, and its own settings stand, as in torch's pipelining; see below.
    - `count`: `count(target)` returns how many samples the mean loss of a microbatch is over. By
      default these are the target's rows. Pass a function if the loss is the mean over something
      else: tokens that are not padding, or `weight[target].sum()` for class weights. Microbatches
      are weighted by it, so it is for "samples" only. A loss that evidently sums, or averages over
      something else than what is counted, is refused.
    - `boundaries`: a mapping from a stage to "described", if the shape of its output depends on
      data. Then its outputs and their gradients travel with their description in every call; a mark
      on one rank suffices. Or to example tensors of its output, if the shape is the same for every
      microbatch, but which gradients there are depends on data.
    - `recompute`: True for all stages, or a collection of stages. Their forwards keep only their
      input, and run again before the backward (activation checkpointing). The pass
      `schedir.recompute` lists an R for each of their microbatches that has none yet.
    - `ties`: the parameters that several stages share. Each is a list of its copies, as (stage,
      name in the stage's module). The copies get the sum of their gradients and step together, so
      their optimisers must treat them in the same way. If you step yourself, every call of `step`
      adds the sum of that call's gradients to each copy's `.grad`, and you must step all copies in
      the same way.
    - `mesh`: a DeviceMesh. Its dimension `pipeline_dim` has the ranks of the schedule. Each index
      of the `data_dims` is one pipeline with data of its own; all pipelines together are one
      training, and sums are over all of them. All other dimensions are yours, for tensor
      parallelism say: along them processes get the same data. They draw the same random numbers,
      except along the `seed_dims`.

    The gradients:

    - `clip_grad_norm`: before every update, scales the gradients so that their norm over all stages
      is at most this number.
    - `nonfinite`: what to do with NaN and infinity: "raise", "skip" or "ignore"; see below.
    - `scaler`: a torch.amp.GradScaler, for steps under autocast to float16; see below.

    The data:

    - `batch_dim`: the dim along which inputs and target are cut into microbatches; 1 for sequences
      first.
    - `args_chunk_spec` and `kwargs_chunk_spec`: other dims for single tensors; see below.

    The run:

    - `seed`: seeds every forward, together with the number of the step; see `schedir.runtime.rng`.
    - `step`: the number of the first call of `step`, for a training that is resumed.
    - `timeout`: how long a rank waits for another, in seconds or as a timedelta. By default it is
      the timeout of the default process group.
    - `channel`: the channel model under which the list is proved and posted. By default it is the
      transport's: "async" for gloo, "rank" for NCCL. You may name a stricter one, but not
      "direction".
    - `in_process`: run all ranks in this process, in turn, without torchrun. It is for tests and to
      look inside, not for speed.
    - `trace`: record when each entry of the list runs in each call of `step`, on every rank of the
      first pipeline; see `timelines`. It costs about a microsecond an action.

    All ranks must pass the same `weigh`, `gathers`, `recompute`, `batch_dim`, `seed`, `step`,
    `clip_grad_norm`, `nonfinite`, `scaler`, `ties`, `mesh` and its dimensions, `channel` and
    `trace`, and either all or none must pass an `optimizer`: the executor compares them. A rank
    needs `loss_fn`, `count`, `boundaries` and chunk specs only for its own stages.

    You can read `stages`, `loss_fn`, `weigh`, `ties`, `nonfinite` and `scaler` as they were given,
    the `device` of the stages, the optimiser of each stage here in `optimizers`, and the `rank` of
    this process in the schedule, the number of its `pipeline`, and that of its `slice`, along the
    mesh's other dimensions; `where` is the slice in words, "tp 1" say.

    **Batches.** `step`, `evaluate` and `infer` take the same data. `inputs` and `target` are each a
    whole batch, which is cut (a tensor, or a tuple or mapping of tensors), or a list or iterator of
    ready microbatches. An iterator must yield as many as the schedule has. The rank of the first
    stage uses `inputs`, the rank of the last stage `target`. Other ranks may pass them too: they
    are ignored there, but if one of the first and the last rank passes what the other one uses,
    both must pass the same data. The rule is the same for `stage_inputs`, what stages get beside
    their input (tensors and tuples by position, mappings by keyword), and for `loss_kwargs`, the
    keyword arguments of `loss_fn`. All whole batches of a call have the same rows. If shapes in
    `stage_inputs` can change while those of the inputs do not, pass it on the first stage's rank
    too. If the last stage takes its labels from `stage_inputs` and returns the loss, no target is
    needed: `loss_fn` gets None for it, and `count` gets those inputs. On a GPU, tensors on the CPU
    are copied to the GPU of the stages, without waiting if they are in pinned memory. Tensors on
    another GPU are refused.

    **Chunk specs.** `torch.tensor_split` cuts whole batches, inputs and target along `batch_dim`. A
    chunk spec names another dim, as in torch.distributed.pipelining: a dim, "replicate" to give the
    whole tensor to every microbatch, or torch's TensorChunkSpec or _Replicate. None is the default.
    `args_chunk_spec` is for `inputs` that are a tensor or a tuple: one spec for all entries, or one
    for each. `kwargs_chunk_spec` maps names to specs, for `inputs` that are a mapping, and for the
    keywords of `stage_inputs` and `loss_kwargs`. Without a spec, a tensor in those two goes whole
    to every microbatch if neither its dim 0 nor its `batch_dim` has as many entries as the batch
    has rows; otherwise it is refused, as it is if this rank does not know the rows. Values that are
    not tensors go to every microbatch. Ready microbatches are taken as they are, with objects that
    hold tensors, such as a BlockMask; those stay on their device.

    **Between stages.** The output of a stage goes into the forward of the next one: a tuple by
    position and a dict by keyword if forward takes them so, anything else as one argument. Tensors
    travel. None, numbers and strings must stay what they were in the first step of an input shape.
    That step learns the shapes, except across `boundaries` that are "described". It runs every
    stage as often as the list says, on real values, and is slower than the steps after it. Which
    tensors require grad must not change after the first step: make a new Executor to freeze or thaw
    a stage.

    **Gradients.** A step equals gradient accumulation in one process bit for bit, in the order of
    the loss stage's backwards. A stage that lists its backwards in another order adds the same
    gradients in that order, which may round differently. Sums over processes may round differently
    too: each process adds up its gradients first, and from three processes on the transport chooses
    the order. Each update is by the mean over its own microbatches. A microbatch's gradient is
    weighted by its share of the samples of the loss stage's update. A stage that updates after
    other microbatches than the loss stage does (a replicated stage of 1F1B-RR updates once a round)
    sums its gradients over its replicas, and divides them by the sum of those shares; it refuses
    gradients from before a call, because they would be scaled with the rest. If it updates after a
    part of the loss stage's microbatches, these must hold equally many samples.

    **Weights.** With `weigh="equal"` each microbatch counts as one sample, however many rows it
    has, over all pipelines; `result.loss` is the mean of `result.losses`. With `weigh=None` nothing
    is scaled, at no stage: every update is by the sum over its own microbatches, and calls without
    an update add their sums. `result.loss` is the sum of `result.losses`. It is for a loss that is
    normalised already, over the whole batch: a sum over tokens divided by the number of all tokens,
    say. Only there a loss that evidently sums is taken. Both take `result.samples` for the number
    of microbatches. In a short batch of `evaluate` the missing ones count for nothing.

    **Sharded stages.** The gradient divide factor of fully_shard is honoured. If none is set, sums
    over its processes are not divided, because weights are shares over all pipelines; with
    `weigh=None` they are divided by the number of processes, as torch does. `gathers="free"` is for
    a loss that runs a backward of its own inside the forward, and gathers, gives up and sums the
    weights of a part of the stage. It has to do so alike on all processes of that part. The list's
    UNSHARD, RESHARD and REDUCE_GRAD run as well. Such a loss ignores the weight of its microbatch,
    so "free" needs `weigh=None` and no scaler. Without fully_shard nobody sees such a loss: pass
    `weigh=None` yourself.

    **NaN and infinity.** schedir never applies an update that is NaN or infinite, unless you ask
    for "ignore", which checks nothing. With `nonfinite="raise"` the rank that finds one raises
    ExecutionError before it steps, with the microbatch of the loss, or with the stage and parameter
    of the gradient. Gradients are checked after all sums and before clipping. Losses are checked
    without updates too; on a GPU the next call, or `close`, raises the error. With
    `nonfinite="skip"` the call's OPTIM_STEPs are then left out, on all ranks: the gradients are
    cleared, and the weights and the optimiser stay as they are. The gradients of a microbatch whose
    loss is not finite become NaN. `result.skipped` lists what was left out. "skip" needs an
    optimizer, no `update=False`, and a list with its OPTIM_STEPs last.

    **Loss scaling.** With a `scaler`, backwards start from the loss times its scale, and gradients
    are divided by the scale before they are checked and clipped. If any gradient is not finite, all
    stages leave out the update, as with "skip", and the scale shrinks; otherwise it grows. It
    changes in the same way on all ranks, which must make equal scalers. Do not call the scaler
    yourself. Between calls with `update=False` gradients stay scaled. It needs an optimizer, a list
    with its OPTIM_STEPs last, and parameters that are not float16.

    **Processes.** The executor uses the default process group, and initialises one if there is
    none. A schedule of one rank runs without a group. With `in_process`, replicas of a stage share
    its module, optimiser and buffers. (Then BatchNorm's statistics are over the microbatches of all
    replicas; on separate processes each replica has its own.) Each replica still adds up its own
    gradients until REDUCE_GRAD, and reads the weight versions of its own list. Every rank makes the
    same calls in the same order. With several processes, an executor cannot be used again after a
    call has failed. It is a context manager: leaving it calls `close`.

    Raises ScheduleError if the schedule is wrong, before anything is initialised, and
    ExecutionError if the schedule does not fit the arguments, the other ranks or the process group.
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
        weigh: str | None = "samples",
        gathers: str = "listed",
        count: Callable[[Any], float | Tensor] = rows,
        batch_dim: int = 0,
        args_chunk_spec: ChunkSpec = None,
        kwargs_chunk_spec: Mapping[str, ChunkSpec] | None = None,
        clip_grad_norm: float | None = None,
        nonfinite: str = "raise",
        scaler: GradScaler | None = None,
        ties: Sequence[TieOf] = (),
        mesh: DeviceMesh | None = None,
        pipeline_dim: str = "pp",
        data_dims: Sequence[str] = ("dp",),
        seed_dims: Sequence[str] = (),
        seed: int = 0,
        step: int = 0,
        timeout: float | timedelta | None = None,
        channel: str | None = None,
        in_process: bool = False,
        trace: bool = False,
    ) -> None:
        with nullcontext() if in_process else declining(mesh, pipeline_dim, data_dims):
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
                weigh,
                gathers,
                count,
                batch_dim,
                args_chunk_spec,
                kwargs_chunk_spec,
                clip_grad_norm,
                nonfinite,
                scaler,
                ties,
                mesh,
                pipeline_dim,
                data_dims,
                seed_dims,
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
        self.slice, self.where = plan.grid.slice, plan.grid.where
        self.device = plan.device
        self.stages = dict(stages)
        self.loss_fn = loss_fn
        self.ties = tuple(ties)
        self._engine = Engine(plan)
        self._segments = Segments(self._engine, plan)
        self.optimizers = self._engine.optimizers
        self._make_optimizer = optimizer
        self.weigh, self.nonfinite, self.scaler = weigh, nonfinite, scaler

    @property
    def schedule(self) -> Schedule:
        """The list that runs: complete, with its recomputations, and proved.

        Receives are listed as far ahead as the channel model and the buffers allow. The first step
        of an input shape learns how large the buffers are; small ones are posted further ahead.
        """
        return self._engine.schedule

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimisers of this process's stages as one optimiser, for learning-rate schedulers.

        Its i-th param group is a view of the i-th group of every stage's optimiser: a value written
        to it goes to all of them. Every rank makes its scheduler from this optimiser, and steps the
        scheduler after each `step`, even if its stages have no parameters. `zero_grad` and
        `state_dict` cover this process's stages. Do not call its `step`: the schedule steps.

        Raises ExecutionError if you step yourself, so that there is no optimiser, or if the stages'
        optimisers have different numbers of param groups.
        """
        return as_one(self.optimizers, self._make_optimizer, min(self.stages))

    @property
    def steps(self) -> int:
        """The number of the next call of `step`, which seeds its forwards.

        Set it on every rank when you resume a training. The executor's argument `step=` does the
        same.
        """
        return self._engine.steps

    @steps.setter
    def steps(self, number: int) -> None:
        if not is_number(number):
            raise ExecutionError(f"steps must be an int of at least 0, not {number!r}")
        self._engine.steps = number

    @property
    def stop_requested(self) -> bool:
        """Whether the training is to stop now, because a rank has got SIGTERM: job schedulers send
        it before they take a machine back.

        All ranks see the same value after the same call: save a checkpoint then, and end. From the
        first time that this is read, SIGTERM no longer ends the process, unless another process
        is gone: launchers send SIGTERM for that too, and nothing can be saved.
        """
        return self._engine.stop_requested

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
        """Run the list once, from beginning to end: forwards, backwards and updates.

        `Executor` says what `inputs`, `target`, `stage_inputs` and `loss_kwargs` may be.

        - `update`: with False the OPTIM_STEPs are left out. The weights stay, and each call adds
          its mean gradient over the batch (its sum, with `weigh=None`), until a call with True
          applies what was added up.
        - `outputs`: with True the result has what the last stage returned for each microbatch, on
          the rank of the last stage. With a function of (output, target), the result has what that
          function returns for each microbatch, so that less is kept: the number of right answers,
          say. The function is called after the loss, in the order of the forwards. Outputs and
          target are copies, which you may change.

        Raises ExecutionError, which names the action that failed, or how the ranks differ. After
        a failed step its gradients, and the updates that it had made, remain: go on from a
        checkpoint.
        """
        if not update and self.nonfinite == "skip" and self.scaler is None:
            raise ExecutionError(
                'update=False accumulates gradients, and nonfinite="skip" could only drop all of '
                'them: pass nonfinite="raise" or a scaler, or take more microbatches a step'
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
        """Train on a stream of batches while the pipeline stays full; yield the result of each.

        It is for lists that step between backwards, such as pipedream.

        - `batches`: each batch is what one `step` takes, with the same number of microbatches: a
          pair (inputs, target), or a dict of the arguments of `step` without `update` and
          `outputs`.
        - `segment`: the stream is cut into segments of this many microbatches, a multiple of a
          batch's. The last segment may be shorter. A segment is one call: its list runs once from
          beginning to end, weight versions begin at 0, and at its end the pipeline is drained.
          `steps` counts a segment as one step, which seeds its random numbers. The batches of a
          segment are drawn before it begins.
        - `schedule`: `schedule(microbatches)` returns the list of a segment of that length. By
          default it is built as the executor's own list was, by `schedir.build`. Lists and
          connections are kept for each length.

        The result of a batch comes once its last OPTIM_STEP on this rank is done. If you step a
        learning-rate scheduler then, the next batch has the new rate, on every stage. The loss is
        the mean over that batch; there is no gradient norm and there are no outputs. Between two
        results the module's parameters are the newest ones, but the pipeline is full: other calls
        of this executor are refused. If you leave the loop early, the segment is finished first, so
        the weights are those of a drained pipeline. All ranks must leave after the same result. The
        first Ctrl-C finishes the segment too, and is raised then; a second one is raised at once.

        Raises ExecutionError for a list that drains after each batch, for batches that differ
        between ranks in number or content, and whatever `step` raises. An error from `batches` is
        raised between two segments, with the number of batches that were applied.
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
        """Compute the loss of a batch with the current weights: run only the list's forwards.

        Modules are in eval mode during the call. No gradient and no weight changes, nor what a
        module changes in train mode alone, such as BatchNorm's statistics; a module that counts in
        any mode counts. The call does not count as a step. The batch may have fewer rows than the
        schedule has microbatches. Arguments, result and errors are those of `step`.
        """
        given = CallArguments(inputs, target, stage_inputs or {}, loss_kwargs)
        return self._engine.call(EVALUATE, given, _kept(outputs))

    def infer(
        self,
        inputs: Batch | None = None,
        *,
        stage_inputs: Mapping[int, Batch | None] | None = None,
    ) -> list[Any] | None:
        """Return the outputs of the last stage, a list by microbatch; None on ranks without it.

        It runs as `evaluate` does, but without a target and a loss.
        """
        given = CallArguments(inputs, None, stage_inputs or {})
        return self._engine.call(INFER, given, _kept(True)).outputs

    def gather(self, value: Any, what: str = "gather") -> list[Any]:
        """Return the values that all processes pass, in the order of their ranks, on each process.

        The ranks are those of the default process group. Every rank calls it, between two other
        calls. Values are pickled, and sent beside the pipeline's traffic. `what` names the call in
        errors; calls for different things are refused.

        Raises ExecutionError if other ranks make another call, or do not call it in time.
        """
        return self._engine.gather(value, what=what)

    def collect(self, value: Any) -> list[Any] | None:
        """Return the values that all processes pass, on the first process; None on the others.

        It is `gather` for large values: only the first process holds all of them at once.
        """
        return self._engine.collect(value)

    def timelines(self) -> list[Timeline]:
        """Return a measured `Timeline` of each call of `step` since the last call of this method.

        Rank 0 of the first pipeline gets the timelines of all its ranks; other ranks get an empty
        list. Every rank calls it, between two steps. The executor must have `trace=True` and must
        not be closed. Each timeline is returned once. Of many steps the latest are kept: those of
        some 260,000 actions (32,000 on a GPU) over all ranks, but at least 8. A step that has
        failed has no timeline.

        Times are in seconds from the start of the step, when the first entry of any rank starts.
        Compute starts when its input is there. The parts of an overlapped pair have the same times.
        A transfer starts when both its ends are posted, and ends when the rank that waits for it
        finds it there. If no rank had to wait, nobody saw it arrive, and its end is NaN. Entries
        that a step leaves out are NaN too, such as OPTIM_STEPs with `update=False`. Sums of
        gradients start and end as transfers do; with several pipelines they include the wait for
        the other pipelines, which are not recorded. On a GPU the times are those of the device.

        Ranks on one host share its clock. Those of several hosts are compared when the executor is
        made and at each call of this method; between the two their drift is taken to be even.
        `measured.clock_error` is the error that may remain between two clocks, in seconds. `sizes`
        has the bytes that each stage kept in the first step of its input shape.

        With `in_process` all ranks take turns on one thread. Durations of compute are real, but
        their starts show the turns and not the schedule, and no transfer is waited for.

        Raises ExecutionError if nothing is recorded, or if other ranks do not call it in time.
        """
        engines = (self._engine, *self._segments.engines)
        return sorted((t for engine in engines for t in engine.timelines()), key=_step_of)

    def close(self) -> None:
        """Release the process groups that this executor made; safe to call twice."""
        self._segments.close()
        self._engine.close(self._segments.engines)

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
        else:
            self._engine.session.abandon(error)


def _step_of(timeline: Timeline) -> int:
    return -1 if timeline.measured is None else timeline.measured.step


def _kept(outputs: bool | Keep) -> Keep | None:
    if isinstance(outputs, bool):
        return whole if outputs else None

    def kept(output: Any, target: Any) -> Any:
        return outputs(output, tree_map_only(Tensor, torch.clone, target))

    return kept


def whole(output: Any, target: Any) -> Any:
    """Keep the whole output of a microbatch."""
    return output
