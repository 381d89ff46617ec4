"""The facts that the first call of an input signature learns about each (stage, microbatch).

The first call runs only the list. Until the facts are known it takes the safe side: payloads travel
with their description, inputs and targets are copied, and the layout of every input's gradient is
recorded. Afterwards version counters show what was changed in place.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from schedir.graph.compile import graph_of
from schedir.ir import Kind, Schedule
from schedir.runtime.boundaries.boundary import CONSTANTS, NOTHING, Boundary, Grads, meta_of
from schedir.runtime.memory import NO_ALIASES, Aliases

EVERY: Collection[int] = range(sys.maxsize)
"""The numbers of all tensors, or boundaries, however many there are."""


@attrs.define(eq=False)
class Learned:
    """The boundaries of one (stage, microbatch), its gradients, and what its module changes.

    `before` describes the stage's input and `after` its output; `before` is empty for the first
    stage, `after` for the last. `aliases` and `aliases_after` say what their tensors share memory
    with. With `spread` the entries of its input are separate arguments of the module.

    `grads_in` describes the gradient that comes back for each tensor of `after`, `grads_out` the
    gradient that is sent for each tensor of `before`; None for no gradient. If they are masked,
    different calls may have different gradients, and a mask travels with them.

    `changes_inputs` says which inputs the module changes in place; in the first stage it is one
    flag for the whole microbatch, once that is known. `changes_extra` and `changes_target` say
    whether the module, or the loss, changes any of the other arguments. `copied` are the numbers of
    the outputs that may be changed before the next stage has used them. `other_layout` are the
    numbers of the inputs whose gradients may have another layout than the input: autograd would
    copy them to the input's layout, and kernels would round differently.
    """

    before: Boundary = NOTHING
    after: Boundary = NOTHING
    aliases: Aliases = NO_ALIASES
    aliases_after: Aliases = NO_ALIASES
    spread: bool = False
    grads_in: Grads = ()
    grads_out: Grads = ()
    masked_in: bool = False
    masked_out: bool = False
    changes_inputs: tuple[bool, ...] = ()
    changes_extra: bool = True
    changes_target: bool = True
    copied: Collection[int] = EVERY
    other_layout: Collection[int] = ()

    def forget(self) -> None:
        """What the module does with its input is not known any more: take the safe side."""
        self.changes_inputs = (True,) * len(self.before.metas)
        self.changes_extra = self.changes_target = True
        self.other_layout = [n for n, meta in enumerate(self.before.metas) if meta.requires_grad]

    def sends_back(self, grads: Sequence[Tensor | None]) -> None:
        """These are the gradients of the stage's input."""
        self.grads_out = tuple([None if grad is None else meta_of(grad) for grad in grads])
        self.other_layout = frozenset(
            number
            for number, (meta, grad) in enumerate(
                zip(self.before.metas, self.grads_out, strict=True)
            )
            if grad is not None and not (meta.contiguous and grad.contiguous)
        )

    def largest(self) -> int:
        """The bytes of the larger boundary: what one receive takes at most."""
        return max(self.before.nbytes, self.after.nbytes)


Lessons: TypeAlias = Mapping[tuple[int, int], Learned]
"""What the stages here have learned, by (stage, microbatch)."""


def mask_gradients(lessons: Lessons, schedule: Schedule, ranks: Iterable[int]) -> None:
    """Send masks with gradients that only some microbatches have.

    It is decided by boundary and channel, because both ends of these have seen the same
    microbatches.
    """
    sent: dict[tuple[int, int | None, int], list[Learned]] = {}
    received: dict[tuple[int, int | None, int], list[Learned]] = {}
    for rank in ranks:
        for action in schedule.flat[rank]:
            if action.kind in (Kind.SEND_GRAD, Kind.RECV_GRAD):
                found = sent if action.kind is Kind.SEND_GRAD else received
                key = rank, graph_of(schedule).peer(action), action.stage
                assert action.microbatch is not None  # a transfer has one
                found.setdefault(key, []).append(lessons[action.stage, action.microbatch])
    for together in sent.values():
        differ = _differ([learned.grads_out for learned in together])
        for learned in together:
            learned.masked_out = learned.masked_out or differ
            if learned.masked_out:
                learned.grads_out = _possible(learned.grads_out, learned.before)
    for together in received.values():
        differ = _differ([learned.grads_in for learned in together])
        for learned in together:
            learned.masked_in = learned.masked_in or differ
            if learned.masked_in:
                learned.grads_in = _possible(learned.grads_in, learned.after)


def _differ(grads: Iterable[Grads]) -> bool:
    """Whether some microbatches have gradients that others have not."""
    return len({tuple([grad is not None for grad in found]) for found in grads}) > 1


def _possible(grads: Grads, boundary: Boundary) -> Grads:
    """All gradients that may come, in the layout of the tensors that they belong to."""
    return tuple(
        meta if grad is None and meta.requires_grad else grad
        for grad, meta in zip(grads, boundary.metas, strict=True)
    )


# A tuple's entries become positional arguments of a module, and a dict's keywords, if forward takes
# them so. Otherwise the input is one argument, as in `nn.Sequential`. What a stage is given beside
# its input follows: a tuple or a single tensor by position, a dict by keyword.


def spreads(module: Callable[..., Any], given: Any, extra: Any) -> bool:
    """Whether the entries of an input are separate arguments of a module, or a function, by its
    forward's signature."""
    if not isinstance(given, (tuple, list, Mapping)):
        return False
    if isinstance(given, Mapping) and not all(isinstance(key, str) for key in given):
        return False
    positional, keywords = _arguments(given, extra, spread=True)
    try:
        forward = module.forward if isinstance(module, nn.Module) else module
        inspect.signature(forward).bind(*positional, **keywords)
    except TypeError:
        return False
    except ValueError:  # a forward without a signature
        pass
    return True


def run_on(module: Callable[..., Any], given: Any, extra: Any, spread: bool) -> Any:
    """Run a module on its input, and on what it is given beside that."""
    if extra is None and not spread:
        return module(given)
    positional, keywords = _arguments(given, extra, spread)
    return module(*positional, **keywords)


def _arguments(given: Any, extra: Any, spread: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    positional: tuple[Any, ...] = (given,)
    keywords: dict[str, Any] = {}
    if spread:
        positional = () if isinstance(given, Mapping) else tuple(given)
        keywords = dict(given) if isinstance(given, Mapping) else {}
    if isinstance(extra, Mapping):
        keywords = {**keywords, **extra}
    elif isinstance(extra, (tuple, list)):
        positional = (*positional, *extra)
    elif extra is not None:
        positional = (*positional, extra)
    return positional, keywords


INTERNAL = frozenset(vars(nn.Module()))
"""The attributes that every module has; all else is its own."""


def held_by(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """The tensors that modules hold: parameters, buffers, and tensors in plain attributes."""
    for module in modules:
        for part in module.modules():
            own = (value for name, value in vars(part).items() if name not in INTERNAL)
            for value in (*part._parameters.values(), *part._buffers.values(), *own):
                yield from tensors_of(value)


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors in a structure, in its order."""
    # At a lone leaf torch takes several microseconds; attributes of modules are nearly always one.
    leaves = [tree] if isinstance(tree, (Tensor, *CONSTANTS)) else pytree.tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


class Watched:
    """Watches tensors for changes in place, from here on.

    Tensors made in inference mode do not count changes; they are taken to be changed.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors = list(tensors)
        self._versions = [None if x.is_inference() else x._version for x in self.tensors]

    def changed(self) -> list[bool]:
        """Which have been."""
        pairs = zip(self.tensors, self._versions, strict=True)
        return [version is None or tensor._version != version for tensor, version in pairs]
