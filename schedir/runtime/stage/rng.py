"""Seed every forward by (seed, step, stage, microbatch), never by the order of the calls.

So every schedule, and a loop in one process, drops out the same units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType

import torch

from schedir.runtime.accelerator import current_accelerator

_MASK = (1 << 64) - 1


def rng(seed: int, step: int, stage: int, microbatch: int) -> SavedRng:
    """Seed torch's default generators as the executor does before that stage's forward.

    >>> import torch
    >>> from schedir.runtime import rng
    >>> with rng(seed=0, step=3, stage=1, microbatch=2):
    ...     first = torch.rand(4)
    >>> with rng(seed=0, step=3, stage=1, microbatch=2):
    ...     print(torch.equal(torch.rand(4), first))
    True

    It seeds the generators of the CPU and of the current device, at the call. As a context manager
    it puts them back on leaving. `step` counts the executor's calls of `step` from 0.
    """
    generators = (torch.default_generator, *current_accelerator().generators())
    saved = SavedRng(generators)
    (found,) = Seeds(seed, stage, [microbatch]).of(step)
    seeder(generators)(found)
    return saved


class SavedRng:
    """The state of some generators, which leaving the context restores."""

    def __init__(self, generators: Iterable[torch.Generator]) -> None:
        self._found = [(generator, generator.get_state()) for generator in generators]

    def restore(self) -> None:
        """Put the generators back into that state."""
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


def seeder(generators: Sequence[torch.Generator]) -> Callable[[int], object]:
    """A function that seeds some generators directly: torch.manual_seed takes 100 times longer."""
    if len(generators) == 1:
        return generators[0].manual_seed

    def seed(number: int) -> None:
        for generator in generators:
            generator.manual_seed(number)

    return seed


class Seeds:
    """The seeds of one stage's forwards; microbatches are numbered over all pipelines."""

    def __init__(self, seed: int, stage: int, microbatches: Iterable[int]) -> None:
        self._seed, self._stage = seed & _MASK, _mixed(stage + 1)
        self._microbatches = [_mixed(m + 1) for m in microbatches]

    def of(self, step: int) -> list[int]:
        """The seeds of a step, by microbatch."""
        of_stage = _mixed(_mixed(self._seed ^ _mixed(step + 1)) ^ self._stage)
        found = []
        for microbatch in self._microbatches:  # `_mixed` written out: this runs at every step
            mixed = ((of_stage ^ microbatch) + 0x9E3779B97F4A7C15) & _MASK
            mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
            mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
            found.append(mixed ^ (mixed >> 31))
        return found


def _mixed(number: int) -> int:
    """Hash a number so that neighbours end far apart: the finaliser of SplitMix64 (Steele, Lea &
    Flood, OOPSLA 2014)."""
    mixed = (number + 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)
