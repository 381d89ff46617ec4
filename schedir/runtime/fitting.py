"""Whether a schedule, the executor's arguments and the other ranks fit, before anything runs."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

import attrs
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from schedir.check import check
from schedir.errors import ExecutionError, ScheduleError
from schedir.ir import Kind, Schedule, StageVersions
from schedir.passes import insert_communication

TieOf: TypeAlias = Sequence[tuple[int, str]]
"""The copies of one shared parameter: by stage, and by name in the stage's module."""


def proved(schedule: Schedule, ties: Iterable[Iterable[int]]) -> Schedule:
    """The complete schedule, checked; no process group is touched before."""
    try:
        report = check(schedule, ties=ties)
    except ValueError as error:
        raise ExecutionError(str(error)) from error
    if not report.ok:
        if os.environ.get("RANK", "0") == "0":
            report.raise_if_errors()
        # Rank 0 says what is wrong; the others need not repeat it.
        raise ScheduleError("the schedule is wrong; rank 0 says why", report.diagnostics)
    return insert_communication(schedule)


def check_arguments(
    schedule: object,
    stages: object,
    optimizer: object,
    boundaries: Iterable[object],
    clip_grad_norm: object,
    ties: Sequence[object],
    seed: object,
) -> None:
    """What else would fail later, or train something that was not meant."""
    if not isinstance(schedule, Schedule):
        raise ExecutionError(
            f"schedule must be a Schedule, not {type(schedule).__name__}; make one with "
            'schedir.build("1f1b", ranks=2, microbatches=8)'
        )
    if not isinstance(stages, Mapping):
        raise ExecutionError(
            f"stages must map each stage's number to its module, not {type(stages).__name__}"
        )
    if optimizer is not None and not callable(optimizer):
        raise ExecutionError(
            "optimizer must be a function that makes one of parameters, such as "
            f"lambda p: torch.optim.AdamW(p), not {type(optimizer).__name__}"
        )
    for stage in boundaries:
        if stage not in range(schedule.stages):
            raise ExecutionError(
                f"boundaries: there is no stage {stage!r}, only 0..{schedule.stages - 1}"
            )
    # Not a number, too, is not at least 0.
    if clip_grad_norm is not None and not (
        isinstance(clip_grad_norm, (int, float)) and clip_grad_norm >= 0
    ):
        raise ExecutionError(
            f"clip_grad_norm must be a number of at least 0, not {clip_grad_norm!r}"
        )
    for tie in ties:
        if not isinstance(tie, Sequence) or not all(
            isinstance(copy, tuple) and list(map(type, copy)) == [int, str] for copy in tie
        ):
            raise ExecutionError(
                f"ties: each is a list of copies (stage, name in its module), not {tie!r}"
            )
    if not isinstance(seed, int):
        raise ExecutionError(f"seed must be an integer, not {seed!r}")


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
    for rank, actions in enumerate(schedule.actions):
        for index, action in enumerate(actions):
            if action.version is not None:
                raise ExecutionError(
                    "a named weight version needs an optimizer",
                    rank=rank,
                    index=index,
                    action=action,
                )


def check_clipping(schedule: Schedule) -> None:
    """The norm of all gradients is known only where no rank goes on behind its first step."""
    for rank, actions in enumerate(schedule.actions):
        steps = [i for i, action in enumerate(actions) if action.kind is Kind.OPTIM_STEP]
        if steps and len(actions) - steps[0] > len(steps):
            index = next(i for i in range(steps[0], len(actions)) if i not in steps)
            raise ExecutionError(
                f"clip_grad_norm needs all gradients before any rank steps, but {schedule.name} "
                f"goes on behind rank {rank} #{steps[0]} {actions[steps[0]]}; list the "
                "OPTIM_STEPs last, or do without clipping",
                rank=rank,
                index=index,
                action=actions[index],
            )


def check_stages(
    schedule: Schedule, stages: Mapping[int, nn.Module], local: tuple[int, ...], rank: int | None
) -> None:
    """Exactly this rank's stages, or all where `rank` is None, each a module of its own."""
    replicated = [s for s, held in enumerate(schedule.placement) if len(held) > 1]
    if rank is None and replicated:
        raise ExecutionError(
            f"stage {replicated[0]} lives on several ranks, and each replica needs a module; in "
            "one process there is one for each stage only: run it under torchrun"
        )
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
    owner: dict[nn.Parameter, int] = {}
    for stage, module in sorted(stages.items()):
        if not isinstance(module, nn.Module):
            raise ExecutionError(f"stage {stage} is no nn.Module but {type(module).__name__}")
        for name, part in module.named_modules():
            if isinstance(part, (FSDPModule, DistributedDataParallel)):
                wrapper = "fully_shard" if isinstance(part, FSDPModule) else type(part).__name__
                raise ExecutionError(
                    f"stage {stage}{f' ({name})' if name else ''} is wrapped by {wrapper}, which "
                    "talks to other processes at every forward and backward, by no schedule; "
                    "pass the bare module and mesh= with a dimension dp, and REDUCE_GRAD sums "
                    "the gradients"
                )
        for name, parameter in module.named_parameters():
            other = owner.setdefault(parameter, stage)
            if other != stage:
                raise ExecutionError(
                    f"stages {other} and {stage} hold the same parameter, {name} in the latter; "
                    "give each a copy of its own and declare them with ties="
                )


def tied_copies(
    schedule: Schedule, stages: Mapping[int, nn.Module], ties: Sequence[TieOf]
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
            if len(schedule.placement[stage]) > 1:
                raise ExecutionError(
                    f"ties: stage {stage} has replicas; tie stages of one rank only"
                )
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


def recomputed_stages(recompute: bool | Collection[int], stages: int) -> Collection[int]:
    """The stages whose forwards are run again."""
    if isinstance(recompute, bool):
        return range(stages) if recompute else ()
    if not isinstance(recompute, Collection):
        raise ExecutionError(f"recompute must be true, false or a list of stages: {recompute!r}")
    unknown = [stage for stage in recompute if stage not in range(stages)]
    if unknown:
        raise ExecutionError(f"recompute: there is no stage {unknown[0]!r}, only 0..{stages - 1}")
    return recompute


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


def loss_groups(schedule: Schedule) -> list[list[int]]:
    """The microbatches that the loss stage accumulates into each of its OPTIM_STEPs, over all of
    the ranks that hold it."""
    last = schedule.stages - 1
    groups: dict[int, list[int]] = {}
    for rank in schedule.placement[last]:
        steps = 0
        for action in schedule.actions[rank]:
            if action.stage != last:
                continue
            if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                assert action.microbatch is not None  # a backward has one
                groups.setdefault(steps, []).append(action.microbatch)
            elif action.kind is Kind.OPTIM_STEP:
                steps += 1
    return [groups[step] for step in sorted(groups)]


@attrs.frozen
class Claim:
    """What a process holds, for all to compare.

    `copies` are digests of what must be equal wherever it is held, by what it is called; `sizes`
    says how many gradients each stage here has, `doubles` whether any is of double precision.
    """

    schedule: str
    name: str
    device: str
    copies: Mapping[str, tuple[int, ...]]
    sizes: Mapping[int, int]
    doubles: bool


def compare(claims: Sequence[Claim]) -> None:
    """Raise ExecutionError where the processes differ in what they should share."""
    if any(found.schedule != claims[0].schedule for found in claims):
        listed = ", ".join(
            f"rank {rank}: {found.name} {found.schedule[:12]}" for rank, found in enumerate(claims)
        )
        raise ExecutionError(
            f"the ranks hold different schedules ({listed}); build it from the same target "
            "with the same parameters on every rank"
        )
    if any(found.device != claims[0].device for found in claims):
        listed = ", ".join(f"{process}: {found.device}" for process, found in enumerate(claims))
        raise ExecutionError(
            f"the stages must all be on GPUs or all on the CPU, but of processes {listed}"
        )
    first: dict[str, int] = {}
    for process, found in enumerate(claims):
        for label, digests in found.copies.items():
            other = first.setdefault(label, process)
            if claims[other].copies[label] != digests:
                raise ExecutionError(
                    f"{label} differs between processes {other} and {process}; load the same "
                    "values, or seed alike, before the executor is made"
                )


def digest(parameter: nn.Parameter) -> int:
    """A number that no other value shares: a hash of its bytes."""
    content = parameter.detach().reshape(-1).view(torch.uint8).cpu().numpy().data
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())
