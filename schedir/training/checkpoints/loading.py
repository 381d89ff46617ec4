"""From a checkpoint's files to a training: all is found to fit before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from schedir.errors import ExecutionError
from schedir.runtime import Executor
from schedir.runtime.processes.failure import describe
from schedir.training.checkpoints.agreeing import everywhere
from schedir.training.checkpoints.names import LOSS, Names, names_of
from schedir.training.checkpoints.optimizer_state import Kept, Record, give, state_tensors
from schedir.training.checkpoints.packing import unpacked
from schedir.training.checkpoints.rng_state import set_rng_state
from schedir.training.checkpoints.storage import Stored
from schedir.training.checkpoints.subject import Stateful, Subject

_SHOWN = 5


class Loading:
    """One load of a checkpoint, as every process does it.

    With `weights_only` nothing but the modules' parameters and buffers. Raises ExecutionError, on
    all processes, where any of them finds that it does not fit, before anything is changed.
    """

    def __init__(self, subject: Subject, folder: Path, weights_only: bool) -> None:
        self._subject, self._folder, self._weights_only = subject, folder, weights_only
        self.step = 0
        opened = everywhere(subject.gather, self._open)
        places = [place for place, _ in opened]
        for place, mark in opened:
            if mark != opened[0][1]:
                raise ExecutionError(
                    f"the checkpoint in {folder} is another one for process {places.index(place)} "
                    "than for process 0: give a folder that all ranks see"
                )
        number = places.index(subject.place)
        everywhere(subject.gather, lambda: self._stored.check(number, len(places)))
        self._names = names_of(subject.model, subject.held, subject.gather)
        everywhere(subject.gather, self._check)
        everywhere(subject.gather, self._take_all)

    def _open(self) -> tuple[tuple[int, int], bytes]:
        self._stored = Stored(self._folder)
        return self._subject.place, self._stored.mark

    def _unpacked(self, name: str) -> Any:
        if name not in self._stored.sizes:
            return None
        content = self._stored.empty(name)
        self._stored.read_into({name: content})
        return unpacked(content, f"{name} of {self._folder}")

    def _check(self) -> None:
        _check_names(self._names, self._stored, self._folder)
        if self._weights_only:
            return
        training = self._unpacked("training")
        self.step, self._scheduler = training["step"], training.get("scheduler")
        kept = training["optimizer"]
        self._kept = Kept([Record(**record) for record in kept["records"]], kept["values"])
        self._states: list[tuple[Stateful, dict[str, Any]]] = []
        subject = self._subject
        self._optimizers = dict(subject.optimizers)
        if isinstance(subject.model, Executor) and not subject.optimizers:
            # A scheduler on a rank without parameters works on a stand-in.
            self._optimizers |= _stand_in(subject.model)
        if subject.optimizers and not self._kept.records:
            raise self._lacks("an optimizer")
        self._options = self._kept.options_for(self._optimizers, self._names.aliases)
        if subject.scheduler is not None:
            self._plan(subject.scheduler, "scheduler", "a scheduler")
            found, own = self._scheduler, type(subject.scheduler).__name__
            if found != own:
                raise ExecutionError(
                    f"the checkpoint in {self._folder} was saved with the scheduler {found}, but "
                    f"here that is {own}; make the same, or load_weights alone"
                )
        if subject.batches is not None:
            names = [f"batches.{subject.pipeline}", "batches.0"]
            self._plan(subject.batches, _first(names, self._stored), "batches")
        for name, one in subject.others.items():
            self._plan(one, f"others.{name}", name)
        pipeline, rank = subject.place
        names = [f"rng.{pipeline}.{rank}", f"rng.{pipeline}.0", "rng.0.0"]
        self._rng = self._unpacked(_first(names, self._stored))

    def _plan(self, one: Stateful, name: str, what: str) -> None:
        state = self._unpacked(name)
        if state is None:
            raise self._lacks(what)
        self._states.append((one, state))

    def _lacks(self, what: str) -> ExecutionError:
        return ExecutionError(
            f"the checkpoint in {self._folder} was saved without {what}; leave that out here, or "
            "load_weights alone"
        )

    def _take_all(self) -> None:
        try:
            self._take_modules()
            if not self._weights_only:
                self._take_rest()
        except Exception as error:
            raise ExecutionError(
                f"{self._folder} could be loaded in part only, {describe(error)}; load a whole "
                "checkpoint before you go on",
                cause=error,
            ) from error

    def _take_modules(self) -> None:
        for held in self._subject.held:
            state = held.state()
            targets = {
                held.key(name): value if isinstance(value, Tensor) else self._empty(held.key(name))
                for name, value in state.items()
            }
            self._stored.read_into(targets)
            for name, value in state.items():
                target = targets[held.key(name)]
                state[name] = target if isinstance(value, Tensor) else unpacked(target, name)
            held.take(state)
            for parameter in held.module.parameters():
                parameter.grad = None  # of other weights, as a step that failed leaves them

    def _take_rest(self) -> None:
        aliases = self._names.aliases
        tensors = state_tensors(self._stored, self._optimizers, aliases)
        for states in tensors.values():
            self._stored.read_into(dict(states.values()))
        give(self._optimizers, aliases, self._options, tensors, self._kept)
        for one, state in self._states:
            one.load_state_dict(state)
        if self._rng is not None:
            set_rng_state(self._rng, self._subject.device)

    def _empty(self, name: str) -> Tensor:
        return self._stored.empty(name)


def _first(names: Iterable[str], stored: Stored) -> str:
    """The first of some names that there is, else the last one."""
    name = ""
    for name in names:
        if name in stored.sizes:
            break
    return name


def _stand_in(model: Executor) -> dict[str, Optimizer]:
    return {"this rank": model.optimizer} if "optimizer" in vars(model) else {}


def _check_names(names: Names, stored: Stored, folder: Path) -> None:
    """Raise ExecutionError where the checkpoint is of another model."""
    saved = {
        name: tuple(size)
        for name, size in stored.sizes.items()
        if name.startswith(("model.", f"{LOSS}."))
    }
    wanted = names.sizes
    missing = [name for name in wanted if name not in saved]
    unexpected = [name for name in saved if name not in wanted]
    unlike = [
        f"{_shown(name)} is {list(saved[name])} there and {list(size)} here"
        for name, size in wanted.items()
        if size is not None and name in saved and saved[name] != size
    ]
    findings = []
    if missing:
        findings.append(f"it lacks {_some(map(_shown, missing))}")
    if unexpected:
        findings.append(f"it has {_some(map(_shown, unexpected))}, which the model has not")
    if unlike:
        findings.append(_some(unlike))
    if findings:
        loss = any(name.startswith(f"{LOSS}.") for name in unexpected)
        hint = "; its loss has parameters: pass loss_fn=" if loss else ""
        raise ExecutionError(
            f"the checkpoint in {folder} is of another model: {'; '.join(findings)}{hint}"
        )


def _shown(name: str) -> str:
    return name.removeprefix("model.")


def _some(texts: Iterable[str]) -> str:
    found = list(texts)
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more
