"""Batches: the same on every rank and in every run, by whatever a loader draws."""

from __future__ import annotations

import random
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torch.utils.data.sampler import WeightedRandomSampler
from transformers import BatchEncoding

from schedir.errors import ExecutionError
from schedir.training import Batches
from tests.sweeps import sweep


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Twelve samples, each changed at random by all that a data set may draw from."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        noise = [float(torch.rand(())), float(np.random.rand()), random.random()]
        return torch.tensor([float(i), *noise], dtype=torch.float64), torch.tensor(i)


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Ten samples, in an order of its epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for i in range(10):
            yield torch.tensor(i + 100 * self.epoch), torch.rand(())


class Resumable(Stream):
    """A stream that knows its place, which at its end is that; how many samples were read."""

    at = begins = read = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        begins, self.begins = self.begins, 0
        for self.at in range(begins + 1, 11):
            self.read += 1
            yield torch.tensor(self.at + 100 * self.epoch), torch.rand(())

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = self.begins = state["at"]


class ReadsAhead(Resumable):
    """A loader that knows which batches it has given, of those that it has read before."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        begins, self.begins = self.begins, 0
        self.read += 1
        batches = [(torch.tensor(i + 100 * self.epoch), torch.zeros(2)) for i in range(3)]
        for self.at in range(begins + 1, 4):
            yield batches[self.at - 1]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def half() -> DistributedSampler[Any]:
    return DistributedSampler(Noisy(), num_replicas=2, rank=1)


LOADERS: dict[str, Callable[[], Iterable[Any]]] = {
    "shuffled": lambda: DataLoader(Noisy(), 5, shuffle=True),
    "own generator": lambda: DataLoader(Noisy(), 5, shuffle=True, generator=seeded()),
    "weighted": lambda: DataLoader(Noisy(), 5, sampler=WeightedRandomSampler([1.0] * 12, 12)),
    "workers": lambda: DataLoader(Noisy(), 5, shuffle=True, num_workers=2),
    "distributed": lambda: DataLoader(Noisy(), 2, sampler=half()),
    "stream": lambda: DataLoader(Stream(), 4),
    "resumable stream": lambda: DataLoader(Resumable(), 4),
    "resumable stream of workers": lambda: DataLoader(Resumable(), 4, num_workers=1),
    "reads ahead": ReadsAhead,
    "list": lambda: [(torch.ones(n), torch.zeros(n)) for n in (2, 3)],
}


def batches_of(kind: str, **options: Any) -> Batches:
    return Batches(LOADERS[kind](), **options)


def resumed_from(state: Any, kind: str, **options: Any) -> Batches:
    batches = batches_of(kind, **options)
    batches.load_state_dict(state)
    return batches


def values(pairs: Iterable[Any]) -> list[Any]:
    return [(inputs.tolist(), target.tolist()) for inputs, target in pairs]


def disturb(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def drawn() -> tuple[float, float, float]:
    return float(torch.rand(())), float(np.random.rand()), random.random()


@pytest.mark.parametrize("kind", LOADERS)
def test_ranks_read_the_same_whatever_they_have_drawn_before(kind: str) -> None:
    found = []
    for rank in range(2):
        disturb(rank)
        batches = batches_of(kind)
        found.append([values(batches) for _ in range(2)])
        drawn()
    assert found[0] == found[1]
    assert (found[0][0] == found[0][1]) == (kind == "list")  # another order in every epoch


@pytest.mark.parametrize("kind", LOADERS)
def test_what_the_caller_draws_stays_what_it_was(kind: str) -> None:
    disturb(5)
    expected = [drawn() for _ in range(3)]
    disturb(5)
    found = [drawn() for _ in zip(batches_of(kind), range(2), strict=False)]
    assert [*found, drawn()] == expected


@sweep("before", [0, 2, 3, 7], quick=[2, 7])
@pytest.mark.parametrize("kind", LOADERS)
def test_a_resumed_run_goes_on_with_the_next_batch(kind: str, before: int) -> None:
    whole = values(islice(batches_of(kind, repeat=True), 10))
    first = batches_of(kind, repeat=True)
    reading = iter(first)
    assert values(islice(reading, before)) == whole[:before]
    state = first.state_dict()
    disturb(8)
    resumed = resumed_from(state, kind, repeat=True)
    assert resumed.state_dict()["batch"] == state["batch"]
    assert values(islice(resumed, 10 - before)) == whole[before:]


def test_a_stream_that_knows_its_place_is_not_read_again() -> None:
    stream = Resumable()
    batches = Batches(DataLoader(stream, 4))
    reading = iter(batches)
    next(reading)
    state = batches.state_dict()
    assert stream.read == 4  # and none ahead
    stream = Resumable()
    resumed = Batches(DataLoader(stream, 4))
    resumed.load_state_dict(state)
    assert len(values(resumed)) == 2
    assert stream.read == 6
    other = resumed_from(state, "resumable stream of workers")  # reads it again, to the same end
    assert [x for x, _ in values(other)] == [x for x, _ in values(reading)]


def test_the_order_is_the_same_with_workers_and_without() -> None:
    """A resumed run may have others."""
    data = TensorDataset(*torch.arange(24.0).reshape(2, 12))
    alone, helped = (
        values(islice(Batches(DataLoader(data, 5, shuffle=True, num_workers=n), repeat=True), 5))
        for n in (0, 1)
    )
    assert alone == helped


def test_what_knows_of_epochs_is_told_theirs() -> None:
    batches, sampler = batches_of("distributed"), half()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert [i for _, target in values(batches) for i in target] == list(sampler)
    stream = Stream()
    list(islice(Batches(DataLoader(stream, 4), repeat=True), 7))
    assert stream.epoch == 2


def test_an_epoch_ends_and_the_next_begins_where_it_should() -> None:
    batches = batches_of("shuffled")
    assert len(batches) == 3
    epochs = []
    for epoch in range(3):
        assert (batches.epoch, batches.batch) == (epoch, 0)
        epochs.append(values(batches))
        assert len(epochs[-1]) == 3
    assert resumed_from(batches.state_dict(), "shuffled").epoch == 3
    # One that is left early is over: the next iter() begins anew, not in the middle.
    left = batches_of("shuffled")
    next(iter(left))
    assert values(left) == epochs[1]


@pytest.mark.parametrize("kind", LOADERS)
def test_a_run_that_is_resumed_between_two_epochs_begins_the_next(kind: str) -> None:
    batches = batches_of(kind)
    values(batches)
    resumed = resumed_from(batches.state_dict(), kind)
    assert values(resumed) == values(batches)
    assert len(values(resumed)) == len(values(batches)) > 1


def test_a_state_after_the_last_batch_leaves_nothing_of_its_epoch() -> None:
    """Of a loop that saves after each step."""
    batches = batches_of("shuffled")
    states = [batches.state_dict() for _ in batches]
    resumed = resumed_from(states[-1], "shuffled")
    assert values(resumed) == []
    assert values(resumed) == values(batches)


def test_the_order_of_a_loader_with_a_generator_is_its_own() -> None:
    expected = [y.tolist() for _, y in LOADERS["own generator"]()]
    assert [y for _, y in values(batches_of("own generator"))] == expected
    seeds = [[y for _, y in values(batches_of("shuffled", seed=seed))] for seed in (0, 1)]
    assert seeds[0] != seeds[1]


X, Y = torch.ones(4, 3), torch.zeros(4)
TOO_FEW = DataLoader(TensorDataset(X, Y), 8, drop_last=True)


def test_a_batch_is_taken_apart() -> None:
    named = {"input_ids": X, "attention_mask": Y, "labels": Y}
    for batch in (named, UserDict(named), BatchEncoding(named)):
        ((inputs, target),) = Batches([batch])
        assert list(inputs) == ["input_ids", "attention_mask"]
        assert inputs["input_ids"] is X
        assert target is Y
    # A list is no list of ready microbatches here: DataLoader makes it of a sample's tuple.
    samples = [((torch.ones(3), torch.ones(2)), torch.ones(1))] * 4
    ((inputs, target),) = Batches(DataLoader(samples, 4))  # type: ignore[arg-type]
    assert isinstance(inputs, tuple)
    assert [len(part) for part in inputs] == [4, 4]
    ((inputs, target),) = Batches([[X, X, Y]], split=lambda batch: (batch[:2], batch[2]))
    assert isinstance(inputs, tuple)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Batches([X]), "yields Tensor, which is no pair .*split=lambda"),
        (lambda: Batches([(X, X, Y)]), "yields tuple of 3, which"),
        (lambda: Batches([{"x": X, "y": Y}]), "yields dict with x, y, which"),
        (lambda: Batches([X], split=lambda x: x), "split must return .*not Tensor"),
        (lambda: Batches(X), "not Tensor"),
        (lambda: Batches(3), "not int"),  # type: ignore[arg-type]
        (lambda: Batches([]), "no batch in epoch 0: its data set is empty"),
        (lambda: Batches(TOO_FEW), "has 4 samples, fewer than the 8 of a batch, and drop_last=T"),
        (lambda: Batches(iter([(X, Y)]), repeat=True), "epoch 1: an iterator can be read only onc"),
    ],
)
def test_what_can_be_no_batches_is_named(make: Any, text: str) -> None:
    with pytest.raises(ExecutionError, match=text):
        list(islice(make(), 3))


def test_a_state_of_other_data_is_refused() -> None:
    batches = batches_of("shuffled")
    states = [batches.state_dict() for _ in batches]
    other = Batches([(X, Y)])
    other.load_state_dict(states[-1])
    with pytest.raises(ExecutionError, match=r"after batch 1 of epoch 0, .* is at batch 3"):
        list(other)
    with pytest.raises(ExecutionError, match=r"has 1 generators of its own, .* that has 0"):
        resumed_from(states[0], "own generator")


def test_what_has_no_end_has_no_length() -> None:
    for batches in (Batches([(X, Y)], repeat=True), Batches(iter([(X, Y)]))):
        with pytest.raises(TypeError, match=r"no length|no len"):
            len(batches)
