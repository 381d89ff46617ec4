"""Copies of models and their modules, which share with them what they need not have themselves."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


def on_meta(model: nn.Module) -> nn.Module:
    """A copy of a model without memory for its tensors, and without hooks."""
    tensors = [*model.parameters(), *model.buffers()]
    like = copy.deepcopy(model, {id(t): empty_like(t, torch.device("meta")) for t in tensors})
    for module in like.modules():
        for name in ("_forward_hooks", "_forward_pre_hooks"):
            getattr(module, name).clear()
    return like


def empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor or parameter without values, with the marks that a model has put on it."""
    like = torch.empty_like(tensor, device=device, requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        like = nn.Parameter(like, tensor.requires_grad)
    like.__dict__.update(tensor.__dict__)
    return like


def with_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Module:
    """A module's like with another parameter of that name; it shares all else."""
    like = shallow(module)
    child, _, rest = name.partition(".")
    if rest:
        like._modules[child] = with_parameter(module.get_submodule(child), rest, parameter)
    else:
        like._parameters[name] = parameter
    return like


def shallow(module: nn.Module) -> nn.Module:
    """A module's like that has the same children, parameters and settings."""
    like = module.__new__(type(module))
    like.__dict__ = {
        name: value.copy() if isinstance(value, dict) else value
        for name, value in module.__dict__.items()
    }
    return like


def tied(model: nn.Module) -> list[list[str]]:
    """The parameters that a model has under several names, by these."""
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    return [group for group in names.values() if len(group) > 1]
