"""What processes hold, compared before anything runs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import zip_longest

import attrs
import torch
from torch import Tensor

from schedir.errors import ExecutionError
from schedir.ir import Schedule


@attrs.frozen
class Claim:
    """What a process holds, for all to compare.

    `arguments` are those that every process must be given alike, by name. `copies` are digests of
    what must be equal wherever it is held, by what it is called; `sizes` says how many gradients
    each stage here has, `doubles` whether any is of double precision. `cut` says where the stages
    were cut from a whole model, if that is known. `gpu` is what no other GPU is
    called, and the host that it is in; empty where it doesn't matter. `processors` are how many
    kernels run there at once.
    """

    schedule: str
    device: str
    gpu: str
    processors: int
    arguments: Mapping[str, object]
    copies: Mapping[str, tuple[int, ...]]
    sizes: Mapping[int, int]
    doubles: bool
    cut: str | None


def compare_arguments(claims: Sequence[Claim]) -> None:
    """Raise ExecutionError where the processes were given different arguments."""
    for name, value in claims[0].arguments.items():
        for process, found in enumerate(claims):
            if found.arguments[name] != value:
                raise ExecutionError(
                    f"the ranks were given different arguments: {name} is {value} on process 0, "
                    f"but {found.arguments[name]} on process {process}"
                )


def compare(claims: Sequence[Claim]) -> None:
    """Raise ExecutionError where the processes differ in what they should share."""
    if any(found.device != claims[0].device for found in claims):
        listed = ", ".join(f"{process}: {found.device}" for process, found in enumerate(claims))
        raise ExecutionError(
            f"the stages must all be on GPUs or all on the CPU, but of processes {listed}"
        )
    cuts = [(process, found.cut) for process, found in enumerate(claims) if found.cut is not None]
    for process, cut in cuts:
        if cut != cuts[0][1]:
            raise ExecutionError(
                f"the model was cut into stages {cuts[0][1]} on process {cuts[0][0]}, but into "
                f"{cut} on process {process}, so layers would be left out or run twice; cut the "
                "same layers in the same way on every rank"
            )
    _compare_gpus([claim.gpu for claim in claims])
    first: dict[str, int] = {}
    for process, found in enumerate(claims):
        for label, digests in found.copies.items():
            other = first.setdefault(label, process)
            if claims[other].copies[label] != digests:
                raise ExecutionError(
                    f"{label} differs between processes {other} and {process}; load the same "
                    "values, or seed alike, before the executor is made"
                )


def _compare_gpus(gpus: Sequence[str]) -> None:
    for process, gpu in enumerate(gpus):
        if gpu and (other := gpus.index(gpu)) != process:
            raise ExecutionError(
                f"processes {other} and {process} have their stages on one GPU, {gpu}, which NCCL "
                'takes for a mistake; move those of each to torch.device("cuda", '
                'int(os.environ["LOCAL_RANK"])), or, if it is meant, set NCCL_HOSTID to another '
                "value for each process"
            )


def compare_schedules(schedules: Sequence[Schedule]) -> None:
    """Raise ExecutionError, with the first difference, where processes hold different ones."""
    one = schedules[0]
    for process, other in enumerate(schedules):
        if one != other:
            raise ExecutionError(
                f"the ranks hold different schedules: {_difference(one, other, process)}; build it "
                "from the same target with the same parameters on every rank"
            )


def _difference(one: Schedule, other: Schedule, process: int) -> str:
    for what in ("name", "ranks", "microbatches", "stages", "placement"):
        here, there = getattr(one, what), getattr(other, what)
        if here != there:
            return f"{what} {here} on process 0, {there} on process {process}"
    rank, (here, there) = next(
        (rank, lists)
        for rank, lists in enumerate(zip(one.actions, other.actions, strict=True))
        if lists[0] != lists[1]
    )
    index, (mine, theirs) = next(
        (index, pair)
        for index, pair in enumerate(zip_longest(here, there, fillvalue="nothing"))
        if pair[0] != pair[1]
    )
    return f"rank {rank} #{index} is {mine} on process 0, but {theirs} on process {process}"


def digest(tensor: Tensor) -> int:
    """A number that no other value shares: a hash of its bytes."""
    content = tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy().data
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())
