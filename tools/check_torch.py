"""Checks the schedules that torch.distributed.pipelining builds, as torch lowers them.

    python tools/check_torch.py                 # prints a table
    python tools/check_torch.py --dump DIR      # writes the lists as torch's CSV as well

Each of torch's multi-stage schedules is built for some shapes, with and without its option
`defer_pp_recv`, written in torch's own CSV with communication, read back, and checked.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
from torch.distributed.pipelining import schedules as torch_schedules

from schedir import CHANNELS, Report, Schedule, check
from schedir.files import write_text
from schedir.ir import loads_torch_csv

# Each schedule with its stages per rank.
GENERATORS = {
    "ScheduleLoopedBFS": 2,
    "ScheduleInterleaved1F1B": 2,
    "ScheduleInterleavedZeroBubble": 2,
    "ScheduleZBVZeroBubble": 2,
    "ScheduleDualPipeV": 2,
}
SHAPES = ((2, 8), (4, 8))


@attrs.frozen
class Verdict:
    """What check says of one of torch's schedules: `reports` by channel model."""

    name: str
    ranks: int
    microbatches: int
    deferred: bool
    reports: dict[str, Report]

    @property
    def mis_paired(self) -> bool:
        """True where some receive would get another tensor than it expects."""
        return any(d.code == "S303" for d in self.reports["edge"].diagnostics)

    @property
    def clean(self) -> tuple[str, ...]:
        """The channel models under which nothing is wrong."""
        return tuple(channel for channel in CHANNELS if self.reports[channel].ok)


def made(name: str, ranks: int, chunks: int, microbatches: int, deferred: bool = False) -> Any:
    """torch's schedule, of the class of that name."""
    last = ranks * chunks - 1
    if name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV"):  # a V: down the ranks and back up
        placement = {stage: min(stage, last - stage) for stage in range(last + 1)}
    else:
        placement = {stage: stage % ranks for stage in range(last + 1)}
    # A schedule is bound to the stages of one rank, but makes the lists of all ranks.
    stages: list[Any] = [
        SimpleNamespace(
            stage_index=stage,
            num_stages=last + 1,
            group_size=ranks,
            group_rank=0,
            is_first=stage == 0,
            is_last=stage == last,
            has_backward=True,
            submod=None,
            stage_index_to_group_rank=placement,
        )
        for stage, rank in placement.items()
        if rank == 0
    ]
    generator = getattr(torch_schedules, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of torch's schedules warn that they are new
        return generator(stages, microbatches, loss_fn=lambda *_: None, defer_pp_recv=deferred)


def written(order: dict[int, list[Any]]) -> str:
    """One of the two dicts of lists that torch's schedules hold, as torch's CSV."""
    rows = [
        ",".join("" if action is None else str(action) for action in actions)
        for _, actions in sorted(order.items())
    ]
    return "\n".join(rows) + "\n"


def dumped(name: str, ranks: int, chunks: int, microbatches: int, deferred: bool) -> str:
    """torch's schedule with its communication, as torch's CSV."""
    return written(made(name, ranks, chunks, microbatches, deferred).pipeline_order_with_comms)


def computed(name: str, ranks: int, chunks: int, microbatches: int) -> Schedule:
    """What torch's schedule computes, without its communication, read back."""
    text = written(made(name, ranks, chunks, microbatches).pipeline_order)
    return loads_torch_csv(text, f"{name}.csv")


def lowered(name: str, ranks: int, chunks: int, microbatches: int, deferred: bool) -> Schedule:
    """The same, read back."""
    text = dumped(name, ranks, chunks, microbatches, deferred)
    return loads_torch_csv(text, f"{name}.csv")


def configurations() -> Iterator[tuple[str, int, int, int, bool]]:
    """The arguments of `dumped` for all that is checked."""
    for name, chunks in GENERATORS.items():
        for ranks, microbatches in SHAPES:
            for deferred in (False, True):
                yield name, ranks, chunks, microbatches, deferred


def verdicts() -> Iterator[Verdict]:
    """What check says of each of torch's schedules, shape by shape."""
    for name, ranks, chunks, microbatches, deferred in configurations():
        schedule = lowered(name, ranks, chunks, microbatches, deferred)
        reports = {channel: check(schedule, channel) for channel in CHANNELS}
        yield Verdict(name, ranks, microbatches, deferred, reports)


def table() -> str:
    """The verdicts as a Markdown table."""
    lines = [
        "| torch's schedule | ranks | defer_pp_recv | verdict |",
        "| --- | --- | --- | --- |",
    ]
    for verdict in verdicts():
        if verdict.mis_paired:
            found = "**S303 mis-paired**: wrong gradients"
        elif verdict.clean == CHANNELS:
            found = "clean under every model"
        elif verdict.clean:
            stuck = ", ".join(channel for channel in CHANNELS if channel not in verdict.clean)
            found = f"S301 deadlock under {stuck}; clean under {', '.join(verdict.clean)}"
        else:
            codes = sorted({d.code for d in verdict.reports["edge"].errors})
            found = f"wrong: {' '.join(codes)}"
        name = verdict.name.removeprefix("Schedule")
        lines.append(f"| {name} | {verdict.ranks} | {verdict.deferred} | {found} |")
    return "\n".join(lines) + "\n"


def dump(folder: Path) -> None:
    """Write every schedule to a CSV of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, ranks, chunks, microbatches, deferred in configurations():
        stem = f"{name.removeprefix('Schedule')}-{ranks}x{chunks}-{microbatches}"
        text = dumped(name, ranks, chunks, microbatches, deferred)
        write_text(folder / f"{stem}{'-deferred' if deferred else ''}.csv", text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dump", type=Path, metavar="DIR", help="write the lists there as CSV")
    folder = parser.parse_args().dump
    if folder:
        dump(folder)
    logging.getLogger("schedir").setLevel(logging.ERROR)  # UNSHARD and RESHARD are left out
    print(table(), end="")
