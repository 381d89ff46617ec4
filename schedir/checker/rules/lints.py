"""S5xx: what is right, but slower than it need be."""

from __future__ import annotations

import attrs

from schedir.checker.diagnostics import Diagnostic
from schedir.checker.rules.example import example

UNIT = "times are in forwards of one stage, a backward taking two"


@attrs.frozen(kw_only=True)
class LateReceive(Diagnostic):
    """A receive is posted only when its rank already waits for it, though its send was posted
    while that rank still computed."""

    code = "S501"
    name = "late-receive"
    severity = "warning"
    why = (
        "A transfer starts when both its ends are posted, so this one can't overlap with compute, "
        "and its sender may wait for it."
    )
    fix = "Post the receive ahead of the compute before it; or leave it to schedir's placement."
    example = example(
        2,
        "0 1",
        "0F0 0SEND_ACT0 0F1 0SEND_ACT1 0RECV_GRAD0 0B0 0RECV_GRAD1 0B1",
        "1RECV_ACT0 1F0 1B0 1RECV_ACT1 1SEND_GRAD0 1F1 1B1 1SEND_GRAD1",
    )
    message = "{action} is posted {late:g} after its send, when rank {rank} has nothing else to do"
    labels = ("posted late", "needs it at once")
    advice = "post {action} ahead of the compute before rank {rank} #{index}"

    late: float
    receives: int  # how many are late

    @property
    def notes(self) -> tuple[str, ...]:
        """The unit, and how many there are."""
        if self.receives == 1:
            return (UNIT,)
        return (UNIT, f"{self.receives} receives are posted late")


@attrs.frozen(kw_only=True)
class EarlyReceive(Diagnostic):
    """A receive is posted so early that it holds up other communication, and the step takes
    longer."""

    code = "S502"
    name = "early-receive"
    severity = "warning"
    why = "A transport that keeps order can't pass a receive whose payload is not made yet."
    fix = "Post the receive after what it holds up, or use a transport that keeps less order."
    example = example(
        3,
        "0 1 2",
        "0F0 0SEND_ACT0 0F1 0F2 0SEND_ACT1 0RECV_GRAD0 0B0 0SEND_ACT2 0RECV_GRAD1 0B1 "
        "0RECV_GRAD2 0B2",
        "1RECV_ACT0 1F0 1RECV_ACT1 1SEND_ACT0 1F1 1SEND_ACT1 1RECV_GRAD0 1B0 1SEND_GRAD0 "
        "1RECV_ACT2 1F2 1SEND_ACT2 1RECV_GRAD1 1B1 1SEND_GRAD1 1RECV_GRAD2 1B2 1SEND_GRAD2",
        "2RECV_ACT0 2F0 2RECV_ACT1 2B0 2SEND_GRAD0 2F1 2RECV_ACT2 2B1 2SEND_GRAD1 2F2 2B2 "
        "2SEND_GRAD2",
    )
    message = "{action} holds {other.action} up for {held:g}"
    labels = ("waits for its payload", "could go, but has to wait for it")
    notes = (
        "the step takes {makespan:g} under --channel {channel}, and {possible:g} where nothing is "
        "held up",
        UNIT,
    )
    advice = "post {action} after {other.action}"

    channel: str
    held: float
    makespan: float
    possible: float


@attrs.frozen(kw_only=True)
class NeedlessSplit(Diagnostic):
    """An I is directly followed by its W: nothing is gained by splitting that backward."""

    code = "S503"
    name = "needless-split"
    severity = "note"
    why = "A split backward goes through the graph twice, which one B does once."
    fix = "Write one B, or put other work between the two."
    example = example(1, "0", "0F0 0I0 0W0")
    advice = "write {action.stage}B{action.microbatch} in place of {action} and {other.action}"

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        pairs = len(self.locations) // 2
        if pairs == 1:
            return f"{self.action} and {self.other.action} could be one B"
        return f"{pairs} pairs of an I and its W could be one B each"


@attrs.frozen(kw_only=True)
class GroupSize(Diagnostic):
    """An interleaved schedule goes through the microbatches in groups of another size than the
    number of ranks, and takes longer for it."""

    code = "S504"
    name = "group-size"
    severity = "note"
    why = (
        "With groups of as many microbatches as there are ranks, each chunk's last microbatch "
        "leaves just when the next chunk's first one is due (arXiv 2104.04473, section 2.2)."
    )
    fix = "Make the group size the number of ranks: `--set group_size=P`."
    example = example(
        2,
        "0 1 0 1",
        "0F0 2F0 0F1 2F1 2B0 0B0 2B1 0B1",
        "1F0 3F0 3B0 1F1 1B0 3F1 3B1 1B1",
    )
    message = (
        "groups of {group} {group:microbatch|microbatches} on {ranks} ranks make the step longer"
    )
    notes = (
        "the step takes {makespan:g}; interleaved 1F1B in groups of {ranks} takes {possible:g}",
        UNIT,
    )
    advice = "make the group size {ranks}"

    group: int
    ranks: int
    makespan: float
    possible: float


@attrs.frozen(kw_only=True)
class LateSend(Diagnostic):
    """A send is listed after compute that does not make its payload, and the step takes longer
    for it."""

    code = "S505"
    name = "late-send"
    severity = "warning"
    why = "The payload is there, but stays where it is while other stages wait for it."
    fix = "List each send right after the compute that makes its payload."
    example = example(
        2,
        "0 1",
        "0F0 0F1 0SEND_ACT0 0SEND_ACT1 0RECV_GRAD0 0B0 0RECV_GRAD1 0B1",
        "1RECV_ACT0 1F0 1RECV_ACT1 1B0 1SEND_GRAD0 1F1 1B1 1SEND_GRAD1",
    )
    labels = ("posted late", "could stand after this")
    advice = "post {action} right after rank {other.rank} #{other.index}"

    sends: int  # how many are late
    makespan: float
    alone: float  # the makespan where this one is not late
    possible: float  # the makespan where none is

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        if self.alone < self.makespan:
            what, shorter = f"{self.action} is", self.alone
        else:
            what, shorter = f"{self.action} and others are", self.possible
        return f"{what} posted late: the step takes {self.makespan:g} rather than {shorter:g}"

    @property
    def notes(self) -> tuple[str, ...]:
        """The unit, and what all of them cost."""
        if self.sends == 1:
            return (UNIT,)
        return (
            UNIT,
            f"{self.sends} sends are late; if they were not, the step would take {self.possible:g}",
        )
