"""Random numbers that depend on what is computed, never on the order in which it is.

Every forward draws from generators seeded by (seed, step, stage, microbatch). So every schedule,
and a loop in one process, drops out the same units.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from types import TracebackType

import torch

from schedir.runtime.accelerator import current_accelerator

_MASK = (1 << 64) - 1


def rng(seed: int, step: int, stage: int, microbatch: int) -> SavedRng:
    """Seed torch's default generators as the executor does before that stage's forward: the CPU's,
    and that of the current device.

    The seeding happens at the call; used as a context manager, the result restores the state that
    was found. `step` counts the executor's calls of `step` from 0.
    """
    generators = (torch.default_generator, *current_accelerator().generators())
    saved = SavedRng(generators)
    seed_generators(generators, seed, step, stage, microbatch)
    return saved


class SavedRng:
    """The state of some generators, restored on leaving the context."""

    def __init__(self, generators: Iterable[torch.Generator]) -> None:
        self._found = [(generator, generator.get_state()) for generator in generators]

    def restore(self) -> None:
        """Put the generators back to where they were."""
        for generator, state in self._found:
            generator.set_state(state)

    def __enter__(self) -> SavedRng:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.restore()


def seed_generators(
    generators: Iterable[torch.Generator], seed: int, step: int, stage: int, microbatch: int
) -> None:
    """Seed some generators from the four numbers."""
    mixed = _mix(_of_stage(seed, step, stage) ^ _mix(microbatch + 1))
    # The generators directly: torch.manual_seed costs a hundred times as much.
    for generator in generators:
        generator.manual_seed(mixed)


@lru_cache(maxsize=1 << 10)
def _of_stage(seed: int, step: int, stage: int) -> int:
    """What all microbatches of a stage's step begin with."""
    return _mix(_mix((seed & _MASK) ^ _mix(step + 1)) ^ _mix(stage + 1))


def _mix(number: int) -> int:
    """SplitMix64's finaliser (Steele, Lea & Flood, OOPSLA 2014): neighbours end far apart."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)
