"""The pictures of the README are those that schedir draws, and the README has no other."""

from __future__ import annotations

import pytest
from write_pictures import LOSSES, MEASURED, PICTURES, pictures, zero_bubble

import schedir
from schedir.passes import strip_communication
from tests.test_golden import compare

NAMES = (
    "1f1b.svg",
    "1f1b-rr.svg",
    "both-ways.svg",
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


def test_the_zero_bubble_schedule_is_the_published_one() -> None:
    schedule = schedir.build(zero_bubble, ranks=4, microbatches=8)
    published = "F0 F1 F2 F3 I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7"
    computed = strip_communication(schedule).flat[0][:-1]
    assert [str(action) for action in computed] == [f"0{token}" for token in published.split()]
    assert schedir.simulate(schedule).makespan == 27


def test_what_is_measured_is_what_is_predicted() -> None:
    predicted, measured = schedir.simulator.load_timelines(MEASURED)
    assert predicted.schedule == measured.schedule
    assert predicted.measured is None
    assert measured.measured is not None
