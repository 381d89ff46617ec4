"""Which tensors have been computed from certain ones, whether a gradient tells or not."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

_OF_SHAPES = frozenset(
    [
        *(f"{what}_like" for what in ("zeros", "ones", "full", "empty", "rand", "randn")),
        *(f"new_{what}" for what in ("zeros", "ones", "full", "empty", "empty_strided")),
    ]
)  # operations that read no values


class Derived(TorchDispatchMode):
    """While it is entered, remembers what is computed from the tensors that are added, by any
    operation on their values, those that have no gradient among them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tensors: Any = WeakTensorKeyDictionary()

    def add(self, value: Any) -> None:
        """Count all tensors in `value`, however nested, among them."""
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, Tensor):
                self._tensors[leaf] = True

    def any_in(self, value: Any) -> bool:
        """Whether a tensor in `value` is one of them, or trained."""
        leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
        return any(leaf.requires_grad or leaf in self._tensors for leaf in leaves)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in _OF_SHAPES and any(
            isinstance(leaf, Tensor) and leaf in self._tensors
            for leaf in pytree.tree_leaves((args, kwargs))
        ):
            self.add(result)
        return result
