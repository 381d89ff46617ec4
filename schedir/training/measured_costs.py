"""Measure what each layer of a model costs, by the clock."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from schedir.errors import ExecutionError
from schedir.ir import is_number
from schedir.runtime import rng, trace
from schedir.runtime.accelerator import current_accelerator
from schedir.runtime.arguments import LossFunction
from schedir.runtime.boundary import run_on, spreads, tensors_of
from schedir.runtime.processes.noticeboard import init_process_group
from schedir.training.collective import everywhere
from schedir.training.cutting.partition import uncut_layers
from schedir.training.huggingface.stages import uncut_pretrained


def measured_costs(
    layers: Any,
    inputs: Any,
    loss_fn: LossFunction | None = None,
    target: Any = None,
    *,
    model_class: Any = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    repeats: int = 5,
) -> list[float]:
    """Measure the seconds that each layer takes, forward and backward: the `costs` of a cut.

    >>> import torch
    >>> from torch import nn
    >>> from schedir.training import measured_costs
    >>> layers = [nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)]
    >>> costs = measured_costs(layers, torch.ones(4, 8), nn.MSELoss(), torch.zeros(4, 2))
    >>> len(costs), min(costs) > 0
    (3, True)

    `layers` is what `partition` takes, or what `stages_of` takes, with the same `model_class`.
    `inputs` is a microbatch of the size that you will train with. Each layer runs on the output of
    the layer before it, once to warm up and then `repeats` times; the median counts. With a
    `loss_fn`, the time of `loss_fn(output, target)` is added to the last layer. Deferred layers are
    made with `seed` on `device`, one at a time. Weights, gradients, statistics and random numbers
    stay as they were.

    With several processes, all must call it. The first one measures, and all get its costs, so that
    they cut in the same places.

    Raises ExecutionError on all processes if a layer fails.
    """
    if not (is_number(repeats) and repeats):
        raise ExecutionError(f"repeats must be an int of at least 1, not {repeats!r}")
    of_layers = (nn.Sequential, nn.ModuleList, nn.ModuleDict, Sequence, Mapping)
    if isinstance(layers, of_layers) and not isinstance(layers, str):  # which is a folder
        model = uncut_layers(layers, seed, device)
    else:
        model = uncut_pretrained(layers, model_class, seed, device)

    def measure() -> list[float]:
        costs = []
        value = inputs
        number = len(model.parts)
        with rng(seed, 0, 0, 0):
            # Stages of one layer, of which only one exists at a time.
            for _, layer in model.make([(at, at + 1) for at in range(number)], range(number)):
                spread = spreads(layer, value, None)
                run = partial(run_on, layer, extra=None, spread=spread)
                cost, value = _timed(run, layer, value, repeats)
                costs.append(cost)
                del layer, run
            if loss_fn is not None:
                held = loss_fn if isinstance(loss_fn, nn.Module) else nn.Module()
                costs[-1] += _timed(lambda x: loss_fn(x, target), held, value, repeats)[0]
        return costs

    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return measure()
    made = not dist.is_initialized()
    if made:
        init_process_group(None)
    try:
        return everywhere(_gathered, lambda: [] if dist.get_rank() else measure())[0]
    finally:
        if made:
            dist.destroy_process_group()


def _gathered(value: Any) -> list[Any]:
    """The values of all processes, on each of them."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _timed(
    run: Callable[[Any], Any], module: nn.Module, given: Any, repeats: int
) -> tuple[float, Any]:
    """Measure the median seconds of a forward and its backward; returns the output as well."""
    buffers = {buffer: buffer.clone() for buffer in module.buffers()}
    parameters = [p for p in module.parameters() if p.requires_grad]
    times = []
    for _ in range(1 + repeats):
        # Copies: a layer may work in place, and autograd forbids that on leaves.
        leaves = [x for x in tensors_of(given) if x.requires_grad]
        copies = pytree.tree_map_only(Tensor, lambda x: x.clone(), given)
        current_accelerator().synchronize()
        begun = trace.now()
        result = run(copies)
        ends = [x for x in tensors_of(result) if x.requires_grad]
        if ends and (starts := [*leaves, *parameters]):
            ones = [torch.ones_like(x) for x in ends]
            torch.autograd.grad(ends, starts, ones, allow_unused=True)
        current_accelerator().synchronize()
        times.append(trace.now() - begun)
    with torch.no_grad():
        for buffer, value in buffers.items():
            buffer.copy_(value)
    detached = pytree.tree_map_only(
        Tensor, lambda x: x.detach().requires_grad_(x.requires_grad), result
    )
    return median(times[1:]) / 1e9, detached  # from nanoseconds
