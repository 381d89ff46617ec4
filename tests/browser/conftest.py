"""A real browser: the Chromium of the system, without a window."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium, for all tests of a process; ended with them."""
    if CHROMIUM is None:
        pytest.fail(
            "no Chromium is installed: `apt-get install chromium` has one, and "
            "`--ignore tests/browser` leaves these tests out",
            pytrace=False,
        )
    with sync_playwright() as driver:
        # Without a sandbox, which needs rights that a container lacks: it opens our own page alone.
        chromium = driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"], timeout=100_000
        )
        try:
            yield chromium
        finally:
            chromium.close()
