"""How boundaries are found for modules of every make, and what that costs and leaves behind."""

from __future__ import annotations

import copy
import gc
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.pipelining import SplitPoint, pipeline

import schedir
from schedir.runtime import Executor
from schedir.runtime.boundaries import agreement
from tests.runtime.kit import MSE, sgd


def blocks(number: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.0), nn.Tanh())
        for _ in range(number)
    ]


def train(stages: dict[int, Any], model: nn.Module, **options: Any) -> None:
    """Three steps, and the same of the whole model."""
    schedule = schedir.build("1f1b", ranks=len(stages), microbatches=2)
    x, y = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(2))
    with Executor(schedule, stages, MSE, sgd, in_process=True, **options) as executor:
        for _ in range(3):
            executor.step(x, target=y)
    plain = sgd(model.parameters())
    for _ in range(3):
        for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
            (MSE(model(a), b) / 2).backward()
        plain.step()
        plain.zero_grad()
    mine = [value for stage in stages.values() for value in stage.state_dict().values()]
    theirs = list(model.state_dict().values())
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("recompute", [False, True])
def test_traced_graphs_are_stages(recompute: bool) -> None:
    parts = blocks(2)
    model = nn.Sequential(*copy.deepcopy(parts))
    train(dict(enumerate(map(fx.symbolic_trace, parts))), model, recompute=recompute)


@pytest.mark.filterwarnings("ignore")
def test_the_stages_of_torchs_own_splitter() -> None:
    model = nn.Sequential(*blocks(2))
    x = torch.randn(4, 4)
    pipe = pipeline(copy.deepcopy(model), mb_args=(x,), split_spec={"1": SplitPoint.BEGINNING})
    train({s: pipe.get_stage_module(s) for s in range(pipe.num_stages)}, model)


@pytest.mark.filterwarnings("ignore")
def test_exported_programs_are_stages() -> None:
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()).eval() for _ in range(2)]
    model = nn.Sequential(*copy.deepcopy(parts))
    x = torch.randn(4, 4)
    stages = {s: torch.export.export(part, (x,)).module() for s, part in enumerate(parts)}
    train(stages, model)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(2, 4))])
@pytest.mark.parametrize("inner", [False, True])
def test_torchscript_is_refused_by_name(
    make: Callable[[nn.Module], nn.Module], inner: bool
) -> None:
    compiled = make(nn.Linear(4, 4))
    stages: dict[int, nn.Module] = {
        0: nn.Linear(4, 4),
        1: nn.Sequential(compiled) if inner else compiled,
    }
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    where = r"stage 1 \(0\)" if inner else "stage 1"
    with pytest.raises(schedir.ExecutionError, match=f"{where} is compiled to TorchScript"):
        Executor(schedule, stages, MSE, in_process=True)


def never_fake(graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """A compiler whose kernels take memory for real, as inductor's do."""

    def run(*arguments: Any) -> Any:
        if any(isinstance(argument, FakeTensor) for argument in arguments):
            raise AssertionError("a compiled kernel got a fake tensor")
        return graph(*arguments)

    return run


def wrapped(part: nn.Module) -> Any:
    return torch.compile(part, backend=never_fake)


def on_forward(part: nn.Module) -> nn.Module:
    part.forward = torch.compile(part.forward, backend=never_fake)
    return part


def by_method(part: nn.Module) -> nn.Module:
    part.compile(backend=never_fake)
    return part


def inside(part: nn.Module) -> nn.Module:
    part[0] = torch.compile(part[0], backend=never_fake)  # type: ignore[index,operator]
    return part


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compiled", [wrapped, on_forward, by_method, inside])
def test_compiled_stages_train(compiled: Callable[[nn.Module], Any]) -> None:
    torch._dynamo.reset()
    parts = blocks(2)
    model = nn.Sequential(*copy.deepcopy(parts))
    train({s: compiled(part) for s, part in enumerate(parts)}, model)


def test_a_forward_that_was_replaced_leaves_no_trace() -> None:
    """It is bound to the very module, not to a stand-in."""
    norm: Any = nn.BatchNorm1d(4)
    norm.calls = 0
    kinds = []

    def forward(self: Any, x: Tensor) -> Tensor:
        self.calls += 1
        kinds.append(type(self.running_mean))
        return nn.BatchNorm1d.forward(self, x)

    norm.forward = types.MethodType(forward, norm)
    norm.register_forward_hook(lambda module, args, out: kinds.append(type(out)))
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    x = torch.randn(8, 4)
    with Executor(schedule, {0: norm, 1: nn.Linear(4, 4)}, MSE, in_process=True) as executor:
        executor.step(x, target=x)
    assert norm.calls == 2
    assert int(norm.num_batches_tracked) == 2
    assert kinds == [FakeTensor, Tensor, Tensor, Tensor, Tensor]


def test_state_that_is_changed_in_a_fake_run_stays_what_it_was() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = torch.zeros(4)
            self.seen: set[int] = set()
            self.table: dict[str, list[Tensor]] = {"log": []}

        def forward(self, x: Tensor) -> Tensor:
            self.plain.add_(1.0)
            self.seen.add(len(self.seen))
            self.table["log"].append(x.detach())
            self.extra = x.detach()
            return x * self.plain

    keeps = Keeps()
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    x = torch.randn(8, 4)
    stages: dict[int, nn.Module] = {0: keeps, 1: nn.Linear(4, 4)}
    with Executor(schedule, stages, MSE, in_process=True) as executor:
        executor.step(x, target=x)
    assert keeps.plain.tolist() == [2.0] * 4
    assert keeps.seen == {0, 1}
    assert [type(entry) for entry in keeps.table["log"]] == [Tensor, Tensor]
    assert type(keeps.extra) is Tensor


def test_many_input_shapes_keep_what_few_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither agreements nor compiled lists nor torch's own memory of fake runs pile up."""
    monkeypatch.setattr(agreement, "_MAX_AGREEMENTS", 3)
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    stages: dict[int, nn.Module] = {0: nn.Embedding(9, 4), 1: nn.Linear(4, 4)}
    with Executor(schedule, stages, MSE, in_process=True) as executor:

        def step(length: int) -> float:
            tokens = torch.arange(4 * length).reshape(4, length) % 9
            return executor.evaluate(tokens, target=torch.ones(4, length, 4)).loss

        first = step(1)
        size = len(FakeTensorMode.cache)
        for length in range(1, 12):
            step(length)
        opening = executor._engine.evaluation.opening
        assert len(FakeTensorMode.cache) == size
        agreements, programs = opening.agreements, opening.programs
        assert len(agreements._agreed) == len(programs._by_agreement) == 3
        assert len(programs._by_room) <= 3
        assert len(agreements._numbers) == 3
        gc.collect()
        assert step(1) == first  # forgotten, and found anew
