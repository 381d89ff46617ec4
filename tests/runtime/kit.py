"""What the tests of the runtime share: optimisers, stages, batches, and twins.

Twins are the stages that an executor trains, and a copy of them that is trained in one process, by
the loop that everybody writes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from reference import Loss, Optimizer, accumulation, plain_step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import schedir
from schedir.runtime import Executor
from tests.literals import listed

# Both ranks send before they receive: no order of all communication lets them meet.
CROSSING = listed(
    2,
    "0 1",
    "0F0 0SEND_ACT0 0F1 0SEND_ACT1 0RECV_GRAD0 0B0 0RECV_GRAD1 0B1 0OPTIM_STEP",
    "1RECV_ACT0 1F0 1B0 1SEND_GRAD0 1RECV_ACT1 1F1 1B1 1SEND_GRAD1 1OPTIM_STEP",
)

MSE = nn.functional.mse_loss

Batch: TypeAlias = tuple[Any, Any]
"""Inputs and target."""


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """With a decay that shows wherever a gradient of zeros stands for none. It updates parameters
    one by one: together torch refuses plain tensors beside DTensors."""
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.3, foreach=False)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


class ScaledLoss(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return MSE(output * self.scale, target)


class Calls(nn.Module):
    """A stage that calls a function with its layers, and with what it is given."""

    def __init__(self, function: Callable[..., Any], *layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, *given: Any, **named: Any) -> Any:
        return self.function(*self.layers, *given, **named)


class Checkpointed(nn.Sequential):
    """Runs itself again, in whatever backward it is in."""

    use_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(super().forward, x, use_reentrant=self.use_reentrant)
        return made


class SometimesCheckpointed(Checkpointed):
    """Runs itself again where the first number of its input is positive."""

    def forward(self, x: Tensor) -> Tensor:
        plain: Callable[[Tensor], Tensor] = super(Checkpointed, self).forward
        return super().forward(x) if x.flatten()[0] > 0 else plain(x)


def linear_stages(number: int = 2, width: int = 4) -> list[nn.Module]:
    torch.manual_seed(5)
    return [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(number)]


def noisy_stages(number: int) -> list[nn.Module]:
    """With dropout, which draws the same only where it is seeded alike."""
    torch.manual_seed(5)
    return [
        nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.LayerNorm(4), nn.Tanh())
        for _ in range(number)
    ]


def numbered(stages: Iterable[nn.Module]) -> dict[int, nn.Module]:
    """As an executor takes them."""
    return dict(enumerate(stages))


def random_batch(rows: int = 8, seed: int = 0, width: int = 4) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, rows, width, generator=torch.Generator().manual_seed(seed))
    return x, y


def random_batches(steps: int, rows: int = 8, width: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randn(rows, width, generator=generator) for _ in range(2 * steps)]
    return list(zip(drawn[::2], drawn[1::2], strict=True))


def split(x: Any, number: int) -> list[Any]:
    """The microbatches of a tensor, or of a tuple of tensors."""
    if isinstance(x, tuple):
        return list(zip(*(torch.tensor_split(t, number) for t in x), strict=True))
    return list(torch.tensor_split(x, number))


def microbatches_of(batch: Batch, number: int) -> list[Batch]:
    x, y = batch
    return list(zip(split(x, number), split(y, number), strict=True))


def gradients(modules: Iterable[nn.Module]) -> list[Tensor | None]:
    return [p.grad for module in modules for p in module.parameters()]


def differing(mine: nn.Module, theirs: nn.Module) -> list[str]:
    """The names of the parameters and buffers that are not the same, bit for bit."""
    other = theirs.state_dict()
    state = mine.state_dict()
    assert state.keys() == other.keys()
    return [name for name, value in state.items() if not torch.equal(value, other[name])]


def assert_equal_stages(mine: Mapping[int, nn.Module], theirs: Sequence[nn.Module]) -> None:
    """The stages here are those of the whole model, bit for bit."""
    assert {s: differing(module, theirs[s]) for s, module in mine.items()} == {s: [] for s in mine}


def assert_equal_gradients(mine: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> None:
    """Bit for bit, and absent where the other is."""
    pairs = list(zip(mine, theirs, strict=True))
    assert [a is None for a, _ in pairs] == [b is None for _, b in pairs]
    assert all(torch.equal(a, b) for a, b in pairs if a is not None and b is not None)


class Twins:
    """A model's stages here, and the whole model, which is trained in this process.

    `rank` is the one whose stages are here; None: all of them.
    """

    def __init__(
        self,
        whole: Sequence[nn.Module],
        schedule: schedir.Schedule,
        rank: int | None = None,
        optimizer: Optimizer = adamw,
    ) -> None:
        self.whole, self.schedule = list(whole), schedule
        here = range(schedule.stages) if rank is None else schedule.stages_of(rank)
        self.local = {s: copy.deepcopy(self.whole[s]) for s in here}
        self.in_process = rank is None
        self.optimizer = optimizer
        # Torch refuses an optimiser of nothing.
        self.optimizers = [optimizer([*m.parameters()] or [torch.zeros(1)]) for m in whole]

    def executor(self, loss_fn: Any = MSE, **options: Any) -> Executor:
        """Of the stages here."""
        given = {"optimizer": self.optimizer, "in_process": self.in_process, **options}
        return Executor(self.schedule, self.local, loss_fn, **given)

    def step(self, batch: Batch, loss_fn: Loss = MSE, **options: Any) -> float:
        """Train the whole model on a batch; its loss. `options` are those of `plain_step`."""
        pieces = microbatches_of(batch, self.schedule.microbatches)
        return plain_step(self.whole, loss_fn, self.optimizers, pieces, **options)

    def accumulate(self, batch: Batch, **options: Any) -> float:
        """The same, but leave the gradients; the loss."""
        pieces = microbatches_of(batch, self.schedule.microbatches)
        return plain_step(self.whole, MSE, (), pieces, **options)

    def update(self) -> None:
        """Apply the gradients that the whole model has."""
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def assert_equal(self) -> None:
        """The stages here have become what those of the whole model have, bit for bit."""
        assert_equal_stages(self.local, self.whole)

    def assert_equal_gradients(self) -> None:
        """And their gradients those that the whole model has."""
        theirs = gradients(self.whole[s] for s in self.local)
        assert_equal_gradients(gradients(self.local.values()), theirs)


def train_on_rank(
    rank: int,
    whole: Sequence[nn.Module],
    batches: Sequence[Batch],
    *,
    microbatches: int = 4,
    target: Any = "1f1b",
    loss_fn: Any = MSE,
    order: Sequence[int] | None = None,
    seeded: bool = False,
    **options: Any,
) -> None:
    """Train this rank's stages and the whole model on the same batches; they stay the same.

    `order` is that of the microbatches' backwards; `options` are the executor's.
    """
    schedule = target
    if not isinstance(target, schedir.Schedule):
        schedule = schedir.build(target, ranks=2, microbatches=microbatches)
    twins = Twins(whole, schedule, rank)
    recurrence = accumulation(len(whole), order or range(schedule.microbatches))
    with twins.executor(loss_fn, **options) as executor:
        for step, (x, y) in enumerate(batches):
            found = executor.step(x, target=y).loss
            seed = (0, step) if seeded else None
            assert found == twins.step((x, y), loss_fn, recurrence=recurrence, seed=seed)
    twins.assert_equal()


def everyone(value: Any) -> list[Any]:
    """What each rank has, on every rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def refused(match: str) -> pytest.RaisesExc[schedir.ExecutionError]:
    """Expect an ExecutionError that says so."""
    return pytest.raises(schedir.ExecutionError, match=match)


def message_of(call: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """What an ExecutionError says; empty where there is none."""
    try:
        call(*arguments, **options)
    except schedir.ExecutionError as error:
        return str(error)
    return ""
