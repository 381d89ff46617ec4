"""What a rule's templates make of a finding's attributes."""

from __future__ import annotations

import attrs
import pytest

from schedir.checker.diagnostics import fill
from schedir.ir import forward


@attrs.frozen
class Filler:
    one = 1
    several = 3
    late = 2.50
    action = forward(2, 5)
    none: tuple[int, ...] = ()
    numbers: tuple[int, ...] = (4, 0, 1, 2)


@pytest.mark.parametrize(
    ("template", "filled"),
    [
        ("no hole", "no hole"),
        ("{one} of {several}", "1 of 3"),
        ("{action} is of stage {action.stage}", "2F5 is of stage 2"),
        ("{one:is|are}, {several:is|are}, {one:|s}", "is, are, "),
        ("{late:g}", "2.5"),
        ("{numbers:and}", "4, 0, 1 and 2"),
        ("{numbers:ranges}, {none:ranges}", "0-2, 4, none"),
        ("{{one}}", "{one}"),
    ],
)
def test_holes_are_filled_with_attributes(template: str, filled: str) -> None:
    assert fill(template, Filler()) == filled


def test_an_attribute_that_is_not_there_is_an_error() -> None:
    with pytest.raises(AttributeError, match="severel"):
        fill("{severel}", Filler())
