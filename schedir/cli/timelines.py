"""The timelines that `show` and `export` draw: simulated ones, and measured ones from files."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from schedir.cli.arguments import (
    TIMED,
    add_channel,
    at_least,
    costs_given,
    costs_of,
    has_shape,
    is_measured,
    load_target,
    note_unmeasured,
    proved,
    quantity,
    subject_of,
)
from schedir.cli.terminal import about
from schedir.errors import LoadError, SchedirError
from schedir.render.text import count
from schedir.simulator import CostModel, Timeline, in_unit, load_timelines, median_step, simulate

if TYPE_CHECKING:
    from schedir.simulator.steady_state import SteadyState


def add_drawn(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add `--against`, `--step`, `--channel`, `--from` and `--to`; returns their group."""
    group = parser.add_argument_group("timelines")
    add_channel(group, TIMED)
    group.add_argument(
        "--against",
        metavar="TARGET",
        help="draw a second timeline on the same time axis. A simulated one is drawn above a "
        "measured one. A name or a generator takes its shape from the other target",
    )
    group.add_argument(
        "--step",
        type=at_least(0),
        metavar="N",
        help="the step of a measured run to draw (default: the step with the median makespan)",
    )
    for option, name, default, text in (
        ("--from", "start", 0, "draw from time T on, in the unit of the time axis"),
        ("--to", "end", None, "draw up to time T"),
    ):
        group.add_argument(
            option, dest=name, type=quantity, default=default, metavar="T", help=text
        )
    return group


def _targets(args: argparse.Namespace) -> list[str]:
    return [args.target] if args.against is None else [args.target, args.against]


def expect_step(args: argparse.Namespace) -> None:
    """Refuse `--step` where no target is a file of measured timelines."""
    if args.step is not None and not any(map(is_measured, _targets(args))):
        args.parser.error("--step is for files of measured timelines")


def drawn(args: argparse.Namespace) -> tuple[Timeline, Timeline | None]:
    """The timeline that the arguments name, and one to compare it with.

    A simulated timeline comes before a measured one. Raises LoadError or ParseError for a target
    that can't be loaded, RefusedError for a schedule with errors, SchedirError for costs that do
    not fit the schedule.
    """
    targets = _targets(args)
    if all(map(is_measured, targets)) and (costs_given(args) or args.channel is not None):
        options = "--costs and --cost are" if costs_given(args) else "--channel is"
        args.parser.error(f"{options} for schedules: a measured timeline has times already")
    costs = costs_of(args)
    found: dict[str, Timeline] = {}
    shape = None
    # Files have a shape, which generators take over.
    for target in sorted(targets, key=has_shape, reverse=True):
        if is_measured(target):
            line = read(args, target)
        else:
            schedule = load_target(args, target, shape, costs)
            line = simulate(proved(schedule, target, args.channel), costs, channel=args.channel)
            note_unmeasured(schedule, costs)
        found[target], shape = line, line.schedule
    lines = _same_unit([found[target] for target in targets], costs)
    first, *others = sorted(lines, key=lambda line: line.measured is not None)
    return first, others[0] if others else None


def full_pipeline_of(args: argparse.Namespace, line: Timeline) -> tuple[Timeline, SteadyState]:
    """A longer timeline than that of TARGET, which reaches the steady state, and that state.

    Raises SchedirError, with the reason, if there is no steady state.
    """
    from schedir.simulator.steady_state import full_pipeline

    schedule = line.schedule
    subject = subject_of(args.target, schedule)
    if not schedule.is_asynchronous:
        many = count(schedule.microbatches, "microbatch", "es")
        raise SchedirError(
            f"{subject} has no steady state: in {many} no stage works after its OPTIM_STEP, so the "
            "pipeline drains at every update"
        )
    full, steady = full_pipeline(line, costs_of(args), schedule.rebuild, args.channel)
    if steady is None:
        many = count(full.schedule.microbatches, "microbatch", "es")
        raise SchedirError(
            f"{subject} shows no steady state: in {many} its actions do not repeat with one period "
            "for long enough"
        )
    return full, steady


def read(args: argparse.Namespace, file: str) -> Timeline:
    """The timeline of a file, at the step that is asked for; by default the step with the median
    makespan.

    Raises LoadError, also if the options contradict the timeline's shape, or ParseError.
    """
    with about("measure-and-predict"):
        timelines = load_timelines(file)
        if not timelines:
            raise LoadError(f"{file} holds no timeline")
        found = median_step(timelines)
        if args.step is not None:
            steps = {line.measured.step: line for line in timelines if line.measured is not None}
            if args.step not in steps:
                there = f"there are {min(steps)} to {max(steps)}" if steps else "it was simulated"
                raise LoadError(f"{file} holds no step {args.step}; {there}")
            found = steps[args.step]
    for what in ("ranks", "microbatches"):
        has, asked = getattr(found.schedule, what), getattr(args, what)
        if asked not in (None, has):
            raise LoadError(f"{file} has {has} {what}, not {asked}; leave --{what} out")
    if args.against is None and (args.chunks is not None or args.set or args.add_steps):
        raise LoadError(f"{file} holds a timeline, and takes no --chunks, --set or --add-steps")
    return found


def _same_unit(timelines: Sequence[Timeline], costs: CostModel) -> list[Timeline]:
    """The timelines in one unit, if any of them has a unit.

    Raises SchedirError if one has a unit and the other has the default costs, which have none.
    """
    units = [line.unit for line in timelines if line.unit is not None]
    if 0 < len(units) < len(timelines) and costs == CostModel():
        raise SchedirError(
            "a measured timeline has a unit of time, and the default costs have none: give the "
            "costs of the other with --costs"
        )
    return [in_unit(line, units[0]) for line in timelines] if units else [*timelines]
