"""What a model's config is set to while the model is a pipeline's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


def configs_of(model: nn.Module) -> list[Any]:
    """The configs that a model and its parts go by."""
    held = [module.config for module in model.modules() if hasattr(module, "config")]
    return list({id(config): config for config in held}.values())


def be_quiet(model: nn.Module) -> None:
    """Have a model return its output alone, by name: no key-value cache, no hidden states."""
    for config in configs_of(model):
        config.use_cache = config.output_attentions = config.output_hidden_states = False
        config.return_dict = True


@contextmanager
def without_values(model: nn.Module) -> Iterator[None]:
    """Have a mixture of experts run on fake tensors meanwhile.

    Which expert takes which token is a value; in this way of transformers' no shape depends on it.
    """
    before = [
        (config, config._experts_implementation)
        for config in configs_of(model)
        if getattr(config, "_experts_implementation", None) is not None
    ]
    try:
        for config, _ in before:
            config._experts_implementation = "batched_mm"
        yield
    finally:
        for config, implementation in before:
            config._experts_implementation = implementation
