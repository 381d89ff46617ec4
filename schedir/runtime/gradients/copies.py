"""Copies of parameters that must stay equal: in replicas, in parallel pipelines, in ties.

All copies start equal, which their digests show, and get equal gradients. Only an action from
outside makes them differ: a checkpoint that is loaded into one of them, or another learning rate.
So after some of its steps each process puts the fingerprints of its copies, each in a place of its
own, into a sum over all that hold some. It reads the sum after the next step, when it has long
arrived; on a GPU, at the call after it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain

import attrs
import torch
from torch import Tensor, nn

from schedir.errors import ExecutionError
from schedir.runtime.plan import Plan
from schedir.runtime.processes.groups import Group, Groups
from schedir.runtime.session import digest
from schedir.runtime.sharded import local

_INTERVAL = 16  # steps, from the first on
_OF_A_PARAMETER = 64  # elements in its sample


@attrs.frozen(eq=False)
class Copies:
    """Copies that must be equal, `label` in messages.

    `holders` are the processes that hold one each, in one order on all of them, with the stage that
    it belongs to; `here` are the copies of this process, by their places in that.
    """

    label: str
    holders: Sequence[tuple[int, int]]
    here: Mapping[int, Sequence[nn.Parameter]]

    @property
    def dtypes(self) -> str:
        """The types of those here, in words."""
        return " and ".join(sorted({str(p.dtype) for own in self.here.values() for p in own}))

    def digest(self) -> tuple[int, ...]:
        """The digest of those here. Raises ExecutionError where they differ."""
        found: list[tuple[int, ...]] = []
        for place, own in self.here.items():
            found.append((*chain.from_iterable((digest(p), *p.shape) for p in own),))
            if found[-1] != found[0]:
                _, stage = self.holders[place]
                raise ExecutionError(
                    f"{self.label} differs in stage {stage}, in shape or values; load the same"
                )
        return found[0]


def copies_of_stages(plan: Plan) -> Iterator[Copies]:
    """The stages here of which other processes have all weights as well."""
    grid = plan.grid
    own = grid.processes[grid.pipeline][grid.rank]
    for stage in plan.local_stages:
        processes = grid.holders(plan.schedule.placement[stage])
        if len(processes) > 1 and stage not in plan.sharded:
            here = {processes.index(own): [*plan.trained[stage].parameters()]}
            holders = [(process, stage) for process in processes]
            yield Copies(_within_slice(plan, f"stage {stage}"), holders, here)


def copies_of_ties(plan: Plan) -> Iterator[Copies]:
    """The tied parameters with copies here, in this pipeline."""
    row = plan.grid.processes[plan.grid.pipeline]
    for tie, held in plan.tied:
        at = [(stage, rank) for stage, _ in tie for rank in plan.schedule.placement[stage]]
        here = {
            place: [held[stage]]
            for place, (stage, rank) in enumerate(at)
            if rank in plan.local_ranks
        }
        if here:
            names = " and ".join(f"{stage}:{name}" for stage, name in tie)
            label = f"the parameter tied as {names}"
            if tie[0][0] in plan.sharded:  # each pipeline has another part of it
                label += f" in pipeline {plan.grid.pipeline}"
            holders = [(row[rank], stage) for stage, rank in at]
            yield Copies(_within_slice(plan, label), holders, here)


def _within_slice(plan: Plan, copies: str) -> str:
    """What is equal within a slice of the mesh; other slices may have other parts of it."""
    return f"{copies} ({plan.grid.where})" if plan.grid.where else copies


class DriftCheck:
    """Compares copies after some of the steps."""

    def __init__(self, plan: Plan, groups: Groups, every: Iterable[Copies]) -> None:
        self._accelerator, self._number = plan.accelerator, plan.grid.everyone.index
        together: dict[tuple[int, ...], list[Copies]] = {}
        for copies in every:
            if any(copies.here.values()):  # else a stage without parameters
                processes = sorted({process for process, _ in copies.holders})
                together.setdefault(tuple(processes), []).append(copies)
        # In one order everywhere, as a group may be made.
        self._sums = [
            (groups.for_numbers(processes, plan.device), own)
            for processes, own in sorted(together.items())
        ]
        self._steps = 0
        self._pending: list[Callable[[], None]] = []

    def step(self) -> None:
        """A step is over. Raises ExecutionError where copies have come to differ."""
        self.compare()
        if self._steps % _INTERVAL == 0:
            for group, every in self._sums:
                self._sum(group, every)
        self._steps += 1

    def _sum(self, group: Group, every: Sequence[Copies]) -> None:
        """Begin to sum fingerprints, each in a place of its own."""
        step = self._steps
        nothing = torch.zeros((), dtype=torch.int64, device=self._accelerator.device)
        prints = [
            fingerprint(copies.here[place]) if place in copies.here else nothing
            for copies in every
            for place in range(len(copies.holders))
        ]
        summed = group.sum(torch.stack(prints), "the weights' fingerprints")

        def check(found: Tensor) -> None:
            read = iter(found.tolist())
            for copies in every:
                (one, value), *others = [(self._number(n), next(read)) for n, _ in copies.holders]
                for other, print_of_other in others:
                    if print_of_other != value:
                        where = f"between processes {one} and {other}"
                        if one == other:
                            where = f"on process {one}"
                        raise ExecutionError(
                            f"{copies.label} differs {where}, at the end of this executor's step "
                            f"{step}: one copy was loaded, frozen or stepped apart from the others "
                            "(with another learning rate, say); treat all alike, and go on from a "
                            "checkpoint"
                        )

        if self._accelerator.queues:
            self._accelerator.check_later(summed(), check)
        else:
            self._pending.append(lambda: check(summed()))

    def compare(self) -> None:
        """Compare what was summed last, if that has not been done."""
        pending, self._pending = self._pending, []
        for check in pending:
            check()

    def reset(self) -> None:
        """A call has failed: nobody answers any more."""
        self._pending = []


def fingerprint(parameters: Iterable[Tensor]) -> Tensor:
    """A sum of some bytes of some parameters, each times a number of its place: an integer, on
    their device."""
    samples = []
    for parameter in parameters:
        flat = local(parameter.detach()).reshape(-1)
        sample = flat[:: max(1, len(flat) // _OF_A_PARAMETER)].contiguous()
        samples.append(sample.view(torch.uint8).to(torch.int64))
    found = torch.cat(samples)
    return (found * _of_places(len(found), found.device)).sum()


@cache
def _of_places(size: int, device: torch.device) -> Tensor:
    """Random odd numbers, the same everywhere."""
    generator = torch.Generator("cpu").manual_seed(0)
    numbers = torch.randint(1 << 62, (size,), generator=generator, device="cpu")
    return (numbers * 2 + 1).to(device)
