"""S3xx: each send meets its receive, compute has its input, and nobody waits for ever."""

from __future__ import annotations

from typing import Literal

import attrs

from schedir.checker.diagnostics import Diagnostic, Excerpt, Location
from schedir.checker.rules.example import example
from schedir.ir import Action, Kind

MEETS = "waits for"


@attrs.frozen(kw_only=True)
class WaitCycle(Diagnostic):
    """Some actions wait for each other in a circle: a deadlock."""

    code = "S301"
    name = "wait-cycle"
    why = (
        "None of them can ever run. A transfer needs both ends posted, stages that share "
        "parameters (`--tie`) step together, and a transport keeps a part of each list's order "
        "(`--channel`), so an action can be stuck behind another one."
    )
    mend = "Post one of the actions of the cycle earlier, or use a transport that keeps less order."
    example = example(
        2,
        "0 1",
        "0F0 0SEND_ACT0 0RECV_GRAD0 0B0 0F1 0SEND_ACT1 0RECV_GRAD1 0B1",
        "1RECV_ACT0 1F0 1RECV_ACT1 1F1 1B0 1SEND_GRAD0 1B1 1SEND_GRAD1",
    )

    reasons: tuple[str, ...]  # why each location waits for the next, the last one for the first
    channel: str
    clean: tuple[str, ...]  # the channel models without it
    complete: bool  # whether the list has its communication
    inserted: bool  # whether schedir has inserted it
    pieces: tuple[Excerpt, ...]

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        ranks = sorted({place.rank for place in self.locations})
        if len(ranks) == 1:
            return f"deadlock: rank {ranks[0]} waits on itself"
        each_other = "each other" if len(ranks) == 2 else "one another"
        return f"deadlock: ranks {_and(ranks)} wait on {each_other}"

    @property
    def listed(self) -> tuple[Location, ...]:
        """The first location; the trace shows the others."""
        return self.locations[:1]

    @property
    def trace(self) -> tuple[tuple[str, ...], ...]:
        """Each action of the cycle, why it waits, and the one that it waits for."""
        following = [*self.locations[1:], self.locations[0]]
        rows = [
            (str(place), why, str(other))
            for place, why, other in zip(self.locations, self.reasons, following, strict=True)
        ]
        last = (*rows[-1][:2], f"{rows[-1][2]}   (cycle)")
        return (*rows[:-1], last)

    @property
    def excerpts(self) -> tuple[Excerpt, ...]:
        """The lists around the cycle."""
        return self.pieces

    @property
    def notes(self) -> tuple[str, ...]:
        """Under which models it is clean."""
        if self.clean:
            where = f"under --channel {self.channel}; clean under {_and(self.clean)}"
        elif self.complete:
            where = f"under --channel {self.channel}, and under every other"
        else:
            where = "under every channel model"
        if self.inserted:
            return (where, "in the list as schedir completes it, which `schedir export` prints")
        return (where,)

    @property
    def advice(self) -> str | None:
        """What to do."""
        if any(
            why == MEETS and place.action.kind is Kind.OPTIM_STEP
            for place, why in zip(self.locations, self.reasons, strict=True)
        ):
            return "list the OPTIM_STEPs of tied stages behind the last backward of all of them"
        return None if self.inserted else "none of the moves tried mends it"

    @property
    def help(self) -> str | None:
        """What to do, said of the author's list."""
        given = self.inserted and self.change is not None
        return f"{self.change}, in the list as it was given" if given else super().help


@attrs.frozen(kw_only=True)
class Unmatched(Diagnostic):
    """A send has no receive, a receive no send, or a REDUCE_GRAD lacks its turn on some replica."""

    code = "S302"
    name = "unmatched"
    why = "It waits for ever, or the transport matches it with something else."
    mend = "Add the other end, or remove this one."
    example = example(1, "0 1", "0F0 0SEND_ACT0 0RECV_GRAD0 0B0", "1RECV_ACT0 1F0 1B0")

    other: Action  # what is missing
    rank: int  # where it is missing

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        action = self.locations[0].action
        if action.kind is Kind.REDUCE_GRAD:
            return f"{action} has no counterpart on rank {self.rank}"
        sends = action.kind in (Kind.SEND_ACT, Kind.SEND_GRAD)
        return f"{action} is never {'received' if sends else 'sent'}"

    @property
    def advice(self) -> str:
        """What to do."""
        if self.other.kind is Kind.REDUCE_GRAD:
            return f"every rank of stage {self.other.stage} must reduce equally often"
        return f"add {self.other} to rank {self.rank}"


@attrs.frozen(kw_only=True)
class MisPaired(Diagnostic):
    """The j-th send of a channel and its j-th receive name different boundaries or microbatches."""

    code = "S303"
    name = "mis-paired"
    why = (
        "There are no tags: the receiver would get another tensor than it expects, without a word."
    )
    mend = "Post sends and receives of a channel in the same order."
    example = example(
        2,
        "0 1",
        "0F0 0SEND_ACT0 0F1 0SEND_ACT1 0RECV_GRAD0 0B0 0RECV_GRAD1 0B1",
        "1RECV_ACT1 1RECV_ACT0 1F0 1B0 1SEND_GRAD0 1F1 1B1 1SEND_GRAD1",
    )

    wrong: int
    transfers: int
    pairs: tuple[tuple[int, Location, Location, bool], ...]  # turn, send, receive, whether right

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        receive, send = self.locations[:2]
        return f"{receive.action} would get the payload of {send.action}"

    labels = ("the receive", "the send that it meets", "the send that it should meet")

    @property
    def trace(self) -> tuple[tuple[str, ...], ...]:
        """The channel around the first wrong pair: what meets what, in order."""
        receive, send = self.locations[:2]
        head = ("", f"rank {send.rank} sends", f"rank {receive.rank} receives", "")
        rows = [
            (
                f"{turn}",
                f"#{there.index} {there.action}",
                f"#{here.index} {here.action}",
                "" if right else f"gets {_payload(there.action)}",
            )
            for turn, there, here, right in self.pairs
        ]
        return (head, *rows)

    @property
    def notes(self) -> tuple[str, ...]:
        """How much of the channel is wrong."""
        receive, send = self.locations[:2]
        are = "is" if self.wrong == 1 else "are"
        return (
            f"{self.wrong} of the channel's {self.transfers} transfers from rank {send.rank} to "
            f"rank {receive.rank} {are} mis-paired",
        )

    @property
    def advice(self) -> str:
        """What to do."""
        receive, send = self.locations[:2]
        return f"order rank {receive.rank}'s receives as rank {send.rank} sends them"


@attrs.frozen(kw_only=True)
class MissingReceive(Diagnostic):
    """A compute action runs before, or without, the receive of its input."""

    code = "S304"
    name = "missing-receive"
    why = "It would work on whatever the buffer holds."
    mend = "List the receive before the action."
    example = example(
        1,
        "0 1",
        "0F0 0SEND_ACT0 0RECV_GRAD0 0B0",
        "1F0 1RECV_ACT0 1B0 1SEND_GRAD0",
    )
    labels = ("uses what it brings", "the receive, listed later")

    receive: Action

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        how = "before" if len(self.locations) > 1 else "without"
        return f"{self.locations[0].action} runs {how} {self.receive}, the receive of its input"

    @property
    def advice(self) -> str:
        """What to do."""
        place = self.locations[0]
        what = "list" if len(self.locations) > 1 else "add"
        return f"{what} {self.receive} before rank {place.rank} #{place.index}"


@attrs.frozen(kw_only=True)
class SendBeforeCompute(Diagnostic):
    """A send is listed before, or without, the compute action that makes its payload."""

    code = "S305"
    name = "send-before-compute"
    why = "There is nothing to send yet."
    mend = "Move the send behind the compute action."
    example = example(
        1,
        "0 1",
        "0SEND_ACT0 0F0 0RECV_GRAD0 0B0",
        "1RECV_ACT0 1F0 1B0 1SEND_GRAD0",
    )
    labels = ("nothing to send yet", "makes the payload")

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        send, maker = self.locations
        return f"{send.action} is listed before {maker.action}, which makes its payload"

    @property
    def advice(self) -> str:
        """What to do."""
        send, maker = self.locations
        return f"list {send.action} behind rank {maker.rank} #{maker.index}"


@attrs.frozen(kw_only=True)
class NoPeer(Diagnostic):
    """A send or receive has no other rank at its other end."""

    code = "S306"
    name = "no-peer"
    why = (
        "Neighbouring stages on one rank hand their tensors over directly, and the pipeline ends "
        "with its first and last stage."
    )
    mend = "Remove it."
    example = example(1, "0", "0F0 0SEND_ACT0 0B0")

    reason: Literal["end", "local", "elsewhere"]

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        place = self.locations[0]
        action = place.action
        if self.reason == "elsewhere":
            return (
                f"rank {place.rank} does not run stage {action.stage} on microbatch "
                f"{action.microbatch}, so {action} has nothing to work on"
            )
        why = "the pipeline ends here" if self.reason == "end" else "its neighbour is local"
        return f"{action} has no other rank at its other end: {why}"

    @property
    def advice(self) -> str:
        """What to do."""
        return "move it to the rank that does" if self.reason == "elsewhere" else "remove it"


def _payload(send: Action) -> str:
    """What a send carries, in words."""
    what = "output" if send.kind is Kind.SEND_ACT else "input gradient"
    return f"the {what} of stage {send.stage} for microbatch {send.microbatch}"


def _and(items: tuple[str, ...] | list[int]) -> str:
    *most, last = map(str, items)
    return f"{', '.join(most)} and {last}" if most else last
