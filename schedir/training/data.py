"""Batches of a training: the same on every rank, in every epoch, and after resuming.

Every rank reads the loader. While it is read, it has seeds of its own, so it does not change the
random numbers of the training around it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, count
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.random import mtrand
from torch import Tensor
from torch.utils.data import IterableDataset

from schedir.errors import ExecutionError

Pair: TypeAlias = tuple[Any, Any]
"""The inputs and the target of one step."""

Split: TypeAlias = Callable[[Any], Pair]
"""Makes a pair (inputs, target) of a batch that the loader yields."""

_OF_NUMPY = np.random.MT19937()  # replaces numpy's global one for a while: a copy takes 50 µs
_32_BITS = (1 << 32) - 1


class Batches:
    """Yields pairs (inputs, target) for `Executor.step`, the same on every rank.

    >>> import torch
    >>> from schedir.training import Batches
    >>> batches = Batches([{"input_ids": torch.ones(2, 8), "labels": torch.zeros(2, 8)}])
    >>> for inputs, target in batches:
    ...     print([*inputs], target.shape)
    ['input_ids'] torch.Size([2, 8])
    >>> batches.state_dict()["epoch"]
    1

    - `loader`: a DataLoader or another iterable. Each `iter()` of the Batches reads it once, which
      is an epoch; with `repeat` one epoch follows the other for ever.
    - `split`: `split(batch)` returns (inputs, target) for a batch that the loader yields. By
      default a batch is a pair, or a mapping: "labels" is the target, and the rest are the inputs.
      They are whole batches. (A list, which DataLoader makes of tuples, becomes a tuple.)
    - `seed`: while the loader is read, the generators of torch, numpy and random are seeded by
      (seed, epoch, batch), so the order is the same on every rank. Then their state is put back. If
      the loader or its sampler has its own generator, seed it equally on every rank.

    `set_epoch` is called if the loader, its sampler or its data set has it, as DistributedSampler
    does. With several pipelines, let each read its part by such a sampler, with the mesh's
    dimension dp for the replicas.

    `epoch` and `batch` say where it is: the number of the epoch from 0, and how many of its batches
    were handed out. `state_dict()` has them, and the state that the loader's generators had when
    the epoch began. After `load_state_dict` the next `iter()` reads the epoch again, skips the
    batches that were handed out, and goes on with the next one. (The random numbers of persistent
    workers run on from epoch to epoch, and are not kept.)

    A stream is not read again if the loader has `state_dict` and `load_state_dict`, or if the
    IterableDataset of a DataLoader without workers has them. That state is kept too, and `iter()`
    goes on from it. A stream is read again if the DataLoader has workers, because they hold the
    data set's state.

    Raises ExecutionError if the loader yields no batch, or one that can't be split.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        repeat: bool = False,
        split: Split | None = None,
        seed: int = 0,
    ) -> None:
        if isinstance(loader, (Tensor, Mapping, str)) or not isinstance(loader, Iterable):
            raise ExecutionError(
                "a loader is an iterable of batches, such as a DataLoader, not "
                f"{type(loader).__name__}"
            )
        self._loader, self._split = loader, split or _parts
        self._repeat, self._seed = repeat, seed
        parts = _drawing_parts(loader)
        found = [getattr(part, "generator", None) for part in parts]
        self._generators = {one: None for one in found if isinstance(one, torch.Generator)}
        self._of_epochs: list[Any] = [part for part in parts if hasattr(part, "set_epoch")]
        self._stateful = _stateful(loader)
        self._began = self._drawn()
        # The next iter() goes on with the epoch; the loader itself begins after its batches.
        self._resumed = self._restored = False
        self.epoch = self.batch = 0

    @property
    def endless(self) -> bool:
        """Whether it repeats, so that iterating never ends."""
        return self._repeat

    def __len__(self) -> int:
        """The number of batches in an epoch. Raises TypeError if the loader has no length, or with
        `repeat`."""
        if self._repeat:
            raise TypeError("batches that repeat have no end, so they have no length")
        return len(self._loader)  # type: ignore[arg-type]  # or the TypeError that names its type

    def __iter__(self) -> Iterator[Pair]:
        if self.batch and not self._resumed:  # the last epoch was left early
            self.epoch, self.batch = self.epoch + 1, 0
        self._resumed = False
        while True:
            self._began = self._drawn()
            for pair in self._pairs(self.batch):
                self.batch += 1
                yield pair
            self.epoch, self.batch = self.epoch + 1, 0
            if not self._repeat:
                return

    def state_dict(self) -> dict[str, Any]:
        """The place in the data, for `load_state_dict`: after the batches handed out so far."""
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "seed": self._seed,
            "generators": self._began if self.batch else self._drawn(),
            "loader": None if self._stateful is None else self._stateful.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state. Raises ExecutionError if it was saved with another loader."""
        generators = list(state["generators"])
        if len(generators) != len(self._began):
            raise ExecutionError(
                f"the loader has {len(self._began)} generators of its own, but the state was saved "
                f"with a loader that has {len(generators)}; make the same loader"
            )
        for generator, drawn in zip(self._generators, generators, strict=True):
            generator.set_state(drawn)
        if state.get("loader") is not None and self._stateful is not None:
            self._stateful.load_state_dict(state["loader"])
            self._restored = True
        self.epoch, self.batch, self._seed = state["epoch"], state["batch"], state["seed"]
        self._began, self._resumed = generators, True

    def _drawn(self) -> list[Tensor]:
        """The state of the loader's own generators."""
        return [generator.get_state() for generator in self._generators]

    def _pairs(self, after: int) -> Iterator[Pair]:
        """Yield the pairs of an epoch, without the first `after`, which are only read. A loader
        whose state was restored begins after them.

        Raises ExecutionError if the loader yields nothing, or fewer than `after`.
        """
        for part in self._of_epochs:
            part.set_epoch(self.epoch)
        restored, self._restored = self._restored, False
        first = number = after if restored else 0
        read = _read(self._loader, self._seed, self.epoch, first)
        for number, batch in enumerate(read, first + 1):
            if number > after:
                pair: Any = self._split(batch)
                if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                    raise ExecutionError(
                        f"split must return (inputs, target), not {_described(pair)}"
                    )
                inputs, target = (tuple(part) if isinstance(part, list) else part for part in pair)
                yield inputs, target
        if restored and not number:  # the restored state was the end of an epoch: begin the next
            yield from self._pairs(0)
        elif not number:
            raise ExecutionError(
                f"the loader yields no batch in epoch {self.epoch}: {_why_empty(self._loader)}"
            )
        if number < after:
            raise ExecutionError(
                f"the loader ends after batch {number} of epoch {self.epoch}, but the state that "
                f"was loaded is at batch {after}: it was saved with other data"
            )


def _read(loader: Iterable[Any], seed: int, epoch: int, first: int) -> Iterator[Any]:
    """Yield a loader's batches in an epoch, from number `first` on, each under its seed.

    `iter(loader)` and batch 0 run under the same seed, also when the epoch is resumed. DataLoader
    asks its sampler in the former if it has workers, and in the latter if not: the order is the
    same.
    """
    for number in chain(range(min(first, 1)), count(first)):
        with _drawing(seed, epoch, number):
            try:
                if number == 0:
                    source = iter(loader)
                if number < first:
                    continue
                found = next(source)
            except StopIteration:
                return
        yield found


@contextmanager
def _drawing(seed: int, epoch: int, number: int) -> Iterator[None]:
    """Seed this process's generators by (seed, epoch, batch); on leaving, restore their state."""
    mixed = hash((seed, epoch, number)) & _32_BITS  # of integers: the same everywhere
    of_torch, of_python = torch.default_generator.get_state(), random.getstate()
    of_numpy = mtrand.get_bit_generator()
    mtrand.set_bit_generator(_OF_NUMPY)
    try:
        np.random.seed(mixed)
        random.seed(mixed)
        torch.default_generator.manual_seed(mixed)  # torch.manual_seed costs a hundred times that
        yield
    finally:
        mtrand.set_bit_generator(of_numpy)
        random.setstate(of_python)
        torch.default_generator.set_state(of_torch)


def _drawing_parts(loader: object) -> list[object]:
    """The loader and its parts that may draw random numbers or have `set_epoch`, each once."""
    samplers = [getattr(loader, name, None) for name in ("sampler", "batch_sampler")]
    parts = (
        loader,
        *samplers,
        getattr(samplers[1], "sampler", None),
        getattr(loader, "dataset", None),
    )
    return list({id(part): part for part in parts}.values())


def _stateful(loader: Any) -> Any:
    """The object that knows how far a loader was read: the loader, or its stream of samples, or
    None."""
    own = None if getattr(loader, "num_workers", 0) else getattr(loader, "dataset", None)
    for one in (loader, own if isinstance(own, IterableDataset) else None):
        if hasattr(one, "state_dict") and hasattr(one, "load_state_dict"):
            return one
    return None


def _parts(batch: Any) -> Pair:
    """Split a batch that is a pair, or a mapping with labels."""
    if isinstance(batch, Mapping) and "labels" in batch:
        return {key: value for key, value in batch.items() if key != "labels"}, batch["labels"]
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    raise ExecutionError(
        f"the loader yields {_described(batch)}, which is no pair (inputs, target) nor a mapping "
        "with labels; say how to split it: Batches(loader, split=lambda batch: (…, …))"
    )


def _described(batch: object) -> str:
    if isinstance(batch, Mapping):
        return f"{type(batch).__name__} with {', '.join(map(str, batch)) or 'nothing'}"
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return f"{type(batch).__name__} of {len(batch)}"
    return type(batch).__name__


def _why_empty(loader: Any) -> str:
    if iter(loader) is loader:
        return "an iterator can be read only once: pass an iterable, such as a list or a DataLoader"
    if getattr(loader, "drop_last", False) and hasattr(loader.dataset, "__len__"):
        return (
            f"its data set has {len(loader.dataset)} samples, fewer than the {loader.batch_size} "
            "of a batch, and drop_last=True leaves them out; make the batches smaller"
        )
    return "its data set is empty"
