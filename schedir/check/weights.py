"""S4xx: every weight version that is read exists."""

from __future__ import annotations

from collections.abc import Iterator

from schedir.check import rules
from schedir.check.diagnostics import Diagnostic, locate
from schedir.ir import Kind, Schedule


def weights(schedule: Schedule) -> Iterator[Diagnostic]:
    """What is wrong with the weight versions that forwards read."""
    for rank, actions in enumerate(schedule.actions):
        steps: dict[int, int] = {}
        for index, action in enumerate(actions):
            if action.kind is Kind.OPTIM_STEP:
                steps[action.stage] = steps.get(action.stage, 0) + 1
            elif action.version is not None:
                newest = steps.get(action.stage, 0)
                if action.version > newest:
                    yield rules.VERSION_NOT_AVAILABLE.found(
                        f"stage {action.stage} has version {newest} at most here, not "
                        f"{action.version}",
                        locate(schedule, rank, index),
                        help=f"read version {newest}, or move the forward behind the OPTIM_STEP "
                        f"that makes version {action.version}",
                    )
