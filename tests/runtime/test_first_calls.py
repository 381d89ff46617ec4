"""The first call of an input signature runs the stages as often as the list says, on real values.

Whatever modules they are, it learns what later calls go by.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from reference import plain_step
from torch import Tensor, fx, nn
from torch.distributed.pipelining import SplitPoint, pipeline

import schedir
from schedir.runtime import Executor
from schedir.runtime.program import program
from schedir.runtime.program.instruction import Instruction
from tests.literals import listed
from tests.runtime.kit import (
    MSE,
    Batch,
    Calls,
    Twins,
    linear_stages,
    microbatches_of,
    numbered,
    random_batch,
    random_batches,
    refused,
    sgd,
    split,
    train_on_rank,
)
from tests.runtime.on_ranks import on_ranks

TWO = schedir.build("1f1b", ranks=2, microbatches=2)


def blocks(number: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.0), nn.Tanh())
        for _ in range(number)
    ]


def eager(graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """A compiler that leaves the graph as it is."""
    return graph


def by_torchs_splitter(parts: list[nn.Module]) -> list[Any]:
    model, example = nn.Sequential(*parts), (torch.ones(4, 4),)
    pipe = pipeline(model, mb_args=example, split_spec={"1": SplitPoint.BEGINNING})
    return [pipe.get_stage_module(s) for s in range(pipe.num_stages)]


def compiled(part: nn.Module) -> Any:
    return torch.compile(part, backend=eager)


def with_compiled_forward(part: nn.Module) -> nn.Module:
    part.forward = torch.compile(part.forward, backend=eager)
    return part


def compiled_in_place(part: nn.Module) -> nn.Module:
    part.compile(backend=eager)
    return part


def compiled_inside(part: nn.Module) -> nn.Module:
    part[0] = compiled(part[0])  # type: ignore[index,operator]
    return part


def exported(part: nn.Module) -> nn.Module:
    return torch.export.export(part.eval(), (torch.ones(4, 4),)).module()


EACH = [fx.symbolic_trace, compiled, with_compiled_forward, compiled_in_place, compiled_inside]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (fx.symbolic_trace, {"recompute": True}),
        (exported, {}),
        (by_torchs_splitter, {}),
        *((make, {}) for make in EACH),
    ],
)
def test_stages_of_any_make_train(make: Callable[[Any], Any], options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    parts, model = blocks(2), nn.Sequential(*blocks(2)).train(make is not exported)
    stages = make(parts) if make is by_torchs_splitter else [*map(make, parts)]
    x, y = random_batch()
    plain = [sgd(model.parameters())]
    with Executor(TWO, numbered(stages), MSE, sgd, in_process=True, **options) as executor:
        for _ in range(3):
            executor.step(x, target=y)
            plain_step([model], MSE, plain, microbatches_of((x, y), 2))
    mine = [value for stage in stages for value in stage.state_dict().values()]
    theirs = [*model.state_dict().values()]
    assert len(mine) == len(theirs)
    assert all(map(torch.equal, mine, theirs))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(2, 4))])
@pytest.mark.parametrize("inner", [False, True])
def test_torchscript_is_refused_by_name(
    make: Callable[[nn.Module], nn.Module], inner: bool
) -> None:
    compiled = make(nn.Linear(4, 4))
    stages = [nn.Linear(4, 4), nn.Sequential(compiled) if inner else compiled]
    where = r"stage 1 \(0\)" if inner else "stage 1"
    with refused(f"{where} is compiled to TorchScript"):
        Executor(TWO, numbered(stages), MSE, in_process=True)


def test_a_forward_that_was_replaced_leaves_no_trace() -> None:
    """It is bound to the very module, which nothing stands in for."""
    norm: Any = nn.BatchNorm1d(4)
    norm.calls = 0
    kinds = []

    def forward(self: Any, x: Tensor) -> Tensor:
        self.calls += 1
        kinds.append(type(self.running_mean))
        return nn.BatchNorm1d.forward(self, x)

    norm.forward = types.MethodType(forward, norm)
    norm.register_forward_hook(lambda module, args, out: kinds.append(type(out)))
    x = torch.randn(8, 4)
    with Executor(TWO, {0: norm, 1: nn.Linear(4, 4)}, MSE, in_process=True) as executor:
        executor.step(x, target=x)
    assert norm.calls == int(norm.num_batches_tracked) == 2
    assert kinds == [Tensor, Tensor, Tensor, Tensor]


def test_many_input_shapes_keep_what_few_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what was learned, nor compiled lists, nor their instructions pile up."""
    monkeypatch.setattr(program, "_MOST", 3)
    stages: dict[int, nn.Module] = {0: nn.Embedding(9, 4), 1: nn.Linear(4, 4)}
    gc.freeze()  # what there is already is not looked through again and again
    with Executor(TWO, stages, MSE, in_process=True) as executor:

        def evaluate(length: int) -> float:
            tokens = torch.arange(4 * length).reshape(4, length) % 9
            return executor.evaluate(tokens, target=torch.ones(4, length, 4)).loss

        first, counts = evaluate(1), []
        for length in range(1, 12):
            evaluate(length)
            gc.collect()
            counts.append(sum(type(found) is Instruction for found in gc.get_objects()))
        gc.unfreeze()
        assert counts[0] < counts[-1] == counts[-2] == counts[-3]
        programs = executor._engine.evaluation
        assert len(programs._known) == len(programs._numbers) == 3
        assert programs._posted_list.cache_info().currsize <= 3
        assert evaluate(1) == first  # forgotten, and found anew


# Each would hang where the first call posted its receives late, at their place or at their
# consumer's turn. The send of the first one's batch feeds its own receive.
HANG = {
    2: [
        listed(1, "0 1", "0F0 (0SEND_ACT0;0RECV_GRAD0) 0B0", "1RECV_ACT0 1F0 1B0 1SEND_GRAD0"),
        listed(
            2,
            "0 1",
            "0RECV_GRAD0 0RECV_GRAD1 0F0 0SEND_ACT0 0F1 0SEND_ACT1 0B0 0B1",
            "1RECV_ACT0 1RECV_ACT1 1F0 1F1 1B0 1SEND_GRAD0 1B1 1SEND_GRAD1",
        ),
    ],
    3: [
        listed(
            2,
            "0 1 0 2 1",
            "0F0 0SEND_ACT0 0F1 (0SEND_ACT1;2RECV_ACT0) 2F0 2SEND_ACT0 2RECV_ACT1 2F1 2SEND_ACT1 "
            "2RECV_GRAD0 2B0 2SEND_GRAD0 0RECV_GRAD0 0B0 2RECV_GRAD1 2B1 2SEND_GRAD1 0RECV_GRAD1 "
            "0B1",
            "1RECV_ACT0 1F0 (1RECV_ACT1;1SEND_ACT0) 4RECV_ACT0 4F0 1F1 1SEND_ACT1 4RECV_ACT1 4F1 "
            "4B0 4SEND_GRAD0 1RECV_GRAD0 1B0 1SEND_GRAD0 4B1 4SEND_GRAD1 1RECV_GRAD1 1B1 "
            "1SEND_GRAD1",
            "3RECV_ACT0 3F0 3SEND_ACT0 3RECV_ACT1 3F1 3SEND_ACT1 3RECV_GRAD0 3B0 3SEND_GRAD0 "
            "3RECV_GRAD1 3B1 3SEND_GRAD1",
        )
    ],
}


@on_ranks(2, 3)
@pytest.mark.parametrize("described", [(), (0, 3), range(4)], ids=["agreed", "mixed", "described"])
def test_a_first_call_waits_only_for_the_makers_of_its_inputs(
    rank: int, ranks: int, described: Sequence[int]
) -> None:
    """With evaluation first, signatures that alternate, and a last microbatch that is smaller; and
    so do later calls where payloads travel with their description."""
    for schedule in HANG[ranks]:
        twins = Twins(linear_stages(schedule.stages), schedule, rank)
        marks = dict.fromkeys({*described} & {*range(schedule.stages)}, "described")
        with twins.executor(optimizer=None, timeout=60, boundaries=marks) as executor:
            for rows in (4, 5, 4, 5, 7):
                x, y = random_batch(rows, seed=rows)
                expected = executor.evaluate(x, target=y).loss
                assert executor.step(x, target=y).loss == expected == twins.accumulate((x, y))
        twins.assert_equal_gradients()


def two() -> Calls:
    """Two outputs, of which the next stage may use one."""
    torch.manual_seed(6)
    return Calls(lambda one, other, x: (one(x), other(x)), nn.Linear(4, 4), nn.Linear(4, 4))


def chooses() -> Calls:
    """Uses the second of its inputs only where the first one's sum is positive."""
    torch.manual_seed(7)
    return Calls(lambda last, x, y: last(x + y if x.sum() > 0 else x), nn.Linear(4, 4))


def presences(batch: Batch) -> list[bool]:
    first = two()
    return [bool(first(part)[0].sum() > 0) for part in split(batch[0], 4)]


@on_ranks(2)
def test_a_mask_travels_where_gradients_depend_on_data(rank: int) -> None:
    """The first call sees both, and from then on any microbatch may have either."""
    batches = random_batches(5)
    found = [*map(presences, batches)]
    assert len({*found[0]}) == 2
    assert len({*map(tuple, found)}) > 1
    train_on_rank(rank, [two(), chooses()], batches)


def test_without_a_mask_another_presence_is_said_with_the_way_round() -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=4)
    every = [batch for batch in random_batches(40) if len({*presences(batch)}) == 1]
    first, other = (next(b for b in every if presences(b)[0] is there) for there in (True, False))
    example = (torch.empty(2, 4), torch.empty(2, 4))
    for boundaries in (None, {0: example}):
        options: dict[str, Any] = {"boundaries": boundaries, "in_process": True}
        says = nullcontext() if boundaries else refused(r"1SEND_GRAD0.*boundaries=\{0: ")
        with Executor(schedule, numbered([two(), chooses()]), MSE, sgd, **options) as executor:
            executor.step(first[0], target=first[1])
            with says:
                executor.step(other[0], target=other[1])
