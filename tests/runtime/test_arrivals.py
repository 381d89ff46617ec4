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
from tests.runtime.kit import MSE
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
    torch.manual_seed(seed)
    stages = {s: nn.Linear(3, 3).double() for s in range(schedule.stages)}
    rows = 2 * schedule.microbatches
    x, y = torch.randn((2, rows, 3), dtype=torch.float64)
    with Executor(schedule, stages, MSE, in_process=True) as executor:
        executor.step(x, target=y)
    whole = nn.Sequential(*stages.values())
    found = [parameter.grad for parameter in whole.parameters()]
    whole.zero_grad()
    MSE(whole(x), y).backward()
    for grad, parameter in zip(found, whole.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad)
