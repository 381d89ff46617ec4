"""The one door to the private parts of transformers that turn a folder's tensors into a model's.

Files have other names and shapes than the model: tied tensors are absent, experts stand one by one,
prefixes are changed. transformers converts them, in both directions. On the way in it converts
`Lazy` tensors here, which have no values: it shows all names and shapes, and afterwards each rank
computes the values of its own tensors.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_SAME = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)
_META, _CPU = torch.device("meta"), torch.device("cpu")


class Lazy(Tensor):
    """A tensor on meta that keeps how to compute its values from those of files."""

    like: Tensor
    compute: Callable[[], Tensor]
    in_file: bool

    @staticmethod
    def __new__(cls, like: Tensor, compute: Callable[[], Tensor], in_file: bool = True) -> Lazy:
        """Make one like a tensor on meta. `in_file` says that its memory is a file's."""
        made: Lazy = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=_META
        )
        made.like, made.compute, made.in_file = like, compute, in_file
        return made

    def value(self) -> Tensor:
        """Compute the values, in memory of their own: a mapped file may change or vanish."""
        found = self.compute()
        is_part = found.untyped_storage().nbytes() > found.nbytes
        return found.clone() if self.in_file or is_part else found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func._schema.is_mutable:
            raise NotImplementedError(f"{func} changes a tensor of the files in place")
        if func in _SAME:
            return cls(args[0].like, args[0].compute, args[0].in_file)
        given = (args, kwargs or {})
        like_args, like_kwargs = pytree.tree_map_only(Lazy, lambda x: x.like, given)
        found = func(*like_args, **like_kwargs)

        def computed(at: int | None = None) -> Any:
            now = pytree.tree_map_only(Lazy, lambda x: x.compute(), given)
            now = pytree.tree_map_only(torch.device, lambda at: _CPU if at == _META else at, now)
            result = func(*now[0], **now[1])
            return result if at is None else result[at]

        in_file = func.is_view and args[0].in_file
        if isinstance(found, Tensor):
            return cls(found, computed, in_file)
        return [cls(x, partial(computed, i), in_file) for i, x in enumerate(found)]


def dtype_named(name: str) -> torch.dtype:
    """The dtype that a safetensors file calls by a name. Raises KeyError if torch has none."""
    from transformers.modeling_utils import str_to_torch_dtype

    return str_to_torch_dtype[name]


def load(model: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Put a folder's tensors, by their names in its files, into a model on meta.

    Returns what transformers says of it: `missing_keys`, `unexpected_keys`, `mismatched_keys` and
    `conversion_errors`. The model keeps the conversions that took place, for `revert`.
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


def revert(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Turn some of a model's tensors into those of files, as they were read or as is usual."""
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, Tensor] = revert_weight_conversion(model, state)
    return found


def dtypes(model: Any, dtype: torch.dtype) -> Callable[[str], torch.dtype]:
    """How a model keeps each tensor in `dtype`: its own plan has some in float32."""
    plan = model._get_dtype_plan(dtype)

    def of(name: str) -> torch.dtype:
        kept = (to for part, to in plan.items() if re.search(part.replace("*", ".*"), name))
        found: torch.dtype = next(kept, dtype)
        return found

    return of


def _copied(conversion: Any, _: object) -> Any:
    """Copy a conversion for other tensors. transformers makes a deep copy for each name in files,
    which took half of the time of 45,000 experts."""
    like = copy.copy(conversion)
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
