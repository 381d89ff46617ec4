"""Make the weights that this process owns of a model on meta; they do not depend on the cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from schedir.errors import ExecutionError
from schedir.training.cutting.deferred import number_of
from schedir.training.huggingface.models import empty_like, within


def materialise(
    model: Any, owned: Collection[str], seed: int, device: torch.device, kind: str
) -> None:
    """Give the owned modules and parameters of a model on meta memory on `device` and values.

    The model's own code initialises them. A parameter's random values depend only on the seed and
    its name. All buffers get values, because every stage may read them.

    Raises ExecutionError if the model's code leaves a tensor without values.
    """
    wanted = [b for b in model.buffers() if b.is_meta]
    for name, p in model.named_parameters(remove_duplicate=False):
        if within(name, owned):
            wanted.append(p)
    real = {id(tensor): empty_like(tensor, device) for tensor in wanted}
    for tensor in real.values():
        if tensor.is_floating_point():  # NaN shows which tensors stay unwritten
            torch.nn.init.constant_(tensor, torch.nan)
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            held.update((key, real[id(x)]) for key, x in held.items() if id(x) in real)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), _Seeds(model, seed):
        model.initialize_weights()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and not tensor.is_meta and bool(tensor.isnan().any()):
            raise ExecutionError(
                f"{kind} can't be made stage by stage: its code does not initialise {name}; pass "
                "stages_of a model in place of a config"
            )


class _Seeds(TorchDispatchMode):
    """Seeds every draw of random numbers by the parameter's name and the number of the draw."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self._names = {p.untyped_storage()._cdata: name for name, p in model.named_parameters()}
        self._draws: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            first = args[0] if args else None
            storage = first.untyped_storage()._cdata if isinstance(first, Tensor) else None
            name = self._names.get(storage, "")
            torch.manual_seed(number_of(f"{self._seed} {self._draws[name]} {name}"))
            self._draws[name] += 1
        return func(*args, **(kwargs or {}))
