"""The recipes of examples/, on two ranks, beside the loops that plain torch has for them."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import recipes
import torch
from torch import nn

from tests.runtime.on_ranks import on_ranks


def plain(recipe: str) -> list[float]:
    """In one process, microbatch by microbatch."""
    model = recipes.model()
    optimizer = recipes.sgd(model.parameters())
    half = recipe == "float16"
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=half)
    losses = []
    for number, (x, y) in enumerate(recipes.batches(), 1):
        found = []
        for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
            with torch.autocast("cpu", torch.float16) if half else nullcontext():
                loss = recipes.LOSS(model(a), b)
            scaler.scale(loss * (len(b) / len(y))).backward()
            found.append(len(b) * loss.item())
        losses.append(sum(found) / len(y))
        if recipe == "accumulation" and number % 4:
            continue
        if recipe == "clipping":
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return losses


@on_ranks(2)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # that torch.compile looks at
@pytest.mark.parametrize("recipe", recipes.RECIPES)
def test_a_recipe_equals_plain_training(rank: int, recipe: str) -> None:
    given: dict[str, Any] = {"backend": "aot_eager"} if recipe == "compiled" else {}
    losses = recipes.RECIPES[recipe](recipes.batches(), **given)
    assert losses == plain(recipe)
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]
