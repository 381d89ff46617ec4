"""Parameters that several processes hold: pipelines in parallel, and replicas of a stage.

They train as one model does, and what makes their copies differ is found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from reference import plain_step, recurrence_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import schedir
from schedir.runtime import Executor
from tests.literals import listed
from tests.runtime.features import round_robin
from tests.runtime.kit import (
    MSE,
    Batch,
    Twins,
    adamw,
    everyone,
    linear_stages,
    message_of,
    microbatches_of,
    noisy_stages,
    random_batch,
    random_batches,
    sgd,
)
from tests.runtime.on_ranks import on_ranks
from tests.sweeps import long

LONG = 60.0  # seconds, of which none should be waited


def pipelines(*dims: str) -> DeviceMesh:
    """Two of them, of two ranks each."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=dims or ("dp", "pp"))


def accumulate_by_pipeline(
    whole: Sequence[nn.Module], batches: Sequence[Batch], schedule: schedir.Schedule, step: int
) -> float:
    """Each batch's gradients accumulated as its pipeline does, then added; the mean loss."""
    cut = (microbatches_of(batch, schedule.microbatches) for batch in batches)
    recurrence = recurrence_of(schedule, len(batches))
    return plain_step(whole, MSE, (), [*chain(*cut)], recurrence, seed=(0, step))


def clip(whole: Sequence[nn.Module], norm: float) -> float:
    parameters = [p for stage in whole for p in stage.parameters()]
    return float(torch.nn.utils.clip_grad_norm_(parameters, norm))


@on_ranks(4)
@pytest.mark.parametrize(
    ("name", "dims", "options"),
    [
        ("1f1b", ("dp", "pp"), {}),
        ("fill-drain", ("pp", "dp"), {}),
        ("interleaved-1f1b", ("dp", "pp"), {"clip_grad_norm": 0.05}),
        ("1f1b", ("dp", "pp"), {"recompute": True}),
    ],
)
def test_two_pipelines_train_as_one_model(
    rank: int, name: str, dims: tuple[str, str], options: dict[str, Any]
) -> None:
    """Their batches are of unequal size, and uneven themselves."""
    mesh = pipelines(*dims)
    line = mesh.get_local_rank("dp")
    schedule = schedir.build(name, ranks=2, microbatches=3)
    twins = Twins(noisy_stages(schedule.stages), schedule, mesh.get_local_rank("pp"))
    generator = torch.Generator().manual_seed(1)
    with twins.executor(mesh=mesh, **options) as executor:
        for step in range(4):
            drawn = [torch.randn(n, 4, generator=generator) for n in (7, 7, 4, 4)]
            batches = [(drawn[0], drawn[1]), (drawn[2], drawn[3])]
            x, y = batches[line]
            result = executor.step(x, target=y)
            expected = accumulate_by_pipeline(twins.whole, batches, schedule, step)
            assert result.loss == pytest.approx(expected, abs=1e-6)
            assert everyone(result.loss) == [result.loss] * 4
            if "clip_grad_norm" in options:
                assert result.grad_norm == clip(twins.whole, options["clip_grad_norm"])
            twins.update()
        evaluated = executor.evaluate(x, target=y).loss
    model = nn.Sequential(*twins.whole).eval()
    with torch.no_grad():
        expected = sum(len(x) * float(MSE(model(x), y)) / 11 for x, y in batches)
    assert evaluated == pytest.approx(expected, abs=1e-6)
    twins.assert_equal()


@on_ranks(4)
@pytest.mark.parametrize("optimizer", [None, torch.optim.SGD])
def test_gradients_add_up_over_calls(rank: int, optimizer: Any) -> None:
    """Without an optimiser each call's sum is added once; without an update sums can wait."""
    mesh = pipelines()
    line, place = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    whole = linear_stages()
    batches = [torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(n)) for n in range(4)]
    for x, y in batches:
        (MSE(whole[1](whole[0](x)), y) / 2).backward()
    module: Any = linear_stages()[place]
    module.add_module("unused", nn.Linear(4, 4))  # in nobody's forward
    module.forward = lambda x: module[1](module[0](x))
    with Executor(schedule, {place: module}, MSE, optimizer, mesh=mesh) as executor:
        for call in range(2):
            x, y = batches[2 * call + line]
            executor.step(x, target=y, update=optimizer is None)
        if optimizer is not None:
            for reduction in executor._engine.gradients.reductions.values():
                reduction.post()
                reduction.finish()
    mine = {name: p.grad for name, p in module[0].named_parameters()}
    expected = {name: p.grad for name, p in whole[place][0].named_parameters()}  # type: ignore[index]
    torch.testing.assert_close(mine, expected, atol=1e-7, rtol=1e-5)
    assert module[2].weight.grad is None


@on_ranks(2)
def test_a_loss_has_the_bits_of_one_process(rank: int) -> None:
    """Each rank has a replica of the last stage, which runs half of the microbatches."""
    schedule = schedir.build("chimera", ranks=2, microbatches=6)
    here, alone = (dict(enumerate(s.double() for s in linear_stages())) for _ in range(2))
    with (
        Executor(schedule, here, MSE) as on_ranks,
        Executor(schedule, alone, MSE, in_process=True) as in_process,
    ):
        for seed in range(10):
            generator = torch.Generator().manual_seed(seed)
            x, y = torch.randn(2, 18, 4, generator=generator, dtype=torch.float64)
            assert on_ranks.evaluate(x, target=y).loss == in_process.evaluate(x, target=y).loss


@on_ranks(3)
def test_replicas_of_a_stage_train_as_one_model(rank: int) -> None:
    schedule = schedir.build(round_robin, ranks=3, microbatches=4)
    twins = Twins(noisy_stages(2), schedule, rank)
    with twins.executor(clip_grad_norm=1e6) as executor:
        for step, (x, y) in enumerate(random_batches(3, rows=9)):
            result = executor.step(x, target=y)
            accumulate_by_pipeline(twins.whole, [(x, y)], schedule, step)
            assert result.grad_norm == pytest.approx(clip(twins.whole, 1e6), abs=1e-6)
            twins.update()
    twins.assert_equal()


@on_ranks(3)
def test_replicas_may_form_a_chain(rank: int) -> None:
    """Stage 0 on ranks 0 and 1, stage 1 on ranks 1 and 2, and one that only adds to the sum."""
    schedule = listed(
        2,
        "0,1 1,2",
        "0F0 0SEND_ACT0 0RECV_GRAD0 0B0 0REDUCE_GRAD 0OPTIM_STEP",
        "1RECV_ACT0 0F1 1F0 1B0 1SEND_GRAD0 1F1 1B1 0B1 0REDUCE_GRAD 1REDUCE_GRAD "
        "0OPTIM_STEP 1OPTIM_STEP",
        "1REDUCE_GRAD 1OPTIM_STEP",
    )
    twins = Twins(linear_stages(), schedule, rank)
    with twins.executor() as executor:
        for x, y in (random_batch(rows, seed) for seed, rows in enumerate((4, 4, 6, 4))):
            executor.step(x, target=y)
            accumulate_by_pipeline(twins.whole, [(x, y)], schedule, 0)
            twins.update()
    twins.assert_equal()


def executor_of(place: int, module: nn.Module, **options: Any) -> Executor:
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    return Executor(schedule, {place: module}, MSE, adamw, **options)


@on_ranks(4)
def test_copies_that_differ_at_the_start_are_refused(rank: int) -> None:
    mesh = pipelines()
    place = mesh.get_local_rank("pp")
    module: Any = linear_stages()[place]
    if rank == 3:  # the same numbers, but not in the same places
        module[0].weight.data = module[0].weight.data.flip(0)
    said = message_of(executor_of, place, module, mesh=mesh)
    assert "stage 1 differs between processes 1 and 3" in said


@on_ranks(4)
@pytest.mark.parametrize(
    ("shape", "dims", "text"),
    [
        (None, (), "4 processes run; for several pipelines, pass mesh="),
        ((2, 2), ("a", "b"), "name them so, or pass pipeline_dim= and data_dims="),
        ((4, 1), ("dp", "pp"), "the mesh 1 in its dimension pp"),
    ],
)
def test_meshes_that_do_not_fit_are_refused(
    rank: int, shape: tuple[int, int] | None, dims: tuple[str, ...], text: str
) -> None:
    place = rank % 2
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=dims) if shape else None
    assert text in message_of(executor_of, place, linear_stages()[place], mesh=mesh)


@on_ranks(4)
def test_sharded_modules_are_refused(rank: int) -> None:
    mesh = pipelines()
    place = mesh.get_local_rank("pp")
    module = linear_stages()[place]
    fully_shard(module, mesh=mesh["dp"])
    said = message_of(executor_of, place, module, mesh=mesh)
    assert f"stage {place} is wrapped by fully_shard" in said


def two_copies(module: nn.Module, **options: Any) -> Executor:
    """Two pipelines of one rank each."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    schedule = schedir.build("1f1b", ranks=1, microbatches=2)
    return Executor(schedule, {0: module}, MSE, sgd, mesh=mesh, **options)


def said_of_drift(
    rank: int, change: Callable[[Executor, Any], None], timeout: float = LONG
) -> list[str]:
    """What each of two pipelines is told, of which one changes its copy after some steps."""
    module = linear_stages()[0]
    executor = two_copies(module, timeout=timeout)
    x, y = random_batch()

    def train() -> None:
        for step in range(40):
            if step == 5 and rank == 1:
                change(executor, module)
            executor.step(x, target=y)

    return everyone(message_of(train))


@on_ranks(2)
@pytest.mark.parametrize("what", ["weight", "rate"])
def test_copies_that_drift_apart_are_found(rank: int, what: str) -> None:
    def change(executor: Executor, module: Any) -> None:
        if what == "weight":
            module[0].weight.data.add_(1e-3)
        else:
            executor.optimizers[0].param_groups[0]["lr"] = 0.02

    said = said_of_drift(rank, change)
    assert any("stage 0 differs between processes" in text for text in said)


@long
@on_ranks(2)
def test_a_parameter_that_one_replica_freezes_is_named(rank: int) -> None:
    def freeze(_: Executor, module: Any) -> None:
        module[0].bias.requires_grad_(False)

    # The other one, whose call is not refused, waits for this rank in vain.
    assert "0.bias of stage 0 was frozen since" in said_of_drift(rank, freeze, timeout=5)[1]


@on_ranks(2)
def test_copies_that_stay_equal_train_on(rank: int) -> None:
    assert said_of_drift(rank, lambda executor, module: None) == ["", ""]


@on_ranks(2)
def test_what_is_frozen_on_one_replica_is_named_at_the_start(rank: int) -> None:
    module: Any = linear_stages()[0]
    module[0].bias.requires_grad_(rank == 0)
    said = message_of(two_copies, module)
    assert "what is frozen of stage 0 differs between processes 0 and 1" in said


@on_ranks(2)
def test_sparse_gradients_are_not_summed(rank: int) -> None:
    stage = nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Linear(4, 4))
    tokens, y = torch.randint(7, (4, 3)), torch.randn(4, 3, 4)
    said = message_of(two_copies(stage).step, tokens, target=y)
    assert "shape [7, 4] is sparse and can't be summed" in said
