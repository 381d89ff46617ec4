"""Meshes with dimensions that are the user's: tensor parallelism inside stages."""

from __future__ import annotations

import copy
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
from tests.runtime.kit import MSE, Twins, adamw, everyone, message_of, random_batch
from tests.runtime.launch import torchrun
from tests.runtime.layouts import LONG, blocks, split_up
from tests.runtime.on_ranks import on_ranks


def whole_of(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def assert_near(mine: nn.Module, theirs: nn.Module) -> None:
    """Two modules have the same parameters, to 1e-6."""
    pairs = zip(mine.parameters(), theirs.parameters(), strict=True)
    assert all(torch.allclose(whole_of(a), b, rtol=1e-6, atol=1e-6) for a, b in pairs)


@on_ranks(4)
@pytest.mark.parametrize(
    ("name", "options"),
    [("1f1b", {}), ("1f1b", {"clip_grad_norm": 0.05}), ("zb", {}), ("pipedream", {})],
)
def test_split_stages_train_as_whole_ones(rank: int, name: str, options: dict[str, Any]) -> None:
    """The reference is the executor in one process, which is held to plain training elsewhere."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    schedule = schedir.build(name, ranks=2, microbatches=4)
    whole = blocks(schedule.stages)
    held = schedule.stages_of(mesh["pp"].get_local_rank())
    local = {s: split_up(copy.deepcopy(whole[s]), mesh["tp"]) for s in held}
    twins = Twins(whole, schedule)
    alone = twins.executor(**options)
    with Executor(schedule, local, MSE, adamw, mesh=mesh, timeout=LONG, **options) as executor:
        for step in range(3):
            x, y = random_batch(8, seed=step)
            mine, theirs = (one.step(x, target=y) for one in (executor, alone))
            assert mine.loss == pytest.approx(theirs.loss, rel=1e-6)
            if options:
                assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-6)
        for stage, module in local.items():
            assert_near(module, twins.local[stage])
        x, y = random_batch(8, seed=99)
        losses = [one.evaluate(x, target=y).loss for one in (executor, alone)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)


class Returns(nn.Module):
    """A stage that returns a DTensor, in rows that are split over processes."""

    def __init__(self, mesh: DeviceMesh, placement: Placement) -> None:
        super().__init__()
        self.inner, self.mesh, self.placement = nn.Linear(4, 4), mesh, placement

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        y = DTensor.from_local(self.inner(x), self.mesh, [Replicate()], run_check=False)
        if self.placement.is_partial():
            return DTensor.from_local(y.to_local(), self.mesh, [self.placement]), 1
        return y.redistribute(placements=[self.placement]), 1


class Takes(nn.Module):
    """A stage that takes its rows of these."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.inner, self.mesh = nn.Linear(4, 4), mesh

    def forward(self, x: Tensor, one: int) -> Tensor:
        assert (type(x), one) == (Tensor, 1)
        rows = DTensor.from_local(x, self.mesh, [Shard(0)], run_check=False)
        y: Tensor = self.inner(rows.redistribute(placements=[Replicate()]).to_local())
        return y


@on_ranks(4)
def test_the_local_part_of_a_dtensor_travels(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    pp, tp = mesh["pp"].get_local_rank(), mesh["tp"]
    torch.manual_seed(0)
    stages: list[Any] = [Returns(tp, Shard(0)), Takes(tp)]
    plain = [copy.deepcopy(stage.inner) for stage in stages]
    x, y = random_batch(8)
    with Executor(schedule, {pp: stages[pp]}, MSE, mesh=mesh, timeout=LONG) as executor:
        loss = executor.step(x, target=y).loss
    expected = MSE(plain[1](plain[0](x)), y)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    mine, theirs = stages[pp].inner.weight.grad, plain[pp].weight.grad
    assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-7)
    if pp == 0:
        assert isinstance(stages[0](x)[0], DTensor)  # the executor is closed


@on_ranks(4)
def test_a_summand_does_not_travel(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    pp, tp = mesh["pp"].get_local_rank(), mesh["tp"]
    stage = Returns(tp, Partial()) if pp == 0 else Takes(tp)
    x, y = random_batch(8)
    executor = Executor(schedule, {pp: stage}, MSE, mesh=mesh, timeout=LONG)
    said = message_of(lambda: executor.step(x, target=y).loss)
    assert "sum it first, by redistribute" in said
    everyone("all have failed")


@on_ranks(4)
def test_a_dtensor_is_placed_as_in_the_first_forward(rank: int) -> None:
    """Who takes it sees its local part alone."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    pp, tp = mesh["pp"].get_local_rank(), mesh["tp"]
    stage = Returns(tp, Shard(0)) if pp == 0 else Takes(tp)
    x, y = random_batch(8)
    executor = Executor(schedule, {pp: stage}, MSE, mesh=mesh, timeout=LONG)
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
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    pp, tp = mesh["pp"].get_local_rank(), mesh["tp"].get_local_rank()
    options: dict[str, Any] = {"mesh": mesh, "seed_dims": seed_dims, "timeout": LONG}
    linear = nn.Linear(4, 4)
    nn.init.eye_(linear.weight)
    nn.init.zeros_(linear.bias)
    stage = nn.Sequential(linear, Noise())
    with Executor(schedule, {pp: stage}, MSE, **options) as executor:
        found = executor.step(torch.zeros(2, 4), target=torch.zeros(2, 4)).loss
    losses = dict(everyone((tp, found)))
    assert (losses[0] == losses[1]) is (not seed_dims)


@on_ranks(4)
def test_dimensions_that_do_not_fit_are_named(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    stages = {mesh["pp"].get_local_rank(): nn.Linear(4, 4)}

    def said(**options: Any) -> str:
        return message_of(Executor, schedule, stages, MSE, mesh=mesh, **options)

    assert "seed_dims: 'sp' is not one of the mesh's other dimensions" in said(seed_dims=("sp",))
    assert "seed_dims: 'pp' is not one" in said(seed_dims=("pp",))
    assert "the pipeline's is stages" in said(pipeline_dim="stages")
    assert "summed over ('data',)" in said(data_dims=("data",))
    everyone("all are refused")


@on_ranks(4)
def test_processes_with_different_meshes_are_named(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    stages = {mesh["pp"].get_local_rank(): nn.Linear(4, 4)}
    data_dims = ("tp",) if rank == 3 else ("dp",)
    options: dict[str, Any] = {"mesh": mesh, "data_dims": data_dims, "timeout": LONG}
    said = message_of(Executor, schedule, stages, MSE, **options)
    assert (
        "mesh is (((0, 2),), ((1, 3),)) on process 0, but (((0, 2), (1, 3)),) on process 3" in said
    )
    everyone("all have seen it")


@on_ranks(4)
def test_slices_that_make_different_calls_are_named(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    pp, tp = mesh["pp"].get_local_rank(), mesh["tp"].get_local_rank()
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    executor = Executor(schedule, {pp: nn.Linear(4, 4)}, MSE, mesh=mesh, timeout=LONG)
    x, y = random_batch(2)
    if tp:
        with pytest.raises(schedir.ExecutionError) as found:
            executor.evaluate(x, target=y).loss  # noqa: B018
        assert {root.rank for root in found.value.roots} == {0, 1}
        assert "rank 0 (the first process) is step; every rank must make" in str(found.value)
    else:
        executor.step(x, target=y)  # waits for nobody of the other slice
    everyone("slice 1 has failed")
    if not tp:  # an executor that does not know of the failure would end this process with others
        assert "the first to fail was rank 0" in message_of(executor.step, x, target=y)


@pytest.mark.long
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_process_that_ends_inside_a_stage_is_the_root(how: str) -> None:
    """The other process of its stage waits for it in a collective of the stage's own."""
    result = torchrun(4, "-m", "tests.runtime.failing_slice", how)
    assert result.returncode
    roots = {line for line in result.stderr.splitlines() if line.startswith("schedir: root:")}
    (root,) = roots
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
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "cp"))
    schedule = schedir.build("1f1b", ranks=2, microbatches=4)
    torch.manual_seed(5)
    whole: list[nn.Module] = [Attends() for _ in range(2)]
    place = mesh["pp"].get_local_rank()
    stage = Attends(mesh["cp"])
    stage.load_state_dict(whole[place].state_dict())
    twins = Twins(whole, schedule)
    alone = twins.executor(count=Tensor.numel)
    options = {"mesh": mesh, "data_dims": ("cp",), "count": Tensor.numel, "timeout": LONG}
    with Executor(schedule, {place: stage}, MSE, adamw, **options) as executor:  # type: ignore[arg-type]
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            x, y = torch.randn(2, 8, 6, 4, generator=generator)
            mine, target = (t.chunk(2, dim=1)[executor.pipeline] for t in (x, y))
            found = executor.step(mine, target=target).loss
            assert found == pytest.approx(alone.step(x, target=y).loss, rel=1e-6)
        assert_near(stage, twins.local[place])


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
def test_experts_on_several_processes_train_as_on_one(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    schedule = schedir.build("1f1b", ranks=2, microbatches=4)
    torch.manual_seed(5)
    whole: list[nn.Module] = [Experts() for _ in range(2)]
    place = mesh["pp"].get_local_rank()
    stage = Experts()
    stage.load_state_dict(whole[place].state_dict())
    stage.split(mesh["ep"])
    twins = Twins(whole, schedule)
    alone = twins.executor(clip_grad_norm=0.5)
    options = {"mesh": mesh, "clip_grad_norm": 0.5, "timeout": LONG}
    with Executor(schedule, {place: stage}, MSE, adamw, **options) as executor:  # type: ignore[arg-type]
        for step in range(3):
            x, y = random_batch(8, seed=step)
            found, expected = (one.step(x, target=y) for one in (executor, alone))
            assert found.loss == pytest.approx(expected.loss, rel=1e-6)
            assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-6)
        assert_near(stage, twins.local[place])
