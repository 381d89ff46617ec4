"""Receives listed ahead: what moves, how far, and that it harms nothing."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedir
from schedir import CHANNELS, Action, Kind, Schedule, Together
from schedir.graph.compile import graph_of
from schedir.ir import COMMUNICATION, RECEIVES, Entry, enforces, flat
from tests.joined import drawn_joined
from tests.literals import listed as literal
from tests.test_random import drawn, scattered

SEEDS = st.integers(0, 1 << 32)
ROOMS = st.none() | st.integers(0, 8) | st.just(999_999_999)


def some_schedule(seed: int) -> Schedule:
    chance = random.Random(seed)
    return scattered(schedir.insert_communication(drawn(chance)), chance)


def live(actions: list[Action]) -> list[int]:
    """The receive buffers in use after each action: from the post to the last use of the data."""
    counts = []
    held: set[tuple[bool, int, int | None]] = set()
    for action in actions:
        if action.kind in RECEIVES:
            held.add((action.kind is Kind.RECV_GRAD, action.stage, action.microbatch))
        counts.append(len(held))
        if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            held -= {(grad, action.stage, action.microbatch) for grad in (False, True)}
    return counts


def keeps_order(channel: str, schedule: Schedule, first: Entry, receive: Action) -> bool:
    """Whether the model keeps a receive after the entry that is listed directly before it; read off
    its definition, one pair of actions at a time."""
    if isinstance(first, Together):
        parts = first.actions
        if any(part.kind in RECEIVES for part in parts):
            return True  # the receives of a rank keep their order
        return any(keeps_order(channel, schedule, part, receive) for part in parts)
    if channel == "host":
        return True
    if first.kind is Kind.REDUCE_GRAD:
        return channel == "rank"
    if first.kind not in COMMUNICATION:
        return False
    peer = graph_of(schedule).peer
    gradient = (first.kind is Kind.SEND_GRAD) == (receive.kind is Kind.RECV_GRAD)
    same = {"rank": True, "pair": peer(first) == peer(receive), "direction": gradient}
    return same.get(channel, False)


@given(SEEDS, st.sampled_from(CHANNELS), ROOMS)
def test_what_is_clean_stays_clean(seed: int, channel: str, room: int | None) -> None:
    schedule = some_schedule(seed)
    before = schedir.check(schedule)
    after = schedir.check(schedir.advance_receives(schedule, channel, room))
    assert before.ok or {d.code for d in before.errors} == {d.code for d in after.errors}
    # Each model keeps a part of the order that the stricter ones keep.
    for model in (model for model in CHANNELS if enforces(channel, model)):
        assert model not in before.clean_channels or model in after.clean_channels
    if channel in ("host", "rank"):
        assert before.clean_channels == after.clean_channels


def test_the_lines_of_python_ride_along() -> None:
    schedule = schedir.build("1f1b", ranks=3, microbatches=4)
    ahead = schedir.advance_receives(schedule, "async")
    assert ahead != schedule
    for rank, (before, after) in enumerate(zip(schedule.flat, ahead.flat, strict=True)):
        for index, action in enumerate(after):
            source = schedule.source_of(rank, before.index(action))
            assert ahead.source_of(rank, index) == source


def test_compute_alone_gets_its_communication_first() -> None:
    compute = literal(2, "0 1", "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    ahead = schedir.advance_receives(compute)
    assert [*map(str, ahead.flat[1])][:3] == ["1RECV_ACT0", "1RECV_ACT1", "1F0"]


def test_bad_terms_are_refused() -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    with pytest.raises(ValueError, match="unknown channel model 'tcp'; known: host, rank"):
        schedir.advance_receives(schedule, "tcp")
    for room in (-1, 1.5, "2"):
        with pytest.raises(ValueError, match="room must be a number of buffers"):
            schedir.advance_receives(schedule, room=room)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a Schedule"):
        schedir.advance_receives("1f1b")  # type: ignore[arg-type]


@given(SEEDS, st.sampled_from(CHANNELS), ROOMS)
def test_receives_move_as_far_as_the_model_and_the_buffers_allow(
    seed: int, channel: str, room: int | None
) -> None:
    chance = random.Random(seed)
    schedule = drawn_joined(chance) if chance.random() < 0.5 else some_schedule(seed)
    ahead = schedir.advance_receives(schedule, channel, room)
    assert ahead.placement == schedule.placement
    for listed, now in zip(schedule.actions, ahead.actions, strict=True):
        # No entry is taken apart, none made; only single receives pass anything.
        for moves in (False, True):
            kept = [[e for e in entries if _moves(e) == moves] for entries in (listed, now)]
            assert kept[0] == kept[1]
        receives = [[a for a in flat(entries) if a.kind in RECEIVES] for entries in (listed, now)]
        assert receives[0] == receives[1]
        for receive in filter(_moves, now):  # none comes later than it is listed
            assert {*now[: now.index(receive)]} <= {*listed[: listed.index(receive)]}
        buffers = max(max(live([*flat(listed)]), default=0), room or 0)
        assert max(live([*flat(now)]), default=0) <= buffers
        for turn, entry in enumerate(now[1:], 1):
            if not isinstance(entry, Action) or entry.kind not in RECEIVES or _moves(now[turn - 1]):
                continue
            moved = [*now[: turn - 1], entry, now[turn - 1], *now[turn + 1 :]]
            full = max(live([*flat(moved)])) > buffers
            assert full or keeps_order(channel, schedule, now[turn - 1], entry), (entry, now)
    assert schedir.advance_receives(ahead, channel, room) == ahead


def _moves(entry: Entry) -> bool:
    return isinstance(entry, Action) and entry.kind in RECEIVES


@pytest.mark.parametrize(
    ("channel", "rest"),
    [
        ("rank", "1RECV_ACT1 1B0 1F1 1SEND_ACT1 1SEND_GRAD0 1RECV_GRAD1 1B1 1SEND_GRAD1"),
        ("edge", "1RECV_ACT1 1RECV_GRAD1 1B0 1F1 1SEND_ACT1 1SEND_GRAD0 1B1 1SEND_GRAD1"),
        ("async", "1RECV_ACT1 1RECV_GRAD1 1B0 1F1 1SEND_ACT1 1SEND_GRAD0 1B1 1SEND_GRAD1"),
    ],
)
def test_no_receive_goes_ahead_of_a_batch_that_receives(channel: str, rest: str) -> None:
    start = "1RECV_ACT0 1F0 (1SEND_ACT0;1RECV_GRAD0)"
    schedule = literal(
        2,
        "0 1 2",
        "0F0 0SEND_ACT0 0RECV_GRAD0 0B0 0F1 0SEND_ACT1 0RECV_GRAD1 0B1",
        f"{start} 1B0 1RECV_ACT1 1F1 1SEND_ACT1 1SEND_GRAD0 1RECV_GRAD1 1B1 1SEND_GRAD1",
        "2RECV_ACT0 2F0 2B0 2SEND_GRAD0 2RECV_ACT1 2F1 2B1 2SEND_GRAD1",
    )
    ahead = schedir.advance_receives(schedule, channel, room=9)
    assert " ".join(map(str, ahead.actions[1])) == f"{start} {rest}"


def test_nothing_comes_between_the_parts_of_an_entry() -> None:
    # A buffer is free once 1B0 has run, which is in the middle of the pair.
    schedule = literal(
        3,
        "0 1",
        "0F0 0F1 0F2 0SEND_ACT0 0SEND_ACT1 0SEND_ACT2 0RECV_GRAD0 0B0 0RECV_GRAD1 0B1 0RECV_GRAD2 "
        "0B2",
        "1RECV_ACT0 1F0 1RECV_ACT1 (1B0;1F1) 1B1 1RECV_ACT2 1F2 1B2 "
        "1SEND_GRAD0 1SEND_GRAD1 1SEND_GRAD2",
    )
    ahead = schedir.advance_receives(schedule)
    assert " ".join(map(str, ahead.actions[1])).startswith(
        "1RECV_ACT0 1RECV_ACT1 1F0 (1B0;1F1) 1RECV_ACT2 1B1 1F2"
    )


def test_a_tied_update_where_its_stage_does_not_live() -> None:
    wrong = literal(1, "0 1", "0F0 0SEND_ACT0 0RECV_GRAD0 0B0 1OPTIM_STEP", "1RECV_ACT0 1F0 1B0")
    with pytest.raises(schedir.UnsoundError, match="rank 0 updates stage 1, not its own"):
        schedir.advance_receives(wrong, ties=[(0, 1)])
