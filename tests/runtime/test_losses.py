"""What a call tells of its microbatches: their losses, their samples, and what is kept of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import schedir
from schedir import Action, Pipeline, backward, forward, optim_step, reduce_grad
from schedir.runtime import Executor
from tests.runtime.far import FarDevice
from tests.runtime.kit import (
    MSE,
    Batch,
    Twins,
    adamw,
    assert_equal_stages,
    everyone,
    linear_stages,
    message_of,
    microbatches_of,
    numbered,
    random_batch,
    split,
)
from tests.runtime.on_ranks import on_ranks


def plain_losses(batch: Batch, number: int) -> list[float]:
    """Of the stages as they are made, microbatch by microbatch."""
    model = nn.Sequential(*linear_stages())
    with torch.no_grad():
        return [float(MSE(model(x), y)) for x, y in microbatches_of(batch, number)]


def right(output: Tensor, target: Tensor) -> int:
    return int((output.argmax(-1) == target.argmax(-1)).sum())


@on_ranks(2)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_each_rank_has_the_losses_of_all_microbatches(rank: int, microbatches: int) -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=microbatches)
    x, y = batch = random_batch(rows=7)
    expected = plain_losses(batch, microbatches)
    with Executor(schedule, {rank: linear_stages()[rank]}, MSE, adamw) as executor:
        results = [executor.evaluate(x, target=y), executor.step(x, target=y)]
        executor.step(x, target=y)
        for result in results:
            assert result.losses == tuple(expected)
            assert result.samples == 7
        short = executor.evaluate(x[:1], target=y[:1])
        assert [*map(math.isnan, short.losses)] == [False] + [True] * (microbatches - 1)
        assert short.samples == 1
        assert short.loss == short.losses[0]


@on_ranks(2)
def test_losses_are_read_late_on_a_device_that_queues(rank: int, far: FarDevice) -> None:
    """Nobody waits for them within the steps, though the host knows no count of samples."""
    schedule = schedir.build("1f1b", ranks=2, microbatches=3)
    x, y = batch = random_batch(rows=7)
    stage = linear_stages()[rank]
    options: dict[str, Any] = {"count": lambda target: torch.tensor(2 * len(target))}
    with Executor(schedule, {rank: stage}, MSE, adamw, **options) as executor:
        with far.step():
            results = [executor.step(x, target=y) for _ in range(3)]
        found = [(result.losses, result.samples) for result in results]
    assert found[0] == (tuple(plain_losses(batch, 3)), 14.0)
    assert everyone(found) == [found] * 2


@schedir.schedule("mixed-up", placement=lambda pipe: [0, (1, 2)])
def mixed_up(pipe: Pipeline, rank: int) -> Iterator[Action]:
    """Replicas of the loss, each of which takes its microbatches from the last to the first."""
    taken = [m for m in reversed(range(pipe.microbatches)) if not rank or m % 3 % 2 == rank - 1]
    for make in (forward, backward):
        for m in taken:
            yield make(min(rank, 1), m)
    if rank:
        yield reduce_grad(1)
    yield optim_step(min(rank, 1))


@on_ranks(3)
def test_replicas_of_the_last_stage_tell_each_other(rank: int) -> None:
    schedule = schedir.build(mixed_up, ranks=3, microbatches=3)
    x, y = batch = random_batch(rows=7)
    place = min(rank, 1)
    with Executor(schedule, {place: linear_stages()[place]}, MSE, adamw) as executor:
        result = executor.evaluate(x, target=y, outputs=right)
    assert result.losses == tuple(plain_losses(batch, 3))
    assert result.samples == 7
    model = nn.Sequential(*linear_stages())
    first, second, third = (right(model(a), b) for a, b in microbatches_of(batch, 3))
    assert result.outputs == [None, [first, None, third], [None, second, None]][rank]


@pytest.mark.parametrize("ready", [False, True])
def test_outputs_and_losses_are_numbered_by_microbatch(ready: bool) -> None:
    """Whatever the order that they are made in, and whichever replica makes them."""
    schedule = schedir.build(mixed_up, ranks=3, microbatches=5)
    batch = random_batch(rows=7)
    pieces = microbatches_of(batch, 5)
    given: Any = map(list, zip(*pieces, strict=True)) if ready else batch
    inputs, target = given
    stages = linear_stages()
    model = nn.Sequential(*copy.deepcopy(stages))
    with Executor(schedule, numbered(stages), MSE, adamw, in_process=True) as executor:
        for call in (executor.evaluate, executor.step):
            result = call(inputs, target=target, outputs=lambda output, _: output)
            assert result.losses == tuple(plain_losses(batch, 5))
            for output, (a, _) in zip(result.outputs or (), pieces, strict=True):
                assert torch.equal(output, model(a))


@on_ranks(4)
def test_losses_of_the_first_pipeline_come_first(rank: int) -> None:
    mesh = DeviceMesh("cpu", [[3, 0], [2, 1]], mesh_dim_names=("dp", "pp"))
    line, place = mesh.get_coordinate() or ()
    schedule = schedir.build("1f1b", ranks=2, microbatches=3)
    batches = [random_batch(rows=rows, seed=rows) for rows in (7, 2)]
    with Executor(schedule, {place: linear_stages()[place]}, MSE, mesh=mesh) as executor:
        x, y = batches[line]
        result = executor.evaluate(x, target=y)
        assert executor.gather((line, place)) == [(0, 1), (1, 1), (1, 0), (0, 0)]
    assert result.losses[:5] == (*plain_losses(batches[0], 3), *plain_losses(batches[1], 2))
    assert math.isnan(result.losses[5])
    assert len(result.losses) == 6
    assert result.samples == 9
    assert everyone((result.loss, result.losses[:5])) == [(result.loss, result.losses[:5])] * 4


def test_a_function_of_the_outputs_sees_each_with_its_target() -> None:
    schedule = schedir.build("interleaved-1f1b", ranks=2, microbatches=4)
    x, y = batch = random_batch(rows=6)
    stages = linear_stages(4)
    model = nn.Sequential(*copy.deepcopy(stages))
    options: dict[str, Any] = {"in_process": True, "recompute": True}
    with Executor(schedule, numbered(stages), MSE, adamw, **options) as executor:
        seen: list[Tensor] = []

        def kept(output: Tensor, target: Tensor) -> Tensor:
            assert not output.requires_grad
            seen.append(target)
            return output - target

        short = executor.evaluate(x[:2], target=y[:2], outputs=kept).outputs
        seen.clear()
        found = executor.step(x, target=y, outputs=kept).outputs
        assert executor.gather("alone") == ["alone"]
    assert len(short or ()) == 2  # without the copies that stand for the missing microbatches
    assert len(seen) == 4  # not again by the forwards that are run again
    for one, (a, b) in zip(found or (), microbatches_of(batch, 4), strict=True):
        assert torch.equal(one, model(a) - b)


def in_place(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """As it draws random numbers, too, it may change what others compute with."""
    torch.rand(3)
    return output.sigmoid_(), target.zero_()


def noisy_loss(output: Tensor, target: Tensor) -> Tensor:
    return MSE(output + torch.rand_like(output), target)


@pytest.mark.parametrize(
    ("name", "last", "recompute"),
    [
        ("fill-drain", nn.Identity(), False),
        ("interleaved-1f1b", nn.Tanh(), True),
        ("zb-h1", nn.Sigmoid(), False),
    ],
)
def test_a_function_of_the_outputs_changes_nothing(
    name: str, last: nn.Module, recompute: bool
) -> None:
    """Nothing that the loss is taken of, nor what the stage has saved for its backward."""
    schedule = schedir.build(name, ranks=2, microbatches=3)
    stages = linear_stages(schedule.stages)
    stages[-1] = nn.Sequential(nn.Linear(4, 4), last)
    whole = [numbered(copy.deepcopy(stages)) for _ in range(2)]
    x, y = random_batch(rows=6)
    before = y.clone()
    options: dict[str, Any] = {"in_process": True, "recompute": recompute}
    found = []
    given: list[Any] = [False, in_place]
    for held, outputs in zip(whole, given, strict=True):
        with Executor(schedule, held, noisy_loss, adamw, **options) as executor:
            calls = (executor.step, outputs), (executor.evaluate, outputs), (executor.step, True)
            results = [call(x, target=y, outputs=kept) for call, kept in calls]
        found.append([(result.loss, result.losses) for result in results])
    assert found[0] == found[1]
    assert torch.equal(y, before)
    assert_equal_stages(whole[1], list(whole[0].values()))
    model = nn.Sequential(*stages)
    for (output, target), a in zip(results[0].outputs or (), x.chunk(3), strict=True):
        assert torch.equal(output, model(a).sigmoid())
        assert not target.any()


class Lends(nn.Module):
    """Returns tensors that it, or somebody else, goes on using."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.mean: Tensor
        self.calls: list[Tensor] = []

    def forward(self, x: Tensor, beside: Tensor) -> dict[str, Tensor]:
        self.mean.add_(x.detach().mean(0))
        self.calls.append(torch.ones(2))
        return {
            "weight": self.linear.weight[:2],
            "bias": self.linear.bias.expand(len(x), 4),
            "mean": self.mean,
            "hidden": self.calls[-1],
            "beside": beside[:],
            "input": x.view(-1),
            "output": self.linear(x),
        }


def lent_loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
    loss = MSE(output["output"] + output["bias"], target) + output["weight"].square().mean()
    with torch.no_grad():
        output["output"].zero_()
    return loss


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["step", "evaluate", "infer"])
def test_what_a_caller_gets_stays_what_it_was(kind: str, ranks: int) -> None:
    schedule = schedir.build("pipedream", ranks=ranks, microbatches=3)
    stages = {**numbered(linear_stages(ranks)), ranks - 1: Lends()}
    x, y = random_batch(rows=6)
    given = [x.clone(), y.clone()]
    seen: list[dict[str, Tensor]] = []
    stages[ranks - 1].register_forward_hook(
        lambda module, arguments, output: seen.append(
            {name: tensor.detach().clone() for name, tensor in output.items()}
        )
    )
    with Executor(schedule, stages, lent_loss, adamw, in_process=True) as executor:
        beside = {ranks - 1: split(y, 3)}
        if kind == "infer":
            found = executor.infer(x, stage_inputs=beside)
        else:
            call = getattr(executor, kind)
            found = call(x, target=y, stage_inputs=beside, outputs=True).outputs
        expected = list(seen)
        executor.step(x, target=y, stage_inputs=beside)
        assert found is not None
        assert len(expected) == 3
        for mine, theirs in zip(found, expected, strict=True):
            assert [name for name in theirs if not torch.equal(mine[name], theirs[name])] == []
        kept = copy.deepcopy([*stages.values()])
        for mine in found:
            for tensor in mine.values():
                tensor.fill_(7.0)
    assert all(map(torch.equal, (x, y), given))
    assert_equal_stages(stages, kept)


WEIGHT = torch.tensor([0.0, 1.0, 3.5], dtype=torch.float64)


def train_weighed(rank: int | None, target: Sequence[int], **options: Any) -> None:
    """As on the whole batch at once, in double precision; the microbatches weigh unequally."""
    torch.manual_seed(6)
    layers: list[nn.Module] = [nn.Linear(4, 4), nn.Linear(4, 3)]
    twins = Twins(
        [layer.double() for layer in layers], schedir.build("1f1b", ranks=2, microbatches=3), rank
    )
    x, y = torch.randn(len(target), 4, dtype=torch.float64), torch.tensor(target)
    loss_fn = nn.CrossEntropyLoss(weight=WEIGHT)
    loss = loss_fn(nn.Sequential(*twins.whole)(x), y)
    loss.backward()
    options |= {"count": lambda target: WEIGHT[target].sum(), "optimizer": None}
    with twins.executor(loss_fn, **options) as executor:
        assert executor.evaluate(x, target=y).loss == pytest.approx(loss.item(), rel=1e-12)
        result = executor.step(x, target=y)
    assert result.loss == pytest.approx(loss.item(), rel=1e-12)
    assert result.samples == WEIGHT[y].sum().item()
    for s, stage in twins.local.items():
        mine, theirs = ([p.grad for p in one.parameters()] for one in (stage, twins.whole[s]))
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("target", [(1, 2, 2, 0, 2, 1, 1), (1, 2, 1, 0, 0, 1, 2)])
@pytest.mark.parametrize("recompute", [False, True])
def test_losses_weighed_by_class_are_those_of_the_whole_batch(
    target: tuple[int, ...], recompute: bool
) -> None:
    """Also where a microbatch has only classes that weigh nothing: its own mean is 0/0."""
    train_weighed(None, target, recompute=recompute)


@on_ranks(2)
def test_losses_weighed_by_class_on_ranks(rank: int) -> None:
    train_weighed(rank, (1, 2, 1, 0, 0, 1, 2))


@on_ranks(2)
def test_a_function_of_the_outputs_that_fails_ends_all_ranks(rank: int) -> None:
    def fails(output: Tensor, target: Tensor) -> None:
        raise ValueError("no such class")

    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    x, y = random_batch()
    executor = Executor(schedule, {rank: linear_stages()[rank]}, MSE)
    message_of(executor.evaluate, x, target=y, outputs=fails)  # rank 0 is done by then
    assert "1F0: ValueError: no such class" in message_of(executor.gather, None)
