"""Entries that run together: what is waited for, what is posted as one, and where errors are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch
from attrs import define, field
from torch import Tensor, nn

import schedir
from schedir import Together
from schedir.ir import flat
from schedir.runtime import Executor
from schedir.runtime.processes.groups import Post
from schedir.runtime.program import program
from schedir.runtime.program.instruction import Instruction
from schedir.runtime.transports import Batch, Endpoint, Work, wait_for
from tests.literals import listed
from tests.runtime.kit import (
    MSE,
    linear_stages,
    message_of,
    numbered,
    random_batch,
    sgd,
    train_on_rank,
)
from tests.runtime.lists import bidirectional_v, megatron
from tests.runtime.on_ranks import on_ranks

TENSORS = [torch.zeros(n) for n in range(1, 4)]


@define(eq=False)
class Once:
    """Work that may be waited for once, as gloo's."""

    waits: int = 0

    def wait(self) -> bool:
        assert not self.waits
        self.waits += 1
        return True


@define(eq=False)
class Recorder:
    """A transport that only writes down what is posted as one."""

    posted: list[list[tuple[int, int, bool]]] = field(factory=list)
    works: list[Once] = field(factory=list)

    def together(self, posts: Sequence[Post]) -> list[Work]:
        self.posted.append([(len(post.tensor), post.peer, post.sends) for post in posts])
        new = [Once() for _ in posts]
        self.works += new
        return [*new]


@pytest.fixture
def transport() -> Any:
    return Recorder()


def test_a_batch_is_posted_as_one_and_again_at_every_call(transport: Any) -> None:
    """But not one that carries nothing."""
    batch = Batch(transport)
    for call in range(2):
        batch.post()
        batch.send(TENSORS[0], 3)
        batch.receive(TENSORS[1], 0)
        batch.send(TENSORS[2], 3)
        assert len(transport.posted) == call
        batch.post()
    assert transport.posted == [[(1, 3, True), (2, 0, False), (3, 3, True)]] * 2


def test_what_consumes_a_receive_of_a_batch_waits_for_all_of_it(transport: Any) -> None:
    batch = Batch(transport)
    sent = batch.send(TENSORS[0], 1)
    received = [batch.receive(tensor, 1) for tensor in TENSORS[:2]]
    batch.post()
    for works in ([received[0]], [sent], [received[1]]):
        wait_for(works)
        assert [work.waits for work in transport.works] == [1, 1, 1]


def test_a_send_that_has_arrived_is_waited_for_without_the_rest(transport: Any) -> None:
    """Its receiver may have answered before it sends what the same batch receives."""
    batch = Batch(transport)
    sent, _ = batch.send(TENSORS[0], 1), batch.receive(TENSORS[1], 2)
    batch.post()
    sent.wait()
    assert [work.waits for work in transport.works] == [1, 0]


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, str]]:
    """By rank and index: what is waited for, and what is run."""
    ran: list[tuple[int, int, str]] = []

    def recorder(instruction: Instruction) -> Instruction:
        rank, index, waits = instruction.rank, instruction.index, instruction.wait

        def wait() -> None:
            ran.append((rank, index, f"wait {instruction.action}"))
            assert waits is not None  # else this takes no place
            waits()

        def run() -> None:
            if instruction.listed:
                ran.append((rank, index, str(instruction.action)))
            instruction.run()

        return attrs.evolve(instruction, wait=waits and wait, run=run)

    monkeypatch.setattr(program, "listening", lambda: [recorder])
    return ran


def test_a_pair_starts_when_the_inputs_of_both_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = bidirectional_v(2, 6)
    with Executor(schedule, numbered(linear_stages(4)), MSE, sgd, in_process=True) as executor:
        x, y = random_batch(rows=12)
        executor.step(x, target=y)
        ran = recorded(monkeypatch)
        executor.step(x, target=y)
        entries = executor.schedule.actions[0]
    pairs = [i for i, e in enumerate(entries) if isinstance(e, Together)]
    assert len(pairs) == 7
    # Rank 0 has both ends of the pipeline: 0F needs nothing, 3F and 0B what comes from rank 1.
    for index in pairs:
        found = [text for rank, at, text in ran if (rank, at) == (0, index)]
        one, other = map(str, entries[index].actions)  # type: ignore[union-attr]
        waits = [f"wait {x}" for x in (other, one) if x.startswith(("3F", "0B"))]
        assert found == [*waits, one, other]


@pytest.mark.parametrize("schedule", [megatron(3, 6), bidirectional_v(2, 6)], ids=lambda s: s.name)
def test_what_runs_is_the_executors_schedule_entry_by_entry(
    schedule: schedir.Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = numbered(linear_stages(schedule.stages))
    with Executor(schedule, stages, MSE, sgd, in_process=True) as executor:
        x, y = random_batch(rows=12)
        executor.step(x, target=y)
        ran = recorded(monkeypatch)
        executor.step(x, target=y)
        posted = executor.schedule
    assert [e for r in posted.actions for e in r if isinstance(e, Together)]
    for rank, entries in enumerate(posted.actions):
        listed = [(index, part) for index, entry in enumerate(entries) for part in flat([entry])]
        own = [(at, text) for r, at, text in ran if r == rank and not text.startswith("wait")]
        assert own == [(index, str(part)) for index, part in listed]


def test_each_batch_is_posted_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    posted: list[tuple[int, list[bool]]] = []
    together = Endpoint.together

    def record(self: Endpoint, posts: Sequence[Post]) -> list[Work]:
        posted.append((self.rank, [post.sends for post in posts]))
        return together(self, posts)

    monkeypatch.setattr(Endpoint, "together", record)
    schedule = megatron(2, 4)
    with Executor(schedule, numbered(linear_stages()), MSE, sgd, in_process=True) as executor:
        x, y = random_batch()
        executor.step(x, target=y)
        assert not posted  # what is not known yet travels by itself
        executor.step(x, target=y)
    assert sorted(posted) == [(0, [True, False])] * 3 + [(1, [True, False])] * 3


class Fails(nn.Module):
    """In its third backward."""

    backwards = 0

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad and type(x) is Tensor:
            x.register_hook(self.count)
        return x

    def count(self, grad: Tensor) -> None:
        self.backwards += 1
        if self.backwards == 3:
            raise RuntimeError("of the test")


def test_an_error_in_an_entry_names_its_part() -> None:
    schedule = bidirectional_v(2, 6)
    stages = numbered(linear_stages(4))
    stages[3] = nn.Sequential(stages[3], Fails())
    (index,) = [i for i, entry in enumerate(schedule.actions[0]) if str(entry).endswith(";3B2)")]
    x, y = random_batch(rows=12)
    with Executor(schedule, stages, MSE, sgd, in_process=True) as executor:
        text = message_of(executor.step, x, target=y)
    assert f"rank 0 #{index} 3B2" in text
    assert "of the test" in text


# Rank 0 posts as one what rank 1 receives one by one, and ahead of the step that it learns of.
LOPSIDED = listed(
    2,
    "0 1",
    "0F0 0F1 (0SEND_ACT0;0SEND_ACT1) 0RECV_GRAD0 0B0 0RECV_GRAD1 0B1 0OPTIM_STEP",
    "1RECV_ACT0 1F0 1B0 1SEND_GRAD0 1RECV_ACT1 1F1 1B1 1SEND_GRAD1 1OPTIM_STEP",
)


@on_ranks(2)
@pytest.mark.parametrize("schedule", [LOPSIDED, megatron(2, 2)], ids=lambda s: s.name)
def test_receives_posted_for_other_shapes_are_answered(
    rank: int, schedule: schedir.Schedule
) -> None:
    batches = [random_batch(rows, seed) for seed, rows in enumerate((4, 4, 6, 6, 4, 8))]
    train_on_rank(rank, linear_stages(), batches, target=schedule, microbatches=2)
