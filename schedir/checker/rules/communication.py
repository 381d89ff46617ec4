"""S3xx: each send meets its receive, compute has its input, and nobody waits for ever."""

from __future__ import annotations

from typing import Literal

import attrs

from schedir.checker.diagnostics import Diagnostic, Excerpt, Location
from schedir.checker.rules.example import example
from schedir.checker.templates import joined
from schedir.ir import CHANNELS_IN_WORDS, DEFAULT_CHANNEL, SENDS, Action, Kind

MEETS = "waits for"


@attrs.frozen(kw_only=True)
class WaitCycle(Diagnostic):
    """Some actions wait for each other in a circle: a deadlock."""

    code = "S301"
    name = "wait-cycle"
    why = (
        "None of them can ever run. A transfer needs both ends posted, stages that share "
        "parameters (`--tie`) step together, and a transport keeps a part of each list's order "
        "(`--channel`), so an action may have to wait for one that is listed before it: "
        + "; ".join(f"`{model}`, {words}" for model, words in CHANNELS_IN_WORDS.items())
        + ". What is clean under `rank` runs on NCCL and on gloo, what is clean under `async` on "
        "gloo alone; `pair` and `edge` ask of a driver what CUDA does not promise."
    )
    fix = (
        "Post one of the actions of the cycle earlier, post a rank's sends and receives that block "
        "each other as one batch, `(0SEND_ACT1;0RECV_GRAD0)`, or use a transport that keeps less "
        "order."
    )
    example = example(
        2,
        "0 1",
        "0F0 0SEND_ACT0 0F1 0SEND_ACT1 0RECV_GRAD0 0B0 0RECV_GRAD1 0B1",
        "1RECV_ACT0 1F0 1B0 1SEND_GRAD0 1RECV_ACT1 1F1 1B1 1SEND_GRAD1",
    )

    reasons: tuple[str, ...]  # why each location waits for the next, the last one for the first
    channel: str
    clean: tuple[str, ...]  # the channel models without it
    complete: bool  # whether the list has its communication
    inserted: bool  # whether schedir has inserted it
    excerpts: tuple[Excerpt, ...]  # the lists around the cycle

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        ranks = sorted({place.rank for place in self.locations})
        if len(ranks) == 1:
            return f"deadlock: rank {ranks[0]} waits on itself"
        each_other = "each other" if len(ranks) == 2 else "one another"
        return f"deadlock: ranks {joined(ranks)} wait on {each_other}"

    @property
    def listed(self) -> tuple[Location, ...]:
        """The first location; the trace shows the others."""
        return self.locations[:1]

    @property
    def trace(self) -> tuple[tuple[str, ...], ...]:
        """Each action of the cycle, why it waits, and the one that it waits for."""
        following = [*self.locations[1:], self.locations[0]]
        rows = [
            (str(place), why, str(awaited))
            for place, why, awaited in zip(self.locations, self.reasons, following, strict=True)
        ]
        last = (*rows[-1][:2], f"{rows[-1][2]}   (cycle)")
        return (*rows[:-1], last)

    @property
    def notes(self) -> tuple[str, ...]:
        """Under which models it is clean."""
        if self.clean:
            where = f"under --channel {self.channel}; clean under {joined(self.clean)}"
        elif self.complete:
            where = f"under --channel {self.channel}, and under every other"
        else:
            where = "under every channel model"
        notes = [where]
        # Not where a model was asked for that no transport can be relied on for.
        if self.channel == DEFAULT_CHANNEL and self.clean:
            notes.append("it runs on gloo, which is async; NCCL can be relied on for rank alone")
        if self.inserted:
            notes.append("in the list as schedir completes it, which `schedir export` prints")
        return tuple(notes)

    @property
    def advice(self) -> str:
        """What to do."""
        if any(
            why == MEETS and place.action.kind is Kind.OPTIM_STEP
            for place, why in zip(self.locations, self.reasons, strict=True)
        ):
            return "list the OPTIM_STEPs of tied stages after the last backward of all of them"
        return "none of the moves tried fixes it"

    @property
    def help(self) -> str | None:
        """What to do, in the author's list."""
        if self.inserted and self.change is not None:
            return f"{self.change}, in the list as it was given"
        return super().help


@attrs.frozen(kw_only=True)
class Unmatched(Diagnostic):
    """A send has no receive, a receive no send, or a REDUCE_GRAD no counterpart on some replica."""

    code = "S302"
    name = "unmatched"
    why = "It waits for ever, or the transport matches it with something else."
    fix = "Add the other end, or remove this one."
    example = example(1, "0 1", "0F0 0SEND_ACT0 0RECV_GRAD0 0B0", "1RECV_ACT0 1F0 1B0")

    missing: Action
    peer: int  # the rank where it is missing

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        if self.action.kind is Kind.REDUCE_GRAD:
            return f"{self.action} has no counterpart on rank {self.peer}"
        sends = self.action.kind in SENDS
        return f"{self.action} is never {'received' if sends else 'sent'}"


@attrs.frozen
class Pair:
    """A send and a receive that meet, and whether they name the same payload.

    `turn` is their number on their channel, from 0.
    """

    turn: int
    send: Location
    receive: Location
    right: bool


@attrs.frozen(kw_only=True)
class MisPaired(Diagnostic):
    """The j-th send of a channel and its j-th receive name different boundaries or microbatches."""

    code = "S303"
    name = "mis-paired"
    why = (
        "There are no tags: the receiver would get another tensor than it expects, without a word."
    )
    fix = "Post sends and receives of a channel in the same order."
    example = example(
        2,
        "0 1",
        "0F0 0SEND_ACT0 0F1 0SEND_ACT1 0RECV_GRAD0 0B0 0RECV_GRAD1 0B1",
        "1RECV_ACT1 1RECV_ACT0 1F0 1B0 1SEND_GRAD0 1F1 1B1 1SEND_GRAD1",
    )
    message = "{action} would get the payload of {other.action}"
    labels = ("the receive", "the send that it meets", "the send that it should meet")
    notes = (
        "{wrong} of the channel's {transfers} transfers from rank {other.rank} to rank {rank} "
        "{wrong:is|are} mis-paired",
    )

    wrong: int
    transfers: int
    pairs: tuple[Pair, ...]  # those around the first wrong one

    @property
    def trace(self) -> tuple[tuple[str, ...], ...]:
        """The channel around the first wrong pair: what meets what, in order."""
        head = ("", f"rank {self.other.rank} sends", f"rank {self.rank} receives", "")
        rows = [
            (
                f"{pair.turn}",
                f"#{pair.send.index} {pair.send.action}",
                f"#{pair.receive.index} {pair.receive.action}",
                "" if pair.right else f"gets {_payload(pair.send.action)}",
            )
            for pair in self.pairs
        ]
        return (head, *rows)


def _payload(send: Action) -> str:
    """What a send carries, in words."""
    what = "output" if send.kind is Kind.SEND_ACT else "input gradient"
    return f"the {what} of stage {send.stage} for microbatch {send.microbatch}"


@attrs.frozen(kw_only=True)
class MissingReceive(Diagnostic):
    """A compute action runs before, or without, the receive of its input."""

    code = "S304"
    name = "missing-receive"
    why = "It would work on whatever the buffer holds."
    fix = "List the receive before the action."
    example = example(
        1,
        "0 1",
        "0F0 0SEND_ACT0 0RECV_GRAD0 0B0",
        "1F0 1RECV_ACT0 1B0 1SEND_GRAD0",
    )
    message = "{action} runs {relation} {receive}, the receive of its input"
    labels = ("uses what it brings", "the receive, listed later")

    receive: Action

    @property
    def relation(self) -> str:
        """To the receive, which stands at the second location, if anywhere."""
        return "before" if len(self.locations) > 1 else "without"


@attrs.frozen(kw_only=True)
class SendBeforeCompute(Diagnostic):
    """A send is listed before, or without, the compute action that makes its payload."""

    code = "S305"
    name = "send-before-compute"
    why = "There is nothing to send yet."
    fix = "Move the send after the compute action."
    example = example(
        1,
        "0 1",
        "0SEND_ACT0 0F0 0RECV_GRAD0 0B0",
        "1RECV_ACT0 1F0 1B0 1SEND_GRAD0",
    )
    message = "{action} is listed before {other.action}, which makes its payload"
    labels = ("nothing to send yet", "makes the payload")


@attrs.frozen(kw_only=True)
class NoPeer(Diagnostic):
    """A send or receive has no other rank at its other end."""

    code = "S306"
    name = "no-peer"
    why = (
        "Neighbouring stages on one rank hand their tensors over directly, and the pipeline ends "
        "with its first and last stage."
    )
    fix = "Remove it."
    example = example(1, "0", "0F0 0SEND_ACT0 0B0")

    reason: Literal["end", "local", "elsewhere"]

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        if self.reason == "elsewhere":
            return (
                f"rank {self.rank} does not run stage {self.action.stage} on microbatch "
                f"{self.action.microbatch}, so {self.action} has nothing to work on"
            )
        why = (
            "the pipeline ends here"
            if self.reason == "end"
            else "its neighbour is on the same rank"
        )
        return f"{self.action} has no other rank at its other end: {why}"
