"""Microbatches in groups: what interleaved schedules take chunk by chunk (arXiv 2104.04473)."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd

from schedir.library.authoring import Pipeline


def equal_groups(pipe: Pipeline) -> int:
    """The microbatches of a group where nobody says: of max(1, microbatches // ranks) equal groups;
    where that does not divide, as many as ranks, the last group being shorter."""
    rounds = max(1, pipe.microbatches // pipe.ranks)
    return pipe.ranks if pipe.microbatches % rounds else pipe.microbatches // rounds


def slots_in_groups(pipe: Pipeline, group_size: int, apart: int = 1) -> Callable[[int, int], int]:
    """The slot of (chunk, microbatch), both from 0, on a rank that takes groups of `group_size`
    microbatches one after the other, within a group chunk by chunk.

    From chunk to chunk of a microbatch it is `apart` slots at least. That may take several groups:
    then a chunk's slots are moved on after every cycle, lest they be those of an earlier one. The
    slots of what a short last group lacks stay empty.

    Raises ValueError where `group_size` is no int >= 1.
    """
    if type(group_size) is not int or group_size < 1:
        raise ValueError(f"group_size must be an int >= 1, not {group_size!r}")
    size = min(group_size, pipe.microbatches)  # beyond, all stays the same
    stride = -(-apart // size) * size
    cycle = pipe.chunks // gcd(pipe.chunks, stride // size)

    def slot(chunk: int, microbatch: int) -> int:
        group, member = divmod(microbatch, size)
        return (group * pipe.chunks + chunk // cycle) * size + chunk * stride + member

    return slot
