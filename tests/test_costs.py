"""Cost models in files: what is written is read back, and what is wrong is named."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import schedir
from schedir import CostModel

NUMBERS = st.integers(0, 10**15) | st.floats(0, 1e15, allow_subnormal=True)
BY_STAGE = NUMBERS | st.lists(NUMBERS, min_size=1, max_size=4).map(tuple)


def by_link(numbers: st.SearchStrategy[float]) -> st.SearchStrategy[Any]:
    links = st.tuples(st.integers(0, 99), st.integers(0, 99))
    return numbers | st.dictionaries(links, numbers, max_size=4)


STRATEGIES: dict[str, st.SearchStrategy[Any]] = {
    field.name: BY_STAGE for field in attrs.fields(CostModel)
} | {
    "recompute": st.none() | BY_STAGE,
    "overlapped": st.none() | BY_STAGE,
    "deferred_bytes": st.none() | BY_STAGE,
    "latency": by_link(NUMBERS),
    "bandwidth": by_link(NUMBERS.filter(bool) | st.just(math.inf)),
    "host_bandwidth": NUMBERS.filter(bool) | st.just(math.inf),
    "shard_ways": st.integers(1, 9) | st.floats(1, 9),
    "copy_engine": st.none() | st.dictionaries(st.integers(0, 99), st.integers(0, 9), max_size=4),
    "unit": st.sampled_from([None, "s", "ms", "us"]),
    "samples": st.none(),  # tests/test_fit.py has some
}


def typed(costs: CostModel) -> dict[str, str]:
    """The fields to the last digit, 1 apart from 1.0."""
    return {name: repr(value) for name, value in attrs.asdict(costs, recurse=False).items()}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=st.fixed_dictionaries({}, optional=STRATEGIES))
def test_what_is_saved_is_loaded_exactly(tmp_path: Path, fields: dict[str, Any]) -> None:
    costs = CostModel(**fields)
    file = tmp_path / "costs.json"
    costs.save(file)
    assert typed(CostModel.load(file)) == typed(costs)
    assert CostModel.load(str(file)) == costs


def test_a_file_is_for_people_too(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    CostModel(forward=(1, 1.5), latency={(0, 1): 3}, unit="ms").save(file)
    lines = file.read_text().splitlines()
    assert lines[:2] == ["{", '  "forward": [1, 1.5],']
    assert '  "latency": {"0->1": 3},' in lines
    assert '  "bandwidth": "inf",' in lines
    assert lines[-2:] == ['  "unit": "ms"', "}"]
    file.write_text('{"forward": 2, "bandwidth": {"0->1": "inf", "1->0": 7}}')
    assert CostModel.load(file) == CostModel(forward=2, bandwidth={(0, 1): math.inf, (1, 0): 7})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"foward": 1, "backward": 2}', "unknown key 'foward'; did you mean 'forward'?"),
        ('{"x": 1}', "unknown key 'x'; known are forward, backward, "),
        ('{"forward": -1}', "forward must be finite and >= 0 (at most 1e+15), not -1"),
        ('{"forward": [1, NaN]}', "forward of stage 1 must be finite and >= 0 (at most 1e+15), no"),
        ('{"forward": 1e999}', "forward must be finite and >= 0 (at most 1e+15), not inf"),
        ('{"forward": "1"}', "forward must be a number, not '1'"),
        ('{"forward": true}', "forward must be a number, not True"),
        ('{"forward": null}', "forward must be a number, not None"),
        ('{"forward": []}', "forward must have one number for each stage, not none"),
        ('{"boundary_bytes": [1, "2"]}', "boundary_bytes of boundary 1 must be a number, not '2'"),
        ('{"latency": {"0-1": 1}}', 'latency: a link is given as "0->1", from rank 0 to rank 1'),
        ('{"latency": {"0->1": -2}}', "latency of link (0, 1) must be finite and >= 0 (at most"),
        ('{"latency": "inf"}', "latency must be finite and >= 0 (at most 1e+15), not inf"),
        ('{"bandwidth": 0}', "bandwidth must be above 0"),
        ('{"host_bandwidth": 0}', "host_bandwidth must be above 0"),
        ('{"host_bandwidth": [1, 2]}', "host_bandwidth must be a number, not [1, 2]"),
        ('{"copy_engine": 1}', "copy_engine must be {rank: number of its engine} or None, not 1"),
        ('{"copy_engine": {"0": -1}}', "copy_engine must be {rank: number of its engine} or No"),
        ('{"copy_engine": {"0->1": 1}}', "copy_engine: a rank is given as \"0\", not '0->1'"),
        ('{"forward": {"0->1": 1}}', "forward must be a number, not {(0, 1): 1}"),
        ('{"unit": "h"}', "unit must be s, ms, us or None, not 'h'"),
        (f'{{"unit": "{"h" * 999}"}}', f"unit must be s, ms, us or None, not '{'h' * 37}...'"),
        ('{"unit": ["s"]}', "unit must be s, ms, us or None, not ['s']"),
        ('{"forward": 1, "forward": 2}', "the key 'forward' is in the file twice"),
        ("[1]", 'costs must be an object, as in {"forward": 1}, not [1]'),
        ("[" * 100_000, "its JSON is beyond what can be read"),
    ],
)
def test_a_wrong_file_names_file_key_and_mend(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "costs.json"
    file.write_text(text)
    with pytest.raises(schedir.LoadError) as error:
        CostModel.load(file)
    assert str(error.value).startswith(f"{file}: {message}")


def test_every_truncated_file_is_an_error_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    CostModel(forward=(1, 2), latency={(0, 1): 3}).save(file)
    text = file.read_text().rstrip()
    for length in range(len(text)):
        file.write_text(text[:length])
        with pytest.raises(schedir.ParseError, match="not JSON, or cut short") as error:
            CostModel.load(file)
        assert error.value.file == str(file)
        assert error.value.line <= text[:length].count("\n") + 1


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(schedir.LoadError, match=r"none\.json: No such file"):
        CostModel.load(tmp_path / "none.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(schedir.SchedirError, match=r"bytes\.json"):
        CostModel.load(tmp_path / "bytes.json")
