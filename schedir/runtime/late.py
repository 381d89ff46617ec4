"""Values that the device makes, and the host reads after the step.

To wait for one within a step would let the device run out of work. So it is copied to the host
behind what makes it, and read when somebody asks for it, or once it is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch import Tensor

from schedir.runtime.accelerator import Accelerator

T = TypeVar("T")


class Late(Generic[T]):
    """What `made` makes of a tensor, once the device has come to it."""

    def __init__(
        self, accelerator: Accelerator, tensor: Tensor, made: Callable[[Tensor], T]
    ) -> None:
        self._accelerator = accelerator
        self._fetch = accelerator.to_host(tensor)
        self._copied = accelerator.mark()
        self._made = made
        self._found: list[T] = []  # once it has been read

    def is_there(self) -> bool:
        """Whether to read it waits for nothing."""
        return bool(self._found) or self._copied.query()

    def __call__(self) -> T:
        """Read it; the host waits for the device until it is there."""
        if not self._found:
            with self._accelerator.chosen():  # for a thread that has chosen none
                copied = self._fetch()
            self._found.append(self._made(copied))
        return self._found[0]


class Unread:
    """What a call leaves to be looked at though nobody may ask for it: a warning may come of it,
    or an error."""

    def __init__(self) -> None:
        self._unread: list[Late[Any]] = []

    def add(self, late: Late[Any]) -> None:
        """Look at it later."""
        self._unread.append(late)

    def look(self, wait: bool = False) -> None:
        """Look at what is there, or wait for all."""
        while self._unread and (wait or self._unread[0].is_there()):
            self._unread.pop(0)()
