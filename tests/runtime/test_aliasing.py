"""Tensors that share memory: what plain training makes of them, or a word of refusal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import schedir
from schedir.runtime import Executor
from tests.literals import listed
from tests.runtime import aliasing
from tests.runtime.kit import MSE, Calls, Twins, microbatches_of, numbered, refused
from tests.sweeps import examples


@examples(150)
@given(st.integers(0, 1 << 32))
def test_stages_that_share_memory_train_as_in_one_piece(seed: int) -> None:
    refused, differs = aliasing.run(seed)
    assert not differs, f"seed {seed}: {differs}"
    # What a module changes after it has returned it, a backward may ask for: torch says so.
    allowed = (
        "plain training fails",
        "in place in its forward",
        "of its input in place",
        "modified by an inplace operation",
    )
    assert not refused or any(text in refused for text in allowed)


V_SHAPED = listed(2, "0 0 0", "0F0 1F0 2F0 0F1 1F1 2F1 2B0 2B1 1B0 1B1 0B0 0B1")
INTERLEAVED = schedir.build("interleaved-1f1b", ranks=1, chunks=2, microbatches=4, group_size=4)
TWO = schedir.build("1f1b", ranks=2, microbatches=2)


@pytest.mark.parametrize("schedule", [INTERLEAVED, V_SHAPED], ids=lambda schedule: schedule.name)
def test_positions_that_are_added_to_the_input(schedule: schedir.Schedule) -> None:
    """Autograd gives the input's gradient and the position's one buffer, which is added to."""
    torch.manual_seed(0)
    positions = [aliasing.Positions() for _ in range(1, schedule.stages)]
    twins = Twins([nn.Sequential(nn.Linear(4, 4), nn.Tanh()), *positions], schedule)
    x, y = torch.randn(2, 2 * schedule.microbatches, 3, 4)
    with twins.executor(optimizer=None) as executor:
        executor.step(x, target=y)
    twins.accumulate((x, y))
    twins.assert_equal_gradients()


class Running(nn.Module):
    """Returns a buffer that its next forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.mean: Tensor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.mean.mul_(0.5).add_(x.detach().mean(0))
        return x, self.mean


def shifted(layer: nn.Module, x: Tensor, shift: Tensor) -> Any:
    return layer(x) + shift


@pytest.mark.parametrize(
    "schedule", [INTERLEAVED, schedir.build("fill-drain", ranks=2, microbatches=4)]
)
def test_a_buffer_that_is_returned_is_what_it_was_then(schedule: schedir.Schedule) -> None:
    stages: dict[int, nn.Module] = {0: Running(), 1: Calls(shifted, nn.Linear(4, 4))}
    x, y = torch.randn(2, 8, 4)
    first, second = copy.deepcopy([*stages.values()])
    with Executor(schedule, stages, MSE, torch.optim.SGD, in_process=True) as executor:
        found = executor.step(x, target=y).loss
    with torch.no_grad():
        losses = [float(MSE(second(*first(a)), b)) for a, b in microbatches_of((x, y), 4)]
    assert found == pytest.approx(sum(losses) / 4)


@pytest.mark.parametrize("recompute", [False, True])
def test_what_a_stage_is_given_may_be_changed_in_place(recompute: bool) -> None:
    changes = Calls(lambda layer, x, scale: layer(x * scale.mul_(2.0)), nn.Linear(4, 4))
    twins = Twins([nn.Linear(4, 4), changes], TWO)
    (x, y), scale, weight = torch.randn(2, 4, 4), torch.rand(4, 4), torch.rand(4)

    def loss_fn(output: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        return MSE(output, target.add_(1.0)) * weight.mul_(3.0).mean()

    given: dict[str, Any] = {"stage_inputs": {1: {"scale": scale}}}
    given["loss_kwargs"] = {"weight": weight}
    before = [t.clone() for t in (scale, y, weight)]
    options: dict[str, Any] = {"kwargs_chunk_spec": {"scale": 0, "weight": 0}, "optimizer": None}
    with twins.executor(loss_fn, recompute=recompute, **options) as executor:
        executor.infer(x, stage_inputs=given["stage_inputs"])
        losses = [executor.evaluate(x, target=y, **given).loss for _ in range(2)]
        losses.append(executor.step(x, target=y, **given).loss)
    assert all(map(torch.equal, (scale, y, weight), before))
    expected = 0.0
    first, last = twins.whole
    for a, b, s, w in zip(*(t.chunk(2) for t in (x, y, scale, weight)), strict=True):
        one = loss_fn(last(first(a), s.clone()), b.clone(), w.clone())
        (one / 2).backward()
        expected += float(one.detach()) / 2
    assert losses == pytest.approx([expected] * 3)
    twins.assert_equal_gradients()


class Recurrent(nn.Module):
    """Goes on from where the microbatch before has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 4)
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.cell(x, self.hidden)
        self.hidden = hidden.detach()
        return hidden  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["fill-drain", "1f1b"])
def test_a_hidden_state_under_recomputation(name: str) -> None:
    twins = Twins([Recurrent(), Recurrent()], schedir.build(name, ranks=2, microbatches=4))
    x, y = torch.randn(2, 8, 4)
    with twins.executor(optimizer=None, recompute=True) as executor:
        for _ in range(2):
            executor.step(x, target=y)
            twins.accumulate((x, y))
    twins.assert_equal_gradients()


def test_aliases_that_the_next_stage_changes_are_refused() -> None:
    twice = Calls(lambda layer, x: ((y := layer(x)), y.detach()[0]), nn.Linear(4, 4))
    adds = Calls(lambda x, side: x + side.add_(1.0))
    x = torch.randn(4, 4)
    executor = Executor(TWO, {0: twice, 1: adds}, MSE, in_process=True)
    with refused(r"changes tensor 1 .* with tensor 0 in the stag"):
        executor.step(x, target=x)
    executor = Executor(TWO, {0: Running(), 1: adds}, MSE, in_process=True)
    with refused(r"tensor 1 .* a stage before keeps for itself"):
        executor.evaluate(x, target=x)


def test_a_batch_that_holds_a_tensor_twice() -> None:
    doubles = Calls(lambda x, same: x.mul_(2.0) + same)
    x = torch.randn(4, 4)
    before = x.clone()
    schedule = schedir.build("1f1b", ranks=1, microbatches=2)
    with Executor(schedule, {0: doubles}, MSE, in_process=True) as executor:
        found = executor.infer((x, x))
    assert torch.equal(torch.cat(found or []), before * 4)
    assert torch.equal(x, before)


@pytest.mark.parametrize(("name", "recompute"), [("1f1b", True), ("pipedream", False)])
def test_a_parameter_that_a_forward_changes_is_not_changed_twice(
    name: str, recompute: bool
) -> None:
    class Decays(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.mul_(0.9)
            return super().forward(x)

    x = torch.randn(4, 4)
    schedule = schedir.build(name, ranks=2, microbatches=2)
    options: dict[str, Any] = {"in_process": True, "recompute": recompute}
    stages = numbered([Decays(4, 4), nn.Linear(4, 4)])
    executor = Executor(schedule, stages, MSE, torch.optim.SGD, **options)
    with refused("stage 0 changes one of its parameters"):
        executor.step(x, target=x)


class Returns(nn.Module):
    """A stage that returns what `made` makes of it and its input."""

    def __init__(self, made: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, 4))
        self.register_buffer("mean", torch.randn(1, 4))
        self._made = made

    def forward(self, x: Tensor) -> Tensor:
        return self._made(self, x)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("target", ["1f1b", "v"])
@pytest.mark.parametrize(
    "made",
    [
        pytest.param(lambda stage, x: stage.query.expand(len(x), 4), id="view of a parameter"),
        pytest.param(lambda stage, x: stage.query, id="parameter"),
        pytest.param(lambda stage, x: stage.mean.expand(len(x), 4), id="view of a buffer"),
        pytest.param(lambda stage, x: x.view(-1, 4), id="view of the input"),
    ],
)
def test_a_stage_may_return_a_view(
    made: Callable[[Any, Tensor], Tensor], target: str, recompute: bool
) -> None:
    """Without a graph, too, one of a parameter says that it requires grad."""
    schedule = V_SHAPED if target == "v" else schedir.build("1f1b", ranks=3, microbatches=2)
    twins = Twins([Returns(made), Returns(made), nn.Linear(4, 4)], schedule)
    whole, x = nn.Sequential(*twins.whole), torch.randn(4, 4)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return (output.mean(0) - target.mean(0)).square().mean()

    pieces = x.chunk(2)
    with twins.executor(loss_fn, optimizer=None, recompute=recompute) as executor:
        with torch.no_grad():
            inferred = zip(executor.infer(x) or (), pieces, strict=True)
            assert all(torch.equal(output, whole(piece)) for output, piece in inferred)
            plain = [float(loss_fn(whole(piece), piece)) for piece in pieces]
        assert executor.evaluate(x, target=x).losses == tuple(plain)
        assert executor.step(x, target=x).losses == tuple(plain)
    for piece in pieces:
        (loss_fn(whole(piece), piece) / 2).backward()
    twins.assert_equal_gradients()
