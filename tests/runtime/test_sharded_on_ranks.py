"""Stages that fully_shard has wrapped: they train as one process does, bit for bit."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Replicate, Shard

import schedir
from schedir.passes import forward_only
from schedir.runtime import Executor
from tests.built_in import EVERY
from tests.runtime.kit import (
    MSE,
    Calls,
    Checkpointed,
    adamw,
    everyone,
    linear_stages,
    message_of,
    microbatches_of,
    random_batch,
)
from tests.runtime.on_ranks import name_of, on_ranks
from tests.runtime.test_meshes_on_ranks import Experts as Split
from tests.runtime.test_meshes_on_ranks import whole_of
from tests.runtime.test_replicas_on_ranks import accumulate_by_pipeline, clip, pipelines
from tests.sweeps import sweep
from tests.test_sharding import mutant

LONG = 60.0
WIDTH = 4
OTHERS = ("pipedream", "pipedream-2bw", "1f1b-rr", "chimera", "dualpipe")
SYNCHRONOUS = [name for name in EVERY if name not in OTHERS]
"""Those whose stages are on one rank each, and which keep no older weights."""


def blocks(number: int, checkpointed: bool = False) -> list[nn.Module]:
    """Stages of two parts each, which are checkpointed or not."""
    torch.manual_seed(5)
    kind = Checkpointed if checkpointed else nn.Sequential
    parts = [kind(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2 * number)]
    return [nn.Sequential(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)]


def sharded(stage: nn.Module, mesh: DeviceMesh, nested: bool = False, **options: Any) -> nn.Module:
    if nested:
        fully_shard(stage[1], mesh=mesh, **options)  # type: ignore[index]
    return fully_shard(stage, mesh=mesh, **options)  # type: ignore[return-value]


def pipeline_rank(mesh: DeviceMesh) -> int:
    return mesh["pp"].get_local_rank() if "pp" in (mesh.mesh_dim_names or ()) else 0


def assert_trains(
    schedule: schedir.Schedule,
    whole: list[nn.Module],
    mesh: DeviceMesh,
    exact: bool = True,
    nested: bool = False,
    wrap: Callable[..., nn.Module] = sharded,
    **options: Any,
) -> None:
    """Two pipelines of two ranks train the whole model as one process does."""
    over = mesh[tuple(options.get("data_dims", ("dp",)))]
    line = over.get_local_rank() if over.ndim == 1 else over._flatten("both").get_local_rank()
    held = schedule.stages_of(pipeline_rank(mesh))
    local = {s: wrap(copy.deepcopy(whole[s]), over, nested) for s in held}
    optimizers = [adamw(stage.parameters()) for stage in whole]
    lines = over.size()
    with Executor(schedule, local, MSE, adamw, mesh=mesh, timeout=LONG, **options) as executor:
        for step in range(3):
            batches = [random_batch(8, seed=10 * step + other) for other in range(lines)]
            x, y = batches[line]
            result = executor.step(x, target=y)
            loss = accumulate_by_pipeline(whole, batches, schedule, step)
            assert result.loss == pytest.approx(loss, rel=1e-6)
            if "clip_grad_norm" in options:
                norm = clip(whole, options["clip_grad_norm"])
                assert result.grad_norm == pytest.approx(norm, rel=1e-6)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            near = 0 if exact else 1e-6
            for stage, module in local.items():
                pair = [*map(whole_of, module.parameters())], [*whole[stage].parameters()]
                torch.testing.assert_close(*pair, rtol=near, atol=near)
        x, y = random_batch(8, seed=99)
        with torch.no_grad():
            z = nn.Sequential(*whole)(x)
        assert executor.evaluate(x, target=y).loss == pytest.approx(float(MSE(z, y)), rel=1e-5)


@on_ranks(4)
@sweep("name", SYNCHRONOUS, quick=["zb-h1", "interleaved-1f1b"])
@sweep("nested, checkpointed", [(False, False), (True, True)], quick=[(True, True)])
def test_shards_train_as_one_process(
    rank: int, name: str, nested: bool, checkpointed: bool
) -> None:
    schedule = schedir.build(name, ranks=2, microbatches=4)
    pairs = schedule.columns.together  # which need two stages at once
    schedule = schedir.shard(schedule, limit=2 if pairs else 1)
    whole = blocks(schedule.stages, checkpointed)
    exact = name != "looped-bfs"  # it adds the microbatches' gradients in another order
    assert_trains(schedule, whole, pipelines(), exact, nested=nested)


@on_ranks(4)
@pytest.mark.parametrize("options", [{"clip_grad_norm": 0.05}, {"recompute": True}])
def test_with_clipping_and_recomputation(rank: int, options: dict[str, Any]) -> None:
    schedule = schedir.shard(schedir.build("1f1b", ranks=2, microbatches=4))
    exact = "clip_grad_norm" not in options  # the squares of shards are added in another order
    assert_trains(schedule, blocks(2), pipelines(), exact, nested=True, **options)


@sweep("ranks", [4, 8], quick=[4], ids=name_of)
@on_ranks()
def test_shards_of_replicas(rank: int, ranks: int) -> None:
    """HSDP: two data dimensions, and a pipeline of two ranks, or one that runs the whole list."""
    dims, line = ("replicate", "shard"), ranks // 4
    shape, names = (2, 2, line)[: line + 1], (*dims, "pp")[: line + 1]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    schedule = schedir.shard(schedir.build("1f1b", ranks=line, microbatches=4))
    assert_trains(schedule, blocks(line), mesh, exact=False, data_dims=dims)


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
            for m, (a, b) in enumerate(microbatches_of((x, y), 2)):
                plain.set_requires_gradient_sync(m == 1)  # type: ignore[operator]
                (loss_fn(plain(a), b) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            pairs = zip(local[pp].parameters(), plain[pp].parameters(), strict=True)
            assert all(torch.equal(whole_of(a), whole_of(b)) for a, b in pairs)


@on_ranks(4)
def test_a_checkpoint_changes_no_sum_in_another_precision(rank: int) -> None:
    """FSDP widens what has been added when the backward of its input is over."""
    mesh = pipelines()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    schedule = schedir.shard(schedir.build("zb-h1", ranks=2, microbatches=4))
    dp, pp = mesh["dp"].get_local_rank(), mesh["pp"].get_local_rank()

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return MSE(output.float(), target)

    trained = []
    for checkpointed in (False, True):
        local = {pp: sharded(blocks(2, checkpointed)[pp], mesh["dp"], mp_policy=policy)}
        with Executor(schedule, local, loss_fn, adamw, mesh=mesh, timeout=LONG) as executor:
            for step in range(3):
                x, y = random_batch(8, seed=10 * step + dp)
                executor.step(x, target=y)
        trained.append([*map(whole_of, local[pp].parameters())])
    assert all(map(torch.equal, *trained))


def counted(name: str) -> Any:
    """Counts the calls of a collective inside."""
    return patch.object(dist, name, wraps=getattr(dist, name))


def listed(schedule: schedir.Schedule, kind: str, mesh: DeviceMesh) -> int:
    """How many actions here have that in their kind."""
    return sum(kind in str(action) for action in schedule.flat[pipeline_rank(mesh)])


@on_ranks(4)
@pytest.mark.parametrize("limit", [None, 1])
def test_as_many_gathers_and_sums_as_listed(rank: int, limit: int | None) -> None:
    mesh = pipelines()
    schedule = schedir.build("interleaved-1f1b", ranks=2, microbatches=4)
    schedule = schedir.shard(schedule, limit=limit)
    whole = blocks(4)
    local = {s: sharded(whole[s], mesh["dp"]) for s in schedule.stages_of(pipeline_rank(mesh))}
    x, y = random_batch(8)
    with Executor(schedule, local, MSE, adamw, mesh=mesh, timeout=LONG) as executor:
        for _ in range(2):
            with counted("all_gather_single") as gathers, counted("reduce_scatter_single") as sums:
                executor.step(x, target=y)
            assert gathers.call_count == listed(schedule, "UNSHARD", mesh)
            assert sums.call_count == listed(schedule, "REDUCE", mesh)


CLEAN = {"1f1b": (107, 116, 148), "interleaved-1f1b": (26, 33, 40), "looped-bfs": (1, 14, 33)}
"""By name, seeds whose mutants are other lists, and clean: those of the first 150."""


@on_ranks(4)
@sweep("name", CLEAN, quick=["1f1b"])
def test_a_changed_list_that_is_proved_trains_and_gathers_as_listed(rank: int, name: str) -> None:
    mesh = pipelines()
    plain = schedir.shard(schedir.build(name, ranks=2, microbatches=4), limit=1)
    for seed in CLEAN[name]:
        changed = mutant(plain, random.Random(seed))
        assert changed != plain
        assert schedir.check(changed).ok
        with counted("all_gather_single") as gathers:
            assert_trains(changed, blocks(changed.stages), mesh, exact=False)
        # A comparison of whole weights gathers too, by another collective.
        evaluated = listed(forward_only(changed), "UNSHARD", mesh)
        assert gathers.call_count == 3 * listed(changed, "UNSHARD", mesh) + evaluated


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


class Experts(Split):
    """Experts that are split over the processes of the data, which exchange their tokens."""

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(self.experts, DTensor):
            return super().forward(x)
        mesh = self.experts.device_mesh
        shares = self.gate(x).softmax(-1)
        routes = nn.functional.one_hot(shares.argmax(-1), 4) * shares
        every = [
            DTensor.from_local(t, mesh, [Shard(0)]).redistribute(placements=[Replicate()])
            for t in (routes, x)
        ]
        made: Any = torch.einsum("te,td,edf->tf", *every, self.experts)
        y: Tensor = x + made.redistribute(placements=[Shard(0)]).to_local()
        return y


@on_ranks(4)
@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 0.05}])
def test_experts_are_sharded_over_fewer_processes(rank: int, options: dict[str, Any]) -> None:
    """Parameters of one module lie on two meshes."""
    mesh = pipelines()
    sparse = DeviceMesh("cpu", mesh.mesh.t()[:, None], mesh_dim_names=("pp", "efsdp", "ep"))
    torch.manual_seed(5)

    def wrap(stage: Any, over: DeviceMesh, nested: bool) -> Any:
        stage.split(sparse["ep"])
        few, all_of = FSDPMeshInfo(sparse["efsdp"], 0), FSDPMeshInfo(over, 0)

        def placed(parameter: nn.Parameter) -> ShardPlacementResult:
            return ShardPlacementResult(Shard(0), few if parameter is stage.experts else all_of)

        return fully_shard(stage, mesh=over, shard_placement_fn=placed)

    schedule = schedir.shard(schedir.build("1f1b", ranks=2, microbatches=4))
    assert_trains(schedule, [Experts() for _ in range(2)], mesh, False, wrap=wrap, **options)


@on_ranks(4)
def test_replicas_of_torch_train_as_one_process(rank: int) -> None:
    """Their weights are not split, so nothing is gathered."""
    schedule = schedir.shard(schedir.build("1f1b", ranks=2, microbatches=4))

    def wrap(stage: nn.Module, over: DeviceMesh, nested: bool) -> Any:
        return replicate(stage, mesh=over)

    assert_trains(schedule, blocks(2), pipelines(), wrap=wrap)


class Chunked(torch.autograd.Function):
    """A loss whose gradient is known already, and is taken as it is."""

    @staticmethod
    def forward(context: Any, hidden: Tensor, grad: Tensor, loss: Tensor) -> Tensor:
        context.grad = grad
        return loss.clone()

    @staticmethod
    def backward(context: Any, *_: Tensor) -> tuple[Tensor, None, None]:
        return context.grad, None, None


def chunked(head: Any, hidden: Tensor, target: Tensor) -> Tensor:
    """As torchtitan's loss: the head's backward runs in the forward, chunk by chunk."""
    whole = hidden.detach().requires_grad_(hidden.requires_grad)
    total = torch.zeros(())
    head.set_reshard_after_forward(False)
    head.set_reshard_after_backward(False)
    for last, (part, y) in enumerate(zip(whole.chunk(2), target.chunk(2), strict=True)):
        head.set_requires_gradient_sync(bool(last), recurse=False)
        loss = MSE(head(part), y, reduction="sum") / 64
        if hidden.requires_grad:
            loss.backward()
        total += loss.detach()
    head.set_reshard_after_forward(True)
    head.set_reshard_after_backward(True)
    head.reshard()
    apply: Callable[..., Tensor] = Chunked.apply
    return apply(hidden, whole.grad, total) if hidden.requires_grad else total


@on_ranks(4)
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_loss_may_gather_and_sum_by_itself(rank: int, name: str) -> None:
    mesh = pipelines()
    pp, dp = pipeline_rank(mesh), mesh["dp"]
    whole = blocks(3)
    parts = [*copy.deepcopy(whole)][pp : 2 * pp + 1]  # the last stage has the head, for its loss
    for part in parts[1:]:
        fully_shard(part, mesh=dp)
    local: Any = sharded(Calls(lambda body, *others: body(others[-1]), *parts), dp)
    for part in (local, *parts[1:]):
        part.set_gradient_divide_factor(1.0)
    schedule = schedir.shard(schedir.build(name, ranks=2, microbatches=4))
    options: dict[str, Any] = {"weigh": None, "gathers": "free", "timeout": LONG}
    optimizers = [adamw(stage.parameters()) for stage in whole]

    def loss_fn(hidden: Tensor, target: Tensor) -> Tensor:
        return chunked(parts[1], hidden, target)

    with Executor(schedule, {pp: local}, loss_fn, adamw, mesh=mesh, **options) as executor:
        for step in range(2):
            batches = [random_batch(8, seed=10 * step + line) for line in range(2)]
            x, y = batches[dp.get_local_rank()]
            result = executor.step(x, target=y)
            x, y = (torch.cat(both) for both in zip(*batches, strict=True))
            expected = MSE(nn.Sequential(*whole)(x), y)
            expected.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert result.loss == pytest.approx(expected.item())
            theirs = [p for stage in whole[pp : 2 * pp + 1] for p in stage.parameters()]
            torch.testing.assert_close([*map(whole_of, local.parameters())], theirs)


WEIGHED = {(None, None): 1 / 2, (None, 1.0): 1.0, ("equal", None): 1 / 8, ("equal", 2.0): 1 / 16}
"""What sums of gradients are scaled by, of 8 microbatches in 2 pipelines, by `weigh` and by what
fully_shard is told to divide them by: by default by the number of processes, where losses are not
weighed over all of them."""


@on_ranks(4)
@pytest.mark.parametrize(("weigh", "factor"), WEIGHED)
def test_the_divide_factor_is_honoured(rank: int, weigh: str | None, factor: float | None) -> None:
    mesh = pipelines()
    pp = pipeline_rank(mesh)
    whole = blocks(2)
    stage: Any = sharded(copy.deepcopy(whole[pp]), mesh["dp"], nested=True)
    for part in (stage, stage[1]):
        if factor is not None:
            part.set_gradient_divide_factor(factor)
    schedule = schedir.shard(schedir.build("1f1b", ranks=2, microbatches=4))
    batches = [random_batch(8, seed) for seed in range(2)]
    for x, y in (piece for batch in batches for piece in microbatches_of(batch, 4)):
        MSE(nn.Sequential(*whole)(x), y).backward()
    with Executor(schedule, {pp: stage}, MSE, mesh=mesh, weigh=weigh) as executor:
        x, y = batches[mesh["dp"].get_local_rank()]
        executor.step(x, target=y)
    for mine, theirs in zip(stage.parameters(), whole[pp].parameters(), strict=True):
        assert theirs.grad is not None
        torch.testing.assert_close(whole_of(mine.grad), WEIGHED[weigh, factor] * theirs.grad)


@on_ranks(4)
def test_a_first_call_that_fails_before_a_forward_says_why(rank: int) -> None:
    """What FSDP has of a call is made by its first forward."""
    mesh = pipelines()
    pp = pipeline_rank(mesh)
    schedule = schedir.shard(schedir.build("1f1b", ranks=2, microbatches=4))
    stage = sharded(blocks(2)[pp], mesh["dp"])

    def fail(*_: Any) -> None:
        raise ValueError("no such row")

    if not pp:
        stage[0].register_forward_pre_hook(fail)  # type: ignore[index]
    x, y = random_batch(8)
    executor = Executor(schedule, {pp: stage}, MSE, adamw, mesh=mesh, timeout=LONG)
    assert "0F0: ValueError: no such row" in message_of(executor.step, x, target=y)


def refused(mesh: DeviceMesh, schedule: Any, stage: Any, **options: Any) -> str:
    given = {pipeline_rank(mesh): stage}
    return message_of(Executor, schedule, given, MSE, adamw, mesh=mesh, **options)


@on_ranks(4)
def test_what_does_not_fit_is_refused_before_anything_moves(rank: int) -> None:
    mesh = pipelines()
    plain = schedir.build("1f1b", ranks=2, microbatches=4)
    gathering = schedir.shard(plain)
    dp = mesh["dp"]
    whole, inner, mixed = (linear_stages()[0] for _ in range(3))
    wrapped, over, away = (linear_stages()[0] for _ in range(3))
    fully_shard(wrapped, mesh=dp)
    fully_shard(inner.get_submodule("0"), mesh=dp)
    fully_shard(over, mesh=mesh["pp"])
    fully_shard(away, mesh=dp, offload_policy=CPUOffloadPolicy(False))
    bias = mixed.get_parameter("0.bias")
    bias.data = bias.data.double()
    fully_shard(mixed, mesh=dp)
    for schedule, stage, text in (
        (plain, wrapped, "never gathers its weights: pass schedir.shard(schedule)"),
        (gathering, whole, "its module is not sharded: wrap it by fully_shard"),
        (gathering, inner, "but not the stage itself; wrap the whole module"),
        (gathering, over, "pass fully_shard the data dimensions"),
        (gathering, away, "offloads to the CPU"),
        (gathering, mixed, "together; wrap those of each dtype"),
    ):
        assert text in refused(mesh, schedule, stage)
    assert "data_dims" in refused(mesh, plain, whole, data_dims=("data",))
    assert "pipeline_dim" in refused(mesh, plain, whole, pipeline_dim="stages")
    everyone("all are refused")
