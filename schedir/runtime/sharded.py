"""The weights of a stage that fully_shard has wrapped: gathered and given up when the list says so.

FSDP's hooks stay in place, and find nothing to do: weights are gathered before they run, and stay
so after them. All names of torch that are private stand in this module.

    0UNSHARD   all-gathers begin         0F0 waits for them, and computes
    0RESHARD   the full weights go       0REDUCE_GRAD   full gradients become the shards' sums
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, OffloadPolicy, UnshardHandle
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, Placement
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from schedir.errors import ExecutionError
from schedir.graph.compile import graph_of
from schedir.ir import Schedule
from schedir.runtime.arguments import Arguments, TieOf
from schedir.runtime.processes.failure import waiting
from schedir.runtime.processes.grid import Grid


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that is in this process."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def return_local(module: nn.Module) -> RemovableHandle:
    """From now on a module returns the local parts of the DTensors in its output: these travel to
    the next stage, whose processes have the same parts. It can't see how they are placed, so the
    module has to place them in every forward as in the first."""
    first: list[Sequence[object]] = []

    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        placed: list[tuple[Placement, ...]] = []

        def part(tensor: DTensor) -> Tensor:
            if any(placement.is_partial() for placement in tensor.placements):
                raise ExecutionError(
                    f"the stage returned a DTensor placed {tensor.placements}, of which each "
                    "process has a summand and no value; sum it first, by redistribute, or with "
                    "output_layouts="
                )
            placed.append(tensor.placements)
            return local(tensor)

        parts = tree_map_only(DTensor, part, output)
        if not first:
            first.append(placed)
        if placed != first[0]:
            raise ExecutionError(
                f"the stage returned DTensors placed {placed}, but {first[0]} in its first "
                "forward; place them alike, by redistribute: the next stage gets only local parts"
            )
        return parts

    return module.register_forward_hook(hook)


def lying_as(like: Tensor, part: Tensor) -> Tensor:
    """The tensor that has `part` in this process, and lies over processes as `like` does."""
    if not isinstance(like, DTensor):
        return part
    placed, shape, stride = (like.device_mesh, like.placements), like.shape, like.stride()
    return DTensor.from_local(part, *placed, run_check=False, shape=shape, stride=stride)


def settle(parameters: Iterable[nn.Parameter]) -> None:
    """Make gradients lie over processes as their parameters do. Of some, such as a norm's between
    split sequences, each process has made a part: these are summed."""
    for parameter in parameters:
        grad = parameter.grad
        if not isinstance(grad, DTensor) or not isinstance(parameter, DTensor):
            continue
        if grad.placements != parameter.placements:
            with waiting("the sum of a split stage's gradients"):
                parameter.grad = grad.redistribute(placements=parameter.placements)


class _Guard(DefaultAllGather):
    """All-gathers of weights, while a list asks for them; else they are refused."""

    allows = False

    def __call__(self, *args: Any, **keywords: Any) -> dist.Work | None:
        if not self.allows:
            raise ExecutionError(
                "fully_shard gathers weights that the list does not gather here; call the stage's "
                "module within the executor only, and wrap whole submodules that its forward calls"
            )
        return super().__call__(*args, **keywords)


class Sharded:
    """What a list does to the sharded weights of a stage: they are gathered, waited for, given up,
    and their gradients summed. With `each_call` they are summed in calls without an update too.

    If gathers are `free`, the module's own code may gather, give up and sum as well, as torch's
    pipelining lets it. Unless it weighs, torch's default divides sums by the number of processes.
    """

    def __init__(self, stage: int, module: FSDPModule, given: Arguments, each_call: bool) -> None:
        self._stage, self._module, self._guard = stage, module, _Guard()
        self.each_call, self.free = each_call, given.gathers == "free"
        self._root = cast(nn.Module, module)
        self._parts = [part for part in self._root.modules() if isinstance(part, FSDPModule)]
        self._groups = [*_groups(self._root)]
        self._handles: list[UnshardHandle | None] = []
        if not self.free:
            for part in self._parts:
                part._get_fsdp_state()._auto_reshard_after_forward = False
            for group in self._groups:
                group._all_gather_comm = self._guard
                group.post_forward_mesh_info = None  # nothing is given up after a forward
        for group in self._groups:
            if given.weigh is not None and group.gradient_divide_factor is None:
                group.gradient_divide_factor = 1.0  # each weight is a share over all pipelines
            group.force_sum_reduction_for_comms = True  # PREMUL_SUM is unknown to gloo
        self.only_add()

    def only_add(self) -> None:
        """From now on a backward adds up full gradients, and does nothing else."""
        self._module.set_requires_gradient_sync(False)
        self._module.set_reshard_after_backward(False)
        self._module.set_is_last_backward(False)

    @property
    def ways(self) -> int:
        """Over how many processes the weights are sharded: at most, if not all over the same."""
        infos = (group.mesh_info for group in self._groups)
        return max((getattr(info, "shard_mesh_size", 1) for info in infos), default=1)

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """Those that the module computes with now: full ones, once gathered."""
        return [*self._root.parameters()]

    def gather(self) -> None:
        """UNSHARD: begin to gather the full weights; nobody waits here."""
        self._guard.allows = True
        try:
            with waiting(f"the gathering of stage {self._stage}'s weights"):
                self._handles = [part.unshard(async_op=True) for part in self._parts]
        finally:
            self._guard.allows = False

    def wait(self) -> None:
        """Wait until the full weights are there."""
        with waiting(f"the gathering of stage {self._stage}'s weights"):
            for handle in filter(None, self._handles):
                handle.wait()
        self._handles = []

    def release(self) -> None:
        """RESHARD: give the full weights up. Their gradients stay."""
        self.wait()
        for part in self._parts:
            part.reshard()

    def reduce(self) -> None:
        """REDUCE_GRAD: the sums of the full gradients over all ranks become those of the shards, as
        torch's own pipelining does it (`perform_reduce_grad` of its stage.py)."""
        module, root = self._module, self._module._get_fsdp_state()
        module.set_requires_gradient_sync(True)
        module.set_is_last_backward(True)
        try:
            with waiting(f"the sums of stage {self._stage}'s gradients"):
                for state in root._state_ctx.all_states:
                    for group in _groups_of(state):
                        group.post_backward()
                root._root_post_backward_final_callback()
        finally:
            self.only_add()

    def end(self) -> None:
        """A call is over: forget the order of its forwards, for prefetches that never come."""
        self._module._get_fsdp_state()._comm_ctx.post_forward_order.clear()

    def reset(self) -> None:
        """A call has failed: nobody answers any more."""
        self._handles = []
        state = self._module._get_fsdp_state()
        if state._is_root is not None:  # the first forward makes what is to be reset
            # Before torch 2.13 there is no such function, and a failed call leaves FSDP as it is.
            getattr(state, "_reset_iter_state", lambda: None)()


def check_sharded(
    stages: Mapping[int, nn.Module], ties: Iterable[TieOf], schedule: Schedule, grid: Grid
) -> None:
    """Raise ExecutionError unless the stages that the list shards are those that fully_shard has
    wrapped, in a way that the executor can run."""
    listed = graph_of(schedule).sharded
    for tie in ties:
        if len({bool(listed[stage]) for stage, _ in tie}) > 1:
            raise ExecutionError(
                f"of the stages {', '.join(str(stage) for stage, _ in tie)}, which share a "
                "parameter, only some are sharded: shard all of them, or none"
            )
    for stage, module in sorted(stages.items()):
        parts = [(name, m) for name, m in module.named_modules() if isinstance(m, FSDPModule)]
        if not parts:
            if listed[stage]:
                raise ExecutionError(
                    f"{schedule.name} gathers the weights of stage {stage}, but its module is not "
                    "sharded: wrap it by fully_shard, or leave the stage out of schedir.shard"
                )
            continue
        if name := parts[0][0]:
            raise ExecutionError(
                f"stage {stage}: fully_shard has wrapped {name}, but not the stage itself; wrap "
                "the whole module as well, last"
            )
        if not listed[stage]:
            raise ExecutionError(
                f"stage {stage} is wrapped by fully_shard, but {schedule.name} never gathers its "
                "weights: pass schedir.shard(schedule), or name the wrapped stages of all ranks in "
                "its stages="
            )
        if len(schedule.placement[stage]) > 1 or grid.alone:
            raise ExecutionError(
                f"stage {stage} is wrapped by fully_shard, but all its copies are in one pipeline; "
                "pass mesh= with a data dimension, over which it is sharded"
            )
        for _, part in parts:
            part.reshard()  # a forward before may have left the full weights
        for group in _groups(module):
            _check_group(stage, group, grid)


def mesh_of(module: nn.Module) -> DeviceMesh | None:
    """The mesh over which fully_shard has split a module's parameters; None if it has none."""
    group = next(iter(_groups(module)), None)
    return None if group is None else group.mesh_info.mesh


def _groups(module: nn.Module) -> Iterable[FSDPParamGroup]:
    for part in module.modules():
        if isinstance(part, FSDPModule):
            yield from _groups_of(part._get_fsdp_state())


def _groups_of(state: Any) -> list[FSDPParamGroup]:
    """The groups of parameters of an FSDP state; before torch 2.13 there was at most one."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def _check_group(stage: int, group: FSDPParamGroup, grid: Grid) -> None:
    """Raise ExecutionError unless a group of parameters is of one dtype, on the device, and sharded
    over the processes whose gradients are summed."""
    if type(group.offload_policy) is not OffloadPolicy:
        raise ExecutionError(
            f"stage {stage}: fully_shard offloads to the CPU, which the executor does not run; "
            "leave offload_policy out"
        )
    trained = {p.sharded_param.dtype for p in group.fsdp_params if p.sharded_param.requires_grad}
    if len(trained) > 1:
        raise ExecutionError(
            f"stage {stage}: fully_shard has wrapped parameters of {sorted(map(str, trained))} "
            "together; wrap those of each dtype in a module of their own"
        )
    own = {row[grid.rank] for row in grid.processes}
    found = _processes(group.mesh_info.mesh)
    # Experts are split over the rest of the processes before, which send them their tokens.
    if found != own and any(
        not own <= _processes(cast(DTensor, p.sharded_param).device_mesh) for p in group.fsdp_params
    ):
        raise ExecutionError(
            f"stage {stage} is sharded over processes {sorted(found)}, but its gradients are "
            f"summed over {sorted(own)}: pass fully_shard the data dimensions of the executor's "
            "mesh"
        )


def _processes(mesh: DeviceMesh) -> set[int]:
    return {*mesh.mesh.flatten().tolist()}
