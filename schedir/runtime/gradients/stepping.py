"""What ranks do together before they step: sum tied gradients, and clip by the norm of all.

Each is a meeting, held once all ranks that take part have reached their OPTIM_STEPs:

    rank 0   … 0B7 0OPTIM_STEP ─┐
    rank 1   … 1B7 1OPTIM_STEP ─┴ meeting, then each steps
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs
import torch
from torch import Tensor, nn

from schedir.runtime.gradients.reduction import Reduction, laid_out, refuse_sparse, wait_for_sum
from schedir.runtime.processes.groups import Group

logger = logging.getLogger("schedir")

Norms = dict[int, list[float]]
"""By stage, the norm of each parameter's gradient, -1 where there is none."""


class Meeting:
    """Something that is done once the ranks of this process that take part have come."""

    def __init__(self, parties: int, act: Callable[[], None]) -> None:
        self._parties = parties
        self._act = act
        self._present = 0
        self._held = 0

    def come(self) -> int:
        """Take part; the result is the number of the meeting, for `over`."""
        turn = self._held
        self._present += 1
        if self._present == self._parties:
            self._act()
            self._present = 0
            self._held += 1
        return turn

    def over(self, turn: int) -> bool:
        """Whether that meeting has been held."""
        return self._held > turn

    def reset(self) -> None:
        """Forget who has come: a step has failed."""
        self._present = 0


@attrs.frozen
class Meetings:
    """All meetings of this process: those of tied stages, and those of all."""

    tied: Sequence[tuple[set[int], Meeting]]
    common: Sequence[Meeting]

    @property
    def all(self) -> list[Meeting]:
        """Every one of them."""
        return [*(meeting for _, meeting in self.tied), *self.common]

    def before(self, stages: Iterable[int]) -> list[Meeting]:
        """Those before consecutive OPTIM_STEPs of these stages, on one rank."""
        return [*(meeting for tie, meeting in self.tied if tie.intersection(stages)), *self.common]


class Tie:
    """A parameter that stages share: each holds a copy, and all have the same gradient and step."""

    def __init__(self, copies: Sequence[nn.Parameter], group: Group | None) -> None:
        self._copies = copies
        self._group = group

    def sum(self) -> None:
        """Give every copy the sum of all gradients; none where nobody has one."""
        for copy in self._copies:
            refuse_sparse(copy, "summed with those of its tied copies")
        grads = [copy.grad for copy in self._copies if copy.grad is not None]
        total = sum(grads[1:], grads[0]) if grads else torch.zeros_like(self._copies[0])
        present = len(grads)
        if self._group is not None:
            # One message: what is there, and whether it is.
            flat = torch.cat([total.reshape(-1), total.new_full((1,), float(present > 0))])
            wait_for_sum([self._group.allreduce([flat])], "a tied parameter's")
            present = int(flat[-1])
            total = flat[:-1]
        for copy in self._copies:
            copy.grad = laid_out(total.clone().reshape(-1), copy) if present else None


class Clipping:
    """Scales all gradients so that their norm is at most `max_norm`.

    `parameters` are those of the stages here; `skipped` those of them whose gradient counts
    elsewhere. The total is taken in `dtype`. `gather` gives the norms of all stages, each once. One
    process `speaks` of a norm that is no number.
    """

    def __init__(
        self,
        max_norm: float,
        parameters: Mapping[int, Sequence[nn.Parameter]],
        skipped: set[nn.Parameter],
        dtype: torch.dtype,
        gather: Callable[[Norms], Norms],
        speaks: bool,
    ) -> None:
        self._max_norm = max_norm
        self._parameters = parameters
        self._skipped = skipped
        self._dtype = dtype
        self._gather = gather
        self._speaks = speaks
        self.norm: float | None = None

    def clip(self) -> None:
        """As torch.nn.utils.clip_grad_norm_ over the whole model, whose order of sums it keeps."""
        for parameters in self._parameters.values():
            for parameter in parameters:
                refuse_sparse(parameter, "clipped")
        own = {
            stage: _norms([p.grad for p in parameters if p not in self._skipped])
            for stage, parameters in self._parameters.items()
        }
        everyone = self._gather(own)
        norms = [norm for stage in sorted(everyone) for norm in everyone[stage] if norm != -1]
        total = torch.linalg.vector_norm(torch.tensor(norms or [0.0], dtype=self._dtype))
        for parameters in self._parameters.values():
            torch.nn.utils.clip_grads_with_norm_(parameters, self._max_norm, total)
        self.norm = float(total)
        if not math.isfinite(self.norm) and self._speaks:
            self._speaks = False  # once
            infinite = [s for s in sorted(everyone) if not all(map(math.isfinite, everyone[s]))]
            logger.warning(
                "clip_grad_norm: the norm of the gradients is %s%s; they are applied all the same, "
                "and no later step is said to be so",
                self.norm,
                f", by those of stage {', '.join(map(str, infinite))}" if infinite else "",
            )


def _norms(grads: Sequence[Tensor | None]) -> list[float]:
    there = [torch.linalg.vector_norm(grad) for grad in grads if grad is not None]
    found = iter(torch.stack(there).tolist() if there else ())  # one wait for a GPU
    return [-1.0 if grad is None else next(found) for grad in grads]


class Meet:
    """Before a rank's consecutive OPTIM_STEPs: its own sums end, and the meetings are held."""

    def __init__(
        self,
        updates: Callable[[], bool],
        reductions: Sequence[Reduction],
        meetings: Sequence[Meeting],
    ) -> None:
        self._updates = updates
        self._reductions = reductions
        self._meetings = meetings
        self._turns: list[int] | None = None

    def waits(self) -> bool:
        """Whether some rank of this process has not come yet."""
        if not self._updates():
            return False
        turns = self._come()
        return not all(
            meeting.over(turn) for meeting, turn in zip(self._meetings, turns, strict=True)
        )

    def __call__(self) -> None:
        """Run it."""
        if self._updates():
            self._come()
        self._turns = None

    def _come(self) -> list[int]:
        if self._turns is None:
            for reduction in self._reductions:
                reduction.finish()
            self._turns = [meeting.come() for meeting in self._meetings]
        return self._turns
