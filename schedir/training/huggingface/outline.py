"""Find the modules that a model runs before and after its blocks, by one run without values.

The model runs once on fake tensors, which have shapes and gradients but no memory. It can be cut
between two blocks if only the hidden states lead from one to the next. The gradients show whether
that is so.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from schedir.errors import ExecutionError
from schedir.training.cutting.stages import tied_names
from schedir.training.huggingface.models import configs_of, on_meta, uncuttable, within

_LOG = logging.getLogger(FakeTensorMode.__module__)
_OF_SHAPES = frozenset(
    [
        *(f"{what}_like" for what in ("zeros", "ones", "full", "empty", "rand", "randn")),
        *(f"new_{what}" for what in ("zeros", "ones", "full", "empty", "empty_strided")),
    ]
)  # operations that read no values


@attrs.frozen
class Call:
    """How a block is called: it takes the hidden states as its first argument, or by `keyword`, and
    returns only them, or a tuple of `values` entries with them first."""

    keyword: str | None
    values: int | None


@attrs.frozen
class Outline:
    """The structure of a model, in names of its modules and parameters.

    `blocks` is the list of its blocks, and `calls` says how each is called. A *unit* is a module
    beside the blocks: a child of one of the modules that contain the list. `first` are the units
    and single parameters of the first stage, `last` those of the last stage. All other units have
    no parameters, and every stage has them.
    """

    blocks: str
    first: frozenset[str]
    last: frozenset[str]
    calls: tuple[Call, ...]

    @property
    def ancestors(self) -> tuple[str, ...]:
        """The modules that contain the list of blocks, from the model itself down."""
        return _ancestors(self.blocks)


def joined(*names: str) -> str:
    """Join the names of a module and of one inside it."""
    return ".".join(filter(None, names))


def blocks_of(model: nn.Module) -> str:
    """Find the name of a model's list of blocks.

    It is the list in transformers' pipeline plan (`base_model_pp_plan`), otherwise the largest list
    of modules. Raises ExecutionError if there is no list.
    """
    lists = {
        name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)
    }
    planned = [name for name in getattr(model, "pp_plan", None) or {} if name in lists]
    if not lists:
        raise uncuttable(model, "it has no list of repeated blocks")

    def size(name: str) -> int:
        return sum(p.numel() for p in lists[name].parameters())

    # If two lists have the same size, one contains only the other; the outer one comes first.
    found: str = max(planned or lists, key=size)
    return found


def outline_of(model: nn.Module, inputs: Mapping[str, Tensor]) -> Outline:
    """Find the outline of a model on meta, from `inputs` of a small microbatch, on meta too.

    Raises ExecutionError, with the reason, for a model that can't be cut.
    """
    blocks = blocks_of(model)
    model = on_meta(model)  # a copy, because a run may leave state behind
    tracer = _Tracer(model, blocks)
    try:
        with faking(model.eval()), tracer.watching():
            tensors, given = fake_values(model), fakes_of(inputs)
            output = torch.func.functional_call(model, tensors, kwargs=given)
            return tracer.outline(tensors, output)
    except ExecutionError:
        raise
    except Exception as error:  # the model's code may not expect fake tensors
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in inputs.items())
        raise uncuttable(model, f"it does not run without values on {shapes}: {error}") from error


@contextmanager
def faking(model: nn.Module) -> Iterator[None]:
    """Inside, new tensors are fake, and a model runs on them.

    Which expert of a mixture takes a token depends on values. In the mode of transformers that is
    set here, no shape depends on that.
    """
    found = [(one, getattr(one, "_experts_implementation", None)) for one in configs_of(model)]
    before = [(config, way) for config, way in found if way is not None]
    disabled, _LOG.disabled = _LOG.disabled, True  # the error itself says what fails
    try:
        for config, _ in before:
            config._experts_implementation = "batched_mm"
        with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
            yield
    finally:
        _LOG.disabled = disabled
        for config, way in before:
            config._experts_implementation = way


def fake_values(model: nn.Module) -> dict[str, Tensor]:
    """Make a fake tensor for each tensor of a model."""
    tensors = fakes_of(dict(model.named_parameters()))
    for p in tensors.values():
        p.requires_grad_(p.is_floating_point())
    return tensors | fakes_of(dict(model.named_buffers()))


def fakes_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Make fake tensors like others, on the CPU."""
    return {
        name: torch.empty_like(x, device="cpu", requires_grad=False) for name, x in tensors.items()
    }


class _Tracer:
    """Watches one run: when each unit is called, and what goes into each block and out of it."""

    def __init__(self, model: nn.Module, blocks: str) -> None:
        self._model, self._name = model, blocks
        self._refusal = partial(uncuttable, model)
        self._blocks: Sequence[nn.Module] = list(model.get_submodule(blocks).children())
        self._entered = 0
        self._calls: list[Call] = []  # of the blocks that have been left
        self._keyword: str | None = None
        self._hidden: Tensor | None = None
        self._above = _ancestors(blocks)
        self._units = {
            name: module
            for above in self._above
            for child, module in model.get_submodule(above).named_children()
            if (name := joined(above, child)) not in (*self._above, blocks)
        }
        self._called: dict[str, set[str]] = {name: set() for name in self._units}
        self._carries: set[str] = set()
        self._computed = _Derived()

    @contextmanager
    def watching(self) -> Iterator[None]:
        handles = []
        for i, block in enumerate(self._blocks):
            entering, leaving = partial(self._entering, i), partial(self._leaving, i)
            handles.append(block.register_forward_pre_hook(entering, with_kwargs=True))
            handles.append(block.register_forward_hook(leaving))
        for name, unit in self._units.items():
            handles.append(unit.register_forward_hook(partial(self._calling, name)))
        try:
            with self._computed:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _entering(
        self, i: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self._entered == len(self._calls) == i:
            raise self._refusal(
                f"the {len(self._blocks)} blocks of {self._name} do not run one after the other, "
                "each once"
            )
        self._entered += 1
        name = self._keyword = self._hidden_of(i, args, kwargs)
        hidden = args[0] if name is None else kwargs[name]
        if i and hidden is not self._hidden:
            raise self._refusal(
                f"it works on the hidden states between blocks {i - 1} and {i} of {self._name}"
            )
        if i:
            return None
        # After a new leaf, gradients show whatever else of the beginning reaches the end.
        self._start = hidden
        leaf = hidden.detach().requires_grad_()
        return ((leaf, *args[1:]), kwargs) if name is None else (args, {**kwargs, name: leaf})

    def _hidden_of(self, i: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """The name by which a block is given the hidden states, None for the first position.

        Raises ExecutionError if the block is given more values that were computed from parameters.
        """
        names = [*inspect.signature(type(self._blocks[i]).forward).parameters][1:]
        given: dict[str | None, Any] = {
            (names[at] if at < len(names) else f"argument {at}") if at else None: value
            for at, value in enumerate(args)
        }
        given.update(kwargs)
        computed = [name for name, value in given.items() if self._computed.any_in(value)]
        hidden = computed[0] if computed else None
        if len(computed) > 1:
            raise self._refusal(
                f"block {i} of {self._name} takes more than the hidden states of what other stages "
                f"compute: {', '.join(map(str, computed[1:]))}"
            )
        value = args[0] if hidden is None and args else kwargs.get(hidden or "")
        if not isinstance(value, Tensor):
            raise self._refusal(f"block {i} of {self._name} is not given hidden states, one tensor")
        return hidden

    def _leaving(self, i: int, _: nn.Module, args: object, output: Any) -> None:
        is_tuple = isinstance(output, tuple)
        self._hidden = output[0] if is_tuple else output
        self._computed.add(output)
        if not isinstance(self._hidden, Tensor):
            raise self._refusal(
                f"block {i} of {self._name} returns {type(output).__name__}, no hidden states"
            )
        beside = pytree.tree_leaves(output[1:]) if is_tuple else []
        if not all(value is None or isinstance(value, Tensor) for value in beside):
            raise self._refusal(
                f"block {i} of {self._name} returns more than hidden states and attentions"
            )
        self._calls.append(Call(self._keyword, len(output) if is_tuple else None))

    def _calling(self, name: str, _: nn.Module, args: object, output: Any) -> None:
        after = len(self._calls) == len(self._blocks)
        self._called[name].add("after" if after else "between" if self._entered else "before")
        if any(x.requires_grad for x in _tensors_in(output)):
            self._carries.add(name)
            self._computed.add(output)

    def outline(self, tensors: Mapping[str, Tensor], output: Any) -> Outline:
        """The outline that the run has shown. `tensors` are the model's, by name."""
        if len(self._calls) != len(self._blocks):
            raise self._refusal(
                f"it runs {len(self._calls)} of the {len(self._blocks)} {self._name}"
            )
        first: set[str] = set()
        last: set[str] = set()
        for name, unit in self._units.items():
            called, holds = self._called[name], any(True for _ in unit.parameters())
            if holds and ("between" in called or len(called) > 1):
                raise self._refusal(f"{name} is used in several places, not only before the blocks")
            if called == {"before"} and (holds or name in self._carries):
                first.add(name)
            elif called == {"after"} or holds:
                last.add(name)
        for above in self._above:
            for own, _ in self._model.get_submodule(above).named_parameters(recurse=False):
                name = joined(above, own)
                (first if _reached({name: tensors[name]}, self._start) else last).add(name)
        # Values that are computed before the blocks may not be used after them.
        shared = {names[0] for names in tied_names(self._model)}
        begun = {
            name: tensors[name]
            for name, _ in self._model.named_parameters()
            if name not in shared and within(name, first)
        }
        for leaf in _tensors_in(dict(output)):
            if found := _reached(begun, leaf):
                raise self._refusal(f"the output of {found[0]} is used after the blocks too")
        return Outline(self._name, frozenset(first), frozenset(last), tuple(self._calls))


def _reached(parameters: Mapping[str, Tensor], result: Tensor) -> list[str]:
    """The names of the parameters that a result has a gradient for."""
    own = {name: p for name, p in parameters.items() if p.requires_grad}
    if not own or not result.requires_grad:
        return []
    grads = torch.autograd.grad(
        result.sum(), list(own.values()), retain_graph=True, allow_unused=True
    )
    return [name for name, grad in zip(own, grads, strict=True) if grad is not None]


def _ancestors(name: str) -> tuple[str, ...]:
    """The names of the modules that contain a module, from the whole model down."""
    parts = name.split(".")[:-1]
    return tuple(".".join(parts[:depth]) for depth in range(len(parts) + 1))


def _tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


class _Derived(TorchDispatchMode):
    """While it is entered, tracks the tensors that are computed from added ones, by any operation
    on their values, also without a gradient."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tensors: Any = WeakTensorKeyDictionary()

    def add(self, value: Any) -> None:
        """Add all tensors in `value`, however nested."""
        for tensor in _tensors_in(value):
            self._tensors[tensor] = True

    def any_in(self, value: Any) -> bool:
        """Whether `value` holds a tracked tensor, or one that requires grad."""
        return any(x.requires_grad or x in self._tensors for x in _tensors_in(value))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        reads_values = func.overloadpacket.__name__ not in _OF_SHAPES
        if reads_values and any(x in self._tensors for x in _tensors_in((args, kwargs))):
            self.add(result)
        return result
