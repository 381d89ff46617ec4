"""The table of kinds, and what is made of it."""

from __future__ import annotations

import pickle

import pytest

from schedir import Action, Kind
from schedir.ir import (
    BACKWARDS,
    COMMUNICATION,
    COMPLETES_GRADIENTS,
    COMPUTE,
    CONSUMES,
    NAMES_VERSION,
    READS_WEIGHTS,
    RECEIVES,
    SENDS,
    TEXTBOOK,
)
from schedir.render.palette import WORDS, shade
from schedir.runtime.program.compiler import _MAKERS


def test_a_kind_is_its_token() -> None:
    tokens = " ".join(map(str, Kind))
    assert tokens == (
        "F B I W R SEND_ACT RECV_ACT SEND_GRAD RECV_GRAD OFFLOAD RELOAD REDUCE_GRAD OPTIM_STEP"
    )
    assert Kind("SEND_ACT") is Kind.SEND_ACT
    assert pickle.loads(pickle.dumps(Kind.RECV_GRAD)) is Kind.RECV_GRAD
    with pytest.raises(ValueError, match="'X' is not a valid Kind"):
        Kind("X")


def test_every_kind_has_a_word_of_its_own() -> None:
    words = {kind.meaning.word for kind in Kind}
    assert len(words) == len(Kind)
    assert all(words)


def test_the_sets_are_what_the_table_says() -> None:
    forward, full, half, other, again = (
        Kind.FORWARD,
        Kind.BACKWARD,
        Kind.BACKWARD_INPUT,
        Kind.BACKWARD_WEIGHT,
        Kind.RECOMPUTE,
    )
    assert {full, half, other} == BACKWARDS
    assert {forward, full, half, other, again} == READS_WEIGHTS
    assert {forward, again} == NAMES_VERSION
    assert {full, other} == COMPLETES_GRADIENTS
    assert {forward, full, half, other, again, Kind.OPTIM_STEP} == COMPUTE
    assert {Kind.SEND_ACT, Kind.SEND_GRAD} == SENDS
    assert {Kind.RECV_ACT, Kind.RECV_GRAD} == RECEIVES
    assert COMMUNICATION == SENDS | RECEIVES
    assert {forward: Kind.RECV_ACT, full: Kind.RECV_GRAD, half: Kind.RECV_GRAD} == CONSUMES
    assert TEXTBOOK.tolist() == [1, 2, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("one", "other"),
    [("0SEND_ACT3", "1RECV_ACT3"), ("1SEND_GRAD3", "0RECV_GRAD3")],
)
def test_the_ends_of_a_transfer(one: str, other: str) -> None:
    def action(token: str) -> Action:
        return Action(Kind(token[1:-1]), int(token[0]), int(token[-1]))

    assert action(one).counterpart == action(other)
    assert action(other).counterpart == action(one)


@pytest.mark.parametrize(
    "action",
    [Action(Kind.FORWARD, 0, 0), Action(Kind.RECV_ACT, 0, 0), Action(Kind.SEND_GRAD, 0, 0)],
)
def test_what_has_no_other_end(action: Action) -> None:
    assert action.counterpart is None


def test_every_kind_is_carried_out_and_drawn() -> None:
    assert set(_MAKERS) == set(Kind) - {Kind.OFFLOAD, Kind.RELOAD}
    for kind in COMPUTE - {Kind.OPTIM_STEP}:
        assert WORDS[kind] == kind.meaning.word
        assert shade(kind).startswith("#000000 on ")
