"""What a step keeps, in bytes, by stage: an observer of the first step of each input shape.

A forward leaves to its backward what autograd saves, which tells of it (`saved_tensors_hooks`), and
the stage's input. Memory that several tensors share counts once; that of weights, and of what the
user has given, does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from schedir.runtime.call import Call
from schedir.runtime.program.compute import Backward, BackwardInput, Compute, Forward
from schedir.runtime.program.instruction import Instruction
from schedir.runtime.program.update import OptimStep
from schedir.runtime.stage.cells import Cells
from schedir.runtime.stage.stage import Stage


@attrs.define(eq=False)
class Gauge:
    """Measures what the stages here keep, in bytes by stage, while a call is made.

    `boundary` is what one microbatch sends to the next stage, `input` what it needs to be run
    again, `activation` all that its forward leaves to its backward, with its input. `gradient` is
    what has been accumulated before an OPTIM_STEP, or when the call ends.
    """

    boundary: dict[int, int] = attrs.field(factory=dict)
    input: dict[int, int] = attrs.field(factory=dict)
    activation: dict[int, int] = attrs.field(factory=dict)
    gradient: dict[int, int] = attrs.field(factory=dict)
    finished: bool = False
    _seen: set[tuple[int, type[Compute]]] = attrs.field(factory=set)

    def __call__(self, instruction: Instruction) -> Instruction:
        """Observe an instruction."""
        operation, run = instruction.operation, instruction.run
        if isinstance(operation, OptimStep):
            return attrs.evolve(instruction, run=self._before_step(operation.stage, run))
        if isinstance(operation, (Forward, Backward, BackwardInput)):
            return attrs.evolve(instruction, run=self._weighed(operation, run))
        return instruction

    def _weighed(self, compute: Compute, run: Callable[[Call], None]) -> Callable[[Call], None]:
        """Around the first forward of a stage and its first backward, which may run it again: no
        microbatch has more rows."""
        stage, cell, key = compute.stage, compute.cell, (compute.stage.index, type(compute))

        def weighed(call: Call) -> None:
            if key in self._seen:
                run(call)
                return
            self._seen.add(key)
            inputs = _memory(cell.inputs)
            saved: dict[int, int] = {}

            def save(tensor: Tensor) -> Tensor:
                saved.update(_memory([tensor]))
                return tensor.detach()  # autograd would hold itself by the tensor

            with saved_tensors_hooks(save, _as_it_is):
                run(call)
            beside = (cell.batch, cell.extra, cell.target, cell.loss_keywords)
            others = _memory([*_held(stage.modules), *tree_leaves(beside)])
            kept = sum((saved | inputs)[m] for m in (saved | inputs).keys() - others)
            self.input[stage.index] = max(self.input.get(stage.index, 0), sum(inputs.values()))
            self.activation[stage.index] = max(self.activation.get(stage.index, 0), kept)

        return weighed

    def _before_step(self, stage: Stage, run: Callable[[Call], None]) -> Callable[[Call], None]:
        def weighed(call: Call) -> None:
            if call.request.updates:
                self._gradients_of(stage)
            run(call)

        return weighed

    def _gradients_of(self, stage: Stage) -> None:
        grads = (p.grad for p in stage.weights.newest)
        self.gradient.setdefault(stage.index, sum(_memory(grads).values()))

    def finish(self, stages: Mapping[int, Stage], cells: Cells) -> None:
        """The call has ended."""
        self.finished = True
        for stage in stages.values():
            self._gradients_of(stage)
        for cell in cells:
            sent = cell.wiring.after.nbytes
            self.boundary[cell.stage] = max(self.boundary.get(cell.stage, 0), sent)


def weight_bytes(stage: Stage) -> int:
    """Of the parameters and buffers of a stage."""
    return sum(_memory(_held(stage.modules)).values())


def optimizer_bytes(stage: Stage) -> int:
    """Of what the optimiser of a stage keeps from step to step."""
    states = [] if stage.optimizer is None else stage.optimizer.state.values()
    return sum(_memory(tree_leaves(list(states))).values())


def _held(modules: Iterable[nn.Module]) -> list[Tensor]:
    return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _memory(values: Iterable[Any]) -> dict[int, int]:
    """The memory of the tensors among these: its bytes, each piece of it once."""
    tensors = (value for value in values if isinstance(value, Tensor))
    storages = (
        part.untyped_storage()
        for tensor in tensors
        for part in (_dense_parts(tensor) if tensor.is_sparse else (tensor,))
    )
    return {storage._cdata: storage.nbytes() for storage in storages}


def _dense_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    return tensor._indices(), tensor._values()
