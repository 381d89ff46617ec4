"""The caller's autocast, which is for forwards alone.

Backwards and updates compute in the types of what they work on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def suspended(devices: Iterable[str]) -> Iterator[None]:
    """Run a list inside, without the autocast that is on for these types of device."""
    _set(devices, enabled=False)
    try:
        yield
    finally:
        _set(devices, enabled=True)


@contextmanager
def resumed(devices: Iterable[str]) -> Iterator[None]:
    """Run a forward inside, with it again."""
    _set(devices, enabled=True)
    try:
        yield
    finally:
        _set(devices, enabled=False)


def _set(devices: Iterable[str], enabled: bool) -> None:
    for device in devices:
        torch.set_autocast_enabled(device, enabled)
