"""Writes the table of docs/explanation/gpus.md: NCCL's communicators of the built-in schedules.

python tools/write_gpus.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import attrs

import schedir
from schedir import Schedule
from schedir.files import write_text
from schedir.library import built_in
from schedir.runtime.processes.nccl import shares
from schedir.runtime.transports.communicators import communicators_of, ranks_of

GUIDE = Path(__file__).resolve().parents[1] / "docs" / "explanation" / "gpus.md"
BEGIN = "<!-- written by tools/write_gpus.py -->\n"
END = "<!-- end of what it writes -->\n"

RANKS = (2, 4, 8)
PROCESSORS = 132  # of an H100 or H200
BUFFERS = 0.5 + 4.7 + 4.0  # MiB: NCCL's for its protocols LL, LL128 and Simple


@attrs.frozen
class Need:
    """The most that any rank has: communicators for transfers, others for sums of gradients, and
    MiB of buffers that the transfers to it fill."""

    transfers: int
    sums: int
    memory: float

    def __str__(self) -> str:
        sums = f" + {self.sums}" if self.sums else ""
        return f"{self.transfers}{sums}, {self.memory:.0f} MiB"


def need(schedule: Schedule) -> Need:
    """What a schedule takes of each GPU at most."""
    found = communicators_of(schedule)
    transfers = _most(rank for channels in found for rank in ranks_of(channels))
    sums = _most(rank for members in _replicas(schedule) for rank in members)
    receives = _most(target for channels in found for _, target in channels)
    share = shares(PROCESSORS, transfers, sums)
    return Need(transfers, sums, receives * share.transfer * BUFFERS)


def _most(ranks: Iterable[int]) -> int:
    return max(Counter(ranks).values(), default=0)


def _replicas(schedule: Schedule) -> set[frozenset[int]]:
    """The sets of ranks that hold a stage together, and so sum its gradients."""
    by_stage = (
        frozenset(rank for held, rank in schedule.holdings if held == stage)
        for stage in range(schedule.stages)
    )
    return {ranks for ranks in by_stage if len(ranks) > 1}


def table() -> str:
    """A row for all schedules that need the same."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for generator in built_in():
        built = [schedir.build(generator.name, ranks=n, microbatches=2 * n) for n in RANKS]
        rows.setdefault(tuple(str(need(each)) for each in built), []).append(generator.name)
    lines = [
        f"| schedules | {' | '.join(f'{ranks} ranks' for ranks in RANKS)} |",
        f"| --- |{' --- |' * len(RANKS)}",
        *(
            f"| {', '.join(f'`{name}`' for name in sorted(names))} | {' | '.join(cells)} |"
            for cells, names in rows.items()
        ),
    ]
    return "\n".join(lines) + "\n"


def page() -> str:
    """The guide, with the table as it should be."""
    before, _, rest = GUIDE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    write_text(GUIDE, page())
