"""Timelines in files: what is written is read back exactly, and what is wrong is named."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedir
from schedir import LoadError, ParseError, Timeline
from schedir.simulator import Measured, Sizes, load_timelines, save_timelines
from tests.built_in import NAMES
from tests.literals import SHORT

STARTS = [0.5, 2, math.nan, 8.5, 2, 3, 4.5, 7]
ENDS = [2, 2.5, 8, 10, 3, 4.5, 7, 8]
MEASURED = Timeline(
    SHORT, STARTS, ENDS, Sizes(4, 2, (30, 40), 100, 100.5, 200), "s", Measured(3, 2e-5)
)


@pytest.mark.parametrize("name", NAMES)
def test_a_simulated_timeline_is_read_back(name: str, tmp_path: Path) -> None:
    line = schedir.simulate(schedir.build(name))
    sizes = Sizes(activation=3, deferred=None if name == "1f1b" else (2,) * line.schedule.stages)
    line = attrs.evolve(line, sizes=sizes, unit="ms")
    line.save(tmp_path / "run.json")
    found = Timeline.load(tmp_path / "run.json")
    assert found == line
    assert found.starts.dtype == line.starts.dtype == np.int64
    assert (found.sizes, found.unit, found.measured) == (sizes, "ms", None)


times = st.floats(0, 1e15) | st.just(math.nan)


@given(st.lists(st.tuples(times, times), min_size=8, max_size=8))
def test_floats_are_read_back_with_all_their_digits(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[float, float]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "floats.json"
    ordered = [(min(pair), max(pair)) if pair[0] == pair[0] else pair for pair in pairs]
    starts, ends = zip(*ordered, strict=True)
    line = Timeline(SHORT, starts, ends, measured=Measured(0))
    line.save(path)
    found = Timeline.load(path)
    assert found == line
    assert found.starts.tobytes() == line.starts.tobytes()


def test_several_timelines_share_their_schedule(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    steps = [attrs.evolve(MEASURED, measured=Measured(step)) for step in range(3)]
    other = schedir.simulate(schedir.build("1f1b"))
    save_timelines([*steps, other], path)
    found = load_timelines(path)
    assert found == [*steps, other]
    assert found[0].schedule is found[2].schedule
    assert path.read_text().count("name listed") == 1
    with pytest.raises(LoadError, match=r"run\.json holds 4 timelines, not one; .*load_timel"):
        Timeline.load(path)
    save_timelines([], path)
    assert load_timelines(path) == []
    with pytest.raises(LoadError, match="holds 0 timelines"):
        Timeline.load(path)


def test_the_form_of_the_file(tmp_path: Path) -> None:
    MEASURED.save(tmp_path / "run.json")
    assert (tmp_path / "run.json").read_text() == (
        '{"schedir timelines": 1,\n'
        f'"schedules": {json.dumps([schedir.dumps(SHORT)])},\n'
        '"timelines": [\n'
        '{"schedule":0,"unit":"s","measured":{"step":3,"clock_error":2e-05},"sizes":'
        '{"boundary":4,"input":2,"activation":[30,40],"weight":100,"gradient":100.5,'
        '"optimizer":200,"deferred":null,"early_gradient":0,"shard_ways":1},\n'
        '"starts": [0.5,2.0,null,8.5,2.0,3.0,4.5,7.0],\n'
        '"ends": [2.0,2.5,8.0,10.0,3.0,4.5,7.0,8.0]}]}\n'
    )


def content() -> Any:
    """The content of a sound file."""
    return {
        "schedir timelines": 1,
        "schedules": [schedir.dumps(SHORT)],
        "timelines": [
            {
                "schedule": 0,
                "unit": "s",
                "measured": {"step": 0, "clock_error": 0},
                "sizes": dict.fromkeys(attrs.asdict(Sizes()), 0) | {"shard_ways": 1},
                "starts": [0, 1, 6, 7, 1, 2, 4, 6],
                "ends": [1, 2, 7, 9, 2, 4, 6, 7],
            }
        ],
    }


def test_a_file_from_before_there_were_deferred_bytes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    MEASURED.save(path)
    newer = ',"deferred":null,"early_gradient":0,"shard_ways":1'
    path.write_text(path.read_text().replace(newer, ""))
    assert Timeline.load(path).sizes == MEASURED.sizes


BROKEN = [
    (("starts", 5), -1, "starts: a time must be finite and at least 0: rank 1 #1 1F0 is said"),
    (("starts", 5), True, r"starts\[5\] must be a finite number, .*, not True"),
    (("starts", 5), "2", r"starts\[5\] must be .* not '2'"),
    (("starts", 5), math.nan, r"starts\[5\] must be .* not nan"),
    (("ends", 5), 10**30, r"ends\[5\] must be .* not 1000"),
    (("ends", 5), 1, "an entry ends before it starts: rank 1 #1 1F0 is said to run from 2 to 1"),
    (("starts",), [0] * 7, "starts must hold one time for each of the 8 actions, .* shape .7,"),
    (("ends",), [9] * 9, "ends must hold one time for each of the 8 actions, .* shape .9,"),
    (("ends",), None, "ends must be a list, not None"),
    (("schedule",), 1, "there is no schedule 1"),
    (("schedule",), -1, "there is no schedule -1"),
    (("unit",), "h", "unit must be s, ms, us or None, not 'h'"),
    (("measured",), 3, "measured must be an object, not 3"),
    (("measured", "step"), 1.5, "measured: step must be an int >= 0, not 1.5"),
    (("measured", "clock_error"), None, "measured: clock_error must be a number, not None"),
    (("measured", "clock_error"), 10**400, "measured: clock_error must be finite and >= 0"),
    (("measured", "when"), 0, "measured: unknown key 'when'; known: step, clock_error"),
    (("sizes", "weight"), None, "sizes: weight must be a number, not None"),
    (("sizes", "deferred"), [1], "deferred has 1 numbers, but listed has 2 stages"),
    (("sizes", "weight"), -1, "sizes: weight must be finite and >= 0 .*, not -1"),
    (("sizes", "weight"), [1, "2"], "sizes: weight of stage 1 must be a number, not '2'"),
    (("sizes", "weight"), [1, 2, 3], "weight has 3 numbers, but listed has 2 stages"),
    (("sizes", "boundary"), [1, 2], "boundary has 2 numbers, but listed has 1 boundaries"),
    (("sizes", "wieght"), 1, "sizes: unknown key 'wieght'; known: boundary, input, activation"),
    (("begins",), [], "unknown key 'begins'; known: schedule, starts, ends, sizes"),
]


@pytest.mark.parametrize(("keys", "value", "message"), BROKEN)
def test_a_fault_of_a_timeline_is_named(
    keys: tuple[Any, ...], value: object, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.json"
    whole = content()
    held = whole["timelines"][0]
    for key in keys[:-1]:
        held = held[key]
    held[keys[-1]] = value
    path.write_text(json.dumps(whole))
    with pytest.raises(LoadError, match=rf"run\.json: timeline 0: {message}"):
        Timeline.load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedules": ["schedir 1\nname x y\nmicrobatches 0\n"]}, "schedule 0:3:14: a schedule"),
        ({"schedules": [3]}, "schedule 0 is not text: 3"),
        ({"schedules": {}}, "schedules must be a list"),
        ({"timelines": 3}, "timelines must be a list, not 3"),
        ({"timelines": [3]}, "timeline 0 must be an object, not 3"),
        ({"timelines": [{}]}, "timeline 0 lacks 'schedule'"),
        ({"timeline": []}, "the file: unknown key 'timeline'"),
        ({"schedir timelines": 2}, "format 2 is unknown; this is format 1"),
    ],
)
def test_a_fault_of_the_file_is_named(change: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(content() | change))
    with pytest.raises(LoadError, match=rf"run\.json: {message}"):
        load_timelines(path)


@pytest.mark.parametrize("text", ["[]", "3", "{}", '"schedir timelines"'])
def test_another_file_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(LoadError, match='it lacks the key "schedir timelines"'):
        Timeline.load(tmp_path / "run.json")


def test_a_file_that_is_cut_short_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    MEASURED.save(path)
    text = path.read_text().rstrip()
    for length in range(len(text)):
        path.write_text(text[:length])
        with pytest.raises(ParseError, match="not JSON, or cut short") as error:
            Timeline.load(path)
        assert error.value.file == str(path)
        assert error.value.line <= text[:length].count("\n") + 1


def test_files_that_can_not_be_read(tmp_path: Path) -> None:
    for path, said in ((tmp_path / "none.json", r"none\.json: No such"), (tmp_path, "Is a dir")):
        with pytest.raises(LoadError, match=said):
            Timeline.load(path)
