"""Along which dim each argument is cut, or that it goes whole: said, or refused where it is not."""

from __future__ import annotations

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
from schedir.runtime.microbatches import ChunkSpecs, checked, cut
from tests.runtime.kit import (
    MSE,
    Calls,
    Twins,
    everyone,
    gradients,
    message_of,
    numbered,
    refused,
    sgd,
)
from tests.runtime.on_ranks import on_ranks

ROWS = 16
SCHEDULE = schedir.build("1f1b", ranks=2, microbatches=4)


class Biased(nn.Linear):
    """Adds a bias of its own features, or one for each row, that it is given."""

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        return y if bias is None else y + bias


def scores(layer: nn.Module, x: Tensor, offset: Tensor, labels: Tensor) -> Tensor:
    """Of a last stage that returns the loss itself."""
    return nn.functional.cross_entropy(layer(x) + offset, labels)


def biased() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Biased(ROWS, ROWS), Biased(ROWS, ROWS)]


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
    with Executor(SCHEDULE, numbered(biased()), weighed, in_process=True) as executor:
        for call in (executor.step, executor.evaluate):
            with refused(said):
                call(x, target=y, **arguments)
        if "stage_inputs" in arguments:
            with refused(said):
                executor.infer(x, **arguments)


@pytest.mark.parametrize("spec", ["replicate", 0])
@pytest.mark.parametrize("where", WHERE)
def test_a_spec_says_which_is_meant(where: str, spec: Any) -> None:
    x, y = batch()
    arguments = WHERE[where](torch.randn(ROWS) if spec == "replicate" else torch.rand(ROWS, 1))
    twins = Twins(biased(), SCHEDULE)
    specs = {"bias": spec, "weight": spec}
    with twins.executor(weighed, kwargs_chunk_spec=specs, optimizer=None) as executor:
        loss = executor.step(x, target=y, **arguments).loss
        evaluated = executor.evaluate(x, target=y, **arguments).loss
        outputs = executor.infer(x, stage_inputs=arguments.get("stage_inputs"))
    beside = arguments.get("stage_inputs", {})
    first, last = twins.whole
    whole = last(first(x, **beside.get(0, {})), **beside.get(1, {}))
    expected = weighed(whole, y, **arguments.get("loss_kwargs", {}))
    expected.backward()
    assert loss == evaluated == pytest.approx(float(expected.detach()), rel=1e-6)
    torch.testing.assert_close(torch.cat(outputs or []), whole.detach())
    torch.testing.assert_close(gradients(twins.local.values()), gradients(twins.whole))


@pytest.mark.parametrize("rows", [12, 20])
def test_what_has_no_entry_for_each_row_goes_whole(rows: int) -> None:
    """A bias of 16 in a batch of 12, or a number without dims."""
    x, y = batch(rows)
    first, last = stages = biased()
    bias, weight = torch.randn(ROWS), torch.tensor(0.5)
    with Executor(SCHEDULE, numbered(stages), weighed, in_process=True) as executor:
        ways: list[Any] = [{1: {"bias": bias}}, {1: bias}]
        given: Any = {"loss_kwargs": {"weight": weight}}
        found = [executor.evaluate(x, target=y, stage_inputs=way, **given).loss for way in ways]
    with torch.no_grad():
        expected = weighed(last(first(x), bias), y, weight)
    assert found == pytest.approx([float(expected)] * 2, rel=1e-6)


def test_by_position_it_is_asked_for_by_keyword() -> None:
    x, y = batch()
    executor = Executor(SCHEDULE, numbered(biased()), MSE, in_process=True)
    with refused(r"stage_inputs\[1\]: a ten.*by keyword, .\"na"):
        executor.step(x, target=y, stage_inputs={1: torch.randn(ROWS)})


def mixes() -> Calls:
    """Of sequences first: [positions, rows, features], whose positions see each other."""
    return Calls(lambda layer, x: layer(x - x.mean(0, keepdim=True)), nn.Linear(3, 3))


@pytest.mark.parametrize("rows", [3, 7, 8])
def test_sequences_may_come_first(rows: int) -> None:
    """As many positions as rows would hide a cut along the wrong dim from the shapes alone."""
    torch.manual_seed(0)
    twins = Twins([mixes(), mixes()], SCHEDULE)
    model = nn.Sequential(*twins.whole)
    x, y = torch.randn(2, 7, rows, 3)
    expected = MSE(model(x), y)
    with twins.executor(batch_dim=1, optimizer=None) as executor:
        found = executor.evaluate(x, target=y)
        assert found.samples == rows
        assert found.loss == pytest.approx(float(expected.detach()), rel=1e-6)
        outputs = executor.infer(x) or []
        assert len(outputs) == min(rows, 4)
        torch.testing.assert_close(torch.cat(outputs, 1), model(x).detach())
        if rows < 4:
            with refused("inputs: 3 rows can't be split"):
                executor.step(x, target=y)
            return
        # Uneven microbatches weigh as much as they have rows, ready-made ones too.
        pieces = [*x.tensor_split(4, 1)], [*y.tensor_split(4, 1)]
        for inputs, target in ((x, y), pieces):
            assert executor.step(inputs, target=target).loss == pytest.approx(found.loss, rel=1e-6)
    (2 * expected).backward()
    torch.testing.assert_close(gradients(twins.local.values()), gradients(twins.whole))


def test_a_tensor_may_have_rows_first_or_along_the_batch_dim() -> None:
    """A mask of padding has the rows first, where sequences come first in all else."""
    x, y = torch.randn(2, 7, 8, 3)
    stages = numbered([mixes(), mixes()])
    with Executor(SCHEDULE, stages, weighed, batch_dim=1, in_process=True) as executor:
        for weight in torch.ones(8, 7), torch.ones(7, 8):
            with refused("the batch has 8 rows"):
                executor.step(x, target=y, loss_kwargs={"weight": weight})
        executor.step(x, target=y, loss_kwargs={"weight": torch.ones(7, 1, 3)})


def test_inputs_alone_may_have_sequences_first() -> None:
    torch.manual_seed(0)
    last = Calls(lambda layer, x: layer(x[-1]), nn.Linear(3, 5))
    stages = numbered([mixes(), last])
    x, classes = torch.randn(6, 8, 3), torch.randint(5, (8,))
    loss_fn = nn.functional.cross_entropy
    options: dict[str, Any] = {"args_chunk_spec": (TensorChunkSpec(1),), "in_process": True}
    with Executor(SCHEDULE, stages, loss_fn, **options) as executor:
        found = executor.evaluate(x, target=classes).loss
    expected = float(loss_fn(last(stages[0](x)), classes).detach())
    assert found == pytest.approx(expected, rel=1e-6)
    executor = Executor(SCHEDULE, stages, loss_fn, batch_dim=1, in_process=True)
    with refused(r"target: it is split along dim 1, .* \[8\]"):
        executor.evaluate(x, target=classes)


def test_rows_are_counted_in_what_is_cut() -> None:
    """Not in the first tensor of a last stage that has its labels beside its input."""
    torch.manual_seed(0)
    first, last = stages = [nn.Linear(3, 3), Calls(scores, nn.Linear(3, 3))]
    x, labels, offset = torch.randn(7, 3), torch.randint(3, (7,)), torch.randn(3)
    given: Any = {1: {"offset": offset, "labels": labels}}

    def executor_of(**specs: Any) -> Executor:
        options: dict[str, Any] = {"kwargs_chunk_spec": specs, "in_process": True}
        return Executor(SCHEDULE, numbered(stages), lambda output, _: output, **options)

    with executor_of(labels=0, offset="replicate") as executor:
        found = executor.evaluate(x, stage_inputs=given)
    expected = last(first(x), offset, labels)
    assert found.samples == 7
    assert found.loss == pytest.approx(float(expected.detach()), rel=1e-6)
    executor = executor_of(labels="replicate", offset="replicate")
    with refused(r"stage_inputs\[1\]: none of its tensors is cut"):
        executor.evaluate(x, stage_inputs=given)


# For a tensor of three dims: what it is cut along, 9 for nothing, ours and torch's.
CUTS: Any = [
    (d, own(d), TensorChunkSpec(d)) for d in range(-3, 3) for own in (int, TensorChunkSpec)
]
WHOLE: Any = [(9, mark, _Replicate()) for mark in ("replicate", _Replicate, _Replicate())]


def drawn(part: tuple[tuple[int, Any, Any], int], rows: int) -> tuple[Tensor, Any, Any]:
    (dim, ours, theirs), other = part
    shape = [rows if at in (dim, dim + 3) else other for at in range(3)]
    return torch.randn(shape), ours, theirs


PART = st.tuples(st.sampled_from(CUTS) | st.sampled_from(WHOLE), st.integers(1, 9))
PARTS = st.lists(PART, min_size=1, max_size=3)


@given(PARTS, PARTS, st.integers(1, 9), st.integers(1, 4), st.booleans())
def test_microbatches_are_those_of_torch(
    args: Any, kwargs: Any, rows: int, number: int, short: bool
) -> None:
    rows = rows if short else max(rows, number)
    parts: Any = (
        dict(enumerate(drawn(part, rows) for part in args)),
        {f"k{at}": drawn(part, rows) for at, part in enumerate(kwargs)},
    )

    def both(which: int) -> Any:
        """Of the positional arguments, and of the others."""
        positional, named = ({key: part[which] for key, part in own.items()} for own in parts)
        return tuple(positional.values()), named

    values, specs = both(0), ChunkSpecs(0, *map(checked, both(1), ("args", "kwargs")))
    (args, kwargs), (args_spec, kwargs_spec) = values, both(2)
    expected: Any = split_args_kwargs_into_chunks(args, kwargs, number, args_spec, kwargs_spec)
    ways: Any = (specs.along, lambda batch, what: specs.beside(batch, what, rows))
    for value, theirs, way, own in zip(values, expected, ways, parts, strict=True):
        pieces = cut(value, number, "inputs", way, may_be_short=True)
        ours = pieces.microbatches[: len(theirs)]
        for key, (tensor, spec, _) in own.items():
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
    _, (whole, named, listed) = cut(batch, 2, "inputs", specs.along).microbatches
    assert whole is x
    assert torch.equal(named["a"], x[2:])
    assert torch.equal(named["b"][0], x.T[:, 2:])
    assert torch.equal(named["b"][1], x[2:])
    assert [torch.equal(part, x[2:]) for part in listed] == [True, True]
    one_for_all = ChunkSpecs(0, 1, {})
    (_, other), _ = cut((x.T, x.T), 2, "inputs", one_for_all.along).microbatches
    assert torch.equal(other, x.T[:, :2])


@pytest.mark.parametrize(
    ("spec", "given"),
    [((0, 0), torch.ones(8, 3)), ((0,), (torch.ones(8, 3),) * 2), (({"a": 0},), (torch.ones(8),))],
)
def test_a_spec_of_another_structure_is_refused(spec: Any, given: Any) -> None:
    options: dict[str, Any] = {"args_chunk_spec": spec, "in_process": True}
    executor = Executor(SCHEDULE, numbered(biased()), MSE, **options)
    with refused(r"inputs: its chunk spec .* has another struct"):
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
    with refused(said):
        Executor(SCHEDULE, numbered(biased()), MSE, in_process=True, **options)


@on_ranks(2)
def test_a_rank_that_knows_no_rows_refuses_and_all_cut_alike(rank: int) -> None:
    first, last = stages = [nn.Linear(3, 3), Calls(scores, nn.Linear(3, 3))]
    x, labels, offset = torch.randn(8, 3), torch.randint(3, (8,)), torch.randn(3)
    given: Any = {1: {"offset": offset, "labels": labels}} if rank else {}
    expected = last(first(x), offset, labels)

    def make(**options: Any) -> Executor:
        return Executor(SCHEDULE, {rank: stages[rank]}, lambda output, _: output, sgd, **options)

    assert "batch_dim" in message_of(make, batch_dim=rank)
    with make(kwargs_chunk_spec={"labels": 0}) as executor:
        if rank:
            said = message_of(executor.step, stage_inputs=given)
            assert "'offset', a tensor of shape [3]" in said
            assert "has no whole batch to compare with" in said
        loss = executor.step(x, stage_inputs=given).loss
    assert loss == pytest.approx(float(expected.detach()), rel=1e-6)
    assert everyone(loss) == [loss] * 2
