"""Cut a Hugging Face model into stages: `stages_of` an instance, or of its config alone.

A stage runs the model's own forward, over a copy of the model that has stand-ins for the modules of
other stages.
"""

from __future__ import annotations

import copy
import inspect
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from schedir.errors import ExecutionError
from schedir.ir import Schedule
from schedir.training.cutting.cuts import cut
from schedir.training.cutting.stages import (
    Part,
    Span,
    Stages,
    Uncut,
    holdings_of,
    own_modules,
)
from schedir.training.huggingface.models import (
    Model,
    materialise,
    model_of,
    on_meta,
    small_inputs,
    uncuttable,
)
from schedir.training.huggingface.outline import (
    Call,
    Outline,
    fake_values,
    fakes_of,
    faking,
    joined,
    outline_of,
)
from schedir.training.huggingface.reading import weights_of

_HIDDEN, _GIVEN = "hidden_states", "inputs"


def stages_of(
    model_or_config: Any,
    schedule: Schedule | int,
    *,
    model_class: Any = None,
    by: str | None = None,
    costs: Sequence[float] | None = None,
    boundaries: Sequence[int | str] | None = None,
    rank: int | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    weights: str | os.PathLike[str] | None = None,
    new: Collection[str] = (),
    dtype: torch.dtype | None = None,
) -> Stages:
    """Cut a model of Hugging Face's transformers into stages.

    >>> from transformers import GPT2Config
    >>> from schedir.training import stages_of
    >>> sizes = {"n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 64}
    >>> stages = stages_of(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0), 2)
    >>> stages.cut
    'transformer.wte to transformer.h.0 | transformer.h.1 to lm_head'

    - `model_or_config`: a model, whose modules become the stages' modules, a config, or a folder
      with a config and weights. From a config or a folder only the parts that this process owns are
      made: from a config by the model's own initialisation, with weights that depend only on
      `seed`.
    - `schedule`: a schedule, to make the stages of this process, or a number, to make that many
      stages here; 1 makes the whole model.
    - `model_class`: for a config, the class of the model, such as
      `AutoModelForSequenceClassification`. By default it is the one of `config.architectures`,
      otherwise a causal language model (for images, a classifier).
    - `by`, `costs` and `boundaries` say where to cut, as in `partition`. The layers are the model's
      repeated blocks: 3 in `boundaries`, or "model.layers.3", is block 3. What comes before the
      blocks, the embedding, belongs to the first one, and what comes after them to the last.
    - `rank`: this process's rank in the schedule, by default the one that torchrun gave it.
    - `device`: where the modules are made, or moved to; for a config the CPU by default.
    - `weights`: for a config, the folder with its weights. A folder is one with its own config.
    - `new`: tensors that the folder lacks or has in another shape, by their names or by those of
      modules that hold them. They are made from `seed`.
    - `dtype`: for a config or a folder, that of the parameters; by default the config's.

    A step's `inputs` are a tensor of input_ids, (rows, tokens), or of pixel_values, (rows,
    channels, height, width), or a mapping of the model's inputs by name: attention_mask and others
    travel from stage to stage beside the hidden states. The last stage returns the logits, (rows,
    …). The key-value cache is off. Pass the result's `ties` to the executor. A stage's state dict
    has the names of the whole model.

    A folder is read by transformers' own conversion, and each process reads its own tensors. First
    it compares all names and shapes, so all processes raise the same error. Files are safetensors.

    Raises ExecutionError if transformers is not installed, for more stages than blocks, for a
    folder that lacks a tensor or is damaged, and for a model that can't be cut, with the reason: an
    encoder-decoder, a model of two towers, or a model whose blocks take more from other stages than
    hidden states.
    """
    new = [new] if isinstance(new, str) else new
    model = uncut_pretrained(model_or_config, model_class, seed, device, weights, new, dtype)
    return cut(model, schedule, by, costs, boundaries, rank)


def uncut_pretrained(
    model_or_config: Any,
    model_class: Any,
    seed: int,
    device: torch.device | str | None,
    weights: str | os.PathLike[str] | None = None,
    new: Collection[str] = (),
    dtype: torch.dtype | None = None,
) -> Uncut:
    """The parts of a Hugging Face model: its blocks.

    The first has what comes before the blocks too, and the last what comes after them.

    Raises ExecutionError for a model that can't be cut, with the reason, and for a folder that does
    not have the model's weights.
    """
    model = model_of(model_or_config, model_class, weights, dtype)
    skeleton = model.skeleton
    if new and model.folder is None:
        raise ExecutionError("new= is for a folder's weights; leave it out")
    tensors = {} if model.folder is None else weights_of(model.folder, skeleton, new)
    _check_encoder_decoder(skeleton)
    inputs = small_inputs(skeleton)
    try:
        outline = outline_of(skeleton, inputs)
    except ExecutionError:
        _check_towers(skeleton)
        raise
    whole = skeleton if model.real is None else model.real
    named: dict[str, Any] = dict(whole.named_parameters(remove_duplicate=False))
    named |= dict(whole.named_modules(remove_duplicate=False))
    blocks = [joined(outline.blocks, str(number)) for number in range(len(outline.calls))]
    groups = [[name] for name in blocks]
    groups[0] = [*(name for name in named if name in outline.first), *groups[0]]
    groups[-1] += [name for name in named if name in outline.last]
    parts = [
        _part(block, {name: named[name] for name in group})
        for block, group in zip(blocks, groups, strict=True)
    ]

    def module_of(span: Span, own: Mapping[str, nn.Module], names: Collection[str]) -> nn.Module:
        real = model.real
        if real is None:
            real = on_meta(skeleton)
            materialise(real, names, tensors, seed, torch.device(device or "cpu"))
        stage = _assembled(skeleton, real, outline, range(*span), own)
        stage.origin = attrs.evolve(model, real=None)
        return stage if device is None else stage.to(device)

    def make(spans: Sequence[Span], stages: Iterable[int]) -> Iterator[tuple[int, nn.Module]]:
        like = on_meta(skeleton)
        tried = [_assembled(like, like, outline, range(*span), {}) for span in spans]
        _try_out(tried, inputs, skeleton)
        own = {} if model.real is None else own_modules(parts, spans, stages)
        for stage in stages:
            names = tried[stage].state_dict().keys()
            yield stage, module_of(spans[stage], own.get(stage, {}), names)

    return Uncut(parts, make)


def _part(block: str, members: Mapping[str, Any]) -> Part:
    """A block, with modules and single parameters that are on its stage."""
    modules = {name: one for name, one in members.items() if isinstance(one, nn.Module)}
    parameters = [
        named
        for name, one in members.items()
        for named in (
            one.named_parameters(name, remove_duplicate=False) if name in modules else [(name, one)]
        )
    ]
    kinds = {name: type(one).__name__ for name, one in members.items()}
    return Part(block, kinds, holdings_of(parameters), modules)


def _check_encoder_decoder(model: Any) -> None:
    """Raise ExecutionError if a model has both parts; some classes of such a family have one."""
    parts = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    has_both = parts.issuperset(("encoder", "decoder"))
    if has_both and getattr(model.config, "is_encoder_decoder", False):
        raise uncuttable(
            model,
            "it is an encoder-decoder, and its decoder needs the encoder's output in each stage",
        )


def _check_towers(model: Any) -> None:
    """Raise ExecutionError if several parts of a model are models with inputs of their own."""
    named = [(name, one) for name, one in model.named_modules() if name]
    towers = {one.main_input_name: name for name, one in named if hasattr(one, "main_input_name")}
    if len(towers) > 1:
        shown = " and ".join(f"{name} ({given})" for given, name in towers.items())
        reason = f"its towers take different inputs, {shown}; cut one of them"
        raise uncuttable(model, reason) from None


def _try_out(stages: Sequence[nn.Module], inputs: Mapping[str, Tensor], model: Any) -> None:
    """Run all stages of a model on fake tensors, with the `inputs` of a small microbatch.

    Raises ExecutionError if a stage does not run: the model's code may use a module of the first
    stage in a way that its stand-in, which only returns hidden states, does not support.
    """
    whole = nn.ModuleList(stages).eval()
    with faking(whole), torch.no_grad():
        boundary: Any = fakes_of(inputs)
        for number, stage in enumerate(stages):
            try:
                boundary = torch.func.functional_call(stage, fake_values(stage), (boundary,))
            except Exception as error:  # of the model's own code
                raise uncuttable(
                    model,
                    f"stage {number} of {len(stages)} does not run without the modules of the "
                    f"others: {error}",
                ) from error


class PretrainedStage(nn.Module):
    """A stage of a Hugging Face model. Its state dict has the names of the whole model.

    The first stage takes the model's inputs, as a tensor or by name. It passes on the hidden states
    and, beside them, the model's inputs, because masks and positions are computed from those. The
    last stage returns the logits, (rows, …), or the model's other outputs.

    The children are those of `model`, a copy of the whole model with stand-ins for the modules that
    the stage does not own. `origin` is what a folder of it needs, if it is not only tried.
    """

    origin: Model | None = None

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
        try:
            output = self._model[0](**inputs)
        except _EndOfStage as end:
            return {_HIDDEN: end.hidden, _GIVEN: carried}
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


def _assembled(
    skeleton: nn.Module,
    real: nn.Module,
    outline: Outline,
    blocks: range,
    own: Mapping[str, nn.Module],
) -> PretrainedStage:
    """Make the stage that owns `blocks` of `real`.

    The stage takes the modules of `real` as they are, or those of `own` in their place. For what it
    does not own it has the modules of `skeleton`, the same model on meta.
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
        name = joined(outline.blocks, str(i))
        if i not in blocks:
            like = skeleton.get_submodule(name)
            block = _BlockStandIn(like, received, outline.calls[i], earlier=i < blocks.start)
        held.add_module(str(i), own.get(name, block))
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
                child = _StandIn(skeleton.get_submodule(path), received)
            elif path in outline.first | outline.last:
                child = own.get(path, child)
            else:
                child = copy.deepcopy(child)  # without parameters: every stage has its own
            container._modules[key] = child
        held = container
    return PretrainedStage(held, received, getattr(real, "main_input_name", "input_ids"))


@attrs.define(eq=False)
class _Received:
    """The hidden states that the current forward of a stage was given."""

    hidden: Tensor | None = None


class _EndOfStage(Exception):  # noqa: N818 (it is no error)
    """Raised when the forward comes to a block of the next stage."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _StandIn(nn.Module):
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


class _BlockStandIn(_StandIn):
    """Stands for a block of another stage. If that is an earlier one, its output is the stage's
    input; if it is a later one, its input is the stage's output."""

    def __init__(self, real: nn.Module, received: _Received, call: Call, earlier: bool) -> None:
        super().__init__(real, received)
        self._call, self._earlier = call, earlier

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden states that the stage was given; end the forward at a later stage."""
        keyword, values = self._call.keyword, self._call.values
        if not self._earlier:
            raise _EndOfStage(args[0] if keyword is None else kwargs[keyword])
        hidden = self._received.hidden
        return hidden if values is None else (hidden, *[None] * (values - 1))


def _shallow(module: nn.Module) -> nn.Module:
    """Copy a module that keeps the same children, parameters and settings."""
    like = module.__new__(type(module))
    like.__dict__ = {
        name: value.copy() if isinstance(value, dict) else value
        for name, value in module.__dict__.items()
    }
    return like
