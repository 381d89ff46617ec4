"""The interface of torch.distributed.pipelining's schedules, over the executor.

torch's splitter cuts the batches, its merger joins the outputs, and the executor runs the list.
torch's private names of pipelining stand in this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _split_tensor
from torch.distributed.pipelining.schedules import _PipelineSchedule

from schedir.errors import ExecutionError
from schedir.ir import Schedule, expect_schedule
from schedir.library.from_torch import from_torch
from schedir.passes import shard
from schedir.runtime.arguments import timeout_of
from schedir.runtime.call import EVAL, FORWARDS, STEP, Call
from schedir.runtime.executor import Executor, whole
from schedir.runtime.feeding import CallArguments
from schedir.runtime.processes.groups import timeout_of_user
from schedir.runtime.sharded import mesh_of

_THEIRS = {
    *("optimizer", "weigh", "count", "batch_dim", "args_chunk_spec", "kwargs_chunk_spec"),
    *("pipeline_dim", "in_process"),
}
"""The executor's options that torch's schedule decides."""

_NUMBER = "schedir_microbatch"
"""The keyword by which the loss gets the number of its microbatch."""


class TorchSchedule:
    """Runs a schedule object of torch's by schedir's executor, and has the interface of torch's.

    >>> import torch, torch.distributed as dist
    >>> from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    >>> from schedir.runtime import TorchSchedule
    >>> dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, backend="gloo")
    >>> module, loss_fn, losses = torch.nn.Linear(4, 1), torch.nn.MSELoss(), []
    >>> stage = PipelineStage(module, 0, 1, torch.device("cpu"))
    >>> schedule = TorchSchedule(Schedule1F1B(stage, 8, loss_fn))  # all else stays as it was
    >>> _ = schedule.step(torch.randn(16, 4), target=torch.randn(16, 1), losses=losses)
    >>> len(losses)
    8
    >>> schedule.close()
    >>> dist.destroy_process_group()

    - `theirs`: the schedule object, with its stages, its loss, its chunk specs and `scale_grads`.
    - `schedule`: a Schedule that runs in place of torch's list, with the same stages on each rank
      and as many microbatches. You step, so it updates each stage once a call at most.
    - `mesh` and `data_dims`: the mesh of all processes, and its dimensions with data of their own;
      the pipeline's dimension is found by its ranks. By default they are those of `fully_shard`,
      if its mesh is a part of one that has the pipeline's dimension too.
    - `options`: those of `Executor` that torch's schedule does not decide: `recompute`, `seed`,
      `nonfinite`, `timeout`, `trace` and so on.

    Gradients, losses and outputs have the same bits as by torch's own runtime. The executor is made
    at the first call, so parameters may be on the device meta before. Which stages fully_shard has
    wrapped is agreed then over the pipeline's processes: their weights are gathered and given up
    as torch lists it, or as `shard` does in a `schedule` that does not say.

    Some things differ from torch on purpose. Gradients that were there before a call are not
    divided by the number of microbatches once more. No module runs once more to find out shapes.
    `eval` makes no graph. Dropout draws the numbers that the executor's `seed` gives each forward.
    NaN and infinite losses are errors, unless you pass `nonfinite="ignore"`.

    Raises ExecutionError for what the executor can't honour: `dw_builder`, functions of
    `register_custom_function`, `backward_requires_autograd=False`, and values that skip a stage of
    `pipe.build_stage`.
    """

    def __init__(
        self,
        theirs: Any,
        *,
        schedule: Schedule | None = None,
        mesh: DeviceMesh | None = None,
        data_dims: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(theirs, _PipelineSchedule):
            raise ExecutionError(
                "TorchSchedule takes a schedule object of torch.distributed.pipelining, not "
                f"{type(theirs).__name__}"
            )
        for name in sorted(_THEIRS & options.keys()):
            raise ExecutionError(f"{name}=: torch's schedule decides that; leave it out here")
        self._theirs: Any = theirs
        self._stages = stages_of(theirs)
        _check(theirs, self._stages, schedule)
        self._schedule, self._mesh, self._data_dims = schedule, mesh, data_dims
        self._timeout = timeout_of(options.pop("timeout", None))
        self._options = options
        self._loss = _Loss(theirs._loss_fn)
        self._has_first = any(stage.is_first for stage in self._stages)
        self._has_last = any(stage.is_last for stage in self._stages)

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run forwards and backwards, as torch's `step`; without a loss, forwards only.

        The batch is whole, in `args`, `kwargs` and `target`, or ready microbatches, in `arg_mbs`,
        `kwarg_mbs` and `target_mbs`. Returns the merged outputs on the rank of the last stage,
        unless `return_outputs` is False.
        """
        given = self._cut(args, kwargs, target, (arg_mbs, kwarg_mbs, target_mbs), loss_kwargs)
        return self._call(STEP, given, losses, return_outputs)

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run forwards only, as torch's `eval`: modules stay in their mode.

        Arguments and result are those of `step`. Without a target no loss is computed.
        """
        given = self._cut(args, kwargs, target, (arg_mbs, kwarg_mbs, target_mbs), None)
        return self._call(EVAL, given, losses, True)

    def _cut(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        ready: tuple[Any, Any, Any],
        loss_kwargs: Mapping[str, Any] | None,
    ) -> CallArguments:
        """The microbatches that the stages here use, as torch cuts them."""
        theirs, number = self._theirs, self._theirs._n_microbatches
        arguments, keywords, targets = ready
        if any(each is not None for each in ready):
            if args or kwargs or target is not None:
                raise ExecutionError(
                    "pass a whole batch, or ready microbatches in arg_mbs=, kwarg_mbs= and "
                    "target_mbs=, not both"
                )
            arguments, keywords = theirs._check_inputs(arguments, keywords, targets)
        else:
            arguments, keywords = theirs._split_inputs(args, kwargs)
            if target is not None and self._has_last:
                targets = [*_split_tensor(target, TensorChunkSpec(0), number)]
        inputs = [*map(_as_input, arguments)] if self._has_first else None
        extras = {stage.stage_index: keywords for stage in self._stages} if any(keywords) else {}
        numbered = [{**(loss_kwargs or {}), _NUMBER: m} for m in range(number)]
        return CallArguments(inputs, targets if self._has_last else None, extras, numbered)

    def _call(
        self, kind: Call, given: CallArguments, losses: list[Tensor] | None, return_outputs: bool
    ) -> Any:
        _check(self._theirs, self._stages, self._schedule)
        engine = self.executor._engine
        engine.session.set_timeout(self.timeout)
        if self._theirs._loss_fn is None:
            kind = FORWARDS
        divides = kind.trains and self._theirs.scale_grads
        parameters = self._parameters if divides else ()
        earlier = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            result = engine.call(kind, given, whole if return_outputs else None)
            # What the call has added is divided once, as torch does after the sums.
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(self._theirs._n_microbatches)
        finally:
            for parameter, grad in zip(parameters, earlier, strict=True):
                if grad is not None:
                    parameter.grad = grad if parameter.grad is None else grad.add_(parameter.grad)
        if not self._has_last:
            return None
        if losses is not None and kind.has_loss:
            losses[:] = self._loss.found
        return self._theirs._merge_outputs(result.outputs) if return_outputs else None

    @property
    def timeout(self) -> timedelta:
        """How long a rank waits for another one. By default it is that of the default process
        group, read at each call. Set it on all ranks, between two calls, in seconds too."""
        return self._timeout or timeout_of_user()

    @timeout.setter
    def timeout(self, timeout: float | timedelta | None) -> None:
        self._timeout = timeout_of(timeout)

    def close(self) -> None:
        """Close the executor, if it was made; safe to call twice."""
        if "executor" in vars(self):
            self.executor.close()

    @cached_property
    def _parameters(self) -> Sequence[nn.Parameter]:
        return [p for stage in self._stages for p in stage.submod.parameters()]

    @cached_property
    def executor(self) -> Executor:
        """The executor, made at the first call or when it is first read, on all ranks."""
        stages, theirs = self._stages, self._theirs
        group = stages[0].group
        wrapped = [stage for stage in stages if isinstance(stage.submod, FSDPModule)]
        found = next(filter(None, (mesh_of(stage.submod) for stage in wrapped)), None)
        mesh = self._mesh
        if mesh is None and found is not None:
            mesh = found._get_root_mesh()
        pipeline_dim = None if mesh is None else _dim_of(group, mesh)
        names = None if found is None else found.mesh_dim_names
        said: list[Any] = [None] * dist.get_world_size(group)
        own = [stage.stage_index for stage in wrapped], names, pipeline_dim
        dist.all_gather_object(said, own, group=group)
        gathers = sorted(stage for held, *_ in said for stage in held)
        placed: dict[str, Any] = {}
        if gathers or self._mesh is not None:
            if not all(dim for *_, dim in said):
                raise ExecutionError(
                    "TorchSchedule finds no mesh with the dimension of the pipeline on each rank: "
                    "pass mesh=, with that dimension and those of the data, and data_dims="
                )
            data = self._data_dims or next((names for _, names, _ in said if names), ("dp",))
            placed = {"mesh": mesh, "pipeline_dim": pipeline_dim, "data_dims": data}
        schedule = self._schedule
        if schedule is None:
            schedule = from_torch(theirs, gathers=gathers)
        else:
            schedule = shard(schedule, gathers)
        return Executor(
            schedule,
            {stage.stage_index: stage.submod for stage in stages},
            self._loss,
            weigh=None,
            timeout=self.timeout,
            **placed,
            **self._options,
        )


def stages_of(theirs: Any) -> list[Any]:
    """The stages of a schedule of torch's that are on this rank."""
    return getattr(theirs, "_stages", None) or [theirs._stage]


class _Loss(nn.Module):
    """torch's loss; it keeps that of each microbatch, and its own parameters if it has any."""

    def __init__(self, loss_fn: Any) -> None:
        super().__init__()
        self._loss_fn = loss_fn
        self._by_microbatch: dict[int, Tensor] = {}

    def forward(self, output: Any, target: Any, **keywords: Any) -> Any:
        number = keywords.pop(_NUMBER)
        loss = self._loss_fn(output, target, **keywords)
        if isinstance(loss, Tensor):  # the executor refuses anything else
            self._by_microbatch[number] = loss.detach()
        return loss

    @property
    def found(self) -> list[Tensor]:
        """The losses of the latest call, by microbatch."""
        by_microbatch = (self._by_microbatch[m] for m in range(len(self._by_microbatch)))
        return [loss.reshape(()) if loss.dim() else loss for loss in by_microbatch]


def _as_input(given: Any) -> Any:
    """A microbatch of positional arguments as the executor takes it: one tensor alone."""
    if not isinstance(given, tuple):
        raise ExecutionError(f"arg_mbs: each microbatch is a tuple, not {type(given).__name__}")
    return given[0] if len(given) == 1 and isinstance(given[0], Tensor) else given


def _dim_of(group: dist.ProcessGroup, mesh: DeviceMesh) -> str | None:
    """The dimension of a mesh along which the processes of a group lie."""
    ranks = dist.get_process_group_ranks(group)
    for name in mesh.mesh_dim_names or ():
        if dist.get_process_group_ranks(mesh.get_group(name)) == ranks:
            return name
    return None


def _check(theirs: Any, stages: Sequence[Any], schedule: Schedule | None) -> None:
    """Raise ExecutionError for what the executor can't honour."""
    if schedule is not None:
        expect_schedule(schedule)
        if schedule.microbatches != theirs._n_microbatches:
            raise ExecutionError(
                f"schedule= has {schedule.microbatches} microbatches, but torch's schedule "
                f"{theirs._n_microbatches}"
            )
    refused = {
        "backward_requires_autograd=False": not getattr(
            theirs, "_backward_requires_autograd", True
        ),
        "register_custom_function": getattr(theirs, "_comp_type_to_function_map", None),
        "dw_builder": any(stage.dw_builder is not None for stage in stages),
        "a value that skips a stage of pipe.build_stage": any(map(_skips, stages)),
    }
    for what, is_there in refused.items():
        if is_there:
            raise ExecutionError(
                f"TorchSchedule can't run {what}; leave it out, or keep torch's schedule"
            )


def _skips(stage: Any) -> bool:
    """Whether a stage takes a value of an earlier one than the one before it, or of the model."""
    if stage.is_first or not hasattr(stage, "pipe_info"):
        return False
    before = stage.stage_index - 1
    for given in stage.node.args:
        while given.op == "call_function":  # an entry of what a stage returns
            given = given.args[0]
        if stage.submod_to_stage_index.get(given.name) != before:
            return True
    return False
