"""What all tests share."""

import pytest
from hypothesis import settings

# How long an example takes is no test: machines are noisy.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write what is printed as what is expected"
    )
