"""Boundaries, layers and batches of other kinds than the features have, each beside plain training.

A feature each, as in `tests/runtime/features.py`, of 1F1B on two ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from attrs import evolve
from torch import Tensor, nn

from on_gpu.rank import skip
from tests.runtime.features import DROPOUT, Feature, Workload, built, rows_of_numbers


def _feature(workload: Workload, **options: Any) -> Feature:
    return Feature(built("1f1b"), options, workload=workload)


def _in_bfloat16() -> Feature:
    def stages(number: int, width: int) -> list[nn.Module]:
        return [stage.bfloat16() for stage in DROPOUT.stages(number, width)]

    def batch(rows: int, width: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x, y = rows_of_numbers(rows, width, generator)
        return x.bfloat16(), y.bfloat16()

    return _feature(Workload(stages, batch, near=0.01))  # losses are in bfloat16 too


def _normalised() -> Feature:
    """Statistics count a forward once, though it runs twice."""

    def stages(number: int, width: int) -> list[nn.Module]:
        return [
            nn.Sequential(
                nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.25), nn.Tanh()
            )
            for _ in range(number)
        ]

    return _feature(Workload(stages, rows_of_numbers), recompute=True)


def _channels_last() -> Feature:
    def in_channels_last(tensor: Any) -> Any:
        return tensor.to(memory_format=torch.channels_last)

    def stages(number: int, width: int) -> list[nn.Module]:
        return [
            in_channels_last(nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.Tanh()))
            for _ in range(number)
        ]

    def batch(rows: int, width: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x, y = torch.randn(2, rows, width, 5, 5, generator=generator)
        return in_channels_last(x), in_channels_last(y)

    return _feature(Workload(stages, batch))


class Widened(nn.Linear):
    """Sends numbers of types that NCCL does not take beside its output."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        y = super().forward(x)
        whole = (100 * x.detach()).abs().to(torch.int16)
        return (
            y,
            torch.complex(y, 2 * y),
            whole,
            x.detach().sum(1, keepdim=True).to(torch.complex128),
        )


class Narrowed(nn.Linear):
    def forward(  # type: ignore[override]
        self, x: Tensor, z: Tensor, whole: Tensor, total: Tensor
    ) -> Tensor:
        mixed = super().forward(x + z.real - 3 * z.imag)
        scale = whole.to(torch.float32).mean(1, keepdim=True) / 100
        return mixed * scale + total.real.to(torch.float32)


def _of_odd_types() -> Feature:
    def stages(number: int, width: int) -> list[nn.Module]:
        return [Widened(width, width), Narrowed(width, width)]

    return _feature(Workload(stages, rows_of_numbers))


def _given(given: Callable[[Tensor, str], Tensor]) -> Feature:
    return _feature(evolve(DROPOUT, given=given))


def _pinned(tensor: Tensor, device: str) -> Tensor:
    return tensor if device == "cpu" else tensor.pin_memory()


def _transformer() -> Feature:
    if find_spec("transformers") is None:
        skip("transformers is not installed")
    from transformers import LlamaConfig

    from schedir.training import stages_of

    tokens = 64

    def stages(number: int, width: int) -> list[nn.Module]:
        config = LlamaConfig(
            vocab_size=tokens,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2 * number,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
        config._attn_implementation = "eager"
        return [*stages_of(config, number).values()]

    def batch(rows: int, width: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        drawn = [torch.randint(tokens, (rows, 8), generator=generator) for _ in range(2)]
        return drawn[0], drawn[1]

    def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, -2), target.flatten())

    return _feature(Workload(stages, batch, loss_fn))


MODELS: Mapping[str, Callable[[], Feature]] = {
    "bfloat16": _in_bfloat16,
    "BatchNorm with recomputation": _normalised,
    "channels last": _channels_last,
    "int16 and complex payloads": _of_odd_types,
    "inputs in unpinned memory": lambda: _given(lambda tensor, _: tensor),
    "inputs in pinned memory": lambda: _given(_pinned),
    "a transformer": _transformer,
}
