"""The batches of a training: the same on every rank, epoch after epoch, and again when resumed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from schedir.errors import ExecutionError
from schedir.runtime import Executor
from schedir.training.data.handing import HandedOut
from schedir.training.data.reading import Pair, Reader, Split


class Batches:
    """What `step(inputs, target=target)` takes, batch by batch: `for inputs, target in batches`.

    `loader` is a DataLoader or any other iterable. Every `iter()` is one epoch; with `repeat` it
    goes on with the next epoch for ever. `split(batch)` gives (inputs, target) of what the loader
    yields. By default that is a pair, or a mapping whose "labels" are the target and whose rest is
    the inputs. All are whole batches: a list, as DataLoader makes of a sample's tuple, is a tuple
    then.

    With `reader="all"` every rank reads the loader, so each has to make it of the same data. The
    executor compares what the ranks hold at every step. With `reader="first"` and the `executor`
    that takes the batches, the rank of the first stage alone reads it, and sends the rank of the
    last one its target; other ranks may pass None for the loader, and get None for what they don't
    use. All ranks then make it, load its state and iterate together, as they call the executor, and
    fail together where reading fails.

    The order is the same on every rank by itself: while the loader is read, the generators of
    torch, numpy and random are seeded by (seed, epoch, batch), and the caller's state is put back
    after. A generator that the loader or its sampler has of its own must be seeded alike on every
    rank. `set_epoch` is called where the loader, its sampler or its data set has one, as
    DistributedSampler: with several pipelines each one reads its part by such a sampler, with the
    mesh's dimension dp for its replicas.

    `epoch` and `batch` say where it is: the number of the epoch, and how many of its batches have
    been handed out. `state_dict()` keeps that, and the state of the loader's generators when the
    epoch began; after `load_state_dict` the next `iter()` reads the epoch again without handing
    these out, and goes on with the batch after them. (What persistent workers draw goes on from
    epoch to epoch, and is not kept.)

    Raises ExecutionError where the loader yields no batch at all, or none that can be split.
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
        self._source: Reader | HandedOut
        if reader == "all":
            self._source = Reader(loader, split)
        elif executor is None:
            raise ExecutionError(
                'reader="first" needs the executor that takes the batches: executor='
            )
        elif executor.schedule.ranks == 1 or len(executor.gather(None)) == 1:  # nobody else
            self._source = Reader(loader, split)
        else:
            self._source = HandedOut(executor, loader, split)
        self._repeat, self._seed = repeat, seed
        self._began = self._source.drawn()
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
        return len(self._source)

    def __iter__(self) -> Iterator[Pair]:
        if self.batch and not self._resumed:  # the epoch before has been left early
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
        """Where it is, for `load_state_dict`: the next batch is the one after those handed out."""
        drawn = self._began if self.batch else self._source.drawn()
        return {"epoch": self.epoch, "batch": self.batch, "seed": self._seed, "generators": drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where a state was taken. Raises ExecutionError where the loader is another."""
        generators = list(state["generators"])
        if len(generators) != len(self._began):
            raise ExecutionError(
                f"the loader has {len(self._began)} generators of its own, but the state that is "
                f"loaded is of one with {len(generators)}"
            )
        self._source.restore(generators)
        self.epoch, self.batch, self._seed = state["epoch"], state["batch"], state["seed"]
        self._began, self._resumed = generators, True
