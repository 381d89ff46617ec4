"""What a batch may be: containers of rows, lists and iterators of microbatches, short tails."""

from __future__ import annotations

import array
import collections
import copy
import dataclasses
import enum
import types
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.utils.rnn import pack_sequence
from torch.utils._pytree import tree_leaves
from transformers import BatchEncoding, BatchFeature, DynamicCache
from transformers.modeling_outputs import BaseModelOutput

import schedir
from schedir.runtime import Executor
from tests.runtime.kit import MSE, Calls, refused, split

ONE, ONE_OF_FOUR = (schedir.build("1f1b", ranks=1, microbatches=m) for m in (2, 4))
TWO_OF_FOUR = schedir.build("1f1b", ranks=2, microbatches=4)


def summed(layer: nn.Module, *given: Any, **named: Any) -> Any:
    """Of any container of `a` and `b`."""
    a, b = (x for x in tree_leaves((given, named)) if isinstance(x, Tensor))
    return layer(a + b)


class Named(collections.namedtuple("Named", "a b")):
    __slots__ = ()


Make = Callable[[Tensor, Tensor], Any]
WHOLE: dict[str, Make] = {
    "tuple": lambda a, b: (a, b),
    "namedtuple": Named,
    "dict": lambda a, b: {"a": a, "b": b},
    "OrderedDict": lambda a, b: collections.OrderedDict(a=a, b=b),
    "defaultdict": lambda a, b: collections.defaultdict(list, a=a, b=b),
    "Counter": lambda a, b: collections.Counter({"a": a, "b": b}),
    "ChainMap": lambda a, b: collections.ChainMap({"a": a}, {"b": b}),
    "UserDict": lambda a, b: collections.UserDict(a=a, b=b),
    "MappingProxyType": lambda a, b: types.MappingProxyType({"a": a, "b": b}),
    "BatchEncoding": lambda a, b: BatchEncoding({"a": a, "b": b}),
    "BatchFeature": lambda a, b: BatchFeature({"a": a, "b": b}),
    "ModelOutput": lambda a, b: BaseModelOutput(last_hidden_state=a, hidden_states=(b,)),
    "nested": lambda a, b: ({"a": a}, [b]),
    "a mapping in a tuple": lambda a, b: (BatchEncoding({"a": a}), collections.UserDict(b=b)),
    "a deque in a tuple": lambda a, b: (a, collections.deque([b])),
}


def trained(make: Make, beside: bool) -> tuple[float, Tensor]:
    """The loss and the gradient with a batch made so: as input, or as a stage's own input."""
    a, b, y = torch.randn(3, 8, 3, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    layer = nn.Linear(3, 3)
    schedule, specs, held = ONE_OF_FOUR, {}, make(a, b)
    stages: dict[int, nn.Module] = {0: Calls(summed, layer)}
    call: dict[str, Any] = {"inputs": held}
    if beside:
        schedule = TWO_OF_FOUR
        last = Calls(lambda layer, x, *given, **named: summed(layer, *given, **named), layer)
        stages = {0: nn.Identity(), 1: last}
        named = held if isinstance(held, Mapping) else {"held": held}
        specs = dict.fromkeys(named, 0)
        call = {"inputs": a, "stage_inputs": {1: named}}
    with Executor(schedule, stages, MSE, kwargs_chunk_spec=specs, in_process=True) as executor:
        loss = executor.step(**call, target=y).loss
    assert layer.weight.grad is not None
    return loss, layer.weight.grad


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("name", WHOLE)
def test_every_container_of_rows_is_cut(name: str, beside: bool) -> None:
    loss, grad = trained(WHOLE[name], beside)
    expected_loss, expected = trained(WHOLE["tuple"], beside)
    assert loss == expected_loss
    assert torch.equal(grad, expected)


class Holder:
    def __init__(self, a: Tensor, b: Tensor) -> None:
        self.a, self.b = a, b


def cached(a: Tensor, b: Tensor) -> DynamicCache:
    cache = DynamicCache()
    cache.update(a[:, None, None], b[:, None, None], 0)
    return cache


NOT_UNDERSTOOD: dict[str, Make] = {
    "Data": dataclasses.make_dataclass("Data", ["a", "b"]),
    "Record": attrs.make_class("Record", ["a", "b"]),
    "Holder": Holder,
    "SimpleNamespace": lambda a, b: types.SimpleNamespace(a=a, b=b),
    "set": lambda a, b: {a, b},
    "frozenset": lambda a, b: frozenset([a, b]),
    "UserList": lambda a, b: collections.UserList([a, b]),
    "dict_values": lambda a, b: {"a": a, "b": b}.values(),
    "ndarray": lambda a, b: a.numpy(),
    "array": lambda a, b: array.array("f", [1.0] * len(a)),
    "memoryview": lambda a, b: memoryview(b"12345678"),
    "range": lambda a, b: range(len(a)),
    "PackedSequence": lambda a, b: pack_sequence([a, b]),
    "DynamicCache": cached,
    "generator": lambda a, b: (t for t in (a, b)),
}


@pytest.mark.parametrize("name", NOT_UNDERSTOOD)
def test_a_container_that_is_not_understood_is_named(name: str) -> None:
    """Within a batch it would go whole to every microbatch."""
    a, b, y = torch.randn(3, 8, 3)
    held = NOT_UNDERSTOOD[name](a, b)
    with Executor(ONE_OF_FOUR, {0: nn.Linear(3, 3)}, MSE) as executor:
        for inputs in ((a, held), {"a": a, "b": {"inner": held}}):
            with refused(f"inputs: {name} is no container"):
                executor.step(inputs, target=y)
        with refused(f"stage_inputs.0.: {name} is no"):
            executor.step(a, target=y, stage_inputs={0: (b, held)})


def test_ready_microbatches_may_hold_anything() -> None:
    """It is used as it is, and another one of its kind makes no other signature."""
    x, y = torch.randn(2, 8, 3)
    rows = [*torch.randn(8, 3).chunk(4)]
    stages: dict[int, nn.Module] = {
        0: Calls(lambda layer, x, held: layer(x) + held.a, nn.Linear(3, 3)),
        1: Calls(lambda layer, x, mask: layer(x) + mask.kv_num_blocks.sum(), nn.Linear(3, 3)),
    }
    whole = copy.deepcopy(stages)
    schedule = schedir.build("1f1b", ranks=2, microbatches=4)
    with Executor(schedule, stages, MSE, in_process=True) as executor:
        for _ in range(2):
            masks = [create_block_mask(causal, None, None, 256, 256, "cpu") for _ in range(4)]
            inputs = [(one, Holder(row, row)) for one, row in zip(x.chunk(4), rows, strict=True)]
            beside = {1: [{"mask": mask} for mask in masks]}
            found = executor.step(inputs, target=[*y.chunk(4)], stage_inputs=beside).loss
        assert len(executor._engine.training._numbers) == 1
    hidden = torch.cat([whole[0](*one) for one in inputs])
    assert found == pytest.approx(MSE(whole[1](hidden, masks[0]), y).item())


def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


class Colour(enum.Enum):
    RED = 1


class Setting:
    """Neither a container nor a holder of tensors: it goes to every microbatch."""

    scale = 2.0


@pytest.mark.parametrize(
    "constant",
    [None, 1, 2.5, 1j, True, "text", b"b", torch.float16, torch.Size([2]), Colour.RED, Setting()],
)
def test_constants_go_to_every_microbatch(constant: Any) -> None:
    seen = []

    def sees(layer: nn.Module, x: Tensor, given: Any = None) -> Any:
        seen.append(given)
        return layer(x)

    x = torch.randn(4, 3)
    with Executor(ONE, {0: Calls(sees, nn.Linear(3, 3))}, MSE) as executor:
        executor.step(x, target=x, stage_inputs={0: (constant,)})
    assert all(entry is constant or entry == constant for entry in seen)


def loader(x: Tensor) -> Any:
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=2)


NO_BATCH: dict[str, Callable[[Tensor], Any]] = {
    "inputs: a sparse_coo tensor can't be split": Tensor.to_sparse,
    "inputs: a nested tensor can't be split": lambda x: torch.nested.as_nested_tensor(
        [*x], layout=torch.jagged
    ),
    # It would give its first batches at every step.
    r"more than 2 microbatches .* iter\(...\)": loader,
    "0 rows": lambda x: x[:0],
    "inputs: expected a tensor.*not set$": lambda x: {1, 2},
    "inputs: expected a tensor.*not str$": lambda x: "text",
    "inputs: expected a tensor.*not bytes$": lambda x: b"text",
    "inputs: expected a tensor.*not int$": lambda x: 3,
    "inputs: expected a tensor.*not type$": lambda x: Holder,
}


@pytest.mark.parametrize("text", NO_BATCH)
def test_what_can_not_be_cut_is_named(text: str) -> None:
    x = torch.randn(8, 3)
    with Executor(ONE, {0: nn.Linear(3, 3)}, MSE) as executor, refused(text):
        executor.step(NO_BATCH[text](x), target=x)


def test_an_iterator_gives_as_many_as_are_needed() -> None:
    module = nn.Linear(3, 3)
    x = torch.randn(10, 3)
    inputs, targets = iter(x.split(1)), iter(x.split(1))
    with Executor(ONE, {0: module}, MSE) as executor:
        found = [executor.step(inputs, target=targets).loss for _ in range(5)]
        with refused("inputs: 0 microbatches given"):
            executor.step(inputs, target=targets)
    with torch.no_grad():
        expected = [float(MSE(module(part), part)) for part in x.split(2)]
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7])
def test_a_short_tail_is_evaluated(rows: int) -> None:
    torch.manual_seed(0)
    stages: dict[int, nn.Module] = {0: nn.Linear(3, 3), 1: nn.BatchNorm1d(3)}
    model = nn.Sequential(*copy.deepcopy([*stages.values()])).eval()
    x, y = torch.randn(2, rows, 3)
    with Executor(TWO_OF_FOUR, stages, MSE, in_process=True) as executor, torch.no_grad():
        found = executor.evaluate(x, target=y, outputs=True)
        assert found.loss == pytest.approx(float(MSE(model(x), y)))
        for outputs in found.outputs, executor.infer(x):
            assert outputs is not None
            assert len(outputs) == min(rows, 4)
            torch.testing.assert_close(torch.cat(outputs), model(x))
        if rows < 4:
            with refused(f"{rows} rows can't be.*drop_last"):
                executor.step(x, target=y)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"target": torch.ones(6, 3)}, "inputs 8, target 6"),
        ({"stage_inputs": {1: {"w": torch.ones(4)}}}, r"stage_inputs\[1\] 4"),
        ({"loss_kwargs": {"w": torch.ones(4)}}, "loss_kwargs 4"),
    ],
)
def test_rows_that_differ_are_named_before_the_loss(arguments: Any, text: str) -> None:
    """A loss may broadcast them, and say nothing."""
    stages: dict[int, nn.Module] = {0: nn.Linear(3, 3), 1: nn.Linear(3, 3)}
    options: Any = {"kwargs_chunk_spec": {"w": 0}, "in_process": True}
    executor = Executor(TWO_OF_FOUR, stages, MSE, **options)
    with refused(f"rows differ: .*{text}.*ready microbatches"):
        executor.step(torch.ones(8, 3), **{"target": torch.ones(8, 3), **arguments})


def test_other_rows_come_ready_made() -> None:
    x = torch.randn(8, 3)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return MSE(output.flatten(), target)

    with Executor(ONE_OF_FOUR, {0: nn.Linear(3, 3)}, loss_fn) as executor:
        executor.step(x, target=split(x.flatten(), 4))
