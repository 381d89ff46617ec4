"""Stages that fully_shard has wrapped: they train as one process does, bit for bit."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import schedir
from schedir.passes import forward_only
from schedir.runtime import Executor
from schedir.training import gathered_state, partition
from tests.built_in import EVERY
from tests.runtime.kit import MSE, adamw, everyone, linear_stages, message_of, random_batch
from tests.runtime.on_ranks import on_ranks
from tests.runtime.test_replicas_on_ranks import accumulate_by_pipeline, clip, pipelines
from tests.sweeps import sweep
from tests.test_sharding import mutant

LONG = 60.0
WIDTH = 4
SYNCHRONOUS = [
    name
    for name in EVERY
    if name not in ("pipedream", "pipedream-2bw", "1f1b-rr", "chimera", "dualpipe")
]
"""Those whose stages are on one rank each, and which keep no older weights."""


class Block(nn.Module):
    """A part of a stage, in a checkpoint or not."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed and torch.is_grad_enabled():
            y: Tensor = checkpoint(self.layers, x, use_reentrant=False)
            return y
        z: Tensor = self.layers(x)
        return z


def blocks(number: int, checkpointed: bool = False) -> list[nn.Module]:
    torch.manual_seed(5)
    return [nn.Sequential(Block(checkpointed), Block(checkpointed)) for _ in range(number)]


def sharded(stage: nn.Module, mesh: DeviceMesh, nested: bool = False, **options: Any) -> nn.Module:
    if nested:
        fully_shard(stage[1], mesh=mesh, **options)  # type: ignore[index]
    return fully_shard(stage, mesh=mesh, **options)  # type: ignore[return-value]


def pipeline_rank(mesh: DeviceMesh) -> int:
    return mesh["pp"].get_local_rank() if "pp" in (mesh.mesh_dim_names or ()) else 0


def whole_of(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def assert_trains(
    rank: int,
    schedule: schedir.Schedule,
    whole: list[nn.Module],
    mesh: DeviceMesh,
    exact: bool = True,
    nested: bool = False,
    **options: Any,
) -> None:
    """Two pipelines of two ranks train the whole model as one process does."""
    over = mesh[tuple(options.get("data_dims", ("dp",)))]
    line = over.get_local_rank() if over.ndim == 1 else over._flatten("both").get_local_rank()
    held = schedule.stages_of(pipeline_rank(mesh))
    local = {s: sharded(copy.deepcopy(whole[s]), over, nested) for s in held}
    optimizers = [adamw(stage.parameters()) for stage in whole]
    lines = over.size()
    with Executor(schedule, local, MSE, adamw, mesh=mesh, timeout=LONG, **options) as executor:
        for step in range(3):
            batches = [random_batch(8, seed=10 * step + other) for other in range(lines)]
            x, y = batches[line]
            result = executor.step(x, target=y)
            loss = accumulate_by_pipeline(whole, batches, schedule.microbatches, step)
            assert result.loss == pytest.approx(loss, rel=1e-6)
            if "clip_grad_norm" in options:
                norm = clip(whole, options["clip_grad_norm"])
                assert result.grad_norm == pytest.approx(norm, rel=1e-6)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for stage, module in local.items():
                pairs = zip(module.parameters(), whole[stage].parameters(), strict=True)
                for mine, theirs in pairs:
                    found = whole_of(mine)
                    assert torch.equal(found, theirs) or (
                        not exact and torch.allclose(found, theirs, rtol=1e-6, atol=1e-6)
                    )
        x, y = random_batch(8, seed=99)
        with torch.no_grad():
            z = nn.Sequential(*whole)(x)
        assert executor.evaluate(x, target=y).loss == pytest.approx(float(MSE(z, y)), rel=1e-5)


@on_ranks(4)
@sweep("name", SYNCHRONOUS, quick=["1f1b", "zb-h1", "interleaved-1f1b"])
@sweep("nested, checkpointed", [(False, False), (True, True)], quick=[(True, True)])
def test_shards_train_as_one_process(
    rank: int, name: str, nested: bool, checkpointed: bool
) -> None:
    schedule = schedir.build(name, ranks=2, microbatches=4)
    pairs = schedule.columns.together  # which need two stages at once
    schedule = schedir.shard(schedule, limit=2 if pairs else 1)
    whole = blocks(schedule.stages, checkpointed)
    exact = name != "looped-bfs"  # it adds the microbatches' gradients in another order
    assert_trains(rank, schedule, whole, pipelines(), exact, nested=nested)


@on_ranks(4)
@pytest.mark.parametrize("options", [{"clip_grad_norm": 0.05}, {"recompute": True}])
def test_with_clipping_and_recomputation(rank: int, options: dict[str, Any]) -> None:
    schedule = schedir.shard(schedir.build("1f1b", ranks=2, microbatches=4))
    exact = "clip_grad_norm" not in options  # the squares of shards are added in another order
    assert_trains(rank, schedule, blocks(2), pipelines(), exact, nested=True, **options)


@on_ranks(4)
def test_shards_of_replicas(rank: int) -> None:
    """HSDP: two data dimensions, and one rank that runs the whole list."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    schedule = schedir.shard(schedir.build("1f1b", ranks=1, microbatches=4))
    dims = ("replicate", "shard")
    assert_trains(rank, schedule, blocks(1), mesh, exact=False, data_dims=dims)


@pytest.mark.long
@on_ranks(8)
def test_shards_of_replicas_in_a_pipeline(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "pp"))
    schedule = schedir.shard(schedir.build("1f1b", ranks=2, microbatches=4))
    dims = ("replicate", "shard")
    assert_trains(rank, schedule, blocks(2), mesh, exact=False, data_dims=dims)


@on_ranks(4)
def test_half_precision_is_that_of_torch(rank: int) -> None:
    """Parameters in bfloat16, sums in float32: as FSDP does without a pipeline."""
    mesh = pipelines()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    schedule = schedir.shard(schedir.build("1f1b", ranks=2, microbatches=2))
    whole = blocks(2)
    dp, pp = mesh["dp"].get_local_rank(), mesh["pp"].get_local_rank()
    local = {pp: sharded(copy.deepcopy(whole[pp]), mesh["dp"], mp_policy=policy)}
    plain = nn.Sequential(*copy.deepcopy(whole))
    for stage in plain:
        sharded(stage, mesh["dp"], mp_policy=policy)
    plain = fully_shard(plain, mesh=mesh["dp"], mp_policy=policy)  # type: ignore[assignment]
    optimizer = adamw(plain.parameters())

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return MSE(output.float(), target)

    with Executor(schedule, local, loss_fn, adamw, mesh=mesh, timeout=LONG) as executor:
        for step in range(3):
            x, y = random_batch(4, seed=10 * step + dp)
            executor.step(x, target=y)
            for m, (a, b) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
                plain.set_requires_gradient_sync(m == 1)  # type: ignore[operator]
                (loss_fn(plain(a), b) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            pairs = zip(local[pp].parameters(), plain[pp].parameters(), strict=True)
            assert all(torch.equal(whole_of(a), whole_of(b)) for a, b in pairs)


@on_ranks(4)
def test_shards_are_gathered_for_an_export(rank: int) -> None:
    mesh = pipelines()
    schedule = schedir.shard(schedir.build("1f1b", ranks=2, microbatches=4))
    stages = partition([nn.Linear(4, 4), nn.Linear(4, 2)], schedule, rank=pipeline_rank(mesh))
    for stage in stages.values():
        fully_shard(stage, mesh=mesh["dp"])
    with Executor(schedule, stages, MSE, adamw, mesh=mesh, timeout=LONG) as executor:
        state = gathered_state(executor)
    assert (state is not None) is (rank == 0)
    if state is not None:
        assert {tuple(value.shape) for value in state.values()} == {(4, 4), (4,), (2, 4), (2,)}
        assert not any(isinstance(value, DTensor) for value in state.values())
    everyone("all have seen it")


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """How often weights are gathered and gradients reduced inside."""
    counts = {"all_gather_single": 0, "reduce_scatter_single": 0}

    def counting(name: str) -> Any:
        real = getattr(dist, name)

        def call(*args: Any, **keywords: Any) -> Any:
            counts[name] += 1
            return real(*args, **keywords)

        return call

    with monkeypatch.context() as patch:
        for name in counts:
            patch.setattr(dist, name, counting(name))
        yield counts


@on_ranks(4)
@pytest.mark.parametrize("limit", [None, 1])
def test_as_many_gathers_and_sums_as_listed(
    rank: int, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = pipelines()
    schedule = schedir.build("interleaved-1f1b", ranks=2, microbatches=4)
    schedule = schedir.shard(schedule, limit=limit)
    whole, pp = blocks(4), mesh["pp"].get_local_rank()
    local = {s: sharded(whole[s], mesh["dp"]) for s in schedule.stages_of(pp)}
    x, y = random_batch(8)
    tokens = [str(action) for action in schedule.flat[pp]]
    with Executor(schedule, local, MSE, adamw, mesh=mesh, timeout=LONG) as executor:
        for _ in range(2):
            with counted(monkeypatch) as counts:
                executor.step(x, target=y)
            assert counts["all_gather_single"] == sum("UNSHARD" in token for token in tokens)
            assert counts["reduce_scatter_single"] == sum("REDUCE" in token for token in tokens)


CLEAN = {"1f1b": (107, 116, 148), "interleaved-1f1b": (26, 33, 40), "looped-bfs": (1, 14, 33)}
"""By name, seeds whose mutants are other lists, and clean: those of the first 150."""


@on_ranks(4)
@sweep("name", CLEAN, quick=["1f1b"])
def test_a_changed_list_that_is_proved_trains_and_gathers_as_listed(
    rank: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = schedir.shard(schedir.build(name, ranks=2, microbatches=4), limit=1)
    for seed in CLEAN[name]:
        changed = mutant(plain, random.Random(seed))
        assert changed != plain
        assert schedir.check(changed).ok
        tokens = [str(action) for action in changed.flat[pipeline_rank(pipelines())]]
        with counted(monkeypatch) as counts:
            assert_trains(rank, changed, blocks(changed.stages), pipelines(), exact=False)
        evaluated = forward_only(changed).flat[pipeline_rank(pipelines())]
        gathers = 3 * sum("UNSHARD" in token for token in tokens)
        gathers += sum("UNSHARD" in str(action) for action in evaluated)
        # A comparison of whole weights gathers too, by another collective.
        assert counts["all_gather_single"] == gathers


@on_ranks(4)
def test_nothing_is_gathered_that_the_list_does_not_gather(rank: int) -> None:
    mesh = pipelines()
    schedule = schedir.shard(schedir.build("1f1b", ranks=2, microbatches=4))
    pp = pipeline_rank(mesh)
    stage = sharded(blocks(2)[pp], mesh["dp"], nested=True)
    x, y = random_batch(8)
    with Executor(schedule, {pp: stage}, MSE, adamw, mesh=mesh, timeout=LONG) as executor:
        executor.step(x, target=y)
        for module in (stage, stage[1]):  # type: ignore[index]
            assert "fully_shard gathers weights that the list does not" in message_of(module, x)
        executor.step(x, target=y)


def refused(mesh: DeviceMesh, schedule: Any, stage: Any, **options: Any) -> str:
    given = {pipeline_rank(mesh): stage}
    return message_of(Executor, schedule, given, MSE, adamw, mesh=mesh, **options)


@on_ranks(4)
def test_what_does_not_fit_is_refused_before_anything_moves(rank: int) -> None:
    mesh = pipelines()
    plain = schedir.build("1f1b", ranks=2, microbatches=4)
    listed = schedir.shard(plain)
    dp = mesh["dp"]
    stage = linear_stages()[0]
    assert "never gathers its weights: pass schedir.shard" in refused(
        mesh, plain, fully_shard(copy.deepcopy(stage), mesh=dp)
    )
    assert "its module is not sharded: wrap it by fully_shard" in refused(
        mesh, listed, copy.deepcopy(stage)
    )
    inner = copy.deepcopy(stage)
    fully_shard(inner[0], mesh=dp)  # type: ignore[index]
    assert "but not the stage itself; wrap the whole module" in refused(mesh, listed, inner)
    over = fully_shard(copy.deepcopy(stage), mesh=mesh["pp"])
    assert "pass fully_shard the data dimensions" in refused(mesh, listed, over)
    away = fully_shard(copy.deepcopy(stage), mesh=dp, offload_policy=CPUOffloadPolicy(False))
    assert "offloads to the CPU" in refused(mesh, listed, away)
    mixed = copy.deepcopy(stage)
    mixed[0].bias.data = mixed[0].bias.data.double()  # type: ignore[index]
    assert "together; wrap those of each dtype" in refused(
        mesh, listed, fully_shard(mixed, mesh=dp)
    )
    assert "data_dims" in refused(mesh, plain, stage, data_dims=("data",))
    assert "pipeline_dim" in refused(mesh, plain, stage, pipeline_dim="stages")
    everyone("all are refused")
