"""Name the actions of a schedule at which the ranks of a hung job stand.

The transfers of a rank, in the order in which it posted them, are the sends and receives of its
list, step after step. Where a dump has lost the first ones, the peers tell where in the list it
begins.
"""

from __future__ import annotations

from attrs import evolve

from schedir.diagnosis.blame import MISSING, Verdict
from schedir.diagnosis.operations import Operation
from schedir.graph.compile import graph_of
from schedir.ir import Schedule

_Way = tuple[bool, int]  # whether it is a send, and the peer


def name_actions(verdict: Verdict, schedule: Schedule) -> Verdict:
    """The verdict with the actions of a complete schedule: `#7 2RECV_ACT3`.

    The job may have as many ranks as the schedule, or pipelines of as many, each in a group. An
    action stays empty where a rank's transfers are not those of its list. A rank that is missing
    gets the first transfer that it has not posted.
    """
    listed = _listed(schedule)

    def named(rank: int, operation: Operation | None, is_missing: bool) -> str:
        members = verdict.ranks
        posted = [each for each in verdict.operations.get(rank, []) if each.transfers]
        if len(members) != schedule.ranks:
            groups = [each.group for each in (*posted, *([operation] if operation else ()))]
            fits = [each.members for each in groups if len(each.members) == schedule.ranks]
            members = fits[0] if fits else ()
        if rank not in members:
            return ""
        within = {each: number for number, each in enumerate(members)}
        transfers = [
            (each, (transfer.is_send, within[transfer.peer]))
            for each in posted
            for transfer in each.transfers
            if transfer.peer in within
        ]
        of = listed[within[rank]]
        begin = _begin(of, [way for _, way in transfers], rank in verdict.whole)
        at = len(transfers)
        if not is_missing:
            at = next((n for n, (each, _) in enumerate(transfers) if each is operation), -1)
        return "" if begin is None or at < 0 else of[(begin + at) % len(of)][1]

    return evolve(
        verdict,
        roots=tuple(
            evolve(each, action=named(each.rank, each.operation, each.reason == MISSING))
            for each in verdict.roots
        ),
        waiting=tuple(
            evolve(each, action=named(each.rank, each.operation, False)) for each in verdict.waiting
        ),
    )


def _listed(schedule: Schedule) -> list[list[tuple[_Way, str]]]:
    """The transfers of each rank in the order of its list, with the actions that they are."""
    columns, transfers = schedule.columns, graph_of(schedule).transfers
    places: list[tuple[int, _Way]] = []
    for mine, peer, is_send in (
        (transfers.send, transfers.target, True),
        (transfers.receive, transfers.source, False),
    ):
        places += [
            (place, (is_send, rank))
            for place, rank in zip(mine.tolist(), peer.tolist(), strict=True)
            if place >= 0
        ]
    listed: list[list[tuple[_Way, str]]] = [[] for _ in range(schedule.ranks)]
    for place, way in sorted(places):
        rank, index = columns.position(place)
        listed[rank].append((way, f"#{index} {columns.action(place)}"))
    return listed


def _begin(of: list[tuple[_Way, str]], posted: list[_Way], is_whole: bool) -> int | None:
    """Where in a list the transfers that were posted begin; None where that is not clear."""
    fits = [0] if is_whole else list(range(len(of)))
    for number, way in enumerate(posted):
        fits = [each for each in fits if of[(each + number) % len(of)][0] == way]
    return fits[0] if len(fits) == 1 else None
