"""How microbatches are weighed: by samples, equally, or not at all."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from reference import plain_step, recurrence_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import schedir
from schedir.runtime import Executor
from schedir.training import evaluate
from tests.runtime.features import built, round_robin
from tests.runtime.kit import (
    MSE,
    Twins,
    gradients,
    linear_stages,
    message_of,
    microbatches_of,
    momentum,
    numbered,
    random_batch,
    random_batches,
    refused,
)
from tests.runtime.lists import stepping
from tests.runtime.on_ranks import on_ranks
from tests.runtime.recurrences import delayed
from tests.runtime.test_losses import plain_losses

WEIGHS = pytest.mark.parametrize("weigh", ["equal", None])


@WEIGHS
@pytest.mark.parametrize("name", ["1f1b", "pipedream", "round-robin", "different rates"])
def test_a_step_is_the_plain_loop(name: str, weigh: str | None) -> None:
    """Though microbatches have unequal rows. Without weights nothing is scaled, at any rate."""
    if name == "different rates":
        sizes = (3, 2)
        train(stepping(sizes, 6), None, weigh, delayed(sizes, 6, lambda s, m: m // sizes[s]))
    else:
        ranks, target = (3, round_robin) if name == "round-robin" else (2, name)
        train(built(target, ranks), None, weigh)


@on_ranks(2)
@WEIGHS
def test_a_step_on_two_ranks_is_the_plain_loop(rank: int, weigh: str | None) -> None:
    train(built("1f1b"), rank, weigh)


def train(
    schedule: schedir.Schedule, rank: int | None, weigh: str | None, recurrence: Any = None
) -> None:
    stages = [stage.double() for stage in linear_stages(schedule.stages)]
    twins = Twins(stages, schedule, rank, momentum)
    recurrence = recurrence or recurrence_of(schedule)
    with twins.executor(weigh=weigh) as executor:
        for x, y in random_batches(2, 9):
            batch = x.double(), y.double()
            result = executor.step(batch[0], target=batch[1])
            assert result.loss == pytest.approx(
                twins.step(batch, recurrence=recurrence, weigh=weigh), rel=1e-15
            )
            assert result.samples == len(result.losses) == 6
    if recurrence.updates[0][0] == recurrence.updates[-1][0] or weigh is None:
        twins.assert_equal()
    for s, module in twins.local.items():  # means over other groups than the loss stage's round
        torch.testing.assert_close(module.state_dict(), twins.whole[s].state_dict())


@on_ranks(4)
@WEIGHS
def test_pipelines_are_weighed_as_one(rank: int, weigh: str | None) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    line, place = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")
    twins = Twins(linear_stages(), built("1f1b"), place, momentum)
    batches = [random_batch(rows, seed=rows) for rows in (9, 6)]
    pieces = [piece for batch in batches for piece in microbatches_of(batch, 6)]
    with twins.executor(mesh=mesh, weigh=weigh) as executor:
        x, y = batches[line]
        found = executor.step(x, target=y)
    options: dict[str, Any] = {"recurrence": recurrence_of(built("1f1b"), 2), "weigh": weigh}
    expected = plain_step(twins.whole, MSE, twins.optimizers, pieces, **options)
    assert found.loss == pytest.approx(expected, rel=1e-15)
    assert found.samples == 12
    twins.assert_equal()


@WEIGHS
def test_calls_without_updates_add_up(weigh: str | None) -> None:
    twins = Twins(linear_stages(), built("pipedream"))
    with twins.executor(weigh=weigh) as executor:
        for x, y in random_batches(2, 9):
            found = executor.step(x, target=y, update=False).loss
            assert found == pytest.approx(twins.accumulate((x, y), weigh=weigh))
            twins.assert_equal_gradients()


@on_ranks(2)
@WEIGHS
def test_the_losses_of_a_short_batch(rank: int, weigh: str | None) -> None:
    """Copies that stand for missing microbatches weigh nothing, and several batches add up."""
    x, y = batch = random_batch(7)
    options: dict[str, Any] = {"weigh": weigh}
    with Executor(built("1f1b"), {rank: linear_stages()[rank]}, MSE, **options) as executor:
        short = executor.evaluate(x[:4], target=y[:4])
        whole = executor.evaluate(x, target=y)
        both = evaluate(executor, [(x, y), (x[:4], y[:4])]).loss
    losses, few = plain_losses(batch, 6), plain_losses((x[:4], y[:4]), 4)
    assert short.losses[:4] == tuple(few)
    assert [*map(math.isnan, short.losses[4:])] == [True] * 2
    assert (short.samples, whole.samples, whole.losses) == (4, 6, tuple(losses))
    parts = [sum(few), sum(losses)]
    if weigh is not None:
        parts = [parts[0] / 4, parts[1] / 6, sum(parts) / 10]
    else:
        parts.append(sum(parts))
    assert [short.loss, whole.loss, both] == pytest.approx(parts, rel=1e-15)


def normalised(output: Tensor, target: Tensor, total: int) -> Tensor:
    """As torchtitan's: the sum over the tokens of a microbatch by the number of all tokens."""
    return MSE(output, target, reduction="sum") / total


@pytest.mark.parametrize(("options", "scale"), [({}, 0.25), ({"weigh": None}, 1.0)])
def test_normalised_losses_need_no_weights(options: dict[str, Any], scale: float) -> None:
    """By samples, the gradient of each is divided once more."""
    x, y = random_batch(8)
    schedule, stages = schedir.build("1f1b", ranks=2, microbatches=4), linear_stages()
    loss_fn = partial(normalised, total=y.numel())
    whole = nn.Sequential(*linear_stages())
    expected = MSE(whole(x), y)
    expected.backward()
    with Executor(schedule, numbered(stages), loss_fn, in_process=True, **options) as executor:
        assert executor.step(x, target=y).loss == pytest.approx(scale * expected.item())
    pairs = zip(gradients(stages), gradients([whole]), strict=True)
    assert all(torch.allclose(a, scale * b) for a, b in pairs if a is not None and b is not None)


def test_sums_are_for_losses_without_weights() -> None:
    x, y = random_batch(8)
    given: dict[str, Any] = {"in_process": True, "weigh": None}
    for loss_fn in (nn.MSELoss(reduction="sum"), partial(MSE, reduction="sum"), MSE):
        with Executor(built("1f1b"), numbered(linear_stages()), loss_fn, **given) as executor:
            beside = {"reduction": "sum"} if loss_fn is MSE else None
            found = executor.step(x, target=y, loss_kwargs=beside).loss
        expected = MSE(nn.Sequential(*linear_stages())(x), y, reduction="sum")
        assert found == pytest.approx(expected.item())
    given["weigh"] = "equal"
    with refused('reduction="sum" makes it a sum; .*or pass weigh=None'):
        Executor(built("1f1b"), numbered(linear_stages()), nn.MSELoss(reduction="sum"), **given)
    weights = nn.CrossEntropyLoss(torch.ones(2))  # a mean over them, if that is meant
    Executor(built("1f1b"), numbered(linear_stages()), weights, **given).close()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"weigh": "rows"}, 'weigh must be "samples", "equal" or None, not \'rows\''),
        ({"weigh": None, "count": len}, "weigh=None does not weigh by samples: leave one"),
        ({"weigh": "equal", "count": len}, "weigh='equal' does not weigh by samples: leave one"),
        ({"gathers": "all"}, 'gathers must be "listed" or "free", not \'all\''),
        ({"gathers": "free"}, "make their own backward, .* pass weigh=None, and no scaler"),
    ],
)
def test_wrong_weights_are_named(options: dict[str, Any], text: str) -> None:
    with refused(text):
        Executor(built("1f1b"), numbered(linear_stages()), MSE, in_process=True, **options)


@on_ranks(2)
def test_ranks_must_agree_on_the_weights(rank: int) -> None:
    stages = {rank: linear_stages()[rank]}
    said = message_of(Executor, built("1f1b"), stages, MSE, weigh=None if rank else "equal")
    assert "different arguments: weigh is equal on process 0, but None on process 1" in said
