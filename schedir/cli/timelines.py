"""The timelines that `show` and `export` draw: simulated ones, and measured ones from files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

from schedir.cli.arguments import (
    TIMED,
    add_channel,
    at_least,
    costs_given,
    costs_of,
    load_target,
    note_unmeasured,
    proved,
    quantity,
    subject_of,
)
from schedir.cli.terminal import about
from schedir.errors import LoadError, SchedirError
from schedir.ir import Schedule
from schedir.library import is_list
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


def is_measured(target: str) -> bool:
    """Whether a target is, by its extension, a file of timelines."""
    return target.endswith(".json")


def drawn(args: argparse.Namespace) -> tuple[Timeline, Timeline | None]:
    """The timeline that the arguments name, and one to compare it with.

    A simulated timeline comes before a measured one. Raises LoadError or ParseError for a target
    that can't be loaded, RefusedError for a schedule with errors, SchedirError for costs that do
    not fit the schedule.
    """
    targets = [args.target] if args.against is None else [args.target, args.against]
    if all(map(is_measured, targets)) and (costs_given(args) or args.channel is not None):
        options = "--costs and --cost are" if costs_given(args) else "--channel is"
        args.parser.error(f"{options} for schedules: a measured timeline has times already")
    _expect_steps(args, targets)
    costs = costs_of(args)
    lines = _same_unit(_timelines(args, targets, costs), costs)
    first, *others = sorted(lines, key=lambda line: line.measured is not None)
    return first, others[0] if others else None


def drawn_full(args: argparse.Namespace) -> tuple[Timeline, Timeline, SteadyState]:
    """The timeline of TARGET, a longer one that reaches the steady state, and the steady state.

    Raises the errors of `drawn`, and SchedirError, with the reason, if there is no steady state.
    """
    from schedir.simulator.steady_state import full_pipeline

    if is_measured(args.target):
        args.parser.error("--steady is for schedules: measured calls fill and drain the pipeline")
    _expect_steps(args, [args.target])
    costs = costs_of(args)
    schedule = load_target(args, args.target, costs=costs)
    subject = subject_of(args.target, schedule)
    line = _simulated(args, args.target, schedule, costs)
    many = count(schedule.microbatches, "microbatch", "es")
    if not schedule.is_asynchronous:
        raise SchedirError(
            f"{subject} has no steady state: in {many} no stage works after its OPTIM_STEP, so the "
            "pipeline drains at every update"
        )
    with redirect_stdout(sys.stderr):  # text that a user's generator prints is not the result
        full, steady = full_pipeline(line, costs, schedule.rebuild, args.channel)
    if steady is None:
        many = count(full.schedule.microbatches, "microbatch", "es")
        raise SchedirError(
            f"{subject} shows no steady state: in {many} its actions do not repeat with one period "
            "for long enough"
        )
    return line, full, steady


def load_schedule(args: argparse.Namespace, costs: CostModel) -> Schedule:
    """The schedule of TARGET, built or from a measured run. Raises LoadError or ParseError."""
    _expect_steps(args, [args.target])
    if is_measured(args.target):
        return _read(args, args.target).schedule
    return load_target(args, args.target, costs=costs)


def _timelines(
    args: argparse.Namespace, targets: Sequence[str], costs: CostModel
) -> list[Timeline]:
    """A timeline for each target; files have a shape, which generators take over."""
    found: dict[int, Timeline] = {}
    shape: Schedule | None = None
    shaped = [is_measured(target) or is_list(target) for target in targets]
    for number in sorted(range(len(targets)), key=lambda number: not shaped[number]):
        target = targets[number]
        if is_measured(target):
            line = _read(args, target)
        else:
            line = _simulated(args, target, load_target(args, target, shape, costs), costs)
        found[number], shape = line, line.schedule
    return [found[number] for number in range(len(targets))]


def _simulated(
    args: argparse.Namespace, target: str, schedule: Schedule, costs: CostModel
) -> Timeline:
    complete = proved(schedule, subject_of(target, schedule), args.channel)
    line = simulate(complete, costs, channel=args.channel)
    note_unmeasured(schedule, costs)
    return line


def _expect_steps(args: argparse.Namespace, targets: Sequence[str]) -> None:
    """Refuse `--step` where no target is a file of measured timelines."""
    if args.step is not None and not any(map(is_measured, targets)):
        args.parser.error("--step is for files of measured timelines")


def _read(args: argparse.Namespace, file: str) -> Timeline:
    """The timeline of a file, at the step that is asked for; by default the step with the median
    makespan.

    Raises LoadError, also if the options contradict the timeline's shape, or ParseError.
    """
    found = _at_step(file, args.step)
    for what in ("ranks", "microbatches"):
        has, asked = getattr(found.schedule, what), getattr(args, what)
        if asked not in (None, has):
            raise LoadError(f"{file} has {has} {what}, not {asked}; leave --{what} out")
    if args.against is None and (args.chunks is not None or args.set or args.add_steps):
        raise LoadError(f"{file} holds a timeline, and takes no --chunks, --set or --add-steps")
    return found


def _at_step(file: str, step: int | None) -> Timeline:
    with about("measure-and-predict"):
        timelines = load_timelines(file)
        if not timelines:
            raise LoadError(f"{file} holds no timeline")
        if step is None:
            return median_step(timelines)
        steps = [line.measured.step for line in timelines if line.measured is not None]
        for line in timelines:
            if line.measured is not None and line.measured.step == step:
                return line
        there = f"there are {min(steps)} to {max(steps)}" if steps else "it was simulated"
        raise LoadError(f"{file} holds no step {step}; {there}")


def _same_unit(timelines: Sequence[Timeline], costs: CostModel) -> list[Timeline]:
    """The timelines in one unit, if any of them has a unit.

    Raises SchedirError if one has a unit and the other has the default costs, which have none.
    """
    units = [line.unit for line in timelines]
    if len(set(units)) > 1 and None in units and costs == CostModel():
        raise SchedirError(
            "a measured timeline has a unit of time, and the default costs have none: give the "
            "costs of the other with --costs"
        )
    unit = next((unit for unit in units if unit is not None), None)
    return [line if unit is None else in_unit(line, unit) for line in timelines]
