"""Runs the lists of all ranks until they stand still, with one rank that stops at a place.

It knows nothing of schedir's graph: it reads the tokens. Sends never block, and compute waits for
what it consumes, as on gloo.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from schedir import Position, Schedule

HANDSHAKE, END = -2, 1 << 24
TOKEN = re.compile(r"(\d+)([A-Z_]+)(\d*)")


def at_rest(
    schedule: Schedule,
    stopped: dict[int, int],
    ties: Sequence[Collection[int]] = (),
    clips: bool = False,
) -> list[tuple[int, int, str]]:
    """Where each rank stands in the end, if some never get past an index of their lists."""
    lists = [[TOKEN.findall(str(entry)) for entry in entries] for entries in schedule.actions]
    done = [0] * len(lists)
    sent: set[tuple[str, str, str]] = set()
    sums: dict[tuple[str, int], int] = {}
    updates: dict[tuple[str, int], int] = {}
    runs_on = {
        (stage, m): rank
        for rank, entries in enumerate(lists)
        for entry in entries
        for stage, kind, m in entry
        if kind == "F"
    }
    last = str(schedule.stages - 1)

    def needs(rank: int, stage: str, kind: str, m: str) -> bool:
        """Whether what an action waits for is there."""
        if kind == "F" and stage != "0":
            before = str(int(stage) - 1)
            return runs_on[before, m] == rank or (before, "SEND_ACT", m) in sent
        if kind in ("B", "I") and stage != last:
            after = str(int(stage) + 1)
            return runs_on[after, m] == rank or (after, "SEND_GRAD", m) in sent
        return kind != "OPTIM_STEP" or ready_to_update(rank, stage)

    def run_of_updates(rank: int) -> list[str]:
        run = []
        for entry in lists[rank][done[rank] :]:
            if entry[0][1] != "OPTIM_STEP":
                break
            run.append(entry[0][0])
        return run

    def round_of(rank: int, stage: str) -> int:
        return updates.get((stage, rank), 0)

    def arrived(rank: int, stage: str, number: int) -> bool:
        return round_of(rank, stage) > number or (
            round_of(rank, stage) == number and stage in run_of_updates(rank)
        )

    def ready_to_update(rank: int, stage: str) -> bool:
        first = done[rank] == 0 or lists[rank][done[rank] - 1][0][1] != "OPTIM_STEP"
        if not first:
            return True
        for each in run_of_updates(rank):
            number = round_of(rank, each)
            holders = schedule.placement[int(each)]
            listed = {
                h: [e for e in lists[h] if e[0][:2] == (each, "REDUCE_GRAD")] for h in holders
            }
            if listed[rank]:
                mine = sums.get((each, rank), 0)
                if any(sums.get((each, h), 0) < mine for h in holders):
                    return False
            for tie in ties:
                if int(each) in tie:
                    for other in tie:
                        for holder in schedule.placement[other]:
                            if not arrived(holder, str(other), number):
                                return False
        return not clips or has_updated(rank) or all(map(comes_to_update, range(len(lists))))

    def has_updated(rank: int) -> bool:
        return any(number for (_, other), number in updates.items() if other == rank)

    def comes_to_update(rank: int) -> bool:
        steps = any(entry[0][1] == "OPTIM_STEP" for entry in lists[rank])
        return not steps or has_updated(rank) or bool(run_of_updates(rank))

    moved = True
    while moved:
        moved = False
        for rank, entries in enumerate(lists):
            while done[rank] < len(entries) and stopped.get(rank) != done[rank]:
                entry = entries[done[rank]]
                if not all(needs(rank, *action) for action in entry):
                    break
                for stage, kind, m in entry:
                    if kind.startswith("SEND"):
                        sent.add((stage, kind, m))
                    if kind == "REDUCE_GRAD":
                        sums[stage, rank] = sums.get((stage, rank), 0) + 1
                    if kind == "OPTIM_STEP":
                        updates[stage, rank] = updates.get((stage, rank), 0) + 1
                done[rank] += 1
                moved = True
    found = []
    speaker = schedule.placement[0][0]
    begun: dict[int, bool] = {}
    for turn in range(len(lists)):  # parents come first
        rank = (speaker + turn) % len(lists)
        parent = (speaker + (turn & (turn - 1))) % len(lists)
        ended = done[rank] == len(lists[rank])
        begun[rank] = ended and (turn == 0 or begun[parent])
    for rank, entries in enumerate(lists):
        at = done[rank]
        if at < len(entries):
            waits = not all(needs(rank, *action) for action in entries[at])
            waits = waits and stopped.get(rank) != at
            found.append((0, at, "waiting" if waits else "running"))
        else:
            # It reads the loss, or waits for the next call to be announced.
            givers = schedule.placement[-1]
            if all(done[giver] == len(lists[giver]) for giver in givers):
                found.append((1, 0, "outside") if begun[rank] else (1, HANDSHAKE, "waiting"))
            else:
                found.append((0, END + 1, "waiting"))
    return found


def position(of: tuple[int, int, str], state: str) -> Position:
    return Position(*of, state=state)  # type: ignore[arg-type]
