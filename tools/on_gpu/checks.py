"""The rows of the table, in parts of at most nine minutes; those first that tell most.

What a row should take is a guess for one H100 that all ranks share; most took less.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from attrs import evolve

from on_gpu.launch import Check
from tests.runtime.features import FEATURES
from tests.runtime.layouts import fitting

PART = 540.0  # seconds

_WAITS = "only CUDA tells when the host waits for it"
_ALLOCATOR = "the CPU's allocator keeps no count; tests/runtime/test_memory.py counts there"
_COMMUNICATORS = "gloo's take no memory of a device"
_SETTING = "it is a setting of CUDA"
_NO_GPU = "no GPU is visible"

_MODELS = (
    "bfloat16",
    "BatchNorm with recomputation",
    "channels last",
    "int16 and complex payloads",
    "inputs in unpinned memory",
)


def _row(
    name: str, ranks: int, expected: float, limit: float, command: str, claim: str, **more: Any
) -> Check:
    """`python -m command`."""
    arguments = ("-m", *shlex.split(command))
    pieces = more.pop("pieces", ())
    return Check(name, claim, arguments, pieces, ranks, expected, limit, **more)


def _features(
    where: str, ranks: int, expected: float, limit: float, claim: str, option: str = "", **more: Any
) -> Check:
    """All features that run on so many processes, one after the other."""
    found = {name: make() for name, make in FEATURES.items()}
    pieces = [
        name
        for name, feature in found.items()
        if (feature.processes == ranks if ranks else feature.pipelines == 1)
    ]
    name, command = f"all features, {where}", f"on_gpu.train {option}"
    return _row(name, ranks, expected, limit, command, claim, pieces=pieces, **more)


def _layouts(
    where: str, layouts: Sequence[str], expected: float, limit: float, claim: str
) -> Check:
    """All features of stages that are sharded or split over 4 ranks, one after the other."""
    pieces = [f"{feature}, {layout}" for feature, layout in fitting(layouts)]
    return _row(where, 4, expected, limit, "on_gpu.layouts", claim, pieces=pieces)


def _under(
    variable: str, where: str, ranks: int, expected: float, limit: float, claim: str
) -> Check:
    """All features under a setting of CUDA or torch."""
    name, value = variable.split("=")
    setting = {name: value}
    return _features(where, ranks, expected, limit, claim, environment=setting, cpu=_SETTING)


PARTS: dict[str, Sequence[Check]] = {
    "A": (
        _row("the machine", 0, 20, 90, "on_gpu.machine", "torch computes on the GPU"),
        _row("1f1b, in one process", 0, 20, 80, "on_gpu.train 1f1b",
             "1F1B on streams equals plain training"),
        _row("1f1b, on 2 ranks", 2, 30, 100, "on_gpu.train 1f1b",
             "1F1B over NCCL equals plain training; the log has what NCCL says of itself",
             environment={"NCCL_DEBUG": "INFO"}),
        _features("in one process", 0, 60, 180, "every feature on streams equals plain training"),
        _features("on 2 ranks", 2, 100, 240, "features over NCCL equal plain training"),
        _features("on 3 ranks", 3, 40, 120, "replicas of a stage over NCCL equal plain training"),
        _features("on 4 ranks", 4, 40, 120, "two pipelines over NCCL equal plain training"),
    ),
    "B": (
        _row("tests/runtime/test_cuda.py", 0, 150, 300, "pytest tests/runtime/test_cuda.py -q "
             "-p no:xdist -p no:cacheprovider --tb=short -o faulthandler_timeout=100",
             "built-in schedules and features equal plain training, small and large", cpu=_NO_GPU),
        _features("in one process, no host read", 0, 50, 150,
                  "no step but the first has the host wait for a stream", "--no-host-read",
                  cpu=_WAITS),
        _features("on 2 ranks, no host read", 2, 100, 200,
                  "no step but the first has the host wait for NCCL", "--no-host-read",
                  cpu=_WAITS),
        _row("memory of 200 steps, in one process", 0, 30, 90, "on_gpu.memory",
             "on streams the peak does not grow with the microbatches", cpu=_ALLOCATOR),
        _row("memory of 50 steps, on 2 ranks", 2, 40, 120, "on_gpu.memory --steps 50 --rows 256",
             "over NCCL the peak does not grow with the microbatches", cpu=_ALLOCATOR),
    ),
    "C": (
        _row("one of 3 ranks raises in step 2", 0, 30, 100, "on_gpu.failures raises",
             "all ranks end soon, and name the first failure"),
        _row("one of 3 ranks is killed in step 2", 0, 40, 110, "on_gpu.failures dies",
             "the other ranks end, and name what they waited for"),
        _row("one of 3 ranks never calls step 2", 0, 45, 110, "on_gpu.failures never-calls",
             "the other ranks end when their time is up, and name it"),
        _row("one of 3 ranks exits without close", 0, 35, 110, "on_gpu.failures leaves",
             "the rank ends, and so do the others, which say that it has left"),
        _row("one of 3 ranks raises, another is in synchronize()", 0, 45, 110,
             "on_gpu.failures beside-a-stuck-rank", "a stuck rank holds no other one up"),
        _under("CUDA_DEVICE_MAX_CONNECTIONS=1", "on 2 ranks, one hardware queue", 2, 100, 180,
               "nothing hangs where all streams share a queue"),
        _row("1f1b of 4 MiB, on 2 ranks", 2, 30, 80, "on_gpu.train 1f1b --size 4MiB",
             "boundaries as large as NCCL's buffers arrive whole"),
        _row("1f1b of 64 MiB, on 2 ranks", 2, 50, 100, "on_gpu.train 1f1b --size 64MiB",
             "boundaries larger than NCCL's buffers arrive whole"),
    ),
    "D": (
        _row("other models and inputs, in one process", 0, 40, 120, "on_gpu.train",
             "other types, layouts and inputs on streams equal plain training", pieces=_MODELS),
        _row("other models and inputs, on 2 ranks", 2, 50, 150, "on_gpu.train",
             "what NCCL does not take equals plain training, too", pieces=_MODELS),
        _row("inputs in pinned memory, in one process", 0, 20, 60, "on_gpu.train --no-host-read "
             "'inputs in pinned memory'", "pinned inputs are moved without waiting", cpu=_WAITS),
        _row("inputs in pinned memory, on 2 ranks", 2, 25, 80, "on_gpu.train --no-host-read "
             "'inputs in pinned memory'", "they are so beside NCCL's streams, too", cpu=_WAITS),
        _row("a transformer, in one process", 0, 30, 100, "on_gpu.train 'a transformer'",
             "a model of transformers on streams equals plain training"),
        _row("a transformer, on 2 ranks", 2, 40, 120, "on_gpu.train 'a transformer'",
             "a model of transformers over NCCL equals plain training"),
        _row("checkpoint and resume, in one process", 0, 20, 80, "on_gpu.resume",
             "a training goes on from a checkpoint bit for bit"),
        _row("checkpoint and resume, on 2 ranks", 2, 30, 100, "on_gpu.resume",
             "a training over NCCL goes on from a checkpoint bit for bit"),
        _row("20 executors opened and closed, on 2 ranks", 2, 60, 180, "on_gpu.reopened",
             "memory and threads do not grow"),
    ),
    "E": (
        _row("MiB per communicator, on 2 ranks", 2, 30, 90, "on_gpu.communicators",
             "measured: what each communicator takes of the GPU", cpu=_COMMUNICATORS),
        _row("MiB per communicator, on 4 ranks", 4, 50, 120, "on_gpu.communicators",
             "measured: what each takes where ranks have two neighbours", cpu=_COMMUNICATORS),
    ),
    "F": (
        _under("CUDA_LAUNCH_BLOCKING=1", "on 2 ranks, launches block", 2, 100, 200,
               "nothing relies on the host being ahead of the GPU"),
        _under("PYTORCH_NO_CUDA_MEMORY_CACHING=1", "on 2 ranks, no cache of memory", 2, 100, 200,
               "nothing uses memory that was given back"),
        _under("TORCH_CUDA_SANITIZER=1", "in one process, torch's sanitizer", 0, 80, 160,
               "torch's sanitizer finds no race between streams"),
        _under("TORCH_CUDA_SANITIZER=1", "on 2 ranks, torch's sanitizer", 2, 120, 200,
               "torch's sanitizer finds no race beside NCCL's streams"),
    ),
    "G": (
        _layouts("sharded stages, on 4 ranks", ["pp 2 x fsdp 2"], 60, 180,
                 "stages of FSDP2 over NCCL train as one process does"),
        _layouts("split stages, on 4 ranks", ["pp 2 x tp 2", "pp 2 x sp 2"], 100, 180,
                 "tensor and sequence parallel stages over NCCL do so"),
        _layouts("sharded and split models, on 4 ranks", ["fsdp 2 x tp 2", "dp 2 x tp 2"], 80, 180,
                 "FSDP2, and replicas, over tensor parallelism do so"),
    ),
}  # fmt: skip


def singles(check: Check) -> list[Check]:
    """A row for each piece of a row that has several."""
    where = check.name.partition(", ")[2]
    return [
        evolve(check, name=f"{piece}, {where}", pieces=[piece], expected=20, limit=80)
        for piece in check.pieces
    ]


def named(texts: Sequence[str]) -> list[Check]:
    """The rows whose names contain one of these; where none does, such single ones."""
    planned = [check for checks in PARTS.values() for check in checks]
    single = [one for check in planned for one in singles(check)]
    for checks in (planned, single):
        if found := [check for check in checks if any(text in check.name for text in texts)]:
            return found
    raise SystemExit(f"no row has {' or '.join(texts)} in its name; see --list")


def listing() -> str:
    """Every part with its rows, their seconds, and what each shows."""
    lines = []
    for part, checks in PARTS.items():
        expected = sum(check.expected for check in checks)
        lines.append(f"Part {part}: should take {expected:.0f} s; goes on for {PART:.0f} s at most")
        lines += [
            f"  {check.name:50} {check.expected:4.0f} s, limit {check.limit:3.0f} s: {check.claim}"
            for check in checks
        ]
    return "\n".join(lines)
