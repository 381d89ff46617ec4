"""Forecasts: against the laws that runs were drawn from, and a recurrence written by hand."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import schedir
from schedir import Band, CostModel, Kind, SchedirError, Timeline
from schedir.graph.compile import graph_of
from schedir.ir import COMPUTE, parse_action
from schedir.simulator import Measured, load_timelines
from tests.built_in import NAMES
from tests.literals import listed
from tests.measured import LATENCY, Factor, even, jitter, measured_run
from tests.sweeps import examples, is_quick, sweep

SPLIT = listed(2, "0", "0F0 0I0 0F1 0I1 0W0 0W1")
WHOLE = listed(2, "0", "0F0 0B0 0F1 0B1")


@pytest.mark.parametrize("name", NAMES)
def test_what_does_not_jitter_has_a_band_of_no_width(name: str) -> None:
    run = measured_run(schedir.build("1f1b", ranks=3, microbatches=4), 10, even)
    costs = CostModel.fit(run)
    shape = {"chunks": 1} if "inter" in name else {}
    schedule = schedir.build(name, ranks=3, microbatches=7, **shape)
    band = schedir.forecast(schedule, costs)
    makespan = schedir.simulate(schedule, costs).makespan
    assert band.makespans.shape == (200,)
    assert [band.quantile(0), band.quantile(1), band.mean] == pytest.approx([makespan] * 3)


def test_a_seed_draws_the_same_and_another_one_others() -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=4)
    costs = CostModel.fit(measured_run(schedule, 10, jitter(0, entry=0.1)))
    assert schedir.forecast(schedule, costs) == schedir.forecast(schedule, costs)
    assert schedir.forecast(schedule, costs) != schedir.forecast(schedule, costs, seed=1)
    assert len(schedir.forecast(schedule, costs, draws=3).makespans) == 3


def test_the_maximum_of_what_jitters_is_above_the_maximum_of_the_medians() -> None:
    #   rank 0  F0---  F1-----         B0----- F2---       B1--    F3-----         two ranks that
    #   rank 1         F0--- B0------- F1--- B1----------- F2---- B2-----          wait for each
    #                                 |<- the longer one ->|                      other at every B
    sigma, microbatches = 0.4, 12
    schedule = schedir.build("1f1b", ranks=2, microbatches=microbatches)
    costs = CostModel.fit(measured_run(schedule, 200, jitter(3, entry=sigma), uneven=0))
    medians = schedir.simulate(schedule, costs).makespan
    band = schedir.forecast(schedule, costs, draws=400)

    chance = np.random.default_rng(8)

    def takes(seconds: float) -> NDArray[np.float64]:
        return seconds * np.exp(sigma * chance.standard_normal(20_000))

    one, other = takes(1), np.zeros(20_000)
    arrives = one + LATENCY
    for microbatch in range(microbatches):
        arrived = arrives
        if microbatch < microbatches - 1:
            one = one + takes(1)
            arrives = one + LATENCY
        other = np.maximum(other, arrived) + takes(1) + takes(2)
        one = np.maximum(one, other + LATENCY) + takes(2)
    truth = one + takes(0.3)
    assert medians < 0.9 * np.median(truth)
    assert band.mean == pytest.approx(truth.mean(), rel=0.02)
    for q in (0.05, 0.95):
        assert band.quantile(q) == pytest.approx(np.quantile(truth, q), rel=0.04)


@sweep(
    "sigmas, measured",
    [
        ({"entry": 0.2}, 30),
        ({"entry": 0.02, "step": 0.1}, 30),
        ({"entry": 0.05, "rank": 0.1}, 30),
        ({"entry": 0.02, "step": 0.1}, 10),
    ],
    quick=lambda case: "rank" in case[0],
    ids=["every entry", "every step", "every rank of a step", "every one of a few steps"],
)
def test_ninety_percent_bands_hold_as_many_of_the_steps(
    sigmas: dict[str, float], measured: int
) -> None:
    source = schedir.build("1f1b", ranks=3, microbatches=6)
    target = schedir.build("fill-drain", ranks=3, microbatches=9)
    held = []
    for seed in range(10 if is_quick() else 40):
        costs = CostModel.fit(measured_run(source, measured, jitter(seed, **sigmas)))
        band = schedir.forecast(target, costs)
        steps = measured_run(target, 20, jitter(seed + 1000, **sigmas))
        low, high = band.quantile(0.05), band.quantile(0.95)
        held += [low <= line.makespan <= high for line in steps]
    assert 0.85 <= np.mean(held) <= 0.95


def test_what_is_common_to_a_step_is_drawn_once() -> None:
    # As many entries as in the run: were each to draw a step of its own, its factor would average
    # out over the 48 of them.
    schedule = schedir.build("1f1b", ranks=4, microbatches=6)
    run = measured_run(schedule, 60, jitter(2, step=0.1))
    makespans = [line.makespan for line in run]
    band = schedir.forecast(schedule, CostModel.fit(run), draws=500)
    assert band.makespans.std() == pytest.approx(np.std(makespans), rel=0.2)


def test_what_happened_together_stays_together() -> None:
    # Pauses hold up several entries in a row: drawn one by one, each would hold up others.
    schedule = schedir.build("1f1b", ranks=4, microbatches=6)
    chance, left = np.random.default_rng(5), [0]

    def paused(step: int, rank: int, stage: int) -> float:
        left[0] = 5 if not left[0] and chance.random() < 0.03 else max(0, left[0] - 1)
        return 4.0 if left[0] else 1.0

    run = measured_run(schedule, 41, paused)
    makespans = [line.makespan for line in run[1:]]
    band = schedir.forecast(schedule, CostModel.fit(run), draws=400)
    assert band.mean == pytest.approx(np.mean(makespans), rel=0.01)
    assert band.makespans.std() == pytest.approx(np.std(makespans), rel=0.1)


@pytest.mark.parametrize("microbatches", [2, 8])
def test_jitter_of_entries_is_drawn_once(microbatches: int) -> None:
    # With two entries of a kind a step, the medians of steps vary by jitter alone; and where a
    # schedule has more of them, they are none of the same two.
    source, target = (schedir.build("1f1b", ranks=1, microbatches=m) for m in (2, microbatches))
    run = measured_run(source, 200, jitter(2, entry=0.1))
    makespans = [line.makespan for line in measured_run(target, 300, jitter(3, entry=0.1))]
    band = schedir.forecast(target, CostModel.fit(run), draws=1000)
    assert band.makespans.std() == pytest.approx(np.std(makespans), rel=0.15)


def test_kinds_that_were_not_observed_jitter_as_the_backward() -> None:
    run = measured_run(schedir.build("1f1b", ranks=1, microbatches=4), 20, jitter(1, entry=0.2))
    costs = CostModel.fit(run)
    band, whole = (schedir.forecast(each, costs) for each in (SPLIT, WHOLE))
    assert band.mean == pytest.approx(whole.mean, rel=0.03)
    assert band.makespans.std() == pytest.approx(whole.makespans.std(), rel=0.3)


def test_what_was_not_seen_to_run_again_jitters_as_the_forward() -> None:
    """All of a step is as slow as the step, what is run again too: forward, backward, update."""
    schedule = schedir.build("1f1b", ranks=1, microbatches=4)
    run = measured_run(schedule, 20, jitter(1, step=0.2))
    plain, again = (
        sorted(schedir.forecast(each, CostModel.fit(run), draws=19).makespans)
        for each in (schedule, schedir.recompute(schedule, [0]))
    )
    longer = (4 * (1 + 1 + 2) + 0.3) / (4 * (1 + 2) + 0.3)
    assert again == pytest.approx([longer * makespan for makespan in plain])


@given(st.floats(0.5, 4))
@examples(10)
def test_costs_changed_by_hand_scale_what_is_drawn(scale: float) -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=4)
    costs = CostModel.fit(measured_run(schedule, 10, jitter(4, entry=0.1)))
    assert isinstance(costs.latency, float)
    own: dict[str, Any] = {"latency": scale * costs.latency}
    for name in ("forward", "backward", "optim_step"):
        own[name] = tuple(scale * cost for cost in getattr(costs, name))
    scaled = attrs.evolve(costs, **own)
    band = schedir.forecast(schedule, costs, draws=20)
    assert schedir.forecast(schedule, scaled, draws=20).makespans == pytest.approx(
        scale * band.makespans
    )


def test_a_band_says_what_share_stays_below() -> None:
    band = Band(np.array([4.0, 1.0, 3.0, 2.0, 5.0]))
    assert (band.quantile(0), band.median, band.quantile(1), band.mean) == (1, 3, 5, 3)
    with pytest.raises(ValueError, match="between 0 and 1, not 90"):
        band.quantile(90)


def test_costs_without_samples_forecast_nothing() -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    with pytest.raises(SchedirError, match=r"no samples .* CostModel.fit"):
        schedir.forecast(schedule, CostModel())
    with pytest.raises(ValueError, match="at least 1, not 0"):
        schedir.forecast(schedule, CostModel(), draws=0)
    costs = CostModel.fit(measured_run(schedule, 9, even))
    with pytest.raises(SchedirError, match="forward has 2 numbers"):  # of another cut
        schedir.forecast(schedir.build("1f1b", ranks=4, microbatches=2), costs)


def turns(at: int, rank: int, ratio: float) -> Factor:
    noise = jitter(0, entry=0.02)

    def factor(step: int, on: int, stage: int) -> float:
        slow = ratio if step >= at and on == rank else 1.0
        return slow * noise(step, on, stage)

    return factor


@pytest.mark.parametrize(
    ("steps", "at", "ratio"),
    [
        *((21, 10, 1.2), (21, 15, 1.3), (21, 6, 0.7), (21, 15, 0.0)),
        # Near the ends, and in short runs: that step 0 is left out makes one of 7 steps one of 6.
        *((21, 18, 2.0), (21, 3, 2.0), (10, 4, 2.0), (8, 4, 2.0), (7, 4, 2.0)),
    ],
)
def test_a_rank_that_turns_slow_or_fast_is_named_with_its_step(
    steps: int, at: int, ratio: float
) -> None:
    schedule = schedir.build("1f1b", ranks=3, microbatches=4)
    costs = CostModel.fit(measured_run(schedule, steps, turns(at, 1, ratio), first=100))
    said = rf"stage 1 on rank 1 is \d+% {'slower' if ratio > 1 else 'faster'} from step {100 + at}"
    with pytest.raises(SchedirError, match=said):
        schedir.forecast(schedule, costs)


def test_halves_that_differ_are_refused_and_each_forecasts() -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=4)
    noise = jitter(1, entry=0.03)
    run = measured_run(schedule, 24, lambda step, *at: (1.0, 1.15)[step > 12] * noise(step, *at))
    said = r"not steady: .*, and 1 other stage changed too; .* again"
    with pytest.raises(SchedirError, match=said):
        schedir.forecast(schedule, CostModel.fit(run))
    halves = [schedir.forecast(schedule, CostModel.fit(part)) for part in (run[:13], run[13:])]
    assert halves[1].median / halves[0].median == pytest.approx(1.15, rel=0.02)


def test_a_drift_is_refused() -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=4)
    noise = jitter(1, entry=0.03)
    run = measured_run(schedule, 40, lambda step, *at: (1 + step / 200) * noise(step, *at))
    with pytest.raises(SchedirError, match="not steady"):
        schedir.forecast(schedule, CostModel.fit(run))


@pytest.mark.parametrize("seed", range(8))
def test_jitter_and_slow_steps_are_steady(seed: int) -> None:
    schedule = schedir.build("1f1b", ranks=3, microbatches=4)
    noise = jitter(seed, entry=0.1, step=0.1, rank=0.05)

    def factor(step: int, on: int, stage: int) -> float:
        return (3.0 if step in (5, 14) else 1.0) * noise(step, on, stage)

    schedir.forecast(schedule, CostModel.fit(measured_run(schedule, 20, factor)))


@pytest.mark.parametrize("slow", [(39, 40), (1, 2), (20, 21)])
def test_two_slow_steps_of_forty_are_jitter(slow: tuple[int, int]) -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=8)
    noise = jitter(3, entry=0.01)
    run = measured_run(schedule, 41, lambda step, *at: (1.0, 1.15)[step in slow] * noise(step, *at))
    schedir.forecast(schedule, CostModel.fit(run))


def holds_its_run(lines: list[Timeline]) -> None:
    """The median of the forecast is that of the steps, and the band holds it; the first one, in
    which shapes are found, does not count."""
    makespans = [line.makespan for line in lines[1:]]
    band = schedir.forecast(lines[0].schedule, CostModel.fit(lines))
    assert band.median == pytest.approx(np.median(makespans), rel=0.02)
    assert band.quantile(0.05) <= np.median(makespans) <= band.quantile(0.95)
    low, high = band.quantile(0.05), band.quantile(0.95)
    assert np.mean([low <= one <= high for one in makespans]) >= 0.8


RUNS = Path(__file__).with_name("runs")


@pytest.mark.parametrize("steps", range(6, 13))
def test_a_measured_run_is_within_its_own_forecast(steps: int) -> None:
    """1F1B on two ranks over gloo: transfers of 10 µs, and some of 600, as the receiver is late."""
    lines = load_timelines(RUNS / "1f1b-2x8.json")
    holds_its_run(lines[:steps])
    assert CostModel.fit(lines[:steps]).latency == pytest.approx(1e-5, rel=0.2)


@pytest.mark.parametrize("name", ["1f1b-2x4-contended", "fill-drain-4x8-contended"])
def test_a_run_on_too_few_cores_is_within_its_own_forecast(name: str) -> None:
    """Ranks are milliseconds late into a step of tiny stages, pause between entries whose message
    has long been read, and queue."""
    lines = load_timelines(RUNS / f"{name}.json")
    holds_its_run(lines)
    for line in lines[1:]:
        band = schedir.forecast(line.schedule, CostModel.fit([line] * 6))
        assert band.median == pytest.approx(line.makespan, rel=0.012)


@pytest.mark.parametrize("bandwidth", [math.inf, 40, 10])
def test_what_queues_is_forecast_as_it_was(bandwidth: float) -> None:
    """Boundaries of unequal sizes have a bandwidth, and what is behind another one waits for it. A
    trace has a transfer begin when both ends have posted it, its channel free or not."""
    schedule = schedir.build("fill-drain", ranks=3, microbatches=6)
    columns, transfers = schedule.columns, graph_of(schedule).transfers
    costs = CostModel(forward=0.1, latency=0.05, bandwidth=bandwidth, boundary_bytes=(8, 20))
    chance = np.random.default_rng(1)
    lines = []
    for step in range(12):
        takes = {
            columns.position(place): 0.1 + 0.4 * chance.random()
            for place in columns.where(Kind.FORWARD, Kind.BACKWARD).tolist()
        }
        line = schedir.simulate(schedule, costs, durations=takes)
        starts = line.starts.astype(float)
        posted = line.ends[transfers.send - 1]
        starts[transfers.send], starts[transfers.receive] = posted, posted
        line = attrs.evolve(line, starts=starts, sizes=costs.sizes, unit="s")
        lines.append(attrs.evolve(line, measured=Measured(step)))
    holds_its_run(lines)


def test_ranks_that_take_turns_in_one_process_have_no_band() -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    starts = np.full(len(schedule.columns), math.nan)
    order = ["0F0", "0F1", "1F0", "1B0", "1F1", "1B1", "0B0", "0B1", "0OPTIM_STEP", "1OPTIM_STEP"]
    for time, token in enumerate(order):
        rank = int(token[0])
        starts[schedule.columns.place(rank, schedule.flat[rank].index(parse_action(token)))] = time
    line = Timeline(schedule, starts, starts + 0.75, unit="s", measured=Measured(1))
    with pytest.raises(SchedirError, match="took turns in one process"):
        schedir.forecast(schedule, CostModel.fit([line] * 6))


def test_jitter_of_what_takes_no_time_is_not_that_of_what_takes_long() -> None:
    """The first stage has nearly no I, whose pauses are hundreds of times its median."""
    chance = np.random.default_rng(2)
    times = {Kind.FORWARD: 1.0, Kind.BACKWARD_INPUT: 0.001, Kind.BACKWARD_WEIGHT: 2.0}
    run = measured_run(SPLIT, 20, even, times=times)
    lines = []
    for line in run:
        late = np.where(line.schedule.columns.is_kind(Kind.BACKWARD_INPUT), chance.random() ** 4, 0)
        shift = np.cumsum(late)
        lines.append(attrs.evolve(line, starts=line.starts + shift - late, ends=line.ends + shift))
    band = schedir.forecast(WHOLE, CostModel.fit(lines))
    assert band.unmeasured == ("backward",)
    assert band.quantile(0.95) < 8


@pytest.mark.parametrize("steps", range(1, 6))
def test_too_few_steps_have_no_band(steps: int) -> None:
    lines = load_timelines(RUNS / "1f1b-2x8.json")[:steps]
    with pytest.raises(SchedirError, match=r"^\d measured steps? \w+ too few .* at least 6"):
        schedir.forecast(lines[0].schedule, CostModel.fit(lines))


def contended_run(name: str, seed: int, steps: int) -> list[Timeline]:
    """A run as on a machine with too few cores: ranks that begin late, links that are unlike,
    pauses of hundreds of times what a transfer takes, and slow steps."""
    schedule = schedir.build(name, ranks=3, microbatches=4)
    chance = np.random.default_rng(seed)
    columns, transfers = schedule.columns, graph_of(schedule).transfers
    latency = {(a, b): 10.0 ** -chance.integers(1, 4) for a in range(3) for b in range(3) if a != b}
    costs = CostModel(latency=latency)
    usual = schedir.simulate(schedule, costs)

    def heavy() -> float:
        return float(np.exp(0.1 * chance.standard_normal()) * (30 if chance.random() < 0.03 else 1))

    lines = []
    for step in range(steps):
        slow, durations = float(np.exp(0.2 * chance.standard_normal())), {}
        for place in columns.where(*COMPUTE).tolist():
            length = float(usual.ends[place] - usual.starts[place])
            durations[columns.position(place)] = slow * heavy() * length
        for number, send in enumerate(transfers.send.tolist()):
            own = latency[int(transfers.source[number]), int(transfers.target[number])] * heavy()
            durations[columns.position(send)] = own * (200 if chance.random() < 0.1 else 1)
        line = schedir.simulate(schedule, costs, durations=durations)
        late = float(chance.choice([0, 0, 2]))  # all begin after a rank that has nothing to do yet
        line = attrs.evolve(line, starts=line.starts + late, ends=line.ends + late)
        lines.append(attrs.evolve(line, unit="s", measured=Measured(step)))
    return lines


@sweep(
    "name",
    ["1f1b", "fill-drain", "interleaved-1f1b", "pipedream", "zb-h1"],
    quick=["1f1b", "pipedream"],
)
@given(seed=st.integers(0, 2**32), steps=st.integers(6, 40))
@examples(8)
def test_a_contended_run_is_within_its_own_forecast_or_refused(
    name: str, seed: int, steps: int
) -> None:
    with suppress(SchedirError):
        holds_its_run(contended_run(name, seed, steps))


def test_contended_runs_are_seldom_refused() -> None:
    refused, seeds = 0, range(8 if is_quick() else 20)
    for seed in seeds:
        try:
            holds_its_run(contended_run("1f1b", seed, 12))
        except SchedirError:
            refused += 1
    assert refused <= len(seeds) / 4
