"""Random schedules whose stages step several times a call, some of their neighbours together.

A schedule is drawn as an order of tasks, each after those that it needs. All stages group the
microbatches alike; the gradients of a group come after the step of the one before.
"""

from __future__ import annotations

import random
from collections.abc import Hashable

from hypothesis import given
from hypothesis import strategies as st

import schedir
from schedir import Action, Schedule
from schedir.checker import CHANNELS
from tests.joined import joined
from tests.oracle import happens
from tests.test_random import scattered


def drawn_with_steps(chance: random.Random) -> Schedule:
    """A right compute-only schedule."""
    ranks, stages, microbatches = (chance.randint(1, n) for n in (3, 3, 4))
    placement = [
        tuple(sorted(chance.sample(range(ranks), chance.choice([1, 1, min(2, ranks)]))))
        for _ in range(stages)
    ]
    group = sorted(chance.randrange(3) for _ in range(microbatches))
    over_data = chance.random() < 0.3  # stages on one rank have their REDUCE_GRADs too
    tasks: dict[Hashable, tuple[int, Action, set[Hashable]]] = {}
    for stage, held in enumerate(placement):
        on = [chance.choice(held) for _ in range(microbatches)]
        last: dict[int, set[Hashable]] = {rank: set() for rank in held}
        for each in sorted(set(group)):
            own = [m for m in range(microbatches) if group[m] == each]
            sums: set[Hashable] = set()
            for rank in held:
                ends = set(last[rank])
                for m in (m for m in own if on[m] == rank):
                    tasks["F", stage, m] = rank, schedir.forward(stage, m), {("F", stage - 1, m)}
                    inputs = {("F", stage, m), ("B", stage + 1, m)}
                    if chance.random() < 0.5:
                        tasks["B", stage, m] = (
                            rank,
                            schedir.backward(stage, m),
                            inputs | last[rank],
                        )
                        ends.add(("B", stage, m))
                        continue
                    tasks["B", stage, m] = rank, schedir.backward_input(stage, m), set(inputs)
                    needs = {("B", stage, m), *last[rank]}
                    tasks["W", stage, m] = rank, schedir.backward_weight(stage, m), needs
                    ends.add(("W", stage, m))
                if len(held) > 1 or over_data:
                    tasks["sum", stage, rank, each] = rank, schedir.reduce_grad(stage), ends
                    ends = {("sum", stage, rank, each)}
                sums |= ends
            for rank in held:
                step = ("step", stage, rank, each)
                tasks[step] = rank, schedir.optim_step(stage), sums
                last[rank] = {step}
    lists: list[list[Action]] = [[] for _ in range(ranks)]
    while tasks:
        ready = [task for task, (_, _, needs) in tasks.items() if not needs & tasks.keys()]
        rank, action, _ = tasks.pop(chance.choice(ready))
        lists[rank].append(action)
    return Schedule("drawn", microbatches, placement, lists)


@given(st.integers(0, 1 << 32), st.sampled_from(CHANNELS))
def test_the_verdict_is_what_happens(seed: int, channel: str) -> None:
    chance = random.Random(seed)
    complete = schedir.insert_communication(drawn_with_steps(chance))
    for built in (complete, scattered(complete, chance)):
        lists = joined(built, chance, chance.choice([0, 0.4, 1]))
        report = schedir.check(lists, channel)
        outcome = happens(lists, channel, seed)
        assert report.ok == (outcome == "completes"), (outcome, schedir.dumps(lists))
        if outcome == "completes" and channel in ("rank", "async"):
            assert schedir.check(schedir.advance_receives(lists, channel), channel).ok
