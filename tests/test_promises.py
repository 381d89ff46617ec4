"""Whatever the lists hold, a public function answers, or raises what its docstring promises."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedir
from schedir import Action, CostModel, Kind, LoadError, Schedule, ScheduleError, UnsoundError
from schedir.checker import CHANNELS, prove
from schedir.graph.compile import graph_of
from schedir.ir import dumps_torch_csv, parse_action
from schedir.passes import forward_only, insert_reductions, strip_communication
from schedir.render import timeline_json, timeline_text
from tests.literals import listed
from tests.stepped import Stepped
from tests.test_random import drawn
from tests.test_stepped import spans_of

STAGE_WIDE = [kind for kind in Kind if kind.meaning.stage_wide]
# The collectives are rarely in the lists that are drawn, and wrong in the most ways.
KINDS = [*Kind, *STAGE_WIDE, *[Kind.REDUCE_GRAD] * 5]


def any_action(base: Schedule, chance: random.Random) -> Action:
    """An action of a known stage and microbatch, mostly."""
    kind = chance.choice(KINDS)
    stage = chance.choice([*range(base.stages)] * 3 + [base.stages, 7])
    microbatch = chance.choice([*range(base.microbatches)] * 3 + [base.microbatches, 9])
    version = chance.choice([None, None, 0, 1, 5]) if kind is Kind.FORWARD else None
    return Action(kind, stage, None if kind in STAGE_WIDE else microbatch, version)


def broken(seed: int) -> Schedule:
    """A right schedule, complete or not, after some accidents: on any rank, anything can happen."""
    chance = random.Random(seed)
    base = drawn(chance)
    if chance.random() < 0.3:
        base = insert_reductions(base)
    if chance.random() < 0.6:
        base = schedir.insert_communication(base)
    lists = [list(actions) for actions in base.flat]
    for _ in range(chance.choice((0, 1, 1, 2, 4))):
        here, there = (chance.choice(lists) for _ in range(2))
        accident = chance.choice(("drop", "double", "move", "add"))
        if accident == "add":
            moved = [any_action(base, chance)]
        else:
            place = chance.randrange(len(here) + 1)
            moved = here[place : place + 1]
            if accident != "double":
                del here[place : place + 1]
        if accident != "drop":
            place = chance.randrange(len(there) + 1)
            there[place:place] = moved
    return Schedule(base.name, base.microbatches, base.placement, lists)


PRICES = (
    CostModel(),
    CostModel(latency=1, boundary_bytes=2, bandwidth=2, reduce_grad=2),
    CostModel(forward=0, backward=0),
)
FUNCTIONS: dict[str, tuple[Callable[[Schedule], object], tuple[type[Exception], ...]]] = {
    "build": (lambda s: schedir.build(as_generator(s), **shape(s)), (ScheduleError,)),
    "check": (schedir.check, ()),
    "check, host": (lambda s: schedir.check(s, "host", max_delay=0, max_activations=1), ()),
    "prove": (prove, ()),
    "round trip": (lambda s: schedir.loads(schedir.dumps(s)), ()),
    "torch": (dumps_torch_csv, ()),
    "hash": (lambda s: (s.content_hash, s.is_complete, hash(s)), ()),
    "insert_communication": (schedir.insert_communication, (UnsoundError,)),
    "strip_communication": (strip_communication, ()),
    "insert_reductions": (insert_reductions, ()),
    "forward_only": (forward_only, ()),
    "dataflow": (lambda s: graph_of(s).transfers, (UnsoundError,)),
}


def as_generator(schedule: Schedule) -> schedir.Generator:
    def generate(pipe: schedir.Pipeline, rank: int) -> tuple[Action, ...]:
        return schedule.flat[rank]

    return schedir.schedule("drawn", placement=lambda _: schedule.placement)(generate)


def shape(schedule: Schedule) -> dict[str, int]:
    return {"ranks": schedule.ranks, "microbatches": schedule.microbatches}


@pytest.mark.parametrize("name", FUNCTIONS)
@given(st.integers(0, 1 << 32))
def test_wrong_lists_raise_what_is_promised(name: str, seed: int) -> None:
    function, promised = FUNCTIONS[name]
    schedule = broken(seed)
    try:
        function(schedule)
    except promised:
        assert not schedir.check(schedule).ok


@given(st.integers(0, 1 << 32), st.sampled_from(PRICES))
def test_a_timeline_is_complete_or_an_error(seed: int, costs: CostModel) -> None:
    schedule = broken(seed)
    report = schedir.check(schedule, "async")  # what runs anywhere is simulated
    try:
        line = schedir.simulate(schedule, costs)
    except ScheduleError as raised:
        error = raised
    else:
        assert spans_of(line) == Stepped(line.schedule, {}, costs, "ahead").run()
        timeline_json(line)
        timeline_text(line, 80, colour=True)
        return
    assert (report.ok, error.diagnostics) == (False, report.diagnostics)


@pytest.mark.parametrize(
    ("lists", "code"),
    [
        # A sum whose other end is missing, with and without a step that waits for it.
        (("0F0 0B0 0REDUCE_GRAD", "0F1 0B1"), "S302"),
        (("0F0 0B0 0REDUCE_GRAD 0OPTIM_STEP", "0F1 0B1 0OPTIM_STEP"), "S302"),
        (("0F0 0B0", "0F1 0B1 3REDUCE_GRAD"), "S101"),
        (("0F0 0B0", "0F1 0B1", "0REDUCE_GRAD"), "S103"),
        (("0B0 0F0 0REDUCE_GRAD", "0F1 0B1 0REDUCE_GRAD"), "S201"),
        (("0F0 0B0 0F0 0REDUCE_GRAD", "0F1 0B1 0REDUCE_GRAD"), "S104"),
    ],
)
def test_what_can_never_run_is_not_simulated(lists: tuple[str, ...], code: str) -> None:
    with pytest.raises(ScheduleError) as error:
        schedir.simulate(listed(2, "0,1", *lists))
    assert code in {found.code for found in error.value.diagnostics}


def test_what_the_pass_inserts_does_not_move_the_findings() -> None:
    schedule = listed(1, "0 1 0,1", "0F0 2F0 2B0 0B0 2REDUCE_GRAD", "1F0 1B0")
    with pytest.raises(ScheduleError) as error:
        schedir.simulate(schedule)
    assert error.value.diagnostics == schedir.check(schedule).diagnostics


@pytest.mark.parametrize("value", [None, 5, "", "forward", b"x", ["x"]])
def test_an_action_has_a_kind_and_a_schedule_a_name(value: Any) -> None:
    with pytest.raises(ValueError, match=r"kind must be a Kind, such as Kind\.FORWARD, not "):
        Action(value, 0, 0)
    with pytest.raises(ValueError, match="name must be one printable line"):
        Schedule("" if isinstance(value, str) else value, 1, (0,), ((),))


@pytest.mark.parametrize("stem", ["a" * 5000, "\0", "\ud800", "", ".", "..", "a\nb", "/"])
def test_no_name_is_more_than_not_found(stem: str) -> None:
    for suffix, kind in product(["", ".py", ".sched", ".csv", ".py:f", ":f"], [str, Path]):
        with pytest.raises(LoadError):
            schedir.build(kind(stem + suffix))


@pytest.mark.parametrize("what", ["ranks", "microbatches", "chunks"])
def test_a_shape_beyond_all_memory(what: str) -> None:
    with pytest.raises(LoadError, match="are too many: their product may be at most 100000000"):
        schedir.build("interleaved-1f1b", **{what: 10**9})


def test_a_group_beyond_all_microbatches_is_one_of_all() -> None:
    shape = {"ranks": 3, "microbatches": 5, "chunks": 2}
    huge = schedir.build("interleaved-1f1b", **shape, group_size=10**9)
    assert huge == schedir.build("interleaved-1f1b", **shape, group_size=5)


HUGE = st.sampled_from([10**9, 10**9 - 1, -(10**9), 1 << 63, 1 << 70])
JUNK = st.one_of(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.integers(max_value=0)
    | st.integers(min_value=10**9 - 1)  # a million microbatches are right, and take their time
    | st.floats()
    | st.text(max_size=2),
    st.binary(max_size=2),
    st.lists(st.none() | st.integers(-1, 2) | st.text(max_size=1), max_size=3),
    st.lists(st.lists(st.integers(-1, 2) | st.none(), max_size=2), max_size=3),
    st.just((schedir.forward(0, 0),)),
    st.just(((schedir.forward(0, 0), schedir.backward(0, 0)),)),
)
SOUND: dict[str, object] = {"name": "x", "microbatches": 1, "placement": (0,), "actions": ((),)}


@given(st.dictionaries(st.sampled_from(sorted(SOUND)), JUNK, min_size=1))
def test_a_schedule_of_junk_is_a_schedule_or_an_error(fields: dict[str, object]) -> None:
    try:
        made = Schedule(**(SOUND | fields))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return
    assert schedir.loads(schedir.dumps(made)) == made
    schedir.check(made)


@given(st.tuples(st.sampled_from(list(Kind)) | JUNK, JUNK, JUNK, JUNK))
def test_an_action_of_junk_is_an_action_or_an_error(fields: tuple[Any, ...]) -> None:
    try:
        made = Action(*fields)
    except ValueError:
        return
    assert parse_action(str(made)) == made


@given(st.sampled_from([field.name for field in attrs.fields(CostModel)]), JUNK)
def test_a_cost_of_junk_is_a_cost_or_an_error(name: str, cost: Any) -> None:
    try:
        made = CostModel(**{name: cost})
    except (TypeError, ValueError):
        return
    built = schedir.build("1f1b", ranks=2, microbatches=2)
    with suppress(schedir.SchedirError):  # it is for another number of stages, say
        assert schedir.simulate(built, made).makespan >= 0


@given(st.dictionaries(st.sampled_from(["ranks", "microbatches", "chunks", "group_size"]), JUNK))
def test_a_shape_of_junk_is_a_shape_or_an_error(shape: dict[str, Any]) -> None:
    with suppress(LoadError, ScheduleError):
        assert schedir.check(schedir.build("interleaved-1f1b", **shape)).ok


@given(
    st.sampled_from(CHANNELS) | JUNK,
    st.dictionaries(
        st.sampled_from(["max_delay", "max_versions", "max_activations", "ties"]), JUNK
    ),
)
def test_terms_of_junk_are_an_error(channel: Any, terms: dict[str, Any]) -> None:
    with suppress(ValueError, TypeError):
        schedir.check(schedir.build("1f1b", ranks=2, microbatches=2), channel, **terms)


@pytest.mark.parametrize(
    "function", [schedir.check, schedir.simulate, schedir.dumps, schedir.insert_communication]
)
@pytest.mark.parametrize("value", ["1f1b", None, Path("mine.sched"), [schedir.forward(0, 0)]])
def test_what_is_no_schedule_is_told_how_to_become_one(
    function: Callable[[Any], object], value: object
) -> None:
    with pytest.raises(TypeError, match=r"must be a Schedule, not .*schedir\.build\("):
        function(value)


@pytest.mark.parametrize("value", [None, 3, Path("mine.sched"), ["schedir 1"]])
def test_what_is_no_text_is_not_parsed(value: Any) -> None:
    with pytest.raises(TypeError, match=r"a str or bytes, not .*; schedir\.build reads files"):
        schedir.loads(value)
