"""Along which dim each argument is cut, or that it goes whole: said, or refused where it is not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.pipelining.microbatch import (
    TensorChunkSpec,
    _Replicate,
    split_args_kwargs_into_chunks,
)

import schedir
from schedir.runtime import Executor
from schedir.runtime.batch.microbatches import cut
from schedir.runtime.chunk_specs import ChunkSpecs, checked
from tests.runtime.kit import MSE, everyone, gradients, message_of, sgd
from tests.runtime.on_ranks import on_ranks

ROWS = 16
SCHEDULE = schedir.build("1f1b", ranks=2, microbatches=4)


class Biased(nn.Linear):
    """Adds a bias of its own features, or one for each row, that it is given."""

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        return y if bias is None else y + bias


class Scores(nn.Module):
    """A last stage that returns the loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor, offset: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.linear(x) + offset, labels)


def biased() -> dict[int, nn.Module]:
    torch.manual_seed(0)
    return {0: Biased(ROWS, ROWS), 1: Biased(ROWS, ROWS)}


def weighed(output: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    loss = (output - target) ** 2
    return (loss if weight is None else loss * weight).mean()


def batch(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, rows, ROWS, generator=torch.Generator().manual_seed(1))
    return x, y


WHERE: dict[str, Any] = {
    r"stage_inputs\[0\]: 'bias'": lambda t: {"stage_inputs": {0: {"bias": t}}},
    r"stage_inputs\[1\]: 'bias'": lambda t: {"stage_inputs": {1: {"bias": t}}},
    "loss_kwargs: 'weight'": lambda t: {"loss_kwargs": {"weight": t}},
}


@pytest.mark.parametrize("where", WHERE)
def test_as_many_entries_as_rows_are_refused_without_a_spec(where: str) -> None:
    """Cut, a bias of 16 in a batch of 16 gives another loss, or none."""
    x, y = batch()
    arguments = WHERE[where](torch.randn(ROWS))
    said = rf"{where}, .* shape \[16\].*the batch has 16 rows.*chunk_spec=.*: 0.*\"replicate\""
    with Executor(SCHEDULE, biased(), weighed, in_process=True) as executor:
        for call in (executor.step, executor.evaluate):
            with pytest.raises(schedir.ExecutionError, match=said):
                call(x, target=y, **arguments)
        if "stage_inputs" in arguments:
            with pytest.raises(schedir.ExecutionError, match=said):
                executor.infer(x, **arguments)


@pytest.mark.parametrize("spec", ["replicate", 0])
@pytest.mark.parametrize("where", WHERE)
def test_a_spec_says_which_is_meant(where: str, spec: Any) -> None:
    x, y = batch()
    given = torch.randn(ROWS) if spec == "replicate" else torch.rand(ROWS, 1)
    arguments = WHERE[where](given)
    stages = biased()
    model = copy.deepcopy(stages)
    specs = {"bias": spec, "weight": spec}
    with Executor(SCHEDULE, stages, weighed, kwargs_chunk_spec=specs, in_process=True) as executor:
        loss = executor.step(x, target=y, **arguments).loss
        evaluated = executor.evaluate(x, target=y, **arguments).loss
        outputs = executor.infer(x, stage_inputs=arguments.get("stage_inputs"))
    beside = arguments.get("stage_inputs", {})
    whole = model[1](model[0](x, **beside.get(0, {})), **beside.get(1, {}))
    expected = weighed(whole, y, **arguments.get("loss_kwargs", {}))
    expected.backward()
    assert loss == evaluated == pytest.approx(float(expected.detach()), rel=1e-6)
    assert outputs is not None
    torch.testing.assert_close(torch.cat(outputs), whole.detach())
    for mine, theirs in zip(gradients(stages.values()), gradients(model.values()), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("rows", [12, 20])
def test_what_has_no_entry_for_each_row_goes_whole(rows: int) -> None:
    """A bias of 16 in a batch of 12, or a number without dims."""
    x, y = batch(rows)
    stages = biased()
    bias, weight = torch.randn(ROWS), torch.tensor(0.5)
    arguments: Any = {"stage_inputs": {1: {"bias": bias}}, "loss_kwargs": {"weight": weight}}
    with Executor(SCHEDULE, stages, weighed, in_process=True) as executor, torch.no_grad():
        found = executor.evaluate(x, target=y, **arguments).loss
        by_position = executor.evaluate(
            x, target=y, stage_inputs={1: bias}, loss_kwargs={"weight": weight}
        ).loss
        expected = weighed(stages[1](stages[0](x), bias), y, weight)
    assert found == by_position == pytest.approx(float(expected), rel=1e-6)


def test_by_position_it_is_asked_for_by_keyword() -> None:
    x, y = batch()
    with (
        Executor(SCHEDULE, biased(), MSE, in_process=True) as executor,
        pytest.raises(schedir.ExecutionError, match=r"stage_inputs\[1\]: a ten.*by keyword, .\"na"),
    ):
        executor.step(x, target=y, stage_inputs={1: torch.randn(ROWS)})


class Mixes(nn.Module):
    """Of sequences first: [positions, rows, features], whose positions see each other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x - x.mean(0, keepdim=True))
        return y


@pytest.mark.parametrize("rows", [3, 7, 8])
def test_sequences_may_come_first(rows: int) -> None:
    """As many positions as rows would hide a cut along the wrong dim from the shapes alone."""
    torch.manual_seed(0)
    stages: dict[int, nn.Module] = {0: Mixes(), 1: Mixes()}
    model = nn.Sequential(*copy.deepcopy([*stages.values()]))
    x, y = torch.randn(2, 7, rows, 3)
    with Executor(SCHEDULE, stages, MSE, batch_dim=1, in_process=True) as executor:
        expected = MSE(model(x), y)
        found = executor.evaluate(x, target=y)
        assert found.samples == rows
        assert found.loss == pytest.approx(float(expected.detach()), rel=1e-6)
        outputs = executor.infer(x)
        assert outputs is not None
        assert len(outputs) == min(rows, 4)
        torch.testing.assert_close(torch.cat(outputs, 1), model(x).detach())
        if rows < 4:
            with pytest.raises(schedir.ExecutionError, match="inputs: 3 rows can't be split"):
                executor.step(x, target=y)
            return
        # Uneven microbatches weigh as much as they have rows, ready-made ones too.
        pieces = [*x.tensor_split(4, 1)], [*y.tensor_split(4, 1)]
        for inputs, target in ((x, y), pieces):
            assert executor.step(inputs, target=target).loss == pytest.approx(found.loss, rel=1e-6)
    (2 * expected).backward()
    for mine, theirs in zip(gradients(stages.values()), gradients([model]), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_tensor_may_have_rows_first_or_along_the_batch_dim() -> None:
    """A mask of padding has the rows first, where sequences come first in all else."""
    stages: dict[int, nn.Module] = {0: Mixes(), 1: Mixes()}
    x, y = torch.randn(2, 7, 8, 3)
    with Executor(SCHEDULE, stages, weighed, batch_dim=1, in_process=True) as executor:
        for weight in torch.ones(8, 7), torch.ones(7, 8):
            with pytest.raises(schedir.ExecutionError, match="the batch has 8 rows"):
                executor.step(x, target=y, loss_kwargs={"weight": weight})
        executor.step(x, target=y, loss_kwargs={"weight": torch.ones(7, 1, 3)})


def test_inputs_alone_may_have_sequences_first() -> None:
    """And classes, one for each row."""

    class Last(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[-1])

    torch.manual_seed(0)
    stages: dict[int, nn.Module] = {0: Mixes(), 1: Last(3, 5)}
    x, classes = torch.randn(6, 8, 3), torch.randint(5, (8,))
    loss_fn = nn.functional.cross_entropy
    with Executor(
        SCHEDULE, stages, loss_fn, args_chunk_spec=(TensorChunkSpec(1),), in_process=True
    ) as executor:
        found = executor.evaluate(x, target=classes).loss
    expected = float(loss_fn(stages[1](stages[0](x)), classes).detach())
    assert found == pytest.approx(expected, rel=1e-6)
    with (
        Executor(SCHEDULE, stages, loss_fn, batch_dim=1, in_process=True) as executor,
        pytest.raises(schedir.ExecutionError, match=r"target: it is split along dim 1, .* \[8\]"),
    ):
        executor.evaluate(x, target=classes)


def test_rows_are_counted_in_what_is_cut() -> None:
    """Not in the first tensor of a last stage that has its labels beside its input."""

    torch.manual_seed(0)
    stages: dict[int, nn.Module] = {0: nn.Linear(3, 3), 1: Scores()}
    x, labels, offset = torch.randn(7, 3), torch.randint(3, (7,)), torch.randn(3)
    given: Any = {1: {"offset": offset, "labels": labels}}
    specs = {"labels": 0, "offset": "replicate"}
    options: dict[str, Any] = {"kwargs_chunk_spec": specs, "in_process": True}
    with Executor(SCHEDULE, stages, lambda output, _: output, **options) as executor:
        found = executor.evaluate(x, stage_inputs=given)
    expected = stages[1](stages[0](x), offset, labels)
    assert found.samples == 7
    assert found.loss == pytest.approx(float(expected.detach()), rel=1e-6)
    options["kwargs_chunk_spec"] = dict.fromkeys(specs, "replicate")
    with (
        Executor(SCHEDULE, stages, lambda output, _: output, **options) as executor,
        pytest.raises(
            schedir.ExecutionError, match=r"stage_inputs\[1\]: none of its tensors is cut"
        ),
    ):
        executor.evaluate(x, stage_inputs=given)


# Against torch's own cutting.


def dims_and_specs() -> st.SearchStrategy[tuple[int, Any, Any]]:
    """For a tensor of three dims: what it is cut along, -1 for nothing, ours and torch's."""
    cuts = st.integers(-3, 2)
    cut_so = cuts.flatmap(
        lambda dim: st.sampled_from(
            [(dim, dim, TensorChunkSpec(dim)), (dim, TensorChunkSpec(dim), TensorChunkSpec(dim))]
        )
    )
    marks = st.sampled_from(["replicate", _Replicate, _Replicate()])
    return cut_so | marks.map(lambda mark: (9, mark, _Replicate()))


def drawn(part: tuple[tuple[int, Any, Any], int], rows: int) -> tuple[Tensor, Any, Any]:
    (dim, ours, theirs), other = part
    shape = [other] * 3
    if dim != 9:
        shape[dim] = rows
    return torch.randn(shape), ours, theirs


PARTS = st.lists(st.tuples(dims_and_specs(), st.integers(1, 9)), min_size=1, max_size=3)


@given(PARTS, PARTS, st.integers(1, 9), st.integers(1, 4), st.booleans())
def test_microbatches_are_those_of_torch(
    args: Any, kwargs: Any, rows: int, number: int, short: bool
) -> None:
    """And put together again they are the batch."""
    rows = rows if short else max(rows, number)
    positional = [drawn(part, rows) for part in args]
    named = {f"k{at}": drawn(part, rows) for at, part in enumerate(kwargs)}
    values: Any = (tuple(t for t, *_ in positional), {name: t for name, (t, *_) in named.items()})
    specs = ChunkSpecs(
        0,
        checked(tuple(ours for _, ours, _ in positional), "args_chunk_spec"),
        checked({name: ours for name, (_, ours, _) in named.items()}, "kwargs_chunk_spec"),
    )
    expected: Any = split_args_kwargs_into_chunks(
        values[0],
        values[1],
        number,
        tuple(theirs for *_, theirs in positional),
        {name: theirs for name, (*_, theirs) in named.items()},
    )
    ways: Any = (specs.of_inputs, lambda whole: specs.beside(whole, rows))
    entries: Any = (
        [(at, *part) for at, part in enumerate(positional)],
        [(name, *part) for name, part in named.items()],
    )
    for value, theirs, way, parts in zip(values, expected, ways, entries, strict=True):
        pieces = cut(value, number, "inputs", way, may_be_short=True)
        ours = pieces.microbatches[: len(theirs)]
        for key, tensor, spec, _ in parts:
            for one, other in zip(ours, theirs, strict=True):
                assert torch.equal(one[key], other[key])
            dim = checked(spec, "")
            if dim == "replicate":
                assert all(one[key] is tensor for one in ours)
            elif len(ours) == min(rows, number):
                assert torch.equal(torch.cat([one[key] for one in ours], dim), tensor)


def test_nested_specs_are_of_the_outer_structure() -> None:
    x = torch.arange(8.0).reshape(4, 2)
    specs = ChunkSpecs(0, ("replicate", {"a": 0, "b": (1, None)}, None), {})
    batch = (x, {"a": x, "b": (x.T, x)}, [x, x])
    pieces = cut(batch, 2, "inputs", specs.of_inputs).microbatches
    whole, named, listed = pieces[1]
    assert whole is x
    assert torch.equal(named["a"], x[2:])
    assert torch.equal(named["b"][0], x.T[:, 2:])
    assert torch.equal(named["b"][1], x[2:])
    assert [torch.equal(part, x[2:]) for part in listed] == [True, True]
    one_for_all = ChunkSpecs(0, 1, {})
    pieces = cut((x.T, x.T), 2, "inputs", one_for_all.of_inputs).microbatches
    assert torch.equal(pieces[0][1], x.T[:, :2])


@pytest.mark.parametrize(
    ("spec", "given"),
    [((0, 0), torch.ones(8, 3)), ((0,), (torch.ones(8, 3),) * 2), (({"a": 0},), (torch.ones(8),))],
)
def test_a_spec_of_another_structure_is_refused(spec: Any, given: Any) -> None:
    with (
        Executor(SCHEDULE, biased(), MSE, args_chunk_spec=spec, in_process=True) as executor,
        pytest.raises(
            schedir.ExecutionError, match=r"inputs: its chunk spec .* has another struct"
        ),
    ):
        executor.step(given, target=torch.ones(8, 3))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_dim": -1}, "batch_dim must be an int of at least 0, not -1"),
        ({"batch_dim": True}, "batch_dim must be an int"),
        ({"args_chunk_spec": "whole"}, "args_chunk_spec: a chunk spec is a dim.* not 'whole'"),
        ({"args_chunk_spec": (0, 1.5)}, "args_chunk_spec: .* not 1.5"),
        ({"kwargs_chunk_spec": {"a": {"b": True}}}, "kwargs_chunk_spec: .* not True"),
        ({"kwargs_chunk_spec": {"a": TensorChunkSpec("x")}}, "kwargs_chunk_spec: .* not 'x'"),
        ({"kwargs_chunk_spec": 0}, "must map keywords to their chunk specs, such as .*, not 0"),
    ],
)
def test_what_is_no_spec_is_refused(options: Any, said: str) -> None:
    with pytest.raises(schedir.ExecutionError, match=said):
        Executor(SCHEDULE, biased(), MSE, in_process=True, **options)


@on_ranks(2)
def test_a_rank_that_knows_no_rows_refuses_and_all_cut_alike(rank: int) -> None:
    torch.manual_seed(0)
    stages: list[nn.Module] = [nn.Linear(3, 3), Scores()]
    model = copy.deepcopy(stages)
    x, labels, offset = torch.randn(8, 3), torch.randint(3, (8,)), torch.randn(3)
    given: Any = {1: {"offset": offset, "labels": labels}} if rank else {}

    def make(**options: Any) -> Executor:
        return Executor(SCHEDULE, {rank: stages[rank]}, lambda output, _: output, sgd, **options)

    said = message_of(make, batch_dim=rank)
    assert "batch_dim" in said
    with make(kwargs_chunk_spec={"labels": 0}) as executor:
        if rank:
            refused = message_of(executor.step, stage_inputs=given)
            assert "'offset', a tensor of shape [3]" in refused
            assert "has no whole batch to compare with" in refused
        loss = executor.step(x, stage_inputs=given).loss
    expected = model[1](model[0](x), offset, labels)
    assert loss == pytest.approx(float(expected.detach()), rel=1e-6)
    assert everyone(loss) == [loss] * 2
