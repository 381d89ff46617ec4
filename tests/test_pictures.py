"""The pictures of the documentation are what schedir draws today."""

from __future__ import annotations

import pytest
from write_pictures import LOSSES, MEASURED, PICTURES, pictures

import schedir
from tests.test_golden import compare

NAMES = (
    "1f1b.svg",
    "1f1b-rr.svg",
    "interleaved-1f1b.svg",
    "memory.svg",
    "pipedream.svg",
    "predicted-and-measured.svg",
    "train-alexnet.svg",
    "train-images.svg",
    "train-masked.svg",
    "zb-h1.svg",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_is_current(name: str, request: pytest.FixtureRequest) -> None:
    compare(PICTURES / name, pictures()[name], request)


def test_there_is_no_other_picture() -> None:
    assert {path.name for path in PICTURES.iterdir()} == {*NAMES, MEASURED.name, LOSSES.name}
    assert set(pictures()) == set(NAMES)


def test_what_is_measured_is_what_is_predicted() -> None:
    predicted, measured = schedir.simulator.load_timelines(MEASURED)
    assert predicted.schedule == measured.schedule
    assert predicted.measured is None
    assert measured.measured is not None
