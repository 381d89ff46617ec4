"""Schedules written out in a test, one list a rank."""

from __future__ import annotations

import schedir


def listed(
    microbatches: int, placement: str, *lists: str, name: str = "listed"
) -> schedir.Schedule:
    """The schedule whose rank r has `lists[r]`; `placement` is as in a file, `0 1` or `0,1`."""
    head = f"schedir 1\nname {name}\nmicrobatches {microbatches}\nplacement {placement}\n"
    return schedir.loads(head + "".join(f"rank {r}: {text}\n" for r, text in enumerate(lists)))
