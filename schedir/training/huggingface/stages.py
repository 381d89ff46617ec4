"""Cut a Hugging Face model into stages: `stages_of` an instance, or of its config alone."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from schedir.errors import ExecutionError
from schedir.ir import Schedule
from schedir.runtime.arguments import TieOf
from schedir.training.cutting.cuts import balanced, spans_of
from schedir.training.cutting.deferred import tied_names
from schedir.training.cutting.stages import Span, Stages, StageSummary, held_stages, ties_of
from schedir.training.huggingface.models import Model, model_of, on_meta, small_inputs, within
from schedir.training.huggingface.outline import (
    Outline,
    fake_values,
    fakes_of,
    faking,
    joined,
    outline_of,
)
from schedir.training.huggingface.stage_module import assembled
from schedir.training.huggingface.weights import materialise


def stages_of(
    model_or_config: Any,
    schedule: Schedule | int,
    *,
    model_class: Any = None,
    by: str = "parameters",
    boundaries: Sequence[int] | None = None,
    rank: int | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> Stages:
    """Cut a model of Hugging Face's transformers into stages.

    >>> from transformers import GPT2Config
    >>> from schedir.training import stages_of
    >>> sizes = {"n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 64}
    >>> stages = stages_of(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0), 2)
    >>> stages.cut
    'transformer.wte to transformer.h.0 | transformer.h.1 to lm_head'

    - `model_or_config`: a model, whose modules become the stages' modules, or a config. From a
      config only the parts that this process owns are made, by the model's own initialisation, with
      weights that depend only on `seed`.
    - `schedule`: a schedule, to make the stages of this process, or a number, to make that many
      stages here; 1 makes the whole model.
    - `model_class`: for a config, the class of the model, such as
      `AutoModelForSequenceClassification`. By default it is the one of `config.architectures`,
      otherwise a causal language model (for images, a classifier).
    - `by`: "parameters" balances the parameters of the stages; the embedding counts with the first
      block, the head with the last. "uniform" balances the blocks.
    - `boundaries`: in place of `by`, the number of the first block of each stage except stage 0.
    - `rank`: this process's rank in the schedule, by default the one that torchrun gave it.
    - `device`: where the modules are made, or moved to; for a config the CPU by default.

    The repeated blocks of the model are cut into contiguous stages, none of them empty.

    A step's `inputs` are a tensor of input_ids, (rows, tokens), or of pixel_values, (rows,
    channels, height, width), or a mapping of the model's inputs by name: attention_mask and others
    travel from stage to stage beside the hidden states. The last stage returns the logits, (rows,
    …). The key-value cache is off. Pass the result's `ties` to the executor. A stage's state dict
    has the names of the whole model.

    Raises ExecutionError if transformers is not installed, for more stages than blocks, and for a
    model that can't be cut, with the reason: an encoder-decoder or a model of two towers, with the
    classes of its family that can be cut, or a model whose blocks take more from other stages than
    hidden states.
    """
    model = model_of(model_or_config, model_class)
    if _is_encoder_decoder(model.skeleton):
        raise _refusal(
            model,
            "it is an encoder-decoder, and its decoder needs the encoder's output in each stage",
        )
    inputs = small_inputs(model)
    try:
        outline = outline_of(model.skeleton, inputs, model.kind)
    except ExecutionError:
        if len(towers := _towers(model.skeleton)) < 2:
            raise
        named = " and ".join(f"{name} ({given})" for given, name in towers.items())
        raise _refusal(model, f"its towers take different inputs, {named}") from None
    number = schedule if isinstance(schedule, int) else schedule.stages
    if number > len(outline.calls):
        raise ExecutionError(
            f"{number} stages can't be made of the {len(outline.calls)} blocks of {model.kind} "
            f"({outline.blocks}); take fewer stages"
        )
    spans = _spans(model.skeleton, outline, number, by, boundaries)
    parts = [_parts_of(model.skeleton, outline, span) for span in spans]
    like = on_meta(model.skeleton)
    tried = [assembled(like, like, outline, range(*span), {}) for span in spans]
    _try_out(tried, inputs, model.kind)
    held = range(number) if isinstance(schedule, int) else held_stages(schedule, rank)
    real = model.real
    if real is None:
        real = on_meta(model.skeleton)
        owned = {name for stage in held for name in parts[stage]}
        materialise(real, owned, seed, torch.device(device or "cpu"), model.kind)
    ties, copies = _ties(model.skeleton, real, parts, held)
    stages = {
        stage: assembled(model.skeleton, real, outline, range(*spans[stage]), copies.get(stage, {}))
        for stage in held
    }
    if device is not None:
        for one in stages.values():  # of an instance only the parts that this process owns
            one.to(device)
    summaries = [StageSummary(tuple(own), _parameters(model.skeleton, own)) for own in parts]
    return Stages(stages, ties, tuple(summaries))


def _is_encoder_decoder(model: Any) -> bool:
    """Whether a model has both parts; some classes of such a family have only one."""
    parts = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    return bool(getattr(model.config, "is_encoder_decoder", False)) and parts >= {
        "encoder",
        "decoder",
    }


def _towers(model: Any) -> dict[str, str]:
    """The parts of a model that are models themselves, by their main input."""
    named = [(name, one) for name, one in model.named_modules() if name]
    return {one.main_input_name: name for name, one in named if hasattr(one, "main_input_name")}


def _refusal(model: Model, reason: str) -> ExecutionError:
    """Say why a model can't be cut, and which classes of its family can be: each is tried."""
    own = model.skeleton.config
    parts = [getattr(own, name) for name in getattr(own, "sub_configs", ())]
    configs = {type(config): config for config in (own, *parts)}
    family = sys.modules[type(model.skeleton).__module__]
    found = [name for name in getattr(family, "__all__", ()) if _can_be_cut(family, name, configs)]
    those = f"of its family, {', '.join(found)} can be" if found else "nor can its family"
    return ExecutionError(f"{model.kind} can't be cut: {reason}; {those}")


def _can_be_cut(family: Any, name: str, configs: Mapping[type, Any]) -> bool:
    """Whether one of a family's classes can be cut."""
    made = getattr(family, name)
    try:
        model = model_of(configs[made.config_class], made)
        outline_of(model.skeleton, small_inputs(model), model.kind)
    except Exception:  # for any reason
        return False
    return not _is_encoder_decoder(model.skeleton)


def _spans(
    skeleton: nn.Module,
    outline: Outline,
    number: int,
    by: str,
    boundaries: Sequence[int] | None,
) -> tuple[Span, ...]:
    blocks = len(outline.calls)
    if boundaries is not None:
        starts = [0, *boundaries, blocks]
        if len(starts) != number + 1 or any(a >= b for a, b in pairwise(starts)):
            raise ExecutionError(
                f"boundaries: {number} stages need {number - 1} first blocks (of each stage except "
                f"stage 0), rising, from 1 to {blocks - 1} at most, not {list(boundaries)}"
            )
        return spans_of(boundaries, blocks)
    if by == "uniform":
        return balanced([1] * blocks, number)
    if by != "parameters":
        raise ExecutionError(f'by must be "parameters" or "uniform", not {by!r}')
    costs = [_parameters(skeleton, [joined(outline.blocks, str(i))]) for i in range(blocks)]
    costs[0] += _parameters(skeleton, outline.first)
    costs[-1] += _parameters(skeleton, outline.last)
    return balanced(costs, number)


def _parameters(model: nn.Module, parts: Collection[str]) -> int:
    """Count the numbers in some parts of a model; shared parameters count once."""
    named = model.named_parameters(remove_duplicate=False)
    return sum({id(p): p.numel() for name, p in named if within(name, parts)}.values())


def _parts_of(model: nn.Module, outline: Outline, span: Span) -> list[str]:
    """List the parts of a model that a stage owns, in the order in which they run."""
    named = [*model.named_parameters(remove_duplicate=False)]
    named += model.named_modules(remove_duplicate=False)
    parts = [joined(outline.blocks, str(i)) for i in range(*span)]
    if span[0] == 0:
        parts = [*(name for name, _ in named if name in outline.first), *parts]
    if span[1] == len(outline.calls):
        parts += [name for name, _ in named if name in outline.last]
    return parts


def _ties(
    skeleton: nn.Module, real: nn.Module, parts: Sequence[Collection[str]], held: Collection[int]
) -> tuple[tuple[TieOf, ...], dict[int, dict[str, nn.Parameter]]]:
    """Find the parameters that several stages share, and make copies for the stages in `held`."""
    stage_of = {
        name: stage
        for stage, own in enumerate(parts)
        for name, _ in skeleton.named_parameters(remove_duplicate=False)
        if within(name, own)
    }
    tied = tied_names(skeleton)
    copies: dict[int, dict[str, nn.Parameter]] = {}
    for names in tied:
        home = stage_of[names[0]]
        own: dict[int, nn.Parameter] = {}
        for name in names:
            if (stage := stage_of[name]) != home and stage in held:
                p = real.get_parameter(name)
                if stage not in own:
                    own[stage] = nn.Parameter(p.detach().clone(), p.requires_grad)
                copies.setdefault(stage, {})[name] = own[stage]
    return ties_of((stage_of[x], names[0], x) for names in tied for x in names), copies


def _try_out(stages: Sequence[nn.Module], inputs: Mapping[str, Tensor], kind: str) -> None:
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
                raise ExecutionError(
                    f"{kind} can't be cut: stage {number} of {len(stages)} does not run without "
                    f"the modules of the others: {error}"
                ) from error
