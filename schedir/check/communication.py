"""S302 to S306: each send meets its receive, and compute has its input."""

from __future__ import annotations

from collections.abc import Iterator

from schedir.check import rules
from schedir.check.diagnostics import Diagnostic, locate
from schedir.ir import (
    COMMUNICATION,
    SENDS,
    Action,
    Dataflow,
    Kind,
    Position,
    Schedule,
    channel_of,
    trace,
    transfer_of,
)


def communication(schedule: Schedule) -> Iterator[Diagnostic]:
    """What is wrong with the sends and receives. Expects a sound structure."""
    dataflow = trace(schedule)
    places: list[dict[Action, int]] = [
        {action: index for index, action in enumerate(actions)} for actions in schedule.actions
    ]
    # Per channel, the transfers in order of the sends and of the receives.
    sent: dict[tuple[int, int], list[tuple[Action, Position]]] = {}
    received: dict[tuple[int, int], list[tuple[Action, Position]]] = {}
    for rank, actions in enumerate(schedule.actions):
        for index, action in enumerate(actions):
            if action.kind not in COMMUNICATION:
                yield from _has_receive(schedule, dataflow, places[rank], rank, index)
                yield from _has_send(schedule, dataflow, places[rank], rank, index)
                continue
            peer = dataflow.peer(action)
            if peer is None or peer == rank:
                yield rules.NO_PEER.found(
                    f"{action} has no other rank at its other end: "
                    + ("the pipeline ends here" if peer is None else "its neighbour is local"),
                    locate(schedule, rank, index),
                    help="remove it",
                )
                continue
            if dataflow.rank_of(action.stage, action.microbatch) != rank:
                yield rules.NO_PEER.found(
                    f"rank {rank} does not run stage {action.stage} on microbatch "
                    f"{action.microbatch}, so {action} has nothing to work on",
                    locate(schedule, rank, index),
                    help="move it to the rank that does",
                )
                continue
            channels = sent if action.kind in SENDS else received
            entry = (transfer_of(action), (rank, index))
            channels.setdefault(channel_of(action, rank, peer), []).append(entry)
    for channel in sorted(sent.keys() | received.keys()):
        yield from _matched(schedule, sent.get(channel, []), received.get(channel, []))
    yield from _reduces_matched(schedule)


def _has_receive(
    schedule: Schedule, dataflow: Dataflow, places: dict[Action, int], rank: int, index: int
) -> Iterator[Diagnostic]:
    action = schedule.actions[rank][index]
    need = dataflow.needs(action, rank)
    if need is None:
        return
    place = places.get(need)
    if place is None:
        yield rules.MISSING_RECEIVE.found(
            f"{action} runs without {need}, the receive of its input",
            locate(schedule, rank, index),
            help=f"add {need} before rank {rank} #{index}",
        )
    elif place > index:
        yield rules.MISSING_RECEIVE.found(
            f"{action} runs before {need}, the receive of its input",
            locate(schedule, rank, index),
            locate(schedule, rank, place),
            help=f"move rank {rank} #{place} before rank {rank} #{index}",
        )


def _has_send(
    schedule: Schedule, dataflow: Dataflow, places: dict[Action, int], rank: int, index: int
) -> Iterator[Diagnostic]:
    action = schedule.actions[rank][index]
    send = dataflow.makes(action, rank)
    place = None if send is None else places.get(send)
    if place is not None and place < index:
        yield rules.SEND_BEFORE_COMPUTE.found(
            f"{send} is listed before {action}, which makes its payload",
            locate(schedule, rank, place),
            locate(schedule, rank, index),
            help=f"move rank {rank} #{place} behind rank {rank} #{index}",
        )


def _at(schedule: Schedule, place: Position) -> Action:
    rank, index = place
    return schedule.actions[rank][index]


def _matched(
    schedule: Schedule,
    sent: list[tuple[Action, Position]],
    received: list[tuple[Action, Position]],
) -> Iterator[Diagnostic]:
    """One channel: every send has its receive, and they stand in the same order."""
    sends, receives = dict(sent), dict(received)
    for transfer, place in sent:
        if transfer not in receives:
            yield rules.UNMATCHED.found(
                f"{_at(schedule, place)} is never received",
                locate(schedule, *place),
                help=f"add {transfer} to the rank that runs its stage",
            )
    for transfer, place in received:
        if transfer not in sends:
            yield rules.UNMATCHED.found(
                f"{transfer} is never sent",
                locate(schedule, *place),
                help="add its send to the rank that runs the neighbouring stage",
            )
    # What is unmatched would shift all behind it; pair the rest.
    pairs = zip(
        [entry for entry in sent if entry[0] in receives],
        [entry for entry in received if entry[0] in sends],
        strict=True,
    )
    wrong = [(send, receive) for send, receive in pairs if send[0] != receive[0]]
    if wrong:
        (_, send_place), (transfer, receive_place) = wrong[0]
        send = _at(schedule, send_place)
        right = sends[transfer]
        yield rules.MIS_PAIRED.found(
            f"{transfer} would get the payload of {send}",
            locate(schedule, *receive_place),
            locate(schedule, *send_place),
            locate(schedule, *right),
            notes=(
                f"{len(wrong)} of the channel's {len(sends.keys() & receives.keys())} transfers "
                f"from rank {send_place[0]} to rank {receive_place[0]} are mis-paired",
            ),
            help=f"order rank {receive_place[0]}'s receives as rank {send_place[0]} sends them",
        )


def _reduces_matched(schedule: Schedule) -> Iterator[Diagnostic]:
    """A replicated stage has the same number of REDUCE_GRADs on each of its ranks."""
    reduces: dict[tuple[int, int], list[int]] = {}
    for rank, actions in enumerate(schedule.actions):
        for index, action in enumerate(actions):
            if action.kind is Kind.REDUCE_GRAD:
                reduces.setdefault((action.stage, rank), []).append(index)
    for stage, held in enumerate(schedule.placement):
        turns, fewest = min((len(reduces.get((stage, rank), ())), rank) for rank in held)
        for rank in held:
            for index in reduces.get((stage, rank), [])[turns:]:
                yield rules.UNMATCHED.found(
                    f"{stage}REDUCE_GRAD has no counterpart on rank {fewest}",
                    locate(schedule, rank, index),
                    help=f"every rank of stage {stage} must reduce equally often",
                )
