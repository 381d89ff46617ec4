"""The rows of the table, those first that tell most."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from on_gpu.launch import Check
from tests.runtime.features import FEATURES, Feature

ENVIRONMENTS: Mapping[str, Mapping[str, str]] = {
    "launches block the host": {"CUDA_LAUNCH_BLOCKING": "1"},
    "one hardware queue": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    "no cache of memory": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    "torch's sanitizer": {"TORCH_CUDA_SANITIZER": "1"},
}
_SETTING = "it is a setting of CUDA"
_WAITS = "only CUDA tells when the host waits for it"
_ALLOCATOR = "the CPU's allocator keeps no count; tests/runtime/test_memory.py counts there"


def checks(device: str) -> Iterator[Check]:
    """All there are, on a device."""
    features = {name: make() for name, make in FEATURES.items()}
    alone = [name for name, feature in features.items() if feature.pipelines == 1]
    large = "64 MiB" if device != "cpu" else "1 MiB"
    yield Check("the machine", ("-m", "on_gpu.machine"), limit=120)
    yield _pytest("pytest -m cuda")
    for name, feature in features.items():
        yield _train(f"{name}, on {feature.processes} ranks", device, [name], feature.processes)
    yield _train("all features, in one process", device, alone, 0)
    yield from _together(features, device, "no host read", "--no-host-read", cpu=_WAITS)
    yield _train("no host read, in one process", device, alone, 0, "--no-host-read", cpu=_WAITS)
    yield from _together(features, device, large, "--size", large, limit=300)
    for ranks in (0, 2):
        yield Check(
            f"memory of 200 steps, {_where(ranks)}",
            ("-m", "on_gpu.memory", "--device", device),
            ranks,
            limit=240,
            cpu=_ALLOCATOR,
        )
    arguments = ("-m", "on_gpu.overhead", "--device", device)
    yield Check("overhead of a compute action", arguments, limit=120)
    for said, environment in ENVIRONMENTS.items():
        yield _pytest(f"pytest -m cuda, {said}", environment)
        for size in ("small", large):
            yield from _together(
                features,
                device,
                f"{size}, {said}",
                *("--size", size),
                limit=400,
                environment=environment,
                cpu=_SETTING,
            )


def _pytest(name: str, environment: Mapping[str, str] | None = None) -> Check:
    options = ("-m", "cuda", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--tb=short")
    return Check(
        name,
        ("-m", "pytest", *options, "-o", "faulthandler_timeout=240", "tests/runtime"),
        limit=600,
        environment=environment or {},
        cpu="no GPU is visible",
    )


def _together(
    features: Mapping[str, Feature], device: str, said: str, *options: str, **more: object
) -> Iterator[Check]:
    """All features, in one launch for each number of ranks."""
    for ranks in sorted({feature.processes for feature in features.values()}):
        names = [name for name, feature in features.items() if feature.processes == ranks]
        what = names[0] if len(names) == 1 else "all features"
        name = f"{what}, on {ranks} ranks, {said}"
        yield _train(name, device, names, ranks, *options, **more)


def _train(
    name: str, device: str, features: list[str], ranks: int, *options: str, **more: object
) -> Check:
    arguments = ("-m", "on_gpu.train", *features, "--device", device, *options)
    return Check(name, arguments, ranks, **{"limit": 180.0, **more})  # type: ignore[arg-type]


def _where(ranks: int) -> str:
    return f"on {ranks} ranks" if ranks else "in one process"
