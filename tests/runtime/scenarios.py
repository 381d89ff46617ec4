"""Run by torchrun on 2 ranks (some on 3): one function per promise of the executor.

Every rank prints one JSON line per scenario: {"scenario": …, "faults": [text, …]}. A scenario
returns what is wrong on its rank.
"""

from __future__ import annotations

import copy
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import schedir
from schedir import Action, Pipeline, backward, backward_input, backward_weight, forward, optim_step
from schedir.runtime import Executor, rng
from tests.runtime.reference import accumulate, pipedream, run_stages

SCENARIOS: dict[str, tuple[int, Callable[[int], list[str]]]] = {}  # the ranks that each needs
MSE = nn.functional.mse_loss


def scenario(function: Callable[[int], list[str]]) -> Callable[[int], list[str]]:
    SCENARIOS[function.__name__] = (2, function)
    return function


def scenario_on_3(function: Callable[[int], list[str]]) -> Callable[[int], list[str]]:
    SCENARIOS[function.__name__] = (3, function)
    return function


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.3)


def split(x: Any, number: int) -> list[Any]:
    if isinstance(x, tuple):
        return list(zip(*(torch.tensor_split(t, number) for t in x), strict=True))
    return list(torch.tensor_split(x, number))


def compare(mine: nn.Module, theirs: nn.Module, stage: int) -> list[str]:
    """Parameters and buffers, bit for bit."""
    other = theirs.state_dict()
    return [
        f"stage {stage} {name} differs"
        for name, value in mine.state_dict().items()
        if not torch.equal(value, other[name])
    ]


def train(
    rank: int,
    whole: Sequence[nn.Module],
    data: Sequence[tuple[Any, Any]],
    *,
    microbatches: int = 4,
    target: Any = "1f1b",
    loss_fn: Any = MSE,
    order: Sequence[int] | None = None,
    seeded: bool = False,
    **options: Any,
) -> list[str]:
    """Train with the executor and in one process on the same data; say what differs."""
    schedule = (
        target
        if isinstance(target, schedir.Schedule)
        else schedir.build(target, ranks=2, microbatches=microbatches)
    )
    local = {s: copy.deepcopy(whole[s]) for s in schedule.stages_of(rank)}
    faults = []
    with Executor(schedule, local, loss_fn, adamw, **options) as executor:
        optimizers = [adamw(stage.parameters()) for stage in whole if list(stage.parameters())]
        for step, (x, y) in enumerate(data):
            result = executor.step(x, target=y)
            pieces = list(zip(split(x, microbatches), split(y, microbatches), strict=True))
            expected = accumulate(
                whole, loss_fn, optimizers, pieces, order, (0, step) if seeded else None
            )
            if result.loss != expected:
                faults.append(f"loss of step {step}: {result.loss} != {expected}")
    for s, module in local.items():
        faults += compare(module, whole[s], s)
    return faults


def random_data(steps: int, rows: int = 8, width: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(rows, width, generator=generator),
            torch.randn(rows, width, generator=generator),
        )
        for _ in range(steps)
    ]


def linear_stages(number: int = 2, width: int = 4) -> list[nn.Module]:
    torch.manual_seed(5)
    return [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(number)]


def raises(error: type[BaseException], text: str, call: Callable[[], object]) -> list[str]:
    try:
        call()
    except error as found:
        return [] if text in str(found) else [f"{text!r} is not in {str(found)!r}"]
    return [f"{error.__name__} was not raised"]


class TwoOutputs(nn.Module):
    """Two tensors to the next stage, one of them integers; a third that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.first(x), (x > 0).long().sum(1), self.unused(x)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embedding = nn.Embedding(5, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor, ids: Tensor, unused: Tensor) -> Tensor:
        y: Tensor = self.last(x + self.embedding(ids))
        return y


@scenario
def several_tensors_per_boundary(rank: int) -> list[str]:
    """Integers cross, and AdamW leaves alone what got no gradient (it would decay on zeros)."""
    before = TwoOutputs().unused.weight.clone()
    first = TwoOutputs()
    faults = train(rank, [first, TwoInputs()], random_data(3))
    if not torch.equal(before, first.unused.weight):
        faults.append("the reference itself has moved the unused layer")
    return faults


class Odd(nn.Module):
    """Outputs that are not contiguous, empty, bool, and the very input."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.t(), x[:0], x > 0, x


class Even(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor, empty: Tensor, mask: Tensor, same: Tensor) -> Tensor:
        y: Tensor = self.last(x.t() * mask + same) + empty.sum()
        return y


@scenario
def odd_tensors_cross(rank: int) -> list[str]:
    whole = [nn.Sequential(linear_stages()[0], Odd()), Even()]
    return train(rank, whole, random_data(2))


@scenario
def a_stage_without_parameters(rank: int) -> list[str]:
    return train(rank, [nn.Tanh(), linear_stages()[1]], random_data(2))


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(x.detach())
        return y


@scenario
def none_travels_as_absent(rank: int) -> list[str]:
    return train(rank, [linear_stages()[0], Detached()], random_data(3))


@scenario
def frozen_first_stage(rank: int) -> list[str]:
    whole = linear_stages()
    whole[0].requires_grad_(False)
    return train(rank, whole, random_data(2))


@scenario
def first_layer_in_place(rank: int) -> list[str]:
    torch.manual_seed(5)
    whole: list[nn.Module] = [
        nn.Linear(4, 4),
        nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)),
    ]
    return train(rank, whole, random_data(3))


@scenario
def batch_norm_statistics(rank: int) -> list[str]:
    torch.manual_seed(5)
    whole: list[nn.Module] = [
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
        nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)),
    ]
    return train(rank, whole, random_data(3))


class Positions(nn.Module):
    """Integer input, and positions made in the forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.words = nn.Embedding(11, 4)
        self.places = nn.Embedding(7, 4)

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        return y


@scenario
def embedding_and_arange(rank: int) -> list[str]:
    generator = torch.Generator().manual_seed(3)
    data = [
        (
            torch.randint(0, 11, (8, 5), generator=generator),
            torch.randn(8, 5, 4, generator=generator),
        )
        for _ in range(2)
    ]
    return train(rank, [Positions(), linear_stages()[1]], data)


@scenario
def shapes_change_and_microbatches_are_uneven(rank: int) -> list[str]:
    data = [random_data(1, rows)[0] for rows in (8, 9, 6, 8, 4)]
    return train(rank, linear_stages(), data, microbatches=4)


@scenario
def ready_made_microbatches(rank: int) -> list[str]:
    whole = linear_stages()
    schedule = schedir.build("1f1b", ranks=2, microbatches=3)
    (x, y), *_ = random_data(1, rows=7)
    local = {rank: copy.deepcopy(whole[rank])}
    optimizers = [adamw(stage.parameters()) for stage in whole]
    pieces = list(zip(split(x, 3), split(y, 3), strict=True))
    with Executor(schedule, local, MSE, adamw) as executor:
        from_list = executor.step([x for x, _ in pieces], target=[y for _, y in pieces]).loss
        expected = accumulate(whole, MSE, optimizers, pieces)
        faults = [] if from_list == expected else ["a list"]
        iterated = executor.step(iter([x for x, _ in pieces]), target=(y for _, y in pieces)).loss
        expected = accumulate(whole, MSE, optimizers, pieces)
        if iterated != expected:
            faults.append("an iterator")
    return faults + compare(local[rank], whole[rank], rank)


@scenario
def tuple_inputs(rank: int) -> list[str]:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(4)
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, z: Tensor) -> Tensor:
            y: Tensor = self.layer(x) + z
            return y

    data = [((x, y), x) for x, y in random_data(2)]
    return train(rank, [Sum(), linear_stages()[1]], data)


def backwards_reversed(pipe: Pipeline, rank: int) -> Iterator[Action]:
    for m in (1, 0):
        yield forward(rank, m)
    for m in (1, 0):
        yield backward(rank, m)
    yield optim_step(rank)


@scenario
def losses_are_keyed_by_microbatch(rank: int) -> list[str]:
    data = [random_data(1, 5)[0] for _ in range(2)]
    return train(
        rank, linear_stages(), data, microbatches=2, target=backwards_reversed, order=[1, 0]
    )


def split_backward(pipe: Pipeline, rank: int) -> Iterator[Action]:
    for m in range(pipe.microbatches):
        yield forward(rank, m)
    for m in range(pipe.microbatches):
        yield backward_input(rank, m)
    for m in range(pipe.microbatches):
        yield backward_weight(rank, m)
    yield optim_step(rank)


@scenario
def input_and_weight_gradients_apart(rank: int) -> list[str]:
    return train(rank, linear_stages(), random_data(3), target=split_backward)


def v_shape(pipe: Pipeline, rank: int) -> Iterator[Action]:
    first, last = pipe.stages_of(rank)
    for m in range(pipe.microbatches):
        yield forward(first, m)
        if rank == 1:
            yield forward(last, m)
            yield backward(last, m)
            yield backward(first, m)
    if rank == 0:
        for m in range(pipe.microbatches):
            yield forward(last, m)
            yield backward(last, m)
        for m in range(pipe.microbatches):
            yield backward(first, m)
    for stage in (first, last):
        yield optim_step(stage)


@scenario
def neighbouring_stages_on_one_rank(rank: int) -> list[str]:
    generator = schedir.schedule("v", placement=lambda pipe: [0, 1, 1, 0])(v_shape)
    return train(rank, linear_stages(4), random_data(3), target=generator)


@scenario
def dropout_is_the_same_under_every_schedule(rank: int) -> list[str]:
    faults = []
    for target in ("1f1b", "fill-drain"):
        torch.manual_seed(5)
        whole: list[nn.Module] = [
            nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)),
            nn.Sequential(nn.Dropout(0.3), nn.Linear(4, 4)),
        ]
        faults += train(rank, whole, random_data(3), target=target, seeded=True)
    return faults


class InPlaceAndGrowing(nn.Module):
    """Works in place on the batch, and no fake run can follow it."""

    def __init__(self) -> None:
        super().__init__()
        self.growing = Growing()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.growing(torch.relu_(x))
        return y


@scenario
def a_first_stage_in_place_that_is_declared(rank: int) -> list[str]:
    (x, y), *_ = random_data(1)
    before = x.clone()
    schedule = schedir.build("fill-drain", ranks=2, microbatches=4)
    stage = InPlaceAndGrowing() if rank == 0 else linear_stages()[1]
    example = {0: torch.empty(2, 4, device="meta")}
    with Executor(schedule, {rank: stage}, MSE, adamw, boundaries=example) as executor:
        executor.step(x, target=y)
    return [] if torch.equal(x, before) else ["the batch was changed"]


@scenario
def random_state_of_the_user_is_restored(rank: int) -> list[str]:
    torch.manual_seed(17)
    state = torch.get_rng_state()
    train(rank, linear_stages(), random_data(1))  # makes its own stages, seeding as it goes
    torch.set_rng_state(state)
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    (x, y), *_ = random_data(1)
    with Executor(schedule, {rank: linear_stages()[rank]}, MSE, adamw) as executor:
        torch.set_rng_state(state)
        executor.step(x, target=y)
        faults = [] if torch.equal(torch.get_rng_state(), state) else ["step moved the state"]
    with rng(1, 2, 3, 4):
        torch.rand(3)
    return faults if torch.equal(torch.get_rng_state(), state) else [*faults, "rng moved the state"]


def pairs_behind(pipe: Pipeline, rank: int) -> Iterator[Action]:
    """Two updates of two microbatches each; all forwards of stage 0 read version 0."""
    if rank == 0:
        for m in range(4):
            yield forward(0, m)
    for first in (0, 2):
        for m in (first, first + 1):
            if rank == 1:
                yield forward(1, m)
            yield backward(rank, m)
        yield optim_step(rank)


@scenario
def older_versions_accumulate_their_gradients(rank: int) -> list[str]:
    whole = linear_stages()
    schedule = schedir.build(pairs_behind, ranks=2, microbatches=4)
    local = {rank: copy.deepcopy(whole[rank])}
    (x, y), *_ = random_data(1)
    with Executor(schedule, local, MSE, adamw) as executor:
        executor.step(x, target=y)
    optimizers = [adamw(stage.parameters()) for stage in whole]
    old = copy.deepcopy(whole[0])
    pieces = list(zip(split(x, 4), split(y, 4), strict=True))
    for pair in (pieces[:2], pieces[2:]):
        old.zero_grad(set_to_none=True)
        for x_m, y_m in pair:
            (MSE(whole[1](old(x_m)), y_m) * 0.5).backward()
        for own, copied in zip(whole[0].parameters(), old.parameters(), strict=True):
            own.grad = copied.grad
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return compare(local[rank], whole[rank], rank)


@scenario
def a_gradients_receive_is_posted_before_the_forward(rank: int) -> list[str]:
    early = schedir.loads(
        "schedir 1\nname early\nmicrobatches 1\nplacement 0 1\n"
        "rank 0: 0RECV_GRAD0 0F0 0SEND_ACT0 0B0 0OPTIM_STEP\n"
        "rank 1: 1RECV_ACT0 1F0 1B0 1SEND_GRAD0 1OPTIM_STEP\n"
    )
    return train(rank, linear_stages(), random_data(2), microbatches=1, target=early)


@scenario_on_3
def a_weight_gradient_waits_for_no_send(rank: int) -> list[str]:
    """Rank 0 takes the gradient that 1I0 makes only after what comes behind 1W0."""
    late = schedir.loads(
        "schedir 1\nname late\nmicrobatches 2\nplacement 0 1 2 0\n"
        "rank 0: 0F0 0SEND_ACT0 0F1 0SEND_ACT1 3RECV_ACT0 3F0 3B0 3SEND_GRAD0\n"
        "  3RECV_ACT1 3F1 3B1 3SEND_GRAD1 0RECV_GRAD0 0B0 0RECV_GRAD1 0B1 0OPTIM_STEP 3OPTIM_STEP\n"
        "rank 1: 1RECV_ACT0 1F0 1SEND_ACT0 1RECV_GRAD0 1I0 1SEND_GRAD0 1W0 1RECV_ACT1 1F1\n"
        "  1SEND_ACT1 1RECV_GRAD1 1I1 1SEND_GRAD1 1W1 1OPTIM_STEP\n"
        "rank 2: 2RECV_ACT0 2F0 2SEND_ACT0 2RECV_GRAD0 2B0 2SEND_GRAD0\n"
        "  2RECV_ACT1 2F1 2SEND_ACT1 2RECV_GRAD1 2B1 2SEND_GRAD1 2OPTIM_STEP\n"
    )
    return train(rank, linear_stages(4), random_data(2), microbatches=2, target=late)


class Checkpointed(nn.Module):
    """Recomputes its forward in the backward: it must find the version of the forward there."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


@scenario
def recomputation_finds_the_stashed_version(rank: int) -> list[str]:
    schedule = schedir.build("pipedream", ranks=2, microbatches=5)
    plain = linear_stages()
    local = {rank: Checkpointed(copy.deepcopy(plain[rank]))}
    optimizers = [adamw(stage.parameters()) for stage in plain]
    faults = []
    with Executor(schedule, local, MSE, adamw) as executor:
        for x, y in random_data(3, rows=10):
            # A leaf that requires grad makes the first stage recompute as well.
            loss = executor.step(x, target=y).loss
            pieces = list(zip(split(x, 5), split(y, 5), strict=True))
            expected = pipedream(plain, MSE, optimizers, pieces)
            if loss != expected:
                faults.append(f"loss {loss} != {expected}")
    return faults + compare(local[rank].inner, plain[rank], rank)


class Memory(nn.Module):
    """Keeps things from one forward to the next: a mask, a count, a log, a table by length."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: Tensor | None = None
        self.register_buffer("late", None)
        self.calls = 0
        self.log: list[Tensor] = []
        self.table: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(4)
            self.late = torch.ones(4)
        self.calls += 1
        self.log.append(x.abs().max().detach())
        table = self.table.setdefault(len(x), torch.ones(len(x), 1))
        return x * self.mask * self.late * table


@scenario
def finding_shapes_leaves_no_trace(rank: int) -> list[str]:
    stages = linear_stages()
    whole: list[nn.Module] = [
        nn.Sequential(stages[0], Memory()),
        nn.Sequential(Memory(), stages[1]),
    ]
    faults = train(rank, whole, random_data(2))
    memory = Memory()
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    (x, y), *_ = random_data(1)
    local = {rank: nn.Sequential(linear_stages()[rank], memory)}
    with Executor(schedule, local, MSE, adamw) as executor:
        executor.step(x, target=y)
    if memory.calls != 2 or [type(entry) for entry in memory.log] != [Tensor, Tensor]:
        faults.append(f"the module was called {memory.calls} times: {memory.log}")
    return faults


@scenario
def first_layer_of_all_in_place(rank: int) -> list[str]:
    """The pieces of a split batch share a version counter; and the batch stays as it was."""
    torch.manual_seed(5)
    whole: list[nn.Module] = [
        nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)),
        linear_stages()[1],
    ]
    (x, y), *_ = random_data(1)
    before = x.clone()
    schedule = schedir.build("fill-drain", ranks=2, microbatches=4)
    local = {rank: copy.deepcopy(whole[rank])}
    with Executor(schedule, local, MSE, adamw) as executor:
        executor.step(x, target=y)
    faults = [] if torch.equal(x, before) else ["the batch was changed"]
    optimizers = [adamw(stage.parameters()) for stage in whole]
    accumulate(whole, MSE, optimizers, list(zip(split(x.clone(), 4), split(y, 4), strict=True)))
    return faults + compare(local[rank], whole[rank], rank)


@scenario
def autocast_before_and_after(rank: int) -> list[str]:
    """Autocast is switched on between steps; its cache of cast weights outlives no update."""
    faults = []
    for name in ("1f1b", "pipedream"):
        whole = linear_stages()
        schedule = schedir.build(name, ranks=2, microbatches=4)
        local = {rank: copy.deepcopy(whole[rank])}
        optimizers = [adamw(stage.parameters()) for stage in whole]
        with Executor(schedule, local, MSE, adamw) as executor:
            for step, (x, y) in enumerate(random_data(3)):
                pieces = list(zip(split(x, 4), split(y, 4), strict=True))
                with torch.autocast("cpu", torch.bfloat16, enabled=step > 0):
                    executor.step(x, target=y)
                with torch.autocast("cpu", torch.bfloat16, enabled=step > 0, cache_enabled=False):
                    if name == "pipedream":
                        pipedream(whole, MSE, optimizers, pieces)
                    else:
                        accumulate(whole, MSE, optimizers, pieces)
        faults += [f"{name}: {fault}" for fault in compare(local[rank], whole[rank], rank)]
    return faults


@scenario
def split_backward_of_a_frozen_stage(rank: int) -> list[str]:
    whole = linear_stages(4)
    whole[0].requires_grad_(False)
    whole[1].requires_grad_(False)
    frozen = schedir.loads(
        "schedir 1\nname frozen\nmicrobatches 1\nplacement 0 0 1 1\n"
        "rank 0: 0F0 1F0 1SEND_ACT0 1RECV_GRAD0 1I0 0I0 1W0 0W0 0OPTIM_STEP 1OPTIM_STEP\n"
        "rank 1: 2RECV_ACT0 2F0 3F0 3I0 2I0 2SEND_GRAD0 3W0 2W0 2OPTIM_STEP 3OPTIM_STEP\n"
    )
    return train(rank, whole, random_data(2), microbatches=1, target=frozen)


class Peeking(nn.Module):
    """Looks at its data, so no fake run can follow it, and uses one of its two inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor, ids: Tensor, unused: Tensor) -> Tensor:
        scale = 2.0 if x.sum().item() > 0 else 1.0
        y: Tensor = self.last(x) * scale
        return y


@scenario
def absent_gradients_behind_a_stage_that_no_trace_can_follow(rank: int) -> list[str]:
    return train(rank, [TwoOutputs(), Peeking()], random_data(3))


class Reentrant(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=True)  # type: ignore[no-any-return]


@scenario
def reentrant_checkpointing(rank: int) -> list[str]:
    first, second = linear_stages()
    return train(rank, [first, Reentrant(second)], random_data(2))


@scenario
def hooks_see_real_data_only(rank: int) -> list[str]:
    whole = linear_stages()
    seen: list[type] = []
    local = {rank: copy.deepcopy(whole[rank])}
    local[rank].register_forward_hook(lambda module, args, out: seen.append(type(out)))
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    (x, y), *_ = random_data(1)
    with Executor(schedule, local, MSE, adamw) as executor:
        executor.step(x, target=y)
    return [] if seen == [Tensor, Tensor] else [f"the hook saw {seen}"]


@scenario
def gradients_accumulate_over_steps(rank: int) -> list[str]:
    """Without an optimizer `.grad` adds up over calls, as in plain torch."""
    whole = linear_stages()
    schedule = schedir.build("1f1b", ranks=2, microbatches=4)
    local = {rank: copy.deepcopy(whole[rank])}
    with Executor(schedule, local, MSE) as executor:
        for x, y in random_data(2):
            executor.step(x, target=y)
            for x_m, y_m in zip(split(x, 4), split(y, 4), strict=True):
                (MSE(run_stages(whole, x_m), y_m) * 0.25).backward()
    return [
        f"gradient of {name} differs"
        for (name, mine), theirs in zip(
            local[rank].named_parameters(), whole[rank].parameters(), strict=True
        )
        if mine.grad is None or theirs.grad is None or not torch.equal(mine.grad, theirs.grad)
    ]


@scenario
def evaluation_between_steps(rank: int) -> list[str]:
    """Forwards alone give the plain loss, and the steps around them are what they were."""
    stages = linear_stages()
    twins = copy.deepcopy(stages)
    schedule = schedir.build("1f1b", ranks=2, microbatches=4)
    found = []
    losses = []
    for modules, evaluates in ((stages, True), (twins, False)):
        with Executor(schedule, {rank: modules[rank]}, nn.functional.mse_loss, adamw) as executor:
            for x, y in random_data(3):
                losses.append(executor.step(x, target=y).loss)
                if evaluates:
                    seen = executor.evaluate(x[:5], target=y[:5]).loss
                    again = executor.evaluate(x[:5], target=y[:5]).loss
                    if seen != again:
                        found.append(f"{seen} is not {again}")
    found += compare(stages[rank], twins[rank], rank)
    if losses[:3] != losses[3:]:
        found.append(f"losses {losses}")
    return found


@scenario
def loss_is_read_late_or_never(rank: int) -> list[str]:
    schedule = schedir.build("fill-drain", ranks=2, microbatches=2)
    with Executor(schedule, {rank: linear_stages()[rank]}, MSE, adamw) as executor:
        results = [executor.step(x, target=y) for x, y in random_data(4)]
        losses = [results[3].loss, results[1].loss, results[1].loss]
        everybody: list[Any] = [None, None]
        dist.all_gather_object(everybody, losses)
    return [] if everybody[0] == everybody[1] == losses else [f"losses differ: {everybody}"]


class Growing(nn.Module):
    """An output whose shape depends on data: no fake tensor can tell."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = int((x.sum() * 0 + 2).item())
        y: Tensor = self.layer(x)[:rows]
        return y


@scenario
def data_dependent_shapes_are_declared(rank: int) -> list[str]:
    whole = [Growing(), linear_stages()[1]]
    return train(rank, whole, random_data(2), boundaries={0: torch.empty(2, 4, device="meta")})


@scenario
def different_schedules_are_refused_everywhere(rank: int) -> list[str]:
    schedule = schedir.build("1f1b", ranks=2, microbatches=4 + rank)
    return raises(
        schedir.ExecutionError,
        "different schedules",
        lambda: Executor(schedule, {rank: linear_stages()[rank]}, MSE, adamw),
    )


@scenario
def wrong_arguments_are_refused(rank: int) -> list[str]:
    schedule = schedir.build("1f1b", ranks=2, microbatches=4)
    stage = {rank: linear_stages()[rank]}
    three = schedir.build("1f1b", ranks=3, microbatches=4)
    asynchronous = schedir.build("pipedream", ranks=2, microbatches=4)
    unstepped = schedir.loads(
        "schedir 1\nname x\nmicrobatches 1\nplacement 0 1\nrank 0: 0F0 0B0\nrank 1: 1F0 1B0\n"
    )
    wrong = schedir.loads(
        "schedir 1\nname x\nmicrobatches 1\nplacement 0 1\nrank 0: 0B0 0F0\nrank 1: 1F0 1B0\n"
    )
    error = schedir.ExecutionError
    return [
        *raises(error, f"rank {rank} holds stages", lambda: Executor(schedule, {}, MSE, adamw)),
        *raises(error, "3 ranks, but 2 processes", lambda: Executor(three, stage, MSE, adamw)),
        *raises(error, "needs an optimizer", lambda: Executor(asynchronous, stage, MSE)),
        *raises(error, "no OPTIM_STEP", lambda: Executor(unstepped, stage, MSE, adamw)),
        *raises(
            schedir.ScheduleError,
            "S201" if rank == 0 else "rank 0 says why",
            lambda: Executor(wrong, stage, MSE, adamw),
        ),
    ]


@scenario
def wrong_batches_are_refused(rank: int) -> list[str]:
    schedule = schedir.build("1f1b", ranks=2, microbatches=4)
    (x, y), *_ = random_data(1, rows=3)
    error = schedir.ExecutionError
    with Executor(schedule, {rank: linear_stages()[rank]}, MSE, adamw) as executor:
        return [
            *raises(error, "3 rows can't be split", lambda: executor.step(x, target=y)),
            *raises(error, "3 microbatches given", lambda: executor.step([x] * 3, target=[y] * 3)),
            *raises(error, "more than 4", lambda: executor.step([x] * 5, target=[y] * 5)),
            *raises(error, "needs", lambda: executor.step()),
        ]


class Watches(nn.Linear):
    """Counts at each forward the earlier gradients of inputs that are still in memory."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.sent: list[StorageWeakRef] = []
        self.alive: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.alive.append(sum(not storage.expired() for storage in self.sent))
        if x.requires_grad:
            x.register_hook(lambda grad: self.sent.append(StorageWeakRef(grad.untyped_storage())))
        return super().forward(x)


@scenario
def what_a_step_sent_last_is_freed_as_the_next_begins(rank: int) -> list[str]:
    """In fill-drain nothing comes back that would say earlier that the gradients have arrived."""
    watches = Watches()
    schedule = schedir.build("fill-drain", ranks=2, microbatches=4)
    with Executor(schedule, {rank: watches}, MSE, adamw) as executor:
        for x, y in random_data(3):
            executor.step(x, target=y)
    if rank == 0:
        return []
    faults = [] if len(watches.sent) >= 12 else [f"only {len(watches.sent)} gradients seen"]
    return faults + [f"{alive} gradients are still there" for alive in watches.alive if alive]


def changing_shapes(
    rank: int,
    ranks: int,
    targets: Sequence[tuple[str, int]] = (("fill-drain", 1), ("1f1b", 1), ("interleaved-1f1b", 2)),
    stages: Callable[[int], list[nn.Module]] = linear_stages,
) -> list[str]:
    """Of batches in any order: what is posted for one that does not come does no harm."""
    faults = []
    chance = torch.Generator().manual_seed(4)
    for target, chunks in targets:
        options = {"chunks": chunks} if chunks > 1 else {}
        schedule = schedir.build(target, ranks=ranks, microbatches=4, **options)
        whole = stages(schedule.stages)
        local = {s: copy.deepcopy(whole[s]) for s in schedule.stages_of(rank)}
        optimizers = [adamw(stage.parameters()) for stage in whole]
        with Executor(schedule, local, MSE, adamw) as executor:
            for rows in (8, 8, 9, 8, 8, 10, 10, 4, 9, 9, 8):
                x = torch.randn(rows, 4, generator=chance)
                y = torch.randn(rows, 4, generator=chance)
                result = executor.step(x, target=y)
                pieces = list(zip(split(x, 4), split(y, 4), strict=True))
                expected = accumulate(whole, MSE, optimizers, pieces)
                if result.loss != expected:
                    faults.append(f"{target}, {rows} rows: {result.loss} != {expected}")
                if rows == 9:
                    executor.evaluate(x[:5], target=y[:5])
        for s, module in local.items():
            faults += compare(module, whole[s], s)
    return faults


@scenario
def shapes_that_change_at_any_step(rank: int) -> list[str]:
    return changing_shapes(rank, 2)


@scenario_on_3
def shapes_that_change_on_three_ranks(rank: int) -> list[str]:
    return changing_shapes(rank, 3)


@scenario_on_3
def shapes_that_change_beside_a_large_boundary(rank: int) -> list[str]:
    """Of 0.7 MiB, so that the last two ranks post fewer receives ahead than the first one would."""

    def stages(_: int) -> list[nn.Module]:
        torch.manual_seed(5)
        return [nn.Linear(4, 4), nn.Linear(4, 90_000), nn.Linear(90_000, 4)]

    return changing_shapes(rank, 3, [("1f1b", 1)], stages)


def main(scenarios: dict[str, tuple[int, Callable[[int], list[str]]]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    wanted = sys.argv[1:]
    for name, (ranks, function) in scenarios.items():
        if ranks != dist.get_world_size() or (wanted and name not in wanted):
            continue
        try:
            faults = function(rank)
        except Exception:
            faults = [traceback.format_exc()]
        line = json.dumps({"scenario": name, "faults": faults})
        print(line)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(SCENARIOS)
