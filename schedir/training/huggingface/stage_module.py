"""The module of one stage: a Hugging Face model's own forward, over the stage's modules."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import attrs
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from schedir.errors import ExecutionError
from schedir.training.huggingface.models import without_values
from schedir.training.huggingface.outline import Call, Outline, joined

_HIDDEN, _GIVEN = "hidden_states", "inputs"


class PretrainedStage(nn.Module):
    """A stage of a Hugging Face model. Its state dict has the names of the whole model.

    The first stage takes the model's inputs, as a tensor or by name. It passes on the hidden states
    and, beside them, the model's inputs, because masks and positions are computed from those. The
    last stage returns the logits, (rows, …), or the model's other outputs.

    The children are those of `model`, a copy of the whole model with stand-ins for the modules that
    the stage does not own.
    """

    def __init__(self, model: nn.Module, received: _Received, main_input: str) -> None:
        super().__init__()
        self._model = (model,)  # in a tuple: as a child it would add a prefix to all names
        self._received = received
        self._main_input = main_input
        self._modules, self._parameters = model._modules, model._parameters
        self._buffers = model._buffers
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self.training = model.training
        self._takes = tuple(inspect.signature(model.forward).parameters)

    def train(self, mode: bool = True) -> PretrainedStage:
        """Set the mode of all modules, including those that contain others."""
        self._model[0].train(mode)
        self.training = mode
        return self

    def forward(self, boundary: Any, /) -> Any:
        """Run the model; returns the hidden states and inputs for the next stage, or the output."""
        hidden: Tensor | None = None
        if isinstance(boundary, Mapping) and _HIDDEN in boundary and _GIVEN in boundary:
            hidden, given = boundary[_HIDDEN], boundary[_GIVEN]
        else:
            given = self._named(boundary)
        main, name = given.get(self._main_input), self._main_input
        inputs, carried = dict(given), dict(given)
        # Only the first stage reads images or sound; later ones get the shape of a sample.
        if isinstance(main, Tensor) and main.is_floating_point():
            carried[name] = tuple(main.shape[1:])
        elif hidden is not None and isinstance(main, tuple):
            inputs[name] = hidden.new_full((), math.nan).expand(hidden.shape[0], *main)
        self._received.hidden = hidden
        fakes = any(isinstance(x, FakeTensor) for x in pytree.tree_leaves(boundary))
        try:
            with without_values(self._model[0]) if fakes else nullcontext():
                output = self._model[0](**inputs)
        except _Left as left:
            return {_HIDDEN: left.hidden, _GIVEN: carried}
        finally:
            self._received.hidden = None
        # The logits; without logits, the only tensor, or all tensors by name.
        if "logits" in output:
            return output["logits"]
        found = {name: value for name, value in output.items() if isinstance(value, Tensor)}
        return next(iter(found.values())) if len(found) == 1 else found

    def _named(self, inputs: Any) -> dict[str, Any]:
        """Name the model's inputs."""
        if isinstance(inputs, Tensor):
            return {self._main_input: inputs}
        if not isinstance(inputs, Mapping):
            raise ExecutionError(
                f"a step's inputs must be {self._main_input} or a mapping of the model's inputs by "
                f"name, not {type(inputs).__name__}"
            )
        given = {name: value for name, value in inputs.items() if value is not None}
        if "labels" in given:
            raise ExecutionError("the model's labels go into target=, not into a step's inputs")
        for name in given:
            if name not in self._takes:
                raise ExecutionError(f"the model takes no {name}, only {', '.join(self._takes)}")
        return given


def assembled(
    skeleton: nn.Module,
    real: nn.Module,
    outline: Outline,
    blocks: range,
    copies: Mapping[str, nn.Parameter],
) -> PretrainedStage:
    """Make the stage that owns `blocks` of `real`.

    The stage takes the modules of `real` as they are, with `copies` in place of some parameters.
    For what it does not own it has the modules of `skeleton`, the same model on meta.
    """
    received = _Received()
    dropped: set[str] = set()
    if blocks.start > 0:
        dropped |= outline.first
    if blocks.stop < len(outline.calls):
        dropped |= outline.last
    held: nn.Module = nn.ModuleList()
    held.training = real.training
    for i, block in enumerate(real.get_submodule(outline.blocks).children()):
        if i not in blocks:
            like = skeleton.get_submodule(joined(outline.blocks, str(i)))
            block = _BlockElsewhere(like, received, outline.calls[i], earlier=i < blocks.start)
        held.add_module(str(i), block)
    for name in reversed(outline.ancestors):
        source = real.get_submodule(name)
        container = _shallow(skeleton.get_submodule(name))
        container.training = source.training
        container._buffers = copy.deepcopy(source._buffers)
        for key, p in source._parameters.items():
            container._parameters[key] = None if joined(name, key) in dropped else p
        for key, child in source._modules.items():
            path = joined(name, key)
            if path == outline.blocks or path in outline.ancestors:
                child = held
            elif path in dropped:
                child = _Elsewhere(skeleton.get_submodule(path), received)
            elif path not in outline.first | outline.last:
                child = copy.deepcopy(child)  # without parameters: every stage has its own
            container._modules[key] = child
        held = container
    for name, p in copies.items():
        held = _with_parameter(held, name, p)
    return PretrainedStage(held, received, getattr(real, "main_input_name", "input_ids"))


@attrs.define(eq=False)
class _Received:
    """The hidden states that the current forward of a stage was given."""

    hidden: Tensor | None = None


class _Left(Exception):  # noqa: N818 (it is none)
    """Raised when the forward comes to a block of the next stage."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _Elsewhere(nn.Module):
    """Stands for a module of the first stage in later stages: the real module's attributes, without
    its parameters.

    The model's code may use its output only before blocks of earlier stages, which ignore it. The
    output is NaN, so any other use would show.
    """

    def __init__(self, real: nn.Module, received: _Received) -> None:
        super().__init__()
        self._real = (real,)  # in a tuple, so that it is no child
        self._received = received

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_real"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return NaN in the hidden states' shape. Raises ExecutionError on the first stage."""
        hidden = self._received.hidden
        if hidden is None:
            kind = type(self._real[0]).__name__
            raise ExecutionError(
                f"with these inputs {kind} runs before the blocks, but only the last stage has it; "
                "pass only the model's main input, for which it was cut"
            )
        return hidden.new_full(hidden.shape, math.nan)  # in full: it may be changed in place


class _BlockElsewhere(_Elsewhere):
    """Stands for a block of another stage. If that is an earlier one, its output is the stage's
    input; if it is a later one, its input is the stage's output."""

    def __init__(self, real: nn.Module, received: _Received, call: Call, earlier: bool) -> None:
        super().__init__(real, received)
        self._call, self._earlier = call, earlier

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden states that the stage was given; raises `_Left` for a later stage."""
        if not self._earlier:
            raise _Left(args[0] if self._call.keyword is None else kwargs[self._call.keyword])
        hidden, values = self._received.hidden, self._call.values
        return hidden if values is None else (hidden, *[None] * (values - 1))


def _with_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Module:
    """Copy a module with another parameter of that name; the copy shares the rest."""
    like = _shallow(module)
    child, _, rest = name.partition(".")
    if rest:
        like._modules[child] = _with_parameter(module.get_submodule(child), rest, parameter)
    else:
        like._parameters[name] = parameter
    return like


def _shallow(module: nn.Module) -> nn.Module:
    """Copy a module that keeps the same children, parameters and settings."""
    like = module.__new__(type(module))
    like.__dict__ = {
        name: value.copy() if isinstance(value, dict) else value
        for name, value in module.__dict__.items()
    }
    return like
