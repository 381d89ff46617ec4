"""What real models need of a pipeline: each against plain training in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import schedir
from schedir import Action, Pipeline, backward_input, backward_weight, forward, optim_step
from schedir.runtime import Executor, rng
from tests.built_in import SYNCHRONOUS
from tests.runtime.kit import MSE, adamw, random_batches


def built(name: str, microbatches: int, ranks: int = 2) -> schedir.Schedule:
    return schedir.build(name, ranks=ranks, microbatches=microbatches)


def train(
    schedule: schedir.Schedule,
    stages: Sequence[nn.Module],
    plain: Callable[[Sequence[nn.Module], int, int], Tensor],
    calls: Sequence[dict[str, Any]],
    loss_fn: Any = MSE,
    exact: bool = True,
    shares: Callable[[dict[str, Any]], list[float]] | None = None,
    **options: Any,
) -> None:
    """Train with `calls` of `step`, and plainly: `plain(stages, step, m)` is one loss."""
    mine = {s: copy.deepcopy(stage) for s, stage in enumerate(stages)}
    theirs = [copy.deepcopy(stage) for stage in stages]
    optimizers = [adamw(s.parameters()) for s in theirs if list(s.parameters())]
    number = schedule.microbatches
    with Executor(schedule, mine, loss_fn, adamw, in_process=True, **options) as executor:
        for step, call in enumerate(calls):
            found = executor.step(**call).loss
            weights = shares(call) if shares else [1 / number] * number
            losses = []
            for m, weight in enumerate(weights):
                loss = plain(theirs, step, m)
                (loss * weight).backward()
                losses.append(float(loss.detach()))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            expected = sum(n * loss for n, loss in zip(weights, losses, strict=True))
            assert found == pytest.approx(expected, rel=1e-6)
    for s, stage in mine.items():
        other = theirs[s].state_dict()
        for name, value in stage.state_dict().items():
            if exact:
                assert torch.equal(value, other[name]), f"stage {s} {name}"
            else:
                torch.testing.assert_close(value, other[name])


def chain(stages: Sequence[nn.Module], x: Any) -> Any:
    for stage in stages:
        x = stage(x)
    return x


def linears(number: int, *layers: Callable[[], nn.Module]) -> list[nn.Module]:
    torch.manual_seed(5)
    return [nn.Sequential(nn.Linear(4, 4), *(make() for make in layers)) for _ in range(number)]


class Pair(NamedTuple):
    left: Tensor
    right: Tensor | None


class Structured(nn.Module):
    """Takes and returns a dict of a tensor, None, numbers, a string, and a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(
        self,
        x: Tensor,
        depth: int = 0,
        flag: bool = False,
        mask: Tensor | None = None,
        name: str = "",
        pair: Pair | None = None,
    ) -> dict[str, Any]:
        y: Tensor = self.linear(x)
        if flag and pair is not None and name == "inner":
            y = y * depth + pair.left
        return {
            "x": y,
            "depth": depth + 1,
            "flag": True,
            "mask": mask,
            "name": "inner",
            "pair": Pair(x * 2, None),
        }


class Whole(Structured):
    """The same, but takes the dict as one argument."""

    def forward(self, state: Any) -> dict[str, Any]:  # type: ignore[override]
        return super().forward(**state) if isinstance(state, dict) else super().forward(state)


@pytest.mark.parametrize("kind", [Structured, Whole])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_any_structure_crosses_a_boundary(name: str, kind: type[nn.Module]) -> None:
    schedule = built(name, 4)
    torch.manual_seed(1)
    stages = [kind() for _ in range(schedule.stages)]
    batches = random_batches(3)

    def loss_fn(output: Mapping[str, Any], target: Tensor) -> Tensor:
        return MSE(output["x"], target) + 0.1 * output["pair"].left.mean()  # type: ignore[no-any-return]

    def plain(whole: Sequence[nn.Module], step: int, m: int) -> Tensor:
        x, y = (t.chunk(4)[m] for t in batches[step])
        state: Any = whole[0](x)
        for stage in whole[1:]:
            state = stage(**state) if kind is Structured else stage(state)
        return loss_fn(state, y)

    train(
        schedule, stages, plain, [{"inputs": x, "target": y} for x, y in batches], loss_fn=loss_fn
    )


def test_what_can_not_be_sent_is_said() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x, object()

    (x, y), *_ = random_batches(1)
    stages: dict[int, nn.Module] = {0: Odd(), 1: nn.Linear(4, 4)}
    with (
        Executor(built("1f1b", 2), stages, MSE, in_process=True) as executor,
        pytest.raises(schedir.ExecutionError, match=r"numbers, strings and None .* no object"),
    ):
        executor.step(x, target=y)


class Counting(nn.Module):
    """Sends a number that changes from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        self.calls += 1
        return x, self.calls


def test_a_constant_that_was_not_agreed_is_said() -> None:
    class Takes(nn.Linear):
        def forward(self, x: Tensor, calls: int = 1) -> Tensor:
            return super().forward(x) * calls

    (x, y), *_ = random_batches(1)
    stages: dict[int, nn.Module] = {0: Counting(), 1: Takes(4, 4)}
    with Executor(built("1f1b", 2), stages, MSE, in_process=True) as executor:
        executor.step(x, target=y)
        text = r"float32\[4, 4\], 3\), but \(.*, 1\) was"
        with pytest.raises(schedir.ExecutionError, match=text):
            executor.step(x, target=y)


class Conditioned(nn.Module):
    """Takes a mask and a scale beside its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
        y: Tensor = self.linear(x) * mask * scale
        return y


@pytest.mark.parametrize("by_keyword", [False, True])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_every_stage_can_have_inputs_of_its_own(name: str, by_keyword: bool) -> None:
    schedule = built(name, 4)
    torch.manual_seed(1)
    stages = [Conditioned() for _ in range(schedule.stages)]
    batches = random_batches(3)
    masks = [torch.rand(8, 4).round() for _ in batches]
    scales = [1.0, 2.0, 0.5]  # not of the shapes, so nothing is agreed anew

    def plain(whole: Sequence[nn.Module], step: int, m: int) -> Tensor:
        x, y = (t.chunk(4)[m] for t in batches[step])
        for stage in whole:
            x = stage(x, masks[step].chunk(4)[m], scales[step])
        return MSE(x, y)

    def extra(step: int) -> Any:
        mask, scale = masks[step], scales[step]
        if by_keyword:
            return {"mask": mask, "scale": scale}
        return [(piece, scale) for piece in mask.chunk(4)]

    calls = [
        {"inputs": x, "target": y, "stage_inputs": dict.fromkeys(range(len(stages)), extra(step))}
        for step, (x, y) in enumerate(batches)
    ]
    train(schedule, stages, plain, calls, kwargs_chunk_spec={"mask": 0})


def test_a_later_stages_inputs_may_change_their_shape() -> None:
    class Appends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, more: Tensor) -> Tensor:
            return self.linear(torch.cat([x, more], dim=1))  # type: ignore[no-any-return]

    class Widens(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.unsqueeze(1)

    class Narrows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean(1)

    stages = [Widens(), Appends(), Narrows()]
    batches = random_batches(3)
    more = [torch.randn(8, length, 4) for length in (1, 3, 2)]

    def plain(whole: Sequence[nn.Module], step: int, m: int) -> Tensor:
        x, y = (t.chunk(4)[m] for t in batches[step])
        return MSE(whole[2](whole[1](whole[0](x), more[step].chunk(4)[m])), y)

    calls = [
        {"inputs": x, "target": y, "stage_inputs": {1: {"more": extra}}}
        for (x, y), extra in zip(batches, more, strict=True)
    ]
    train(built("1f1b", 4, ranks=3), stages, plain, calls, kwargs_chunk_spec={"more": 0})


def test_inputs_of_a_stage_that_is_not_there_are_refused() -> None:
    (x, y), *_ = random_batches(1)
    with (
        Executor(built("1f1b", 2), dict(enumerate(linears(2))), MSE, in_process=True) as executor,
        pytest.raises(schedir.ExecutionError, match=r"stage_inputs: there is no stage 2, only 0"),
    ):
        executor.step(x, target=y, stage_inputs={2: x})


IGNORED = -100


def test_a_loss_over_tokens_is_weighed_by_tokens() -> None:
    """Padding is uneven, so microbatches hold unequal numbers of tokens: the mean is over those."""
    torch.manual_seed(2)
    stages: list[nn.Module] = [nn.Embedding(7, 4), nn.Linear(4, 7)]
    tokens = [torch.randint(7, (8, 5)) for _ in range(3)]
    targets = [t.masked_fill(torch.rand(8, 5) < 0.4, IGNORED) for t in tokens]

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    def count(target: Tensor) -> Tensor:
        return (target != IGNORED).sum()

    def plain(whole: Sequence[nn.Module], step: int, m: int) -> Tensor:
        return loss_fn(whole[1](whole[0](tokens[step].chunk(4)[m])), targets[step].chunk(4)[m])

    def shares(call: dict[str, Any]) -> list[float]:
        counts = [int(count(piece)) for piece in call["target"].chunk(4)]
        return [n / sum(counts) for n in counts]

    calls = [{"inputs": x, "target": y} for x, y in zip(tokens, targets, strict=True)]
    train(built("1f1b", 4), stages, plain, calls, loss_fn, shares=shares, count=count)
    # That is the mean over all tokens of the batch, up to rounding.
    mine = {s: copy.deepcopy(stage) for s, stage in enumerate(stages)}
    with Executor(built("1f1b", 4), mine, loss_fn, in_process=True, count=count) as executor:
        found = executor.step(tokens[0], target=targets[0]).loss
    model = nn.Sequential(*copy.deepcopy(stages))
    whole = loss_fn(model(tokens[0]), targets[0])
    whole.backward()
    assert found == pytest.approx(float(whole.detach()), rel=1e-5)
    for stage, theirs in zip(mine.values(), model, strict=True):
        for a, b in zip(stage.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)


def test_a_microbatch_of_padding_alone_counts_for_nothing() -> None:
    torch.manual_seed(2)
    stages: dict[int, nn.Module] = {0: nn.Embedding(7, 4), 1: nn.Linear(4, 7)}
    tokens = torch.randint(7, (4, 5))
    target = tokens.clone()
    target[2:] = IGNORED

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    def count(target: Tensor) -> Tensor:
        return (target != IGNORED).sum()

    with Executor(built("1f1b", 2), stages, loss_fn, in_process=True, count=count) as executor:
        found = executor.step(tokens, target=target).loss
    expected = loss_fn(stages[1](stages[0](tokens[:2])), target[:2])
    assert found == pytest.approx(float(expected.detach()))


def test_a_stage_may_get_nothing_beside_its_input() -> None:
    (x, y), *_ = random_batches(1)
    given: Any
    with Executor(built("1f1b", 2), dict(enumerate(linears(2))), MSE, in_process=True) as executor:
        for given in ({}, (), None):
            executor.step(x, target=y, stage_inputs={1: given})


@pytest.mark.parametrize("said", [-1.0, float("nan")])
def test_a_count_that_is_none_is_refused(said: float) -> None:
    (x, y), *_ = random_batches(1)
    stages = dict(enumerate(linears(2)))
    with (
        Executor(built("1f1b", 2), stages, MSE, in_process=True, count=lambda _: said) as executor,
        pytest.raises(schedir.ExecutionError, match="count returns"),
    ):
        executor.step(x, target=y)


def test_a_loss_has_keywords_of_each_microbatch() -> None:
    batches = random_batches(3)
    weights = [torch.rand(8) for _ in batches]

    def loss_fn(output: Tensor, target: Tensor, weight: Tensor, power: int) -> Tensor:
        return (((output - target) ** power).mean(1) * weight).mean()

    def plain(whole: Sequence[nn.Module], step: int, m: int) -> Tensor:
        x, y = (t.chunk(4)[m] for t in batches[step])
        return loss_fn(chain(whole, x), y, weights[step].chunk(4)[m], 4)

    calls = [
        {"inputs": x, "target": y, "loss_kwargs": {"weight": w, "power": 4}}
        for (x, y), w in zip(batches, weights, strict=True)
    ]
    specs = {"weight": 0}
    train(built("1f1b", 4), linears(2), plain, calls, loss_fn, kwargs_chunk_spec=specs)


def train_noisily(schedule: schedir.Schedule, recompute: bool | list[int]) -> None:
    """With dropout, which draws the same again, and statistics, which count a forward once."""
    stages = linears(schedule.stages, lambda: nn.BatchNorm1d(4), lambda: nn.Dropout(0.5), nn.ReLU)
    batches = random_batches(3, rows=12)

    def plain(whole: Sequence[nn.Module], step: int, m: int) -> Tensor:
        x, y = (t.chunk(4)[m] for t in batches[step])
        for s, stage in enumerate(whole):
            rng(0, step, s, m)
            x = stage(x)
        return MSE(x, y)

    calls = [{"inputs": x, "target": y} for x, y in batches]
    train(schedule, stages, plain, calls, recompute=recompute)


@pytest.mark.parametrize("name", SYNCHRONOUS)
@pytest.mark.parametrize("recompute", [True, [0], [1]])
def test_recomputed_stages_train_alike(name: str, recompute: bool | list[int]) -> None:
    train_noisily(built(name, 4), recompute)


def test_recomputation_keeps_inputs_alone() -> None:
    """No graph lives between a recomputed forward and its R: one on each rank at most."""
    alive: list[int] = []
    saved = 0  # graphs that wait for their backward

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            nonlocal saved
            saved += ctx.needs_input_grad[0]
            alive.append(saved)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            nonlocal saved
            saved -= 1
            return grad * 2

    class Doubles(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Watched.apply(x)  # type: ignore[no-any-return, no-untyped-call]

    (x, y), *_ = random_batches(1)

    def peak(recompute: bool) -> int:
        stages: dict[int, nn.Module] = {
            s: nn.Sequential(nn.Linear(4, 4), Doubles()) for s in range(2)
        }
        options: dict[str, Any] = {"in_process": True, "recompute": recompute}
        with Executor(built("fill-drain", 4), stages, MSE, **options) as executor:
            executor.step(x, target=y)  # with the fake runs
            before = saved
            alive.clear()
            executor.step(x, target=y)
        return max(alive) - before

    assert peak(False) == 8
    assert peak(True) == 2


def test_recompute_of_a_stage_that_is_not_there_is_refused() -> None:
    with pytest.raises(schedir.ExecutionError, match="recompute: there is no stage 4, only 0"):
        Executor(built("1f1b", 2), dict(enumerate(linears(2))), MSE, in_process=True, recompute=[4])


@schedir.schedule("zero-bubble-like")
def split_backward(pipe: Pipeline, rank: int) -> Iterator[Action]:
    (stage,) = pipe.stages_of(rank)
    for m in range(pipe.microbatches):
        yield forward(stage, m)
    for m in range(pipe.microbatches):
        yield backward_input(stage, m)
    for m in range(pipe.microbatches):
        yield backward_weight(stage, m)
    yield optim_step(stage)


@pytest.mark.parametrize("recompute", [False, True])
def test_input_and_weight_gradients_apart(recompute: bool) -> None:
    train_noisily(schedir.build(split_backward, ranks=3, microbatches=4), recompute)


def test_recomputation_under_autocast() -> None:
    stages = linears(2, nn.Tanh)
    batches = random_batches(3)
    with torch.autocast("cpu", torch.bfloat16):

        def plain(whole: Sequence[nn.Module], step: int, m: int) -> Tensor:
            x, y = (t.chunk(4)[m] for t in batches[step])
            return MSE(chain(whole, x).float(), y)

        def loss_fn(output: Tensor, target: Tensor) -> Tensor:
            return MSE(output.float(), target)

        calls = [{"inputs": x, "target": y} for x, y in batches]
        torch.set_autocast_cache_enabled(False)  # plain training would find old casts
        try:
            train(built("1f1b", 4), stages, plain, calls, loss_fn, recompute=True)
        finally:
            torch.set_autocast_cache_enabled(True)


def test_outputs_come_on_request_by_microbatch() -> None:
    schedule = built("1f1b", 3)
    stages = linears(2, lambda: nn.Dropout(0.5))
    ((x, y),) = random_batches(1, rows=7)
    mine = dict(enumerate(copy.deepcopy(stages)))
    with Executor(schedule, mine, MSE, in_process=True) as executor:
        result = executor.step(x, target=y, outputs=True)
        assert executor.step(x, target=y).outputs is None
        inferred = executor.infer(x)
        evaluated = executor.evaluate(x, target=y, outputs=True)
        assert executor.evaluate(x, target=y).outputs is None
    assert result.outputs is not None
    assert inferred is not None
    assert evaluated.outputs is not None
    for m, piece in enumerate(torch.tensor_split(x, 3)):
        h = piece
        for s, stage in enumerate(stages):
            rng(0, 0, s, m)
            h = stage(h)
        assert torch.equal(result.outputs[m], h)
        assert not result.outputs[m].requires_grad
        for stage in stages:
            stage.eval()
        assert torch.equal(inferred[m], chain(stages, piece))
        assert torch.equal(evaluated.outputs[m], chain(stages, piece))
        for stage in stages:
            stage.train()


def test_inputs_made_for_inference_are_taken() -> None:
    with torch.inference_mode():
        x = torch.randn(8, 4)
    stages = linears(2)
    mine = dict(enumerate(copy.deepcopy(stages)))
    with Executor(built("1f1b", 2), mine, MSE, in_process=True) as executor, torch.no_grad():
        found = executor.infer(x)
        expected = chain(stages, x)
    assert found is not None
    assert torch.equal(torch.cat(found), expected)


def test_learning_rates_are_scheduled_by_stage() -> None:
    stages = linears(2, nn.Tanh)
    batches = random_batches(4)
    mine = dict(enumerate(copy.deepcopy(stages)))
    optimizers = [adamw(stage.parameters()) for stage in stages]
    rates = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in optimizers]
    with Executor(built("1f1b", 2), mine, MSE, adamw, in_process=True) as executor:
        own = {s: torch.optim.lr_scheduler.ExponentialLR(executor.optimizers[s], 0.5) for s in mine}
        for x, y in batches:
            executor.step(x, target=y)
            for rate in own.values():
                rate.step()
            for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
                (MSE(chain(stages, a), b) / 2).backward()
            for optimizer, rate in zip(optimizers, rates, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                rate.step()
    for s, stage in mine.items():
        for a, b in zip(stage.parameters(), stages[s].parameters(), strict=True):
            assert torch.equal(a, b)
