"""When sends are taken to have arrived, and that lists run so."""

from __future__ import annotations

import random

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import schedir
from schedir import Kind
from schedir.graph.compile import graph_of
from schedir.runtime import Executor
from schedir.runtime.program.compiler import arrivals
from tests.runtime.kit import MSE, gradients, linear_stages, numbered, random_batch
from tests.sweeps import examples
from tests.test_random import drawn, scattered


@given(st.integers(0, 1 << 32))
def test_a_send_has_arrived_when_something_made_of_it_has_come_back(seed: int) -> None:
    """In the timeline: what waits for the send is used after the receiver has used the payload."""
    schedule = schedir.insert_communication(drawn(random.Random(seed)))
    line = schedir.simulate(schedule)
    for rank in range(schedule.ranks):
        for user, sends in arrivals(schedule, rank).items():
            for send in sends:
                action = schedule.flat[rank][send]
                peer = graph_of(schedule).peer(action)
                assert peer is not None
                assert line.spans[rank][send].end <= line.spans[rank][user].start
                assert schedule.flat[rank][user].kind is not Kind.OPTIM_STEP


@examples(50)
@given(st.integers(0, 1 << 32))
def test_random_schedules_run_in_one_process(seed: int) -> None:
    """Every list that check lets through runs, gives the gradients, and no send is misjudged."""
    chance = random.Random(seed)
    schedule = scattered(schedir.insert_communication(drawn(chance)), chance)
    replicated = any(len(held) > 1 for held in schedule.placement)
    if replicated or not schedir.check(schedule).ok:
        return
    stages = numbered(stage.double() for stage in linear_stages(schedule.stages))
    x, y = (t.double() for t in random_batch(2 * schedule.microbatches))
    with Executor(schedule, stages, MSE, in_process=True) as executor:
        executor.step(x, target=y)
    found = gradients(stages.values())
    whole = nn.Sequential(*stages.values())
    whole.zero_grad()
    MSE(whole(x), y).backward()
    torch.testing.assert_close(found, gradients([whole]))
