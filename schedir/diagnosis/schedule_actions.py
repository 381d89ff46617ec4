"""Name the actions of a schedule at which the ranks of a hung job stand.

The transfers of a rank, in the order in which it posted them, are the sends and receives of its
list, step after step. Where a dump has lost the first ones, the peers tell where in the list it
begins.
"""

from __future__ import annotations

from collections.abc import Sequence

from schedir.diagnosis.operations import Job, Operation
from schedir.graph.compile import graph_of
from schedir.ir import Action, Schedule

_Way = tuple[bool, int]  # whether it is a send, and the peer


def action_at(
    job: Job, schedule: Schedule, rank: int, operation: Operation | None, is_missing: bool
) -> tuple[int, Action] | None:
    """The index and the action of what a rank has posted, or, of one that `is_missing`, of the
    first transfer that it has not posted, in a complete schedule.

    The job may have as many ranks as the schedule, or pipelines of as many, each in a group. None
    where a rank's transfers are not those of its list.
    """
    members = job.ranks
    posted = [each for each in job.operations.get(rank, ()) if each.transfers]
    if len(members) != schedule.ranks:
        groups = [each.group.members for each in (*posted, operation) if each is not None]
        members = next((each for each in groups if len(each) == schedule.ranks), ())
    if rank not in members:
        return None
    within = {each: number for number, each in enumerate(members)}
    transfers = [
        (each, (transfer.is_send, within[transfer.peer]))
        for each in posted
        for transfer in each.transfers
        if transfer.peer in within
    ]
    listed = _listed(schedule, within[rank])
    begins: Sequence[int] = range(len(listed))
    if rank in job.dumps and job.dumps[rank].is_whole:
        begins = begins[:1]
    for number, (_, way) in enumerate(transfers):
        begins = [each for each in begins if listed[(each + number) % len(listed)][0] == way]
    at = len(transfers)
    if not is_missing:
        at = next((n for n, (each, _) in enumerate(transfers) if each is operation), -1)
    return None if len(begins) != 1 or at < 0 else listed[(begins[0] + at) % len(listed)][1]


def _listed(schedule: Schedule, rank: int) -> list[tuple[_Way, tuple[int, Action]]]:
    """The transfers of a rank in the order of its list, with the actions that they are."""
    columns, transfers = schedule.columns, graph_of(schedule).transfers
    found: dict[int, _Way] = {}
    for own, places, peers, is_send in (
        (transfers.source, transfers.send, transfers.target, True),
        (transfers.target, transfers.receive, transfers.source, False),
    ):
        own_ones = (own == rank) & (places >= 0)
        for place, peer in zip(places[own_ones].tolist(), peers[own_ones].tolist(), strict=True):
            found[place] = is_send, peer
    return [
        (way, (columns.position(place)[1], columns.action(place)))
        for place, way in sorted(found.items())
    ]
