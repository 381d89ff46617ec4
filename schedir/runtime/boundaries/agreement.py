"""The ranks agree on every boundary: shapes down the pipeline, then where gradients flow back up.

    stage 0  ── shapes ──▶  stage 1  ── shapes ──▶  stage 2
             ◀── grads ───           ◀── grads ───

It happens at the first step of each new input shape. Only the first stage's rank sees the input;
the opening of each call says which of the agreements applies.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from schedir.errors import ExecutionError
from schedir.ir import Schedule
from schedir.runtime.batch.feeding import Feed
from schedir.runtime.batch.microbatches import Batch
from schedir.runtime.boundaries.boundary import (
    NOTHING,
    Boundary,
    Declared,
    Grads,
    boundary_of,
    declared,
    meta_of,
)
from schedir.runtime.boundaries.calls import Call, call_of
from schedir.runtime.boundaries.memory import NO_ALIASES, Aliases
from schedir.runtime.boundaries.shapes import FirstInput, Given, Trace, bounded_cache, tensors_of
from schedir.runtime.boundaries.wiring import Wiring
from schedir.runtime.processes.control import Control

logger = logging.getLogger("schedir")


Agreement: TypeAlias = Mapping[tuple[int, int], Wiring]
"""The wirings of the stages here, by stage and microbatch."""

# Beyond so many, the agreement that was used the longest ago is forgotten, on all ranks alike.
_MOST = 64


class Wirings:
    """The agreements of this process's ranks, by the number that the first stage's rank gives.

    `trained` are the parameters that somebody steps, None where the caller does. `replayed` are
    stages that run a forward again, or run on copies of their parameters.
    """

    def __init__(
        self,
        schedule: Schedule,
        here: Sequence[int],
        stages: Mapping[int, nn.Module],
        device: torch.device,
        loss_fn: Callable[..., Tensor] | None,
        boundaries: Mapping[int, Declared],
        control: Control,
        trains: bool,
        trained: Collection[Tensor] | None,
        replayed: Collection[int],
    ) -> None:
        self._last = schedule.stages - 1
        # Of the ranks that hold a stage the first speaks for all.
        self._holders = schedule.placement
        self._here = frozenset(here)
        self._stages = stages
        self._device = device
        self._loss_fn = loss_fn
        self._boundaries = boundaries
        self._control = control
        self._trains = trains
        self._trained = trained
        self._replayed = replayed
        self._made = 0
        self._numbers: dict[object, int] = {}
        self._agreed: OrderedDict[int, Agreement] = OrderedDict()
        self._signature: object = None

    def number(self, feed: Feed, inputs: Batch | None, autocast: torch.dtype | None) -> int | None:
        """The number of the agreement that a call's microbatches fall under.

        A new one if there is none yet; None where the first stage is not here, so that the inputs
        are not seen. `inputs` is what the microbatches were cut from, `autocast` the active one's
        type.
        """
        if 0 not in self._stages:
            return None
        shapes: object
        if isinstance(inputs, Tensor) and not feed.extras:  # which says it for all of its pieces
            shapes = (inputs.shape, inputs.stride(), inputs.dtype, inputs.requires_grad)
        else:
            shapes = tuple(_signatures(feed))
        self._signature = (shapes, autocast)
        return self._numbers.get(self._signature, self._made)

    def agree(self, number: int, feed: Feed) -> tuple[Agreement, list[int]]:
        """The agreement of that number, made now by all ranks together if it is new.

        Every rank calls it, with the number that the call's opening gives. Beside it come the
        numbers of the agreements that are forgotten for it.
        """
        if number == self._made:
            with bounded_cache():
                self._agreed[number] = self._agree(feed)
            self._made += 1
            if 0 in self._stages:
                self._numbers[self._signature] = number
        self._agreed.move_to_end(number)
        forgotten = list(self._agreed)[: max(0, len(self._agreed) - _MOST)]
        for old in forgotten:
            del self._agreed[old]
        self._numbers = {key: n for key, n in self._numbers.items() if n not in forgotten}
        return self._agreed[number], forgotten

    def _agree(self, feed: Feed) -> Agreement:
        # Microbatches of one shape are of one kind, and wired alike.
        kinds: list[int] = []
        local: dict[int, Any] = {}
        found: dict[int, list[_Half]] = {}
        for stage in sorted(self._stages):
            inputs: Sequence[Given]
            shared: Sequence[Aliases]
            if stage == 0:
                signatures = list(_signatures(feed))
                distinct = list(dict.fromkeys(signatures))
                kinds = [distinct.index(signature) for signature in signatures]
                inputs = [FirstInput(feed.inputs[signatures.index(kind)]) for kind in distinct]
                shared = [NO_ALIASES] * len(inputs)
            else:
                kinds, come = self._take(local, stage, stage - 1)
                inputs, shared = zip(*come, strict=True)
            beside = [feed.extra(stage, kinds.index(kind)) for kind in range(len(inputs))]
            found[stage] = [
                self._trace(stage, given, extra, aliases)
                for given, extra, aliases in zip(inputs, beside, shared, strict=True)
            ]
            if stage < self._last:
                message = (kinds, [(half.after, half.aliases) for half in found[stage]])
                self._pass(local, stage, stage + 1, message)
        # Without training no gradient flows back up.
        for stage in sorted(self._stages, reverse=True) if self._trains else ():
            halves = found[stage]
            if stage == self._last:
                for kind, half in enumerate(halves):
                    m = kinds.index(kind)
                    keywords = feed.loss_keywords[m] if feed.loss_keywords else {}
                    target = feed.targets[m] if feed.targets else None
                    half.end(self._loss_fn, target, keywords, self._trained)
            else:
                for half, grads_in in zip(halves, self._take(local, stage, stage + 1), strict=True):
                    half.flow(grads_in)
            if stage > 0:
                self._pass(local, stage, stage - 1, [half.grads_out for half in halves])
        wirings = {stage: [half.wiring() for half in halves] for stage, halves in found.items()}
        return {
            (stage, m): halves[kind]
            for stage, halves in wirings.items()
            for m, kind in enumerate(kinds)
        }

    def _trace(self, stage: int, given: Given, extra: Any, aliases: Aliases) -> _Half:
        module = self._stages[stage]
        call = call_of(module, given.tree, extra)
        if stage in self._boundaries:
            trained = self._trains and _requires_grad(module, given)
            return _Half(given, call, declared(self._boundaries[stage], trained), None, aliases)
        try:
            trace = Trace(module, self._device, given, call, extra, self._trains)
        except Exception as error:
            if stage == self._last:
                # Nothing behind it needs the shape.
                return _Half(given, call, NOTHING, None, aliases)
            raise ExecutionError(
                f"stage {stage} fails on fake tensors, which is how shapes are found "
                f"({type(error).__name__}: {error}); if it is right, and its output's shape "
                f"depends on data, declare that with boundaries={{{stage}: torch.empty(...)}}",
                rank=self._holders[stage][0],
                cause=error,
            ) from error
        if trace.mutates_parameters and stage in self._replayed:
            raise ExecutionError(
                f"stage {stage} changes a parameter of its own in place in its forward, which is "
                "run again (recompute=), or on copies of older weight versions; make it a buffer",
                rank=self._holders[stage][0],
            )
        changed = [number for number, mutated in enumerate(trace.mutates) if mutated]
        reason = aliases.forbid(changed)
        if reason is not None:
            raise ExecutionError(f"stage {stage}: {reason}", rank=self._holders[stage][0])
        after = NOTHING if stage == self._last else boundary_of(trace.output)
        return _Half(given, call, after, trace, aliases)

    def _pass(self, local: dict[int, Any], stage: int, to: int, message: object) -> None:
        if self._holders[stage][0] not in self._here:
            return
        local[to] = message
        for rank in self._holders[to]:
            if rank not in self._here:
                self._control.send(message, rank)

    def _take(self, local: dict[int, Any], stage: int, source: int) -> Any:
        speaker = self._holders[source][0]
        if speaker in self._here:
            return local.pop(stage)
        return self._control.receive(speaker)


class _Half:
    """A stage's wiring for one kind of microbatch, while its gradients are not yet known.

    Without a trace only the run can tell which gradients flow, and everything is taken to be
    changed in place, or kept. `before` says what the inputs are aliases of.
    """

    def __init__(
        self,
        given: Given,
        call: Call,
        after: Boundary,
        trace: Trace | None,
        before: Aliases,
    ) -> None:
        self._before = given if isinstance(given, Boundary) else NOTHING
        self._call = call
        # The first stage's microbatch counts as a whole: it has no boundary to count by.
        self._inputs = len(given.metas) if isinstance(given, Boundary) else 1
        self._trace = trace
        self._aliases = before
        self.after = after
        # Of outputs that nobody has traced the run takes care: none may share memory.
        self.aliases = NO_ALIASES if trace is None else trace.sharing.behind(before)
        self.grads_in: Grads | None = ()
        self.grads_out: Grads | None = None

    def end(
        self,
        loss_fn: Callable[..., Tensor] | None,
        target: Any,
        keywords: Mapping[str, Any],
        trained: Collection[Tensor] | None,
    ) -> None:
        """This is the last stage: its gradients come from the loss."""
        trace = self._trace
        if trace is None or loss_fn is None:
            return

        def gradients() -> Grads:
            loss = trace.loss(loss_fn, target, keywords)
            if trained is not None:
                _warn_of_strangers(loss, trained)
            return trace.gradients([(loss, meta_of(loss))])

        self._resolve(gradients)

    def flow(self, grads_in: Grads | None) -> None:
        """The next stage has said for which outputs it sends a gradient, if it can tell."""
        self.grads_in = grads_in
        trace = self._trace
        if trace is not None and grads_in is not None:
            arriving = [
                (output, meta)
                for output, meta in zip(tensors_of(trace.output), grads_in, strict=True)
                if meta is not None
            ]
            self._resolve(lambda: trace.gradients(arriving))

    def _resolve(self, gradients: Callable[[], Grads]) -> None:
        # A loss may look at data, and so may a backward of the user's own; reentrant checkpointing
        # can't be asked for some gradients alone. All of these run, but no fake can follow them.
        with suppress(Exception):
            self.grads_out = gradients()

    def wiring(self) -> Wiring:
        """The wiring, once the gradients are known."""
        trace = self._trace
        agreed = (self._before, self.after, self.grads_in, self.grads_out, self._call)
        if trace is None:
            return Wiring(
                *agreed,
                mutates=(True,) * self._inputs,
                mutates_extra=True,
                mutates_target=True,
                copied=frozenset(range(len(self.after.metas))),
                watched=self._aliases,
                state=None,
            )
        return Wiring(
            *agreed,
            mutates=trace.mutates,
            mutates_extra=trace.mutates_extra,
            mutates_target=trace.mutates_target,
            copied=trace.sharing.changeable,
            state=tuple(trace.state()),
        )


def _warn_of_strangers(loss: Tensor, trained: Collection[Tensor]) -> None:
    """Say which parameters the loss depends on that no optimizer of this executor steps."""
    known = set(map(id, trained))
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
                "give the module that holds it as loss_fn, and it is trained with the last stage",
                str(leaf.dtype).removeprefix("torch."),
                list(leaf.shape),
            )
        nodes += [child for child, _ in node.next_functions]


def _signatures(feed: Feed) -> Iterator[object]:
    """What the wiring of each microbatch depends on, as far as the first stage's rank can see."""
    for m, batch in enumerate(feed.inputs):
        leaves, spec = pytree.tree_flatten(batch)
        beside = [
            (stage, *pytree.tree_flatten(feed.extras[stage][m])) for stage in sorted(feed.extras)
        ]
        yield (
            tuple(meta_of(leaf) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves),
            spec,
            tuple(
                (stage, structure, *(meta_of(x) for x in given if isinstance(x, Tensor)))
                for stage, given, structure in beside
            ),
        )


def _requires_grad(module: nn.Module, given: Given) -> bool:
    """Whether what the module makes of it can require grad."""
    tensors = [
        *module.parameters(),
        *(tensors_of(given.batch) if isinstance(given, FirstInput) else given.metas),
    ]
    return any(tensor.requires_grad for tensor in tensors)
