"""Finds the channels that share a communicator of NCCL.

Transfers that are posted as one need one communicator, and a channel needs the same one at both of
its ends. So channels that are in one batch anywhere share a communicator over all of their ranks.
Each other channel has its own, and so a stream that nothing else holds up.

    together (0→1, 1→0)            ranks 0, 1      0→1  1→0
    together (1→2)                 ranks 1, 2      1→2
                                   ranks 1, 2      2→1
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TypeAlias

from schedir.graph.compile import graph_of
from schedir.ir import Schedule

Channel: TypeAlias = tuple[int, int]
"""The ranks that it leads from and to."""


def batched(schedule: Schedule) -> set[frozenset[Channel]]:
    """The channels of each batch of a schedule, on whatever rank it is listed."""
    columns, transfers = schedule.columns, graph_of(schedule).transfers
    if not columns.together:
        return set()
    channels = [*zip(transfers.source.tolist(), transfers.target.tolist(), strict=True)]
    by_entry: dict[int, set[Channel]] = {}
    for places in (transfers.send, transfers.receive):
        for entry, channel in zip(columns.entry[places].tolist(), channels, strict=True):
            by_entry.setdefault(entry, set()).add(channel)
    return {frozenset(found) for found in by_entry.values()}


def communicators_of(schedule: Schedule) -> list[tuple[Channel, ...]]:
    """The channels of each communicator that a schedule needs."""
    transfers = graph_of(schedule).transfers
    channels = zip(transfers.source.tolist(), transfers.target.tolist(), strict=True)
    return communicators(channels, batched(schedule))


def communicators(
    channels: Iterable[Channel], together: Iterable[Collection[Channel]]
) -> list[tuple[Channel, ...]]:
    """The channels of each communicator; `together` are the sets that are posted as one.

    The order is the same on all processes. Both directions between two ranks are next to each
    other.
    """
    first: dict[Channel, Channel] = {channel: channel for channel in channels}

    def root(channel: Channel) -> Channel:
        while first[channel] != channel:
            first[channel] = channel = first[first[channel]]
        return channel

    for joined in together:
        roots = {root(channel) for channel in joined}
        for other in roots:
            first[other] = min(roots)
    found: dict[Channel, list[Channel]] = {}
    for channel in sorted(first, key=lambda channel: (sorted(channel), channel)):
        found.setdefault(root(channel), []).append(channel)
    return [tuple(shared) for shared in found.values()]


def ranks_of(channels: Iterable[Channel]) -> tuple[int, ...]:
    """The ranks at the ends of channels, in order."""
    return tuple(sorted({rank for channel in channels for rank in channel}))
