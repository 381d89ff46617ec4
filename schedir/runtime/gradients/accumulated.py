"""Gradients that earlier calls have left, where the caller steps.

They have been summed already, over processes and over tied copies: while a call runs they are set
aside, so that its sums are of its own gradients alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn


class Accumulated:
    """What earlier calls have left of some parameters' gradients."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [*dict.fromkeys(parameters)]
        self._earlier: list[Tensor | None] = []

    def set_aside(self) -> None:
        """Take it, before a call adds to it."""
        self._earlier = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    def restore(self) -> None:
        """Add it to what the call has left; nothing, if that has been done."""
        for parameter, earlier in zip(self._parameters, self._earlier, strict=False):
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier + parameter.grad
        self._earlier = []
