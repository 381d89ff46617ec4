"""What this process holds of a model, under the names that it has in the whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
from torch import Tensor, nn

from schedir.errors import ExecutionError
from schedir.runtime import Executor
from schedir.runtime.session import digest
from schedir.training.checkpoints.agreeing import Gather, everywhere
from schedir.training.cutting.stages import whole_name

LOSS = "loss_fn"
"""What precedes the names of a loss's parameters, where it is a module."""

Aliases: TypeAlias = Mapping[nn.Parameter, tuple[str, ...]]
"""Of each parameter here all its names in the whole model, those of its tied copies too."""


@attrs.frozen(eq=False)
class Held:
    """A module of this process: a stage, a whole model, or a loss.

    `place` is what to call it in messages, `stage` its number. `section` is the key that its
    tensors are under in a checkpoint. `saves` is whether this process writes it: of replicas one
    does.
    """

    place: str
    stage: int
    section: str
    module: nn.Module
    saves: bool = True

    def state(self) -> dict[str, Any]:
        """Its state dict, under whole names."""
        return {whole_name(name): value for name, value in self.module.state_dict().items()}

    def take(self, state: Mapping[str, Any]) -> None:
        """Load what `state` is, changed in place or not."""
        found = self.module.state_dict()
        for name in found:
            found[name] = state[whole_name(name)]
        self.module.load_state_dict(found)

    def key(self, name: str) -> str:
        """What a tensor of this is called among those of all sections."""
        return f"{self.section}.{name}"

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Its parameters under all their names, by which an optimiser's state is kept."""
        for name, value in self.module.state_dict(keep_vars=True).items():
            if isinstance(value, nn.Parameter):
                whole = whole_name(name)
                yield (self.key(whole) if self.section == LOSS else whole), value


def held_by(model: Executor | nn.Module, loss_fn: object = None) -> list[Held]:
    """What is here of a model: an executor's stages and its loss, or a plain model and its own."""
    if not isinstance(model, Executor):
        plain = [Held("the model", 0, "model", model)]
        return plain + ([Held(LOSS, 1, LOSS, loss_fn)] if isinstance(loss_fn, nn.Module) else [])
    placement = model.schedule.placement

    def saves(stage: int) -> bool:
        holders = placement[stage]
        # In one process other ranks' stages are here as well.
        return model.pipeline == 0 and (model.rank == holders[0] or model.rank not in holders)

    found = [
        Held(f"stage {stage}", stage, "model", module, saves(stage))
        for stage, module in sorted(model.stages.items())
    ]
    last = len(placement) - 1
    if last in model.stages and isinstance(model.loss_fn, nn.Module):
        found.append(Held(LOSS, last + 1, LOSS, model.loss_fn, saves(last)))
    return found


@attrs.frozen
class Entry:
    """One name of a state dict, as a process tells the others of it.

    `content` tells buffers with different values apart; parameters have none. `size` is None for
    what is no tensor.
    """

    key: str
    place: str
    stage: int
    size: tuple[int, ...] | None
    content: int | None


def entries(held: Iterable[Held]) -> list[Entry]:
    """All names that are here."""
    found = []
    for one in held:
        state = one.module.state_dict(keep_vars=True)
        for name, value in state.items():
            size, content = None, None
            if isinstance(value, Tensor):
                size = tuple(value.shape)
                if not isinstance(value, nn.Parameter):
                    content = digest(value)
            found.append(Entry(one.key(whole_name(name)), one.place, one.stage, size, content))
    return found


@attrs.frozen(eq=False)
class Names:
    """All names of the whole model.

    `sizes` are the shapes of its parameters and buffers, None for what is no tensor; `aliases` the
    names of the parameters that are here.
    """

    sizes: Mapping[str, tuple[int, ...] | None]
    aliases: Aliases


def names_of(model: Executor | nn.Module, held: Sequence[Held], gather: Gather) -> Names:
    """Put together what all processes hold.

    Raises ExecutionError, on all, where a name stands for two things.
    """
    own: dict[nn.Parameter, list[str]] = {}
    for one in held:
        for name, parameter in one.parameters():
            own.setdefault(parameter, []).append(name)
    ties = model.ties if isinstance(model, Executor) else ()
    copies = _copies(model, own) if isinstance(model, Executor) else {}
    by_process = everywhere(
        gather,
        lambda: (entries(held), {at: own.get(copy, []) for at, copy in copies.items()}),
    )
    tied: list[tuple[str, ...]] = []
    for tie in ties:
        found = {}
        for _, theirs in by_process:
            found.update({at: theirs[at] for at in map(tuple, tie) if at in theirs})
        tied.append(tuple(dict.fromkeys(name for at in sorted(found) for name in found[at])))
    aliases = {parameter: tuple(found) for parameter, found in own.items()}
    for group, tie in zip(tied, ties, strict=True):
        for at in map(tuple, tie):
            if at in copies:
                aliases[copies[at]] = group
    shared = {f"model.{name}" for group in tied for name in group}
    listed = [entry for theirs, _ in by_process for entry in theirs]
    return Names(_without_clashes(listed, shared), aliases)


def _copies(model: Executor, own: Iterable[nn.Parameter]) -> dict[tuple[int, str], nn.Parameter]:
    return {
        (stage, name): model.stages[stage].get_parameter(name)
        for tie in model.ties
        for stage, name in tie
        if stage in model.stages
    }


def _without_clashes(
    listed: Iterable[Entry], shared: set[str]
) -> dict[str, tuple[int, ...] | None]:
    first: dict[str, Entry] = {}
    for entry in sorted(listed, key=lambda one: one.stage):
        other = first.setdefault(entry.key, entry)
        if other.stage == entry.stage or entry.key in shared:
            continue
        if entry.content is None or entry.content != other.content or entry.size != other.size:
            name = entry.key.partition(".")[2]
            raise ExecutionError(
                f"{name} is the name of two things, in {other.place} and {entry.place}; stages "
                "must name what they hold as the whole model does: make them with partition or "
                "stages_of, or declare a shared parameter with ties="
            )
    return {key: entry.size for key, entry in first.items()}
