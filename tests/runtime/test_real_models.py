"""What real models need of a pipeline: each against plain training in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from reference import run_stages
from torch import Tensor, nn

import schedir
from schedir import ExecutionError
from schedir.runtime import Executor
from tests.built_in import SYNCHRONOUS
from tests.runtime.kit import (
    MSE,
    Batch,
    adamw,
    assert_equal_stages,
    gradients,
    message_of,
    microbatches_of,
    numbered,
    random_batch,
    random_batches,
)


def built(name: str, microbatches: int, ranks: int = 2) -> schedir.Schedule:
    return schedir.build(name, ranks=ranks, microbatches=microbatches)


def train(
    schedule: schedir.Schedule, stages: Any, plain: Any, calls: Any, loss_fn: Any = MSE, **more: Any
) -> None:
    """Train with `calls` of `step`, and plainly: `plain(stages, x, y, step, m)` is one loss."""
    mine, theirs = numbered(copy.deepcopy([*stages])), copy.deepcopy([*stages])
    optimizers = [adamw(s.parameters()) for s in theirs if list(s.parameters())]
    number = schedule.microbatches
    with Executor(schedule, mine, loss_fn, adamw, in_process=True, **more) as executor:
        for step, call in enumerate(calls):
            found = executor.step(**call).loss
            pieces = microbatches_of((call["inputs"], call["target"]), number)
            losses = [plain(theirs, x, y, step, m) for m, (x, y) in enumerate(pieces)]
            for loss in losses:
                (loss / number).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            assert found == pytest.approx(sum(loss.item() for loss in losses) / number, rel=1e-6)
    assert_equal_stages(mine, theirs)


def executor_of(stages: Sequence[nn.Module] = (), loss_fn: Any = MSE, **options: Any) -> Executor:
    """Of two stages and as many microbatches."""
    given = numbered(stages or linears(2))
    return Executor(built("1f1b", 2), given, loss_fn, in_process=True, **options)


def calls_of(batches: Sequence[Batch], *more: dict[str, Any]) -> list[dict[str, Any]]:
    """The arguments of `step` on these batches, with what each has beside."""
    others: Sequence[dict[str, Any]] = more or [{}] * len(batches)
    return [{"inputs": x, "target": y, **o} for (x, y), o in zip(batches, others, strict=True)]


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
        others = {"depth": depth + 1, "flag": True, "mask": mask, "name": "inner"}
        return {"x": y, **others, "pair": Pair(x * 2, None)}


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

    def loss_fn(output: Mapping[str, Any], target: Tensor) -> Tensor:
        return MSE(output["x"], target) + 0.1 * output["pair"].left.mean()  # type: ignore[no-any-return]

    def plain(whole: Sequence[nn.Module], x: Tensor, y: Tensor, *_: int) -> Tensor:
        state: Any = whole[0](x)
        for stage in whole[1:]:
            state = stage(**state) if kind is Structured else stage(state)
        return loss_fn(state, y)

    train(schedule, stages, plain, calls_of(random_batches(3)), loss_fn)


def test_what_can_not_be_sent_is_said() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x, object()

    x, y = random_batch()
    text = r"numbers, strings and None .* no object"
    with executor_of([Odd(), nn.Linear(4, 4)]) as e, pytest.raises(ExecutionError, match=text):
        e.step(x, target=y)


def test_a_constant_that_was_not_agreed_is_said() -> None:
    class Counting(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> tuple[Tensor, int]:
            self.calls += 1
            return x, self.calls

    class Takes(nn.Linear):
        def forward(self, x: Tensor, calls: int = 1) -> Tensor:
            return super().forward(x) * calls

    x, y = random_batch()
    with executor_of([Counting(), Takes(4, 4)]) as executor:
        executor.step(x, target=y)
        with pytest.raises(ExecutionError, match=r"float32\[4, 4\], 3\), but \(.*, 1\) was"):
            executor.step(x, target=y)


class Conditioned(nn.Linear):
    """Takes a mask and a scale beside its input."""

    def forward(self, x: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:  # type: ignore[override]
        return super().forward(x) * mask * scale


@pytest.mark.parametrize("by_keyword", [False, True])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_every_stage_can_have_inputs_of_its_own(name: str, by_keyword: bool) -> None:
    schedule = built(name, 4)
    torch.manual_seed(1)
    stages = [Conditioned(4, 4) for _ in range(schedule.stages)]
    batches = random_batches(3)
    masks = [torch.rand(8, 4).round() for _ in batches]
    scales = [1.0, 2.0, 0.5]  # not of the shapes, so nothing is agreed anew

    def plain(whole: Sequence[nn.Module], x: Tensor, y: Tensor, step: int, m: int) -> Tensor:
        for stage in whole:
            x = stage(x, masks[step].chunk(4)[m], scales[step])
        return MSE(x, y)

    def extra(step: int) -> Any:
        mask, scale = masks[step], scales[step]
        named = {"mask": mask, "scale": scale}
        return named if by_keyword else [(piece, scale) for piece in mask.chunk(4)]

    more = [{"stage_inputs": dict.fromkeys(range(len(stages)), extra(step))} for step in range(3)]
    train(schedule, stages, plain, calls_of(batches, *more), kwargs_chunk_spec={"mask": 0})


def test_a_later_stages_inputs_may_change_their_shape() -> None:
    class Appends(nn.Linear):
        def forward(self, x: Tensor, more: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(torch.cat([x, more], dim=1))

    class Widens(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.unsqueeze(1)

    class Narrows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean(1)

    more = [torch.randn(8, length, 4) for length in (1, 3, 2)]

    def plain(whole: Sequence[nn.Module], x: Tensor, y: Tensor, step: int, m: int) -> Tensor:
        return MSE(whole[2](whole[1](whole[0](x), more[step].chunk(4)[m])), y)

    stages = [Widens(), Appends(4, 4), Narrows()]
    calls = calls_of(random_batches(3), *({"stage_inputs": {1: {"more": t}}} for t in more))
    train(built("1f1b", 4, ranks=3), stages, plain, calls, kwargs_chunk_spec={"more": 0})


def test_inputs_of_a_stage_that_is_not_there_are_refused() -> None:
    x, y = random_batch()
    text = r"stage_inputs: there is no stage 2, only 0"
    with executor_of() as executor, pytest.raises(ExecutionError, match=text):
        executor.step(x, target=y, stage_inputs={2: x})


def test_a_loss_over_tokens_is_weighed_by_tokens() -> None:
    """Padding is uneven, so microbatches hold unequal numbers of tokens: the mean is over those."""
    torch.manual_seed(2)
    stages = [nn.Embedding(7, 4), nn.Linear(4, 7)]
    model = nn.Sequential(*copy.deepcopy(stages))
    tokens = torch.randint(7, (8, 5))
    target = tokens.masked_fill(torch.rand(8, 5) < 0.4, -100)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    def count(target: Tensor) -> Tensor:
        return (target != -100).sum()

    assert count(target[:4]) != count(target[4:])
    with executor_of(stages, loss_fn, count=count) as executor:
        found = executor.step(tokens, target=target).loss
    whole = loss_fn(model(tokens), target)
    whole.backward()
    assert found == pytest.approx(float(whole.detach()), rel=1e-5)
    torch.testing.assert_close(gradients(stages), gradients([model]))


def test_a_stage_may_get_nothing_beside_its_input() -> None:
    x, y = random_batch()
    given: Any
    with executor_of() as executor:
        for given in ({}, (), None):
            executor.step(x, target=y, stage_inputs={1: given})


@pytest.mark.parametrize("said", [-1.0, float("nan")])
def test_a_count_that_is_none_is_refused(said: float) -> None:
    x, y = random_batch()
    with executor_of(count=lambda _: said) as executor:
        assert "count returns" in message_of(executor.step, x, target=y)


def test_a_loss_has_keywords_of_each_microbatch() -> None:
    weights = [torch.rand(8) for _ in range(3)]

    def loss_fn(output: Tensor, target: Tensor, weight: Tensor, power: int) -> Tensor:
        return (((output - target) ** power).mean(1) * weight).mean()

    def plain(whole: Sequence[nn.Module], x: Tensor, y: Tensor, step: int, m: int) -> Tensor:
        return loss_fn(run_stages(whole, x), y, weights[step].chunk(4)[m], 4)

    more = [{"loss_kwargs": {"weight": w, "power": 4}} for w in weights]
    specs = {"weight": 0}
    calls = calls_of(random_batches(3), *more)
    train(built("1f1b", 4), linears(2), plain, calls, loss_fn, kwargs_chunk_spec=specs)


def test_recompute_of_a_stage_that_is_not_there_is_refused() -> None:
    assert "recompute: there is no stage 4, only 0" in message_of(executor_of, recompute=[4])


def test_outputs_come_on_request_by_microbatch() -> None:
    stages = linears(2, lambda: nn.Dropout(0.5))
    ((x, y),) = random_batches(1, rows=7)
    mine = numbered(copy.deepcopy(stages))
    with Executor(built("1f1b", 3), mine, MSE, in_process=True) as executor:
        result = executor.step(x, target=y, outputs=True)
        assert executor.step(x, target=y).outputs is None
        inferred: Any = executor.infer(x)
        evaluated: Any = executor.evaluate(x, target=y, outputs=True).outputs
        assert executor.evaluate(x, target=y).outputs is None
    assert result.outputs is not None
    assert not any(output.requires_grad for output in result.outputs)
    pieces = torch.tensor_split(x, 3)
    trained = [run_stages(stages, piece, (0, 0, m)) for m, piece in enumerate(pieces)]
    assert all(map(torch.equal, result.outputs, trained))
    for stage in stages:
        stage.eval()
    for outputs in (inferred, evaluated):
        assert all(map(torch.equal, outputs, [run_stages(stages, piece) for piece in pieces]))


def test_inputs_made_for_inference_are_taken() -> None:
    with torch.inference_mode():
        x = torch.randn(8, 4)
    stages = linears(2)
    with executor_of(copy.deepcopy(stages)) as executor, torch.no_grad():
        found = executor.infer(x)
        assert found is not None
        assert torch.equal(torch.cat(found), run_stages(stages, x))
