"""The CPU in the place of a device whose work is queued."""

from __future__ import annotations

from schedir.runtime.accelerator import Host


class Queueing(Host):
    """Memory is handled as it has to be where the host is ahead of the device."""

    queues = True
