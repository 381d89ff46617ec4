"""Stages whose gradients, inputs, outputs and state share memory, and what plain training makes of
them. Each takes and returns a pair: rows that are trained, and a tensor beside them that is not.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import schedir
from schedir import Action
from schedir.runtime import Executor

ROWS, SIDE, WIDTH = 2, 3, 4  # of one microbatch: [ROWS, SIDE, WIDTH]
Pair = tuple[Tensor, Tensor]


class Part(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.pos = nn.Parameter(torch.randn(ROWS, SIDE, WIDTH))
        self.also = nn.Parameter(torch.randn(ROWS, SIDE, WIDTH))
        self.register_buffer("mean", torch.zeros(SIDE))
        self.mean: Tensor
        self.hidden = torch.zeros(SIDE)
        self.kept: Tensor | None = None
        self.log: list[Tensor] = []

    def forward(self, x: Tensor, b: Tensor) -> Pair:
        return self.run(self, x, b)


Run = Callable[[Part, Tensor, Tensor], Pair]


def small(x: Tensor) -> Tensor:
    return x.detach().mean((0, 2))


def summed(part: Part, x: Tensor, b: Tensor) -> Pair:
    """Autograd gives the input and a parameter views of one gradient."""
    return (x.flatten(0, 1) + part.pos.flatten(0, 1)).view_as(x), b


def sum_of_two(part: Part, x: Tensor, b: Tensor) -> Pair:
    """And two parameters, too."""
    flat = x.flatten(0, 1) + part.pos.flatten(0, 1)
    return part.linear(flat + part.also.flatten(0, 1)).view_as(x), b


def tied(part: Part, x: Tensor, b: Tensor) -> Pair:
    """A parameter used twice, and summed with the input."""
    y = (x.flatten(0, 1) + part.pos.flatten(0, 1)).view_as(x)
    return part.linear(torch.tanh(part.linear(y))) + part.pos, b


def view(part: Part, x: Tensor, b: Tensor) -> Pair:
    return part.linear(x).transpose(0, 1).contiguous().transpose(0, 1), b


def passes(part: Part, x: Tensor, b: Tensor) -> Pair:
    return x, b


def buffer(part: Part, x: Tensor, b: Tensor) -> Pair:
    """Returns a buffer that its next forward changes."""
    part.mean.mul_(0.5).add_(small(x))
    return torch.tanh(part.linear(x) + part.mean[:, None]), part.mean


def hidden(part: Part, x: Tensor, b: Tensor) -> Pair:
    """State that is no buffer: bound anew at each forward."""
    part.hidden = part.hidden * 0.5 + small(x)
    part.log.append(part.hidden)
    return torch.tanh(part.linear(x) * part.hidden[:, None]), sum(part.log[-2:]) + b


def hidden_in_place(part: Part, x: Tensor, b: Tensor) -> Pair:
    """The same, changed in place, and returned as a view."""
    part.hidden.mul_(0.5).add_(small(x) + b)
    return torch.tanh(part.linear(x) * part.hidden[:, None]), part.hidden.view(-1)


def keeps(part: Part, x: Tensor, b: Tensor) -> Pair:
    """Changes what it has returned before."""
    if part.kept is not None:
        with torch.no_grad():
            part.kept.mul_(0.5)
    y = part.linear(x)
    part.kept = y.detach()
    return y, b + small(y)


def in_place(part: Part, x: Tensor, b: Tensor) -> Pair:
    return part.linear(x.mul_(2.0).relu_()), b


def side_in_place(part: Part, x: Tensor, b: Tensor) -> Pair:
    return part.linear(x) + b.add_(1.0)[:, None], b


def both(part: Part, x: Tensor, b: Tensor) -> Pair:
    """Two tensors of one memory."""
    y = part.linear(x)
    return y, y.detach()[0, :, 0]


def weight(part: Part, x: Tensor, b: Tensor) -> Pair:
    """A view of a parameter, and the parameter's very gradient."""
    return x * 0.1 + part.pos, part.linear.weight.detach()[:SIDE, 0]


RUNS: list[Run] = [summed, sum_of_two, tied, view, passes, buffer, hidden, hidden_in_place, keeps]
RUNS += [in_place, side_in_place, both, weight]


class Several(nn.Module):
    """Parts one after the other, within one stage."""

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor, b: Tensor) -> Pair:
        for part in self.parts:
            x, b = part(x, b)
        return x, b


class Positions(nn.Module):
    """Adds a parameter to its input: autograd gives both views of one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.pos = nn.Parameter(torch.randn(2, 3, 4))
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.tanh(x.flatten(0, 1) + self.pos.flatten(0, 1)))
        return y.view_as(x)


def draw_stages(chance: random.Random, number: int) -> list[nn.Module]:
    torch.manual_seed(chance.randrange(1 << 30))
    return [
        Several([Part(chance.choice(RUNS)) for _ in range(chance.choice([1, 1, 2]))])
        for _ in range(number)
    ]


def draw_schedule(chance: random.Random, ranks: int) -> schedir.Schedule:
    """Any placement and order, but that each stage goes through the microbatches in theirs."""
    stages, microbatches = chance.randint(1, 4), chance.randint(1, 4)
    placement = [chance.randrange(ranks) for _ in range(stages)]
    splits = {s: chance.random() < 0.4 for s in range(stages)}
    lists: list[list[Action]] = [[] for _ in range(ranks)]
    done: set[Action] = set()
    every = [(s, m) for s in range(stages) for m in range(microbatches)]

    def backwards(s: int, m: int) -> Action:
        return schedir.backward_input(s, m) if splits[s] else schedir.backward(s, m)

    todo = [make(s, m) for s, m in every for make in (schedir.forward, backwards)]
    todo += [schedir.backward_weight(s, m) for s, m in every if splits[s]]

    def ready(action: Action) -> bool:
        s, m = action.stage, action.microbatch or 0
        before = [Action(action.kind, s, m - 1)] if m else []
        if action.kind is schedir.Kind.FORWARD:
            before += [schedir.forward(s - 1, m)] if s else []
        elif action.kind is schedir.Kind.BACKWARD_WEIGHT:
            before += [schedir.backward_input(s, m)]
        else:
            before += [schedir.forward(s, m)]
            before += [backwards(s + 1, m)] if s + 1 < stages else []
        return done.issuperset(before)

    while todo:
        action = chance.choice([a for a in todo if ready(a)])
        todo.remove(action)
        done.add(action)
        lists[placement[action.stage]].append(action)
    return schedir.Schedule("drawn", microbatches, placement, lists)


def draw_batch(chance: random.Random, microbatches: int) -> tuple[Pair, Tensor]:
    """Inputs and target. A side of a microbatch is one row, as it is the same for all its rows."""
    generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
    rows = ROWS * microbatches
    x = torch.randn(rows, SIDE, WIDTH, generator=generator)
    return (x, torch.zeros(rows, SIDE)), torch.randn(rows, SIDE, WIDTH, generator=generator)


class First(nn.Module):
    """The first stage: the side of a microbatch is that of its first row."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, sides: Tensor) -> Pair:
        pair: Pair = self.inner(x, sides[0])
        return pair


def loss_fn(output: Pair, target: Tensor) -> Tensor:
    x, b = output
    return nn.functional.mse_loss(x, target) + b.mean()


def plain(
    stages: Sequence[nn.Module], batch: tuple[Pair, Tensor], microbatches: int
) -> tuple[float, list[list[Tensor]]]:
    """The loss and each stage's gradients, in one piece; no gradient ever shares memory here."""
    (x, b), target = copy.deepcopy(batch)
    parameters = [p for stage in stages for p in stage.parameters()]
    sums: list[Tensor | None] = [None] * len(parameters)
    losses = 0.0
    pieces = zip(*(t.tensor_split(microbatches) for t in (x, b, target)), strict=True)
    for piece, side, y in pieces:
        pair: Pair = (piece.clone(), side.clone())
        for stage in stages:
            pair = stage(*pair)
        loss = loss_fn(pair, y)
        losses += float(loss.detach())
        share = [torch.full_like(loss, 1 / microbatches)]
        found = torch.autograd.grad(loss, parameters, share, allow_unused=True)
        sums = [
            so_far if grad is None else grad.clone() if so_far is None else so_far + grad
            for so_far, grad in zip(sums, found, strict=True)
        ]
    grads = iter([torch.zeros(()) if grad is None else grad for grad in sums])
    return losses / microbatches, [[next(grads) for _ in stage.parameters()] for stage in stages]


def differences(
    stages: dict[int, nn.Module], expected: list[list[Tensor]], whole: Sequence[nn.Module]
) -> list[str]:
    """What differs in the gradients of the stages here, and in what they hold."""
    found = []
    for s, stage in stages.items():
        for (name, p), grad in zip(stage.named_parameters(), expected[s], strict=True):
            mine = torch.zeros(()) if p.grad is None else p.grad
            # A gradient that crosses ranks may be laid out anew, and rounds differently then.
            if not torch.allclose(mine, grad, rtol=1e-5, atol=1e-6):
                off, scale = (float(t.abs().max()) for t in (mine - grad, grad))
                found.append(f"stage {s} {name}: off by {off:.3g}, scale {scale:.3g}")
        for one, other in zip(stage.modules(), whole[s].modules(), strict=True):
            if isinstance(one, Part) and isinstance(other, Part):
                for name in ("mean", "hidden"):
                    if not torch.equal(getattr(one, name), getattr(other, name)):
                        found.append(f"stage {s} {name} differs")
                if len(one.log) != len(other.log):
                    found.append(f"stage {s}: {len(one.log)} forwards are logged")
    return found


def run(seed: int, ranks: int | None = None, rank: int | None = None) -> tuple[str, list[str]]:
    """Train what is drawn, on a rank or all in this process: what is said if it is refused, and
    what differs if it is not."""
    chance = random.Random(seed)
    schedule = draw_schedule(chance, ranks or chance.randint(1, 3))
    whole = draw_stages(chance, schedule.stages)
    whole[0] = First(whole[0])
    here = range(schedule.stages) if rank is None else schedule.stages_of(rank)
    stages = {s: copy.deepcopy(whole[s]) for s in here}
    recompute = [s for s in range(schedule.stages) if chance.random() < 0.3]
    ((x, b), target) = batch = draw_batch(chance, schedule.microbatches)
    before = [t.clone() for t in (x, b, target)]
    try:
        expected_loss, expected = plain(whole, batch, schedule.microbatches)
    except RuntimeError:  # a part changes what another one has saved, or none has a parameter
        return "plain training fails", []
    options: dict[str, Any] = {"in_process": rank is None, "recompute": recompute, "timeout": 60}
    executor = Executor(schedule, stages, loss_fn, **options)
    try:
        loss = executor.step((x, b), target=target).loss
        executor.close()
    except schedir.ExecutionError as error:
        return str(error), []
    found = differences(stages, expected, whole)
    if abs(loss - expected_loss) > 1e-6:
        found.append(f"loss {loss} != {expected_loss}")
    same = map(torch.equal, (x, b, target), before)
    return "", found + ([] if all(same) else ["the batch was changed"])
