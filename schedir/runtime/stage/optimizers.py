"""The optimisers of this process's stages as one: what a learning-rate scheduler works on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from itertools import chain
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from schedir.errors import ExecutionError
from schedir.runtime.arguments import OptimizerFactory, optimizer_of

_MEMBERS = ("params", "param_names")
"""What a group holds of each of its parameters; all else holds for the group."""


class StageOptimizers(Optimizer):
    """A view of the optimisers of several stages: its i-th param group is the i-th of each.

    So the number of groups, and what a scheduler keeps of them, don't depend on the cut. What is
    read of a group is the same in all; what is written goes to all. The stages step by the
    schedule's OPTIM_STEPs, never through this.

    Raises ExecutionError where the optimisers have unlike numbers of groups.
    """

    _opt_called = True  # else schedulers complain that nobody calls `step` before theirs

    def __init__(self, optimizers: Mapping[int, Optimizer]) -> None:
        self._optimizers = dict(optimizers)
        (first, one), *others = optimizers.items()
        for stage, other in others:
            if len(other.param_groups) != len(one.param_groups):
                raise ExecutionError(
                    f"the optimizer of stage {first} has {len(one.param_groups)} param groups, "
                    f"that of stage {stage} {len(other.param_groups)}; make as many for every "
                    "stage, though one may be empty, or use executor.optimizers[stage]"
                )
        # Without parameters to begin with, as one that is unpickled: those of the stages count.
        super().__setstate__({"defaults": dict(getattr(one, "defaults", {}))})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """One group for all stages' groups of the same number; those who read it want a dict's
        methods alone."""
        # Looked up anew, since an optimiser that loads its state makes new groups.
        groups = zip(*(one.param_groups for one in self._optimizers.values()), strict=True)
        return [cast(dict[str, Any], _Group(self._optimizers, held)) for held in groups]

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """What the optimisers keep of each parameter, at present."""
        return dict(chain.from_iterable(one.state.items() for one in self._optimizers.values()))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what `load_state_dict` has found to fit: to each stage its own."""
        for number, optimizer in enumerate(self._optimizers.values()):
            own = [
                {**new, **{name: old[name] for name in _MEMBERS if name in old}}
                for new, old in zip(state["param_groups"], optimizer.param_groups, strict=True)
            ]
            held = {parameter for group in own for parameter in group["params"]}
            kept = {key: value for key, value in state["state"].items() if key in held}
            if number == 0:  # what is of no parameter
                kept |= {k: v for k, v in state["state"].items() if not isinstance(k, Tensor)}
            optimizer.state.clear()
            optimizer.state.update(kept)
            optimizer.__setstate__({"state": optimizer.state, "param_groups": own})

    def step(self, closure: Callable[[], float] | None = None) -> NoReturn:
        """Refused: the schedule's OPTIM_STEPs step."""
        raise ExecutionError(
            "executor.step steps the stages' optimizers, by the schedule's OPTIM_STEPs; leave out "
            "optimizer.step(), and accumulate with executor.step(…, update=False)"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Refused: a parameter is of one stage."""
        raise ExecutionError(
            "a parameter is of one stage: add its group to executor.optimizers[stage], and as many "
            "groups to those of the other stages"
        )

    def register_step_pre_hook(self, hook: Any) -> NoReturn:
        """Refused: nobody calls `step` here."""
        raise ExecutionError(
            "each stage steps by its own optimizer: register the hook with each of "
            "executor.optimizers.values()"
        )

    register_step_post_hook = register_step_pre_hook


class _Group(MutableMapping[str, Any]):
    """The param groups of one number, of each stage's optimiser."""

    def __init__(
        self, optimizers: Mapping[int, Optimizer], groups: Sequence[dict[str, Any]]
    ) -> None:
        self._stages, self._groups = tuple(optimizers), groups

    def __getitem__(self, key: str) -> Any:
        values = [group[key] for group in self._groups]
        if key in _MEMBERS:
            return [*chain.from_iterable(values)]
        for stage, value in zip(self._stages, values, strict=True):
            if not _same(values[0], value):
                raise ExecutionError(
                    f"{key} is {values[0]} in the optimizer of stage {self._stages[0]}, {value} in "
                    f"that of stage {stage}; give all stages the same in this param group, or use "
                    "executor.optimizers[stage]"
                )
        if isinstance(values[0], Tensor):  # it may be filled in place, for all
            for group in self._groups:
                group[key] = values[0]
        return values[0]

    def __setitem__(self, key: str, value: Any) -> None:
        if key in _MEMBERS:
            raise ExecutionError(
                f"{key} of a group are of several stages; set those of executor.optimizers[stage]"
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

    Where no stage here has parameters, `make` makes one of an empty stand-in for those of `stage`:
    a scheduler runs on every rank. Raises ExecutionError where there is no optimiser, or they don't
    go together.
    """
    if make is None:
        raise ExecutionError(
            "this executor has no optimizer, as the caller steps: give your own one to the "
            "scheduler, or make the Executor with optimizer="
        )
    if optimizers:
        return StageOptimizers(optimizers)
    try:
        made = optimizer_of(make, [("", nn.Parameter(torch.empty(0)))], stage)
        alone = cast(Optimizer, made)
    except Exception as error:
        raise ExecutionError(
            "no stage of this rank has parameters, and optimizer can't make one of an empty "
            f"parameter in their place, which a scheduler needs: {type(error).__name__}: {error}",
            cause=error,
        ) from error
    for group in alone.param_groups:
        group["params"] = []
    return StageOptimizers({0: alone})
