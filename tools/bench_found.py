"""Compares the measured steps of a schedule that search found with those of the best built-in one.

    python tools/bench_found.py [--launches 5] [--rounds 20]

On the example's GPT at 2 ranks, in three steps:

1. A traced run of 1F1B, with the model cut into 2 stages and into 4, and with whole and split
   backwards in turn, gives the costs of each cut (`CostModel.fit`). Its peak is the memory limit.
2. `schedir.search` finds a schedule for each cut and limit, and the one with the quicker forecast
   is taken. It competes with the built-in schedules within the limit that have the best forecasts.
3. All of them train in separate launches, step by step in turn. The order is shuffled each round,
   so that disturbances of the machine hit all schedules. The figure of a launch is the median ratio
   of a step of the found schedule to a step of the best built-in one in the same round; the tool
   prints the median and range over launches. The best built-in schedule has the least median step
   over all launches, so chance favours it.

The error of a forecast compares its median with the median of the steps. It is given for the costs
of the traced run (another launch), and for costs that are traced in the same launch.

Run it on a machine with nothing else to do; `--keep DIR` keeps the found schedule and the costs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
import numpy as np
from in_processes import run_in_processes
from predicted_run import fine_1f1b

import schedir
from schedir import CostModel, Kind, SchedirError, Schedule, Timeline
from schedir.files import write_text
from schedir.finder import Found, find
from schedir.library import built_in
from schedir.passes import strip_communication
from schedir.simulator import load_timelines

RANKS = 2
LIMIT = 600  # seconds, of one launch
WORKER = Path(__file__).with_name("found_run.py")


@attrs.frozen
class Measured:
    """The steps of one schedule in one launch: their timelines, and the seconds of whole steps."""

    lines: Sequence[Timeline]
    elapsed: Sequence[float]

    @property
    def makespan(self) -> float:
        """The median of the steps' makespans."""
        return float(np.median([line.makespan for line in self.lines]))


def launch(
    schedules: Mapping[str, Schedule], rounds: int, seed: int, warm: int = 3
) -> dict[str, Measured]:
    """Run the steps of all in turn, in processes of their own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for called, schedule in schedules.items():
            (folder / f"{called}.sched").write_text(schedir.dumps(schedule))
        how = {"rounds": rounds, "warm": warm, "seed": seed}
        (folder / "run.json").write_text(json.dumps(how))
        run_in_processes(RANKS, WORKER, str(folder), limit=LIMIT)
        elapsed = json.loads((folder / "elapsed.json").read_text())
        return {
            called: Measured(load_timelines(folder / f"{called}.json"), elapsed[called])
            for called in schedules
        }


def split(schedule: Schedule) -> Schedule:
    """The schedule with each backward in two parts, one directly after the other."""
    parts = {Kind.BACKWARD: (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)}
    lists = [
        [
            attrs.evolve(action, kind=kind)
            for action in actions
            for kind in parts.get(action.kind, (action.kind,))
        ]
        for actions in strip_communication(schedule).flat
    ]
    bare = Schedule.of(f"{schedule.name}-split", schedule.placement, lists, schedule.microbatches)
    return schedir.insert_communication(bare)


def sources(microbatches: int) -> dict[int, dict[str, Schedule]]:
    """What is traced, by the number of chunks: 1F1B over that cut, whole and split."""
    found = {}
    for chunks in (1, 2):
        whole = schedir.build(
            fine_1f1b if chunks > 1 else "1f1b",
            ranks=RANKS,
            microbatches=microbatches,
            chunks=chunks if chunks > 1 else None,
        )
        found[chunks] = {f"traced-{chunks}": whole, f"traced-{chunks}-split": split(whole)}
    return found


def fitted(
    traced: Mapping[int, Mapping[str, Schedule]], runs: Mapping[str, Measured]
) -> dict[int, CostModel]:
    """The costs of each cut."""
    return {
        chunks: CostModel.fit([line for name in names for line in runs[name].lines])
        for chunks, names in traced.items()
    }


def peak(schedule: Schedule, costs: CostModel) -> float:
    """The most bytes that a rank keeps."""
    return max(rank.peak_bytes or 0 for rank in schedir.simulate(schedule, costs).ranks)


def forecast(schedule: Schedule, costs: CostModel) -> float:
    """The median of a step that costs promise; where they are not steady, that at their medians."""
    try:
        return schedir.forecast(schedule, costs, draws=1000).median
    except SchedirError as error:
        print(f"{schedule.name}: no forecast, {error}", file=sys.stderr)
        return schedir.simulate(schedule, costs).makespan


def rivals(
    args: argparse.Namespace, costs: Mapping[int, CostModel], limit: float
) -> dict[str, Schedule]:
    """The built-in schedules that promise most, of one update and without replicas, each list
    once."""
    found: dict[str, tuple[float, Schedule]] = {}
    for generator in built_in():
        for chunks in (1, 2):
            try:
                schedule = schedir.build(
                    generator,
                    ranks=RANKS,
                    microbatches=args.microbatches,
                    chunks=chunks,
                    costs=costs[chunks],
                )
            except SchedirError:
                continue  # it takes no such shape
            steps = len(schedule.columns.where(Kind.OPTIM_STEP))
            if steps != schedule.stages or schedule.stages != RANKS * chunks:
                continue
            if schedule.columns.together or peak(schedule, costs[chunks]) > limit:
                continue
            if any(schedule.actions == other.actions for _, other in found.values()):
                continue
            name = generator.name if chunks == 1 else f"{generator.name}-{chunks}"
            found[name] = forecast(schedule, costs[chunks]), schedule
    promising = sorted(found, key=lambda name: found[name][0])[: args.rivals]
    return {name: found[name][1] for name in promising}


def searched(
    args: argparse.Namespace, costs: Mapping[int, CostModel], limit: float
) -> tuple[Found, int]:
    """The better one of what is found for both cuts, and its number of chunks."""
    best: dict[float, tuple[Found, int]] = {}
    for chunks in (1, 2):
        found = find(
            RANKS,
            args.microbatches,
            chunks,
            costs=attrs.evolve(costs[chunks], samples=None),
            memory_limit=limit,
            seconds=args.seconds,
            seed=args.seed,
        )
        expected = forecast(found.schedule, costs[chunks])
        print(
            f"{chunks} stage(s) a rank: forecast {1e3 * expected:.2f} ms, makespan "
            f"{1e3 * found.value:.2f} ms, {found.distance:.1%} above the bound, placement "
            f"{found.placement}, {found.split} backwards split, {found.recomputed} run again"
        )
        best[expected] = found, chunks
    return best[min(best)]


def ratio(one: Measured, other: Measured) -> float:
    """The median over rounds of what a step takes, as a multiple of the other's."""
    return float(np.median(np.divide(one.elapsed, other.elapsed)))


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """Their median and range."""
    return f"{np.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def report(
    args: argparse.Namespace,
    found: Schedule,
    chunks: int,
    costs: CostModel,
    runs: Sequence[Mapping[str, Measured]],
) -> None:
    """Print what was measured."""
    traced = sources(args.microbatches)
    known = {name for names in traced.values() for name in names} | {"found"}
    others = [name for name in runs[0] if name not in known]
    medians = {
        name: float(np.median([np.median(run[name].elapsed) for run in runs])) for name in runs[0]
    }
    best = min(others, key=lambda name: medians[name])
    print("\n| schedule | step, ms | of the best built-in's |\n| --- | --- | --- |")
    for name in sorted([*others, "found"], key=lambda name: medians[name]):
        ratios = [ratio(run[name], run[best]) for run in runs]
        print(f"| {name} | {1e3 * medians[name]:.2f} | {spread(ratios)} |")
    paired = [ratio(run["found"], run[best]) for run in runs]
    print(f"\nfound beside {best}, paired by round, over {len(runs)} launches: {spread(paired)}")
    promised = forecast(found, costs)
    errors = [promised / run["found"].makespan - 1 for run in runs]
    print(f"forecast from the traced run: {spread(errors, '+.1%')} off the measured makespan")
    within = [
        forecast(found, fitted(traced, run)[chunks]) / run["found"].makespan - 1 for run in runs
    ]
    print(f"forecast from the same launch: {spread(within, '+.1%')}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, default=8, help="the example's (8)")
    parser.add_argument("--rounds", type=int, default=20, help="steps of each in a launch (20)")
    parser.add_argument("--launches", type=int, default=5, help="with the found schedule (5)")
    parser.add_argument("--rivals", type=int, default=6, help="built-in ones beside it (6)")
    parser.add_argument("--memory", type=float, default=2, help="limit, in peaks of 1F1B (2)")
    parser.add_argument("--seconds", type=float, default=5, help="that each search may take (5)")
    parser.add_argument("--seed", type=int, default=0, help="of the search and of all orders (0)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where to leave what is found")
    args = parser.parse_args()
    traced = sources(args.microbatches)
    everything = {name: each for names in traced.values() for name, each in names.items()}
    costs = fitted(traced, launch(everything, args.rounds, args.seed))
    limit = args.memory * peak(traced[1]["traced-1"], costs[1])
    print(f"memory limit {limit / 2**20:.1f} MiB on each rank; load {os.getloadavg()[0]:.1f}")
    found, chunks = searched(args, costs, limit)
    if args.keep:
        args.keep.mkdir(parents=True, exist_ok=True)
        write_text(args.keep / "found.sched", schedir.dumps(found.schedule))
        costs[chunks].save(args.keep / "costs.json")
    schedules = {
        **everything,
        **rivals(args, costs, limit),
        "found": found.schedule,
    }
    runs = [launch(schedules, args.rounds, args.seed + 1 + n) for n in range(args.launches)]
    report(args, found.schedule, chunks, costs[chunks], runs)


if __name__ == "__main__":
    main()
