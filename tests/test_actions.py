"""The table of kinds, and what is made of it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import attrs
import pytest

from schedir import Action, Kind
from schedir.graph.paths import TEXTBOOK
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
    parse_action,
)
from schedir.render.palette import WORDS, shade
from schedir.runtime.program.compiler import _CARRIED_OUT


def test_a_kind_is_its_token() -> None:
    tokens = " ".join(map(str, Kind))
    assert tokens == (
        "F B I W R SEND_ACT RECV_ACT SEND_GRAD RECV_GRAD OFFLOAD RELOAD UNSHARD RESHARD "
        "REDUCE_GRAD OPTIM_STEP"
    )
    assert Kind("SEND_ACT") is Kind.SEND_ACT
    assert len({kind.meaning.word for kind in Kind} - {""}) == len(Kind)
    assert pickle.loads(pickle.dumps(Kind.RECV_GRAD)) is Kind.RECV_GRAD
    with pytest.raises(ValueError, match="'X' is not a valid Kind"):
        Kind("X")


def test_the_sets_are_what_the_table_says() -> None:
    forward, again, full = Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD
    half, other = Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
    assert {full, half, other} == BACKWARDS
    assert {forward, full, half, other, again} == READS_WEIGHTS
    assert {forward, again} == NAMES_VERSION
    assert {full, other} == COMPLETES_GRADIENTS
    assert {forward, full, half, other, again, Kind.OPTIM_STEP} == COMPUTE
    assert {Kind.SEND_ACT, Kind.SEND_GRAD} == SENDS
    assert {Kind.RECV_ACT, Kind.RECV_GRAD} == RECEIVES
    assert COMMUNICATION == SENDS | RECEIVES
    assert {forward: Kind.RECV_ACT, full: Kind.RECV_GRAD, half: Kind.RECV_GRAD} == CONSUMES
    assert TEXTBOOK.tolist() == [1, 2, 1, 1, 1] + 10 * [0]


def test_the_ends_of_a_transfer() -> None:
    for tokens in (("0SEND_ACT3", "1RECV_ACT3"), ("1SEND_GRAD3", "0RECV_GRAD3")):
        one, other = map(parse_action, tokens)
        assert (one.counterpart, other.counterpart) == (other, one)
    for alone in ("0F0", "0RECV_ACT0", "0SEND_GRAD0"):
        assert parse_action(alone).counterpart is None


def test_every_kind_is_carried_out_and_drawn() -> None:
    assert set(Kind) == _CARRIED_OUT
    for kind in COMPUTE - {Kind.OPTIM_STEP}:
        assert WORDS[kind] == kind.meaning.word
        assert shade(kind).startswith("#000000 on ")


ACTIONS = [
    Action(Kind.FORWARD, 3, 4),
    Action(Kind.FORWARD, 3, 4, 1),
    Action(Kind.RECOMPUTE, 3, 4, version=0),
    Action(Kind.OPTIM_STEP, 3),
    Action(kind=Kind.SEND_ACT, stage=0, microbatch=999_999_999),
]


@pytest.mark.parametrize("action", ACTIONS)
def test_an_action_is_a_frozen_record_of_its_fields(action: Action) -> None:
    fields: Any = attrs.astuple(action)
    assert fields == (action.kind, action.stage, action.microbatch, action.version)
    alike = [Action(*fields), attrs.evolve(action), copy.deepcopy(action)]
    alike.append(pickle.loads(pickle.dumps(action)))
    assert {action, *alike} == {action}
    assert all(action != other for other in ACTIONS if other is not action)
    assert action != fields
    names = ("kind", "stage", "microbatch", "version")
    assert Action.__match_args__ == names
    assert repr(action) == f"Action({', '.join(f'{n}={getattr(action, n)!r}' for n in names)})"
    assert not hasattr(action, "__dict__")
    for name in (*names, "other"):
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            setattr(action, name, 0)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        del action.stage


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (("F", 0, 0), "kind must be a Kind, such as Kind.FORWARD, not 'F'"),
        ((Kind.FORWARD, -1, 0), "stage must be an int in 0..999999999, not -1"),
        ((Kind.FORWARD, True, 0), "stage must be an int in 0..999999999, not True"),
        ((Kind.FORWARD, "0", 0), "stage must be an int in 0..999999999, not '0'"),
        ((Kind.FORWARD, 10**9, 0), "stage must be an int in 0..999999999, not 1000000000"),
        ((Kind.FORWARD, 0), "FORWARD takes a microbatch"),
        ((Kind.OPTIM_STEP, 0, 0), "OPTIM_STEP takes no microbatch"),
        ((Kind.FORWARD, 0, -1), "microbatch must be an int in 0..999999999, not -1"),
        ((Kind.FORWARD, 0, 0.0), "microbatch must be an int in 0..999999999, not 0.0"),
        ((Kind.FORWARD, 0, 10**9), "microbatch must be an int in 0..999999999, not 1000000000"),
        ((Kind.BACKWARD, 0, 0, 1), "only FORWARD and RECOMPUTE name a weight version, not BACKW"),
        ((Kind.FORWARD, 0, 0, -1), "version must be an int in 0..999999999, not -1"),
    ],
)
def test_fields_that_no_token_can_hold_are_refused(fields: tuple[Any, ...], why: str) -> None:
    with pytest.raises(ValueError, match=f"^{why}"):
        Action(*fields)
