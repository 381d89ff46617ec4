"""A new kind of action is a row: three of them, known to nothing but the two tables.

The sets of kinds are made at import, so a process of its own imports a copy of schedir in which
`schedir/ir/kinds.py` has the rows. It runs the scripts below.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import schedir

KINDS = """
    CHECK = Meaning(
        "CHECK",
        "check of the activation",
        "compute",
        (_read("saved"), _make("digest", at="end")),
        cost=3,
    )
    LOG = Meaning(
        "LOG",
        "copy of the digest to the host",
        "copy",
        (_end("digest"), _make("logged", at="end")),
        letter="^",
    )
    SYNC = Meaning(
        "SYNC", "agreement of the ranks", "group", (_read("weights", "newest"),), stage_wide=True
    )
    REMAKE = Meaning(
        "REMAKE",
        "other recomputation",
        "compute",
        (_end("kept"), _make("saved")),
        letter="M",
    )
    SEND_ACT = Meaning("""
VALUES = """VALUES = {
    "digest": Value(word="digest", size="input"),
    "logged": Value(word="digest on the host", size="input", host=True, ended="never"),
"""


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of schedir that has the rows."""
    folder, kept = tmp_path_factory.mktemp("patched"), Path(schedir.__file__).parents[1]
    for package in ("schedir", "schedules"):
        shutil.copytree(
            kept / package, folder / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    table = folder / "schedir/ir/kinds.py"
    source = table.read_text(encoding="utf-8")
    for old, new in (("    SEND_ACT = Meaning(", KINDS), ("VALUES = {\n", VALUES)):
        assert source.count(old) == 1
        source = source.replace(old, new)
    table.write_text(source, encoding="utf-8")
    return folder


SCRIPTS = {
    "the search leaves them out": """
        found = schedir.search(ranks=2, microbatches=4, max_activations=1, recompute=True)
        assert schedir.check(found).ok
        kinds = {str(action.kind) for row in found.flat for action in row}
        assert not kinds & {"CHECK", "LOG", "SYNC", "REMAKE"}, kinds
        assert schedir.search(2, 4, costs=schedir.CostModel(check=7)) == schedir.search(
            2, 4
        )
    """,
    "they are checked": """
        assert schedir.check(listed).ok, schedir.check(listed)
        assert schedir.loads(schedir.dumps(listed)) == listed
        wrong = of("0CHECK0 0F0 0B0 0F1 0LOG1 0B1 0SYNC 0OPTIM_STEP")
        codes = {each.code for each in schedir.check(wrong).diagnostics}
        assert {"S201", "S218"} <= codes, codes
    """,
    "they are simulated": """
        # F 0-1, CHECK 1-4, B 4-6 twice: the copies beside them are free.
        line = schedir.simulate(listed)
        assert line.makespan == 12, line.makespan
        line = schedir.simulate(listed, schedir.CostModel(check=1.5, sync=2))
        assert line.makespan == 11, line.makespan
        assert schedir.CostModel(forward=(2,)).by_stage("check", 1) == (6,)
        try:
            schedir.CostModel(check=-1)
        except ValueError as error:
            assert "check must be finite" in str(error)
        else:
            raise AssertionError("a cost below 0 is refused")
    """,
    "a copy takes as long as its bytes, which are kept": """
        pipeline = schedir.Schedule.of(
            "two stages",
            [0, 1],
            [
                "0F0 0CHECK0 0LOG0 0SEND_ACT0 0RECV_GRAD0 0B0 0OPTIM_STEP",
                "1RECV_ACT0 1F0 1B0 1SEND_GRAD0 1OPTIM_STEP",
            ],
        )
        costs = schedir.CostModel(input_bytes=8, activation_bytes=100, host_bandwidth=2)
        line = schedir.simulate(pipeline, costs)
        spans = {str(span.action): span for span in line.spans[0]}
        copy = spans["0LOG0"]
        assert copy.end - copy.start == 4, copy
        assert line.host_memory(0)[1].tolist() == [0, 8]
        held = dict(zip(*(column.tolist() for column in line.memory(0)), strict=True))
        # The activation, and the digest until it is copied.
        assert held == {0: 100, 4: 108, 8: 100, 9: 0}, held
    """,
    "costs are fitted from their own timeline, and forecast": """
        given = schedir.CostModel(
            forward=2, backward=5, check=1.5, sync=0.5, input_bytes=4, host_bandwidth=2, unit="s"
        )
        import attrs

        def steps(schedule):
            line = schedir.simulate(schedule, given)
            measured = map(schedir.simulator.Measured, range(7))
            return [attrs.evolve(line, measured=each) for each in measured]

        line = steps(listed)[0]
        fitted = schedir.CostModel.fit(steps(listed))
        assert (fitted.check, fitted.sync) == ((1.5,), (0.5,)), fitted
        assert schedir.simulate(listed, fitted).makespan == line.makespan
        band = schedir.forecast(listed, fitted, draws=5)
        assert abs(band.mean - line.makespan) < 1e-9, band
        assert schedir.simulator.unmeasured(listed, fitted) == ()
        plain = of("0F0 0B0 0F1 0B1 0OPTIM_STEP")
        unseen = schedir.CostModel.fit(steps(plain))
        assert unseen.check is None and unseen.sync is None
        names = schedir.simulator.unmeasured(listed, unseen)
        assert names == ("check", "sync", "host_bandwidth"), names
        said = schedir.simulator.how_derived(names)
        assert said == (
            "check (3 forwards), sync (free, or as at other stages), "
            "host_bandwidth (copies are free)"
        ), said
        assert schedir.forecast(listed, unseen, draws=2).mean > 0
    """,
    "files and the command line have their costs": """
        costs = schedir.CostModel(check=(1.5,), sync=2)
        costs.save("costs.json")
        assert schedir.CostModel.load("costs.json") == costs
        open("listed.sched", "w").write(schedir.dumps(listed))
        from schedir.cli import main

        assert main(["show", "listed.sched", "--cost", "check=1.5", "--cost", "sync=2"]) == 0
        assert main(["show", "listed.sched", "--costs", "costs.json", "--json"]) == 0
        assert main(["compare", "listed.sched", "--cost", "check=9"]) == 0
        assert schedir.simulator.recut(schedir.CostModel(check=(1, 2)), 1, of=2).check == (3,)
    """,
    "every output draws them": """
        from schedir.cli.export import listed as listed_in
        from schedir.render import timeline_text
        from schedir.simulator import CostModel

        line = schedir.simulate(listed, CostModel(sync=2, input_bytes=4, host_bandwidth=2))
        drawn = timeline_text(line)
        assert "C check of the activation" in drawn and "C0" in drawn, drawn
        assert "^ copy of the digest to the host" in drawn and "^0" in drawn, drawn
        assert "C check of the activation" in line.svg()
        assert "#bcbcbc" in line.svg()  # neutral: the palette has no other
        for text in (line.html(), line.perfetto()):
            assert "CHECK" in text and "LOG" in text and "SYNC" in text
        from schedir.render.html import data_before

        # On a page, the CHECK of a microbatch is shown after its F, its LOG after that.
        before = data_before(listed).tolist()
        assert before == [-1, 0, 1, 0, -1, 4, 5, 4, -1, -1], before
        written = listed_in(listed, "torch-csv")
        left_out = [*written.left_out]
        assert written.content.splitlines()[0] == "0F0,0B0,0F1,0B1", written.content
        assert any("torch has no CHECK" in each for each in left_out), left_out
        assert any("torch has no SYNC" in each for each in left_out), left_out
    """,
    "the executor says that it has no function for them": """
        from schedir.errors import ExecutionError
        from schedir.runtime.program.compiler import expect_carried_out

        for listing in ("0F0 0CHECK0 0LOG0 0B0 0OPTIM_STEP", "0F0 0B0 0SYNC 0OPTIM_STEP"):
            try:
                expect_carried_out(of(listing))
            except ExecutionError as error:
                assert "does not carry out" in str(error), error
            else:
                raise AssertionError("a kind without a function is refused")
    """,
}
SHARED = """
import schedir


def of(actions):
    return schedir.Schedule.of("listed", [0], [actions])


listed = of("0F0 0CHECK0 0LOG0 0B0 0F1 0CHECK1 0LOG1 0B1 0SYNC 0OPTIM_STEP")
"""


EACH = """
import json
import sys
import traceback

failed = 0
for what, script in json.load(sys.stdin).items():
    try:
        exec(script, {})
    except Exception:
        failed += 1
        print(what, traceback.format_exc(), sep=":\\n", file=sys.stderr)
sys.exit(failed)
"""


def test_a_new_row_is_left_out_nowhere(patched: Path) -> None:
    scripts = {what: SHARED + textwrap.dedent(script) for what, script in SCRIPTS.items()}
    done = subprocess.run(
        [sys.executable, "-c", EACH],
        cwd=patched,
        env=os.environ | {"PYTHONPATH": str(patched)},
        input=json.dumps(scripts),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
