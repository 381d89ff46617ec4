"""The examples about schedules and about transformers, and what their texts print."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from statistics import median
from xml.etree import ElementTree

import pytest
from curves import Curve, load, picture

import schedir
from tests.pages import DOCS, blocks
from tests.runtime.on_ranks import on_ranks
from tests.sweeps import sweep
from tests.training.test_examples import Run

TUTORIAL = DOCS / "tutorials" / "write-a-schedule.md"
FIRST_TRY = next(b.text for b in blocks(TUTORIAL) if b.saved_as == "first_try.py")
OWN = {
    "first_try": FIRST_TRY,
    "both_ways": FIRST_TRY.replace("in (down, up)", "in pipe.stages_of(rank)"),
}
SMALL = "--layers 2 --width 16 --heads 2 --context 16"
NUMBER = r"  +([\d.-]+)"
ROW = rf"^([a-z0-9 -]+?){NUMBER}  +[\d.]+ to [\d.]+{NUMBER}  +[\d.]+{NUMBER}{NUMBER}{NUMBER}$"
EQUAL = r"all {} losses and \d+ tensors equal, bit for bit$"


@pytest.mark.parametrize("name", OWN)
@on_ranks(2)
def test_a_schedule_of_ones_own_trains(
    name: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where it writes its page
    Path("own.py").write_text(OWN[name])
    if out := run(f"train_gpt.py {SMALL} --schedule own.py --batch 9 --steps 3 --dropout 0.1"):
        assert "tensors equal, bit for bit" in out


@on_ranks(3)
@sweep("flush", ["true", "false"], quick=["true"])
def test_replicas_that_take_turns_equal_one_process(flush: str, run: Run) -> None:
    options = f"--layers 3 --batch 7 --microbatches 5 --steps 3 --set flush={flush}"
    if out := run(f"train_round_robin.py {SMALL} {options}"):
        assert re.search("^stage 0: .* block0 to block1 .*; 10,912 parameters$", out, re.MULTILINE)
        assert re.search(r"^rank 1 stage 0  F1--- F3---", out, re.MULTILINE)
        assert re.search(EQUAL.format(3), out, re.MULTILINE)


@on_ranks(2)
def test_pipedream_is_compared_and_equals_its_recurrence(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where it draws
    options = "--batch 8 --batches 2 --seconds 1000 --rounds 3 --test-rows 8 --until 5.5"
    if not (out := run(f"compare_pipedream.py {SMALL} {options}")):
        return
    shown, _, verified = out.partition("verify:")
    for calls in (24, 6, 6, 3, 3):  # in three turns of 8 microbatches, 2 batches or 1 segment
        _, found, verified = verified.partition(f"all {calls} losses and ")
        assert found
    assert verified.startswith("29 tensors equal, bit for bit\n")

    curves, until, title = load(Path("compare_pipedream.json"))
    assert Path("compare_pipedream.svg").read_text() == picture(curves, until, title)
    rows = {name: row for name, *row in re.findall(ROW, shown, re.MULTILINE)}
    updates = {"one by one": 24, "fill-drain": 6, "1f1b": 6, "pipedream": 24, "vertical sync": 24}
    assert {name: int(row[1]) for name, row in rows.items()} == updates
    for curve in curves:
        per_microbatch, _, held_out, samples, seconds = rows[curve.name]
        assert curve.samples == [0, 16, 32, 48]
        turns = [end - begin for begin, end in pairwise(curve.seconds)]
        assert float(per_microbatch) == pytest.approx(1e3 * median(turns) / 8, abs=0.006)
        assert float(held_out) == pytest.approx(curve.losses[-1], abs=0.0006)
        reached = [turn for turn, loss in enumerate(curve.losses) if loss <= until]
        if reached:
            assert int(samples) == curve.samples[reached[0]]
            assert float(seconds) == pytest.approx(curve.seconds[reached[0]], abs=0.06)
        else:
            assert samples == seconds == "-"
    assert curves[1].losses == curves[2].losses  # the same updates in another order


@sweep("model", ["gpt2", "llama"], quick=["llama"])
@on_ranks(2)
def test_models_of_transformers_equal_themselves_uncut(model: str, run: Run) -> None:
    options = f"--model {model} --batch 9 --steps 2 --epochs 2 --warmup 1"
    if out := run(f"train_transformers.py {SMALL} {options}"):
        assert re.search(r"^stage 1: .*lm_head Linear; [\d,]+ parameters$", out, re.MULTILINE)
        assert re.search(EQUAL.format(4), out, re.MULTILINE)


def test_a_curve_is_drawn_where_its_losses_are() -> None:
    curves = [Curve("a & b", (3.0, 2.0), (0, 100), (0.0, 1.5)), Curve("c", (3.0,), (0,), (0.0,))]
    drawn = ElementTree.fromstring(picture(curves, 2.5, "x < y"))
    texts = {element.text for element in drawn.iter()}
    assert texts >= {"a & b", "c", "x < y", "samples", "seconds", "held-out loss 2.5", "100", "1.5"}
    lines = [element.get("d") for element in drawn.iter() if element.get("stroke-width")]
    assert "M52 96L452 336" in lines  # from the top of the left panel to its bottom on the right


@pytest.mark.parametrize("ranks", [2, 4, 6])
@pytest.mark.parametrize("microbatches", [1, 2, 7, 12])
def test_both_ways_is_proved_and_the_first_try_only_on_gloo(
    ranks: int, microbatches: int, tmp_path: Path
) -> None:
    def built(name: str) -> schedir.Schedule:
        (tmp_path / name).with_suffix(".py").write_text(OWN[name])
        return schedir.build(tmp_path / f"{name}.py", ranks=ranks, microbatches=microbatches)

    mended, first = built("both_ways"), built("first_try")
    assert all(schedir.check(mended, channel=model).ok for model in ("host", "rank", "async"))
    found = {model: schedir.check(first, channel=model) for model in ("rank", "async")}
    assert found["async"].ok
    assert [finding.code for finding in found["rank"].diagnostics] == ["S301"]
