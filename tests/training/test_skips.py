"""Skip connections that cross stages, against the plain model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import schedir
from schedir.training import deferred, partition, pop, stash
from tests.runtime.kit import MSE, message_of, sgd
from tests.runtime.on_ranks import on_ranks
from tests.training.test_partition import assert_trains_as


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
        for name, layer in layers.named_children():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        at = [self.get_submodule(name) for name in ("0", "3", "6", "7", "9", "11", "13")]
        outer = at[0](x).tanh()
        inner = at[1](outer).tanh()
        x = joined(at[3](at[2](inner)), inner)
        x = joined(at[4](x), outer)
        return at[6](at[5](x) + outer)  # type: ignore[no-any-return]


def batch() -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 4, 1, 8, generator=torch.Generator().manual_seed(0))
    return x, y


def _compare(sched: schedir.Schedule, boundaries: list[int], **options: Any) -> None:
    plain = Plain(partition(unet(), 1)[0])
    stages = partition(unet(), sched, boundaries=boundaries)
    options |= {"near": (1e-6, 1e-5)}  # a value's gradients are summed up in another order
    assert_trains_as(plain, sched, stages, MSE, sgd, [batch()] * 2, **options)


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
    x: Any = batch()[0]
    sizes = []
    for stage in partition(unet(), LAYERS).values():
        x = stage(x)
        sizes.append(len(x) if isinstance(x, tuple) else 1)
    assert sizes == [1, 1, 2, 2, 2, 3, 3, 3, 2, 2, 2, 2, 1, 1]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([stash("a"), nn.ReLU()], "layer 0 puts 'a' aside, but no later layer"),
        ([nn.ReLU(), pop("a", torch.add)], "layer 1 takes up 'a', which no earlier"),
        ([stash("a"), stash("a"), pop("a", torch.add)], "layer 0 puts 'a' aside, but"),
    ],
)
def test_a_skip_without_its_other_end_is_refused(layers: list[Any], message: str) -> None:
    assert message in message_of(partition, layers, 1)


def test_a_skip_is_made_of_a_name_and_a_function() -> None:
    assert "needs a name" in message_of(stash, "")
    assert "needs a function of both values, not int" in message_of(pop, "a", 3)
