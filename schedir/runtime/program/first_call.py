"""The actions in the first call of an input signature, which learns what the later ones go by.

They are carried out as ever, on real values and as often as the list says. What travels comes with
its description (see `described`), and whatever may be changed in place is copied before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor, nn

from schedir.errors import ExecutionError
from schedir.runtime.arguments import Declared
from schedir.runtime.boundaries.boundary import boundary_of, declared
from schedir.runtime.boundaries.calling import convention_of
from schedir.runtime.boundaries.described import Message, Messenger
from schedir.runtime.boundaries.learned import Watched, held_by, tensors_of
from schedir.runtime.boundaries.memory import sharing
from schedir.runtime.call import Call
from schedir.runtime.program.compute import Backward, BackwardInput, Forward
from schedir.runtime.program.instruction import Operation
from schedir.runtime.stage.cells import Cell
from schedir.runtime.stage.stage import Stage, copy_of
from schedir.runtime.stage.weights import StageWeights
from schedir.runtime.transports.transport import Work

logger = logging.getLogger("schedir")


@attrs.frozen(eq=False)
class FirstCall:
    """What the first calls of signatures need: the messengers of the ranks here, the outputs that
    users have `declared`, by stage, and the parameters that the executor's optimizers step, None
    where the caller does."""

    messengers: Mapping[int, Messenger]
    declared: Mapping[int, Declared]
    stepped: Collection[Tensor] | None
    _warned: list[int] = attrs.field(factory=list)

    def warn_of_unstepped(self, loss: Tensor, weights: StageWeights) -> None:
        """Say, once, which parameters the loss depends on that no optimizer here steps; `weights`
        are those of its stage."""
        if self.stepped is None or self._warned:
            return
        self._warned.append(1)
        known = set(map(id, (*self.stepped, *weights.copies)))
        given = set(map(id, weights.newest))
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
                    "the loss depends on a parameter, %s%s, that no optimizer of this executor "
                    "steps; %s",
                    str(leaf.dtype).removeprefix("torch."),
                    list(leaf.shape),
                    "that of the last stage leaves it out: freeze it (requires_grad_(False)), or "
                    "make the optimizer of all the parameters that its function is given"
                    if id(leaf) in given
                    else "give the module that holds it as loss_fn, and it is trained with the "
                    "last stage",
                )
            nodes += [child for child, _ in node.next_functions]


class FirstForward(Forward):
    """FORWARD: runs the module, and learns what it returns and what it changes."""

    def __init__(
        self,
        stage: Stage,
        cell: Cell,
        version: int,
        last_read: bool,
        replayed: bool,
        first: FirstCall,
    ) -> None:
        super().__init__(stage, cell, version, last_read, replayed)
        self.first = first

    def _forward(self, call: Call) -> None:
        if not self.replayed:
            super()._forward(call)
            return
        # With a graph, which tells what its R will make requires grad; nobody keeps it.
        cell = self.cell
        with self.stage.statistics.keeping(True) as cell.statistics:
            self._once(call, with_graph=False, keep_input=True)
        cell.outputs_to_send = _detached(cell.outputs_to_send)
        if cell.following is not None:
            cell.following.inputs = _detached(cell.following.inputs)

    def _output(self, call: Call, keep_input: bool) -> Any:
        stage, cell, learned = self.stage, self.cell, self.cell.learned
        given, extra = stage.arguments(call, cell, keep_input)
        inputs, beside = Watched(tensors_of(given)), Watched(tensors_of(extra))
        own = Watched(stage.module.parameters())
        learned.convention = convention_of(stage.module, given, extra)
        output = learned.convention(stage.module, given, extra)
        changes = inputs.changed()
        learned.changes_inputs = tuple(changes) if stage.index else (any(changes),)
        learned.changes_extra = any(beside.changed())
        self._refuse(changes, any(own.changed()))
        passed, lent = inputs.tensors, beside.tensors
        if stage.index == 0:
            passed, lent = [], [*passed, *lent]
        found = sharing(tensors_of(output), passed, held_by([stage.module]), lent)
        learned.copied = found.changeable
        if stage.loss_fn is None:
            learned.aliases_after = found.aliases_after(learned.aliases)
            self._describe(output, [*passed, *lent])
        return output

    def _describe(self, output: Any, given: list[Tensor]) -> None:
        """What the stage hands on, made of what it was given."""
        stage, cell, learned = self.stage, self.cell, self.cell.learned
        learned.after = boundary_of(output)
        example = self.first.declared.get(stage.index)
        if example is not None:
            tensors = (*stage.module.parameters(), *given)
            trained = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
            learned.after = declared(example, trained)
        if cell.following is not None:
            cell.following.learned.comes(learned.after, learned.aliases_after)

    def _refuse(self, changes: list[bool], own: bool) -> None:
        """Raise ExecutionError for what the stage must not change in place."""
        stage = self.stage
        if own and (self.replayed or stage.weights.stashes):
            raise ExecutionError(
                f"stage {stage.index} changes a parameter of its own in place in its forward, "
                "which is run again (recompute=), or on copies of older weight versions; make it a "
                "buffer"
            )
        if stage.index:
            reason = self.cell.learned.aliases.forbid(n for n, there in enumerate(changes) if there)
            if reason is not None:
                raise ExecutionError(reason)

    def _loss(self, output: Any) -> Tensor:
        cell = self.cell
        target, keywords = copy_of(cell.target), copy_of(cell.loss_keywords)
        given = Watched(tensors_of((target, keywords)))
        loss = self.stage.loss_of(cell, output, target, keywords)
        cell.learned.changes_target = any(given.changed())
        self.first.warn_of_unstepped(loss, self.stage.weights)
        return loss


def _detached(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple([tensor.detach() for tensor in tensors])


class FirstBackward(Backward):
    """BACKWARD: learns which gradients of the inputs there are, and how they lie in memory."""

    def _hand_on(self, grads: tuple[Tensor | None, ...]) -> None:
        self.cell.learned.sends_back(grads)
        super()._hand_on(grads)


class FirstBackwardInput(BackwardInput):
    """BACKWARD_INPUT: the same."""

    def _hand_on(self, grads: tuple[Tensor | None, ...]) -> None:
        self.cell.computed_grads.clear()
        self.cell.learned.sends_back(grads)
        super()._hand_on(grads)


class Described(Operation):
    """One end of a transfer between a cell and a peer."""

    def __init__(self, cell: Cell, first: FirstCall, rank: int, peer: int) -> None:
        self.cell, self.first, self.peer = cell, first, peer
        self.messenger = first.messengers[rank]


class DescribeActivations(Described):
    """SEND_ACT: sends the cell's outputs with their description."""

    def run(self, call: Call) -> None:
        """Run the action."""
        cell, learned = self.cell, self.cell.learned
        message = Message(
            (learned.after, learned.aliases_after), learned.after.metas, cell.outputs_to_send
        )
        cell.outputs_to_send = ()
        key = "inputs", cell.stage + 1, cell.microbatch
        cell.output_sends += self.messenger.send(key, message, self.peer)


class DescribeGradients(Described):
    """SEND_GRAD: sends the gradients of the cell's inputs that there are, and says which."""

    def run(self, call: Call) -> None:
        """Run the action."""
        cell, learned = self.cell, self.cell.learned
        grads, cell.input_grads = cell.input_grads, ()
        # Across a declared boundary, and before it, which there are may always differ.
        learned.masked_out = learned.before.declared or cell.stage in self.first.declared
        message = Message(
            (learned.grads_out, learned.masked_out),
            [meta for meta in learned.grads_out if meta is not None],
            tuple([grad for grad in grads if grad is not None]),
        )
        key = "gradients", cell.stage - 1, cell.microbatch
        cell.grad_sends += self.messenger.send(key, message, self.peer)


@attrs.frozen(eq=False)
class _Coming:
    """A message that is taken when it is waited for."""

    messenger: Messenger
    key: tuple[str, int, int]
    peer: int
    put: Callable[[Message], None]

    def wait(self) -> bool:
        """Wait until it has come, and put it where it is used."""
        self.put(self.messenger.take(self.key, self.peer))
        return True

    def is_completed(self) -> bool:
        """Whether waiting for it would block nobody."""
        return self.messenger.has(self.key, self.peer)


class _Take(Described):
    """RECV_ACT or RECV_GRAD: posts nothing; the compute that consumes the message takes it."""

    what: ClassVar[str]

    def run(self, call: Call) -> None:
        """Run the action."""
        key = self.what, self.cell.stage, self.cell.microbatch
        self._works().append(_Coming(self.messenger, key, self.peer, self._put))

    def _works(self) -> list[Work]:
        raise NotImplementedError

    def _put(self, message: Message) -> None:
        raise NotImplementedError


class TakeActivations(_Take):
    """RECV_ACT: the cell's inputs."""

    what = "inputs"

    def _works(self) -> list[Work]:
        return self.cell.input_receives

    def _put(self, message: Message) -> None:
        self.cell.inputs = message.tensors
        self.cell.learned.comes(*message.beside)


class TakeGradients(_Take):
    """RECV_GRAD: the gradients of the cell's outputs."""

    what = "gradients"

    def _works(self) -> list[Work]:
        return self.cell.grad_receives

    def _put(self, message: Message) -> None:
        learned = self.cell.learned
        learned.grads_in, learned.masked_in = message.beside
        coming = iter(message.tensors)
        self.cell.output_grads = tuple(
            [None if meta is None else next(coming) for meta in learned.grads_in]
        )
