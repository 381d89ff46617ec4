"""Schedules from a building block: what they are for 1F1B's, what they keep to, what is refused."""

from __future__ import annotations

import random

import pytest

import schedir
from schedir import (
    Action,
    Kind,
    Pipeline,
    Schedule,
    backward,
    backward_input,
    backward_weight,
    forward,
    repeat_block,
)

Block = dict[Action, int]


def pipeline(ranks: int, microbatches: int, chunks: int = 1) -> Pipeline:
    shape = Pipeline(ranks, microbatches, chunks, ())
    return Pipeline(ranks, microbatches, chunks, schedir.wave(shape))


def repeated(pipe: Pipeline, block: Block) -> Schedule:
    lists = repeat_block(pipe, block)
    return schedir.insert_communication(
        Schedule("repeated", pipe.microbatches, pipe.placement, lists)
    )


def of_1f1b(ranks: int) -> Block:
    """Forwards down the ranks, whole backwards up."""
    block = {forward(s, 0): s for s in range(ranks)}
    return block | {backward(s, 0): 3 * ranks - 2 - 2 * s for s in range(ranks)}


def test_the_block_of_1f1b_makes_1f1b() -> None:
    """In its time and its memory, of which any rank may use as much as the first one."""
    for ranks, microbatches in ((1, 3), (2, 1), (3, 2), (4, 8)):
        ours = repeated(pipeline(ranks, microbatches), of_1f1b(ranks))
        theirs = schedir.build("1f1b", ranks=ranks, microbatches=microbatches)
        lines = [schedir.simulate(one) for one in (ours, theirs)]
        assert lines[0].makespan == lines[1].makespan
        assert all(rank.peak_activations <= min(ranks, microbatches) for rank in lines[0].ranks)


def test_weights_wait_for_a_gap_or_for_memory() -> None:
    """The rank may hold one activation: W makes room for the next F. With room for all, none is in
    the way of an I."""
    pipe = pipeline(1, 3)
    tight = repeat_block(pipe, {forward(0, 0): 0, backward_input(0, 0): 1})
    assert " ".join(map(str, tight[0])) == "0F0 0I0 0W0 0F1 0I1 0W1 0F2 0I2 0W2"
    wide = repeat_block(pipe, {forward(0, 0): 0, backward_input(0, 0): 7})
    assert " ".join(map(str, wide[0])) == "0F0 0F1 0F2 0I0 0I1 0I2 0W0 0W1 0W2"


def test_weights_wait_for_a_gap_that_is_long_enough() -> None:
    """Rank 0 waits half a forward for its second gradient: time enough for a W, or not."""
    block = {forward(0, 0): 0, forward(1, 0): 1, backward_input(1, 0): 2, backward_input(0, 0): 4}
    short, long = (
        repeat_block(
            pipeline(2, 2), block, schedir.CostModel(forward=(1, 0.5), backward_weight=weights)
        )
        for weights in (0.5, 0.6)
    )
    assert " ".join(map(str, short[0])) == "0F0 0F1 0I0 0W0 0I1 0W1"
    assert " ".join(map(str, long[0])) == "0F0 0F1 0I0 0I1 0W0 0W1"


def test_costs_of_other_stages() -> None:
    costs = schedir.CostModel(forward=(1, 2, 3))
    with pytest.raises(schedir.SchedirError, match="forward has 3 numbers, but 4 are needed"):
        repeat_block(pipeline(4, 2), of_1f1b(4), costs)


def a_block(chance: random.Random, pipe: Pipeline) -> Block:
    """Each action a few slots after the one before it, where it does not meet another one."""
    block: Block = {}
    taken: set[tuple[int, int]] = set()
    split = [chance.random() < 0.6 for _ in range(pipe.stages)]
    end, interval = 0, 3 * pipe.chunks
    way = [forward(s, 0) for s in range(pipe.stages)]
    way += [(backward_input if split[s] else backward)(s, 0) for s in reversed(range(pipe.stages))]
    for action in way:
        (rank,) = pipe.placement[action.stage]
        length = 2 if action.kind is Kind.BACKWARD else 1
        start = end + chance.choice((0, 0, 0, 1, 2, 5))
        # A W needs no place in the block, so that there is one left for a pair of slots or none.
        for _ in range(interval):
            own = {(rank, (start + slot) % interval) for slot in range(length)}
            if not own & taken:
                break
            start += 1
        else:
            return a_block(chance, pipe)
        taken |= own
        block[action] = start
        end = start + length
    return block


def needed(pipe: Pipeline, block: Block) -> tuple[int, int]:
    """The slots that the repeated block takes, and the activations that a rank holds at once: its
    Ws run in the first slots that are free."""
    events: dict[int, dict[int, tuple[int, bool]]] = {rank: {} for rank in range(pipe.ranks)}
    for action, start in block.items():
        for m in range(pipe.microbatches):
            slot = start + m * 3 * pipe.chunks
            change = 1 if action.kind is Kind.FORWARD else 0
            events[pipe.placement[action.stage][0]][slot] = (
                change,
                action.kind is Kind.BACKWARD_INPUT,
            )
            if action.kind is Kind.BACKWARD:
                events[pipe.placement[action.stage][0]][slot + 1] = (-1, False)
    most = ends = 0
    for own in events.values():
        live = waiting = slot = 0
        while waiting or any(later >= slot for later in own):
            if slot in own:
                change, splits = own[slot]
                waiting += splits
                live += max(change, 0)
                most = max(most, live)
                live += min(change, 0)
            elif waiting:
                waiting -= 1
                live -= 1
            slot += 1
        ends = max(ends, slot)
    return ends, most


def test_any_block_makes_a_clean_schedule_no_longer_and_no_larger() -> None:
    chance = random.Random(0)
    for _ in range(60):
        ranks, microbatches, chunks = (chance.randint(1, n) for n in (4, 6, 3))
        pipe = pipeline(ranks, microbatches, chunks)
        block = a_block(chance, pipe)
        schedule = repeated(pipe, block)
        assert schedir.check(schedule).ok
        line = schedir.simulate(schedule)
        ends, most = needed(pipe, block)
        assert line.makespan <= ends
        assert max(rank.peak_activations for rank in line.ranks) <= most


@pytest.mark.parametrize(
    ("block", "why"),
    [
        ({forward(0, 0): 0}, "each of the 1 stages, and nothing else"),
        ({forward(0, 0): 0, backward(0, 1): 1}, "of microbatch 0"),
        ({forward(0, 0): 0, backward(0, 0): 1, backward_input(0, 0): 2}, "one of BACKWARD"),
        ({forward(0, 0): 0, backward_weight(0, 0): 1}, "nothing else"),
        ({forward(0, 0): 0, backward(1, 0): 1}, "nothing else"),
        ({forward(0, 0): 1, backward(0, 0): 1}, "0B0 is in slot 1, but its input is there in"),
        ({forward(0, 0): -1, backward(0, 0): 1}, "0F0 is in slot -1"),
        ({forward(0, 0): 0, backward(0, 0): 2}, "0F0 and 0B0 meet on rank 0, .* 3 slots apart"),
    ],
)
def test_no_block(block: Block, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        repeat_block(pipeline(1, 2), block)


def test_no_replicas() -> None:
    shape = Pipeline(2, 2, 1, ((0, 1), (1,)))
    with pytest.raises(ValueError, match="a stage on several ranks"):
        repeat_block(shape, of_1f1b(2))
