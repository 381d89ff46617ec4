"""The one door to the private parts of transformers that turn a folder's tensors into a model's.

Files have other names and shapes than the model: tied tensors are absent, experts stand one by one,
prefixes are changed. transformers converts them, in both directions. On the way in it converts
`Lazy` tensors here, which have no values: it shows all names and shapes, and afterwards each rank
computes the values of its own tensors.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_CPU = torch.device("cpu")


class Lazy(Tensor):
    """A tensor on meta that keeps how to compute its values from those of files."""

    like: Tensor
    compute: Callable[[], Tensor]

    @staticmethod
    def __new__(cls, like: Tensor, compute: Callable[[], Tensor]) -> Lazy:
        """Make one like a tensor on meta. What `compute` returns may share memory with a file."""
        made: Lazy = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        made.like, made.compute = like, compute
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func._schema.is_mutable:
            raise NotImplementedError(f"{func} changes a tensor of the files in place")
        if func._schema.name in ("aten::alias", "aten::detach"):
            return cls(args[0].like, args[0].compute)  # quickly: it happens to each tensor of files
        given = (args, kwargs or {})
        like_args, like_kwargs = pytree.tree_map_only(Lazy, lambda x: x.like, given)
        found = func(*like_args, **like_kwargs)

        def computed() -> Any:
            now = pytree.tree_map_only(Lazy, lambda x: x.compute(), given)
            now_args, now_kwargs = pytree.tree_map_only(torch.device, lambda _: _CPU, now)
            return func(*now_args, **now_kwargs)

        if isinstance(found, Tensor):
            return cls(found, computed)
        return [cls(x, partial(lambda i: computed()[i], i)) for i, x in enumerate(found)]


def load(model: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Put a folder's tensors, by their names in its files, into a model on meta.

    Returns what transformers says of it: `missing_keys`, `unexpected_keys`, `mismatched_keys` and
    `conversion_errors`. The model keeps the conversions that took place, to be reverted later.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.modeling_utils import LoadStateDictConfig

    mapping: Any = get_model_conversion_mapping(model)
    for one in mapping:
        kind = type(one)  # it has slots
        one.__class__ = type(kind.__name__, (kind,), {"__slots__": (), "__deepcopy__": _copied})
    plan = model._get_dtype_plan(model.dtype)
    options = LoadStateDictConfig(
        device_map={"": "meta"}, dtype=model.dtype, dtype_plan=plan, weight_mapping=mapping
    )
    with _without_bars():
        info, _ = model._load_pretrained_model(model, dict(tensors), None, options)
    model._adjust_missing_and_unexpected_keys(info)
    return info


def in_dtype(model: Any, state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Some of a model's tensors in a dtype, except for those that the model keeps in float32."""
    kept = model._get_dtype_plan(dtype)

    def of(name: str, x: Tensor) -> torch.dtype:
        if not x.is_floating_point():
            return x.dtype
        found = (to for part, to in kept.items() if re.search(part.replace("*", ".*"), name))
        return next(found, dtype)

    return {name: x.to(of(name, x)) for name, x in state.items()}


def _copied(conversion: Any, _: object) -> Any:
    """Copy a conversion for other tensors. transformers makes a deep copy for each name in files,
    which took half of the time of 45,000 experts."""
    like = object.__new__(type(conversion))
    for name, value in conversion.__getstate__()[1].items():
        object.__setattr__(like, name, value)
    like.collected_tensors, like.layer_targets = defaultdict(list), defaultdict(set)
    return like


@contextmanager
def _without_bars() -> Iterator[None]:
    """Inside, transformers shows no progress."""
    from transformers import utils

    logging: Any = utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
