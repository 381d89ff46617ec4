"""The optimisers of this process's stages as one, for learning-rate schedulers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from itertools import chain
from typing import Any, NoReturn, cast

import attrs
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from schedir.errors import ExecutionError
from schedir.runtime.arguments import OptimizerFactory, optimizer_of

_MEMBERS = ("params", "param_names")
"""The entries of a group that have one value for each parameter; others have one for the group."""


def _refused(why: str) -> Any:
    """A method of an optimiser that has no meaning for several."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ExecutionError(why)

    return refuse


class StageOptimizers(Optimizer):
    """A view of the optimisers of several stages: its i-th param group stands for the i-th of each.

    So the number of groups, and a scheduler's state, don't depend on the cut. A value that is read
    must be equal in all groups; a value that is written goes to all. The schedule's OPTIM_STEPs
    step the stages, never this view.

    Raises ExecutionError if the optimisers have different numbers of groups.
    """

    _opt_called = True  # otherwise schedulers warn that `step` was not called before theirs

    def __init__(self, optimizers: Mapping[int, Optimizer]) -> None:
        self._optimizers = dict(optimizers)
        (first, one), *others = optimizers.items()
        for stage, other in others:
            if len(other.param_groups) != len(one.param_groups):
                raise ExecutionError(
                    f"the optimizer of stage {first} has {len(one.param_groups)} param groups, "
                    f"that of stage {stage} {len(other.param_groups)}; give every stage the same "
                    "number of groups (a group may be empty), or use executor.optimizers[stage]"
                )
        # Initialised as an unpickled optimiser is, without parameters: the stages have them.
        super().__setstate__({"defaults": dict(getattr(one, "defaults", {}))})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """One group for all stages' groups of the same number; it has the methods of a dict."""
        # Looked up each time, because an optimiser that loads its state makes new groups.
        stages = [*self._optimizers]
        groups = zip(*(one.param_groups for one in self._optimizers.values()), strict=True)
        return [cast(dict[str, Any], _Group(stages, held)) for held in groups]

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """The current state of each parameter in the optimisers."""
        return dict(chain.from_iterable(one.state.items() for one in self._optimizers.values()))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Give each stage its part of a state that `load_state_dict` has checked."""
        for number, optimizer in enumerate(self._optimizers.values()):
            groups = [
                new | {name: old[name] for name in _MEMBERS if name in old}
                for new, old in zip(state["param_groups"], optimizer.param_groups, strict=True)
            ]
            held = {parameter for group in groups for parameter in group["params"]}
            own = {
                key: value
                for key, value in state["state"].items()
                # What belongs to no parameter goes to the first.
                if key in held or not (number or isinstance(key, Tensor))
            }
            optimizer.__setstate__({"state": defaultdict(dict, own), "param_groups": groups})

    step = _refused(
        "executor.step steps the stages' optimizers, by the schedule's OPTIM_STEPs; leave out "
        "optimizer.step(), and accumulate with executor.step(…, update=False)"
    )
    add_param_group = _refused(
        "a parameter belongs to one stage: add its group to executor.optimizers[stage], and an "
        "empty group to the optimizers of the other stages"
    )
    register_step_pre_hook = register_step_post_hook = _refused(
        "each stage has its own optimizer: register the hook with each of "
        "executor.optimizers.values()"
    )


@attrs.frozen(eq=False, repr=False)
class _Group(MutableMapping[str, Any]):
    """The param groups of one number in the optimisers of some stages."""

    _stages: Sequence[int]
    _groups: Sequence[dict[str, Any]]

    def __getitem__(self, key: str) -> Any:
        values = [group[key] for group in self._groups]
        if key in _MEMBERS:
            return [*chain.from_iterable(values)]
        for stage, value in zip(self._stages, values, strict=True):
            if not _same(values[0], value):
                raise ExecutionError(
                    f"{key} is {values[0]} in the optimizer of stage {self._stages[0]}, {value} in "
                    f"that of stage {stage}; set one value for all stages in this param group, or "
                    "use executor.optimizers[stage]"
                )
        if isinstance(values[0], Tensor):  # it may be filled in place, for all
            for group in self._groups:
                group[key] = values[0]
        return values[0]

    def __setitem__(self, key: str, value: Any) -> None:
        if key in _MEMBERS:
            raise ExecutionError(
                f"{key} of a group belong to several stages; set them in executor.optimizers[stage]"
            )
        for group in self._groups:
            group[key] = value

    def __delitem__(self, key: str) -> None:
        for group in self._groups:
            del group[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups[0])

    def __len__(self) -> int:
        return len(self._groups[0])

    def __repr__(self) -> str:
        return repr(dict(self))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or torch.equal(one, other)
    return bool(one == other)


def as_one(
    optimizers: Mapping[int, Optimizer], make: OptimizerFactory | None, stage: int
) -> StageOptimizers:
    """The optimisers of this process's stages as one, for schedulers.

    If no stage here has parameters, `make` makes one of an empty parameter in place of those of
    `stage`, because a scheduler runs on every rank. Raises ExecutionError if there is no optimiser,
    or if the stages' optimisers don't fit together.
    """
    if make is None:
        raise ExecutionError(
            "this executor has no optimizer, because you step yourself: pass your own optimizer to "
            "the scheduler, or make the Executor with optimizer="
        )
    if optimizers:
        return StageOptimizers(optimizers)
    try:
        alone: Any = optimizer_of(make, [("", nn.Parameter(torch.empty(0)))], stage)
    except Exception as error:
        raise ExecutionError(
            "no stage of this rank has parameters, and optimizer= can't make one of an empty "
            "parameter in their place, which a scheduler needs: "
            f"{type(error).__name__}: {error}",
            cause=error,
        ) from error
    for group in alone.param_groups:
        group["params"] = []
    return StageOptimizers({0: alone})
