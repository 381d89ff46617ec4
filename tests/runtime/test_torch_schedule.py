"""`TorchSchedule`: the interface of torch's schedules, with the bits of torch's own runtime."""

from __future__ import annotations

import copy
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

import schedir
from schedir.runtime import TorchSchedule
from schedir.runtime.torch_schedule import stages_of as stages_here
from tests.runtime.kit import refused
from tests.runtime.on_ranks import on_ranks
from tests.torch_schedules import GENERATORS, V_SHAPED, stages_of

SINGLE = ("Schedule1F1B", "ScheduleGPipe")
LONG = 120.0
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "keyword masks": {"mask": True},
    "loss_kwargs": {"loss_kwargs": {"scale": torch.tensor(0.7)}},
    "scale_grads": {"scale_grads": False},
    "outputs": {"outputs": True},
    "eval": {"evaluates": True, "mask": True},
    "accumulation": {"accumulates": True, "scale_grads": False},
    "ready microbatches": {"ready": True, "mask": True},
    "no loss": {"loss_fn": None, "outputs": True},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        made = torch.relu(self.one(x))
        found: Tensor = x + self.other(made if mask is None else made * mask)
        return found


def mse(output: Tensor, target: Tensor, scale: Tensor | None = None) -> Tensor:
    loss = nn.functional.mse_loss(output, target)
    return loss if scale is None else loss * scale


def made(name: str, microbatches: int = 8, mesh: Any = None, **options: Any) -> Any:
    """A schedule of torch's over this rank's stages, on a mesh or on all processes."""
    rank, ranks, options = dist.get_rank(), dist.get_world_size(), {"loss_fn": mse} | options
    group = None
    if mesh is not None:
        rank, ranks, group = mesh["pp"].get_local_rank(), mesh["pp"].size(), mesh["pp"].get_group()
    number = ranks * (1 if name in SINGLE else 2)
    torch.manual_seed(0)
    blocks = [Block() for _ in range(number)]
    own = [rank] if name in SINGLE else stages_of(rank, ranks, name)
    if mesh is not None:
        for stage in own:
            fully_shard(blocks[stage], mesh=mesh["dp"])
    cpu = torch.device("cpu")
    stages = [PipelineStage(blocks[stage], stage, number, cpu, group=group) for stage in own]
    given: Any = stages[0] if name in SINGLE else stages
    return getattr(torch_schedules, name)(given, microbatches, **options)


def calls(
    theirs: Any,
    runs: Any,
    mask: bool = False,
    outputs: bool = False,
    evaluates: bool = False,
    accumulates: bool = False,
    ready: bool = False,
    seed: int = 1,
    **options: Any,
) -> list[Any]:
    """What two calls leave on this rank: outputs, losses and gradients."""
    stages, number, found = stages_here(theirs), theirs._n_microbatches, []
    first, last = (any(getattr(s, which) for s in stages) for which in ("is_first", "is_last"))
    draws = torch.Generator().manual_seed(seed)
    for step in range(2):
        x, y = (torch.randn(2 * number, 3, 8, generator=draws) for _ in range(2))
        masks = torch.rand(2 * number, 3, 1, generator=draws)
        losses, given = [torch.ones(())], dict(options)
        arguments = (x,) if first else ()
        if theirs._loss_fn is not None:
            given["losses"] = losses
            given |= {"target": y} if last else {}
        given |= {"mask": masks} if mask else {}
        if ready and runs is not theirs:
            arguments = ()
            given["arg_mbs"] = [(one,) for one in x.tensor_split(number)] if first else None
            given["kwarg_mbs"] = [{"mask": one} for one in given.pop("mask").tensor_split(number)]
            given["target_mbs"] = [*given.pop("target").tensor_split(number)] if last else None
        if evaluates and step:
            output = runs.eval(*arguments, **given)
        else:
            output = runs.step(*arguments, return_outputs=outputs, **given)
        found.append(None if output is None else output.detach().clone())
        if last and "losses" in given:
            assert len(losses) == number
            found += [loss.detach().clone() for loss in losses]
            if runs is not theirs:
                assert not any(loss.requires_grad or loss.dim() for loss in losses)
        modules = [stage.submod for stage in stages]
        grads = (p.grad for module in modules for p in module.parameters())
        found += [None if grad is None else torch.clone(grad) for grad in grads]
        for module in modules:
            if not accumulates:
                module.zero_grad()
    return found


def same(found: list[Any], expected: list[Any]) -> bool:
    return len(found) == len(expected) and all(
        mine is theirs if mine is None or theirs is None else torch.equal(mine, theirs)
        for mine, theirs in zip(map(whole, found), map(whole, expected), strict=True)
    )


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def compare(name: str, case: str, microbatches: int = 8, mesh: Any = None) -> None:
    """Make the calls of a case on torch's runtime and on ours."""
    options = dict(CASES[case])
    making = {key: options.pop(key) for key in ("scale_grads", "loss_fn") if key in options}
    mine = made(name, microbatches, mesh, **making)
    runs = TorchSchedule(mine)
    seed = 1 if mesh is None else 1 + mesh["dp"].get_local_rank()
    found = calls(mine, runs, seed=seed, **options)
    runs.close()
    if name in V_SHAPED and (case in ("eval", "no loss")):
        return  # torch's own runtime fails there: "can't steal_bwd_input"
    theirs = made(name, microbatches, mesh, **making)
    assert same(found, calls(theirs, theirs, seed=seed, **options)), (name, case)


@pytest.mark.filterwarnings("ignore")  # some of torch's schedules warn that they are new
@on_ranks(2)
@pytest.mark.parametrize("case", CASES)
def test_calls_leave_what_torchs_own_leave(rank: int, case: str) -> None:
    for name in (*SINGLE, *GENERATORS):
        compare(name, case)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.long(LONG)
@on_ranks(2)
def test_many_microbatches_leave_what_torchs_own_leave(rank: int) -> None:
    for name in (*SINGLE, *GENERATORS):
        compare(name, "plain", 48 if "Interleaved" in name else 47)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.long(LONG)
@on_ranks(4)
@pytest.mark.parametrize("case", ["plain", "keyword masks", "scale_grads"])
def test_calls_on_four_ranks_leave_what_torchs_own_leave(rank: int, case: str) -> None:
    for name in (*SINGLE, *GENERATORS):
        compare(name, case)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.long(LONG)
@on_ranks(4)
@pytest.mark.parametrize("case", ["plain", "scale_grads"])
def test_sharded_stages_leave_what_torchs_own_leave(rank: int, case: str) -> None:
    """The mesh is found by that of fully_shard."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    for name in ("ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"):
        compare(name, case, mesh=mesh)


@on_ranks(2)
def test_what_differs_on_purpose_and_what_is_set(rank: int) -> None:
    mine = made("Schedule1F1B", 4)
    once, twice = TorchSchedule(copy.copy(mine)), TorchSchedule(mine, timeout=50)
    module = stages_here(mine)[0].submod
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    given: dict[str, Any] = {"target": y} if rank else {}
    first = () if rank else (x,)
    once.step(*first, **given)
    alone = [p.grad.clone() for p in module.parameters()]
    before = twice.timeout
    twice.step(*first, **given)  # what was there is not divided again
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(module.parameters(), alone, strict=True))
    limit = twice.executor._engine.session.groups
    assert before == limit.timeout == timedelta(seconds=50)
    twice.timeout = 40
    module.train()
    twice.eval(*first, **given)
    assert module.training
    assert limit.timeout == limit.patience.timeout == timedelta(seconds=40)
    for one in (once, twice):
        one.close()


@on_ranks(2)
def test_any_list_of_the_same_stages_takes_the_place_of_torchs(rank: int) -> None:
    theirs, mine = made("ScheduleZBVZeroBubble"), made("ScheduleZBVZeroBubble")
    runs = TorchSchedule(mine, schedule=schedir.build("zbv", ranks=2, microbatches=8))
    assert same(calls(mine, runs), calls(theirs, theirs))
    runs.close()


def stage(**options: Any) -> Any:
    given: dict[str, Any] = {"num_stages": 2, "stage_index": 1, "is_first": False, "is_last": True}
    return SimpleNamespace(**given | {"dw_builder": None, "has_backward": True} | options)


def skipping() -> Any:
    node = SimpleNamespace(op="call_module", name="first")
    names = {"first": 0, "second": 1, "third": 2}
    options = {"pipe_info": None, "submod_to_stage_index": names, "stage_index": 2}
    return stage(node=SimpleNamespace(args=(node,)), **options)


def test_what_cannot_be_honoured_is_refused() -> None:
    def single(of: Any) -> Any:
        return torch_schedules.Schedule1F1B(of, 4, loss_fn=mse)

    good = single(stage())
    for option, said in (({"optimizer": None}, "optimizer=: torch's"), ({"count": 1}, "count=:")):
        with refused(said):
            TorchSchedule(good, **option)
    with refused("has 8 microbatches, but torch's schedule 4"):
        TorchSchedule(good, schedule=schedir.build("1f1b", ranks=2, microbatches=8))
    for of, said in ((stage(dw_builder=print), "dw_builder"), (skipping(), "skips a stage")):
        with refused(said):
            TorchSchedule(single(of))
    for name, value, said in (
        ("_backward_requires_autograd", False, "backward_requires_autograd=False"),
        ("_comp_type_to_function_map", {1: print}, "register_custom_function"),
    ):
        made = TorchSchedule(later := single(stage()))
        setattr(later, name, value)
        with refused(said):
            made.step(torch.ones(4))
    with refused("takes a schedule object of torch.distributed.pipelining, not int"):
        TorchSchedule(3)
    both = TorchSchedule(good)
    with refused("not both"):
        both.step(torch.ones(4), arg_mbs=[()] * 4)
