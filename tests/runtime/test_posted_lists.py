"""What is carried out is `executor.schedule`: proved for the transport, receives ahead and all."""

from __future__ import annotations

import attrs
import pytest
import torch

import schedir
from schedir.passes import forward_only
from schedir.runtime import Executor
from schedir.runtime.plan import posted, proved, transport_for
from schedir.runtime.program import program
from schedir.runtime.program.instruction import Instruction
from tests.built_in import NAMES
from tests.runtime.kit import CROSSING, MSE, linear_stages, numbered, random_batch, sgd
from tests.runtime.on_ranks import on_ranks
from tests.sweeps import sweep


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, schedir.Action]]:
    """What will be run, in order, by rank and index."""
    ran: list[tuple[int, int, schedir.Action]] = []

    def recorder(instruction: Instruction) -> Instruction:
        def run() -> None:
            ran.append((instruction.rank, instruction.index, instruction.action))
            instruction.run()

        return attrs.evolve(instruction, run=run) if instruction.listed else instruction

    monkeypatch.setattr(program, "listening", lambda: [recorder])
    return ran


def by_rank(ran: list[tuple[int, int, schedir.Action]], ranks: int) -> list[list[schedir.Action]]:
    for rank in range(ranks):
        indices = [index for own, index, _ in ran if own == rank]
        assert indices == [*range(len(indices))]
    return [[action for own, _, action in ran if own == rank] for rank in range(ranks)]


@sweep("width", [3, 1024], quick=[3])
@sweep("name", NAMES, quick=["interleaved-1f1b"])
def test_the_executors_schedule_is_the_list_that_ran(
    name: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = schedir.build(name, ranks=3, microbatches=4)
    ran = recorded(monkeypatch)
    stages = numbered(linear_stages(schedule.stages, width))
    # Of 1,024 numbers and 256 rows, a boundary fills what there is room for beyond the peak.
    x, y = torch.randn(2, 8 if width == 3 else 1024, width)
    with Executor(schedule, stages, MSE, sgd, in_process=True) as executor:
        needed = executor.schedule
        executor.step(x, target=y)
        assert by_rank(ran, 3) == [[*actions] for actions in needed.flat]
        for _ in range(2):
            ran.clear()
            executor.step(x, target=y)
            assert by_rank(ran, 3) == [[*actions] for actions in executor.schedule.flat]
        assert (executor.schedule == needed) == (width == 1024)
    assert needed == schedir.advance_receives(schedule, "async")
    if width == 3:
        assert executor.schedule == schedir.advance_receives(schedule, "async", 10**6)
    assert "async" in schedir.check(executor.schedule).clean_channels


@on_ranks(2)
def test_on_ranks_too(rank: int) -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=4)
    x, y = random_batch()
    with pytest.MonkeyPatch.context() as monkeypatch:
        ran = recorded(monkeypatch)
        with Executor(schedule, {rank: linear_stages()[rank]}, MSE, sgd) as executor:
            executor.step(x, target=y)
            # The first call learns the shapes, and the third has its first receives posted early.
            for _ in range(2):
                ran.clear()
                executor.step(x, target=y)
                taken = ran if rank == 0 else ran[-len(executor.schedule.flat[rank]) :]
                assert [action for *_, action in taken] == [*executor.schedule.flat[rank]]
            assert executor.schedule == schedir.advance_receives(schedule, "async", 10**6)


def test_each_transport_names_the_model_that_lists_are_proved_under() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    ways = [(True, cpu), (True, gpu), (False, cpu), (False, gpu)]
    assert [transport_for(*way).channel for way in ways] == ["async", "async", "async", "rank"]


def test_a_list_that_needs_more_than_its_transport_gives_is_refused() -> None:
    with pytest.raises(schedir.ScheduleError, match=r"S301.*deadlock") as refused:
        proved(CROSSING, "rank", ())
    assert {d.code for d in refused.value.diagnostics} == {"S301"}
    assert proved(CROSSING, "async", ()) == CROSSING
    x, y = random_batch()
    with Executor(CROSSING, numbered(linear_stages()), MSE, sgd, in_process=True) as executor:
        executor.step(x, target=y)


@pytest.mark.parametrize("channel", schedir.CHANNELS)
@pytest.mark.parametrize("name", NAMES)
def test_forwards_alone_run_too_with_their_receives_ahead(name: str, channel: str) -> None:
    forwards = forward_only(schedir.build(name, ranks=3, microbatches=5))
    ahead = posted(forwards, channel, (), 10**6)
    assert sorted(map(str, ahead.flat[1])) == sorted(map(str, forwards.flat[1]))


def test_a_pass_that_breaks_a_list_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof is of the very list that is posted, not of the one that it was made from."""
    good = schedir.build("1f1b", ranks=2, microbatches=2)
    monkeypatch.setattr("schedir.runtime.plan.advance_receives", lambda *_, ties: CROSSING)
    with pytest.raises(schedir.ExecutionError, match="a fault of schedir"):
        posted(good, "rank", (), None)
    assert posted(good, "async", (), None) is CROSSING
