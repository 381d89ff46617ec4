"""S5xx: what is right, but slower than it need be."""

from __future__ import annotations

from typing import ClassVar

import attrs

from schedir.checker.diagnostics import Diagnostic, Severity
from schedir.checker.rules.example import example


@attrs.frozen(kw_only=True)
class LateReceive(Diagnostic):
    """A receive is posted only when its rank already waits for it, though its send was posted
    while that rank still computed."""

    code = "S501"
    name = "late-receive"
    severity: ClassVar[Severity] = "warning"
    why = (
        "A transfer starts when both its ends are posted, so this one can't overlap with compute, "
        "and its sender may wait for it."
    )
    mend = "Post the receive ahead of the compute before it; or leave it to schedir's placement."
    example = example(
        2,
        "0 1",
        "0F0 0SEND_ACT0 0F1 0SEND_ACT1 0RECV_GRAD0 0B0 0RECV_GRAD1 0B1",
        "1RECV_ACT0 1F0 1B0 1SEND_GRAD0 1RECV_ACT1 1F1 1B1 1SEND_GRAD1",
    )
    labels = ("posted late", "needs it at once")

    late: float
    many: int

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        place = self.locations[0]
        return (
            f"{place.action} is posted {self.late:g} after its send, when rank {place.rank} has "
            "nothing else to do"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """How much, and how many there are."""
        unit = "times are in forwards of one stage, a backward taking two"
        return (unit,) if self.many == 1 else (unit, f"{self.many} receives are posted late")

    @property
    def advice(self) -> str:
        """What to do."""
        place = self.locations[0]
        return f"post {place.action} ahead of the compute before rank {place.rank} #{place.index}"


@attrs.frozen(kw_only=True)
class EarlyReceive(Diagnostic):
    """A receive is posted so early that other communication, stuck behind it, makes the step take
    longer."""

    code = "S502"
    name = "early-receive"
    severity: ClassVar[Severity] = "warning"
    why = "A transport that keeps order can't pass a receive whose payload is not made yet."
    mend = "Post the receive behind what it holds up, or use a transport that keeps less order."
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
    options = (("channel", "rank"),)
    labels = ("waits for its payload", "could go, but is stuck behind it")

    channel: str
    held: float
    makespan: float
    possible: float

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        receive, other = self.locations
        return f"{receive.action} holds {other.action} up for {self.held:g}"

    @property
    def notes(self) -> tuple[str, ...]:
        """What it costs."""
        return (
            f"the step takes {self.makespan:g} under --channel {self.channel}, and "
            f"{self.possible:g} where nothing is held up",
            "times are in forwards of one stage, a backward taking two",
        )

    @property
    def advice(self) -> str:
        """What to do."""
        receive, other = self.locations
        return f"post {receive.action} behind {other.action}"


@attrs.frozen(kw_only=True)
class NeedlessSplit(Diagnostic):
    """An I is directly followed by its W: nothing is gained by splitting that backward."""

    code = "S503"
    name = "needless-split"
    severity: ClassVar[Severity] = "note"
    why = "A split backward goes through the graph twice, which one B does once."
    mend = "Write one B, or put other work between the two."
    example = example(1, "0", "0F0 0I0 0W0")

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        many = len(self.locations) // 2
        input_gradient, weights = self.locations[:2]
        if many == 1:
            return f"{input_gradient.action} and {weights.action} could be one B"
        return f"{many} pairs of an I and its W could be one B each"

    @property
    def advice(self) -> str:
        """What to do."""
        action = self.locations[0].action
        return f"write {action.stage}B{action.microbatch} in place of the two"


@attrs.frozen(kw_only=True)
class GroupSize(Diagnostic):
    """An interleaved schedule goes through the microbatches in groups of another size than the
    number of ranks, and takes longer for it."""

    code = "S504"
    name = "group-size"
    severity: ClassVar[Severity] = "note"
    why = (
        "With groups of as many microbatches as there are ranks, each chunk's last microbatch "
        "leaves just when the next chunk's first one is due (arXiv 2104.04473, section 2.2)."
    )
    mend = "Make the group size the number of ranks: `--set group_size=P`."
    example = example(
        2,
        "0 1 0 1",
        "0F0 2F0 0F1 2F1 2B0 0B0 2B1 0B1",
        "1F0 3F0 3B0 1F1 1B0 3F1 3B1 1B1",
    )

    group: int
    ranks: int
    makespan: float
    possible: float

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        return f"groups of {self.group} microbatches on {self.ranks} ranks cost makespan"

    @property
    def notes(self) -> tuple[str, ...]:
        """What it costs."""
        return (
            f"the step takes {self.makespan:g}; interleaved 1F1B in groups of {self.ranks} takes "
            f"{self.possible:g}",
            "times are in forwards of one stage, a backward taking two",
        )

    @property
    def advice(self) -> str:
        """What to do."""
        return f"make the group size {self.ranks}"


@attrs.frozen(kw_only=True)
class LateSend(Diagnostic):
    """A send is listed behind compute that does not make its payload, and the step takes longer
    for it."""

    code = "S505"
    name = "late-send"
    severity: ClassVar[Severity] = "warning"
    why = "The payload is there, but stays where it is while other stages wait for it."
    mend = "List each send right behind the compute that makes its payload."
    example = example(
        2,
        "0 1",
        "0F0 0F1 0SEND_ACT0 0SEND_ACT1 0RECV_GRAD0 0B0 0RECV_GRAD1 0B1",
        "1RECV_ACT0 1F0 1RECV_ACT1 1B0 1SEND_GRAD0 1F1 1B1 1SEND_GRAD1",
    )
    labels = ("posted late", "could stand behind this")

    many: int
    makespan: float
    alone: float  # where this one is not late
    possible: float  # where none is

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        action = self.locations[0].action
        if self.alone < self.makespan:
            return (
                f"{action} is posted late: the step takes {self.makespan:g} rather than "
                f"{self.alone:g}"
            )
        return (
            f"{action} and others are posted late: the step takes {self.makespan:g} rather than "
            f"{self.possible:g}"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """How many there are, and what they cost."""
        unit = "times are in forwards of one stage, a backward taking two"
        if self.many == 1:
            return (unit,)
        return (unit, f"{self.many} sends are late; with none so it takes {self.possible:g}")

    @property
    def advice(self) -> str:
        """What to do."""
        send, maker = self.locations
        return f"post {send.action} right behind rank {maker.rank} #{maker.index}"
