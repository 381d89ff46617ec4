"""Batches of a training: the same on every rank, in every epoch, and after resuming.

rank of the first stage      between             rank of the last stage
───────────────────────      ───────             ──────────────────────
reads inputs and target ──▶  None and None  ──▶  None and target         batch after batch
comes to the end        ──▶  is told        ──▶  is told
fails                   ──▶  fails as well  ──▶  fails as well

That is `reader="first"`; otherwise every rank reads the loader. Either way the loader has seeds of
its own, so it does not change the random numbers of the training around it.
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
from torch.utils import _pytree as pytree
from torch.utils.data import IterableDataset

from schedir.errors import ExecutionError
from schedir.runtime import Executor
from schedir.runtime.processes.failure import describe

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
    - `reader`: with "all" every rank reads the loader, so every rank must make it from the same
      data; the executor compares the ranks' data at every step. With "first" only the rank of the
      first stage reads it, and sends the target to the rank of the last stage. Pass the `executor`
      that takes the batches too. Other ranks may pass None for the loader, and get None for what
      they do not use. All ranks make the Batches, load its state and iterate together. If reading
      fails, all ranks raise.
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
    data set's state, or if several ranks hold the first stage and `reader` is "first".

    Raises ExecutionError if the loader yields no batch, or one that can't be split.
    """

    def __init__(
        self,
        loader: Iterable[Any] | None,
        *,
        repeat: bool = False,
        reader: str = "all",
        split: Split | None = None,
        seed: int = 0,
        executor: Executor | None = None,
    ) -> None:
        if reader not in ("all", "first"):
            raise ExecutionError(f'reader must be "all" or "first", not {reader!r}')
        if reader == "first" and executor is None:
            raise ExecutionError(
                'reader="first" needs the executor that takes the batches: pass executor='
            )
        self._source: _Reader | _HandedOut
        # If one process runs all ranks, there is no other one to hand batches to.
        if (
            reader == "all"
            or executor is None
            or executor.schedule.ranks == 1
            or len(executor.gather(None)) == 1
        ):
            self._source = _Reader(loader, split)
        else:
            self._source = _HandedOut(executor, loader, split)
        self._repeat, self._seed = repeat, seed
        self._began = self._source.drawn()
        self._resumed = False
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
        return len(self._source)

    def __iter__(self) -> Iterator[Pair]:
        if self.batch and not self._resumed:  # the last epoch was left early
            self.epoch, self.batch = self.epoch + 1, 0
        self._resumed = False
        while True:
            self._began = self._source.begin()
            for pair in self._source.epoch(self._seed, self.epoch, self.batch):
                self.batch += 1
                yield pair
            self.epoch, self.batch = self.epoch + 1, 0
            if not self._repeat:
                return

    def state_dict(self) -> dict[str, Any]:
        """The place in the data, for `load_state_dict`: after the batches handed out so far."""
        drawn = self._began if self.batch else self._source.drawn()
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "seed": self._seed,
            "generators": drawn,
            "loader": self._source.position(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state. Raises ExecutionError if it was saved with another loader."""
        generators = list(state["generators"])
        if len(generators) != len(self._began):
            raise ExecutionError(
                f"the loader has {len(self._began)} generators of its own, but the state was saved "
                f"with a loader that has {len(generators)}; make the same loader"
            )
        self._source.restore(generators, state.get("loader"))
        self.epoch, self.batch, self._seed = state["epoch"], state["batch"], state["seed"]
        self._began, self._resumed = generators, True


class _Reader:
    """Reads a loader in this process. Raises ExecutionError for an object that is no loader."""

    def __init__(self, loader: Iterable[Any] | None, split: Split | None) -> None:
        if isinstance(loader, (Tensor, Mapping, str)) or not isinstance(loader, Iterable):
            raise ExecutionError(
                "a loader is an iterable of batches, such as a DataLoader, not "
                f"{type(loader).__name__}"
            )
        self._loader, self._split = loader, split or _parts
        parts = _drawing_parts(loader)
        found = [getattr(part, "generator", None) for part in parts]
        self._generators = {one: None for one in found if isinstance(one, torch.Generator)}
        self._of_epochs: list[Any] = [part for part in parts if hasattr(part, "set_epoch")]
        self._stateful = _stateful(loader)
        self._restored = False

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # or the TypeError that names its type

    def drawn(self) -> list[Tensor]:
        """The state of the loader's own generators."""
        return [generator.get_state() for generator in self._generators]

    begin = drawn
    """The same, when an epoch begins."""

    def position(self) -> dict[str, Any] | None:
        """The loader's own state, if it has one."""
        return None if self._stateful is None else self._stateful.state_dict()

    def restore(self, drawn: Sequence[Tensor], position: Mapping[str, Any] | None) -> None:
        """Restore the state of the loader's own generators, and of the loader if it has one."""
        for generator, state in zip(self._generators, drawn, strict=True):
            generator.set_state(state)
        if position is not None and self._stateful is not None:
            self._stateful.load_state_dict(position)
            self._restored = True

    def epoch(self, seed: int, epoch: int, after: int) -> Iterator[Pair]:
        """Yield the pairs of an epoch, without the first `after`, which are only read. A loader
        whose state was restored begins after them.

        Raises ExecutionError if the loader yields nothing, or fewer than `after`.
        """
        for part in self._of_epochs:
            part.set_epoch(epoch)
        restored, self._restored = self._restored, False
        first = number = after if restored else 0
        for number, batch in enumerate(_read(self._loader, seed, epoch, first), first + 1):
            if number > after:
                pair: Any = self._split(batch)
                if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                    raise ExecutionError(
                        f"split must return (inputs, target), not {_described(pair)}"
                    )
                inputs, target = (tuple(part) if isinstance(part, list) else part for part in pair)
                yield inputs, target
        if restored and not number:  # the restored state was the end of an epoch: begin the next
            yield from self.epoch(seed, epoch, 0)
        elif not number:
            raise ExecutionError(
                f"the loader yields no batch in epoch {epoch}: {_why_empty(self._loader)}"
            )
        if number < after:
            raise ExecutionError(
                f"the loader ends after batch {number} of epoch {epoch}, but the state that was "
                f"loaded is at batch {after}: it was saved with other data"
            )


class _HandedOut:
    """A loader that the first stage's rank reads for all ranks of a pipeline.

    All ranks call it together, and all raise ExecutionError if that rank fails.
    """

    def __init__(
        self, executor: Executor, loader: Iterable[Any] | None, split: Split | None
    ) -> None:
        self._executor = executor
        placement = executor.schedule.placement
        self._takers = placement[0], placement[-1]  # of the inputs, and of the target
        self._speaker = placement[0][0]
        # None on other ranks.
        self._reader: _Reader | None = self._told(lambda: _Reader(loader, split), lambda *_: None)
        self._length: int | None
        self._drawn: list[Tensor]
        self.begin()

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("the loader of the first stage's rank has no length")
        return self._length

    def drawn(self) -> list[Tensor]:
        """The state of the loader's own generators."""
        return self._drawn if self._reader is None else self._reader.drawn()

    def begin(self) -> list[Tensor]:
        """Tell all ranks how long the loader is, and the state of its generators."""
        self._length, self._drawn = self._told(self._facts)
        return self._drawn

    def position(self) -> dict[str, Any] | None:
        """The loader's own state, if it has one and only one rank holds the first stage."""
        if self._reader is None or len(self._takers[0]) > 1:
            return None
        return self._reader.position()

    def restore(self, drawn: Sequence[Tensor], position: Mapping[str, Any] | None) -> None:
        """Restore the state of the loader's own generators, and of the loader if it has one."""
        self._drawn = list(drawn)
        if self._reader is not None:
            self._reader.restore(drawn, position)

    def epoch(self, seed: int, epoch: int, after: int) -> Iterator[Pair]:
        """Yield the pairs of an epoch, without the first `after`, which are only read."""
        pairs = iter(()) if self._reader is None else self._reader.epoch(seed, epoch, after)
        while (found := self._told(lambda: next(pairs, None), self._share)) is not None:
            yield found
        self.begin()

    def _facts(self) -> tuple[int | None, list[Tensor]]:
        assert self._reader is not None  # only the rank that reads calls it
        try:
            length = len(self._reader)
        except TypeError:
            length = None
        return length, self._reader.drawn()

    def _share(self, pair: Pair | None, rank: int) -> Pair | None:
        """The parts of a pair that a rank uses; None at the end of the epoch."""
        if pair is None:
            return None
        inputs, target = (
            _compact(part) if rank in takers else None
            for part, takers in zip(pair, self._takers, strict=True)
        )
        return inputs, target

    def _told(
        self, make: Callable[[], Any], share: Callable[[Any, int], Any] = lambda found, _: found
    ) -> Any:
        """Return the result of `make` on the rank that reads, and each other rank's share of it."""
        if self._executor.rank != self._speaker:
            found = self._executor.hand_out()
            if isinstance(found, ExecutionError):
                raise found
            return found
        ranks = range(self._executor.schedule.ranks)
        try:
            found = make()
            shares = [share(found, rank) for rank in ranks]
        except Exception as error:
            failure = ExecutionError(
                f"rank {self._speaker}, which reads the batches, failed: {describe(error)}"
            )
            self._executor.hand_out([failure for _ in ranks])
            raise
        self._executor.hand_out(shares)
        return found


def _compact(batch: Any) -> Any:
    """A batch as it is sent: on the CPU, and without the rest of its storage."""

    def compact(tensor: Tensor) -> Tensor:
        held = tensor.detach().cpu()
        whole = held.untyped_storage().nbytes() == held.numel() * held.itemsize
        return held if whole else held.clone(memory_format=torch.contiguous_format)

    return pytree.tree_map_only(Tensor, compact, batch)


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
