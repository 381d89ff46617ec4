"""R, the forward that runs again: the pass that lists it, and what lists with it come to."""

from __future__ import annotations

import random
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedir
from schedir import Action, Kind, Together
from schedir.ir import COMMUNICATION, Entry, dumps_torch_csv
from schedir.passes import forward_only, strip_communication
from tests.built_in import EVERY
from tests.joined import joined
from tests.literals import listed
from tests.oracle import happens
from tests.test_random import drawn, scattered

HALVES = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


def again(entries: Iterable[Entry], stages: set[int]) -> list[Entry]:
    """A rank's list with its Rs, made entry by entry."""
    entries = list(entries)
    flat = [a for e in entries for a in (e.actions if isinstance(e, Together) else (e,))]
    found: list[Entry] = []
    for entry in entries:
        for action in entry.actions if isinstance(entry, Together) else (entry,):
            r = Action(Kind.RECOMPUTE, action.stage, action.microbatch or 0)
            if action.kind in HALVES and action.stage in stages and r not in flat:
                found.append(r)
        found.append(entry)
    return found


@given(st.integers(0, 1 << 32))
def test_each_r_stands_right_before_its_backward(seed: int) -> None:
    """Of every shape, compute alone and complete, some with Rs of their own and with pairs."""
    chance = random.Random(seed)
    base = drawn(chance)
    if chance.random() < 0.5:
        base = scattered(schedir.insert_communication(base), chance)
    if chance.random() < 0.5:
        base = joined(base, chance)
    stages = {s for s in range(base.stages) if chance.random() < 0.6}
    after = schedir.recompute(base, stages)
    wanted = attrs.evolve(base, actions=[again(entries, stages) for entries in base.actions])
    with suppress(schedir.UnsoundError):
        if schedir.insert_communication(strip_communication(base)) == base:
            wanted = schedir.insert_communication(strip_communication(wanted))
    assert after.actions == wanted.actions
    assert schedir.recompute(after, stages) == after
    before, report = schedir.check(base), schedir.check(after)
    assert set(before.clean_channels) <= set(report.clean_channels)
    assert report.ok == before.ok
    for channel in report.clean_channels[:1]:
        assert happens(report.schedule or after, channel, seed) == "completes"


@pytest.mark.parametrize("name", EVERY)
def test_built_in_schedules_run_again(name: str) -> None:
    built = schedir.build(name, ranks=4, microbatches=8)
    all_again = schedir.recompute(built, range(built.stages))
    report = schedir.check(all_again)
    plain_report = schedir.check(built)
    assert report.clean_channels == plain_report.clean_channels
    assert {d.code for d in report.diagnostics} <= {d.code for d in plain_report.diagnostics}
    assert sum(a.kind is Kind.RECOMPUTE for own in all_again.flat for a in own) == (
        built.stages * built.microbatches
    )
    # At most the one whose backward runs holds its activation; a split backward holds it to its W.
    split = any(a.kind is Kind.BACKWARD_INPUT for own in built.flat for a in own)
    line, plain = schedir.simulate(all_again), schedir.simulate(built)
    for rank, before in zip(line.ranks, plain.ranks, strict=True):
        assert rank.peak_activations <= before.peak_activations
        assert split or rank.peak_activations == 1
    assert line.makespan >= plain.makespan
    assert schedir.simulate(all_again, schedir.CostModel(recompute=0)).makespan == plain.makespan
    # The text form, and what has no R.
    assert schedir.loads(schedir.dumps(all_again)) == all_again
    forwards, plain_forwards = map(forward_only, (all_again, built))
    assert strip_communication(forwards) == strip_communication(plain_forwards)
    assert strip_communication(all_again).flat == tuple(
        tuple(a for a in own if a.kind not in COMMUNICATION) for own in all_again.flat
    )


def test_the_lines_of_python_are_those_of_the_backwards() -> None:
    built = schedir.build("1f1b", ranks=2, microbatches=2)
    after = strip_communication(schedir.recompute(built, [0]))
    for index, action in enumerate(after.flat[0]):
        if action.kind is Kind.RECOMPUTE:
            assert after.source_of(0, index) == after.source_of(0, index + 1)
    assert after.source_of(0, 0) == built.source_of(0, 0)


@pytest.mark.parametrize(
    ("stages", "error", "said"),
    [
        (True, TypeError, "collection of stage numbers, not True"),
        ("01", TypeError, "collection of stage numbers, not '01'"),
        ([2], ValueError, "has no stage 2 to recompute, only 0..1"),
        ([True], ValueError, "has no stage True"),
        ([-1], ValueError, "has no stage -1"),
    ],
)
def test_what_is_no_stage(stages: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        schedir.recompute(schedir.build("1f1b", ranks=2, microbatches=2), stages)
    with pytest.raises(TypeError, match="Schedule"):
        schedir.recompute("1f1b", [0])  # type: ignore[arg-type]


def test_it_fills_a_bubble_where_it_is_listed_early() -> None:
    """Rank 0 waits for the gradient until 4: R1 costs nothing there, but an activation."""
    costs = schedir.CostModel(backward=(2, 1))
    ranks = "0F0 0F1 {} 0B1", "1F0 1F1 1B0 1B1"
    late, early = (
        schedir.simulate(listed(2, "0 1", ranks[0].format(middle), ranks[1]), costs)
        for middle in ("0R0 0B0 0R1", "0R0 0R1 0B0")
    )
    assert (late.makespan, early.makespan) == (9, 8)
    assert (late.ranks[0].peak_activations, early.ranks[0].peak_activations) == (1, 2)
    slow = attrs.evolve(costs, recompute=(3, 0))  # R1 from 5 to 8
    assert schedir.simulate(early.schedule, slow).makespan == 12


def test_the_version_stays_until_it_is_run_again() -> None:
    """R reads the version of its F, so that is kept for it, though an OPTIM_STEP lies between."""
    own = listed(2, "0", "0F0 0F1 0B0 0OPTIM_STEP 0R1 0B1 0OPTIM_STEP")
    assert schedir.simulate(own).ranks[0].weight_versions == 2
    assert schedir.check(listed(2, "0", "0F0 0F1 0B0 0OPTIM_STEP 0R1@0 0B1 0OPTIM_STEP")).ok


def test_torch_has_none() -> None:
    _, lost = dumps_torch_csv(listed(1, "0", "0F0 0R0@0 0B0"))
    assert lost == ["0R0@0 is left out: torch has no R"]


def test_it_is_no_part_of_an_overlapped_pair() -> None:
    with pytest.raises(ValueError, match="0R0 runs alone"):
        schedir.together(schedir.recompute_forward(0, 0), schedir.backward(0, 1))
