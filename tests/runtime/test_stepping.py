"""What happens between the gradients and the step: clipping, ties, and what is refused there."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import schedir
from schedir.runtime import Executor
from tests.built_in import SYNCHRONOUS
from tests.runtime.kit import MSE, adamw, linear_stages, momentum, numbered


@pytest.mark.parametrize("max_norm", [0.05, 1e6])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_clipping_is_that_of_the_whole_model(name: str, max_norm: float) -> None:
    schedule = schedir.build(name, ranks=3, microbatches=4)
    stages = numbered(linear_stages(schedule.stages))
    model = nn.Sequential(*copy.deepcopy(list(stages.values())))
    optimizer = adamw(model.parameters())
    torch.manual_seed(1)
    with Executor(
        schedule, stages, MSE, adamw, in_process=True, clip_grad_norm=max_norm
    ) as executor:
        for step in range(4):
            x, y = torch.randn(2, 8, 4)
            result = executor.step(x, target=y, update=step != 1)
            for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
                (MSE(model(a), b) / 4).backward()
            if step == 1:
                assert result.grad_norm is None
                continue
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            assert result.grad_norm == float(norm)
            optimizer.step()
            optimizer.zero_grad()
    for stage, other in zip(stages.values(), model, strict=True):
        for p, q in zip(stage.parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q)


@pytest.mark.parametrize(
    "kinds",
    [
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float64),
    ],
    ids=str,
)
def test_norms_of_16_bits_are_summed_in_32(kinds: tuple[torch.dtype, torch.dtype]) -> None:
    """A gradient's own squares overflow in 16 bits, or are rounded to a few digits."""

    class Cast(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.to(self.weight.dtype))

    schedule = schedir.build("1f1b", ranks=2, microbatches=1)
    torch.manual_seed(4)
    stages = numbered(Cast(64, 64, dtype=kind) for kind in kinds)
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
        expected = before.double() - grad / whole
        assert torch.allclose(
            p.double(), expected, rtol=0.0, atol=1e-6 + torch.finfo(p.dtype).eps / 4
        )


def test_clipping_goes_on_after_a_failure() -> None:
    class Fails(nn.Linear):
        failing = False

        def forward(self, x: Tensor) -> Tensor:
            if self.failing and type(x) is Tensor:
                raise ValueError("not now")
            return super().forward(x)

    last = Fails(3, 3)
    stages: dict[int, nn.Module] = {0: nn.Linear(3, 3), 1: last}
    x, y = torch.randn(2, 6, 3)
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    options: dict[str, Any] = {"in_process": True, "clip_grad_norm": 1.0}
    with Executor(schedule, stages, MSE, adamw, **options) as executor:
        executor.step(x, target=y)
        last.failing = True
        with pytest.raises(schedir.ExecutionError, match="not now"):
            executor.step(x, target=y)
        last.failing = False
        assert executor.step(x, target=y).grad_norm is not None


def test_clipping_is_refused_where_some_rank_steps_earlier() -> None:
    schedule = schedir.build("pipedream", ranks=2, microbatches=3)
    with pytest.raises(schedir.ExecutionError, match="goes on after rank 0 #6 0OPTIM_STEP"):
        Executor(
            schedule, numbered(linear_stages()), MSE, adamw, in_process=True, clip_grad_norm=1.0
        )


def test_without_an_optimizer_nothing_is_clipped() -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=3)
    with pytest.raises(schedir.ExecutionError, match="so it needs an optimizer"):
        Executor(schedule, numbered(linear_stages()), MSE, in_process=True, clip_grad_norm=1.0)


class Embeds(nn.Module):
    """The first stage of a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.table(tokens)
        return y


class Scores(nn.Module):
    """Its last stage, which scores every token by the embeddings of the first."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.weight = nn.Parameter(table.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.norm(x), self.weight)


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def language_model(number: int) -> dict[int, nn.Module]:
    torch.manual_seed(3)
    first = Embeds()
    inner = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(number - 2)]
    return dict(enumerate([first, *inner, Scores(first.table.weight)]))


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_tied_embeddings_train_as_one(name: str, clip: float | None) -> None:
    """The sum over the stages is taken after that over microbatches, which rounds differently."""
    schedule = schedir.build(name, ranks=3, microbatches=4)
    stages = language_model(schedule.stages)
    last = schedule.stages - 1
    whole = copy.deepcopy(stages)
    whole[last].weight = whole[0].table.weight  # type: ignore[union-attr]
    model = nn.Sequential(*whole.values())
    optimizer = adamw(model.parameters())
    ties = [[(0, "table.weight"), (last, "weight")]]
    torch.manual_seed(1)
    options: dict[str, Any] = {"in_process": True, "ties": ties, "clip_grad_norm": clip}
    with Executor(schedule, stages, cross_entropy, adamw, **options) as executor:
        for step in range(4):
            tokens, target = torch.randint(7, (2, 8, 5))
            result = executor.step(tokens, target=target, update=step != 1)
            for a, b in zip(tokens.chunk(4), target.chunk(4), strict=True):
                (cross_entropy(model(a), b) / 4).backward()
            if step == 1:
                continue
            if clip is not None:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
                assert result.grad_norm == pytest.approx(float(norm), rel=1e-5)
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(stages[0].table.weight, stages[last].weight)  # type: ignore[arg-type,union-attr]
    for stage, other in zip(stages.values(), whole.values(), strict=True):
        for p, q in zip(stage.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p, q)


def test_ties_under_vertical_sync() -> None:
    """Stages that update at every microbatch, but read the same version of it."""
    schedule = schedir.build("pipedream", ranks=3, microbatches=5, vertical_sync=True)
    stages = language_model(3)
    ties = [[(0, "table.weight"), (2, "weight")]]
    with Executor(
        schedule, stages, cross_entropy, momentum, in_process=True, ties=ties
    ) as executor:
        for _ in range(3):
            tokens, target = torch.randint(7, (2, 10, 5))
            executor.step(tokens, target=target)
            assert torch.equal(stages[0].table.weight, stages[2].weight)  # type: ignore[arg-type,union-attr]


def test_ties_of_stages_that_read_other_versions_are_refused() -> None:
    schedule = schedir.build("pipedream", ranks=3, microbatches=5)
    ties = [[(0, "table.weight"), (2, "weight")]]
    with pytest.raises(schedir.ScheduleError, match="S407"):
        Executor(schedule, language_model(3), cross_entropy, momentum, in_process=True, ties=ties)


def test_ties_that_are_none_are_refused() -> None:
    schedule = schedir.build("1f1b", ranks=3, microbatches=2)

    def tie(stages: dict[int, nn.Module], *tied: tuple[int, str]) -> None:
        Executor(schedule, stages, cross_entropy, adamw, in_process=True, ties=[tied])

    stages = language_model(3)
    with pytest.raises(schedir.ExecutionError, match=r"no parameter 'table'; it has table\.w"):
        tie(stages, (0, "table"), (2, "weight"))
    with pytest.raises(schedir.ExecutionError, match=r"the stages are 0\.\.2"):
        tie(stages, (0, "table.weight"), (3, "weight"))
    ties = [[(0, "table.weight"), (s, "weight")] for s in (1, 2)]
    with pytest.raises(schedir.ExecutionError, match=r"0:table\.weight stands in two ties"):
        Executor(schedule, stages, cross_entropy, adamw, in_process=True, ties=ties)
    stages[2] = Scores(torch.randn(7, 4))
    with pytest.raises(schedir.ExecutionError, match=r"0:table\.weight and 2:weight differs in"):
        tie(stages, (0, "table.weight"), (2, "weight"))


def test_one_parameter_in_two_stages_is_refused() -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    stages = numbered(linear_stages())
    stages[1] = nn.Sequential(stages[0], nn.Linear(4, 4))
    with pytest.raises(schedir.ExecutionError, match=r"stages 0 and 1 hold the same memory.*ties="):
        Executor(schedule, stages, MSE, adamw, in_process=True)


def test_wrapped_modules_are_refused() -> None:
    class Wrapped(nn.parallel.DistributedDataParallel):
        def __init__(self, module: nn.Module) -> None:
            nn.Module.__init__(self)
            self.module = module

    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    stages = numbered(linear_stages())
    stages[1] = nn.Sequential(Wrapped(stages[1]))
    with pytest.raises(schedir.ExecutionError, match=r"stage 1 \(0\) is wrapped by Wrapped"):
        Executor(schedule, stages, MSE, adamw, in_process=True)
