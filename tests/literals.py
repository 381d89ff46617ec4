"""Schedules written out in a test, one list a rank."""

from __future__ import annotations

import schedir


def listed(
    microbatches: int, placement: str, *lists: str, name: str = "listed"
) -> schedir.Schedule:
    """The schedule whose rank r has `lists[r]`; `placement` is as in a file, `0 1` or `0,1`."""
    head = f"schedir 1\nname {name}\nmicrobatches {microbatches}\nplacement {placement}\n"
    return schedir.loads(head + "".join(f"rank {r}: {text}\n" for r, text in enumerate(lists)))


SHORT = listed(1, "0 1", "0F0 0SEND_ACT0 0RECV_GRAD0 0B0", "1RECV_ACT0 1F0 1B0 1SEND_GRAD0")
"""One microbatch through two ranks."""
CROSSING = listed(
    2,
    "0 1",
    "0F0 0SEND_ACT0 0F1 0SEND_ACT1 0RECV_GRAD0 0B0 0RECV_GRAD1 0B1",
    "1RECV_ACT0 1F0 1B0 1SEND_GRAD0 1RECV_ACT1 1F1 1B1 1SEND_GRAD1",
)
"""Textbook 1F1B, sent one by one: clean under `edge` and `async` only."""
