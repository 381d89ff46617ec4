"""Passes a stage's input to its module's forward.

A tuple's entries become positional arguments and a dict's keywords, if forward takes them so.
Otherwise the input is one argument, as in `nn.Sequential`. The stage's `stage_inputs` follow: a
tuple or a single tensor by position, a dict by keyword.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import attrs
from torch import nn


@attrs.frozen
class CallingConvention:
    """How to call one stage's module; with `spread` its input's entries are separate arguments."""

    spread: bool = False

    def __call__(self, module: Callable[..., Any], given: Any, extra: Any = None) -> Any:
        """Run the module."""
        if extra is None and not self.spread:
            return module(given)
        positional, keywords = _arguments(given, extra, self.spread)
        return module(*positional, **keywords)


def convention_of(module: Callable[..., Any], given: Any, extra: Any) -> CallingConvention:
    """How a module, or a function, takes its input, by its forward's signature."""
    if not isinstance(given, (tuple, list, Mapping)):
        return CallingConvention()
    if isinstance(given, Mapping) and not all(isinstance(key, str) for key in given):
        return CallingConvention()
    positional, keywords = _arguments(given, extra, spread=True)
    try:
        forward = module.forward if isinstance(module, nn.Module) else module
        inspect.signature(forward).bind(*positional, **keywords)
    except TypeError:
        return CallingConvention()
    except ValueError:  # a forward without a signature
        pass
    return CallingConvention(spread=True)


def _arguments(given: Any, extra: Any, spread: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    positional: tuple[Any, ...] = (given,)
    keywords: dict[str, Any] = {}
    if spread:
        positional = () if isinstance(given, Mapping) else tuple(given)
        keywords = dict(given) if isinstance(given, Mapping) else {}
    if isinstance(extra, Mapping):
        keywords = {**keywords, **extra}
    elif isinstance(extra, (tuple, list)):
        positional = (*positional, *extra)
    elif extra is not None:
        positional = (*positional, extra)
    return positional, keywords
