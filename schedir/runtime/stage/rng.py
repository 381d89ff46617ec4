"""Random numbers that depend on what is computed, never on the order in which it is.

Every forward draws from generators seeded by (seed, step, stage, microbatch). So every schedule,
and a loop in one process, drops out the same units.
"""

from __future__ import annotations

from functools import lru_cache
from types import TracebackType

import torch

_MASK = (1 << 64) - 1


def rng(seed: int, step: int, stage: int, microbatch: int) -> SavedRng:
    """Seed torch's default generators as the executor does before that stage's forward.

    The seeding happens at the call; used as a context manager, the result restores the state that
    was found. `step` counts the executor's calls of `step` from 0.
    """
    saved = SavedRng()
    seed_generators(seed, step, stage, microbatch)
    return saved


class SavedRng:
    """The state of torch's default generators, restored on leaving the context."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore(self) -> None:
        """Put the generators back to where they were."""
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)

    def __enter__(self) -> SavedRng:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.restore()


def seed_generators(seed: int, step: int, stage: int, microbatch: int) -> None:
    """Seed torch's default generators from the four numbers."""
    mixed = _mix(_of_stage(seed, step, stage) ^ _mix(microbatch + 1))
    # The generators directly: torch.manual_seed costs a hundred times as much.
    torch.default_generator.manual_seed(mixed)
    if torch.cuda.is_initialized():
        for generator in torch.cuda.default_generators:
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
