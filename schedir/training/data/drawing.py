"""What a loader draws at random, apart from what the training around it draws.

    the user's state   ──────── kept ────────   put back
    a loader's next()  seeded by (seed, epoch, batch)

An order that is shuffled, and samples that are changed at random, are so the same on every rank,
whatever each of them has drawn before, and the same again where a resumed training reads them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand

_OF_NUMPY = np.random.MT19937()  # put in the place of its global one: copying that takes 50 µs
_32_BITS = (1 << 32) - 1


def read(loader: Iterable[Any], seed: int, epoch: int) -> Iterator[Any]:
    """What a loader yields in an epoch; it draws from torch, numpy and random as seeded.

    It begins and gives its first batch under one seed: a sampler is asked in the one if DataLoader
    has workers, in the other if it has none, and draws the same order.
    """
    for number in count():
        with _drawing(seed, epoch, number):
            try:
                if number == 0:
                    source = iter(loader)
                found = next(source)
            except StopIteration:
                return
        yield found


@contextmanager
def _drawing(seed: int, epoch: int, number: int) -> Iterator[None]:
    """Seed what draws in this process, and put back on leaving what was there."""
    mixed = hash((seed, epoch, number)) & _32_BITS  # of integers: the same everywhere
    of_torch, of_python = torch.default_generator.get_state(), random.getstate()
    of_numpy = mtrand.get_bit_generator()
    mtrand.set_bit_generator(_OF_NUMPY)
    try:
        np.random.seed(mixed)
        random.seed(mixed)
        torch.default_generator.manual_seed(mixed)  # torch.manual_seed costs a hundred times that
        yield
    finally:
        mtrand.set_bit_generator(of_numpy)
        random.setstate(of_python)
        torch.default_generator.set_state(of_torch)
