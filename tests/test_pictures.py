"""The pictures of the documentation are what schedir draws today."""

from __future__ import annotations

import pytest
from write_pictures import LOSSES, MEASURED, PICTURES, pictures

import schedir
from tests.test_golden import compare


def test_pictures_are_current(request: pytest.FixtureRequest) -> None:
    drawn = pictures()
    for name, picture in drawn.items():
        compare(PICTURES / name, picture, request)
    assert {path.name for path in PICTURES.iterdir()} == {*drawn, MEASURED.name, LOSSES.name}


def test_what_is_measured_is_what_is_predicted() -> None:
    predicted, measured = schedir.simulator.load_timelines(MEASURED)
    assert predicted.schedule == measured.schedule
    assert predicted.measured is None
    assert measured.measured is not None
