"""Save a training; load it with any cut, number of ranks and schedule, or into a plain model.

1f1b on 2 ranks ──save─┐     model.3.weight                      ┌─load──► pipedream on 3
a plain model   ──save─┴──►  optimizer.state.3.weight.exp_avg ───┴─load──► a plain model
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from schedir.errors import ExecutionError
from schedir.ir import is_number
from schedir.runtime import Executor
from schedir.runtime.accelerator import accelerator_of
from schedir.runtime.arguments import whole_name
from schedir.runtime.processes.failure import describe
from schedir.training.checkpoint.optimizer_state import (
    Kept,
    kept_of,
    loads_of,
)
from schedir.training.checkpoint.saving import Save, Saving, Snapshot
from schedir.training.checkpoint.storage import Stored, is_complete, packed
from schedir.training.collective import Gather, alone, everywhere
from schedir.training.whole_names import LOSS, Held, Names, held_by, names_of

_SHOWN = 5


class Checkpoint:
    """Saves in a folder everything that a training needs to continue as if it had never stopped.

    >>> from tempfile import TemporaryDirectory
    >>> import torch
    >>> from torch import nn
    >>> from schedir.training import Checkpoint
    >>> model = nn.Linear(4, 1)
    >>> with TemporaryDirectory() as folder:
    ...     Checkpoint(model).save(folder)
    ...     like = nn.Linear(4, 1)
    ...     _ = Checkpoint(like).load(folder)
    >>> torch.equal(like.weight, model.weight)
    True

    - `model`: an executor, or a plain model that one process trains without an executor.
    - `optimizer` and `loss_fn`: those of a plain model. Pass `loss_fn` if it is a module with
      parameters; the optimiser trains them too. An executor knows both; pass `optimizer` for an
      executor only if you step yourself.
    - `options`: with `"torch"` each parameter's options are saved under torch's names too, for
      torch.distributed.checkpoint to load.
    - `scheduler`, `batches` and `others` (a mapping by name): objects with `state_dict` and
      `load_state_dict`, which are saved too.

    What one saves any other loads: with another cut, schedule or number of ranks, or as a plain
    model. The stages must use the whole model's names for their parameters and buffers, as the
    stages of `partition` and `stages_of` do.

    A checkpoint has the weights and buffers; the optimisers' state and param groups, by the
    parameters' names; the state of an executor's scaler; the number of the next step; and the
    generators of torch, the device, Python and numpy. A resumed training equals one that was never
    interrupted, bit for bit, if its executor has the same `seed` and adds gradients in the same
    order. With dropout the model must be cut at the same places. Gradients are not saved: save
    after a step that updates. Loading drops the gradients that are there.

    If several processes hold the same data, as replicas do, the first one writes it. Of a DTensor,
    of a sharded stage say, each process writes and reads its part, so a training that is resumed
    may have another mesh. A tied
    parameter is saved under all its names, and its optimiser state under the first. The states of
    `scheduler` and `others` are the first process's, those of `batches` each pipeline's on its
    first stage. Generators are saved for every process. If a training is resumed on more processes,
    the new ones start with the generators of their pipeline's first process.

    The files are in the format of torch.distributed.checkpoint, and its tools read them. All
    processes must see the folder. Loading runs no code from the files. `.metadata` has the SHA-256
    of each file, and a file that has changed is refused.

    Raises ExecutionError for an object without a state to save.
    """

    def __init__(
        self,
        model: Executor | nn.Module,
        optimizer: Optimizer | None = None,
        *,
        scheduler: Stateful | None = None,
        batches: Stateful | None = None,
        others: Mapping[str, Stateful] | None = None,
        loss_fn: object = None,
        options: Literal["torch"] | None = None,
    ) -> None:
        named = dict(others or {})
        if options not in (None, "torch"):
            raise ExecutionError(f'options must be None or "torch", not {options!r}')
        self._model, self._scheduler, self._options = model, scheduler, options
        self._counter: Any = model if isinstance(model, Executor) else SimpleNamespace(steps=0)
        self._saving: Saving | None = None
        if isinstance(model, Executor):
            if model.scaler is not None and "scaler" in named:
                raise ExecutionError("others: 'scaler' is the executor's scaler; use another name")
            if model.scaler is not None:
                named["scaler"] = model.scaler
            self._optimizers = {f"stage {at}": one for at, one in model.optimizers.items()}
            for what, given in (
                ("loss_fn", loss_fn),
                ("optimizer", self._optimizers and optimizer),
            ):
                if given:
                    raise ExecutionError(f"the executor has its {what} already; leave out {what}=")
            if optimizer is not None:
                self._optimizers = {"this process": optimizer}
            self._gather: Gather = model.gather
            self._device, feeds = model.device, 0 in model.stages and model.slice == 0
            self._place = f"{model.pipeline}.{model.rank}" + f".{model.slice}" * (model.slice > 0)
        elif isinstance(model, nn.Module):
            self._optimizers = {} if optimizer is None else {"the model": optimizer}
            self._gather, self._place, feeds = alone, "0.0", True
            self._device = next((one.device for one in model.parameters()), torch.device("cpu"))
            if any(isinstance(tensor, DTensor) for tensor in model.state_dict().values()):
                raise ExecutionError(
                    "each process has only a part of this model: make the Checkpoint of an "
                    "executor, or save model.state_dict() by torch.distributed.checkpoint"
                )
        else:
            raise ExecutionError(
                "a checkpoint saves an Executor or a model, an nn.Module, not "
                f"{type(model).__name__}"
            )
        self._held = held_by(model, loss_fn)
        self._snapshot = Snapshot(self._device)
        pipeline, rank, *_ = self._place.split(".")
        is_first = self._place == "0.0"
        processes = self._place, f"{pipeline}.{rank}", f"{pipeline}.0", "0.0"
        rng = [f"rng.{process}" for process in processes]
        # What has a state: its name in messages, where it is saved or found else, and whether
        # this process saves it.
        self._stateful: list[tuple[Stateful | None, str, list[str], bool]] = [
            (scheduler, "a scheduler", ["scheduler"], is_first),
            (batches, "batches", [f"batches.{pipeline}", "batches.0"], feeds),
            *((one, name, [f"others.{name}"], is_first) for name, one in named.items()),
            (_Generators(self._device), "the generators", rng, True),
        ]
        for one, what, *_ in self._stateful:
            if one is not None and not hasattr(one, "load_state_dict"):
                raise ExecutionError(
                    f"{what} must have state_dict and load_state_dict, which {type(one).__name__} "
                    "has not"
                )

    @property
    def step(self) -> int:
        """The number of the next step, which seeds its forwards: `executor.steps`. For a plain
        model you count it."""
        steps: int = self._counter.steps
        return steps

    @step.setter
    def step(self, number: int) -> None:
        if not is_number(number):
            raise ExecutionError(f"step must be an int of at least 0, not {number!r}")
        self._counter.steps = number

    @staticmethod
    def is_at(path: str | os.PathLike[str]) -> bool:
        """Whether the folder has a complete checkpoint. `load` finds out whether it is damaged."""
        return is_complete(Path(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save to a folder, which is made if needed. Every rank calls it, between two steps.

        A new folder appears once it is complete; until then it is `.NAME.saving`, beside it. In a
        folder that exists the checkpoint is replaced at once, at the very end. If the save is
        interrupted, the folder has the old checkpoint or the new one.

        Raises ExecutionError on all ranks if any rank fails, and keeps the old checkpoint. Some
        reasons: one name stands for different tensors in two stages, a state can't be saved,
        gradients of `step(…, update=False)` wait for an update, or the folder can't be made. An
        earlier `async_save` that has failed is another.
        """
        Save(Path(path), self._collected(), self._gather, self.step).complete()

    def async_save(
        self, path: str | os.PathLike[str], *, then: Callable[[], object] | None = None
    ) -> Saving:
        """Save as `save` does, but write the files while the training goes on.

        Every rank calls it, between two steps. It copies the state to host memory, which is kept
        for the next copy, and returns. A thread writes the copy. At the end one rename makes the
        checkpoint valid, and `then()` is called in that thread, on the first process only. `wait`
        of the result waits for all that; so does the next save or load of this Checkpoint. Call one
        of them before the executor is closed, to know of an error.

        Raises ExecutionError as `save` does, here or from `wait`.
        """
        state = self._collected()
        everywhere(self._gather, lambda: state.update(self._snapshot.copy(state)))
        save = Save(Path(path), state, self._gather, self.step)
        self._saving = Saving(save, self._snapshot, then)
        return self._saving

    def _collected(self) -> dict[str, Any]:
        """The nested dict that this process writes; after the save that is under way."""
        self._wait()
        accelerator_of(self._device).synchronize()
        names = names_of(self._model, self._held, partial(self._gather, what="save"))
        state: dict[str, Any] = {}
        parts = everywhere(self._gather, lambda: self._put(state, names))
        groups = {number for numbers, _ in parts for number in numbers}

        def complete() -> None:
            if self._scheduler is not None and len(groups) > 1:
                raise ExecutionError(
                    f"the stages' optimizers have {' and '.join(map(str, sorted(groups)))} param "
                    "groups, so a scheduler's state would depend on the cut; give every stage the "
                    "same number of groups (a group may be empty)"
                )
            if self._place == "0.0":
                records = [record for _, kept in parts for record in kept["records"]]
                values = {k: v for _, kept in parts for k, v in kept["values"].items() if v}
                beside = {
                    "step": self.step,
                    "optimizer": Kept(records=records, values=values),
                    "scheduler": type(self._scheduler).__name__,
                }
                state["training"] = packed(beside, "the optimizer's state")

        everywhere(self._gather, complete)
        return state

    def _wait(self) -> None:
        if self._saving is not None:
            self._saving.wait()

    def load(self, path: str | os.PathLike[str], strict: bool = True) -> IncompatibleKeys:
        """Load from a folder, in place. Every rank calls it, and reads only what it needs.

        First the ranks share out the files, and compare each file with its hash. State in the
        checkpoint that nothing here takes is ignored, such as an optimiser's if there is none.

        With `strict=False` the model may have parameters and buffers that the checkpoint lacks,
        such as those of adapters, which keep their values, and the other way round. What does not
        fit is returned, by the names of the whole model.

        Raises ExecutionError on all ranks, and changes nothing, if there is no complete checkpoint;
        if a file is missing, damaged, from another checkpoint or without a hash; if the checkpoint
        is of another model (the message names what is missing, unexpected or of another shape), of
        another optimiser or of other param groups; or if it lacks a state that is to be loaded.
        """
        stored, unlike = self._load(Path(path), strict, weights_only=False)
        self.step = stored.training["step"]
        return unlike

    def load_weights(self, path: str | os.PathLike[str], strict: bool = True) -> IncompatibleKeys:
        """Load only the parameters and buffers, to evaluate or to begin another training.

        `strict`, what is returned and the errors are those of `load`.
        """
        return self._load(Path(path), strict, weights_only=True)[1]

    def _put(self, state: dict[str, Any], names: Names) -> tuple[set[int], Kept]:
        """Put what this process writes into `state`, but for what the optimisers have beside their
        tensors, which is returned with the numbers of their param groups."""
        if isinstance(self._model, Executor):
            _check_updated(self._model)
        for held in self._held:
            for name, value in held.state().items():
                if held.saves or isinstance(value, DTensor):
                    content = value if isinstance(value, Tensor) else packed(value, name)
                    state.setdefault(held.section, {})[name] = content
        saved = {p for held in self._held if held.saves for _, p in held.parameters()}
        tensors, kept = kept_of(self._optimizers, names.aliases, saved)
        packed(kept, "the optimizer's state")  # else it would fail on its way
        state["optimizer"] = {"state": tensors}
        if self._options == "torch":
            each = ((name, one["options"]) for one in kept["records"] for name in one["names"])
            state["optimizer"]["param_groups"] = dict(each)
        for one, what, (key, *_), saves in self._stateful:
            if one is not None and saves:
                section, _, name = key.partition(".")
                content = packed(one.state_dict(), f"the state of {what}")
                state[section] = {**state.get(section, {}), name: content} if name else content
        return {len(one.param_groups) for one in self._optimizers.values()}, kept

    def _load(
        self, folder: Path, strict: bool, weights_only: bool
    ) -> tuple[Stored, IncompatibleKeys]:
        self._wait()
        stored: Stored

        def opened() -> tuple[str, bytes]:
            nonlocal stored
            stored = Stored(folder)
            return self._place, stored.mark

        marks = dict(everywhere(partial(self._gather, what="load"), opened))
        for process, mark in enumerate(marks.values()):
            if mark != next(iter(marks.values())):
                raise ExecutionError(
                    f"the checkpoint in {folder} is another one for process {process} than for "
                    "process 0: use a folder that all ranks see"
                )
        number = list(marks).index(self._place)
        everywhere(self._gather, lambda: stored.check(number, len(marks)))
        names = names_of(self._model, self._held, self._gather)
        loads: list[Callable[[], object]] = []

        def fits() -> IncompatibleKeys:
            unlike = _check_model(names, stored, strict)
            loads.extend(partial(_load_module, held, stored) for held in self._held)
            if not weights_only:
                loads.extend(self._loads(stored, names, unlike.missing_keys))
            return unlike

        def load() -> None:
            try:
                for one in loads:
                    one()
            except Exception as error:
                raise ExecutionError(
                    f"{folder} was loaded in part only, {describe(error)}; the weights are mixed "
                    "now: load a whole checkpoint before you go on",
                    cause=error,
                ) from error

        unlike = everywhere(self._gather, fits)[0]
        everywhere(self._gather, load)
        return stored, unlike

    def _loads(
        self, stored: Stored, names: Names, lacking: Collection[str]
    ) -> Iterator[Callable[[], object]]:
        """Yield functions that load what is beside the model, but for the parameters that the
        checkpoint is `lacking`. Raises ExecutionError if something does not fit."""

        def lacks(what: str) -> ExecutionError:
            return ExecutionError(
                f"the checkpoint in {stored.folder} was saved without {what}; leave that out here, "
                "or load only the weights, with load_weights"
            )

        kept, optimizers = stored.training["optimizer"], dict(self._optimizers)
        if optimizers and not kept["records"]:
            raise lacks("an optimizer")
        model = self._model
        if isinstance(model, Executor) and not optimizers and "optimizer" in vars(model):
            # A scheduler on a rank without parameters works on a stand-in.
            optimizers["this rank"] = model.optimizer
        yield from loads_of(stored, kept, optimizers, names.aliases, lacking)
        for one, what, keys, _ in self._stateful:
            if one is None:
                continue
            state = stored.value(*keys)
            if state is None:
                raise lacks(what)
            found, own = stored.training.get("scheduler"), type(one).__name__
            if one is self._scheduler and found != own:
                raise ExecutionError(
                    f"the checkpoint in {stored.folder} was saved with the scheduler {found}, but "
                    f"here that is {own}; make the same one, or load only the weights, with "
                    "load_weights"
                )
            yield partial(one.load_state_dict, state)


class IncompatibleKeys(NamedTuple):
    """What does not fit between a model and a checkpoint, by names in the whole model: what the
    checkpoint lacks, and what the model lacks. torch's `load_state_dict` returns the same."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class Stateful(Protocol):
    """An object with a state: a learning-rate scheduler, `Batches`, or another loader."""

    def state_dict(self) -> dict[str, Any]:
        """The state: tensors, numbers, strings, and lists, tuples and dicts of them."""

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Restore a state."""


def _check_updated(executor: Executor) -> None:
    """Raise ExecutionError if gradients wait for an update; an OPTIM_STEP drops those that it has
    applied."""
    for stage, optimizer in executor.optimizers.items():
        for group in optimizer.param_groups:
            if any(parameter.grad is not None for parameter in group["params"]):
                raise ExecutionError(
                    f"gradients of stage {stage} wait for an update, and a checkpoint has no "
                    "gradients: save after a step with update=True"
                )


def _load_module(held: Held, stored: Stored) -> None:
    state = held.module.state_dict()
    keys = {name: held.key(whole_name(name)) for name in state}
    saved = {keys[name]: x for name, x in state.items() if keys[name] in stored.sizes}
    stored.read_into({key: x for key, x in saved.items() if isinstance(x, Tensor)})
    for name, key in keys.items():
        if key in saved:
            state[name] = saved[key] if isinstance(saved[key], Tensor) else stored.value(key)
    held.module.load_state_dict(state)
    held.module.zero_grad()  # of other weights: a step that failed leaves some


def _check_model(names: Names, stored: Stored, strict: bool) -> IncompatibleKeys:
    """The names that the checkpoint lacks, and those that the model lacks. Raises ExecutionError if
    tensors differ in shape, or, if it is `strict`, for any such name."""
    saved = {
        name: size for name, size in stored.sizes.items() if name.startswith(("model.", f"{LOSS}."))
    }
    wanted = names.sizes
    unlike = IncompatibleKeys(
        [name.removeprefix("model.") for name in wanted if name not in saved],
        [name.removeprefix("model.") for name in saved if name not in wanted],
    )
    shapes = [
        f"{name.removeprefix('model.')} is {list(saved[name])} there and {list(size)} here"
        for name, size in wanted.items()
        if size is not None and saved.get(name, size) != size
    ]
    findings = {
        "it lacks {}": unlike.missing_keys if strict else (),
        "it has {}, which the model has not": unlike.unexpected_keys if strict else (),
        "{}": shapes,
    }
    said = []
    for text, found in findings.items():
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        if found:
            said.append(text.format(", ".join(found[:_SHOWN]) + more))
    if said:
        loss = any(name.startswith(f"{LOSS}.") for name in unlike.unexpected_keys)
        hint = "; its loss has parameters: pass loss_fn=" if loss else ""
        raise ExecutionError(
            f"the checkpoint in {stored.folder} is of another model: {'; '.join(said)}{hint}"
        )
    return unlike


class _Generators:
    """The generators of torch, the device, Python and numpy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def state_dict(self) -> dict[str, Any]:
        numpy_state: dict[str, Any] = dict(np.random.get_state(legacy=False))
        key = numpy_state["state"].pop("key")
        numpy_state["key"] = torch.from_numpy(key.astype(np.int64))
        return {
            "torch": torch.get_rng_state(),
            "device": [one.get_state() for one in accelerator_of(self._device).generators()],
            "python": random.getstate(),
            "numpy": numpy_state,
        }

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Set all generators; the state of another kind of device is ignored."""
        torch.set_rng_state(state["torch"])
        generators = accelerator_of(self._device).generators()
        for one, found in zip(generators, state["device"], strict=False):
            one.set_state(found)
        random.setstate(state["python"])
        numpy_state = dict(state["numpy"])
        key = numpy_state.pop("key").numpy().astype(np.uint32)
        numpy_state["state"] = {**numpy_state["state"], "key": key}
        np.random.set_state(numpy_state)
