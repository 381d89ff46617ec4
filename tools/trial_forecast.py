"""Compares forecasts with the runs that their costs were fitted on, by default 30 runs.

    python tools/trial_forecast.py [--runs 30] [--seed 0]

Each run is a separate launch of torchrun on 2 or 4 ranks, with 6 to 40 traced steps of a built-in
schedule. Its stages are tiny, or sleep, or are the example's model. Its timelines are fitted, and
the same schedule is forecast. The forecast passes if its median is within 10 % of the median of the
fitted steps and its 90 % band holds that median, or if it is refused with a reason. The tool also
prints the error of the simulation at medians, and the share of the steps within the band.
"""

from __future__ import annotations

import argparse
import random
import sys

import numpy as np
from bench_predict import launch, print_head
from predicted_run import Run

import schedir
from schedir import CostModel, SchedirError

SCHEDULES = {
    "fill-drain": 1,
    "1f1b": 1,
    "interleaved-1f1b": 2,
    "pipedream": 1,
    "zb-h1": 1,
    "zbv": 2,
}
MODELS = ("tiny", "sleep", "gpt")
TOLERATED = 0.1
COLUMNS = ("run", "steps", "measured ms", "forecast", "band ms", "holds", "at medians")


def drawn_runs(many: int, seed: int) -> list[Run]:
    """So many runs: every schedule and every model as often as may be."""
    chance = random.Random(seed)
    names = list(SCHEDULES)
    return [
        Run(
            model=MODELS[number % len(MODELS)],
            name=(name := names[number // len(MODELS) % len(names)]),
            ranks=chance.choice((2, 4)),
            microbatches=chance.choice((4, 8)),
            chunks=SCHEDULES[name],
            steps=chance.randint(6, 40),
            warm=0,
        )
        for number in range(many)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=30, help="how many (30)")
    parser.add_argument("--seed", type=int, default=0, help="of what they are (0)")
    args = parser.parse_args()
    wrong = refused = 0
    offs = []
    print_head(COLUMNS)
    for run in drawn_runs(args.runs, args.seed):
        lines = launch(run).lines
        costs = CostModel.fit(lines)
        steps = np.array([line.makespan for line in lines[1:]])
        middle = float(np.median(steps))
        what = f"{run.model} {run.name} {run.ranks} × {run.microbatches}"
        shown = [what, str(len(lines)), f"{1e3 * middle:.2f}"]
        try:
            band = schedir.forecast(lines[0].schedule, costs)
        except SchedirError as error:
            refused += 1
            print(f"| {' | '.join([*shown, f'refused: {error}', '', '', ''])} |", flush=True)
            continue
        low, high, off = band.quantile(0.05), band.quantile(0.95), band.median / middle - 1
        offs.append(abs(off))
        wrong += abs(off) > TOLERATED or not low <= middle <= high
        holds = np.mean((low <= steps) & (steps <= high))
        medians = schedir.simulate(lines[0].schedule, costs).makespan / middle - 1
        shown += [f"{off:+.2%}", f"{1e3 * low:.2f} to {1e3 * high:.2f}", f"{holds:.0%}"]
        print(f"| {' | '.join([*shown, f'{medians:+.1%}'])} |", flush=True)
    worst = f", {max(offs):.2%} off at most" if offs else ""
    print(f"\n{args.runs} runs: {refused} refused, {len(offs)} forecast{worst}, {wrong} wrong")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
