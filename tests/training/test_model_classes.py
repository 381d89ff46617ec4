"""The model classes of docs/reference/models.md, in two stages and uncut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import schedir
from schedir.training import stages_of
from tests.runtime.kit import MSE
from tests.sweeps import sweep
from tests.test_golden import compare
from tests.training.model_classes import CLASSES, PAGE, SIZE, TOKENS, page
from tests.training.test_transformers import compare as compare_step

QUICK = ("MambaForCausalLM", "BartForCausalLM", "CLIPForImageClassification")


def output_of(found: Any) -> Tensor:
    """The logits, or what comes first."""
    output: Tensor = found["logits"] if "logits" in found else next(iter(found.values()))
    return output


def batch(model: Any, config: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if model.main_input_name == "pixel_values":
        size = getattr(config, "image_size", SIZE)
        return {"pixel_values": torch.randn(4, 3, size, size, generator=generator)}
    return {"input_ids": torch.randint(3, TOKENS, (4, 8), generator=generator)}


def by_name(output: Any, target: Tensor) -> Tensor:
    """Of a model without logits the stage gives all that it returns."""
    return MSE(output_of(output) if isinstance(output, dict) else output, target)


@sweep("name", CLASSES, quick=QUICK)
def test_a_class_trains_as_if_uncut(name: str) -> None:
    made = getattr(transformers, name)
    config = made.config_class(**CLASSES[name], use_cache=False)
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    stages = stages_of(config, schedule, model_class=made)
    whole = made._from_config(config)
    (alone,) = stages_of(config, 1, model_class=made).values()
    whole.load_state_dict(alone.state_dict())
    inputs = batch(whole, config)
    with torch.no_grad():
        target = torch.randn_like(output_of(whole(**inputs)))
    compare_step(whole, schedule, stages, inputs, target, by_name, output_of, in_process=True)


def test_the_page_lists_them(request: pytest.FixtureRequest) -> None:
    assert len(CLASSES) >= 30
    compare(PAGE, page(), request)
