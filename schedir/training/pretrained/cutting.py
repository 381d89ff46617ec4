"""`stages_of`: the stages of a Hugging Face model, of an instance or its config alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import Any

import attrs
import torch
from torch import nn

from schedir.errors import ExecutionError
from schedir.ir import Schedule
from schedir.training.cutting.cuts import Span, balanced, spans_of
from schedir.training.cutting.stages import Stages, StageSummary, held_stages
from schedir.training.pretrained.copies import on_meta, tied
from schedir.training.pretrained.models import model_of, small_inputs
from schedir.training.pretrained.outline import Outline, joined, outline_of
from schedir.training.pretrained.stage import assembled
from schedir.training.pretrained.trial import try_out
from schedir.training.pretrained.weights import materialise


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
    """The stages of a model of Hugging Face's transformers, for `schedule`.

    `model_or_config` is an instance, whose modules the stages take as they are, or a config: then
    what this process owns, and nothing else, is made on `device` (the CPU by default), with weights
    that depend on `seed` alone, drawn as the model's own code says. Of a config, `model_class`
    says which model it is, such as `AutoModelForSequenceClassification`; by default the one of
    `config.architectures`, or else a causal language model (of images, a classifier).

    The blocks that repeat are cut into contiguous parts, none empty: `by` "parameters" gives each
    stage about as many, the embedding counted with the first block and the head with the last,
    "uniform" as many blocks; `boundaries` says the first block of each stage but the first. An int
    for `schedule` gives all of so many stages, whoever asks: of 1 the model uncut. `rank` is this
    process's in the schedule, by default the one that torchrun gave it.

    A step's `inputs` are what the model takes, a tensor of input_ids, (rows, tokens), or of
    pixel_values, (rows, channels, height, width), or a mapping: attention_mask and other inputs by
    name go from stage to stage beside the hidden states. The last stage returns the logits,
    (rows, …). The key-value cache is off. `Stages.ties` are for the executor's `ties=`; a stage's
    state dict has the names of the uncut model's.

    Raises ExecutionError without transformers, for more stages than blocks, and for a model that
    can't be cut, with the reason: an encoder-decoder, say, or blocks that take more of other stages
    than hidden states.
    """
    model = model_of(model_or_config, model_class)
    inputs = small_inputs(model)
    outline = outline_of(model.skeleton, inputs, model.kind)
    number = schedule if isinstance(schedule, int) else schedule.stages
    if number > len(outline.calls):
        raise ExecutionError(
            f"{number} stages can't be made of the {len(outline.calls)} blocks of {model.kind} "
            f"({outline.blocks}); take fewer stages"
        )
    layout = _Layout(
        model.skeleton, outline, _spans(model.skeleton, outline, number, by, boundaries)
    )
    like = on_meta(model.skeleton)
    tried = [assembled(like, like, outline, range(*span), {}) for span in layout.spans]
    try_out(tried, inputs, model.kind)
    held = range(number) if isinstance(schedule, int) else held_stages(schedule, rank)
    real = model.real
    if real is None:
        real = on_meta(model.skeleton)
        owned = {name for stage in held for name in layout.owned(stage)}
        materialise(real, owned, seed, torch.device(device or "cpu"), model.kind)
    stages = layout.stages(real, held)
    if device is not None:
        for stage in stages.values():  # of an instance, what this process owns alone
            stage.to(device)
    return stages


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
                f"boundaries: the first blocks of {number} stages but the first rise from 1 to "
                f"{blocks - 1} at most, unlike {list(boundaries)}"
            )
        return spans_of(boundaries, blocks)
    if by == "uniform":
        return balanced([1] * blocks, number)
    if by != "parameters":
        raise ExecutionError(f'by is "parameters" or "uniform", not {by!r}')
    costs = [_parameters(skeleton, [joined(outline.blocks, str(i))]) for i in range(blocks)]
    costs[0] += _parameters(skeleton, outline.first)
    costs[-1] += _parameters(skeleton, outline.last)
    return balanced(costs, number)


def _parameters(model: nn.Module, parts: Collection[str]) -> int:
    """How many numbers some parts of a model hold; of shared ones there is one copy."""
    return sum({id(p): p.numel() for _, p in _held(model, parts)}.values())


def _held(model: nn.Module, parts: Collection[str]) -> Iterator[tuple[str, nn.Parameter]]:
    for name, p in model.named_parameters(remove_duplicate=False):
        if any(name == part or name.startswith(f"{part}.") for part in parts):
            yield name, p


@attrs.frozen(eq=False)
class _Layout:
    """Which stage has what of a model."""

    skeleton: nn.Module
    outline: Outline
    spans: tuple[Span, ...]

    def owned(self, stage: int) -> list[str]:
        """The parts of a stage, in the order in which they run."""
        first, last = self.spans[stage]
        parts = [joined(self.outline.blocks, str(i)) for i in range(first, last)]
        if stage == 0:
            parts = [*self._in_order(self.outline.first), *parts]
        if stage == len(self.spans) - 1:
            parts = [*parts, *self._in_order(self.outline.last)]
        return parts

    def _in_order(self, parts: frozenset[str]) -> list[str]:
        names = [
            *(name for name, _ in self.skeleton.named_parameters(remove_duplicate=False)),
            *(name for name, _ in self.skeleton.named_modules(remove_duplicate=False)),
        ]
        return [name for name in names if name in parts]

    def ties(self) -> list[list[tuple[int, str]]]:
        """Every parameter that has several names, by stage and name."""
        stage_of = {
            name: stage
            for stage in range(len(self.spans))
            for name, _ in _held(self.skeleton, self.owned(stage))
        }
        return [[(stage_of[name], name) for name in names] for names in tied(self.skeleton)]

    def stages(self, real: nn.Module, held: Sequence[int]) -> Stages:
        """Those that this process holds, of the modules of `real`."""
        copies: dict[int, dict[str, nn.Parameter]] = {stage: {} for stage in range(len(self.spans))}
        ties = []
        for tie in self.ties():
            home, own = tie[0][0], {}
            for stage, name in tie:
                if stage != home and stage in held:
                    p = real.get_parameter(name)
                    if stage not in own:
                        own[stage] = nn.Parameter(p.detach().clone(), p.requires_grad)
                    copies[stage][name] = own[stage]
            across = dict(reversed(tie))  # of each stage the first name
            if len(across) > 1:
                ties.append(sorted(across.items()))
        return Stages(
            {
                stage: assembled(
                    self.skeleton, real, self.outline, range(*self.spans[stage]), copies[stage]
                )
                for stage in held
            },
            tuple(ties),
            tuple(
                StageSummary(tuple(parts), _parameters(self.skeleton, parts))
                for parts in map(self.owned, range(len(self.spans)))
            ),
        )
