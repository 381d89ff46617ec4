"""What the executor is given, and whether each argument is, by itself, what it must be."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from schedir.errors import ExecutionError
from schedir.ir import Schedule, expect_schedule, is_number
from schedir.runtime.chunk_specs import ChunkSpec, check_batch_dim, checked

LossFunction: TypeAlias = Callable[..., Tensor]
OptimizerFactory: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

TieOf: TypeAlias = Sequence[tuple[int, str]]
"""The copies of one shared parameter: by stage, and by name in the stage's module."""

Declared: TypeAlias = Any
"""A boundary by example: a tensor, or a structure of tensors and constants."""


@attrs.frozen(eq=False)
class Arguments:
    """The arguments of the executor, as they were given; see there."""

    schedule: Schedule
    stages: Mapping[int, nn.Module]
    loss_fn: LossFunction
    optimizer: OptimizerFactory | None
    boundaries: Mapping[int, Declared] | None
    recompute: bool | Collection[int]
    count: Callable[[Any], float | Tensor]
    batch_dim: int
    args_chunk_spec: ChunkSpec
    kwargs_chunk_spec: Mapping[str, ChunkSpec] | None
    clip_grad_norm: float | None
    nonfinite: str
    ties: Sequence[TieOf]
    mesh: DeviceMesh | None
    seed: int
    step: int
    timeout: float | timedelta | None
    channel: str | None
    in_process: bool
    trace: bool


def check_arguments(given: Arguments) -> None:
    """Raise ExecutionError for what would fail later, or train something that was not meant."""
    try:
        expect_schedule(given.schedule)
    except TypeError as error:
        raise ExecutionError(str(error)) from None
    _check_functions(given)
    _check_numbers(given)
    check_batch_dim(given.batch_dim)
    checked(given.args_chunk_spec, "args_chunk_spec")
    by_name: object = given.kwargs_chunk_spec
    if by_name is not None and not isinstance(by_name, Mapping):
        raise ExecutionError(
            "kwargs_chunk_spec must map keywords to their chunk specs, such as "
            f'{{"mask": 0, "bias": "replicate"}}, not {by_name!r}'
        )
    checked(dict(given.kwargs_chunk_spec or {}), "kwargs_chunk_spec")
    for stage in given.boundaries or ():
        if stage not in range(given.schedule.stages):
            raise ExecutionError(
                f"boundaries: there is no stage {stage!r}, only 0..{given.schedule.stages - 1}"
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
    if given.schedule.stages - 1 in stages and not callable(given.loss_fn):
        raise ExecutionError(
            "loss_fn must be a function (output, target) -> the microbatch's mean loss, where the "
            f"last stage runs, not {type(given.loss_fn).__name__}"
        )
    if given.optimizer is not None and not callable(given.optimizer):
        raise ExecutionError(
            "optimizer must be a function that makes one of parameters, such as "
            f"lambda p: torch.optim.AdamW(p), not {type(given.optimizer).__name__}"
        )


def _check_numbers(given: Arguments) -> None:
    norm: object = given.clip_grad_norm
    # Not a number, too, is not at least 0.
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
