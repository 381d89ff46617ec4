"""Puts the `.sched` text of a schedule together."""

from __future__ import annotations

from collections.abc import Iterable

from schedir.ir.together import Entry

FORMAT_VERSION = 1


def placement_text(placement: Iterable[Iterable[int]]) -> str:
    """The ranks of each stage, as the text form has them: `0 1,3 2`."""
    return " ".join(",".join(map(str, held)) for held in placement)


def sched_text(
    name: str,
    microbatches: int,
    placement: Iterable[Iterable[int]],
    actions: Iterable[Iterable[Entry]],
) -> str:
    """The text form of a schedule's parts; `schedir.ir.text` describes and parses it."""
    lines = [
        f"schedir {FORMAT_VERSION}",
        f"name {name}",
        f"microbatches {microbatches}",
        f"placement {placement_text(placement)}",
    ]
    for rank, own in enumerate(actions):
        lines.append(" ".join([f"rank {rank}:", *map(str, own)]))
    return "\n".join(lines) + "\n"
