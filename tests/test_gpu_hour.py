"""The tool that tries a GPU, on the CPU: it stops at nothing, and goes on where it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_hour
import pytest
import torch
from attrs import evolve
from on_gpu import failures, launch, memory, rank
from on_gpu.checks import PART, PARTS, listing, named
from on_gpu.failing import BEGINS
from on_gpu.launch import ALWAYS, ROOT, SKIPPED, Check, Ended, Outcome, run
from on_gpu.models import MODELS
from on_gpu.results import Results

from tests.runtime import features
from tests.runtime.features import FEATURES, Setting, compare
from tests.sweeps import long, sweep

PLANNED = [check for checks in PARTS.values() for check in checks]

HANGS = """
import threading
from on_gpu.rank import begin, say
begin("cpu")
say("so far so good")
def in_vain(): threading.Event().wait()
in_vain()
"""
FAILS = """
import os, threading
if os.environ["RANK"] == "1": raise RuntimeError("of the test")
threading.Event().wait()
"""
ENVIRONMENT = """
import os
own = {name: value for name, value in os.environ.items() if name.startswith("NCCL")}
print(">>", own)
"""
PIECES = """
import os, sys
for piece in sys.argv[1:]:
    if piece == "b" and os.environ["RANK"] == "1": sys.exit("no b")
    print(f">> {piece}: done")
"""


def script(name: str, code: str, **more: Any) -> Check:
    return Check(name, "a claim", ("-c", code), **more)


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> list[Check]:
    """The rows of a part T."""
    rows: list[Check] = []
    monkeypatch.setitem(PARTS, "T", rows)
    return rows


def states(path: Path) -> dict[str, str]:
    """The result of each row, as the table says."""
    rows = [line for line in path.read_text().splitlines() if line.startswith("| ")]
    found = dict(row.removeprefix("| ").split(" | ")[:2] for row in rows)
    return {name: state for name, state in found.items() if name not in ("check", "---")}


# What there is


def test_rows_have_names_of_their_own_and_every_feature_is_in_one() -> None:
    names = Counter(check.name for check in PLANNED)
    assert set(names.values()) == {1}
    pieces = {piece for check in PARTS["A"] for piece in check.pieces}
    assert pieces >= set(FEATURES)
    other = {piece for check in PARTS["D"] for piece in (*check.pieces, *check.arguments)}
    assert other >= set(MODELS)


def test_a_part_ends_in_time() -> None:
    """Where rows take what they should, each of them is reached with its whole limit."""
    assert PART <= 9 * 60
    for part, checks in PARTS.items():
        taken = 0.0
        for check in checks:
            assert check.expected < check.limit <= 500, check
            assert taken + check.limit <= PART, (part, check)
            taken += check.expected


def test_the_list_has_all_parts_rows_limits_and_claims() -> None:
    text = listing()
    for part, checks in PARTS.items():
        assert f"Part {part}: " in text
        for check in checks:
            assert check.claim
            (line,) = (line for line in text.splitlines() if f"  {check.name} " in line)
            assert f"limit {check.limit:3.0f} s: {check.claim}" in line


def test_rows_are_found_by_name_and_single_features_too() -> None:
    assert {check.name for check in named(["a transformer"])} == {
        "a transformer, in one process",
        "a transformer, on 2 ranks",
    }
    assert "ties and clipping, on 2 ranks" in {check.name for check in named(["ties"])}
    with pytest.raises(SystemExit, match="no row has nonsense"):
        named(["nonsense"])


# How a row ends


@long
def test_a_check_that_hangs_is_ended_and_says_where_it_was() -> None:
    outcome = run(script("hangs", HANGS, ranks=2, limit=40.0), "cpu")
    assert outcome.state == "hung"
    assert len(outcome.printed) == 2
    for text in outcome.printed:
        assert "in in_vain" in text


def test_a_rank_that_fails_is_named_and_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_GRACE", 0.0)
    outcome = run(script("fails", FAILS, ranks=2, limit=100.0), "cpu")
    assert outcome.state == "failed"
    assert outcome.note == "rank 1: RuntimeError: of the test"


def test_what_can_not_be_made_is_skipped() -> None:
    code = f"import sys; print('>> there is none'); sys.exit({SKIPPED})"
    outcome = run(script("skipped", code, ranks=2), "cpu")
    assert (outcome.state, outcome.note, outcome.bad) == ("skipped", "there is none", False)
    assert run(script("on a GPU", "", cpu="no GPU"), "cpu").note == "no GPU"


def test_ranks_on_one_gpu_are_hosts_that_talk_over_sockets() -> None:
    outcome = run(script("environment", ENVIRONMENT, ranks=2), "cpu")
    for number, text in enumerate(outcome.printed):
        assert "'NCCL_NET': 'Socket'" in text
        assert "'NCCL_NET_PLUGIN': 'none'" in text
        assert f"'NCCL_HOSTID': 'schedir-{number}'" in text


def test_what_nccl_says_is_no_last_word() -> None:
    ended = Ended("it fails\nhost:1:2 [0] NCCL INFO Destroy COMPLETE\n\n", 1, 0.0)
    assert ended.last == "it fails"


# The table


def test_the_table_goes_on_after_a_failure_and_the_next_call_with_what_was_not_reached(
    part: list[Check],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = tmp_path / "table.md"
    arguments = ["--part", "T", "--device", "cpu", "-o", str(table)]
    part += [
        script("fails", "raise SystemExit('a | b')"),
        script("on a GPU", "", cpu="there is none"),
        script("takes long", "print('>> done')", limit=400),
        script("works", "print('more'); print('>> it does')"),
    ]
    monkeypatch.setattr(gpu_hour, "PART", 300.0)
    assert gpu_hour.main(arguments) == 1
    found = {"fails": "failed", "on a GPU": "skipped", "takes long": "not reached", "works": "ok"}
    assert states(table) == found
    text = table.read_text()
    assert r"| fails | failed | 0 | a \| b |" in text
    assert "### fails: failed, process 0" in text
    assert "more\n>> it does" in table.with_suffix(".log").read_text()
    first = capsys.readouterr().out.splitlines()
    assert [line in text for line in first] == [True] * 3
    monkeypatch.setattr(gpu_hour, "PART", 540.0)
    assert gpu_hour.main(arguments) == 1
    assert states(table) == found | {"takes long": "ok"}
    assert [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines()] == [
        "| takes long"
    ]
    part[0] = script("fails", "print('>> mended')")
    assert gpu_hour.main(["--only", "fails", *arguments[2:]]) == 0
    assert gpu_hour.main(arguments) == 0
    assert set(states(table).values()) == {"ok", "skipped"}


def test_of_pieces_that_fail_together_those_left_are_run_singly(
    part: list[Check], tmp_path: Path
) -> None:
    part.append(script("all, on 2 ranks", PIECES, pieces=["a", "b", "c"], ranks=2))
    part.append(script("last", ""))
    table = tmp_path / "table.md"
    assert gpu_hour.main(["--part", "T", "--device", "cpu", "-o", str(table)]) == 1
    expected = {"all, on 2 ranks": "failed", "b, on 2 ranks": "failed", "c, on 2 ranks": "ok"}
    assert states(table) == expected | {"last": "ok"}
    results = Results(table, "cpu")
    assert results.outcomes["all, on 2 ranks"].undone == ["b", "c"]
    assert [check.name for check in results.of_part("T")][1] == "last"


def test_a_row_that_was_cut_off_is_run_once_more(part: list[Check], tmp_path: Path) -> None:
    table = tmp_path / "table.md"
    part += [script("first", "print('>> done')"), script("all, here", "", pieces=["a", "b"])]
    for run_of_it in range(3):
        results = Results(table, "cpu")
        assert results.begin(part[1]) == (run_of_it < 2)
    assert results.outcomes["all, here"].state == "was cut off"
    assert [check.name for check in results.of_part("T")][2:] == ["a, here", "b, here"]
    with table.with_suffix(".jsonl").open("a") as lines:
        lines.write('\n{"name": "fir')  # killed as it wrote
    Results(table, "cpu").add(Outcome("first", "ok"))
    assert Results(table, "cpu").outcomes["first"].state == "ok"


def test_what_one_device_has_shown_says_nothing_of_another(tmp_path: Path) -> None:
    table = tmp_path / "table.md"
    Results(table, "cpu").add(Outcome("1f1b, on 2 ranks", "ok"))
    assert not Results(table, "cuda:0").outcomes
    assert Results(table, "cpu").outcomes


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_or_a_folder_the_mistake_is_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        gpu_hour.main(["--part", "A"])
    assert "error: no GPU is visible; --device cpu tries" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        gpu_hour.main(["--part", "A", "--device", "cpu", "-o", str(tmp_path / "none" / "file")])
    assert "error: -o: " in capsys.readouterr().err


KILLED = """
import sys
from threading import Event
from on_gpu.rank import begin
begin("cpu")
pipe = open(sys.argv[1], "w")
print("begun", file=pipe, flush=True)
Event().wait()
"""
CALL = """
import gpu_hour, sys
from on_gpu.checks import PARTS
from on_gpu.launch import Check
PARTS["T"] = [Check("a row", "a claim", ("-c", sys.argv[2], sys.argv[1]))]
gpu_hour.main(["--part", "T", "--device", "cpu", "-o", sys.argv[3]])
"""


@long
def test_a_killed_part_takes_its_processes_with_it_and_goes_on(
    part: list[Check], tmp_path: Path
) -> None:
    pipe, table = tmp_path / "pipe", tmp_path / "table.md"
    os.mkfifo(pipe)
    call = subprocess.Popen(
        [sys.executable, "-c", CALL, str(pipe), KILLED, str(table)],
        env={**os.environ, **ALWAYS},
        cwd=ROOT,
    )
    with pipe.open() as reads:
        assert reads.readline() == "begun\n"
        call.send_signal(signal.SIGKILL)
        call.wait()
        assert reads.read() == ""  # nobody has it open any more
    part.append(script("a row", "print('>> it goes on')"))
    assert gpu_hour.main(["--part", "T", "--device", "cpu", "-o", str(table)]) == 0
    assert states(table) == {"a row": "ok"}


# What rows show


@sweep("name", MODELS, quick=lambda name: name != "a transformer")
def test_other_models_equal_plain_training(name: str) -> None:
    compare(MODELS[name](), Setting())


def ended(*found: tuple[str, int | None, float]) -> list[Ended]:
    return [Ended(printed, code, 100.0 + seconds) for printed, code, seconds in found]


ROOT_CAUSE = "rank 1 #4 1F1: ValueError: no more of this"
RAISED = (f"{BEGINS}100.0\nTraceback\n[rank1]: ExecutionError: {ROOT_CAUSE}", 1, 2.0)
TOLD = ("schedir: rank 0 ended: root is rank 1\n[W] leaving", 1, 3.0)


def test_failures_are_judged_by_time_and_words() -> None:
    promise = failures.PROMISES["raises"]

    def broken(*found: tuple[str, int | None, float]) -> str:
        return "; ".join(failures.broken(promise, ended(*found)))

    assert not broken(TOLD, RAISED, TOLD)
    described = [*failures.described(promise, ended(TOLD, RAISED, TOLD))]
    assert described[1] == f"rank 1 ended after 2.0 s: [rank1]: ExecutionError: {ROOT_CAUSE}"
    assert broken((TOLD[0], None, 3.0), RAISED, TOLD) == "rank 0 has not ended"
    assert broken(TOLD, RAISED, (TOLD[0], 1, 99.0)) == "rank 2 has ended after 99 s"
    assert "rank 0 has not said" in broken(("Traceback\nRuntimeError: 7", 1, 1.0), RAISED, TOLD)
    assert "has not come to its second step: it" in broken(TOLD, ("it can't", 1, 0.0), TOLD)


def test_of_a_rank_that_leaves_another_says_so() -> None:
    promise = failures.PROMISES["leaves"]
    left = (f"{BEGINS}100.0", 0, 0.5)
    said = (
        "schedir: root: rank 1 –: has closed its executor, or ended, after 1 calls; all",
        1,
        1.0,
    )
    assert not [*failures.broken(promise, ended(said, left, TOLD))]
    gone = ("ExecutionError: rank 0 #7 0B0: waited for it, but the connection has ended", 1, 1.0)
    assert "rank 2 has not said" in "".join(failures.broken(promise, ended(said, left, gone)))


def assert_is_right(check: Check) -> None:
    outcome = run(evolve(check, limit=250.0), "cpu")  # the machine may be busy
    assert not outcome.bad, "\n".join(outcome.printed)


@sweep("name", [check.name for check in PLANNED], quick=["1f1b, in one process"])
def test_a_row_is_right_on_the_cpu(name: str) -> None:
    (check,) = (check for check in PLANNED if check.name == name)
    assert_is_right(check)


# Rows that make sense on a GPU alone run here with stand-ins for what they ask of it.
STAND_INS = """
import sys, torch
vars(torch.cuda).update(
    synchronize=lambda *_: None,
    reset_peak_memory_stats=lambda: None,
    memory_allocated=lambda: 7,
    max_memory_allocated=lambda: 7,
    memory_stats=lambda: {"num_alloc_retries": 0},
    set_sync_debug_mode=lambda mode: None,
)
from on_gpu import communicators, memory, train
communicators._made = lambda log, made=iter(range(0, 99, 3)): next(made)
module, *sys.argv[1:] = sys.argv[1:]
vars()[module].main()
"""


@long
@pytest.mark.parametrize(
    "arguments",
    [
        ("memory", "--steps", "2", "--rows", "2"),
        ("communicators",),
        ("train", "1f1b", "--no-host-read"),
    ],
    ids=" ".join,
)
def test_rows_for_a_gpu_alone_run_on_stand_ins(arguments: tuple[str, ...]) -> None:
    assert_is_right(Check("it", "", ("-c", STAND_INS, *arguments), ranks=2))


def test_a_peak_is_what_is_allocated_beside_what_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def fake(name: str, result: Any) -> None:
        def called(*_: object) -> Any:
            calls.append(name)
            return result

        monkeypatch.setattr(torch.cuda, name, called)

    fake("synchronize", None)
    fake("reset_peak_memory_stats", None)
    fake("memory_allocated", 700)
    fake("max_memory_allocated", 1000)
    fake("memory_stats", {"num_alloc_retries": 3})
    assert memory.peak("cpu", microbatches=2, steps=2, rows=2) == 300
    assert calls.index("memory_allocated") == calls.index("reset_peak_memory_stats") + 1


def test_a_sanitizer_that_knows_no_record_stream_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = tmp_path / "_sanitizer.py"
    old.write_text("class CUDASanitizerDispatchMode: ...")
    monkeypatch.setattr(rank, "find_spec", lambda name: SimpleNamespace(origin=str(old)))
    monkeypatch.setenv("TORCH_CUDA_SANITIZER", "1")
    with pytest.raises(SystemExit) as left:
        rank.begin("cpu")
    assert left.value.code == SKIPPED
    assert "record_stream" in capsys.readouterr().out


def test_the_mode_in_which_reads_are_errors_ends_whatever_torch_warns_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mode = "default"

    def set_mode(new: str) -> None:
        nonlocal mode
        mode = new
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with features._no_host_read():
            assert mode == "error"
        assert mode == "default"
        with pytest.raises(RuntimeError), features._no_host_read():
            raise RuntimeError
    assert mode == "default"
