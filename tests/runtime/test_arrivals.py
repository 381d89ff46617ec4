"""When sends are taken to have arrived."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

import schedir
from schedir import Kind
from schedir.graph.compile import graph_of
from schedir.runtime.program.compiler import arrivals
from tests.test_random import drawn


@given(st.integers(0, 1 << 32))
def test_a_send_has_arrived_when_something_made_of_it_has_come_back(seed: int) -> None:
    """In the timeline: what waits for the send is used after the receiver has used the payload."""
    schedule = schedir.insert_communication(drawn(random.Random(seed)))
    line = schedir.simulate(schedule)
    for rank in range(schedule.ranks):
        for user, sends in arrivals(schedule, rank).items():
            assert schedule.flat[rank][user].kind is not Kind.OPTIM_STEP
            for send in sends:
                assert graph_of(schedule).peer(schedule.flat[rank][send]) is not None
                assert line.spans[rank][send].end <= line.spans[rank][user].start
