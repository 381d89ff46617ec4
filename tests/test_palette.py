"""The colours of pictures: legible, and apart for every eye and in grey print."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from schedir import Kind
from schedir.render.palette import CRITICAL_LINE, IDLE_FILL, INK, PAPER, picture_fill

KINDS = (Kind.FORWARD, Kind.BACKWARD_WEIGHT, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.RECOMPUTE)
FILLS = {kind: [picture_fill(kind, chunk) for chunk in range(4)] for kind in KINDS}

# Linear sRGB to CIE XYZ (IEC 61966-2-1), and what is seen of it without one of the cones (Machado,
# Oliveira and Fernandes 2009, severity 1).
XYZ = np.array(
    [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.0721750],
        [0.0193339, 0.1191920, 0.9503041],
    ]
)
EYES = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritanopia": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}


def linear(colour: str) -> NDArray[Any]:
    value = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def lab(light: NDArray[Any]) -> NDArray[Any]:
    ratio = XYZ @ light / (XYZ @ np.ones(3))
    x, y, z = np.where(ratio > 216 / 24389, np.cbrt(ratio), (24389 / 27 * ratio + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def contrast(one: str, other: str) -> float:
    """As WCAG 2 defines it."""
    dark, light = sorted(float((XYZ @ linear(colour))[1]) for colour in (one, other))
    return (light + 0.05) / (dark + 0.05)


def test_contrast_is_that_of_the_definition() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_labels_are_legible(kind: Kind) -> None:
    assert all(contrast(area, ink) >= 4.5 for area, ink in FILLS[kind])
    assert contrast(INK, PAPER) >= 7


def test_kinds_have_bands_of_grey() -> None:
    bands = [[lab(linear(fill.area))[0] for fill in FILLS[kind]] for kind in KINDS]
    for lighter, darker in pairwise(bands):
        assert min(lighter) > max(darker) + 4


@pytest.mark.parametrize("eye", EYES)
def test_kinds_are_apart_for_every_eye(eye: str) -> None:
    seen = {
        kind: [lab(np.clip(EYES[eye] @ linear(fill.area), 0, 1)) for fill in fills]
        for kind, fills in FILLS.items()
    }
    for one, other in combinations(KINDS, 2):
        assert min(np.linalg.norm(a - b) for a in seen[one] for b in seen[other]) > 15
    path = lab(np.clip(EYES[eye] @ linear(CRITICAL_LINE), 0, 1))
    idle = lab(np.clip(EYES[eye] @ linear(IDLE_FILL), 0, 1))
    for fills in seen.values():
        assert min(np.linalg.norm(path - fill) for fill in fills) > 15
        assert min(np.linalg.norm(idle - fill) for fill in fills) > 10


@pytest.mark.parametrize("kind", KINDS)
def test_the_stages_of_a_rank_have_shades(kind: Kind) -> None:
    areas = [lab(linear(fill.area)) for fill in FILLS[kind]]
    assert np.linalg.norm(areas[0] - areas[1]) > 8
    assert all(np.linalg.norm(one - other) > 2 for one, other in combinations(areas, 2))
    assert picture_fill(kind, 4) == picture_fill(kind)
