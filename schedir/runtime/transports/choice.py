"""Chooses the transport of an executor, and the channel model under which its list is proved."""

from __future__ import annotations

import logging
from typing import TypeAlias

import torch

from schedir.errors import ExecutionError
from schedir.ir import CHANNELS, Schedule, channel_model
from schedir.runtime.transports.communicators import communicators_of, ranks_of
from schedir.runtime.transports.gloo import GlooTransport
from schedir.runtime.transports.in_process import Endpoint
from schedir.runtime.transports.nccl import NcclTransport

logger = logging.getLogger("schedir")

Choice: TypeAlias = type[Endpoint] | type[GlooTransport] | type[NcclTransport]


def transport_for(alone: bool, device: torch.device) -> Choice:
    """The transport of a process that runs all ranks `alone`, or of one among several, with its
    stages on `device`."""
    if alone:
        return Endpoint
    return GlooTransport if device.type == "cpu" else NcclTransport


def channel_for(transport: Choice, wanted: str | None, warns: bool) -> str:
    """The channel model to prove lists under: the transport's, or the one that the user wants.

    A stricter one is always right. A less strict one relies on the best behaviour of the transport,
    and one process `warns` of that. Raises ExecutionError for a model that is less strict than the
    transport's laxest.
    """
    if wanted is None:
        return transport.channel
    try:
        wanted = channel_model(wanted)
    except ValueError as error:
        raise ExecutionError(f"channel: {error}") from None
    if CHANNELS.index(wanted) > CHANNELS.index(transport.laxest):
        raise ExecutionError(
            f"channel={wanted!r}: on NCCL a posted receive is a kernel that holds up everything "
            f"its channel posts after it, so the least strict model there is {transport.laxest!r}"
        )
    if CHANNELS.index(wanted) > CHANNELS.index(transport.channel) and warns:
        logger.warning(
            "channel=%r: the list is proved for streams that progress independently, which CUDA "
            "does not promise. Set CUDA_DEVICE_MAX_CONNECTIONS=32 and CUDA_MODULE_LOADING=EAGER "
            "before the processes start, and warm up: before the first step, run every kernel and "
            "shape once, under a list that is clean under %r. Otherwise a step may hang",
            wanted,
            transport.channel,
        )
    return wanted


def check_streams(schedule: Schedule, transport: Choice, channel: str) -> None:
    """Raise ExecutionError if the model assumes separate streams for channels that share one.

    Channels in one batch share a communicator of NCCL, and so a stream. Under `rank` that makes no
    difference; under `pair` it does if a batch has three ranks or more.
    """
    if transport is not NcclTransport or channel not in ("pair", "edge"):
        return
    for channels in communicators_of(schedule):
        if len(channels) > 1 and (channel == "edge" or len(ranks_of(channels)) > 2):
            listed = " ".join(f"{source}→{target}" for source, target in channels)
            raise ExecutionError(
                f"channel={channel!r}: on NCCL the batches of {schedule.name} have the channels "
                f"{listed} share a stream, which the proof would take for several; leave channel "
                "out, or list their sends and receives singly"
            )
