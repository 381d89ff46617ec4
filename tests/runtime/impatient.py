"""Ranks that wait, before some computations, for all that they have posted.

So does a GPU where a kernel is loaded for the first time, or memory is returned; see
`tests/hardware.py`. Here the host does it in its stead, over whatever moves the tensors.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import attrs
import pytest
from torch import Tensor

from schedir.runtime.processes.groups import Post
from schedir.runtime.program.instruction import Instruction, Observer
from schedir.runtime.transports import Transport, Work, wait_for


@attrs.define(eq=False)
class Awaited:
    """A work that may be waited for more than once, as gloo's may not."""

    work: Work
    done: bool = False

    def wait(self) -> bool:
        if not self.done:
            self.work.wait()
            self.done = True
        return True


@contextmanager
def impatient(transport: type[Transport], likely: float, seed: int) -> Iterator[list[str]]:
    """Executors inside, over a transport, wait so before a computation with some likelihood; where
    they have done so is in the list."""
    posted: list[Work] = []
    chance = random.Random(seed)
    waited: list[str] = []

    def keeping(post: Callable[[Transport, Tensor, int], Work]) -> Callable[..., Awaited]:
        def kept(self: Transport, tensor: Tensor, peer: int) -> Awaited:
            work = Awaited(post(self, tensor, peer))
            posted.append(work)
            return work

        return kept

    together = transport.together

    def kept_together(self: Transport, posts: Sequence[Post]) -> list[Work]:
        works: list[Work] = [Awaited(work) for work in together(self, posts)]
        posted.extend(works)
        return works

    def waits(instruction: Instruction) -> Instruction:
        run = instruction.run

        def ran() -> None:
            if chance.random() < likely:
                waited.append(str(instruction.action))
                wait_for(posted)
            run()

        return attrs.evolve(instruction, run=ran) if instruction.computes else instruction

    def listening() -> list[Observer]:
        return [waits]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("schedir.runtime.program.program.listening", listening)
        patch.setattr(transport, "early", False)  # else it would wait for what the next call sends
        patch.setattr(transport, "send", keeping(transport.send))
        patch.setattr(transport, "receive", keeping(transport.receive))
        patch.setattr(transport, "together", kept_together)
        yield waited
