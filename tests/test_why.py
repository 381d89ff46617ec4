"""Why ranks are idle, as it is said.

`pytest tests/test_why.py --update-golden` writes the texts in tests/golden/why anew; read the
difference before you commit it.
"""

from __future__ import annotations

import math
import re

import pytest

import schedir
from schedir import CostModel, Timeline
from schedir.cli import main
from schedir.render.text import plain
from schedir.render.why import why_blocks
from schedir.simulator import Measured
from schedir.simulator.timeline import path_times
from tests.literals import SHORT, listed
from tests.test_golden import GOLDEN, compare
from tests.timelines import simulated


def why(line: Timeline, width: int | None = None, against: Timeline | None = None) -> str:
    return plain(why_blocks(line, width, against))


TWICE = CostModel(forward=(1, 1, 2, 1, 1, 1, 1, 1), backward=(2, 2, 4, 2, 2, 2, 2, 2))
"""Stage 2, and so rank 2, takes twice as long."""
STARTS, ENDS = [0.5, 2, 7, 8.5, 2, 3, 4.5, 7], [2, 2.5, 8, 10, 2.5, 4.5, 7, 8]
LINES = {
    "transfers": lambda: simulated("1f1b", 4, 8, CostModel(latency=0.5)),
    "slower_stage": lambda: simulated("interleaved-1f1b", 4, 16, TWICE),
    "measured": lambda: Timeline(SHORT, STARTS, ENDS, unit="s", measured=Measured(3, 1e-4)),
}


@pytest.mark.parametrize("name", LINES)
def test_all_that_is_said(name: str, request: pytest.FixtureRequest) -> None:
    compare(GOLDEN / "why" / f"{name}.txt", why(LINES[name]()), request)


def test_what_else_is_said_of_a_wait() -> None:
    #   rank 0   0F0  0F1
    #   channel       0SEND_ACT0---- 0SEND_ACT1----
    #   rank 1                                     1F1  1F0
    lists = "0F0 0SEND_ACT0 0F1 0SEND_ACT1", "1RECV_ACT0 1RECV_ACT1 1F1 1F0"
    starts, ends = [0, 1, 1, 4, 1, 4, 7, 8], [1, 4, 2, 7, 4, 7, 8, 9]
    text = why(Timeline(listed(2, "0 1", *lists), starts, ends))
    said = "communication: 1F1 waits for 0SEND_ACT0 on rank 0, with which its channel is busy"
    assert f"   1  2..4     2  {said}\n" in text
    lists = "0F0 0B0 0REDUCE_GRAD 0OPTIM_STEP", "0F1 0B1 0F2 0B2 0REDUCE_GRAD"
    line = schedir.simulate(
        listed(3, "0,1", lists[0], lists[1] + " 0OPTIM_STEP"), CostModel(reduce_grad=1)
    )
    assert "   0  6..7     1  sum of gradients: 0OPTIM_STEP waits for 0REDUCE_GRAD\n" in why(line)
    assert "sums of gradients 1 (14.3%)" in why(line)


def test_a_pair_is_named_as_one() -> None:
    #   time    0    1    2    3    4    5    6    7
    #   rank 0  0F0------ 0F1------           0B0-- ...
    #   rank 1                 1F0       (1F1;1B0)---- 1B1
    lists = "0F0 0F1 0B0 0B1", "1F0 (1F1;1B0) 1B1"
    costs = CostModel(forward=(2, 1), latency=1)
    text = why(schedir.simulate(schedir.Schedule.of("x", [0, 1], lists), costs))
    assert "communication: (1F1;1B0) waits for 0SEND_ACT1 on rank 0\n" in text


def test_on_a_narrow_screen_shares_alone() -> None:
    narrow = why(LINES["transfers"](), width=80)
    assert "   0  41.5%   20.7%              2.4%           8.5%   9.8%\n" in narrow
    assert max(map(len, narrow.splitlines())) <= 82  # a terminal folds the header


def test_many_stages_are_shown_in_short() -> None:
    assert "\n4 others  " in why(simulated("1f1b", 16, 256, CostModel(latency=1)))


@pytest.mark.parametrize("latency", [0, 0.3])
def test_the_parts_of_the_path_are_the_makespan(latency: float) -> None:
    costs = CostModel(latency=latency, optim_step=0.5)
    line = simulated("interleaved-1f1b", 3, 7, costs)
    assert path_times(line).sum() == pytest.approx(line.makespan)
    rows = re.findall(r"^ +\d +\d  +([\d.]+) ", why(line), re.MULTILINE)
    assert f"\ncritical path: compute {sum(map(float, rows)):g} (" in why(line)


def test_nothing_to_say() -> None:
    alone = simulated("1f1b", 1, 8)
    assert "\n\nNo rank is ever idle.\n\ncritical path: compute 24 (100.0%)\n" in why(alone)
    nan = math.nan
    nothing = Timeline(SHORT, [nan] * 8, [nan] * 8)
    assert why(nothing).endswith("Nothing takes any time.\n")
    little = Timeline(SHORT, [nan] * 8, [nan, nan, nan, 10, *[nan] * 4])
    assert "   1  10 (100.0%)    10 (100.0%)\n" in why(little)


def test_two_timelines_one_after_the_other() -> None:
    line = simulated("1f1b", 2, 2)
    measured = Timeline(
        line.schedule, line.starts * 1.5, line.ends * 1.5, unit="s", measured=Measured(0)
    )
    text = why(line, against=measured)
    assert text.startswith("predicted: 1f1b: 2 ranks, 2 stages, 2 microbatches\nmakespan 9 s,")
    assert "\n\nmeasured, step 0: 1f1b: 2 ranks, 2 stages, 2 microbatches\nmakespan 13.5 s," in text


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["show", "1f1b", "--why", "--cost", "latency=0.5"]
    assert main(arguments) == 0
    assert capsys.readouterr().out == why(LINES["transfers"]())
    for option in ("--full", "--actions", "--compute-only"):
        with pytest.raises(SystemExit):
            main(["show", "1f1b", "--why", option])
        assert f"--why draws nothing: leave out {option}" in capsys.readouterr().err
