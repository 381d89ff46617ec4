"""Which cases `make test` has, and which are left to `make test-all`.

    @sweep("seed", range(40), quick=range(3))     # three of the forty cases in `make test`
    @long                                         # none of them
    @examples(150)                                # a tenth of those that Hypothesis draws

`make test` is `pytest --quick`; plain `pytest` has all cases, as `make test-all` has. Of a claim
that is swept, the quick cases are those that differ in kind: each mechanism once.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

import pytest
from hypothesis import settings

QUICK = "quick"  # the profile of Hypothesis, which `pytest --quick` loads

long = pytest.mark.long
"""Leave the test to `make test-all`."""


def sweep(
    names: str, values: Iterable[Any], quick: Container[Any] | Callable[[Any], bool], **options: Any
) -> pytest.MarkDecorator:
    """Parametrize with all values, of which `make test` tries those that are `quick`."""
    is_quick = quick if callable(quick) else quick.__contains__
    several = "," in names

    def case(value: Any) -> Any:
        return pytest.param(
            *(value if several else (value,)), marks=() if is_quick(value) else long
        )

    return pytest.mark.parametrize(names, [case(value) for value in values], **options)


def examples(number: int) -> settings:
    """Let Hypothesis draw so many examples; in `make test` a tenth of them, but 5 at least."""
    return settings(max_examples=max(number // 10, 5) if is_quick() else number)


def is_quick() -> bool:
    """Whether this is a run of `make test`."""
    return settings.get_current_profile_name() == QUICK
