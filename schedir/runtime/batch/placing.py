"""Where the tensors of a call have to be: on the device of the stages.

What is on the CPU is copied there, behind what the device has to do already; where it lies in
pinned memory (`pin_memory=True` of a DataLoader), the host does not wait for the copy either. What
is on another device was most likely put there by mistake, so it is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from schedir.errors import ExecutionError


def placed(pieces: list[Any], device: torch.device, what: str) -> list[Any]:
    """Microbatches with their tensors on a device; `what` names the argument.

    Raises ExecutionError for what is neither there nor on the CPU.
    """
    if device.type == "cpu":  # a stage says itself what it can't compute with
        return pieces
    moved: dict[int, Tensor] = {}  # what all microbatches get is copied once

    def on(tensor: Tensor) -> Tensor:
        if id(tensor) not in moved:
            moved[id(tensor)] = _on(tensor, device, what)
        return moved[id(tensor)]

    found: list[Any] = pytree.tree_map_only(Tensor, on, pieces)
    return found


def _on(tensor: Tensor, device: torch.device, what: str) -> Tensor:
    if tensor.device == device:
        return tensor
    if tensor.device.type == "cpu":
        return tensor.to(device, non_blocking=True)
    raise ExecutionError(
        f"{what}: a tensor is on {tensor.device}, but the stages of this rank are on {device}; "
        f'move it there, tensor.to("{device}"), or leave it on the CPU'
    )
