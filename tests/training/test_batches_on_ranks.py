"""Batches on several ranks: each reads them, or one does and hands them out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from time import monotonic
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import schedir
from schedir.runtime import Executor
from schedir.training import Batches
from tests.literals import listed
from tests.runtime.features import round_robin
from tests.runtime.kit import MSE, adamw, everyone, linear_stages, message_of
from tests.runtime.lists import bidirectional_v
from tests.runtime.on_ranks import on_ranks

_FILL_DRAIN = "{0}F0 {0}F1 {0}F2 {0}F3 {0}B0 {0}B1 {0}B2 {0}B3 {0}OPTIM_STEP"
# The first stage is on the last rank.
BACKWARDS = listed(4, "1 0", _FILL_DRAIN.format(1), _FILL_DRAIN.format(0))
_REST = "0REDUCE_GRAD 0OPTIM_STEP"
# Each rank has all stages, and no rank all microbatches.
REPLICATED = listed(4, "0,1", f"0F0 0B0 0F2 0B2 {_REST}", f"0F1 0B1 0F3 0B3 {_REST}")


ON_TWO = schedir.build("1f1b", ranks=2, microbatches=4)


def shuffled(own_generator: bool = False) -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(*torch.randn(2, 20, 4, generator=draw))
    generator = torch.Generator().manual_seed(2) if own_generator else None
    return DataLoader(data, 8, shuffle=True, generator=generator)  # the last one has 4


def executor_of(rank: int, schedule: schedir.Schedule) -> Executor:
    modules = linear_stages(schedule.stages)
    stages = {stage: modules[stage] for stage in schedule.stages_of(rank)}
    return Executor(schedule, stages, MSE, adamw, timeout=60)


def read_by_first(loader: Any, executor: Executor, first: int = 0) -> Batches:
    given = loader if executor.rank == first else None
    return Batches(given, reader="first", executor=executor)


def trained(executor: Executor, batches: Batches) -> list[float]:
    return [executor.step(inputs, target=target).loss for inputs, target in batches]


def whole(batches: Batches) -> dict[str, Any]:
    """The state, to be compared by all of its numbers."""
    state = batches.state_dict()
    return {**state, "generators": [drawn.tolist() for drawn in state["generators"]]}


@on_ranks(3)
@pytest.mark.parametrize(("target", "own"), [("1f1b", False), (round_robin, True)])
def test_one_rank_reads_for_all_what_all_would_read(rank: int, target: Any, own: bool) -> None:
    """And a resumed run goes on with the next batch, whatever the ranks have drawn."""
    torch.manual_seed(rank)
    schedule = schedir.build(target, ranks=3, microbatches=4)
    takes_inputs = rank in schedule.placement[0]
    with executor_of(rank, schedule) as executor:
        batches = Batches(shuffled(own))
        expected = [trained(executor, batches) for _ in range(3)]
    with executor_of(rank, schedule) as executor:
        batches = read_by_first(shuffled(own), executor)
        assert len(batches) == 3
        found = [trained(executor, batches)]
        assert found == expected[:1]
        reading = iter(batches)
        for loss in expected[1][:2]:
            inputs, target = next(reading)
            # The rank that reads them has both, so that the executor compares them.
            assert [inputs is None, target is None] == [not takes_inputs, rank == 1]
            assert executor.step(inputs, target=target).loss == loss
        states = everyone(whole(batches))
        assert states == states[:1] * 3
        resumed = read_by_first(shuffled(own), executor)
        resumed.load_state_dict(batches.state_dict())
        assert trained(executor, resumed) == expected[1][2:]
        assert trained(executor, resumed) == expected[2]
        # After an epoch that was left only the rank that reads knows what was drawn in it.
        next(iter(batches))
        alone = Batches(shuffled(own))
        for number in (3, 2, 1):
            assert len([*islice(alone, number)]) == number
        assert everyone(whole(batches)) == [whole(alone)] * 3


@on_ranks(2)
@pytest.mark.parametrize(
    "schedule", [bidirectional_v(2, 4), BACKWARDS, REPLICATED], ids=["V", "backwards", "replicated"]
)
def test_the_target_goes_where_the_loss_is(rank: int, schedule: schedir.Schedule) -> None:
    """Which is the rank that reads, in a schedule in the shape of a V."""
    with executor_of(rank, schedule) as executor:
        expected = trained(executor, Batches(shuffled()))
    with executor_of(rank, schedule) as executor:
        batches = read_by_first(shuffled(), executor, first=schedule.placement[0][0])
        assert trained(executor, batches) == expected


class Failing:
    """Its third batch can't be read."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(2):
            yield torch.ones(8, 4), torch.zeros(8, 4)
        raise OSError("the disk is gone")


@on_ranks(2)
def test_all_ranks_fail_where_the_one_that_reads_does(rank: int) -> None:
    with executor_of(rank, ON_TWO) as executor:
        for loader, reason in (
            (None, "ExecutionError: a loader is an iterable of batches, .* not NoneType"),
            ([], "ExecutionError: the loader yields no batch in epoch 0"),
            ([torch.ones(4)], "ExecutionError: the loader yields Tensor, which is no pair"),
            (Failing(), "OSError: the disk is gone"),
        ):
            where = "" if rank == 0 else "rank 0, which reads the batches, failed: "
            said = reason.partition(": ")[2] if rank == 0 else reason
            with pytest.raises((schedir.ExecutionError, OSError), match=f"^{where}{said}"):
                trained(executor, read_by_first(loader, executor))
        # Nothing has moved: the executor goes on.
        assert len(trained(executor, read_by_first(shuffled(), executor))) == 3
        began = monotonic()
        unsendable = read_by_first([(torch.ones(8, 4), Unsendable())], executor)
        found = message_of(trained, executor, unsendable)
        assert "rank 0: hand_out: TypeError: it stays here" in found
        assert monotonic() - began < 30  # nobody waits until the time is up


class Unsendable:
    """A target that can't be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("it stays here")


@on_ranks(2)
def test_a_rank_that_reads_other_data_is_told(rank: int) -> None:
    """Such as one that shuffles by a generator seeded by its rank."""
    generator = torch.Generator().manual_seed(rank)
    data = TensorDataset(*torch.randn(2, 24, 4))
    loader = DataLoader(data, 8, shuffle=True, generator=generator)
    executor = executor_of(rank, ON_TWO)
    executor.steps = 7
    said = everyone(message_of(trained, executor, Batches(loader)))
    assert "`inputs` is another batch here at step 7 than on rank 0 at its step 7" in said[1]
    assert "the first to fail was rank 1" in said[0]


@on_ranks(2)
def test_a_last_batch_too_short_to_be_cut_names_drop_last(rank: int) -> None:
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(*torch.randn(2, 19, 4, generator=draw))
    with executor_of(rank, ON_TWO) as executor:
        short = Batches(DataLoader(data, 8))
        for inputs, target in short:  # the tail is evaluated all the same
            executor.evaluate(inputs, target=target)
        said = message_of(trained, executor, short)
        assert "3 rows can't be split into 4 microbatches" in said
        assert "drop_last=True" in said
        assert len(trained(executor, Batches(DataLoader(data, 8, drop_last=True)))) == 2
