"""The batches of a training: the same on every rank, epoch after epoch, and again when resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from schedir.errors import ExecutionError
from schedir.training.drawing import read

Pair: TypeAlias = tuple[Any, Any]
"""The inputs and the target of one step."""


class Batches:
    """What `step(inputs, target=target)` takes, batch by batch: `for inputs, target in batches`.

    `loader` is a DataLoader or any other iterable. Every `iter()` is one epoch; with `repeat` it
    goes on with the next epoch for ever. `split(batch)` gives (inputs, target) of what the loader
    yields. By default that is a pair, or a mapping whose "labels" are the target and whose rest is
    the inputs. All are whole batches: a list, as DataLoader makes of a sample's tuple, is a tuple
    then.

    Every rank reads the loader, so each has to be made of the same data. The order is the same by
    itself: while the loader is read, the generators of torch, numpy and random are seeded by
    (seed, epoch, batch), and the caller's state is put back after. A generator that the loader or
    its sampler has of its own must be seeded alike on every rank. `set_epoch` is called where the
    loader, its sampler or its data set has one, as DistributedSampler: with several pipelines each
    one reads its part by such a sampler, over the mesh's dimension dp. The executor compares what
    the ranks hold at every step.

    `epoch` and `batch` say where it is: the number of the epoch, and how many of its batches have
    been handed out. `state_dict()` keeps that, and the state of the loader's generators when the
    epoch began; after `load_state_dict` the next `iter()` reads the epoch again without handing
    these out, and goes on with the batch after them. (What persistent workers draw goes on from
    epoch to epoch, and is not kept.)

    Raises ExecutionError where the loader yields no batch at all, or none that can be split.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        repeat: bool = False,
        split: Callable[[Any], Pair] | None = None,
        seed: int = 0,
    ) -> None:
        if isinstance(loader, (Tensor, Mapping, str)) or not isinstance(loader, Iterable):
            raise ExecutionError(
                "a loader is an iterable of batches, such as a DataLoader, not "
                f"{type(loader).__name__}"
            )
        self._loader, self._repeat, self._split = loader, repeat, split or _parts
        self._seed = seed
        self._generators = _generators(loader)
        self._began = self._drawn()
        self._resumed = False
        self.epoch = self.batch = 0

    @property
    def endless(self) -> bool:
        """Whether one epoch follows the other, so that iterating it never ends."""
        return self._repeat

    def __len__(self) -> int:
        """The batches of an epoch. Raises TypeError where the loader has no length, or repeats."""
        if self._repeat:
            raise TypeError("batches that repeat have no end, and so no length")
        return len(self._loader)  # type: ignore[arg-type]  # or the TypeError that names its type

    def __iter__(self) -> Iterator[Pair]:
        if self.batch and not self._resumed:  # the epoch before has been left early
            self.epoch, self.batch = self.epoch + 1, 0
        self._resumed = False
        while True:
            self._began = self._drawn()
            for pair in self._read():
                self.batch += 1
                yield pair
            self.epoch, self.batch = self.epoch + 1, 0
            if not self._repeat:
                return

    def _read(self) -> Iterator[Pair]:
        """What is left of the epoch."""
        handed_out, number = self.batch, 0
        for part in _samplers(self._loader):
            if hasattr(part, "set_epoch"):
                part.set_epoch(self.epoch)
        for number, batch in enumerate(read(self._loader, self._seed, self.epoch), 1):
            if number > handed_out:
                yield self._pair(batch)
        if not number:
            raise _empty(self._loader, self.epoch)
        if number < handed_out:
            raise ExecutionError(
                f"the loader ends after batch {number} of epoch {self.epoch}, but the state that "
                f"was loaded has come to batch {handed_out}: it is of other data"
            )

    def _pair(self, batch: Any) -> Pair:
        pair: Any = self._split(batch)
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ExecutionError(f"split must return (inputs, target), not {_described(pair)}")
        inputs, target = (tuple(part) if isinstance(part, list) else part for part in pair)
        return inputs, target

    def state_dict(self) -> dict[str, Any]:
        """Where it is, for `load_state_dict`: the next batch is the one after those handed out."""
        drawn = self._began if self.batch else self._drawn()
        return {"epoch": self.epoch, "batch": self.batch, "seed": self._seed, "generators": drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where a state was taken. Raises ExecutionError where the loader is another."""
        generators = state["generators"]
        if len(generators) != len(self._generators):
            raise ExecutionError(
                f"the loader has {len(self._generators)} generators of its own, but the state that "
                f"is loaded is of one with {len(generators)}"
            )
        for generator, drawn in zip(self._generators, generators, strict=True):
            generator.set_state(drawn)
        self.epoch, self.batch, self._seed = state["epoch"], state["batch"], state["seed"]
        self._began, self._resumed = list(generators), True

    def _drawn(self) -> list[Tensor]:
        """The state of the loader's own generators."""
        return [generator.get_state() for generator in self._generators]


def _samplers(loader: object) -> list[object]:
    """What a loader draws by, itself among it."""
    found = [loader]
    for names in (["sampler"], ["batch_sampler"], ["batch_sampler", "sampler"], ["dataset"]):
        part: object = loader
        for name in names:
            part = getattr(part, name, None)
        if not any(part is other for other in found):
            found.append(part)
    return found


def _generators(loader: object) -> list[torch.Generator]:
    """Those of the loader's own."""
    found = [getattr(part, "generator", None) for part in _samplers(loader)]
    return [*dict.fromkeys(one for one in found if isinstance(one, torch.Generator))]


def _parts(batch: Any) -> Pair:
    """The pair that a batch is, or that its labels and the rest are."""
    if isinstance(batch, Mapping) and "labels" in batch:
        return {key: value for key, value in batch.items() if key != "labels"}, batch["labels"]
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    raise ExecutionError(
        f"the loader yields {_described(batch)}, which is no pair (inputs, target) nor a mapping "
        "with labels; say how to take it apart: Batches(loader, split=lambda batch: (…, …))"
    )


def _described(batch: object) -> str:
    if isinstance(batch, Mapping):
        return f"{type(batch).__name__} with {', '.join(map(str, batch)) or 'nothing'}"
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return f"{type(batch).__name__} of {len(batch)}"
    return type(batch).__name__


def _empty(loader: Any, epoch: int) -> ExecutionError:
    if iter(loader) is loader:
        why = "an iterator can be read once only: give what makes one, such as a list or DataLoader"
    elif getattr(loader, "drop_last", False) and hasattr(loader.dataset, "__len__"):
        why = (
            f"its data set has {len(loader.dataset)} samples, fewer than the {loader.batch_size} "
            "of a batch, and drop_last=True leaves them out; give smaller batches"
        )
    else:
        why = "its data set is empty"
    return ExecutionError(f"the loader yields no batch in epoch {epoch}: {why}")
