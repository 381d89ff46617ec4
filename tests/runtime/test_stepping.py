"""What happens between the gradients and the step: clipping, ties, and what is refused there."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from reference import plain_step
from torch import Tensor, nn
from torch.optim import SGD

import schedir
from schedir.runtime import Executor
from tests.built_in import SYNCHRONOUS
from tests.runtime.kit import (
    MSE,
    adamw,
    assert_equal_stages,
    linear_stages,
    message_of,
    microbatches_of,
    momentum,
    numbered,
    random_batch,
)


@pytest.mark.parametrize("max_norm", [0.05, 1e6])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_clipping_is_that_of_the_whole_model(name: str, max_norm: float) -> None:
    schedule = schedir.build(name, ranks=3, microbatches=4)
    stages = numbered(linear_stages(schedule.stages))
    model = nn.Sequential(*copy.deepcopy(list(stages.values())))
    optimizer = adamw(model.parameters())
    torch.manual_seed(1)
    options: dict[str, Any] = {"in_process": True, "clip_grad_norm": max_norm}
    with Executor(schedule, stages, MSE, adamw, **options) as executor:
        for step in range(4):
            x, y = torch.randn(2, 8, 4)
            result = executor.step(x, target=y, update=step != 1)
            plain_step([model], MSE, (), microbatches_of((x, y), 4))
            if step == 1:
                assert result.grad_norm is None
                continue
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            assert result.grad_norm == float(norm)
            optimizer.step()
            optimizer.zero_grad()
    assert_equal_stages(stages, [*model])


@pytest.mark.parametrize(
    "kinds", ["float16 float16", "bfloat16 bfloat16", "float16 float32", "bfloat16 float64"]
)
def test_norms_of_16_bits_are_summed_in_32(kinds: str) -> None:
    """A gradient's own squares overflow in 16 bits, or are rounded to a few digits."""

    class Cast(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.to(self.weight.dtype))

    schedule = schedir.build("1f1b", ranks=2, microbatches=1)
    torch.manual_seed(4)
    stages = numbered(Cast(64, 64, dtype=getattr(torch, kind)) for kind in kinds.split())
    model = nn.Sequential(*copy.deepcopy(list(stages.values())))
    x, y = torch.randn(2, 8, 64)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return 4e5 * MSE(output.float(), target)

    options: dict[str, Any] = {"in_process": True, "clip_grad_norm": 1.0}
    with Executor(schedule, stages, loss_fn, lambda p: SGD(p, lr=1.0), **options) as executor:
        found = executor.step(x, target=y).grad_norm
    loss_fn(model(x), y).backward()
    grads = [p.grad.double() for p in model.parameters() if p.grad is not None]
    whole = float(torch.cat([grad.flatten() for grad in grads]).norm())
    assert whole > torch.finfo(torch.float16).max
    assert found == pytest.approx(whole, rel=1e-6)
    mine = [p for stage in stages.values() for p in stage.parameters()]
    for p, before, grad in zip(mine, model.parameters(), grads, strict=True):
        expected, near = before.double() - grad / whole, 1e-6 + torch.finfo(p.dtype).eps / 4
        assert torch.allclose(p.double(), expected, rtol=0.0, atol=near)


def test_clipping_goes_on_after_a_failure() -> None:
    class Fails(nn.Linear):
        failing = False

        def forward(self, x: Tensor) -> Tensor:
            if self.failing and type(x) is Tensor:
                raise ValueError("not now")
            return super().forward(x)

    last = Fails(4, 4)
    stages = numbered([nn.Linear(4, 4), last])
    x, y = random_batch()
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    options: dict[str, Any] = {"in_process": True, "clip_grad_norm": 1.0}
    with Executor(schedule, stages, MSE, adamw, **options) as executor:
        executor.step(x, target=y)
        last.failing = True
        assert "not now" in message_of(executor.step, x, target=y)
        last.failing = False
        assert executor.step(x, target=y).grad_norm is not None


@pytest.mark.parametrize(
    ("name", "optimizer", "text"),
    [
        ("pipedream", adamw, "goes on after rank 0 #6 0OPTIM_STEP"),
        ("1f1b", None, "so it needs an optimizer"),
    ],
)
def test_clipping_is_refused_where_some_rank_steps_earlier_or_nobody_does(
    name: str, optimizer: Any, text: str
) -> None:
    schedule = schedir.build(name, ranks=2, microbatches=3)
    options: dict[str, Any] = {"in_process": True, "clip_grad_norm": 1.0}
    stages = numbered(linear_stages())
    assert text in message_of(Executor, schedule, stages, MSE, optimizer, **options)


class Scores(nn.Module):
    """The last stage of a language model, which scores tokens by the embeddings of the first."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.weight = nn.Parameter(table.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.norm(x), self.weight)


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


TIE = [[(0, "weight"), (2, "weight")]]


def language_model(number: int) -> dict[int, nn.Module]:
    torch.manual_seed(3)
    first = nn.Embedding(7, 4)
    inner = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(number - 2)]
    return numbered([first, *inner, Scores(first.weight)])


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_tied_embeddings_train_as_one(name: str, clip: float | None) -> None:
    """The sum over the stages is taken after that over microbatches, which rounds differently."""
    schedule = schedir.build(name, ranks=3, microbatches=4)
    stages = language_model(schedule.stages)
    last = schedule.stages - 1
    whole = copy.deepcopy(stages)
    whole[last].weight = whole[0].weight
    model = nn.Sequential(*whole.values())
    optimizer = adamw(model.parameters())
    ties = [[(0, "weight"), (last, "weight")]]
    torch.manual_seed(1)
    options: dict[str, Any] = {"in_process": True, "ties": ties, "clip_grad_norm": clip}
    with Executor(schedule, stages, cross_entropy, adamw, **options) as executor:
        for step in range(4):
            tokens, target = torch.randint(7, (2, 8, 5))
            result = executor.step(tokens, target=target, update=step != 1)
            plain_step([model], cross_entropy, (), microbatches_of((tokens, target), 4))
            if step == 1:
                continue
            if clip is not None:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
                assert result.grad_norm == pytest.approx(float(norm), rel=1e-5)
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(stages[0].weight, stages[last].weight)  # type: ignore[arg-type]
    for stage, other in whole.items():
        torch.testing.assert_close([*stages[stage].parameters()], [*other.parameters()])


def test_ties_under_vertical_sync() -> None:
    """Stages that update at every microbatch, but read the same version of it."""
    schedule = schedir.build("pipedream", ranks=3, microbatches=5, vertical_sync=True)
    stages = language_model(3)
    options: dict[str, Any] = {"ties": TIE, "in_process": True}
    with Executor(schedule, stages, cross_entropy, momentum, **options) as executor:
        for _ in range(3):
            tokens, target = torch.randint(7, (2, 10, 5))
            executor.step(tokens, target=target)
            assert torch.equal(stages[0].weight, stages[2].weight)  # type: ignore[arg-type]


def test_ties_of_stages_that_read_other_versions_are_refused() -> None:
    schedule = schedir.build("pipedream", ranks=3, microbatches=5)
    with pytest.raises(schedir.ScheduleError, match="S407"):
        Executor(schedule, language_model(3), cross_entropy, momentum, in_process=True, ties=TIE)


def test_ties_that_are_none_are_refused() -> None:
    schedule = schedir.build("1f1b", ranks=3, microbatches=2)
    equal, other = language_model(3), {**language_model(3), 2: Scores(torch.randn(7, 4))}
    tie, twice = TIE[0], [[(0, "weight"), (s, "weight")] for s in (1, 2)]
    wrong: list[tuple[str, dict[int, Any], list[list[tuple[int, str]]]]] = [
        ("no parameter 'table'; it has weight", equal, [[(0, "table"), (2, "weight")]]),
        ("1f1b has no stage 3 to tie, only 0..2", equal, [[(0, "weight"), (3, "weight")]]),
        ("0:weight stands in two ties", equal, twice),
        ("0:weight and 2:weight differs in", other, [tie]),
    ]
    for text, stages, ties in wrong:
        options: dict[str, Any] = {"in_process": True, "ties": ties}
        assert text in message_of(Executor, schedule, stages, cross_entropy, adamw, **options)


def test_wrapped_modules_are_refused() -> None:
    class Wrapped(nn.parallel.DistributedDataParallel):
        def __init__(self) -> None:
            nn.Module.__init__(self)

    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    stages = numbered([nn.Linear(4, 4), nn.Sequential(Wrapped())])
    said = message_of(Executor, schedule, stages, MSE, adamw, in_process=True)
    assert "stage 1 (0) is wrapped by Wrapped" in said
