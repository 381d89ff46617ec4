"""The boundary between two stages: the tensors that cross it, and the structure around them.

What a boundary is, and what else depends on the modules and the shape of their input, is `Learned`
in the first call of an input signature. That runs only the list. Until the facts are known it takes
the safe side: payloads travel with their description, inputs and targets are copied, and the layout
of every input's gradient is recorded. Afterwards version counters show what was changed in place.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from schedir.errors import ExecutionError
from schedir.graph.compile import graph_of
from schedir.ir import Action, Kind, Schedule
from schedir.runtime.arguments import DESCRIBED, Declared
from schedir.runtime.memory import Aliases, any_shared, attributes

CONSTANTS = type(None), bool, int, float, str, torch.dtype, torch.Size
"""The types of what may stand beside tensors in a boundary."""


@attrs.frozen
class TensorMeta:
    """The description of a tensor that crosses a boundary, known before it is sent.

    `stride` is the layout in which it arrives. That is the sender's, if it is dense (channels last,
    say, or transposed), because kernels round differently for another layout; otherwise the nearest
    dense one.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @cached_property
    def contiguous(self) -> bool:
        """Whether it lies in memory as its elements are counted."""
        steps = [1]
        for size in reversed(self.shape[1:]):
            steps.append(steps[-1] * size)
        return self.lies_as(tuple(reversed(steps[: len(self.shape)])))

    @cached_property
    def is_plain(self) -> bool:
        """Whether a contiguous tensor is its own payload."""
        return self.contiguous and not self.dtype.is_complex

    @property
    def nbytes(self) -> int:
        """The size of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def lies_as(self, stride: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape with that stride has the same layout in memory."""
        # Along a dimension of one element nobody takes a step.
        steps = zip(self.shape, stride, self.stride, strict=True)
        return all(n == 1 or one == other for n, one, other in steps) or 0 in self.shape

    def describes(self, tensor: Tensor, with_graph: bool = True) -> bool:
        """Whether it describes this tensor. Fast: it runs at every boundary of every microbatch."""
        return (
            tensor.shape == self.shape
            and tensor.dtype is self.dtype
            and (tensor.requires_grad is self.requires_grad or not with_graph)
            and (tensor.stride() == self.stride or self.lies_as(_dense(tensor).stride()))
        )

    def __repr__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        layout = "" if self.contiguous else f" of stride {list(self.stride)}"
        grad = " requires grad" if self.requires_grad else ""
        return f"{name}{list(self.shape)}{layout}{grad}"


Grads: TypeAlias = tuple[TensorMeta | None, ...]
"""The descriptions of the gradients of some tensors; None for no gradient."""


def _exactly(leaves: tuple[object, ...]) -> list[object]:
    """To compare them by: as numbers True and 1, or 0.0 and -0.0, are equal."""
    return [leaf if isinstance(leaf, TensorMeta) else (type(leaf), repr(leaf)) for leaf in leaves]


@attrs.frozen(repr=False)
class Boundary:
    """The data that one microbatch sends across one boundary: any pytree of tensors and constants.

    Only tensors travel. Numbers, strings and None are agreed once, with the structure. If the user
    has `declared` the boundary, only the run shows which tensors require grad; until then all do
    that can.
    """

    # A TensorMeta where a tensor stands, else the constant.
    leaves: tuple[object, ...] = attrs.field(eq=_exactly, hash=False)
    spec: pytree.TreeSpec
    declared: bool = False

    @cached_property
    def metas(self) -> tuple[TensorMeta, ...]:
        """The descriptions of its tensors."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorMeta))

    @cached_property
    def single(self) -> bool:
        """Whether it is one tensor and nothing around it."""
        return self.spec.is_leaf() and bool(self.metas)

    @property
    def tree(self) -> Any:
        """Its structure, with metadata in place of the tensors."""
        return pytree.tree_unflatten(list(self.leaves), self.spec)

    @property
    def nbytes(self) -> int:
        """What its tensors take."""
        return sum(meta.nbytes for meta in self.metas)

    def tensors(self, output: Any, stage: int, with_graph: bool = True) -> tuple[Tensor, ...]:
        """The tensors of the output of a stage, which must match this boundary.

        `with_graph` is False if gradients are off, or come later, by recomputation. Raises
        ExecutionError, with the output and the boundary, before any payload is sent.
        """
        if self.single and isinstance(output, Tensor):
            found: tuple[Tensor, ...] = (output,)
            agreed = True
        else:
            leaves, spec = pytree.tree_flatten(output)
            found = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
            agreed = spec == self.spec and all(
                isinstance(agreed, TensorMeta)
                if isinstance(leaf, Tensor)
                else type(leaf) is type(agreed) and (leaf == agreed or repr(leaf) == repr(agreed))
                for leaf, agreed in zip(leaves, self.leaves, strict=True)
            )
        if agreed:
            for tensor, meta in zip(found, self.metas, strict=True):
                graph = with_graph and (tensor.requires_grad or not self.declared)
                agreed = agreed and meta.describes(tensor, graph)
        if not agreed:
            raise ExecutionError(
                f"the stage returned {boundary_of(output)}, but {self} was agreed with the next "
                f"stage; if its shape depends on data, pass boundaries={{{stage}: {DESCRIBED!r}}}; "
                "return values that vary as tensors, keep the order of a dict's keys, and make a "
                "new Executor if you have frozen or thawed parameters"
            )
        if self.declared and len(found) > 1 and any_shared(found):
            raise ExecutionError(
                "the stage returned tensors that share memory, but after a declared boundary they "
                "would not; return a copy of one of them: clone()"
            )
        return found

    def structure(self, tensors: Sequence[Tensor]) -> Any:
        """The structure of tensors and constants."""
        if self.single:
            return tensors[0]
        coming = iter(tensors)
        leaves = [next(coming) if isinstance(x, TensorMeta) else x for x in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)

    def __repr__(self) -> str:
        return repr(self.tree)

    def __reduce__(self) -> tuple[Callable[[Any, bool], Boundary], tuple[Any, bool]]:
        # Sent as the structure itself: torch's description of it warns when it is unpickled.
        return _of_tree, (self.tree, self.declared)


def _of_tree(tree: Any, declared: bool) -> Boundary:
    leaves, spec = pytree.tree_flatten(tree)
    return Boundary(tuple(leaves), spec, declared)


def boundary_of(output: Any) -> Boundary:
    """The boundary of a stage's output. Raises ExecutionError for a value that can't be sent."""
    leaves, spec = pytree.tree_flatten(output)
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *CONSTANTS)):
            raise ExecutionError(
                "a stage returns tensors to the next one, in tuples, lists and dicts, with "
                f"numbers, strings and None among them, but no {type(leaf).__name__}"
            )
        if isinstance(leaf, Tensor) and leaf.layout is not torch.strided:
            raise ExecutionError(
                f"a stage returns dense tensors to the next one, not one of layout {leaf.layout}: "
                "return its parts, such as values() and offsets(), or its to_dense()"
            )
    return Boundary(
        tuple(meta_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves), spec
    )


def declared(output: Declared, trained: bool) -> Boundary:
    """The boundary that the user declared by example; if `trained`, all tensors require grad that
    can."""
    found = boundary_of(output)
    return Boundary(
        tuple(
            attrs.evolve(
                leaf,
                requires_grad=trained and (leaf.dtype.is_floating_point or leaf.dtype.is_complex),
            )
            if isinstance(leaf, TensorMeta)
            else leaf
            for leaf in found.leaves
        ),
        found.spec,
        declared=True,
    )


def crossed(transfer: Action) -> int:
    """The boundary that a send or receive crosses: the number of the stage before it."""
    return transfer.stage - (transfer.kind in (Kind.RECV_ACT, Kind.SEND_GRAD))


NOTHING = Boundary((), pytree.tree_flatten(())[1])
"""Before the first stage and after the last."""


def meta_of(tensor: Tensor) -> TensorMeta:
    """A tensor's metadata."""
    stride = tuple(_dense(tensor).stride())
    return TensorMeta(tuple(tensor.shape), stride, tensor.dtype, tensor.requires_grad)


def _dense(tensor: Tensor) -> Tensor:
    """The tensor, or a copy with the same layout but without gaps."""
    return tensor if tensor.is_contiguous() else torch.empty_like(tensor, device="meta")


def empty(meta: TensorMeta, device: torch.device) -> Tensor:
    """A buffer for a tensor to come."""
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=device)


def payload(tensor: Tensor, meta: TensorMeta) -> Tensor:
    """The tensor's elements in memory order in the agreed layout, contiguous.

    For a buffer from `empty` that is the buffer or a view; a tensor in another layout is copied.
    """
    if tensor.is_conj() or tensor.is_neg():  # the bytes are not yet the values
        tensor = tensor.resolve_conj().resolve_neg()
    if meta.contiguous:
        return tensor if tensor.is_contiguous() else tensor.detach().contiguous()
    tensor = tensor.detach()
    if not meta.lies_as(tensor.stride()):
        tensor = empty(meta, tensor.device).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


EVERY: Collection[int] = range(sys.maxsize)
"""The numbers of all tensors, or boundaries, however many there are."""


@attrs.define(eq=False)
class GradientsOf:
    """The gradient that crosses a boundary for each of its tensors, None for no gradient. If they
    are `masked`, different calls may have different gradients, and a mask travels with them."""

    metas: Grads = ()
    masked: bool = False


@attrs.define(eq=False)
class Learned:
    """The boundaries of one (stage, microbatch), its gradients, and what its module changes.

    `before` describes the stage's input and `after` its output; `before` is empty for the first
    stage, `after` for the last. `aliases` and `aliases_after` say what their tensors share memory
    with. With `spread` the entries of its input are separate arguments of the module.

    `grads_in` are the gradients that come back for the tensors of `after`, `grads_out` those that
    are sent for the tensors of `before`.

    `changes_inputs` says which inputs the module changes in place; in the first stage it is one
    flag for the whole microbatch, once that is known. `changes_extra` and `changes_target` say
    whether the module, or the loss, changes any of the other arguments. `copied` are the numbers of
    the outputs that may be changed before the next stage has used them. `other_layout` are the
    numbers of the inputs whose gradients may have another layout than the input: autograd would
    copy them to the input's layout, and kernels would round differently.
    """

    before: Boundary = NOTHING
    after: Boundary = NOTHING
    aliases: Aliases = attrs.field(factory=dict)
    aliases_after: Aliases = attrs.field(factory=dict)
    spread: bool = False
    grads_in: GradientsOf = attrs.field(factory=GradientsOf)
    grads_out: GradientsOf = attrs.field(factory=GradientsOf)
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
        metas = tuple([None if grad is None else meta_of(grad) for grad in grads])
        self.grads_out.metas = metas
        self.other_layout = frozenset(
            number
            for number, (meta, grad) in enumerate(zip(self.before.metas, metas, strict=True))
            if grad is not None and not (meta.contiguous and grad.contiguous)
        )


Lessons: TypeAlias = Mapping[tuple[int, int], Learned]
"""What the stages here have learned, by (stage, microbatch)."""


def mask_gradients(lessons: Lessons, schedule: Schedule, ranks: Iterable[int]) -> None:
    """Send masks with gradients that only some microbatches have.

    It is decided by boundary and channel, because both ends of these have seen the same
    microbatches.
    """
    channels: dict[tuple[object, ...], list[tuple[GradientsOf, Boundary]]] = {}
    for rank in ranks:
        for action in schedule.flat[rank]:
            if action.kind in (Kind.SEND_GRAD, Kind.RECV_GRAD):
                key = rank, graph_of(schedule).peer(action), action.kind, action.stage
                assert action.microbatch is not None  # a transfer has one
                learned = lessons[action.stage, action.microbatch]
                crossing = learned.grads_in, learned.after
                if action.kind is Kind.SEND_GRAD:
                    crossing = learned.grads_out, learned.before
                channels.setdefault(key, []).append(crossing)
    for of_channel in channels.values():
        present = {tuple([meta is not None for meta in grads.metas]) for grads, _ in of_channel}
        for grads, boundary in of_channel:
            grads.masked |= len(present) > 1
            if grads.masked:  # all that may come, in the layout of the tensors they belong to
                grads.metas = tuple(
                    meta if grad is None and meta.requires_grad else grad
                    for grad, meta in zip(grads.metas, boundary.metas, strict=True)
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
    positional, keywords = _entries(given if spread else (given,))
    others, named = _entries(() if extra is None else extra)
    return (*positional, *others), {**keywords, **named}


def _entries(given: Any) -> tuple[Iterable[Any], Mapping[str, Any]]:
    """The entries of a structure, by position and by keyword."""
    if isinstance(given, Mapping):
        return (), given
    return given if isinstance(given, (tuple, list)) else (given,), {}


def held_by(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """The tensors that modules hold: parameters, buffers, and tensors in plain attributes."""
    for module in modules:
        for part in module.modules():
            for value in attributes(part).values():
                yield from tensors_of(value)


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors in a structure, in its order."""
    # At a lone leaf torch takes several microseconds; attributes of modules are nearly always one.
    leaves = [tree] if isinstance(tree, (Tensor, *CONSTANTS)) else pytree.tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def changes_of(tensors: Iterable[Tensor]) -> Callable[[], list[bool]]:
    """Watch tensors from here on; returns a function that says which have changed in place.

    Tensors made in inference mode do not count changes; they are taken to be changed.
    """
    watched = [(x, None if x.is_inference() else x._version) for x in tensors]
    return lambda: [version is None or x._version != version for x, version in watched]
