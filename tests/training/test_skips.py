"""Skip connections that cross stages, against the plain model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import plain_step
from torch import Tensor, nn

import schedir
from schedir import ExecutionError
from schedir.runtime import Executor
from schedir.training import deferred, partition, pop, stash
from tests.runtime.kit import MSE
from tests.runtime.on_ranks import on_ranks


def joined(x: Tensor, skip: Tensor) -> Tensor:
    return torch.cat([x, skip], 1)


def unet() -> list[Any]:
    """Down twice and up twice; the outer skip is taken up twice, the second time as a sum."""
    return [
        deferred(nn.Conv1d, 1, 2, 3, padding=1),
        nn.Tanh(),
        stash("outer"),
        deferred(nn.Conv1d, 2, 4, 2, stride=2),
        nn.Tanh(),
        stash("inner"),
        deferred(nn.Conv1d, 4, 4, 2, stride=2),
        deferred(nn.ConvTranspose1d, 4, 4, 2, stride=2),
        pop("inner", joined),
        deferred(nn.ConvTranspose1d, 8, 2, 2, stride=2),
        pop("outer", joined),
        deferred(nn.Conv1d, 4, 2, 1),
        pop("outer", torch.add),
        deferred(nn.Conv1d, 2, 1, 1),
    ]


LAYERS = len(unet())


class Plain(nn.Module):
    """The same, as one would write it."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        at = [self.layers.get_submodule(name) for name in ("0", "3", "6", "7", "9", "11", "13")]
        outer = at[0](x).tanh()
        inner = at[1](outer).tanh()
        x = joined(at[3](at[2](inner)), inner)
        x = joined(at[4](x), outer)
        return at[6](at[5](x) + outer)  # type: ignore[no-any-return]


def batch() -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 4, 1, 8, generator=torch.Generator().manual_seed(0))
    return x, y


def _compare(sched: schedir.Schedule, boundaries: list[int], **options: Any) -> None:
    x, y = batch()
    plain = Plain(partition(unet(), 1)[0])
    pieces = list(zip(x.chunk(2), y.chunk(2), strict=True))
    expected = plain_step([plain], MSE, (), pieces)
    stages = partition(unet(), sched, boundaries=boundaries)
    with Executor(sched, stages, MSE, None, **options) as executor:
        assert executor.step(x, target=y).loss == expected
    for stage in stages.values():
        for name, parameter in stage.named_parameters():
            torch.testing.assert_close(parameter.grad, plain.layers.get_parameter(name).grad)


@settings(max_examples=8, deadline=None)
@given(st.sets(st.integers(1, LAYERS - 1), min_size=2, max_size=2))
def test_skips_cross_any_stages_in_one_process(starts: set[int]) -> None:
    sched = schedir.build("1f1b", ranks=3, microbatches=2)
    _compare(sched, sorted(starts), in_process=True)


@on_ranks(2)
def test_skips_cross_ranks(rank: int) -> None:
    """Beyond a whole stage too, which does nothing with one of them."""
    _compare(schedir.build("1f1b", ranks=2, microbatches=2), [7])
    _compare(schedir.build("interleaved-1f1b", ranks=2, microbatches=2), [3, 6, 9])


def test_what_is_put_aside_is_kept_no_longer_than_it_is_wanted() -> None:
    stages = partition(unet(), LAYERS)
    x, _ = batch()
    sizes = []
    for stage in stages.values():
        x = stage(x)
        sizes.append(len(x) if isinstance(x, tuple) else 1)
    assert sizes == [1, 1, 2, 2, 2, 3, 3, 3, 2, 2, 2, 2, 1, 1]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([stash("a"), nn.ReLU()], r"layer 0 puts 'a' aside, but no later layer"),
        ([nn.ReLU(), pop("a", torch.add)], "layer 1 takes up 'a', which no earlier"),
        ([stash("a"), stash("a"), pop("a", torch.add)], "layer 0 puts 'a' aside, but"),
    ],
)
def test_a_skip_without_its_other_end_is_refused(layers: list[Any], message: str) -> None:
    with pytest.raises(ExecutionError, match=message):
        partition(layers, 1)


def test_a_skip_is_made_of_a_name_and_a_function() -> None:
    with pytest.raises(ExecutionError, match="needs a name"):
        stash("")
    with pytest.raises(ExecutionError, match="needs a function of both values, not int"):
        pop("a", 3)  # type: ignore[arg-type]
