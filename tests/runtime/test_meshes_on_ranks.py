"""Meshes with dimensions that are the user's: tensor parallelism inside stages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

import schedir
from schedir.runtime import Executor
from tests.runtime.kit import MSE, Batch, Calls, Twins, adamw, everyone, message_of, random_batch
from tests.runtime.launch import torchrun
from tests.runtime.layouts import LONG, blocks, split_up
from tests.runtime.on_ranks import on_ranks


def whole_of(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def mesh_of(dim: str = "tp") -> tuple[DeviceMesh, int, DeviceMesh]:
    """Two slices of a pipeline of two ranks, the rank in the pipeline, and the other dimension."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", dim))
    return mesh, mesh["pp"].get_local_rank(), mesh[dim]


def executor_of(mesh: DeviceMesh, stage: nn.Module, loss_fn: Any = MSE, **options: Any) -> Executor:
    """Of this process's stage, which the caller steps."""
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    stages = {mesh["pp"].get_local_rank(): stage}
    return Executor(schedule, stages, loss_fn, mesh=mesh, **{"timeout": LONG, **options})


def assert_trains_as_alone(
    whole: Sequence[nn.Module],
    local: dict[int, nn.Module],
    mesh: DeviceMesh,
    name: str = "1f1b",
    batch: Callable[[int], Batch] = lambda step: random_batch(8, seed=step),
    part: Callable[[Executor, Tensor], Tensor] = lambda executor, tensor: tensor,
    **options: Any,
) -> None:
    """As the executor of the whole stages in one process, which is held to plain training
    elsewhere; each process is given its part of a batch."""
    schedule = schedir.build(name, ranks=2, microbatches=4)
    twins = Twins(whole, schedule)
    given = {name: value for name, value in options.items() if name != "data_dims"}
    alone = twins.executor(**given)
    with Executor(schedule, local, MSE, adamw, mesh=mesh, timeout=LONG, **options) as executor:
        for step in range(3):
            x, y = batch(step)
            mine = executor.step(part(executor, x), target=part(executor, y))
            theirs = alone.step(x, target=y)
            assert mine.loss == pytest.approx(theirs.loss, rel=1e-6)
            if "clip_grad_norm" in options:
                assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-6)
        for stage, module in local.items():
            pair = [*map(whole_of, module.parameters())], [*twins.local[stage].parameters()]
            torch.testing.assert_close(*pair, rtol=1e-6, atol=1e-6)
        x, y = batch(99)
        found = executor.evaluate(part(executor, x), target=part(executor, y)).loss
        assert found == pytest.approx(alone.evaluate(x, target=y).loss, rel=1e-6)


@on_ranks(4)
@pytest.mark.parametrize(
    ("name", "options"),
    [("1f1b", {}), ("1f1b", {"clip_grad_norm": 0.05}), ("zb", {}), ("pipedream", {})],
)
def test_split_stages_train_as_whole_ones(rank: int, name: str, options: dict[str, Any]) -> None:
    mesh, pp, tp = mesh_of()
    schedule = schedir.build(name, ranks=2, microbatches=4)
    whole = blocks(schedule.stages)
    local = {s: split_up(copy.deepcopy(whole[s]), tp) for s in schedule.stages_of(pp)}
    assert_trains_as_alone(whole, local, mesh, name, **options)


class Returns(nn.Linear):
    """A stage that returns a DTensor, in rows that are split over processes."""

    def __init__(self, mesh: DeviceMesh, placement: Placement) -> None:
        super().__init__(4, 4)
        self.mesh, self.placement = mesh, placement

    def forward(self, x: Tensor) -> tuple[Tensor, int]:  # type: ignore[override]
        y = DTensor.from_local(super().forward(x), self.mesh, [Replicate()], run_check=False)
        if self.placement.is_partial():
            return DTensor.from_local(y.to_local(), self.mesh, [self.placement]), 1
        return y.redistribute(placements=[self.placement]), 1


class Takes(nn.Linear):
    """A stage that takes its rows of these."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(4, 4)
        self.mesh = mesh

    def forward(self, x: Tensor, one: int) -> Tensor:  # type: ignore[override]
        assert (type(x), one) == (Tensor, 1)
        rows = DTensor.from_local(x, self.mesh, [Shard(0)], run_check=False)
        return super().forward(rows.redistribute(placements=[Replicate()]).to_local())


@on_ranks(4)
def test_the_local_part_of_a_dtensor_travels(rank: int) -> None:
    mesh, pp, tp = mesh_of()
    torch.manual_seed(0)
    stages: list[Any] = [Returns(tp, Shard(0)), Takes(tp)]
    plain = [nn.Linear(4, 4) for _ in stages]
    for one, stage in zip(plain, stages, strict=True):
        one.load_state_dict(stage.state_dict())
    x, y = random_batch(8)
    with executor_of(mesh, stages[pp]) as executor:
        loss = executor.step(x, target=y).loss
    expected = MSE(plain[1](plain[0](x)), y)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert torch.allclose(stages[pp].weight.grad, plain[pp].weight.grad, rtol=1e-5, atol=1e-7)  # type: ignore[arg-type]
    if pp == 0:
        assert isinstance(stages[0](x)[0], DTensor)  # the executor is closed


@on_ranks(4)
def test_a_summand_does_not_travel(rank: int) -> None:
    mesh, pp, tp = mesh_of()
    x, y = random_batch(8)
    executor = executor_of(mesh, Takes(tp) if pp else Returns(tp, Partial()))
    said = message_of(lambda: executor.step(x, target=y).loss)
    assert "sum it first, by redistribute" in said
    everyone("all have failed")


@on_ranks(4)
def test_a_dtensor_is_placed_as_in_the_first_forward(rank: int) -> None:
    mesh, pp, tp = mesh_of()
    stage = Takes(tp) if pp else Returns(tp, Shard(0))
    x, y = random_batch(8)
    executor = executor_of(mesh, stage)
    executor.step(x, target=y)
    if isinstance(stage, Returns):
        stage.placement = Shard(1)
    said = message_of(lambda: executor.step(x, target=y).loss)
    assert "(Shard(dim=1),)], but [(Shard(dim=0),)] in its first forward" in said
    everyone("all have failed")


class Noise(nn.Module):
    """Adds what it draws."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(())


@on_ranks(4)
@pytest.mark.parametrize("seed_dims", [(), ("tp",)])
def test_other_dimensions_draw_apart_if_asked(rank: int, seed_dims: tuple[str, ...]) -> None:
    mesh, _, tp = mesh_of()
    linear = nn.Linear(4, 4)
    nn.init.eye_(linear.weight)
    nn.init.zeros_(linear.bias)
    with executor_of(mesh, nn.Sequential(linear, Noise()), seed_dims=seed_dims) as executor:
        found = executor.step(torch.zeros(2, 4), target=torch.zeros(2, 4)).loss
    losses = dict(everyone((tp.get_local_rank(), found)))
    assert (losses[0] == losses[1]) is (not seed_dims)


@on_ranks(4)
def test_dimensions_that_do_not_fit_are_named(rank: int) -> None:
    mesh, stage = mesh_of()[0], nn.Linear(4, 4)
    wrong: dict[str, dict[str, Any]] = {
        "seed_dims: 'sp' is not one of the mesh's other dimensions": {"seed_dims": ("sp",)},
        "seed_dims: 'pp' is not one": {"seed_dims": ("pp",)},
        "the pipeline's is stages": {"pipeline_dim": "stages"},
        "summed over ('data',)": {"data_dims": ("data",)},
    }
    for text, options in wrong.items():
        assert text in message_of(executor_of, mesh, stage, **options)
    everyone("all are refused")


@on_ranks(4)
def test_processes_with_different_meshes_are_named(rank: int) -> None:
    data_dims = ("tp",) if rank == 3 else ("dp",)
    said = message_of(executor_of, mesh_of()[0], nn.Linear(4, 4), data_dims=data_dims)
    meshes = "(((0, 2),), ((1, 3),)) on process 0, but (((0, 2), (1, 3)),) on process 3"
    assert f"mesh is {meshes}" in said
    everyone("all have seen it")


@on_ranks(4)
def test_slices_that_make_different_calls_are_named(rank: int) -> None:
    mesh, _, tp = mesh_of()
    executor = executor_of(mesh, nn.Linear(4, 4))
    x, y = random_batch(2)
    if tp.get_local_rank():
        with pytest.raises(schedir.ExecutionError) as found:
            executor.evaluate(x, target=y).loss  # noqa: B018
        assert {root.rank for root in found.value.roots} == {0, 1}
        assert "rank 0 (the first process) is step; every rank must make" in str(found.value)
    else:
        executor.step(x, target=y)  # waits for nobody of the other slice
    everyone("slice 1 has failed")
    # An executor that does not know of the failure would end this process with others.
    if not tp.get_local_rank():
        said = message_of(executor.step, x, target=y)
        assert "the first to fail was rank 0" in said
        assert " in vain " not in said


@pytest.mark.long
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_process_that_ends_inside_a_stage_is_the_root(how: str) -> None:
    """The other process of its stage waits for it in a collective of the stage's own."""
    result = torchrun(4, "-m", "tests.runtime.failing_slice", how)
    assert result.returncode
    (root,) = {line for line in result.stderr.splitlines() if line.startswith("schedir: root:")}
    why = "killed by SIGKILL" if how == "SIGKILL" else "no progress for 8.0 s"
    assert root == f"schedir: root: rank 1 step 1 #0 0F0: {why}"


@pytest.mark.long
def test_processes_with_a_mesh_of_others_are_named() -> None:
    """Two are complete without the others, who wait for them."""
    result = torchrun(4, "-m", "tests.runtime.other_processes")
    assert not result.returncode
    said = [lines.splitlines()[-1] for lines in result.outputs]
    assert said[:2] == ["True"] * 2
    named = "missing: process 0, process 1; make the executor on all of them"
    assert all(named in text for text in said[2:])


class Attends(nn.Module):
    """Attention of the tokens here to those of all processes of a mesh; rows × tokens × width."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.mesh = mesh

    def everywhere(self, here: Tensor) -> Tensor:
        if self.mesh is None:
            return here
        parts = DTensor.from_local(here, self.mesh, [Shard(1)], run_check=False)
        return parts.full_tensor(grad_placements=[Partial()])

    def forward(self, x: Tensor) -> Tensor:
        keys, values = self.everywhere(self.key(x)), self.everywhere(self.value(x))
        return x + nn.functional.scaled_dot_product_attention(self.query(x), keys, values)


@on_ranks(4)
def test_parts_of_a_context_train_as_the_whole(rank: int) -> None:
    """The dimension over which the tokens are split is a data dimension."""
    mesh, place, cp = mesh_of("cp")
    torch.manual_seed(5)
    whole = [Attends() for _ in range(2)]
    stage = Attends(cp)
    stage.load_state_dict(whole[place].state_dict())

    def batch(step: int) -> Batch:
        x, y = torch.randn(2, 8, 6, 4, generator=torch.Generator().manual_seed(step))
        return x, y

    def part(executor: Executor, tensor: Tensor) -> Tensor:
        return tensor.chunk(2, dim=1)[executor.pipeline]

    options: dict[str, Any] = {"data_dims": ("cp",), "count": Tensor.numel}
    assert_trains_as_alone(whole, {place: stage}, mesh, batch=batch, part=part, **options)


class Experts(nn.Module):
    """Each token goes to the one of four experts that its gate prefers, on any process of a mesh.

    Experts that are split run on the processes that hold them, and the sum is made over all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4)
        self.experts = nn.Parameter(torch.randn(4, 4, 4) / 2)

    def split(self, mesh: DeviceMesh) -> Experts:
        self.experts = nn.Parameter(distribute_tensor(self.experts.detach(), mesh, [Shard(0)]))
        return self

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(-1)
        chosen = nn.functional.one_hot(shares.argmax(-1), 4) * shares
        if not isinstance(self.experts, DTensor):
            return x + torch.einsum("te,td,edf->tf", chosen, x, self.experts)
        mesh = self.experts.device_mesh
        tokens, routes = (
            DTensor.from_local(t, mesh, [Replicate()], run_check=False) for t in (x, chosen)
        )
        made: Any = torch.einsum("te,td,edf->tf", routes, tokens, self.experts)
        y: Tensor = x + made.redistribute(placements=[Replicate()]).to_local()
        return y


@on_ranks(4)
def test_dtensors_may_be_data(rank: int) -> None:
    """Their local parts tell batches apart."""
    mesh, place, tp = mesh_of()
    batches = [
        [distribute_tensor(t, tp, [Shard(0)]) for t in random_batch(8, seed)] for seed in range(2)
    ]
    layers: list[nn.Module] = [blocks(2)[place]]
    stage = Calls(lambda layer, x: layer(x if place else x.full_tensor()), *layers)

    def loss_fn(output: Tensor, target: Any) -> Tensor:
        return MSE(output, target.full_tensor())

    with executor_of(mesh, stage, loss_fn) as executor:
        (x, y), (_, other) = batches
        found = [executor.step(x, target=y).loss for _ in range(2)]
        found.append(executor.evaluate([*x.chunk(2)], target=[*y.chunk(2)]).loss)
        z = nn.Sequential(*blocks(2))(x.full_tensor())
        assert found == [pytest.approx(MSE(z, y.full_tensor()).item())] * 3
        said = message_of(executor.step, x, target=other if place else y)
    assert "`target` is another batch on rank 1" in said


@on_ranks(4)
def test_experts_on_several_processes_train_as_on_one(rank: int) -> None:
    mesh, place, ep = mesh_of("ep")
    torch.manual_seed(5)
    whole = [Experts() for _ in range(2)]
    stage = copy.deepcopy(whole[place]).split(ep)
    assert_trains_as_alone(whole, {place: stage}, mesh, clip_grad_norm=0.5)
