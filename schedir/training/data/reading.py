"""One loader read in this process: what it yields in an epoch, by what it draws itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from schedir.errors import ExecutionError
from schedir.training.data.drawing import read

Pair: TypeAlias = tuple[Any, Any]
"""The inputs and the target of one step."""

Split: TypeAlias = Callable[[Any], Pair]
"""Takes apart what a loader yields."""


class Reader:
    """Reads a loader. Raises ExecutionError for what is none."""

    def __init__(self, loader: Iterable[Any] | None, split: Split | None) -> None:
        if isinstance(loader, (Tensor, Mapping, str)) or not isinstance(loader, Iterable):
            raise ExecutionError(
                "a loader is an iterable of batches, such as a DataLoader, not "
                f"{type(loader).__name__}"
            )
        self._loader, self._split = loader, split or _parts
        samplers = _samplers(loader)
        found = [getattr(part, "generator", None) for part in samplers]
        self._generators = {one: None for one in found if isinstance(one, torch.Generator)}
        self._of_epochs: list[Any] = [part for part in samplers if hasattr(part, "set_epoch")]

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # or the TypeError that names its type

    def drawn(self) -> list[Tensor]:
        """The state of the loader's own generators."""
        return [generator.get_state() for generator in self._generators]

    begin = drawn
    """What an epoch begins with."""

    def restore(self, drawn: Sequence[Tensor]) -> None:
        """Put the loader's own generators to where they were."""
        for generator, state in zip(self._generators, drawn, strict=True):
            generator.set_state(state)

    def epoch(self, seed: int, epoch: int, after: int) -> Iterator[Pair]:
        """The pairs of an epoch but for the first ones, of which `after` are only read.

        Raises ExecutionError where the loader yields nothing, or has no such number.
        """
        for part in self._of_epochs:
            part.set_epoch(epoch)
        number = 0
        for number, batch in enumerate(read(self._loader, seed, epoch), 1):
            if number > after:
                yield self._pair(batch)
        if not number:
            raise _empty(self._loader, epoch)
        if number < after:
            raise ExecutionError(
                f"the loader ends after batch {number} of epoch {epoch}, but the state that was "
                f"loaded has come to batch {after}: it is of other data"
            )

    def _pair(self, batch: Any) -> Pair:
        pair: Any = self._split(batch)
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ExecutionError(f"split must return (inputs, target), not {_described(pair)}")
        inputs, target = (tuple(part) if isinstance(part, list) else part for part in pair)
        return inputs, target


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
