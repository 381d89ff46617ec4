"""Input signatures: calls of one have the same boundaries, which the first of them learns."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from schedir.runtime.batch.feeding import Feed
from schedir.runtime.batch.microbatches import Batch
from schedir.runtime.boundaries.boundary import meta_of
from schedir.runtime.boundaries.learned import Lessons

# Beyond so many, the signature that was used the longest ago is forgotten, on all ranks alike.
_MOST = 64


class Signatures:
    """The signatures that are known here, by the numbers that the first stage's first rank gives.

    It alone sees the input, and says in the handshake of each call which one that has. One is known
    once a call of it has ended well. `sees_input` where the first stage is here.
    """

    def __init__(self, sees_input: bool) -> None:
        self._sees_input = sees_input
        self._made = 0
        self._numbers: dict[object, int] = {}
        self._lessons: OrderedDict[int, Lessons] = OrderedDict()
        self._signature: object = None

    def number(self, feed: Feed, inputs: Batch | None, precision: torch.dtype | None) -> int | None:
        """The number of a call's signature, a new one if it is not known; None where the inputs are
        not seen. `inputs` is what the microbatches were cut from, `precision` the type that
        autocast computes in."""
        if not self._sees_input:
            return None
        self._signature = signature_of_call(feed, inputs, precision)
        return self._numbers.get(self._signature, self._made)

    def known(self, number: int) -> Lessons | None:
        """What was learned of a signature; None where the call that begins is to learn it."""
        if number == self._made:
            return None
        self._lessons.move_to_end(number)
        return self._lessons[number]

    def add(self, lessons: Lessons) -> list[int]:
        """The first call of a new signature has ended well. Returns the numbers of those that are
        forgotten for it."""
        self._lessons[self._made] = lessons
        if self._sees_input:
            self._numbers[self._signature] = self._made
        self._made += 1
        forgotten = list(self._lessons)[: max(0, len(self._lessons) - _MOST)]
        for old in forgotten:
            del self._lessons[old]
        self._numbers = {key: n for key, n in self._numbers.items() if n not in forgotten}
        return forgotten


def signature_of_call(feed: Feed, inputs: Batch | None, precision: torch.dtype | None) -> object:
    """Equal where a call's microbatches have the same boundaries.

    `inputs` is what they were cut from, `precision` the type that autocast computes in.
    """
    if isinstance(inputs, Tensor) and not feed.extras:  # which says it for all of its pieces
        return inputs.shape, inputs.stride(), inputs.dtype, inputs.requires_grad, precision
    return (*_signatures(feed), precision)


def _signatures(feed: Feed) -> Iterator[object]:
    """One for each microbatch."""
    for m, batch in enumerate(feed.inputs):
        leaves, spec = pytree.tree_flatten(batch)
        extras = [
            (stage, *pytree.tree_flatten(feed.extras[stage][m])) for stage in sorted(feed.extras)
        ]
        yield (
            tuple(meta_of(leaf) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves),
            spec,
            tuple(
                (stage, structure, *(meta_of(x) for x in given if isinstance(x, Tensor)))
                for stage, given, structure in extras
            ),
        )
