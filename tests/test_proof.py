"""One door to a complete schedule: what has been proved, and that nothing is proved twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

import schedir
from schedir import ScheduleError
from schedir.checker import prove, run
from schedir.ir import Schedule
from schedir.library import load
from tests.built_in import EVERY
from tests.literals import listed

# Rank 1 posts the receive of microbatch 1 late: that blocks under `pair` and what is stricter.
CROSSED = listed(
    2,
    "0 1",
    "0F0 0SEND_ACT0 0F1 0SEND_ACT1 0RECV_GRAD0 0B0 0RECV_GRAD1 0B1 0OPTIM_STEP",
    "1RECV_ACT0 1F0 1B0 1SEND_GRAD0 1RECV_ACT1 1F1 1B1 1SEND_GRAD1 1OPTIM_STEP",
)
# It would run, but the gradient of microbatch 1 is never applied.
STEPS_EARLY = listed(2, "0", "0F0 0B0 0OPTIM_STEP 0F1 0B1")
# The replicas of two stages sum them in different order: that blocks under `rank`, as no stage's
# sum waits for another stage's on gloo.
CROSSED_SUMS = listed(
    2,
    "0,1 0,1 2",
    "0F0 1F0 1B0 0B0 1REDUCE_GRAD 0REDUCE_GRAD",
    "0F1 1F1 1B1 0B1 0REDUCE_GRAD 1REDUCE_GRAD",
    "2F0 2B0 2F1 2B1",
)
CALLS = ("structure", "ordering", "insert_communication", "communication", "clean_channels")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each part of a proof is called from here on."""
    counted: Counter[str] = Counter()

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            counted[name] += 1
            return function(*arguments)

        return call

    for name in CALLS:
        monkeypatch.setattr(run, name, counting(name, getattr(run, name)))
    return counted


def again(schedule: Schedule) -> Schedule:
    """An equal schedule of which nothing is known."""
    return attrs.evolve(schedule)


@pytest.mark.parametrize("name", EVERY)
def test_the_schedule_of_a_report_is_the_complete_one(name: str) -> None:
    compute = load(name)
    complete = schedir.insert_communication(compute)
    assert schedir.check(compute).schedule == complete
    assert prove(compute).schedule == complete
    assert schedir.build(name) == complete
    assert schedir.check(complete).schedule is complete


def test_a_wrong_schedule_has_none() -> None:
    crossed = again(CROSSED)
    assert schedir.check(crossed, "edge").schedule is crossed
    report = schedir.check(crossed, "pair")
    assert report.schedule is None
    with pytest.raises(ScheduleError, match="S301") as error:
        report.proved()
    assert error.value.diagnostics == report.diagnostics
    assert prove(crossed, "pair").diagnostics == report.diagnostics


@pytest.mark.parametrize(
    ("crossed", "clean"),
    [(CROSSED, ("edge", "direction", "async")), (CROSSED_SUMS, schedir.CHANNELS[2:])],
    ids=["transfers", "sums"],
)
def test_what_does_not_run_on_nccl_is_built_and_simulated(
    crossed: Schedule, clean: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "crossed.sched"
    file.write_text(schedir.dumps(crossed))
    assert [d.code for d in schedir.check(crossed).errors] == ["S301"]
    built = schedir.build(file)
    assert built.is_complete
    assert schedir.check(built).clean_channels == clean
    assert schedir.simulate(built).schedule is built
    assert schedir.simulate(again(crossed)).schedule == built


def test_what_is_paired_rightly_under_direction_alone_is_proved_for_it_alone() -> None:
    """Rank 1 receives its gradient first, on a channel that carries the activation before it."""
    apart = listed(
        1,
        "0 1 0",
        "0F0 0SEND_ACT0 2RECV_ACT0 2F0 2B0 2SEND_GRAD0 0RECV_GRAD0 0B0",
        "1RECV_GRAD0 1RECV_ACT0 1F0 1SEND_ACT0 1B0 1SEND_GRAD0",
    )
    assert schedir.check(apart, "direction").clean_channels == ("direction",)
    assert schedir.simulate(apart, channel="direction").makespan == 9
    for channel in (None, *schedir.CHANNELS):
        if channel != "direction":
            with pytest.raises(ScheduleError, match="S303"):
                schedir.simulate(apart, channel=channel)


def test_what_would_run_but_is_wrong_is_not_simulated() -> None:
    with pytest.raises(ScheduleError, match="S204") as error:
        schedir.simulate(again(STEPS_EARLY))
    first, second = schedir.check(STEPS_EARLY), schedir.check(STEPS_EARLY)
    assert error.value.diagnostics == first.diagnostics
    assert first == second  # it is wrong every time
    assert not first.ok


def test_nothing_is_proved_twice(calls: Counter[str]) -> None:
    built = schedir.build("interleaved-1f1b")
    assert calls == dict.fromkeys(CALLS, 1)
    assert schedir.check(built).schedule is built
    for channel in schedir.CHANNELS:
        assert schedir.check(built, channel).ok
    assert schedir.simulate(built).schedule is built
    assert prove(built).schedule is built
    assert calls == dict.fromkeys(CALLS, 1)


def test_compute_alone_is_completed_once(calls: Counter[str]) -> None:
    compute = load("1f1b")
    line = schedir.simulate(compute)
    assert schedir.check(compute).schedule is line.schedule
    assert schedir.simulate(compute).schedule is line.schedule
    assert calls == dict.fromkeys(CALLS, 1)


def test_an_equal_schedule_is_proved_anew(calls: Counter[str]) -> None:
    built = schedir.build("1f1b")
    schedir.check(again(built))
    assert calls["structure"] == 2


def test_limits_are_looked_at_every_time(calls: Counter[str]) -> None:
    built = schedir.build("1f1b", ranks=2, microbatches=4)
    assert [d.code for d in schedir.check(built, max_activations=1).errors] == ["S405"]
    assert schedir.check(built).ok
    assert not schedir.check(built, max_activations=1).ok
    assert schedir.check(again(built), max_activations=1).schedule is None
    assert calls["structure"] == 2


def test_ties_are_proved_anew() -> None:
    # Alone each stage may step once its own gradient is there; tied, the first waits for both.
    schedule = listed(1, "0 0", "0F0 1F0 1B0 1OPTIM_STEP 0B0 0OPTIM_STEP")
    assert schedir.check(schedule).schedule is schedule
    report = schedir.check(schedule, ties=[(0, 1)])
    assert [error.code for error in report.errors] == ["S301"]
    assert report.schedule is None
    assert schedir.check(schedule).ok


@pytest.mark.parametrize("name", EVERY)
def test_what_is_known_changes_no_finding(name: str) -> None:
    built = schedir.build(name, microbatches=8)
    for channel in schedir.CHANNELS:
        assert schedir.check(built, channel) == schedir.check(again(built), channel)


def test_a_schedule_error_has_findings() -> None:
    with pytest.raises(ValueError, match="needs the findings"):
        ScheduleError("wrong", ())


def test_a_pass_refuses_what_is_unsound() -> None:
    with pytest.raises(schedir.UnsoundError, match="unknown stage"):
        schedir.insert_communication(listed(1, "0 1", "0F0 0B0", "1F0 2B0"))
    assert not issubclass(schedir.UnsoundError, ScheduleError)
    assert issubclass(schedir.UnsoundError, schedir.SchedirError)
