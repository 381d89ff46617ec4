"""Which transport an executor uses, and so which channel model its list is proved under."""

from __future__ import annotations

from typing import TypeAlias

import torch

from schedir.runtime.transports.gloo import GlooTransport
from schedir.runtime.transports.in_process import Endpoint
from schedir.runtime.transports.nccl import NcclTransport

Choice: TypeAlias = type[Endpoint] | type[GlooTransport] | type[NcclTransport]


def transport_for(alone: bool, device: torch.device) -> Choice:
    """That of a process that runs all ranks `alone`, or of one among others with its stages on
    `device`."""
    if alone:
        return Endpoint
    return GlooTransport if device.type == "cpu" else NcclTransport
