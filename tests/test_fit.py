"""Costs fitted on measured runs: against the costs that made them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedir
from schedir import CostModel, LoadError, SchedirError, Timeline
from schedir.graph.compile import graph_of
from schedir.ir import parse_action
from schedir.simulator import Measured, Sizes
from schedir.simulator.fit import usual
from tests.built_in import NAMES
from tests.literals import CROSSING, listed
from tests.measured import durations_of, even, jitter, measured_run


def by_stage(value: object) -> list[float]:
    assert isinstance(value, tuple)
    return list(value)


times_of_stages = st.lists(st.integers(1, 9), min_size=4, max_size=4)


@given(times_of_stages, times_of_stages, st.integers(0, 5), st.integers(0, 3))
def test_the_fit_of_a_simulated_run_gives_back_its_costs(
    forward: list[int], backward: list[int], latency: int, step: int
) -> None:
    times: Any = {"forward": tuple(forward), "backward": tuple(backward)}
    costs = CostModel(**times, latency=latency, optim_step=step)
    for name in ("1f1b", "fill-drain"):
        line = schedir.simulate(schedir.build(name, ranks=4, microbatches=5), costs)
        fitted = CostModel.fit([line])
        assert [by_stage(fitted.forward), by_stage(fitted.backward)] == [forward, backward]
        assert by_stage(fitted.optim_step) == [step] * 4
        assert (fitted.latency, fitted.bandwidth) == (latency, math.inf)
        assert by_stage(fitted.backward_input) == [b / 2 for b in backward]
        assert by_stage(fitted.backward_weight) == [b / 2 for b in backward]


def test_latency_and_bandwidth_are_told_apart_by_boundaries_of_different_sizes() -> None:
    costs = CostModel(latency=0.5, bandwidth=4, boundary_bytes=(4, 8, 2))
    line = schedir.simulate(schedir.build("fill-drain", ranks=4, microbatches=2), costs)
    fitted = CostModel.fit([line])
    assert fitted.latency == pytest.approx(0.5)
    assert fitted.bandwidth == pytest.approx(4)
    assert by_stage(fitted.boundary_bytes) == [4, 8, 2]


@pytest.mark.parametrize("bytes_", [(4, 8, 2), (0, 8, 2), (0, 1000, 0)])
@pytest.mark.parametrize("latency", [0.1, 0.3, 1e-5])
def test_all_is_latency_where_bytes_make_no_difference(
    bytes_: tuple[int, ...], latency: float
) -> None:
    made = CostModel(forward=0.7, latency=latency, boundary_bytes=bytes_)
    line = schedir.simulate(schedir.build("fill-drain", ranks=4, microbatches=3), made)
    fitted = CostModel.fit([line])
    assert fitted.latency == pytest.approx(latency)
    assert isinstance(fitted.bandwidth, float)
    assert max(bytes_) / fitted.bandwidth < 1e-12  # but for rounding


def test_a_boundary_that_nothing_crosses_has_no_time_per_byte() -> None:
    """What empty payloads take is seen to be nothing, and the line through the others falls."""
    schedule = schedir.build("fill-drain", ranks=4, microbatches=3)
    line = schedir.simulate(schedule, CostModel(bandwidth=2, boundary_bytes=(0, 4, 16)))
    slower = schedule.columns.is_kind(schedir.Kind.RECV_ACT) & (schedule.columns.stage == 3)
    fitted = CostModel.fit([attrs.evolve(line, ends=line.ends + 0.25 * slower)])
    assert fitted.bandwidth == pytest.approx(2, rel=0.05)


def test_links_that_are_unlike_have_a_latency_each() -> None:
    latency = {(0, 1): 0.5, (1, 0): 0.5, (1, 2): 3, (2, 1): 2}
    built = schedir.build("1f1b", ranks=3, microbatches=2)
    line = schedir.simulate(built, CostModel(latency=latency))
    fitted = CostModel.fit([line])
    # On the links that close the ring nothing was sent: what is usual.
    assert fitted.latency == latency | {(2, 0): 1.25, (0, 2): 1.25}
    schedir.simulate(schedir.build("interleaved-1f1b", ranks=3, microbatches=2, chunks=1), fitted)
    close = CostModel(latency={link: 0.01 * slow for link, slow in latency.items()})
    line = schedir.simulate(line.schedule, close)
    assert CostModel.fit([line]).latency == pytest.approx(0.0125)


def test_split_backwards_are_each_measured_and_sum_up_to_a_whole_one() -> None:
    schedule = listed(2, "0", "0F0 0I0 0F1 0I1 0W0 0W1")
    costs = CostModel(forward=3, backward_input=5, backward_weight=4)
    fitted = CostModel.fit([schedir.simulate(schedule, costs)])
    assert by_stage(fitted.backward_input) == [5]
    assert by_stage(fitted.backward_weight) == [4]
    assert by_stage(fitted.backward) == [9]
    assert fitted.optim_step == 0


def test_overlapped_pairs_are_measured_by_the_stage_of_their_forward() -> None:
    schedule = listed(2, "0 0", "0F0 1F0 (1B0;0F1) 0B0 1F1 1B1 0B1")
    costs = CostModel(forward=(3, 4), backward=(5, 6), overlapped=(7, 9))
    fitted = CostModel.fit([schedir.simulate(schedule, costs)])
    assert by_stage(fitted.forward) == [3, 4]
    assert by_stage(fitted.backward) == [5, 6]
    assert by_stage(fitted.overlapped) == [7, 10]  # of stage 1, which no pair has, the sum


def test_collectives_are_measured() -> None:
    schedule = listed(
        3, "0,1", "0F0 0B0 0REDUCE_GRAD 0OPTIM_STEP", "0F1 0B1 0F2 0B2 0REDUCE_GRAD 0OPTIM_STEP"
    )
    costs = CostModel(reduce_grad=5, optim_step=2)
    fitted = CostModel.fit([schedir.simulate(schedule, costs)])
    assert by_stage(fitted.reduce_grad) == [5]
    assert by_stage(fitted.optim_step) == [2]


def test_medians_are_over_all_steps_and_nan_is_no_observation() -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=1)
    lines = measured_run(schedule, 4, lambda step, *_: (100, 1, 2, 9)[step])
    place = schedule.columns.place(0, 0)
    unknown = lines[3].starts.copy()
    unknown[place] = np.nan
    lines[3] = attrs.evolve(lines[3], starts=unknown)
    fitted = CostModel.fit(lines)
    # The first step finds shapes: it is no sample; nor is what is not known of the last.
    assert fitted.forward == pytest.approx((1.5, 1.1 * 2))
    assert fitted.unit == "s"


def test_the_first_step_counts_where_it_is_alone_and_of_each_run() -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=1)
    one = measured_run(schedule, 3, lambda step, *_: (50, 1, 1)[step])
    two = measured_run(schedule, 3, lambda step, *_: (50, 3, 3)[step], first=7)
    assert CostModel.fit(one[:1]).forward == pytest.approx((50, 55))
    assert CostModel.fit(one + two).forward == pytest.approx((2, 2.2))
    samples = CostModel.fit(one + two).samples
    assert samples is not None
    assert samples.steps == (2, 3, 8, 9)


def hand_drawn(ends_of_transfers: tuple[float, float]) -> Timeline:
    #   rank 0  0F0--- · 0F1---          0B0--- · 0B1---
    #   rank 1         ──►   1F0 1B0
    nan = math.nan
    act0, act1 = ends_of_transfers
    starts = [0, 2, 2.5, 4.5, 6, 6.75, nan, 9.25, 2, 3, 5, 6, 4.5, 6.5, 7.5, 8.5]
    ends = [2, act0, 4.5, act1, 6.75, 9, nan, 10.25, act0, 4, 6, 6.75, act1, 7.5, 8.5, nan]
    return Timeline(CROSSING, starts, ends, unit="s", measured=Measured(4))


def test_host_work_counts_to_the_entry_that_it_follows_and_unseen_arrivals_to_nobody() -> None:
    line = hand_drawn((3, math.nan))
    durations = durations_of(line)
    assert durations[0, 0] == 2.5  # 0F0, and until 0F1 starts
    assert durations[0, 2] == 2 + 0.5  # 0F1: what follows waits; as much as after 0F0 was work
    assert durations[0, 5] == 2.25 + 0.25  # 0B0
    assert durations[1, 2] == 1.5  # 1B0, and until 1F1 starts, whose input was there
    # 0SEND_ACT0, which rank 1 waited for: posting it was work of 0F0, until 2.5.
    assert durations[0, 1] == 0.5
    assert durations[0, 3] == 0  # 0SEND_ACT1 was there before anybody looked
    assert durations[1, 3] == 0.25
    # Nobody waited for the other two: 0SEND_ACT1 took 1 at most, 1SEND_GRAD1 0.5. So of four, one
    # or two took 0.5, and the others less: the median is 0.25.
    assert CostModel.fit([line]).latency == 0.25
    # What arrived before its receiver was free is no measure.
    assert (0, 3) not in durations_of(hand_drawn((3, 5.5)))


@given(
    st.lists(st.floats(0.001, 100), min_size=3, max_size=40),
    st.lists(st.floats(0.001, 100), min_size=40, max_size=40),
)
def test_the_usual_time_is_at_most_what_was_waited_for(
    times: list[float], slack: list[float]
) -> None:
    """What is known within a limit is known to be no more than that: as if nobody had waited."""
    durations, limits = np.array(times), np.array(slack[: len(times)])
    within = durations <= limits
    found = usual(np.where(within, limits, durations), within)
    assert 0 <= found <= (durations[~within].max() if (~within).any() else 0)
    assert usual(durations, np.zeros(len(durations), np.bool_)) == np.median(durations)


def test_a_transfer_that_was_queued_is_no_measure_of_latency() -> None:
    #   rank 0  0F0 0F1                     sends its second output at 0.2, while the first one is
    #   rank 1         ────1F0 ────1F1      on its way until 1.1, after which the second one goes
    schedule = schedir.build("fill-drain", ranks=2, microbatches=2)
    costs = CostModel(forward=0.1, bandwidth=1, boundary_bytes=1)
    line = schedir.simulate(schedule, costs)
    transfers = graph_of(schedule).transfers
    starts = line.starts.copy()
    second = int(np.argmax(starts[transfers.send] * ~transfers.is_gradient))
    assert starts[transfers.send[second]] == pytest.approx(1.1)
    starts[[transfers.send[second], transfers.receive[second]]] = 0.2
    line = attrs.evolve(line, starts=starts, unit="s", measured=Measured(1))
    found = durations_of(line)
    sent = [at for at in found if "SEND_ACT" in str(schedule.actions[at[0]][at[1]])]
    assert [found[at] for at in sent] == pytest.approx([1.0])


def test_ranks_that_take_turns_in_one_process_do_not_work_meanwhile() -> None:
    #   rank 0  0F0 0F1                 0B0 0B1          nobody sees when what is sent arrives, as
    #   rank 1          1F0 1B0 1F1 1B1                  all of it is there when the turn comes
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    starts = np.full(len(schedule.columns), math.nan)
    for time, token in enumerate(["0F0", "0F1", "1F0", "1B0", "1F1", "1B1", "0B0", "0B1"]):
        rank = int(token[0])
        starts[schedule.columns.place(rank, schedule.flat[rank].index(parse_action(token)))] = time
    line = Timeline(schedule, starts, starts + 0.75, unit="s", measured=Measured(1))
    assert by_stage(CostModel.fit([line]).forward) == [0.75, 0.75]


@pytest.mark.parametrize("name", NAMES)
def test_a_replay_of_a_run_is_the_run(name: str) -> None:
    schedule = schedir.build(name, ranks=3, microbatches=6)
    for line in measured_run(schedule, 3, jitter(1, entry=0.3)):
        replayed = schedir.simulate(schedule, CostModel.fit([line]), durations=durations_of(line))
        assert replayed.makespan == pytest.approx(line.makespan)


def test_sizes_are_copied() -> None:
    sizes = Sizes(boundary=(8,), input=(1, 2), activation=(3, 4), weight=(5, 6), gradient=7)
    line = schedir.simulate(schedir.build("1f1b", ranks=2, microbatches=2))
    for each in (sizes, attrs.evolve(sizes, deferred=(1, 3), early_gradient=(0, 7))):
        assert CostModel.fit([line, attrs.evolve(line, sizes=each), line]).sizes == each


def test_what_runs_again_has_a_cost_of_its_own() -> None:
    costs = CostModel(forward=(1, 2), recompute=(3, 4))
    built = schedir.build("1f1b", ranks=2, microbatches=3)
    for stages, expected in ((), None), ([1], (1, 4)), ([0, 1], (3, 4)):
        line = schedir.simulate(schedir.recompute(built, stages), costs)
        fitted = CostModel.fit([line])
        assert fitted.recompute == expected
        assert by_stage(fitted.forward) == [1, 2]
        assert by_stage(fitted.backward) == [2, 2]


def test_runs_that_do_not_go_together_are_refused() -> None:
    built = (schedir.build("1f1b", ranks=ranks, microbatches=2) for ranks in (2, 3))
    small, large = map(schedir.simulate, built)
    with pytest.raises(SchedirError, match="1f1b has 3 stages, 1f1b 2: costs belong to one cut"):
        CostModel.fit([small, large])
    with pytest.raises(SchedirError, match="in s, those of 1f1b in any unit"):
        CostModel.fit([small, attrs.evolve(small, unit="s")])
    with pytest.raises(SchedirError, match=r"no timeline .* trace=True"):
        CostModel.fit([])
    blind = small.ends.astype(float)
    blind[small.schedule.columns.rank == 1] = np.nan
    with pytest.raises(SchedirError, match="how long a FORWARD of stage 1 takes"):
        CostModel.fit([attrs.evolve(small, ends=blind)])


def test_runs_of_several_schedules_are_fitted_together() -> None:
    names = ("1f1b", "fill-drain")
    built = [schedir.build(name, ranks=2, microbatches=4) for name in names]
    fitted = CostModel.fit([line for each in built for line in measured_run(each, 3, even)])
    assert fitted.forward == pytest.approx((1, 1.1))
    assert fitted.latency == pytest.approx(0.05)


def test_samples_are_saved_and_loaded_exactly(tmp_path: Path) -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=3)
    costs = CostModel.fit(measured_run(schedule, 6, jitter(5, entry=0.1)))
    costs.save(tmp_path / "costs.json")
    loaded = CostModel.load(tmp_path / "costs.json")
    assert loaded == costs
    assert loaded.samples == costs.samples
    assert loaded.samples != CostModel.fit(measured_run(schedule, 6, jitter(6, entry=0.1))).samples
    assert schedir.forecast(schedule, loaded) == schedir.forecast(schedule, costs)
    CostModel().save(tmp_path / "given.json")
    assert CostModel.load(tmp_path / "given.json").samples is None


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("duration", [1.0, -2.0], "samples: duration of row 1 must be finite and >= 0, not -2.0"),
        ("duration", [1.0], "samples: cost must have 1 rows, not 2"),
        ("duration", [1.0, None], "samples: duration must be a list of numbers"),
        ("stage", [0, True], "samples: stage must be a list of numbers"),
        ("stage", [0, -1], "samples: stage of row 1 must be from 0 to 999999, not -1"),
        ("step", [0, 1], "samples: step of row 1 must be from 0 to 0, not 1"),
        ("cost", [0, 77], "samples: cost of row 1 must be from 0 to .*, not 77"),
        ("peer", [0, 1 << 70], "samples: peer of row 1 must be from -1 to 999999, not 1"),
        ("costs", ["sideward"], "samples: costs must be some of forward, "),
        ("steps", 3, "samples: steps must be a list of numbers"),
        ("turn", [0, -1], "samples: turn of row 1 must be from 0 to 999999, not -1"),
        ("other", 3, "samples must have exactly the keys costs, steps, "),
    ],
)
def test_broken_samples_are_refused_by_name(
    tmp_path: Path, key: str, value: object, says: str
) -> None:
    line = schedir.simulate(listed(1, "0", "0F0 0B0"))
    file = tmp_path / "costs.json"
    CostModel.fit([line]).save(file)
    content = json.loads(file.read_text())
    content["samples"][key] = value
    file.write_text(json.dumps(content))
    with pytest.raises(LoadError, match=rf"costs.json: {says}"):
        CostModel.load(file)


def test_a_sharded_list_fits_its_gathers_and_its_sums() -> None:
    built = schedir.build("interleaved-1f1b", ranks=2, microbatches=4, chunks=2)
    schedule = schedir.shard(built, limit=1, ahead=0)
    line = schedir.simulate(schedule, CostModel(unshard=5, reduce_grad=3))
    fitted = CostModel.fit([line])
    assert (fitted.unshard, fitted.reduce_grad) == ((5,) * 4, (3,) * 4)
    assert schedir.simulate(schedule, fitted).makespan == line.makespan
    band = schedir.forecast(schedule, CostModel.fit([line] * 6), draws=8)
    assert {*band.makespans} == {line.makespan}
