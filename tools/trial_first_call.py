"""Trains stages that keep extra state, and compares with plain training bit for bit.

    python tools/trial_first_call.py                 # in one process, then on 2 and on 4
    python tools/trial_first_call.py --processes 1   # only in one process

Every built-in schedule with one copy of each stage is tried. A pipeline must run the stages' code
exactly as often as its list says, on real values: another run would change any state that a module
keeps outside its tensors.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from in_processes import run_in_processes
from torch import Tensor, nn
from torch.func import functional_call

import schedir
from schedir import Action, Kind, Schedule
from schedir.library import built_in as generators
from schedir.runtime import Executor

WIDTH, STEPS, MICROBATCHES = 4, 3, 8

_Weights: TypeAlias = dict[str, nn.Parameter]


class State:
    """A plain object, which no module knows of."""

    def __init__(self) -> None:
        self.count = 0
        self.scale = torch.ones(())
        self.cache: dict[tuple[int, ...], Tensor] = {}
        self.chance = random.Random(0)


class Stateful(nn.Module):
    """A layer whose output is multiplied by what its state makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.state = State()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) * self.factor(x)

    def factor(self, x: Tensor) -> Tensor | float:
        raise NotImplementedError


class RunningScale(Stateful):
    """A running scale, kept in a plain object."""

    def factor(self, x: Tensor) -> Tensor | float:
        self.state.scale = 0.9 * self.state.scale + 0.1 * x.detach().abs().mean()
        return self.state.scale


class WarmUp(Stateful):
    """A counter of forwards."""

    def factor(self, x: Tensor) -> Tensor | float:
        self.state.count += 1
        return min(1.0, self.state.count / 10)


class Draws(Stateful):
    """Draws from a generator of Python's."""

    def factor(self, x: Tensor) -> Tensor | float:
        return 1.0 + self.state.chance.random()


class _OwnGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter) -> Tensor:
        ctx.weight = weight
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        own = grads[0].sum(0)
        ctx.weight.grad = own if ctx.weight.grad is None else ctx.weight.grad + own
        return grads[0], None


class AddsToGrad(Stateful):
    """An autograd function that adds to a parameter's gradient itself."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _OwnGrad.apply(torch.tanh(self.layer(x)), self.shift)  # type: ignore[no-untyped-call]
        return y + self.shift.detach()


class Branches(Stateful):
    """Branches on data."""

    def factor(self, x: Tensor) -> Tensor | float:
        if torch.isnan(x).any():
            raise ValueError("not a number")
        return 2.0 if x.sum() > 0 else 1.0


class Caches(Stateful):
    """Keeps a table by shape, made of the first input of that shape."""

    def factor(self, x: Tensor) -> Tensor | float:
        return self.state.cache.setdefault(tuple(x.shape), x.detach().abs().mean() + 1)


class HiddenBuffer(Stateful):
    """A buffer that is in no state_dict, and is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(WIDTH), persistent=False)
        self.mean: Tensor

    def factor(self, x: Tensor) -> Tensor | float:
        self.mean.mul_(0.5).add_(x.detach().mean(0))
        return self.mean.clone()


class Hooked(Stateful):
    """A hook that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer.register_forward_hook(self._count)

    def _count(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.state.count += 1

    def factor(self, x: Tensor) -> Tensor | float:
        return 1.0 + self.state.count / 100


KINDS = (
    RunningScale,
    WarmUp,
    Draws,
    AddsToGrad,
    Branches,
    Caches,
    HiddenBuffer,
    Hooked,
)


def built_in(ranks: int) -> Iterator[Schedule]:
    """The built-in schedules of that many ranks with one copy of each stage and one OPTIM_STEP a
    stage, and the asynchronous ones."""
    for generator in generators():
        for chunks in (None, 2):
            try:
                options = {} if chunks is None else {"chunks": chunks}
                schedule = schedir.build(
                    generator.name, ranks=ranks, microbatches=MICROBATCHES, **options
                )
            except schedir.SchedirError:
                continue
            if all(len(held) == 1 for held in schedule.placement):
                yield schedule
                break


def make_stages(kind: type[Stateful], number: int) -> list[nn.Module]:
    """The stages of a model, of one kind."""
    torch.manual_seed(0)
    return [kind() for _ in range(number)]


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Inputs and target of a step; the last microbatch is smaller."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, 2 * MICROBATCHES - 1, WIDTH, generator=generator)
    return x, y


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """The mean squared error."""
    return nn.functional.mse_loss(output, target)


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    """One with a state of its own."""
    return torch.optim.AdamW(parameters, lr=0.05)


class Reference:
    """Runs a schedule's lists in one process by what its actions mean, without schedir's runtime.

    A rank runs as far as its inputs are there. Gradients are taken at the weights that the forward
    has read; each rank adds up its own, and REDUCE_GRAD adds up those of the ranks.
    """

    def __init__(self, schedule: Schedule, stages: Sequence[nn.Module]) -> None:
        self.schedule, self.stages = schedule, stages
        self.steps = any(a.kind is Kind.OPTIM_STEP for own in schedule.flat for a in own)
        self.optimizers = [optimizer(stage.parameters()) for stage in stages]

    def step(self, x: Tensor, y: Tensor) -> float:
        """One call; returns the mean loss over the samples."""
        number = self.schedule.microbatches
        xs, ys = x.tensor_split(number), y.tensor_split(number)
        counts = [len(part) for part in ys]
        self._shares = _shares(self.schedule, counts)
        self._targets, self._losses = ys, dict[int, float]()
        self._inputs = {(0, m): part for m, part in enumerate(xs)}
        self._outputs: dict[tuple[int, int], Tensor] = {}
        self._grads: dict[tuple[int, int], Tensor] = {}
        self._read: dict[tuple[int, int], _Weights] = {}
        self._newest: list[_Weights] = [dict(stage.named_parameters()) for stage in self.stages]
        self._versions = [[_copied(own)] for own in self._newest]
        self._sums: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._reduced: dict[int, list[int]] = {}
        self._stepped: dict[int, list[int]] = {}
        lists = [list(own) for own in self.schedule.flat]
        while any(lists):
            before = sum(map(len, lists))
            for rank, own in enumerate(lists):
                while own and self._run(rank, own[0]):
                    own.pop(0)
            if sum(map(len, lists)) == before:
                raise RuntimeError("the lists block each other")
        for stage, weights in enumerate(self._newest):
            if not self.steps:
                held = self.schedule.placement[stage]
                self._apply(weights, [self._sums.get((stage, rank), {}) for rank in held])
        return sum(n * self._losses[m] for m, n in enumerate(counts)) / sum(counts)

    def _run(self, rank: int, action: Action) -> bool:
        """Carry out an action; False where what it needs is not there yet."""
        s, m = action.stage, action.microbatch or 0
        if action.kind is Kind.FORWARD:
            if (s, m) not in self._inputs:
                return False
            self._forward(s, m, action.version)
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            if (s, m) not in self._grads:
                return False
            self._outputs[s, m].backward(self._grads[s, m])
            grad = self._inputs[s, m].grad
            if s and grad is not None:
                self._grads[s - 1, m] = grad
        if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            own = self._sums.setdefault((s, rank), {})
            for name, leaf in self._read[s, m].items():
                if leaf.grad is not None:
                    own[name] = own[name] + leaf.grad if name in own else leaf.grad
        elif action.kind is Kind.REDUCE_GRAD:
            self._reduced.setdefault(s, []).append(rank)
        elif action.kind is Kind.OPTIM_STEP:
            return self._step(s, rank)
        return True

    def _forward(self, s: int, m: int, version: int | None) -> None:
        given = self._inputs[s, m].detach().requires_grad_(s > 0)
        self._inputs[s, m] = given
        # Leaves of its own for every microbatch, so that an update changes none.
        leaves = self._read[s, m] = _copied(self._versions[s][-1 if version is None else version])
        made = functional_call(self.stages[s], {**leaves}, (given.clone(),))
        if s + 1 < len(self.stages):
            self._outputs[s, m], self._inputs[s + 1, m] = made, made.detach()
        else:
            loss = self._outputs[s, m] = loss_fn(made, self._targets[m])
            self._losses[m] = loss.item()
            self._grads[s, m] = torch.tensor(self._shares[m])

    def _step(self, s: int, rank: int) -> bool:
        """One update for all ranks of a stage, once their gradients have been summed."""
        held = self.schedule.placement[s]
        if len(held) > 1 and len(self._reduced.get(s, ())) % len(held):
            return False
        stepped = self._stepped.setdefault(s, [])
        if not len(stepped) % len(held):
            self._apply(self._newest[s], [self._sums.pop((s, r), {}) for r in held])
            self.optimizers[s].step()
            self.optimizers[s].zero_grad()
            self._versions[s].append(_copied(self._newest[s]))
        stepped.append(rank)
        return True

    def _apply(self, weights: _Weights, parts: Sequence[Mapping[str, Tensor]]) -> None:
        """Put the sum of the ranks' gradients where an optimizer finds it."""
        for name, parameter in weights.items():
            for part in (part[name] for part in parts if name in part):
                parameter.grad = part if parameter.grad is None else parameter.grad + part


def _copied(parameters: _Weights) -> _Weights:
    return {name: nn.Parameter(p.detach().clone()) for name, p in parameters.items()}


def _shares(schedule: Schedule, counts: Sequence[int]) -> dict[int, float]:
    """The share of each microbatch in the samples of the loss stage's update that it goes into."""
    last = schedule.stages - 1
    groups: dict[int, list[int]] = {}
    for rank in schedule.placement[last]:
        step = 0
        for action in schedule.flat[rank]:
            if action.stage == last and action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                groups.setdefault(step, []).append(action.microbatch or 0)
            step += action.stage == last and action.kind is Kind.OPTIM_STEP
    totals = {step: sum(counts[m] for m in group) for step, group in groups.items()}
    return {m: counts[m] / totals[step] for step, group in groups.items() for m in group}


def differences(kind: type[Stateful], schedule: Schedule, rank: int | None) -> list[str]:
    """What differs between the executor and the reference; `rank` is None in one process."""
    stages = make_stages(kind, schedule.stages)
    twins = copy.deepcopy(stages)
    here = range(schedule.stages) if rank is None else schedule.stages_of(rank)
    reference = Reference(schedule, twins)
    found = []
    with Executor(
        schedule,
        {s: stages[s] for s in here},
        loss_fn,
        optimizer,
        in_process=rank is None,
        timeout=60,
    ) as executor:
        for step in range(STEPS):
            x, y = batch(step)
            loss, expected = executor.step(x, target=y).loss, reference.step(x, y)
            if loss != expected:
                found.append(f"loss of step {step}: {loss} for {expected}")
    for s in here:
        mine, theirs = stages[s], twins[s]
        names = [name for name, _ in (*mine.named_parameters(), *mine.named_buffers())]
        for name in names:
            if not torch.equal(_tensor(mine, name), _tensor(theirs, name)):
                found.append(f"stage {s}: {name}")
        if kind is not AddsToGrad and mine.state.count != theirs.state.count:  # type: ignore[union-attr]
            found.append(f"stage {s}: {mine.state.count} forwards")  # type: ignore[union-attr]
    return found


def _tensor(module: nn.Module, name: str) -> Tensor:
    return dict((*module.named_parameters(), *module.named_buffers()))[name]


def worker(ranks: Sequence[int], rank: int | None) -> int:
    """Try all kinds under all schedules of these numbers of ranks; how many are not equal."""
    failed = tried = 0
    for schedule in (schedule for number in ranks for schedule in built_in(number)):
        for kind in KINDS:
            found = differences(kind, schedule, rank)
            tried += 1
            failed += bool(found)
            if found:
                print(f"{schedule.name} on {schedule.ranks}, {kind.__name__}: {'; '.join(found)}")
    where = "one process" if rank is None else f"rank {rank} of {ranks[0]}"
    print(f"{where}: {tried - failed} of {tried} equal, bit for bit", flush=True)
    return failed


def main() -> int:
    """Try all; the exit status tells whether all are equal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)  # on processes of torchrun
    chosen = parser.parse_args()
    if chosen.ranks:
        return int(bool(worker([chosen.ranks], int(os.environ["RANK"]))))
    failed = worker([2, 4], None) if 1 in chosen.processes else 0
    for ranks in set(chosen.processes) - {1}:
        run_in_processes(ranks, Path(__file__), "--ranks", str(ranks), limit=600)
        print(f"{ranks} processes: all equal, bit for bit")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
