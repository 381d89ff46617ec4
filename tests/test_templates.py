"""What a rule's templates make of a finding's attributes."""

from __future__ import annotations

import attrs
import pytest

from schedir.checker.templates import Text, fill
from schedir.ir import forward


@attrs.frozen
class Filler:
    one = 1
    several = 3
    late = 2.50
    action = forward(2, 5)
    none: tuple[int, ...] = ()
    numbers: tuple[int, ...] = (4, 0, 1, 2)
    text = Text("{one} of {several}")
    texts = Text(("{one}", "{several}"))


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


def test_a_class_has_the_template_and_its_instances_the_text() -> None:
    assert Filler.text == "{one} of {several}"
    assert Filler().text == "1 of 3"
    assert Filler().texts == ("1", "3")
