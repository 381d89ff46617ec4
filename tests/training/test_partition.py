"""Layers become stages: none is lost, weights and training do not depend on the cut."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import plain_step
from torch import Tensor, nn

import schedir
from schedir import ExecutionError
from schedir.runtime import Executor
from schedir.runtime.arguments import whole_name
from schedir.training import Stages, deferred, partition, pop, stash
from tests.runtime.kit import MSE, Batch, adamw, message_of, microbatches_of, random_batches
from tests.runtime.on_ranks import on_ranks
from tests.training.test_checkpoint import assert_same

WIDTH = 6


def flattened(x: Tensor) -> Tensor:
    return x.flatten(1)


def layers() -> list[Any]:
    """Modules, functions and lambdas, without a parameter or with many."""
    return [
        deferred(nn.Linear, 4, WIDTH),
        torch.tanh,
        deferred(nn.LayerNorm, WIDTH),
        lambda x: x * 2,
        deferred(nn.Linear, WIDTH, WIDTH),
        deferred(nn.Sequential, nn.ReLU(), nn.Identity()),
        flattened,
        deferred(nn.Linear, WIDTH, 4, bias=False),
    ]


def sequential() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def chained(stages: Stages, x: Any) -> Any:
    return nn.Sequential(*(stages[stage] for stage in sorted(stages)))(x)


def state_of(stages: Stages) -> dict[str, Tensor]:
    return {name: value for stage in stages.values() for name, value in stage.state_dict().items()}


WAYS: list[dict[str, Any]] = [{}, {"by": "uniform"}, {"by": "type:linear"}]
WAYS.append({"costs": [1, 2, 3, 4, 5, 6, 7, 8]})


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("number", [1, 2, 3, 8])
def test_no_layer_is_lost_and_none_is_empty(number: int, way: dict[str, Any]) -> None:
    stages = partition(layers(), number, **way)
    names = [list(summary.layers) for summary in stages.summaries]
    assert all(names)
    assert [name for some in names for name in some] == [str(n) for n in range(8)]
    assert list(stages) == list(range(number))
    held = [sum(p.numel() for p in stage.parameters()) for stage in stages.values()]
    assert held == [summary.parameters for summary in stages.summaries]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("number", [2, 3, 8])
def test_weights_and_names_do_not_depend_on_the_cut(number: int, way: dict[str, Any]) -> None:
    whole = partition(layers(), 1, seed=5)[0].state_dict()
    torch.manual_seed(number)
    torch.rand(number)
    before = torch.get_rng_state()
    stages = partition(layers(), number, seed=5, **way)
    assert torch.equal(torch.get_rng_state(), before)
    assert list(state_of(stages)) == list(whole)
    assert_same(state_of(stages), whole)
    other = partition(layers(), 1, seed=6)[0].state_dict()
    assert not torch.equal(other["0.weight"], whole["0.weight"])


def test_layers_that_are_made_alike_have_weights_of_their_own() -> None:
    stage = partition([deferred(nn.Linear, 4, 4) for _ in range(2)], 1)[0]
    assert not torch.equal(stage.get_parameter("0.weight"), stage.get_parameter("1.weight"))


@given(st.integers(1, 8), st.data())
def test_every_cut_computes_what_the_uncut_model_does(number: int, data: st.DataObject) -> None:
    starts = data.draw(st.sets(st.integers(1, 7), min_size=number - 1, max_size=number - 1))
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    stages = partition(layers(), number, boundaries=sorted(starts))
    assert torch.equal(chained(stages, x), partition(layers(), 1)[0](x))
    assert [stage.layers[0] for stage in stages.summaries] == ["0", *map(str, sorted(starts))]


def test_an_nn_sequential_keeps_its_names_and_its_modules() -> None:
    model = sequential()
    x = torch.randn(3, 4)
    stages = partition(model, 2, by="uniform")
    assert list(state_of(stages)) == list(model.state_dict())
    assert stages[0].get_submodule("0") is model[0]
    assert torch.equal(chained(stages, x), model(x))


def test_a_mapping_names_its_layers() -> None:
    torch.manual_seed(0)
    parts = {"embed": nn.Linear(4, 4), "blocks.0": nn.Tanh(), "blocks.1": nn.Linear(4, 4)}
    stages = partition(parts, 2, boundaries=["blocks.1"])
    assert list(stages[0].state_dict()) == ["embed.weight", "embed.bias"]
    assert list(stages[1].state_dict()) == ["blocks.1.weight", "blocks.1.bias"]
    assert str(stages) == (
        "stage 0: embed Linear, blocks.0 Tanh; 20 parameters\n"
        "stage 1: blocks.1 Linear; 20 parameters"
    )


def test_neighbours_of_one_kind_are_told_together() -> None:
    model = [nn.Embedding(3, 2), *(nn.Linear(2, 2) for _ in range(3)), nn.ReLU()]
    stages = partition(model, 1, costs=[1, 2, 2, 2, 0.5])
    assert str(stages) == "stage 0: 0 Embedding, 1 to 3 Linear, 4 ReLU; 24 parameters, cost 7.5"


def pair(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x > 0


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        return {"x": self.linear(x) * mask, "mask": mask}


def whole(state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return state["x"], state["mask"]


def spread(x: Tensor, mask: Tensor) -> Tensor:
    return x + mask.sum()


@pytest.mark.parametrize("boundaries", [[1, 2], [2, 3], [3, 5]])
def test_structures_go_from_layer_to_layer_as_from_stage_to_stage(boundaries: list[int]) -> None:
    listed = [pair, deferred(Masked), whole, deferred(Masked), whole, spread]
    sched = schedir.build("1f1b", ranks=3, microbatches=2)
    stages = partition(listed, sched, boundaries=boundaries)
    uncut = partition(listed, 1)[0]
    assert_trains_as(uncut, sched, stages, batches=random_batches(1), in_process=True)


class Losing(nn.Linear):
    def forward(self, x: Tensor, labels: Tensor, **other: Any) -> Tensor:  # type: ignore[override]
        return MSE(super().forward(x), labels)


def scaled(x: Tensor, mask: Tensor) -> Tensor:
    return x * mask


def test_what_a_stage_is_given_beside_goes_to_the_layers_that_take_it() -> None:
    listed = [scaled, deferred(nn.Linear, 4, 4), scaled, torch.tanh, deferred(Losing, 4, 4)]
    (x, y), (mask, _) = random_batches(2)
    losses = []
    for ranks in (1, 2, 4):
        sched = schedir.build("1f1b", ranks=ranks, microbatches=2)
        stages = partition(listed, sched, by="uniform")
        given: dict[int, dict[str, Tensor]] = {
            stage: {"mask": mask}
            for stage, of in enumerate(stages.summaries)
            if {"0", "2"} & set(of.layers)
        }
        given.setdefault(ranks - 1, {})["labels"] = y
        specs: dict[str, int] = {"mask": 0, "labels": 0}
        options: dict[str, Any] = {"kwargs_chunk_spec": specs, "in_process": True}
        with Executor(sched, stages, lambda output, _: output, **options) as executor:
            losses.append(executor.step(x, stage_inputs=given).loss)
    assert losses == [losses[0]] * 3


def test_how_a_layer_is_called_is_found_once_for_each_form() -> None:
    """It takes longer than many a layer."""
    x = torch.ones(2)
    forms: list[Any] = [(x, x), {"x": x, "y": x}, [x, x]]
    with mock.patch.object(inspect, "signature", wraps=inspect.signature) as asked:
        stage = partition([lambda x, y: (x, y), lambda x, y, mask: x + y + mask], 1)[0]
        for form in forms * 3:
            copied = copy.deepcopy(stage)
            assert torch.equal(stage(form, mask=x), 3 * x)
        assert torch.equal(copied(forms[0], mask=x), 3 * x)
    assert 0 < asked.call_count <= 2 * (1 + len(forms))


def test_what_no_layer_takes_is_said() -> None:
    stage = partition([nn.ReLU(), torch.tanh], 1)[0]
    expected = "no layer of this stage, 0 (ReLU), 1 (tanh), has a parameter named mask"
    assert expected in message_of(stage, torch.ones(1), mask=1)


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b"])
def test_training_in_one_process_equals_that_of_the_uncut_model(name: str) -> None:
    sched = schedir.build(name, ranks=2, microbatches=4)
    assert_trains_as(partition(layers(), 1)[0], sched, partition(layers(), sched), in_process=True)


@on_ranks(2)
def test_training_on_ranks_equals_that_of_the_uncut_model(rank: int) -> None:
    for name, way in zip(("1f1b", "interleaved-1f1b"), WAYS[2:], strict=True):
        sched = schedir.build(name, ranks=2, microbatches=4)
        stages = partition(layers(), sched, **way)
        assert list(stages) == list(sched.stages_of(rank))
        assert_trains_as(partition(layers(), 1)[0], sched, stages)


def assert_trains_as(
    uncut: nn.Module,
    sched: schedir.Schedule,
    stages: Mapping[int, nn.Module],
    loss_fn: Any = MSE,
    make: Any = adamw,
    batches: Sequence[Batch] | None = None,
    *,
    near: Iterable[float] = repeat(0.0),
    **options: Any,
) -> None:
    """Train the stages here, and the uncut model: loss and weights stay the same, bit for bit, or
    as near as is said for each step."""
    optimizer = make(uncut.parameters())
    with Executor(sched, stages, loss_fn, make, **options) as executor:
        for (x, y), share in zip(batches or random_batches(2), near, strict=False):
            by: Any = {"rtol": share, "atol": share}
            pieces = microbatches_of((x, y), sched.microbatches)
            loss = plain_step([uncut], loss_fn, [optimizer], pieces)
            assert executor.step(x, target=y).loss == pytest.approx(loss, rel=share, abs=0)
            state = uncut.state_dict()
            for stage in stages.values():
                for name, value in stage.state_dict().items():
                    torch.testing.assert_close(value, state[whole_name(name)], **by)


@on_ranks(2)
def test_ranks_that_cut_in_different_places_are_refused(rank: int) -> None:
    """Both stages have a linear layer that takes 4 and gives 4: nothing else would notice."""
    listed = [deferred(nn.Linear, 4, 4) for _ in range(4)]
    sched = schedir.build("1f1b", ranks=2, microbatches=2)
    stages = partition(listed, sched, boundaries=[1 + rank])
    expected = r"stages 0 to 0 \| 1 to 3 on process 0, but into 0 to 1 \| 2 to 3 on process 1, so"
    with pytest.raises(ExecutionError, match=expected):
        Executor(sched, stages, MSE, adamw)
    Executor(sched, dict(stages), MSE, adamw).close()


class Counted(nn.Linear):
    """Says where it was made."""

    made: ClassVar[list[str]] = []

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.made.append(self.weight.device.type)


def test_only_what_is_owned_is_made() -> None:
    Counted.made.clear()
    sched = schedir.build("1f1b", ranks=4, microbatches=4)
    stages = partition([deferred(Counted) for _ in range(8)], sched, rank=2)
    assert list(stages) == [2]
    assert Counted.made.count("cpu") == 2
    assert set(Counted.made) == {"cpu", "meta"}
    assert [summary.layers for summary in stages.summaries][2] == ("4", "5")
    assert [summary.parameters for summary in stages.summaries] == [40] * 4


def test_layers_are_made_on_a_device() -> None:
    stages = partition(layers(), 2, device="meta")
    assert all(p.is_meta for stage in stages.values() for p in stage.parameters())


def reset(module: nn.Module) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()  # type: ignore[operator]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_init_gives_values_to_what_was_made_on_meta(number: int) -> None:
    """`reset_parameters` draws what the constructor draws."""
    usual = partition(layers(), 1, seed=2)[0].state_dict()
    assert_same(state_of(partition(layers(), number, seed=2, init=reset)), usual)


def test_modules_on_meta_get_values_by_init() -> None:
    def model() -> nn.Sequential:
        with torch.device("meta"):
            return sequential()

    first, second = (state_of(partition(model(), number, init=reset)) for number in (1, 2))
    assert_same(second, first)


class Offset(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.offset = nn.Parameter(torch.zeros(4))
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))


def test_what_init_leaves_out_is_named() -> None:
    with pytest.raises(ExecutionError, match=r"layer 0: init has given no values to offset, count"):
        partition([deferred(Offset)], 1, init=reset)


def using(module: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: x @ module.get_parameter("weight").T


TABLE = nn.Embedding(4, 4)


def through_the_table(x: Tensor) -> Tensor:
    return x @ TABLE.weight.T


LINEAR = nn.Linear(4, 4)
NOT_ON_META = deferred(lambda: nn.Linear(2, int(torch.ones(1).item())))
A_MODULE = "is a function that uses the module"


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], "there is no layer"),
        (LINEAR, "takes an nn.Sequential"),
        ([nn.ReLU], "layer 0 is the class ReLU"),
        ([3], "layer 0 is no module, .* but int"),
        ([using(LINEAR)], f"layer 0 {A_MODULE} Linear, which .*tied"),
        ([nn.ReLU(), LINEAR.forward], f"layer 1 {A_MODULE} Linear"),
        ([functools.partial(torch.multiply, LINEAR)], f"layer 0 {A_MODULE} Linear"),
        ([nn.ReLU(), through_the_table], f"layer 1 {A_MODULE} Embedding"),
        ([functools.partial(torch.multiply, TABLE.weight)], "uses a parameter, which its stage w"),
        ([deferred(nn.ReLU).tied("key", using(LINEAR))], f"layer 0 {A_MODULE} Linear"),
        ([stash("in"), pop("in", nn.Bilinear(4, 4, 4))], f"layer 1 {A_MODULE} Bilinear"),
        ([deferred(int)], "layer 0: int has made no layer"),
        ([NOT_ON_META], "made on the device meta, .* pass the result as an argument"),
        ({"a": nn.ReLU(), "a.b": nn.ReLU()}, "layers a and a.b can't both"),
        ({"forward": nn.ReLU()}, "can't be named forward"),
    ],
)
def test_what_are_no_layers_is_said(layers: Any, message: str) -> None:
    with pytest.raises(ExecutionError, match=message):
        partition(layers, 1)


@pytest.mark.parametrize(
    ("stages", "way", "message"),
    [
        (6, {}, "6 stages .* of 5 layers"),
        (0, {}, "1 stage or more, not 0"),
        (2, {"by": "uniform", "boundaries": [2]}, "by= and boundaries=: a model is cut in one way"),
        (2, {"by": "params"}, "not 'params'"),
        (2, {"costs": [1]}, "1 numbers for 5 layers"),
        (2, {"costs": [1, 2, -1, 2, 2]}, "layer 2 must be finite and at least 0, not -1"),
        (2, {"costs": [1, 2, 3, float("nan"), 2]}, "layer 3 must be finite"),
        (2, {"costs": {0: 1}}, "costs: a list of numbers, one per layer, not dict"),
        (2, {"costs": [1, "2", 3, 4, 5]}, "layer 1 must be a number"),
        (3, {"boundaries": [2]}, "3 stages have 2 between them, but there are 1"),
        (3, {"boundaries": [3, 2]}, "layer 2 does not come after"),
        (3, {"boundaries": [2, 2]}, "layer 2 does not come after .* would be empty"),
        (2, {"boundaries": [0]}, "layer 0 does not come after"),
        (2, {"boundaries": ["head"]}, "there is no layer 'head', only 0 to 4"),
        (2, {"boundaries": [5]}, "there is no layer 5"),
        (2, {"by": "type:Block"}, "'type:Block' matches none .* Linear, Tanh, ReLU"),
        (2, {"by": "type:("}, "no regular expression"),
        (2, {"rank": 0}, "a number has no ranks"),
    ],
)
def test_where_it_can_not_be_cut_is_said(stages: int, way: Any, message: str) -> None:
    with pytest.raises(ExecutionError, match=message):
        partition(sequential(), stages, **way)


def test_what_is_deferred_makes_a_layer() -> None:
    assert "this ReLU is made already" in message_of(deferred, nn.ReLU())
    assert "not int" in message_of(deferred, 3)


def test_a_layer_that_does_not_take_what_it_is_given_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(7, 4))
    expected = "layer 2 (Linear) fails on what layer 1 (ReLU) gives, float32[4, 8]: Runtime"
    assert expected in message_of(partition(model, 1)[0], torch.randn(4, 4))
    sched = schedir.build("1f1b", ranks=2, microbatches=2)
    x, y = random_batches(1)[0]
    for boundaries in ([1], [2]):
        stages = partition(model, sched, boundaries=boundaries)
        with Executor(sched, stages, MSE, None, in_process=True) as executor:
            assert expected in message_of(executor.step, x, target=y)


def test_a_stage_can_be_copied_and_its_layers_exchanged() -> None:
    stage = partition(sequential(), 1)[0]
    twin = copy.deepcopy(stage)
    x = torch.randn(2, 4)
    assert torch.equal(stage(x), twin(x))
    assert_same(stage.state_dict(), twin.state_dict())
    twin.add_module("4", nn.Identity())
    assert twin(x).shape == (2, 8)


def calls_another(x: Tensor) -> Tensor:
    return through_the_table(x)


@pytest.mark.parametrize(
    "layer",
    [
        lambda x: sum([TABLE.weight * y for y in (x, x)]),
        lambda x: (lambda y: y @ TABLE.weight)(x),
        functools.partial(lambda x, y: through_the_table(x), y=1),
        calls_another,
    ],
)
def test_a_module_that_a_function_uses_is_found_in_what_it_calls(layer: Any) -> None:
    with pytest.raises(ExecutionError, match="layer 0 is a function that uses the module Embed"):
        partition([layer], 1)
