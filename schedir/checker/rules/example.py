"""The examples of the rules."""

from __future__ import annotations


def example(microbatches: int, placement: str, *lists: str) -> str:
    """A whole `.sched` text, given one list of tokens per rank."""
    head = f"schedir 1\nname example\nmicrobatches {microbatches}\nplacement {placement}\n"
    return head + "".join(f"rank {rank}: {actions}\n" for rank, actions in enumerate(lists))
