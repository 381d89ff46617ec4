"""Run by torchrun on 2 or 4 ranks: what several processes share of the parameters.

As tests/runtime/scenarios.py, one function per promise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import schedir
from schedir import Action, Pipeline, backward, forward, optim_step, reduce_grad
from schedir.runtime import Executor, rng
from tests.runtime.scenarios import MSE, adamw, compare, linear_stages, main, raises

SCENARIOS: dict[str, tuple[int, Callable[[int], list[str]]]] = {}


def scenario(ranks: int) -> Callable[[Callable[[int], list[str]]], Callable[[int], list[str]]]:
    def keep(function: Callable[[int], list[str]]) -> Callable[[int], list[str]]:
        SCENARIOS[function.__name__] = (ranks, function)
        return function

    return keep


def noisy(number: int) -> list[nn.Module]:
    torch.manual_seed(5)
    return [
        nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.LayerNorm(4), nn.Tanh())
        for _ in range(number)
    ]


def plain_grads(
    whole: list[nn.Module],
    batches: list[tuple[Tensor, Tensor]],
    microbatches: int,
    step: int,
    total: int,
) -> float:
    """Each batch's gradients accumulated as its pipeline does, then added; the mean loss."""
    sums: dict[nn.Parameter, Tensor] = {}
    losses = 0.0
    for line, (x, y) in enumerate(batches):
        pieces = zip(x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True)
        for m, (a, b) in enumerate(pieces):
            h = a
            for s, stage in enumerate(whole):
                rng(0, step, s, line * microbatches + m)
                h = stage(h)
            loss = MSE(h, b)
            (loss * (len(b) / total)).backward()
            losses += len(b) * float(loss.detach())
        for stage in whole:
            for p in stage.parameters():
                if p.grad is not None:
                    sums[p] = sums[p] + p.grad if p in sums else p.grad
                    p.grad = None
    for p, grad in sums.items():
        p.grad = grad
    return losses / total


def data_parallel(target: str, dims: tuple[str, ...], **options: Any) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=dims)
    line, rank = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")
    schedule = schedir.build(target, ranks=2, microbatches=3)
    whole = noisy(schedule.stages)
    local = {s: copy.deepcopy(whole[s]) for s in schedule.stages_of(rank)}
    optimizers = [adamw(stage.parameters()) for stage in whole]
    clip = options.get("clip_grad_norm")
    generator = torch.Generator().manual_seed(1)
    faults = []
    with Executor(schedule, local, MSE, adamw, mesh=mesh, **options) as executor:
        for step in range(4):
            # The pipelines' batches are of unequal size, and uneven themselves.
            batches = [
                (torch.randn(n, 4, generator=generator), torch.randn(n, 4, generator=generator))
                for n in (7, 4)
            ]
            x, y = batches[line]
            result = executor.step(x, target=y)
            expected = plain_grads(whole, batches, 3, step, 11)
            if abs(result.loss - expected) > 1e-6:
                faults.append(f"loss of step {step}: {result.loss} != {expected}")
            everyone: list[Any] = [None] * 4
            dist.all_gather_object(everyone, result.loss)
            if len(set(everyone)) > 1:
                faults.append(f"losses differ: {everyone}")
            if clip is not None:
                parameters = [p for stage in whole for p in stage.parameters()]
                norm = float(torch.nn.utils.clip_grad_norm_(parameters, clip))
                if result.grad_norm != norm:
                    faults.append(f"norm of step {step}: {result.grad_norm} != {norm}")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        x, y = batches[line]
        found = executor.evaluate(x, target=y).loss
    with torch.no_grad():
        for stage in whole:
            stage.eval()
        loss = 0.0
        for x, y in batches:
            h = x
            for stage in whole:
                h = stage(h)
            loss += len(x) * float(MSE(h, y)) / 11
    if abs(found - loss) > 1e-6:
        faults.append(f"evaluation: {found} != {loss}")
    for s, module in local.items():
        faults += compare(module, whole[s], s)
    return faults


@scenario(4)
def two_pipelines(rank: int) -> list[str]:
    return data_parallel("1f1b", ("dp", "pp"))


@scenario(4)
def two_pipelines_across(rank: int) -> list[str]:
    return data_parallel("fill-drain", ("pp", "dp"))


@scenario(4)
def two_pipelines_of_chunks_clipped(rank: int) -> list[str]:
    return data_parallel("interleaved-1f1b", ("dp", "pp"), clip_grad_norm=0.05)


@scenario(4)
def two_pipelines_recompute(rank: int) -> list[str]:
    return data_parallel("1f1b", ("dp", "pp"), recompute=True)


@scenario(4)
def asynchronous_pipelines(rank: int) -> list[str]:
    """Every replica's weights stay equal, though versions are stashed."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    line, rank = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")
    schedule = schedir.build("pipedream", ranks=2, microbatches=4)
    module = linear_stages()[rank]
    torch.manual_seed(line)
    with Executor(schedule, {rank: module}, MSE, adamw, mesh=mesh) as executor:
        x, y = torch.randn(2, 8, 4)
        first = executor.step(x, target=y).loss
        for _ in range(20):
            last = executor.step(x, target=y).loss
    found: list[Any] = [None] * 4
    dist.all_gather_object(found, [p.detach() for p in module.parameters()])
    twins = zip(found[rank], found[rank + 2], strict=True)
    faults = [] if last < first else [f"nothing was learnt: {first} to {last}"]
    return faults + ["replicas differ" for a, b in twins if not torch.equal(a, b)]


@scenario(4)
def gradients_add_up_over_calls(rank: int) -> list[str]:
    """Without an optimiser each call's sum is added once; without an update sums can wait."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    line, rank = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    whole = linear_stages()
    batches = [torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(n)) for n in range(4)]
    for x, y in batches:
        (MSE(whole[1](whole[0](x)), y) / 2).backward()
    faults = []
    frozen = nn.Linear(4, 4)  # in nobody's forward
    for optimizer in (None, torch.optim.SGD):
        module = linear_stages()[rank]
        module.add_module("unused", copy.deepcopy(frozen))
        module.forward = lambda x, m=module: m[1](m[0](x))
        with Executor(schedule, {rank: module}, MSE, optimizer, mesh=mesh) as executor:
            for call in range(2):
                x, y = batches[2 * call + line]
                executor.step(x, target=y, update=optimizer is None)
            if optimizer is not None:
                for reduction in executor._engine.parts.reductions.values():
                    reduction.post()
                    reduction.finish()
        for name, p in module[0].named_parameters():  # type: ignore[index]
            want = dict(whole[rank][0].named_parameters())[name].grad  # type: ignore[index]
            if p.grad is None or not torch.allclose(p.grad, want, atol=1e-7):
                faults.append(f"{name} under {optimizer}: {p.grad} != {want}")
        if module[2].weight.grad is not None:  # type: ignore[index]
            faults.append("what nobody uses has a gradient")
    return faults


@scenario(4)
def copies_that_differ_are_refused(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    rank = mesh.get_local_rank("pp")
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    module = linear_stages()[rank]
    if dist.get_rank() == 3:
        with torch.no_grad():
            weight = module[0].weight  # type: ignore[index]
            weight.copy_(weight.flip(0))  # the same numbers, but not in the same places
    error = schedir.ExecutionError
    return [
        *raises(
            error,
            "stage 1 differs between processes 1 and 3",
            lambda: Executor(schedule, {rank: module}, MSE, adamw, mesh=mesh),
        ),
        *raises(
            error,
            "4 processes run; for several pipelines, pass mesh=",
            lambda: Executor(schedule, {rank: module}, MSE, adamw),
        ),
        *raises(
            error,
            "must be named dp and pp",
            lambda: Executor(
                schedule,
                {rank: module},
                MSE,
                adamw,
                mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp")),
            ),
        ),
        *raises(
            error,
            "the mesh 1 in its dimension pp",
            lambda: Executor(
                schedule,
                {rank: module},
                MSE,
                adamw,
                mesh=init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "pp")),
            ),
        ),
    ]


@scenario(4)
def sharded_modules_are_refused(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    rank = mesh.get_local_rank("pp")
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    module = linear_stages()[rank]
    fully_shard(module, mesh=mesh["dp"])
    return raises(
        schedir.ExecutionError,
        f"stage {rank} is wrapped by fully_shard",
        lambda: Executor(schedule, {rank: module}, MSE, adamw, mesh=mesh),
    )


@schedir.schedule("round-robin", placement=lambda pipe: [(0, 1), 2])
def round_robin(pipe: Pipeline, rank: int) -> Iterator[Action]:
    """PipeDream's 1F1B-RR, flushed: two replicas of stage 0 take turns."""
    own = range(rank, pipe.microbatches, 2) if rank < 2 else range(pipe.microbatches)
    stage = 0 if rank < 2 else 1
    for m in own:
        yield forward(stage, m)
        if stage:
            yield backward(stage, m)
    if not stage:
        for m in own:
            yield backward(stage, m)
        yield reduce_grad(stage)
    yield optim_step(stage)


@scenario(3)
def replicas_of_a_stage(rank: int) -> list[str]:
    schedule = schedir.build(round_robin, ranks=3, microbatches=4)
    whole = noisy(2)
    local = {s: copy.deepcopy(whole[s]) for s in schedule.stages_of(rank)}
    optimizers = [adamw(stage.parameters()) for stage in whole]
    generator = torch.Generator().manual_seed(1)
    faults = []
    with Executor(schedule, local, MSE, adamw, clip_grad_norm=1e6) as executor:
        for step in range(3):
            x = torch.randn(9, 4, generator=generator)
            y = torch.randn(9, 4, generator=generator)
            result = executor.step(x, target=y)
            norm = plain_replicas(whole, x, y, step, optimizers)
            if result.grad_norm is None or abs(result.grad_norm - norm) > 1e-6:
                faults.append(f"norm of step {step}: {result.grad_norm} != {norm}")
    for s, module in local.items():
        faults += compare(module, whole[s], s)
    return faults


def plain_replicas(
    whole: list[nn.Module],
    x: Tensor,
    y: Tensor,
    step: int,
    optimizers: list[torch.optim.Optimizer],
) -> float:
    """Stage 0's gradients are added up by replica first, as REDUCE_GRAD finds them."""
    halves: list[list[Tensor]] = []
    inputs, targets = x.tensor_split(4), y.tensor_split(4)
    last: list[Tensor] = []
    for replica in range(2):
        whole[0].zero_grad()
        for m in range(replica, 4, 2):
            h = inputs[m]
            for s, stage in enumerate(whole):
                rng(0, step, s, m)
                h = stage(h)
            (MSE(h, targets[m]) * (len(targets[m]) / 9)).backward()
        halves.append([p.grad for p in whole[0].parameters() if p.grad is not None])
    # Stage 1 runs all microbatches in their order.
    whole[1].zero_grad()
    for m in range(4):
        rng(0, step, 0, m)
        h = whole[0](inputs[m]).detach()
        rng(0, step, 1, m)
        (MSE(whole[1](h), targets[m]) * (len(targets[m]) / 9)).backward()
    last = [p.grad for p in whole[1].parameters() if p.grad is not None]
    first = [a + b for a, b in zip(*halves, strict=True)]
    for stage, grads in zip(whole, (first, last), strict=True):
        for p, grad in zip(stage.parameters(), grads, strict=True):
            p.grad = grad
    parameters = [p for stage in whole for p in stage.parameters()]
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in parameters]))  # type: ignore[misc]
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return norm


def pair() -> list[nn.Module]:
    torch.manual_seed(2)
    first = nn.Linear(4, 4)
    last = nn.Linear(4, 4)
    with torch.no_grad():
        last.weight.copy_(first.weight)
    return [first, nn.Sequential(nn.Tanh(), last)]


@scenario(2)
def ties_and_clipping_over_two_ranks(rank: int) -> list[str]:
    """The sum over stages is taken last, which rounds differently from one parameter's sums."""
    schedule = schedir.build("1f1b", ranks=2, microbatches=4)
    whole = pair()
    local = copy.deepcopy(whole[rank])
    whole[1][1].weight = whole[0].weight  # type: ignore[index]
    model = nn.Sequential(*whole)
    optimizer = adamw(model.parameters())
    generator = torch.Generator().manual_seed(1)
    faults = []
    ties = [[(0, "weight"), (1, "1.weight")]]
    with Executor(schedule, {rank: local}, MSE, adamw, ties=ties, clip_grad_norm=0.5) as executor:
        for step in range(4):
            x = torch.randn(8, 4, generator=generator)
            y = torch.randn(8, 4, generator=generator)
            result = executor.step(x, target=y)
            for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
                (MSE(model(a), b) / 4).backward()
            norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            if result.grad_norm is None or abs(result.grad_norm - norm) > 1e-6:
                faults.append(f"norm of step {step}: {result.grad_norm} != {norm}")
            optimizer.step()
            optimizer.zero_grad()
    mine = dict(local.named_parameters())
    for name, p in whole[rank].named_parameters():
        if not torch.allclose(mine[name], p, atol=1e-6):
            faults.append(f"{name} differs by {(mine[name] - p).abs().max()}")
    found: list[Any] = [None, None]
    dist.all_gather_object(found, mine["weight" if rank == 0 else "1.weight"].detach())
    return faults if torch.equal(*found) else [*faults, "the tied copies differ"]


@scenario(2)
def clipping_over_two_ranks(rank: int) -> list[str]:
    schedule = schedir.build("interleaved-1f1b", ranks=2, microbatches=4)
    whole = noisy(4)
    local = {s: copy.deepcopy(whole[s]) for s in schedule.stages_of(rank)}
    optimizers = [adamw(stage.parameters()) for stage in whole]
    generator = torch.Generator().manual_seed(1)
    faults = []
    with Executor(schedule, local, MSE, adamw, clip_grad_norm=0.05) as executor:
        for step in range(4):
            x = torch.randn(8, 4, generator=generator)
            y = torch.randn(8, 4, generator=generator)
            result = executor.step(x, target=y)
            plain_grads(whole, [(x, y)], 4, step, 8)
            parameters = [p for stage in whole for p in stage.parameters()]
            norm = float(torch.nn.utils.clip_grad_norm_(parameters, 0.05))
            if result.grad_norm != norm:
                faults.append(f"norm of step {step}: {result.grad_norm} != {norm}")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for s, module in local.items():
        faults += compare(module, whole[s], s)
    return faults


@scenario(3)
def ties_that_overlap_in_ranks(rank: int) -> list[str]:
    """Rank 1 makes more groups than the others, which must find each other all the same; twice."""
    schedule = schedir.build("1f1b", ranks=3, microbatches=2)
    faults = []
    for _ in range(2):
        torch.manual_seed(0)
        layers = [(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3)]
        with torch.no_grad():
            layers[1][0].weight.copy_(layers[0][0].weight)
            layers[2][1].weight.copy_(layers[1][1].weight)
        whole = [nn.Sequential(*pair) for pair in layers]
        ties = [[(0, "0.weight"), (1, "0.weight")], [(1, "1.weight"), (2, "1.weight")]]
        with Executor(schedule, {rank: whole[rank]}, MSE, adamw, ties=ties) as executor:
            x, y = torch.randn(2, 4, 4)
            executor.step(x, target=y)
        found: list[Any] = [None] * 3
        dist.all_gather_object(found, [layer.weight.detach() for layer in layers[rank]])
        if not torch.equal(found[0][0], found[1][0]) or not torch.equal(found[1][1], found[2][1]):
            faults.append("tied copies differ")
    return faults


@scenario(3)
def replicas_in_a_chain(rank: int) -> list[str]:
    """Stage 0 on ranks 0 and 1, stage 1 on ranks 1 and 2, and one that only adds to the sum."""
    schedule = schedir.loads(
        "schedir 1\nname chain\nmicrobatches 2\nplacement 0,1 1,2\n"
        "rank 0: 0F0 0SEND_ACT0 0RECV_GRAD0 0B0 0REDUCE_GRAD 0OPTIM_STEP\n"
        "rank 1: 1RECV_ACT0 0F1 1F0 1B0 1SEND_GRAD0 1F1 1B1 0B1 0REDUCE_GRAD 1REDUCE_GRAD "
        "0OPTIM_STEP 1OPTIM_STEP\n"
        "rank 2: 1REDUCE_GRAD 1OPTIM_STEP\n"
    )
    whole = linear_stages()
    local = {s: copy.deepcopy(whole[s]) for s in schedule.stages_of(rank)}
    optimizers = [adamw(stage.parameters()) for stage in whole]
    generator = torch.Generator().manual_seed(1)
    with Executor(schedule, local, MSE, adamw) as executor:
        for rows in (4, 4, 6, 4):
            x, y = torch.randn(2, rows, 4, generator=generator)
            executor.step(x, target=y)
            plain_grads(whole, [(x, y)], 2, 0, rows)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return [fault for s, module in local.items() for fault in compare(module, whole[s], s)]


@scenario(3)
def clipping_past_a_stage_without_parameters(rank: int) -> list[str]:
    schedule = schedir.build("1f1b", ranks=3, microbatches=2)
    whole = [*linear_stages(), nn.Tanh()]
    local = copy.deepcopy(whole[rank])
    model = nn.Sequential(*whole)
    x, y = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(1))
    with Executor(schedule, {rank: local}, MSE, adamw, clip_grad_norm=0.05) as executor:
        result = executor.step(x, target=y)
    for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
        (MSE(model(a), b) / 2).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05))
    return [] if result.grad_norm == norm else [f"norm {result.grad_norm} != {norm}"]


if __name__ == "__main__":
    main(SCENARIOS)
