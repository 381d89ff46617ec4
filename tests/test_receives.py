"""Receives listed ahead: what moves, how far, and that it harms nothing."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedir
from schedir import CHANNELS, Action, Kind, Schedule
from schedir.ir import COMMUNICATION, RECEIVES
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


def keeps_order(channel: str, schedule: Schedule, first: Action, receive: Action) -> bool:
    """Whether the model keeps a receive after what is listed directly before it; read off its
    definition, one pair at a time."""
    if channel == "host":
        return True
    if first.kind is Kind.REDUCE_GRAD:
        return channel == "rank"
    if first.kind not in COMMUNICATION:
        return False
    peer = schedule.dataflow.peer
    return channel == "rank" or (channel == "pair" and peer(first) == peer(receive))


@given(SEEDS, st.sampled_from(CHANNELS), ROOMS)
def test_receives_move_as_far_as_the_model_and_the_buffers_allow(
    seed: int, channel: str, room: int | None
) -> None:
    schedule = some_schedule(seed)
    ahead = schedir.advance_receives(schedule, channel, room)
    assert ahead.placement == schedule.placement
    for listed, now in zip(schedule.flat, ahead.flat, strict=True):
        for kinds in (RECEIVES, set(Kind) - RECEIVES):
            assert [a for a in listed if a.kind in kinds] == [a for a in now if a.kind in kinds]
        turns = {action: turn for turn, action in enumerate(now) if action.kind in RECEIVES}
        before: set[Action] = set()
        for action in listed:  # none comes later than it is listed
            if action.kind in RECEIVES:
                assert set(now[: turns[action]]) <= before
            before.add(action)
        peak, counts = max(live(list(listed)), default=0), live(list(now))
        buffers = max(peak, room or 0)
        assert max(counts, default=0) <= buffers
        for turn, receive in enumerate(now):
            if turn == 0 or receive.kind not in RECEIVES or now[turn - 1].kind in RECEIVES:
                continue
            moved = [*now[: turn - 1], receive, now[turn - 1], *now[turn + 1 :]]
            full = max(live(moved)) > buffers
            assert full or keeps_order(channel, schedule, now[turn - 1], receive), (receive, now)


@given(SEEDS, st.sampled_from(CHANNELS), ROOMS)
def test_what_is_clean_stays_clean(seed: int, channel: str, room: int | None) -> None:
    schedule = some_schedule(seed)
    before = schedir.check(schedule)
    after = schedir.check(schedir.advance_receives(schedule, channel, room))
    assert before.ok or {d.code for d in before.errors} == {d.code for d in after.errors}
    # Each model keeps a part of the order that the stricter ones keep.
    weaker = CHANNELS[CHANNELS.index(channel) :]
    for model in weaker:
        assert model not in before.clean_channels or model in after.clean_channels
    if channel in ("host", "rank"):
        assert before.clean_channels == after.clean_channels


@given(SEEDS, st.sampled_from(CHANNELS), ROOMS)
def test_a_second_time_changes_nothing(seed: int, channel: str, room: int | None) -> None:
    once = schedir.advance_receives(some_schedule(seed), channel, room)
    assert schedir.advance_receives(once, channel, room) == once


def test_the_lines_of_python_ride_along() -> None:
    schedule = schedir.build("1f1b", ranks=3, microbatches=4)
    ahead = schedir.advance_receives(schedule, "async")
    assert ahead != schedule
    lines = {
        (rank, action): schedule.source_of(rank, index)
        for rank, actions in enumerate(schedule.flat)
        for index, action in enumerate(actions)
    }
    for rank, actions in enumerate(ahead.flat):
        for index, action in enumerate(actions):
            assert ahead.source_of(rank, index) == lines[rank, action]


def test_compute_alone_gets_its_communication_first() -> None:
    compute = schedir.loads(
        "schedir 1\nname x\nmicrobatches 2\nplacement 0 1\n"
        "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1\n"
    )
    ahead = schedir.advance_receives(compute)
    assert [*map(str, ahead.flat[1])][:3] == ["1RECV_ACT0", "1RECV_ACT1", "1F0"]


def test_bad_terms_are_refused() -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    with pytest.raises(ValueError, match="unknown channel model 'nccl'; known: host, rank"):
        schedir.advance_receives(schedule, "nccl")
    for room in (-1, 1.5, "2"):
        with pytest.raises(ValueError, match="room must be a number of buffers"):
            schedir.advance_receives(schedule, room=room)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a Schedule"):
        schedir.advance_receives("1f1b")  # type: ignore[arg-type]
