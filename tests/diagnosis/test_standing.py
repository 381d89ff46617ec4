"""Where the ranks of a job stood, written by the job and read by `schedir blame`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import schedir
from schedir import Position
from schedir.diagnosis.verdict import FILE, Standing, load_standing
from tests.command_line import Run

SCHEDULE = schedir.build("1f1b", ranks=3, microbatches=2)
STANDING = Standing(
    SCHEDULE,
    (
        Position(7, 5, "waiting", step=7),
        Position(7, 7, "waiting", step=7),
        Position(7, 1, "running", "gone", "killed by SIGKILL", step=7),
    ),
    (4, 5, 6),
    ((0, 2),),
    clips=True,
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert load_standing(str(tmp_path)) is None
    STANDING.save(tmp_path / "made")
    found = load_standing(str(tmp_path / "made"))
    assert found is not None
    assert found.diagnosis() == STANDING.diagnosis()
    assert (found.schedule, found.positions) == (SCHEDULE, STANDING.positions)
    found.save(tmp_path / "again")
    assert (tmp_path / "again" / FILE).read_bytes() == (tmp_path / "made" / FILE).read_bytes()


def test_a_rank_that_is_gone_is_the_root_in_all_slices() -> None:
    """Rank 2 of the other slice waits for it inside its stage, and so seems to run."""
    running = Position(7, 1, "running", step=7)
    places = (*STANDING.positions, *STANDING.positions[:2], running)
    both = Standing(SCHEDULE, places, (0, 2, 4, 1, 3, 5), slices=2)
    found = both.diagnosis()
    assert [(root.rank, root.cause) for root in found.roots] == [(4, "killed by SIGKILL")]
    assert found.chain == (0, 2, 4)
    assert found.waits_for[3] == {5}


def test_blame_names_the_root(run: Run, tmp_path: Path) -> None:
    STANDING.save(tmp_path)
    out = run.prints("blame", str(tmp_path))
    assert out.splitlines() == [
        "root: rank 6 step 7 #1 2F0: killed by SIGKILL",
        "rank 4 waits at step 7 #5 0B0 for rank 5",
        "rank 5 waits at step 7 #7 1B0 for rank 6",
        "chain: 4 → 5 → 6",
    ]
    found = json.loads(run.prints("blame", str(tmp_path), "--json"))
    root = {"rank": 6, "reason": "killed by SIGKILL", "action": "#1 2F0", "step": 7}
    assert found["roots"] == [root | {"waited_for_by": [5], "operation": None}]
    assert [each["rank"] for each in found["waiting"]] == [4, 5]
    assert (found["chain"], found["missing_dumps"]) == ([4, 5, 6], [])


def test_nobody_is_named_where_nobody_waits(run: Run, tmp_path: Path) -> None:
    at = tuple(Position(0, 0, "outside") for _ in range(3))
    Standing(SCHEDULE, at, (0, 1, 2)).save(tmp_path)
    code, out, _ = run("blame", str(tmp_path))
    assert code == 1
    assert out.splitlines()[0] == "No rank is seen to wait for another one."


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"schedule": "schedir 1"}', '{"positions": [[0], [0], [0]]}', "one too few"],
)
def test_a_damaged_file_is_refused(run: Run, tmp_path: Path, text: str) -> None:
    if text == "one too few":
        STANDING.save(tmp_path)
        found = json.loads((tmp_path / FILE).read_text())
        text = json.dumps(found | {"positions": found["positions"][:-1]})
    (tmp_path / FILE).write_text(text)
    err = run.refuses("blame", str(tmp_path))
    assert f"{FILE}: not the positions of a job" in err
