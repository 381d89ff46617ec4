"""The executor's arguments, and their checks: numbers, functions, modules and their memory.

Each stage trains its own tensors. If several stages shared a parameter, or running statistics, each
of them would step it, or it would get the gradients of one only; on separate processes the copies
would silently differ.
"""

from __future__ import annotations

import inspect
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from schedir.errors import ExecutionError
from schedir.ir import Schedule, expect_schedule, is_number
from schedir.runtime.memory import shared_memory
from schedir.runtime.microbatches import ChunkSpec, checked, rows

LossFunction: TypeAlias = Callable[..., Tensor]
OptimizerFactory: TypeAlias = (
    Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    | Callable[[Iterable[tuple[str, nn.Parameter]], int], torch.optim.Optimizer]
)

TieOf: TypeAlias = Sequence[tuple[int, str]]
"""The copies of one shared parameter: by stage, and by name in the stage's module."""

Declared: TypeAlias = Any
"""A boundary by example: a tensor, or a structure of tensors and constants. Or `DESCRIBED`."""

DESCRIBED = "described"
"""The mark of a boundary whose payloads travel with their description in every call."""


@attrs.frozen(eq=False)
class Arguments:
    """The arguments of `Executor`, as they were given."""

    schedule: Schedule
    stages: Mapping[int, nn.Module]
    loss_fn: LossFunction
    optimizer: OptimizerFactory | None
    boundaries: Mapping[int, Declared] | None
    recompute: bool | Collection[int]
    weigh: str | None
    gathers: str
    count: Callable[[Any], float | Tensor]
    batch_dim: int
    args_chunk_spec: ChunkSpec
    kwargs_chunk_spec: Mapping[str, ChunkSpec] | None
    clip_grad_norm: float | None
    nonfinite: str
    scaler: GradScaler | None
    ties: Sequence[TieOf]
    mesh: DeviceMesh | None
    pipeline_dim: str
    data_dims: Sequence[str]
    seed_dims: Sequence[str]
    seed: int
    step: int
    timeout: float | timedelta | None
    channel: str | None
    in_process: bool
    trace: bool


def check_arguments(given: Arguments) -> None:
    """Raise ExecutionError for arguments that would fail later, or train the wrong thing."""
    try:
        expect_schedule(given.schedule)
    except TypeError as error:
        raise ExecutionError(str(error)) from None
    _check_functions(given)
    _check_weights(given)
    _check_numbers(given)
    checked(given.args_chunk_spec, "args_chunk_spec")
    by_name: object = given.kwargs_chunk_spec
    if by_name is not None and not isinstance(by_name, Mapping):
        raise ExecutionError(
            "kwargs_chunk_spec must map keywords to their chunk specs, such as "
            f'{{"mask": 0, "bias": "replicate"}}, not {by_name!r}'
        )
    checked(dict(given.kwargs_chunk_spec or {}), "kwargs_chunk_spec")
    if not isinstance(given.boundaries, Mapping | None):
        raise ExecutionError(
            f"boundaries must be by stage, such as {{0: {DESCRIBED!r}}}, not {given.boundaries!r}"
        )
    for stage, boundary in (given.boundaries or {}).items():
        if stage not in range(given.schedule.stages):
            raise ExecutionError(
                f"boundaries: there is no stage {stage!r}, only 0..{given.schedule.stages - 1}"
            )
        if isinstance(boundary, str) and boundary != DESCRIBED:
            raise ExecutionError(
                f"boundaries: stage {stage} has {boundary!r}; give {DESCRIBED!r}, or an example of "
                "its output"
            )
    for tie in given.ties:
        if not isinstance(tie, Sequence) or not all(
            isinstance(copy, tuple) and list(map(type, copy)) == [int, str] for copy in tie
        ):
            raise ExecutionError(
                f"ties: each is a list of copies (stage, name in its module), not {tie!r}"
            )


def _check_functions(given: Arguments) -> None:
    stages: object = given.stages
    if not isinstance(stages, Mapping):
        raise ExecutionError(
            f"stages must map each stage's number to its module, not {type(stages).__name__}"
        )
    loss_fn: object = given.loss_fn
    if given.schedule.stages - 1 in stages and (isinstance(loss_fn, type) or not callable(loss_fn)):
        got = loss_fn if isinstance(loss_fn, type) else type(loss_fn).__name__
        raise ExecutionError(
            "loss_fn must be a function (output, target) -> the microbatch's mean loss, where the "
            f"last stage runs, not {got}"
        )
    if given.optimizer is not None and not callable(given.optimizer):
        raise ExecutionError(
            "optimizer must be a function of parameters that makes one, such as "
            f"lambda p: torch.optim.AdamW(p), not {type(given.optimizer).__name__}"
        )


def _check_weights(given: Arguments) -> None:
    if given.weigh not in ("samples", "equal", None):
        raise ExecutionError(f'weigh must be "samples", "equal" or None, not {given.weigh!r}')
    count: object = given.count
    if given.weigh != "samples" and count is not rows:
        raise ExecutionError(
            f"count= counts the samples of a microbatch, but weigh={given.weigh!r} does not weigh "
            "by samples: leave one of the two out"
        )
    if given.gathers not in ("listed", "free"):
        raise ExecutionError(f'gathers must be "listed" or "free", not {given.gathers!r}')
    if given.gathers == "free" and (given.weigh is not None or given.scaler is not None):
        raise ExecutionError(
            'gathers="free" is for losses that make their own backward, with a weight of 1: pass '
            "weigh=None, and no scaler"
        )


def optimizer_of(
    make: OptimizerFactory, named: Sequence[tuple[str, nn.Parameter]], stage: int
) -> object:
    """Call the user's function for a stage: with (named parameters, stage) if it needs two
    arguments, otherwise with the parameters."""
    make_of: Callable[..., object] = make
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        parameters = {}.values()
    positional = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    needed = [one for one in parameters if one.default is one.empty and one.kind in positional]
    return make_of(named, stage) if len(needed) == 2 else make_of([p for _, p in named])


def whole_name(name: str) -> str:
    """The name of a tensor in the whole model: without torch.compile's prefix, and without the
    number that torch.export adds to a module that is called again."""
    return re.sub(r"@\d+(?=\.|$)", "", name.replace("_orig_mod.", ""))


def enabled_scaler(scaler: object, nonfinite: str) -> GradScaler | None:
    """The executor's scaler; None for one that is not enabled. Raises ExecutionError for an object
    that is no scaler, and with `nonfinite="ignore"`."""
    if scaler is None:
        return None
    if not isinstance(scaler, GradScaler):
        raise ExecutionError(f"scaler must be a torch.amp.GradScaler, not {type(scaler).__name__}")
    if nonfinite == "ignore":
        raise ExecutionError(
            'a scaler skips updates whose gradients are not finite, but nonfinite="ignore" checks '
            "no gradients: leave one of the two out"
        )
    return scaler if scaler.is_enabled() else None


def _check_numbers(given: Arguments) -> None:
    norm: object = given.clip_grad_norm
    # NaN fails this test too.
    if norm is not None and not (isinstance(norm, (int, float)) and norm >= 0):
        raise ExecutionError(f"clip_grad_norm must be a number of at least 0, not {norm!r}")
    rules = "raise", "skip", "ignore"
    if given.nonfinite not in rules:
        raise ExecutionError(
            f"nonfinite must be one of {', '.join(map(repr, rules))}, not {given.nonfinite!r}"
        )
    if not isinstance(given.seed, int):
        raise ExecutionError(f"seed must be an integer, not {given.seed!r}")
    if not is_number(given.step):
        raise ExecutionError(f"step must be an int of at least 0, not {given.step!r}")
    if not is_number(given.batch_dim):
        raise ExecutionError(f"batch_dim must be an int of at least 0, not {given.batch_dim!r}")


def timeout_of(timeout: object) -> timedelta | None:
    """The timeout that the user wants, in seconds or as a timedelta; None for the default."""
    if timeout is None:
        return None
    found = timeout if isinstance(timeout, timedelta) else None
    if isinstance(timeout, (int, float)) and 0 < timeout < timedelta.max.total_seconds():
        found = timedelta(seconds=timeout)
    if found is None or found <= timedelta():
        raise ExecutionError(
            f"timeout must be a number of seconds above 0, or a timedelta, not {timeout!r}"
        )
    return found


def recomputed_stages(recompute: bool | Collection[int], stages: int) -> Sequence[int]:
    """The stages whose forwards the user wants run again, ascending."""
    if isinstance(recompute, bool):
        return range(stages) if recompute else ()
    if not isinstance(recompute, Collection):
        raise ExecutionError(
            f"recompute must be True, False or a list of stages, not {recompute!r}"
        )
    unknown = [stage for stage in recompute if stage not in range(stages)]
    if unknown:
        raise ExecutionError(f"recompute: there is no stage {unknown[0]!r}, only 0..{stages - 1}")
    return sorted(set(recompute))


def check_stages(stages: Mapping[int, nn.Module], local: tuple[int, ...], rank: int | None) -> None:
    """Raise ExecutionError unless `stages` has exactly this rank's modules; all if `rank` is
    None."""
    if rank is None and set(stages) != set(local):
        raise ExecutionError(
            f"in one process all stages are needed, 0..{len(local) - 1}, but modules were given "
            f"for {sorted(stages)}; to run one rank in each process, start with torchrun"
        )
    if set(stages) != set(local):
        raise ExecutionError(
            f"rank {rank} holds stages {list(local)}, but modules were given for "
            f"{sorted(stages)}; pass stages={{i: module for i in schedule.stages_of(rank)}}"
        )
    for stage, module in sorted(stages.items()):
        if not isinstance(module, nn.Module):
            raise ExecutionError(f"stage {stage} must be an nn.Module, not {type(module).__name__}")


def check_modules(modules: Mapping[int, nn.Module]) -> None:
    """Raise ExecutionError unless each module can be run and trained by itself."""
    for stage, module in sorted(modules.items()):
        _check_tensors(stage, module, modules)
        for name, part in module.named_modules():
            if isinstance(part, torch.jit.ScriptModule):
                raise ExecutionError(
                    f"stage {stage}{f' ({name})' if name else ''} is compiled to TorchScript, "
                    "whose weights can't be replaced by older versions; pass the module that it "
                    "was made from"
                )
            if isinstance(part, DistributedDataParallel):
                raise ExecutionError(
                    f"stage {stage}{f' ({name})' if name else ''} is wrapped by "
                    f"{type(part).__name__}, which talks to other processes in every backward, "
                    "outside of the schedule; pass the bare module, and mesh= with a dimension dp: "
                    "REDUCE_GRAD sums the gradients then. Or wrap it by fully_shard"
                )
    if (shared := shared_memory(modules)) is not None:
        one, other = shared
        raise ExecutionError(
            f"stages {one.stage} and {other.stage} hold the same memory, {one.name} of the former "
            f"and {other.name} of the latter, but only one of them can train it; give each its own "
            "copy (copy.deepcopy), and declare parameters that must stay equal with ties="
        )


def device_of(stages: Mapping[int, nn.Module]) -> torch.device:
    """The device of this process's stages; a stage without tensors is on the others' device."""
    found: dict[torch.device, int] = {}
    for stage, module in sorted(stages.items()):
        for tensor in (*module.parameters(), *module.buffers()):
            found.setdefault(tensor.device, stage)
    if len(found) > 1:
        listed = ", ".join(f"stage {stage} on {device}" for device, stage in found.items())
        raise ExecutionError(f"the stages of one process must be on one device, but {listed}")
    device = next(iter(found), torch.device("cpu"))
    if device.type not in ("cpu", "cuda"):
        raise ExecutionError(
            f"the stages are on {device}, but the executor runs on cpu and cuda only; move them"
        )
    return device


def tied_copies(
    stages: Mapping[int, nn.Module], ties: Sequence[TieOf]
) -> list[tuple[TieOf, dict[int, nn.Parameter]]]:
    """Each tie with its copies on this process, by stage."""
    for (stage, name), times in Counter(copy for tie in ties for copy in tie).items():
        if times > 1:  # each tie would give it another sum
            raise ExecutionError(
                f"ties: {stage}:{name} stands in two ties; list all its copies in one tie"
            )
    found = []
    for tie in ties:
        held = {}
        for stage, name in tie:
            if stage not in stages:
                continue
            parameters = dict(stages[stage].named_parameters(remove_duplicate=False))
            if name not in parameters:
                raise ExecutionError(
                    f"ties: stage {stage} has no parameter {name!r}; it has {', '.join(parameters)}"
                )
            held[stage] = parameters[name]
        found.append((tie, held))
    return found


def _check_tensors(stage: int, module: nn.Module, modules: Mapping[int, nn.Module]) -> None:
    """Raise ExecutionError unless parameters and buffers have values, and can be trained."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise ExecutionError(
                f"stage {stage}: {name} has no shape yet, because its module is lazy; before you "
                "make the executor, run the module once on an example input, on every rank"
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


def _home(modules: Mapping[int, nn.Module]) -> torch.device:
    """The device that this process's stages belong on: that of the others, or its GPU, if any."""
    for module in modules.values():
        for tensor in (*module.parameters(), *module.buffers()):
            if not tensor.is_meta:
                return tensor.device
    own = torch.accelerator.current_accelerator(check_available=True)
    if own is None:
        return torch.device("cpu")
    return torch.device(own.type, int(os.environ.get("LOCAL_RANK", "0")))
