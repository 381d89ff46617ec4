"""Whether a schedule, the modules and the executor's other arguments fit each other."""

from __future__ import annotations

import inspect
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import dropwhile
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from schedir.checker import clean_channels, prove
from schedir.errors import ExecutionError, ScheduleError
from schedir.graph.alive import StageVersions
from schedir.ir import Kind, Schedule, ties_of
from schedir.passes import advance_receives
from schedir.runtime.arguments import TieOf
from schedir.runtime.shared_memory import shared_memory


def proved(
    schedule: Schedule, channel: str, ties: Iterable[Iterable[int]], laxest: str | None = None
) -> Schedule:
    """The complete schedule, proved under a channel model; no process group is touched before.

    `laxest` is the model that the user may ask for instead.
    """
    try:
        report = prove(schedule, channel, ties=ties)
    except ValueError as error:
        raise ExecutionError(str(error)) from error
    if report.schedule is not None:
        return report.schedule
    if os.environ.get("RANK", "0") != "0":
        # Rank 0 says what is wrong; the others need not repeat it.
        raise ScheduleError("the schedule is wrong; rank 0 says why", report.diagnostics)
    try:
        return report.proved()
    except ScheduleError as error:
        if laxest not in report.clean_channels:
            raise
        raise ScheduleError(
            f"{error}. That is under {channel}; the list is clean under {laxest}, and "
            f'Executor(channel="{laxest}") has it run so all the same, at your own risk',
            error.diagnostics,
        ) from None


def posted(
    schedule: Schedule, channel: str, ties: Iterable[Iterable[int]], room: int | None
) -> Schedule:
    """The list as it is carried out: its receives ahead, and proved to run so.

    As far ahead as the channel model allows, and `room` for buffers; see `advance_receives`. Raises
    ExecutionError where a list that runs as it is listed does not run so, which would be a fault
    of the pass.
    """
    tied = ties_of(schedule, ties)
    ahead = advance_receives(schedule, channel, room, ties=tied)
    if channel not in clean_channels(ahead, tied):
        raise ExecutionError(
            f"{schedule.name} runs under {channel} as it is listed, but not with its receives "
            "ahead; this is a fault of schedir, please report it"
        )
    return ahead


def check_optimizer(
    made: object, stage: int, given: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """What the user's function has made for a stage, of the parameters that it was given."""
    if not hasattr(made, "step"):
        raise ExecutionError(f"optimizer must return an optimizer, not {type(made).__name__}")
    closure = inspect.signature(made.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ExecutionError(
            f"optimizer: {type(made).__name__}, of stage {stage}, evaluates the loss several times "
            "a step, by a closure; a schedule computes each gradient once, so take one that needs "
            "no closure"
        )
    own = set(map(id, given))
    groups: Sequence[Mapping[str, Iterable[Tensor]]] = getattr(made, "param_groups", ())
    foreign = [p for group in groups for p in group["params"] if id(p) not in own]
    if foreign:
        kind = f"{str(foreign[0].dtype).removeprefix('torch.')}{list(foreign[0].shape)}"
        raise ExecutionError(
            f"optimizer: {type(made).__name__}, of stage {stage}, steps {len(foreign)} parameters "
            f"that are not the stage's, the first of them {kind}; make it of those that the "
            f"function is given: lambda parameters: {type(made).__name__}(parameters, …). What is "
            "trained beside the stages belongs into a module: the last stage, or loss_fn"
        )
    return cast(torch.optim.Optimizer, made)


def check_stepping(
    schedule: Schedule, versions: Sequence[Mapping[int, StageVersions]], has_optimizer: bool
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
    named = np.flatnonzero(schedule.columns.version >= 0)
    if len(named):
        rank, index = schedule.columns.position(named[0])
        raise ExecutionError(
            "a named weight version needs an optimizer",
            rank=rank,
            index=index,
            action=schedule.columns.action(named[0]),
        )


def check_steps_last(schedule: Schedule, what: str) -> None:
    """Raise ExecutionError where a rank goes on after its first OPTIM_STEP: `what` needs all
    gradients before that."""
    for rank, index in _after_steps(schedule):
        actions = schedule.flat[rank]
        at, step = next((i, a) for i, a in enumerate(actions) if a.kind is Kind.OPTIM_STEP)
        raise ExecutionError(
            f"{what} needs all gradients before any rank steps, but {schedule.name} goes on after "
            f"rank {rank} #{at} {step}; list the OPTIM_STEPs last, or do without",
            rank=rank,
            index=index,
            action=actions[index],
        )


def steps_last(schedule: Schedule) -> bool:
    """Whether the OPTIM_STEPs stand after all else on each rank."""
    return not any(_after_steps(schedule))


def _after_steps(schedule: Schedule) -> Iterator[tuple[int, int]]:
    """The rank and index of each action that is listed after an OPTIM_STEP, and is none."""
    for rank, actions in enumerate(schedule.flat):
        after = dropwhile(lambda at: at[1].kind is not Kind.OPTIM_STEP, enumerate(actions))
        yield from ((rank, index) for index, a in after if a.kind is not Kind.OPTIM_STEP)


def check_stages(stages: Mapping[int, nn.Module], local: tuple[int, ...], rank: int | None) -> None:
    """Exactly this rank's stages, or all where `rank` is None."""
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
    for stage, module in sorted(stages.items()):
        if not isinstance(module, nn.Module):
            raise ExecutionError(f"stage {stage} is no nn.Module but {type(module).__name__}")


def check_modules(modules: Mapping[int, nn.Module]) -> None:
    """Each can be run and trained by itself."""
    for stage, module in sorted(modules.items()):
        _check_tensors(stage, module, modules)
        for name, part in module.named_modules():
            if isinstance(part, torch.jit.ScriptModule):
                raise ExecutionError(
                    f"stage {stage}{f' ({name})' if name else ''} is compiled to TorchScript, "
                    "whose weights can't be exchanged for older versions; pass the module that it "
                    "was made from"
                )
            if isinstance(part, (FSDPModule, DistributedDataParallel)):
                wrapper = "fully_shard" if isinstance(part, FSDPModule) else type(part).__name__
                raise ExecutionError(
                    f"stage {stage}{f' ({name})' if name else ''} is wrapped by {wrapper}, which "
                    "talks to other processes at every forward and backward, by no schedule; "
                    "pass the bare module and mesh= with a dimension dp, and REDUCE_GRAD sums "
                    "the gradients"
                )
    if (shared := shared_memory(modules)) is not None:
        one, other = shared
        raise ExecutionError(
            f"stages {one.stage} and {other.stage} hold the same memory, {one.name} of the former "
            f"and {other.name} of the latter, which only one of them can train; give each a copy "
            "of its own (copy.deepcopy), and declare parameters that are to stay one with ties="
        )


def _home(modules: Mapping[int, nn.Module]) -> torch.device:
    """Where the stages of this process belong: where some of them are, else on its GPU, if any."""
    for module in modules.values():
        for tensor in (*module.parameters(), *module.buffers()):
            if not tensor.is_meta:
                return tensor.device
    own = torch.accelerator.current_accelerator(check_available=True)
    if own is None:
        return torch.device("cpu")
    return torch.device(own.type, int(os.environ.get("LOCAL_RANK", "0")))


def _check_tensors(stage: int, module: nn.Module, modules: Mapping[int, nn.Module]) -> None:
    """Parameters and buffers exist, and can be trained."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise ExecutionError(
                f"stage {stage}: {name} has no shape yet, as its module is lazy; run the module "
                "once on an example of its input before you make the executor, on every rank"
            )
        if tensor.is_meta:
            raise ExecutionError(
                f"stage {stage}: {name} is on the device meta, without values; call "
                f'module.to_empty(device="{_home(modules)}"), and load or initialise it'
            )
        if tensor.is_inference():
            raise ExecutionError(
                f"stage {stage}: {name} was made under torch.inference_mode(), so it can't be "
                "trained; make the module outside of it"
            )


def tied_copies(
    stages: Mapping[int, nn.Module], ties: Sequence[TieOf]
) -> list[tuple[TieOf, dict[int, nn.Parameter]]]:
    """Each tie with the copies that are here, by stage."""
    for (stage, name), times in Counter(copy for tie in ties for copy in tie).items():
        if times > 1:  # it would get another sum from each
            raise ExecutionError(
                f"ties: {stage}:{name} stands in two ties; list all copies of it in one"
            )
    found = []
    for tie in ties:
        held = {}
        for stage, name in tie:
            if stage in stages:
                held[stage] = _parameter(stages[stage], stage, name)
        found.append((tie, held))
    return found


def _parameter(module: nn.Module, stage: int, name: str) -> nn.Parameter:
    parameters = dict(module.named_parameters(remove_duplicate=False))
    if name not in parameters:
        raise ExecutionError(
            f"ties: stage {stage} has no parameter {name!r}; it has {', '.join(parameters)}"
        )
    return parameters[name]


def recomputed_stages(recompute: bool | Collection[int], stages: int) -> Sequence[int]:
    """The stages whose forwards the user wants run again, ascending."""
    if isinstance(recompute, bool):
        return range(stages) if recompute else ()
    if not isinstance(recompute, Collection):
        raise ExecutionError(f"recompute must be true, false or a list of stages: {recompute!r}")
    unknown = [stage for stage in recompute if stage not in range(stages)]
    if unknown:
        raise ExecutionError(f"recompute: there is no stage {unknown[0]!r}, only 0..{stages - 1}")
    return sorted(set(recompute))


def device_of(stages: Mapping[int, nn.Module]) -> torch.device:
    """Where this process's stages are; those without tensors go where the others are."""
    found: dict[torch.device, int] = {}
    for stage, module in sorted(stages.items()):
        for tensor in (*module.parameters(), *module.buffers()):
            found.setdefault(tensor.device, stage)
    if len(found) > 1:
        listed = ", ".join(f"stage {stage} on {device}" for device, stage in found.items())
        raise ExecutionError(f"the stages of one process must be on one device, but {listed}")
    device = next(iter(found), torch.device("cpu"))
    if device.type not in ("cpu", "cuda"):
        raise ExecutionError(f"the stages are on {device}; the executor knows cpu and cuda")
    return device
