"""A message under way between two processes, beside the pipeline's traffic."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from schedir.runtime.processes.failure import WaitError


class Message:
    """A vector that is being sent or received; gloo lets a work be waited for once only.

    `post` is a group's send or receive, `number` the process at the other side. `what` says in
    words what it is and which way it goes, for the error if it never arrives.
    """

    def __init__(
        self,
        post: Callable[[list[Tensor], int, int], dist.Work],
        value: Tensor,
        number: int,
        tag: int,
        what: str,
    ) -> None:
        self._what = f"{what} process {number}"
        self._value = value
        self._work: dist.Work | None = None
        self._dropped = False
        try:
            self._work = post([value], number, tag)
        except WaitError as error:
            raise WaitError(error.cause, self._what) from error

    def wait(self) -> Tensor:
        """The vector, once it has arrived. Raises WaitError where it can't any more."""
        if self._dropped:
            raise WaitError(RuntimeError("the executor has failed since"), self._what)
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as error:
                raise WaitError(error, self._what) from error
            self._work = None
        return self._value

    def drop(self) -> None:
        """Let its connection go; whoever has not waited yet waits in vain."""
        self._dropped = self._work is not None
        self._work = None
