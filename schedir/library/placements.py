"""Where stages live: the placements that have a name, for `@schedule(placement=…)`."""

from __future__ import annotations

from schedir.ir import Placement
from schedir.library.authoring import Pipeline

# Stages by rank, 2 chunks on 4 ranks (mirrored: one stage for each rank):
#
#              wrapped    wave     mirrored
#     rank 0   0  4       0  7     0  3
#     rank 1   1  5       1  6     1  2
#     rank 2   2  6       2  5     2  1
#     rank 3   3  7       3  4     3  0


def wrapped(pipe: Pipeline) -> Placement:
    """Stage s on rank s mod P: after the last rank comes the first one again (the default)."""
    return tuple((stage % pipe.ranks,) for stage in range(pipe.ranks * pipe.chunks))


def wave(pipe: Pipeline) -> Placement:
    """Down the ranks, and up again, and down: the last rank hands to itself.

    Two chunks are the V of zero bubble's ZBV (Qi et al. 2024, arXiv 2405.15362), more
    the wave of Hanayo (Liu et al., SC 2023, arXiv 2308.15762).
    """
    turned = range(pipe.ranks - 1, -1, -1)
    return tuple(
        (rank,)
        for chunk in range(pipe.chunks)
        for rank in (turned if chunk % 2 else range(pipe.ranks))
    )


def mirrored(pipe: Pipeline) -> Placement:
    """Stage s on rank s and on rank P - 1 - s: one pipeline down the ranks, one up (Chimera, Li and
    Hoefler 2021, arXiv 2107.06925; DualPipe). Every rank has two stages; the middle one of an odd
    number of ranks has a single one."""
    last = pipe.ranks - 1
    return tuple(tuple(sorted({rank, last - rank})) for rank in range(pipe.ranks))
