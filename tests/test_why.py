"""Why ranks are idle, as it is said."""

from __future__ import annotations

import math

import pytest

import schedir
from schedir import CostModel, Timeline
from schedir.cli import main
from schedir.render import Page, outputs_of
from schedir.render.text import plain
from schedir.render.why import CriticalPath
from schedir.simulator import Measured
from tests.literals import listed

LATENCY = """\
1f1b: 4 ranks, 4 stages, 8 microbatches
makespan 41, bubble 41.5%

rank        idle       warmup  waiting for data  communication       drain  nothing left to do
   0  17 (41.5%)  8.5 (20.7%)          1 (2.4%)     3.5 (8.5%)    4 (9.8%)
   1  17 (41.5%)  6.5 (15.9%)        1.5 (3.7%)     3.5 (8.5%)    3 (7.3%)          2.5 (6.1%)
   2  17 (41.5%)    5 (12.2%)          2 (4.9%)     3.5 (8.5%)  1.5 (3.7%)           5 (12.2%)
   3  17 (41.5%)     4 (9.8%)        2.5 (6.1%)       3 (7.3%)                     7.5 (18.3%)
 all  68 (41.5%)   24 (14.6%)          7 (4.3%)    13.5 (8.2%)  8.5 (5.2%)           15 (9.1%)

warmup            the pipeline fills, until the rank's first backward
waiting for data  another rank still computes what the rank needs
communication     what the rank needs is still being sent
drain             the pipeline empties, after the rank's last forward

the longest waits
rank  time     long  why
   0  4..12.5   8.5  warmup: 0B0 waits for 1B0 on rank 1
   1  4.5..10   5.5  warmup: 1B0 waits for 2B0 on rank 2
   3  0..4        4  warmup: 3F0 waits for 2F0 on rank 2
   2  0..2.5    2.5  warmup: 2F0 waits for 1F0 on rank 1
   2  5..7.5    2.5  warmup: 2B0 waits for 3B0 on rank 3

critical path: compute 33 (80.5%), transfers 8 (19.5%)
stage  rank    compute  transfers from it
    0     0  6 (14.6%)           1 (2.4%)
    1     1  9 (22.0%)         2.5 (6.1%)
    2     2  9 (22.0%)           3 (7.3%)
    3     3  9 (22.0%)         1.5 (3.7%)

time        long  compute  critical path
0..5.5       5.5        4  ranks 0 to 3: 0F0 → 1F0 → 2F0 → 3F0
5.5..15      9.5        8  ranks 3 to 0: 3B0 → 2B0 → 1B0 → 0B0
15..20.5     5.5        4  ranks 0 to 3: 0F4 → 1F4 → 2F4 → 3F4
20.5..27.5     7        6  ranks 3 to 1: 3B4 → 2B4 → 1B4
27.5..31.5     4        3  ranks 1 to 3: 1F7 → 2F7 → 3F7
31.5..41     9.5        8  ranks 3 to 0: 3B7 → 2B7 → 1B7 → 0B7
"""

# Stage 2, and so rank 2, takes twice as long.
SLOWER = """\
interleaved-1f1b: 4 ranks, 8 stages, 16 microbatches
makespan 151, bubble 28.5%

rank         idle     warmup  slower stage  waiting for data  nothing left to do
   0   55 (36.4%)   5 (3.3%)    49 (32.5%)          1 (0.7%)
   1   55 (36.4%)   5 (3.3%)    48 (31.8%)                              2 (1.3%)
   2     7 (4.6%)   3 (2.0%)                                            4 (2.6%)
   3   55 (36.4%)   5 (3.3%)    36 (23.8%)                             14 (9.3%)
 all  172 (28.5%)  18 (3.0%)   133 (22.0%)          1 (0.2%)           20 (3.3%)

warmup            the pipeline fills, until the rank's first backward
slower stage      a stage with more work delays what the rank needs
waiting for data  another rank still computes what the rank needs

slower: rank 2 (stages 2, 6) costs the others 133 (22.0%)

the longest waits
rank  time    long  why
   3  0..4       4  warmup: 3F0 waits for 2F0 on rank 2
   0  15..18     3  warmup: 4B0 waits for 5B0 on rank 1
   0  32..35     3  slower stage: 0B0 waits for 1B0 on rank 1, held up by 2B0 on rank 2
   0  38..41     3  slower stage: 0B1 waits for 1B1 on rank 1, held up by 2B1 on rank 2
   0  68..71     3  slower stage: 0B4 waits for 1B4 on rank 1, held up by 2B4 on rank 2

critical path: compute 151 (100.0%)
stage  rank     compute  transfers from it
    0     0    3 (2.0%)
    1     1    3 (2.0%)
    2     2  96 (63.6%)
    3     3    1 (0.7%)
    6     2  45 (29.8%)
    7     3    3 (2.0%)

time      long  compute  critical path
0..4         4        4  ranks 0 to 2: 0F0 → 1F0 → 2F0
4..10        6        6  rank 2: 2F1 2F2 2F3
10..14       4        4  rank 3: 3F3 7F0 7B0
14..147    133      133  rank 2: 6B0 6F3 6B1 … 2B14 2B15 (57 entries)
147..151     4        4  ranks 1 to 0: 1B15 → 0B15
"""

MEASURED = """\
x: 2 ranks, 2 stages, 1 microbatch
makespan 10 s, bubble 65.0% (63.2% of the longest span), measured at step 3

rank    idle (s)     warmup  communication    overhead  nothing left to do
   0   7 (70.0%)  5 (50.0%)      1 (10.0%)   1 (10.0%)
   1   6 (60.0%)  2 (20.0%)     0.5 (5.0%)  0.5 (5.0%)           3 (30.0%)
 all  13 (65.0%)  7 (35.0%)     1.5 (7.5%)  1.5 (7.5%)           3 (15.0%)

warmup         the pipeline fills, until the rank's first backward
communication  what the rank needs is still being sent
overhead       the rank has all that it needs, and has not started yet

the longest waits
rank  time (s)  long  why
   0  2..7         5  warmup: 0B0 waits for 1B0 on rank 1
   1  0..2         2  warmup: 1F0 waits for 0F0 on rank 0
   0  7..8         1  communication: 0B0 waits for 1SEND_GRAD0 on rank 1
   0  0..0.5     0.5  overhead: 0F0 has all that it needs
   0  8..8.5     0.5  overhead: 0B0 has all that it needs

critical path: compute 7 (70.0%), transfers 1.5 (15.0%), between entries 1.5 (15.0%)
stage  rank  compute (s)  transfers from it
    0     0    3 (30.0%)         0.5 (5.0%)
    1     1    4 (40.0%)          1 (10.0%)

time     long  compute  critical path
0..4.5    4.5        3  ranks 0 to 1: 0F0 → 1F0
4.5..10   5.5        4  ranks 1 to 0: 1B0 → 0B0
"""


def why(line: Timeline, width: int | None = None, against: Timeline | None = None) -> str:
    written = outputs_of("show")["why"].write(line, Page(width=width, against=against))
    return plain(written.blocks)


def test_waits_for_transfers() -> None:
    line = schedir.simulate(schedir.build("1f1b", ranks=4, microbatches=8), CostModel(latency=0.5))
    assert why(line) == LATENCY


def test_a_slower_stage() -> None:
    costs = CostModel(forward=(1, 1, 2, 1, 1, 1, 1, 1), backward=(2, 2, 4, 2, 2, 2, 2, 2))
    schedule = schedir.build("interleaved-1f1b", ranks=4, microbatches=16)
    assert why(schedir.simulate(schedule, costs)) == SLOWER


SHORT = listed(
    1, "0 1", "0F0 0SEND_ACT0 0RECV_GRAD0 0B0", "1RECV_ACT0 1F0 1B0 1SEND_GRAD0", name="x"
)


def test_a_measured_run() -> None:
    starts, ends = [0.5, 2, 7, 8.5, 2, 3, 4.5, 7], [2, 2.5, 8, 10, 2.5, 4.5, 7, 8]
    line = Timeline(SHORT, starts, ends, unit="s", measured=Measured(3, 1e-4))
    assert why(line) == MEASURED


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
    assert "  rank 1: (1F1;1B0)\n" in text


def test_on_a_narrow_screen_shares_alone() -> None:
    line = schedir.simulate(schedir.build("1f1b", ranks=4, microbatches=8), CostModel(latency=0.5))
    narrow = why(line, width=80)
    assert "   0  41.5%   20.7%              2.4%           8.5%   9.8%\n" in narrow
    assert max(map(len, narrow.splitlines())) <= 82  # a terminal folds the header


def test_long_paths_and_many_stages_are_shown_in_short() -> None:
    line = schedir.simulate(schedir.build("1f1b", ranks=16, microbatches=256), CostModel(latency=1))
    text = why(line)
    assert "\n4 others  " in text
    assert " more stretches\n" in text
    path = text[text.index("critical path\n") :]
    assert len(path.splitlines()) == 1 + 20 + 1


@pytest.mark.parametrize("latency", [0, 0.3])
def test_the_parts_of_the_path_are_the_makespan(latency: float) -> None:
    costs = CostModel(latency=latency, optim_step=0.5)
    line = schedir.simulate(schedir.build("interleaved-1f1b", ranks=3, microbatches=7), costs)
    path = CriticalPath.of(line)
    assert sum(path.by_kind().values()) == pytest.approx(line.makespan)
    stages = path.by_stage()
    assert sum(row[2] for row in stages) == pytest.approx(path.by_kind()["compute"])
    assert sum(row[3] for row in stages) == pytest.approx(path.by_kind()["transfers"])
    stretches = path.stretches()
    assert sum(one.end - one.start for one in stretches) == pytest.approx(line.makespan)
    assert stretches[0].start == 0


def test_nothing_to_say() -> None:
    alone = schedir.simulate(schedir.build("1f1b", ranks=1))
    assert "\n\nNo rank is ever idle.\n\ncritical path: compute 24 (100.0%)\n" in why(alone)
    nan = math.nan
    nothing = Timeline(SHORT, [nan] * 8, [nan] * 8)
    assert why(nothing).endswith("Nothing takes any time.\n")
    little = Timeline(SHORT, [nan] * 8, [nan, nan, nan, 10, *[nan] * 4])
    assert "   1  10 (100.0%)    10 (100.0%)\n" in why(little)


def test_two_timelines_one_after_the_other() -> None:
    line = schedir.simulate(schedir.build("1f1b", ranks=2, microbatches=2))
    measured = Timeline(
        line.schedule, line.starts * 1.5, line.ends * 1.5, unit="s", measured=Measured(0)
    )
    text = why(line, against=measured)
    assert text.startswith("predicted: 1f1b: 2 ranks, 2 stages, 2 microbatches\nmakespan 9 s,")
    assert "\n\nmeasured, step 0: 1f1b: 2 ranks, 2 stages, 2 microbatches\nmakespan 13.5 s," in text


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["show", "1f1b", "--why", "--cost", "latency=0.5"]
    assert main(arguments) == 0
    assert capsys.readouterr().out == LATENCY
    for option in ("--full", "--json", "--actions", "--compute-only"):
        with pytest.raises(SystemExit):
            main(["show", "1f1b", "--why", option])
        assert "--why draws nothing: leave out" in capsys.readouterr().err
