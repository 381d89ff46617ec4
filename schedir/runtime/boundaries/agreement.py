"""The ranks agree on every boundary: shapes down the pipeline, then where gradients flow back up.

    stage 0  ── shapes ──▶  stage 1  ── shapes ──▶  stage 2
             ◀── grads ───           ◀── grads ───

It happens at the first step of each new input shape. Only the first stage's rank sees the input;
the opening of each call says which of the agreements applies.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from schedir.runtime.batch.feeding import Feed
from schedir.runtime.batch.microbatches import Batch
from schedir.runtime.boundaries.draft import Drafter, WiringDraft
from schedir.runtime.boundaries.fake_run import FirstInput, StageInput, bounded_cache
from schedir.runtime.boundaries.memory import NO_ALIASES, Aliases
from schedir.runtime.boundaries.signature import signature_of_call, signatures
from schedir.runtime.boundaries.wiring import Wiring
from schedir.runtime.plan import Plan
from schedir.runtime.processes.control import Control

Agreement: TypeAlias = Mapping[tuple[int, int], Wiring]
"""The wirings of the stages here, by stage and microbatch."""

# Beyond so many, the agreement that was used the longest ago is forgotten, on all ranks alike.
_MAX_AGREEMENTS = 64


class Agreements:
    """The agreements of this process's ranks, by the number that the first stage's rank gives.

    `stepped` are the parameters that the executor's optimisers step, None where the caller does.
    Without `drafter.trains` no gradient flows back up.
    """

    def __init__(
        self,
        plan: Plan,
        control: Control,
        drafter: Drafter,
        stepped: Sequence[torch.Tensor] | None,
    ) -> None:
        self._plan, self._control = plan, control
        self._drafter = drafter
        self._stepped = stepped
        self._last = plan.last_stage
        # Of the ranks that hold a stage the first one speaks for all.
        self._holders = plan.schedule.placement
        self._stages = sorted(plan.local_stages)
        self._made = 0
        self._numbers: dict[object, int] = {}
        self._agreed: OrderedDict[int, Agreement] = OrderedDict()
        self._signature: object = None

    def number(self, feed: Feed, inputs: Batch | None, precision: torch.dtype | None) -> int | None:
        """The number of the agreement that a call's microbatches fall under.

        A new one if there is none yet; None where the first stage is not here, so that the inputs
        are not seen. `inputs` is what the microbatches were cut from, `precision` the type that
        autocast computes in.
        """
        if 0 not in self._stages:
            return None
        self._signature = signature_of_call(feed, inputs, precision)
        return self._numbers.get(self._signature, self._made)

    def agree(self, number: int, feed: Feed) -> tuple[Agreement, list[int]]:
        """The agreement of that number, made now by all ranks together if it is new.

        Every rank calls it, with the number that the call's opening gives. With it come the
        numbers of the agreements that are forgotten for it.
        """
        if number == self._made:
            with bounded_cache():
                self._agreed[number] = self._agree(feed)
            self._made += 1
            if 0 in self._stages:
                self._numbers[self._signature] = number
        self._agreed.move_to_end(number)
        forgotten = list(self._agreed)[: max(0, len(self._agreed) - _MAX_AGREEMENTS)]
        for old in forgotten:
            del self._agreed[old]
        self._numbers = {key: n for key, n in self._numbers.items() if n not in forgotten}
        return self._agreed[number], forgotten

    def _agree(self, feed: Feed) -> Agreement:
        messages = _Messages(self._plan, self._control)
        kinds, drafts = self._draft_down(messages, feed)
        if self._drafter.trains:
            self._settle_up(messages, feed, kinds, drafts)
        wirings = {stage: [draft.wiring() for draft in held] for stage, held in drafts.items()}
        return {
            (stage, m): held[kind]
            for stage, held in wirings.items()
            for m, kind in enumerate(kinds)
        }

    def _draft_down(
        self, messages: _Messages, feed: Feed
    ) -> tuple[list[int], dict[int, list[WiringDraft]]]:
        """The kind of each microbatch, and for each stage here a draft for every kind.

        Microbatches of one shape are of one kind, and wired alike.
        """
        kinds: list[int] = []
        drafts: dict[int, list[WiringDraft]] = {}
        for stage in self._stages:
            inputs: Sequence[StageInput]
            aliases: Sequence[Aliases]
            if stage == 0:
                found = list(signatures(feed))
                distinct = list(dict.fromkeys(found))
                kinds = [distinct.index(signature) for signature in found]
                inputs = [FirstInput(feed.inputs[found.index(kind)]) for kind in distinct]
                aliases = [NO_ALIASES] * len(inputs)
            else:
                kinds, received = messages.receive(stage, stage - 1)
                inputs, aliases = zip(*received, strict=True)
            extras = [feed.extra(stage, kinds.index(kind)) for kind in range(len(inputs))]
            drafts[stage] = [
                self._drafter.draft(stage, *given)
                for given in zip(inputs, extras, aliases, strict=True)
            ]
            if stage < self._last:
                sent = [(draft.after, draft.aliases) for draft in drafts[stage]]
                messages.send(stage, stage + 1, (kinds, sent))
        return kinds, drafts

    def _settle_up(
        self,
        messages: _Messages,
        feed: Feed,
        kinds: Sequence[int],
        drafts: Mapping[int, list[WiringDraft]],
    ) -> None:
        """Complete the drafts by the gradients that flow back, from the loss up."""
        for stage in reversed(self._stages):
            if stage == self._last:
                for kind, draft in enumerate(drafts[stage]):
                    m = kinds.index(kind)
                    keywords = feed.loss_keywords[m] if feed.loss_keywords else {}
                    target = feed.targets[m] if feed.targets else None
                    draft.end_in_loss(self._plan.arguments.loss_fn, target, keywords, self._stepped)
            else:
                received = messages.receive(stage, stage + 1)
                for draft, grads_in in zip(drafts[stage], received, strict=True):
                    draft.end_in_next(grads_in)
            if stage > 0:
                messages.send(stage, stage - 1, [draft.grads_out for draft in drafts[stage]])


class _Messages:
    """What neighbouring stages send each other: to another process, or kept for a stage here."""

    def __init__(self, plan: Plan, control: Control) -> None:
        self._holders, self._control = plan.schedule.placement, control
        self._local_ranks = plan.local_ranks
        self._kept: dict[int, Any] = {}

    def send(self, stage: int, to: int, message: object) -> None:
        if self._holders[stage][0] not in self._local_ranks:
            return
        self._kept[to] = message
        for rank in self._holders[to]:
            if rank not in self._local_ranks:
                self._control.send(message, rank)

    def receive(self, stage: int, source: int) -> Any:
        speaker = self._holders[source][0]
        if speaker in self._local_ranks:
            return self._kept.pop(stage)
        return self._control.receive(speaker)
