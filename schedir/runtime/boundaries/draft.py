"""A stage's wiring while it is being agreed on: first its boundaries, then its gradients."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from schedir.errors import ExecutionError
from schedir.runtime.arguments import LossFunction
from schedir.runtime.boundaries.boundary import (
    NOTHING,
    Boundary,
    Grads,
    boundary_of,
    declared,
    meta_of,
)
from schedir.runtime.boundaries.fake_run import (
    FakeRun,
    FirstInput,
    Invocation,
    StageInput,
    tensors_of,
)
from schedir.runtime.boundaries.memory import NO_ALIASES, Aliases
from schedir.runtime.boundaries.wiring import EVERY, Wiring
from schedir.runtime.plan import Plan

logger = logging.getLogger("schedir")


class WiringDraft:
    """A stage's wiring for one kind of microbatch, while its gradients are not yet known.

    Without a fake run only the real one can tell which gradients flow, and everything is taken to
    be changed in place, or kept. `before` says what the inputs are aliases of.
    """

    def __init__(
        self, invocation: Invocation, after: Boundary, run: FakeRun | None, before: Aliases
    ) -> None:
        given = invocation.given
        self._before = given if isinstance(given, Boundary) else NOTHING
        self._convention = invocation.convention
        self._own = list(invocation.module.parameters())
        # The first stage's microbatch counts as a whole: it has no boundary to count by.
        self._inputs = len(given.metas) if isinstance(given, Boundary) else 1
        self._run = run
        self._aliases = before
        self.after = after
        # Without a fake run the real one takes care of the outputs: none may share memory.
        self.aliases = NO_ALIASES if run is None else run.sharing.aliases_after(before)
        self.grads_in: Grads | None = ()
        self.grads_out: Grads | None = None

    def end_in_loss(
        self,
        loss_fn: LossFunction | None,
        target: Any,
        keywords: Mapping[str, Any],
        stepped: Collection[Tensor] | None,
    ) -> None:
        """This is the last stage: its gradients come from the loss.

        `stepped` are the parameters that the executor's optimisers step, None where the caller
        does.
        """
        run = self._run
        if run is None or loss_fn is None:
            return

        def gradients() -> Grads:
            loss = run.loss(loss_fn, target, keywords)
            if stepped is not None:
                _warn_of_unstepped(loss, stepped, self._own)
            return run.gradients([(loss, meta_of(loss))])

        self._settle(gradients)

    def end_in_next(self, grads_in: Grads | None) -> None:
        """The next stage has said for which outputs it sends a gradient, if it can tell."""
        self.grads_in = grads_in
        run = self._run
        if run is not None and grads_in is not None:
            arriving = [
                (output, meta)
                for output, meta in zip(tensors_of(run.output), grads_in, strict=True)
                if meta is not None
            ]
            self._settle(lambda: run.gradients(arriving))

    def _settle(self, gradients: Callable[[], Grads]) -> None:
        # A loss may look at data, and so may a backward of the user's own; reentrant checkpointing
        # can't be asked for some gradients alone. All of these run, but no fake can follow them.
        with suppress(Exception):
            self.grads_out = gradients()

    def wiring(self) -> Wiring:
        """The wiring, once the gradients are known."""
        run = self._run
        agreed = (self._before, self.after, self.grads_in, self.grads_out, self._convention)
        if run is None:
            return Wiring(
                *agreed,
                mutates=(True,) * self._inputs,
                mutates_extra=True,
                mutates_target=True,
                copied=EVERY,
                watched=self._aliases,
                state=None,
            )
        return Wiring(
            *agreed,
            mutates=run.mutates,
            mutates_extra=run.mutates_extra,
            mutates_target=run.mutates_target,
            copied=run.sharing.changeable,
            state=tuple(run.state()),
        )


class Drafter:
    """Drafts the wirings of the stages here, by running each on fake tensors.

    `replayed` are the stages that run a forward again, or run on copies of their parameters.
    """

    def __init__(self, plan: Plan, trains: bool, replayed: Collection[int]) -> None:
        self.trains = trains
        self._plan, self._replayed = plan, replayed

    def draft(self, stage: int, given: StageInput, extra: Any, aliases: Aliases) -> WiringDraft:
        """A stage's wiring for one input and what it is given beside that.

        Raises ExecutionError where the stage can't be run so, or not with others.
        """
        plan = self._plan
        module = plan.arguments.stages[stage]
        invocation = Invocation(module, given, extra)
        examples = plan.arguments.boundaries or {}
        if stage in examples:
            trained = self.trains and _requires_grad(module, given)
            after = declared(examples[stage], trained)
            return WiringDraft(invocation, after, None, aliases)
        try:
            run = FakeRun(invocation, plan.device, self.trains)
        except Exception as error:
            if stage == plan.last_stage:
                # Nothing after it needs the shape.
                return WiringDraft(invocation, NOTHING, None, aliases)
            raise ExecutionError(
                f"stage {stage} fails on fake tensors, which is how shapes are found "
                f"({type(error).__name__}: {error}); if it is right, and its output's shape "
                f"depends on data, declare that with boundaries={{{stage}: torch.empty(...)}}",
                rank=plan.schedule.placement[stage][0],
                cause=error,
            ) from error
        self._refuse(stage, run, aliases)
        after = NOTHING if stage == plan.last_stage else boundary_of(run.output)
        return WiringDraft(invocation, after, run, aliases)

    def _refuse(self, stage: int, run: FakeRun, aliases: Aliases) -> None:
        """Raise ExecutionError for what a stage must not change in place."""
        rank = self._plan.schedule.placement[stage][0]
        if run.mutates_parameters and stage in self._replayed:
            raise ExecutionError(
                f"stage {stage} changes a parameter of its own in place in its forward, which is "
                "run again (recompute=), or on copies of older weight versions; make it a buffer",
                rank=rank,
            )
        changed = [number for number, mutated in enumerate(run.mutates) if mutated]
        reason = aliases.forbid(changed)
        if reason is not None:
            raise ExecutionError(f"stage {stage}: {reason}", rank=rank)


def _warn_of_unstepped(loss: Tensor, stepped: Collection[Tensor], own: Iterable[Tensor]) -> None:
    """Say which parameters the loss depends on that no optimizer of this executor steps; `own` are
    those that the last stage's was given."""
    known, given = set(map(id, stepped)), set(map(id, own))
    seen = set()
    nodes = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and id(leaf) not in known:
            logger.warning(
                "the loss depends on a parameter, %s%s, that no optimizer of this executor steps; "
                "%s",
                str(leaf.dtype).removeprefix("torch."),
                list(leaf.shape),
                "that of the last stage leaves it out: freeze it (requires_grad_(False)), or make "
                "the optimizer of all the parameters that its function is given"
                if id(leaf) in given
                else "give the module that holds it as loss_fn, and it is trained with the last "
                "stage",
            )
        nodes += [child for child, _ in node.next_functions]


def _requires_grad(module: nn.Module, given: StageInput) -> bool:
    """Whether what the module makes of it can require grad."""
    tensors = [
        *module.parameters(),
        *(tensors_of(given.batch) if isinstance(given, FirstInput) else given.metas),
    ]
    return any(tensor.requires_grad for tensor in tensors)
