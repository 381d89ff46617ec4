"""Times the HTML page of a timeline in the system's Chromium.

    python tools/bench_page.py              # 100,000 actions, simulated and as if measured
    python tools/bench_page.py --million    # and a million

file      its size on disk
write     Python's time to make it, with the idle times and the critical path
paint     the time from opening the file to lanes on the screen
pan       a frame while the mouse drags the view: the time of the script, and the time until the
          pixels are on the screen (without a GPU the CPU makes them)
hover     the time from a move of the pointer to the text about the action under it

Each figure is the median of its runs, with the maximum in brackets. Each paint opens the page anew.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np
from playwright.sync_api import Browser, Page, sync_playwright

import schedir
from schedir.ir import COMPUTE
from schedir.render.html import html_page, script

SHAPES = {"100,000": (32, 264), "a million": (64, 1312)}

PAN = """async (steps) => {
    const script = [], whole = [];
    const span = view.to - view.from;
    let last = await new Promise(requestAnimationFrame);
    for (let step = 0; step < steps; step++) {
        const from = view.from + (step % 2 ? -1 : 1) * span * 0.01;
        Object.assign(view, { from, to: from + span });
        const before = performance.now();
        draw(canvas, schedir.lines);
        script.push(performance.now() - before);
        const now = await new Promise(requestAnimationFrame);
        whole.push(now - last);
        last = now;
    }
    return [script, whole.slice(1)];
}"""
HOVER = """(spots) => spots.map(([x, y]) => {
    const before = performance.now();
    drawMarks(byId("marks"), schedir.lines, [schedir.point(x, y)]);
    return performance.now() - before;
})"""


def perturbed(line: schedir.Timeline) -> schedir.Timeline:
    """As if measured: every compute action takes a time of its own."""
    columns, chance = line.schedule.columns, np.random.default_rng(0)
    durations = {
        columns.position(place): float(chance.lognormal(0, 0.2)) * 1e-3
        for place in columns.where(*COMPUTE).tolist()
    }
    costs = schedir.CostModel(latency=1e-4, unit="s")
    return schedir.simulate(line.schedule, costs, durations=durations)


def simulated(ranks: int, microbatches: int) -> schedir.Timeline:
    shape = {"ranks": ranks, "microbatches": microbatches, "chunks": 2}
    return schedir.simulate(schedir.build("interleaved-1f1b", **shape))


def opened(browser: Browser, file: Path) -> Page:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.goto(file.as_uri())
    page.wait_for_selector("body[data-ready]", state="attached", timeout=60_000)
    return page


def figures(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} ({max(values):.1f})"


def measure(browser: Browser, line: schedir.Timeline, file: Path, runs: int) -> str:
    fresh = attrs.evolve(line)  # nothing is known of it yet
    start = time.perf_counter()
    file.write_text(html_page(fresh), encoding="utf-8")
    seconds = time.perf_counter() - start
    paints = []
    for _ in range(runs):
        page = opened(browser, file)
        paints.append(page.evaluate("schedir.opened"))
        page.close()
    page = opened(browser, file)
    script_time, whole = page.evaluate(PAN, 60)
    chance = np.random.default_rng(0)
    spots = [[float(x), float(y)] for x, y in chance.uniform((70, 40), (1400, 700), (200, 2))]
    hover = page.evaluate(HOVER, spots)
    page.close()
    size = file.stat().st_size
    return (
        f"| {len(line.starts):,} | {size / 1e3:,.0f} kB | {seconds:.2f} s | {figures(paints)} | "
        f"{figures(script_time)}, {figures(whole)} | {figures(hover)} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="how often each file is opened")
    parser.add_argument("--million", action="store_true", help="a million actions as well")
    args = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise SystemExit("no Chromium is installed: `apt-get install chromium` has one")
    print(f"{len(script().encode()):,} bytes of script; times in milliseconds, median (most)\n")
    print("| actions | file | write | paint | pan: script, whole | hover |")
    print("| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        try:
            for name, shape in SHAPES.items():
                if name == "100,000" or args.million:
                    line = simulated(*shape)
                    for each in (line, perturbed(line)):
                        file = Path(folder) / "timeline.html"
                        print(measure(browser, each, file, args.runs), flush=True)
        finally:
            browser.close()


if __name__ == "__main__":
    main()
