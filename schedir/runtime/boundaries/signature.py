"""What an agreement depends on, as far as the rank of the first stage can see it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from schedir.runtime.batch.feeding import Feed
from schedir.runtime.batch.microbatches import Batch
from schedir.runtime.boundaries.boundary import meta_of


def signature_of_call(feed: Feed, inputs: Batch | None, precision: torch.dtype | None) -> object:
    """Equal where a call's microbatches have the same wirings.

    `inputs` is what they were cut from, `precision` the type that autocast computes in.
    """
    if isinstance(inputs, Tensor) and not feed.extras:  # which says it for all of its pieces
        return inputs.shape, inputs.stride(), inputs.dtype, inputs.requires_grad, precision
    return (*signatures(feed), precision)


def signatures(feed: Feed) -> Iterator[object]:
    """One for each microbatch: those of equal ones have the same wirings."""
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
