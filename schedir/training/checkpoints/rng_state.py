"""The generators that a process draws from: torch's, those of its device, Python's and numpy's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from schedir.runtime.accelerator import accelerator_of


def rng_state(device: torch.device) -> dict[str, Any]:
    """The state of all, in tensors and plain values."""
    numpy_state: dict[str, Any] = dict(np.random.get_state(legacy=False))
    key = numpy_state["state"].pop("key")
    numpy_state["key"] = torch.from_numpy(key.astype(np.int64))
    return {
        "torch": torch.get_rng_state(),
        "device": [one.get_state() for one in accelerator_of(device).generators()],
        "python": random.getstate(),
        "numpy": numpy_state,
    }


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Go on from a state; that of another kind of device is left alone."""
    torch.set_rng_state(state["torch"])
    for one, found in zip(accelerator_of(device).generators(), state["device"], strict=False):
        one.set_state(found)
    random.setstate(state["python"])
    numpy_state = dict(state["numpy"])
    key = numpy_state.pop("key").numpy().astype(np.uint32)
    numpy_state["state"] = {**numpy_state["state"], "key": key}
    np.random.set_state(numpy_state)
