"""Compares predictions with measured steps: replays, forecasts, a null model, and memory.

    python tools/bench_predict.py --sleep [--ranks 4 8]
    python tools/bench_predict.py --gpt
    python tools/bench_predict.py --memory

Each run is a separate launch of torchrun, and the order of runs is shuffled. Costs are fitted on
runs of 1F1B with another number of microbatches, and forecast the steps of other runs of every
schedule. A schedule with chunks cuts the model finer. A run of 1F1B measures that cut, with
neighbouring stages on each rank:

    rank 0   stages 0 1      0F0 1F0 0F1 1F1 ...        the chunks of rank 0 are stages 0 and 2 in
    rank 1   stages 2 3                  2F0 3F0 ...    the interleaved schedule that is forecast

There are two main figures. The *replay* gives each entry its measured duration; its distance from
the measured step is the error of the simulator, without a channel model and under gloo's. The
*forecast* takes the costs of another run; the distance of its median from the median of the steps
is the error that a user sees, and its 90 % band should hold 90 % of the steps. With `--repeat` it
is the median and range over pairs of runs, because launches differ. The table also has the
simulation *at medians*, the *null model* (the closed form of the bubble at the mean time of a
stage), the time of a step *outside* its list, and the *regret*: how much slower the recommended
schedule is than the best measured one. Stages that `--sleep` do so for fixed, unequal times, so
that only the pipeline counts. `--gpt` is the example's model on two ranks. `--memory` compares the
simulated peak of each rank's live bytes with torch's peak.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import attrs
import numpy as np
from at_commit import ROOT
from in_processes import run_in_processes
from predicted_run import Run

sys.path.insert(0, str(ROOT))
import schedir
from schedir import CostModel, SchedirError, Timeline
from schedir.simulator import load_timelines
from tests.measured import durations_of

LIMIT = 300  # seconds, of one run
WORKER = Path(__file__).with_name("predicted_run.py")
TARGETS = {"fill-drain": 1, "1f1b": 1, "interleaved-1f1b": 2, "pipedream": 1}  # chunks, by name


@attrs.frozen
class Measured:
    """What a run has left: the timelines of its steps, seconds of whole steps as rank 0 sees them,
    and the most bytes that torch had allocated on each rank."""

    lines: Sequence[Timeline]
    elapsed: Sequence[float]
    peaks: Sequence[int]

    @property
    def makespans(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """The makespans of the steps, in seconds."""
        return np.array([line.makespan for line in self.lines])


def launch(run: Run) -> Measured:
    """Make a run in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        described = json.dumps(attrs.asdict(run))
        run_in_processes(run.ranks, WORKER, described, folder, limit=LIMIT)
        beside = json.loads(Path(folder, "beside.json").read_text())
        return Measured(load_timelines(Path(folder, "timelines.json")), **beside)


def measured(runs: Iterable[Run], seed: int) -> dict[Run, list[Measured]]:
    """All runs, some of them made several times, in a shuffled order."""
    shuffled = list(runs)
    random.Random(seed).shuffle(shuffled)
    found: dict[Run, list[Measured]] = {}
    for number, run in enumerate(shuffled):
        print(f"run {number + 1} of {len(shuffled)}: {run}", file=sys.stderr, flush=True)
        found.setdefault(run, []).append(launch(run))
    return found


def source_of(target: Run, microbatches: int) -> Run:
    """The run of 1F1B over the same cut, of so many microbatches, that costs are fitted on."""
    name = "fine-1f1b" if target.chunks > 1 else "1f1b"
    return attrs.evolve(target, name=name, microbatches=microbatches)


def replay_error(lines: Sequence[Timeline], channel: str | None) -> float:
    """How far the replay of a step is from the step, the median over steps."""
    costs = CostModel.fit(lines)
    errors = []
    for line in lines:
        lasts = durations_of(line)
        replayed = schedir.simulate(line.schedule, costs, durations=lasts, channel=channel)
        errors.append(replayed.makespan / line.makespan - 1)
    return float(np.median(errors))


def null_model(costs: CostModel, run: Run) -> float:
    """The closed form of the bubble, (P - 1) / (V M + P - 1), at the mean time of a stage."""
    stage = np.add(costs.forward, costs.backward).mean()
    return float(stage * (run.chunks * run.microbatches + run.ranks - 1))


COLUMNS = (
    *("ranks", "schedule", "steps", "measured ms", "replay", "replay, gloo", "forecast"),
    *("band holds", "at medians", "null model", "outside"),
)
MEMORY_COLUMNS = ("schedule", "rank", "simulated MiB", "torch MiB", "error")


def print_head(columns: Sequence[str]) -> None:
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")


@attrs.frozen
class Predicted:
    """What was predicted of a run, in seconds, and by which share it is off: the `forecast`, the
    simulation `by_medians`, and the `null` model; `holds` is the share of steps within the band."""

    forecast: float
    error: float
    holds: float
    by_medians: float
    null: float


def predicted(run: Run, one: Measured, costs: CostModel) -> Predicted:
    """One run beside what the costs of another one say."""
    steps, middle = one.makespans, float(np.median(one.makespans))
    by_medians = schedir.simulate(run.schedule, costs, channel="gloo").makespan
    forecast, holds = by_medians, math.nan
    try:
        band = schedir.forecast(run.schedule, costs, draws=1000, channel="gloo")
    except SchedirError as error:
        print(error, file=sys.stderr)
    else:
        forecast, low, high = band.median, band.quantile(0.05), band.quantile(0.95)
        holds = float(np.mean((low <= steps) & (steps <= high)))
    return Predicted(
        forecast,
        math.nan if math.isnan(holds) else forecast / middle - 1,
        holds,
        by_medians / middle - 1,
        null_model(costs, run) / middle - 1,
    )


def _spread(errors: Sequence[float]) -> str:
    """The median of several, and their range; of those that are refused, how many."""
    known = [error for error in errors if not math.isnan(error)]
    refused = f", {len(errors) - len(known)} unsteady" if len(known) < len(errors) else ""
    if not known:
        return "unsteady"
    several = f" ({min(known):+.1%} to {max(known):+.1%})" if len(known) > 1 else ""
    return f"{np.median(known):+.1%}{several}{refused}"


def table(targets: Sequence[Run], found: Mapping[Run, list[Measured]], microbatches: int) -> None:
    """Print what was predicted of each run beside what was measured, and the regret."""
    forecasts, medians = {}, {}
    print_head(COLUMNS)
    for run in targets:
        runs, sources = found[run], found[source_of(run, microbatches)]
        rows = [
            predicted(run, one, CostModel.fit(source.lines))
            for one, source in zip(runs, sources, strict=True)
        ]
        steps = np.concatenate([one.makespans for one in runs])
        middle = medians[run] = float(np.median(steps))
        replay, as_posted = (
            float(np.median([replay_error(one.lines, channel) for one in runs]))
            for channel in (None, "gloo")
        )
        outside = np.median([np.median(np.subtract(r.elapsed, r.makespans)) for r in runs])
        forecasts[run] = float(np.median([row.forecast for row in rows]))
        print(
            f"| {run.ranks} | {run.name} | {len(steps)} | {1e3 * middle:.2f} | {replay:+.2%} | "
            f"{as_posted:+.2%} | {_spread([row.error for row in rows])} | "
            f"{np.nanmean([row.holds for row in rows]):.0%} | "
            f"{_spread([row.by_medians for row in rows])} | "
            f"{_spread([row.null for row in rows])} | {outside / middle:.1%} |",
            flush=True,
        )
    for ranks in sorted({run.ranks for run in targets}):
        own = [run for run in targets if run.ranks == ranks]
        advised, best = min(own, key=lambda r: forecasts[r]), min(own, key=lambda r: medians[r])
        regret = medians[advised] / medians[best] - 1
        print(f"\n{ranks} ranks: recommended {advised.name}, best {best.name}, regret {regret:.1%}")


def predict(model: str, ranks: Sequence[int], args: argparse.Namespace) -> None:
    """Measure all schedules and forecast each from runs of 1F1B of fewer microbatches."""
    targets = [
        Run(model, name, count, args.microbatches, chunks, args.steps)
        for count in ranks
        for name, chunks in TARGETS.items()
    ]
    sources = list(dict.fromkeys(source_of(run, args.source) for run in targets))
    found = measured([*targets, *sources] * args.repeat, args.seed)
    table(targets, found, args.source)


def memory(args: argparse.Namespace) -> None:
    """Print the peak of each rank's bytes as simulated beside what torch has allocated."""
    targets = [Run("gpt", name, 2, args.microbatches, v, 4, True) for name, v in TARGETS.items()]
    sources = list(dict.fromkeys(source_of(run, args.source) for run in targets))
    found = measured([*targets, *sources], args.seed)
    print(
        "| schedule | rank | simulated MiB | torch MiB | error |\n| --- | --- | --- | --- | --- |"
    )
    for run in targets:
        costs = CostModel.fit(found[source_of(run, args.source)][0].lines)
        line = schedir.simulate(run.schedule, costs)
        for stats, peak in zip(line.ranks, found[run][0].peaks, strict=True):
            simulated = stats.peak_bytes or 0
            print(
                f"| {run.name} | {stats.rank} | {simulated / 2**20:.2f} | {peak / 2**20:.2f} | "
                f"{simulated / peak - 1:+.1%} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sleep", action="store_true", help="stages that sleep")
    parser.add_argument("--gpt", action="store_true", help="the example's model on two ranks")
    parser.add_argument("--memory", action="store_true", help="peak bytes of the example's model")
    parser.add_argument("--ranks", nargs="+", type=int, default=[4, 8], help="of --sleep (4 8)")
    parser.add_argument("--microbatches", type=int, default=12, help="of what is forecast (12)")
    parser.add_argument("--source", type=int, default=8, help="microbatches of 1F1B (8)")
    parser.add_argument("--steps", type=int, default=20, help="of each run (20)")
    parser.add_argument("--repeat", type=int, default=1, help="times that each run is made (1)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of runs (0)")
    args = parser.parse_args()
    if args.sleep:
        predict("sleep", args.ranks, args)
    if args.gpt:
        predict("gpt", [2], args)
    if args.memory:
        memory(args)


if __name__ == "__main__":
    main()
