"""Recurrences as papers give them: which version each stage reads, and what each update applies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from reference import Recurrence


def delayed(
    sizes: Sequence[int], microbatches: int, version: Callable[[int, int], int]
) -> Recurrence:
    """Stage s updates after every `sizes[s]` microbatches, and at the end; it runs microbatch m at
    its version `version(s, m)`."""
    every = range(microbatches)
    updates = [[[every[first : first + size]] for first in every[::size]] for size in sizes]
    return Recurrence(version, updates, every)


def pipedream(stages: int, microbatches: int, vertical_sync: bool = False) -> Recurrence:
    """w_s^{m+1} = OPT(w_s^m, g_s(m)), the gradient at versions v_s(m) = max(0, m - (S-1-s)); with
    vertical sync it is max(0, m - S + 1) on every stage."""
    late = [stages - 1 if vertical_sync else stages - 1 - s for s in range(stages)]
    return delayed([1] * stages, microbatches, lambda s, m: max(0, m - late[s]))


def pipedream_2bw(stages: int, microbatches: int, size: int) -> Recurrence:
    """Batch t of `size` microbatches runs at version max(0, t - 1) everywhere."""
    return delayed([size] * stages, microbatches, lambda _, m: max(0, m // size - 1))


def round_robin(replicas: Sequence[int], microbatches: int) -> Recurrence:
    """1F1B-RR without a flush: a stage updates once in a round of its replicas, and runs a
    microbatch as many rounds late as a replica has others in flight before it, which are
    ceil(ranks from its stage on / replicas) with it."""

    def version(s: int, m: int) -> int:
        in_flight = -(-sum(replicas[s:]) // replicas[s])
        return max(0, m // replicas[s] - (in_flight - 1))

    return delayed(replicas, microbatches, version)
