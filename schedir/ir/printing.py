"""Puts the `.sched` text of a schedule together."""

from __future__ import annotations

from collections.abc import Iterable

from schedir.ir.together import Entry

FORMAT_VERSION = 1


def sched_text(
    name: str,
    microbatches: int,
    placement: Iterable[Iterable[int]],
    actions: Iterable[Iterable[Entry]],
) -> str:
    """The text form of a schedule's parts; `schedir.ir.text` describes and parses it."""
    ranks_of_stages = " ".join(",".join(map(str, held)) for held in placement)
    lines = [
        f"schedir {FORMAT_VERSION}",
        f"name {name}",
        f"microbatches {microbatches}",
        f"placement {ranks_of_stages}",
    ]
    for rank, own in enumerate(actions):
        lines.append(" ".join([f"rank {rank}:", *map(str, own)]))
    return "\n".join(lines) + "\n"
