"""The commands, driven as a user drives them."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import Any
from xml.etree import ElementTree

import pytest

import schedir
from schedir import Generator, Pipeline
from schedir.checker import CHANNELS, RULES
from schedir.checker.diagnostics import Severity
from schedir.cli import main
from schedir.cli.export import LISTS
from schedir.ir import COMMUNICATION, TRANSPORTS, Kind, loads_torch_csv
from schedir.render.outputs import TIMELINES
from schedir.simulator import load_timelines
from tests.built_in import EVERY, NAMES
from tests.command_line import DEADLOCK, Run, without_page
from tests.findings import odd
from tests.sweeps import sweep
from tests.warm import commands

TEXTS = [form for form in (*LISTS, *TIMELINES) if form not in ("png", "pdf")]
SERIAL = "schedir 1\nname serial\nmicrobatches 1\nplacement 0\nrank 0: 0F0 0B0\n"
MINE = "from schedir import *\n@schedule('mine')\ndef mine(pipe, rank):\n"
ONE = "    yield forward(0, 0)\n    yield backward(0, 0)\n"
# No order of the communication can save it: rank 1 wants microbatch 1 before it gives 0 back.
STUCK = """\
from schedir import backward, forward, schedule

@schedule("stuck")
def stuck(pipe, rank):
    for m in (0, 1):
        yield forward(rank, m)
        if rank == 0:
            yield backward(rank, m)
    if rank == 1:
        yield backward(rank, 0)
        yield backward(rank, 1)
"""


@pytest.fixture(autouse=True)
def run(run: Run) -> Run:
    """Run a command in a folder with a list that deadlocks, and a generator whose lists do."""
    Path("dead.sched").write_text(DEADLOCK)
    Path("stuck.py").write_text(STUCK)
    return run


def mine(body: str, head: str = MINE) -> None:
    """Write `mine.py`, a schedule whose body begins on its fourth line."""
    Path("mine.py").write_text(f"{head}{indent(body, '    ')}\n")


def process(*argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `schedir` as a program; options are those of `subprocess.run`."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run([commands() / "schedir", *argv], text=True, timeout=250, **options)


# The whole command line


def test_as_a_process() -> None:
    done = process("show", "1f1b", "--microbatches", "300")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert len(re.findall("^rank 0  F0", done.stdout, re.MULTILINE)) == 1
    assert max(map(len, done.stdout.splitlines())) > 4000
    failed = process("show", "nope")
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr.startswith("error: no schedule is named 'nope'; ")
    assert failed.stderr.endswith("\nsee: schedir docs authoring\n")


def on_terminal(*argv: str, columns: int = 100, lines: int = 24, **extra: str) -> str:
    """What a command shows on a terminal of that size."""
    ours, theirs = pty.openpty()
    env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "TERM")}
    env |= {"TERM": "xterm", "COLUMNS": str(columns), "LINES": str(lines), **extra}
    with subprocess.Popen([commands() / "schedir", *argv], stdout=theirs, env=env):
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(ours, 1 << 16):
                shown += part
        except OSError:  # how Linux ends what a terminal shows
            pass
    os.close(ours)
    return shown.decode(errors="replace").replace("\r\n", "\n")


@pytest.mark.parametrize("argv", [("show", "1f1b", "--ranks", "8", "--full"), ("show", "1f1b")])
def test_on_a_terminal_it_fits_and_has_colour(argv: tuple[str, ...]) -> None:
    coloured = on_terminal(*argv)
    plain = on_terminal(*argv, NO_COLOR="1")
    assert "\x1b[" in coloured
    assert "\x1b" not in on_terminal(*argv, TERM="dumb")
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain
    assert 90 < max(map(len, plain.split("\n"))) <= 100
    assert (plain.count("\ntime ") > 1) == ("--full" in argv)


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (200, 50)])
@sweep("shape", [("8", "32"), ("64", "64"), ("4", "8")], quick=[("64", "64")])
def test_the_overview_fits_a_screen(columns: int, lines: int, shape: tuple[str, str]) -> None:
    argv = ("show", "1f1b", "--ranks", shape[0], "--microbatches", shape[1])
    shown = on_terminal(*argv, columns=columns, lines=lines, NO_COLOR="1").splitlines()
    assert len(shown) < lines
    assert max(map(len, shown)) <= columns
    assert all(figure in shown[1] for figure in ("makespan", "bubble", "peak activations"))
    assert shown[3].startswith("rank  0 ")


def test_a_terminal_of_another_encoding_is_framed_in_ascii() -> None:
    argv = ("show", "1f1b")
    shown = on_terminal(*argv, columns=80, PYTHONIOENCODING="ascii", NO_COLOR="1")
    assert shown.isascii()
    assert shown.startswith("+- 1f1b: 4 ranks")
    assert "\\" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert "\\" not in on_terminal(*argv, columns=80, PYTHONIOENCODING="cp1252")


@pytest.mark.parametrize("command", ["list", "explain"])
def test_tables_fold_on_a_terminal(command: str) -> None:
    shown = on_terminal(command, columns=80, NO_COLOR="1").splitlines()
    assert max(map(len, shown)) <= 80


def test_a_pipe_takes_colour_only_where_it_is_forced(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ("show", "1f1b", "--microbatches", "99")
    plain = run(*argv)[1]
    monkeypatch.setenv("FORCE_COLOR", "1")
    forced = run(*argv)[1]
    assert "\x1b[" in forced
    assert re.sub(r"\x1b\[[0-9;]*m", "", forced) == plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert run(*argv)[1] == plain


def test_a_reader_that_leaves_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stdout:
        done = process("show", "1f1b", stdout=stdout)
    assert (done.returncode, done.stderr) == (141, "")


COMMANDS = ["show 1f1b", "export 1f1b", "export 1f1b --format png", "check 1f1b", "compare 1f1b"]
COMMANDS += ["list --json", "explain S301", "completion fish", "--help", "show --help", "--version"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("closed", [True, False])
def test_a_full_disk_and_a_closed_stdout_are_errors(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    for command in COMMANDS:
        with open("/dev/full", "w") as full:
            monkeypatch.setattr(sys, "stdout", None if closed else full)
            assert main(command.split()) == 2
        error = "[Errno 9] Bad file descriptor" if closed else "[Errno 28] No space left on device"
        assert capsys.readouterr().err == f"error: {error}\n", command


def test_ctrl_c_is_quiet(run: Run) -> None:
    Path("slow.py").write_text("from schedir import schedule\nraise KeyboardInterrupt\n")
    assert run("show", "slow.py") == (130, "", "")


class Stream(io.TextIOWrapper):
    """A stream of some encoding that keeps what is written."""

    def __init__(self, encoding: str) -> None:
        super().__init__(io.BytesIO(), encoding=encoding, newline="")

    def shown(self) -> str:
        self.flush()
        written = self.buffer.getvalue()  # type: ignore[attr-defined]
        assert isinstance(written, bytes)
        return written.decode(self.encoding)


@sweep("encoding", ["ascii", "latin-1", "cp1252", "utf-8"], quick=["ascii", "cp1252"])
def test_any_encoding_shows_something_legible(encoding: str) -> None:
    body = f"def f(pipe, rank, **more):\n{ONE}"
    Path("é.py").write_text(f"from schedir import *\n@schedule('é→')\n{body}", encoding="utf-8")
    argvs = [["explain", code] for code in (RULES if encoding == "ascii" else ["S301"])]
    argvs += [["list"], ["explain"], ["show", "é.py", "--actions"], ["show", "→.py"]]
    argvs += [["check", "1f1b"], ["check", "dead.sched", "--channel", "rank"]]
    argvs += [["check", "é.py", "--output-format", form] for form in ("concise", "json", "github")]
    argvs += [["show", "1f1b", *more] for more in ([], ["--why"], ["--json"])]
    argvs += [["show", "1f1b", "--against", "gpipe"], ["show", "1f1b", "--cost", "unit=us"]]
    argvs += [["compare", "1f1b", "é.py", "--cost", "unit=us"], ["compare", "1f1b", "--json"]]
    argvs += [["show", "nowhere→.py"], ["compare", "1f1b", "--sweep", "é"]]
    argvs += [["export", "é.py", "--format", form] for form in TEXTS]
    argvs += [[command, "--help"] for command in ("list", "show", "check", "compare", "export")]
    for argv in argvs:
        with (
            redirect_stdout(Stream(encoding)) as stdout,
            redirect_stderr(Stream(encoding)) as stderr,
            suppress(SystemExit),  # of argparse
        ):
            assert main(argv) in (0, 1, 2), argv
        text = stdout.shown() + stderr.shown()
        if argv[:2] == ["check", "dead.sched"]:
            before = {"utf-8": "…", "cp1252": "…"}.get(encoding, "...")
            assert f"#1 {before} 1F0 1B0 [1SEND_GRAD0]" in text
        if argv[:2] == ["show", "é.py"]:
            assert {"utf-8": "é→: ", "ascii": r"\xe9->: "}.get(encoding, "é->: ") in text
        assert r"\u" not in text or "json" in argv, argv


@pytest.mark.parametrize("locale", [False, True])
def test_files_are_utf_8_in_any_locale(locale: bool) -> None:
    text = SERIAL.replace("serial", "é→")
    Path("é.sched").write_text(text, encoding="utf-8")
    given = {"PYTHONIOENCODING": "ascii"}
    command: list[Any] = [commands() / "schedir"]
    if locale:  # which Python reads as it starts
        given = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        command = [sys.executable, "-m", "schedir"]
    for more in ([], ["-o", "y.sched"]):
        done = subprocess.run(
            [*command, "export", "é.sched", *more],
            env={**os.environ, **given},
            capture_output=True,
            check=True,
            timeout=250,
        )
        assert done.stderr == b""
        assert (done.stdout.decode() or Path("y.sched").read_text(encoding="utf-8")) == text


def test_version_and_usage(run: Run) -> None:
    assert run("--version") == (0, f"schedir {schedir.__version__}\n", "")
    for argv in ([], ["nope"], ["show"], ["show", "1f1b", "--ranks", "x"], ["check", "--channel"]):
        run.refuses(*argv)


def test_an_error_names_its_page_of_the_docs_once(capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.sched").write_text("nonsense")
    Path("costs.json").write_text('{"forwrd": 1}')
    Path("cut.json").write_text("{")
    for command, page in (
        ("check dead.sched", "S301"),
        ("check dead.sched dead.sched 1f1b", "S301"),
        ("check nope dead.sched", "authoring"),
        ("check 1f1b --strict", ""),
        ("show bad.sched", "text-form"),
        ("show 1f1b --costs costs.json", "costs-file"),
        ("show 1f1b --costs cut.json", "costs-file"),
        ("compare 1f1b --cost forward=1,2", ""),
        ("show cut.json", "measure-and-predict"),
        ("show 1f1b --steady", "show"),
        ("explain S000", "explain"),
        ("export 1f1b -o no/such.sched", "export"),
        *((f"check dead.sched --output-format {form}", "") for form in ("concise", "json")),
    ):
        main(command.split())
        _, see = without_page(capsys.readouterr().err)
        assert see == (f"see: schedir docs {page}\n" if page else ""), command
    for command, line in (
        ("check", "see: schedir check --help, or schedir docs check\n"),
        ("chek", "see: schedir --help, or schedir docs commands\n"),
        ("show --cost unit=s --cost unit=s", "see: schedir show --help, or schedir docs show\n"),
    ):
        with pytest.raises(SystemExit):
            main(command.split())
        assert without_page(capsys.readouterr().err)[1] == line


def test_a_command_leaves_the_logger_as_it_was(run: Run) -> None:
    before = list(logging.getLogger("schedir").handlers)
    run("list")
    assert logging.getLogger("schedir").handlers == before


# Targets and their arguments


@pytest.mark.parametrize(
    ("argv", "ranks", "microbatches", "stages"),
    [
        (["1f1b"], 4, 8, 4),
        (["Interleaved_1F1B", "--ranks", "2"], 2, 8, 4),
        (["interleaved1f1b", "--chunks", "3", "--microbatches", "4"], 4, 4, 12),
        (["GPipe", "--set", "order=descending"], 4, 8, 4),
        (["interleaved-1f1b", "--set", "group_size=8"], 4, 8, 8),
        (["pipedream", "--set", "vertical_sync=true"], 4, 8, 4),
        (["schedir.schedules.one_f_one_b:one_f_one_b"], 4, 8, 4),
    ],
)
def test_targets(run: Run, argv: list[str], ranks: int, microbatches: int, stages: int) -> None:
    out = run.prints("show", *argv)
    counts = f"{ranks} ranks, {stages} stages, {microbatches} microbatches"
    assert out.splitlines()[0].endswith(counts)


def test_settings_reach_the_generator_with_their_type(run: Run) -> None:
    mine("raise ValueError(f'{a!r} {b!r} {c!r}')", MINE.replace("rank)", "rank, *, a, b, c)"))
    code, _, err = run("show", "mine.py", "--set", "a=False", "--set", "b=-3", "--set", "c=x=1")
    assert (code, err) == (2, "error: mine.py:4: mine, rank 0: ValueError: False -3 'x=1'\n")


ONE_STAGE = " runs one stage per rank, not 2: leave chunks out, or take one that `schedir list` has"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["1f1b", "--set", "x=1"], "1f1b has no parameter 'x'; it has: none"),
        (["gpipe", "--set", "order=up"], "order must be 'ascending' or 'descending', not 'up'"),
        (["gpipe", "--set", "ranks=2"], "ranks is not set with --set: write --ranks 2"),
        (["zb", "--set", "costs=2"], "costs are not set with --set: give --costs FILE, or --cost"),
        (["gpipe", "--set", "target=2"], "fill-drain has no parameter 'target'"),
        (["gpipe", "--set", "order=a", "--set", "order=b"], "--set names order twice"),
        (["1f1b", "--ranks", "0"], "argument -r/--ranks: '0' is not a whole number >= 1"),
        (["1f1b", "--microbatches", "x"], "--microbatches: 'x' is not a whole number >= 1"),
        (["1f1b", "--ranks", "999999999"], "are too many: their product may be at most"),
        (["1f1b", "--ranks", "9" * 20], "99999999999999999999 is too many: at most"),
        (["1f1b", "--microbatches", "9" * 20], "99999999999999999999 is too many: at most"),
        (["1f1b", "--chunks", "9" * 20], "99999999999999999999 is too many: at most"),
        (["1f1b", "--chunks", "2"], f"error: 1f1b{ONE_STAGE} with --chunks ("),
        (["gpipe", "--chunks", "2"], f"error: fill-drain{ONE_STAGE} with --chunks ("),
        (["pipedream", "--chunks", "2"], f"error: pipedream{ONE_STAGE} with --chunks ("),
        (["1f1b", "--set", "x"], "argument --set: 'x' is not KEY=VALUE"),
        (["interleaved-1f1b", "--set", "group_size=x"], "group_size must be an int >= 1, not 'x'"),
        (["serial"], "no schedule is named 'serial'; did you mean 'serial.sched'?"),
        (["interleaved"], "did you mean 'interleaved-1f1b' or 'interleaved-zb' or 'grouped-"),
        (["bfs"], "no schedule is named 'bfs'; did you mean 'looped-bfs'? "),
        (["one"], "did you mean '1f1b'? "),  # which is also one-f-one-b
        ([""], "no schedule is named ''; `schedir list`"),
        (["./mine"], "no schedule is named './mine'; did you mean './mine.py'?"),
        (["fold"], "fold is a directory"),
        (["fold.py"], "fold.py: not a regular file"),
        (["notes.txt"], "notes.txt: the name of a schedule's file ends in .py, .sched or .csv"),
        (["1f1b.py"], "1f1b.py: no such file; did you mean '1f1b'?"),
        (["Fill_Drain.sched"], "Fill_Drain.sched: no such file; did you mean 'fill-drain'?"),
        (["mine.py/x.py"], "mine.py/x.py: Not a directory"),
        (["mine.py:"], "mine.py: no function is named after the colon"),
        (["mine.py:yours"], "mine.py has no function 'yours'; it has: mine"),
        (["serial.sched:f"], "serial.sched is a list of actions and has no function 'f'"),
        (["empty.py"], "empty.py has no @schedule; decorate its function with"),
        (["empty.csv"], "empty.csv:1:1: the file holds no action"),
        (["empty.sched"], "empty.sched:1:1: the file ends without a 'schedir' line"),
        (["fil-drain"], "did you mean 'fill-drain'?"),
        (["missing.py"], "missing.py: no such file"),
        (["missing.sched"], "missing.sched: no such file"),
        (["lost.py"], "lost.py:2: ModuleNotFoundError: No module named 'nowhere'"),
        (["missing:function"], "missing: ModuleNotFoundError: No module named 'missing'"),
        (["serial.sched", "--ranks", "2"], "serial.sched has 1 ranks, not 2"),
        (["serial.sched", "--set", "x=1"], "takes no parameters: x"),
    ],
)
def test_what_is_asked_for_in_vain(run: Run, argv: list[str], message: str) -> None:
    Path("serial.sched").write_text(SERIAL)
    Path("mine.py").write_text(STUCK.replace("stuck", "mine"))
    Path("lost.py").write_text("from schedir import schedule\nimport nowhere\n")
    for empty in ("empty.py", "empty.csv", "empty.sched", "notes.txt"):
        Path(empty).touch()
    for folder in ("fold", "fold.py"):
        Path(folder).mkdir()
    assert message in run.refuses("show", *argv)


def test_a_generator_that_chunks_do_not_break_is_told_its_own_fault(run: Run) -> None:
    mine(
        "a, b, c = pipe.stages_of(rank)\nyield forward(a, 1 / 0 if wrong else 0)",
        MINE.replace("'mine'", "'mine', chunks=3").replace("rank)", "rank, *, wrong=False)"),
    )
    assert run("show", "mine.py", "--chunks", "2")[2] == (
        "error: mine runs 3 stages per rank, not 2: leave chunks out (mine.py:4: ValueError: not "
        "enough values to unpack (expected 3, got 2))\n"
    )
    for chunks, line in (("2", 4), ("3", 5)):
        argv = ("show", "mine.py", "--chunks", chunks, "--set", "wrong=true")
        assert run(*argv)[2].startswith(f"error: mine.py:{line}: mine, rank 0: ")
    with pytest.raises(schedir.LoadError, match="1f1b runs one stage per rank, not 2: leave "):
        schedir.build("1f1b", chunks=2)


NOT_ACTIONS = "the generator must yield actions"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("yield forward(0, 0)\nraise OSError('no\\nluck')", "5: mine, rank 0: OSError: no luck"),
        ("import sys\nsys.exit()", "5: mine, rank 0: SystemExit"),
        ("yield forward(-1, 0)", "4: mine, rank 0: ValueError: stage must be an int in 0..9999999"),
        ("return 5", f"2: {NOT_ACTIONS}, not return 5 (int)"),
        (
            "forward(0, 0)",
            f"2: {NOT_ACTIONS}, not return None (NoneType): write `yield forward(stage, "
            "microbatch)`\n",
        ),
        (
            "if rank == 0:\n    return [forward(0, 0)]\nyield forward(rank, 0)",
            f"2: {NOT_ACTIONS}, not return [Action(",
        ),
        ("yield [forward(0, 0)]", "4: rank 0 yielded [Action("),
        ("return [[forward(0, 0)]]", "2: rank 0 yielded [Action("),
        ("yield", "4: rank 0 yielded None (NoneType); a generator yields actions, such"),
        ("yield '0F0'", "4: rank 0 yielded '0F0' (str)"),
        ("yield forward(", "4: SyntaxError: '(' was never closed"),
        ("while True:\n    yield forward(0, 0)", "5: rank 0 yielded more than"),
    ],
)
def test_a_generator_that_fails_is_told_in_one_line(run: Run, body: str, message: str) -> None:
    mine(body)
    err = run.refuses("show", "mine.py")
    assert err.startswith(f"error: mine.py:{message}")
    assert str(Path(schedir.__file__).parent) not in err


@pytest.mark.parametrize("body", ["forward(0, 0)", "yield forward(0, 0)"])
def test_an_async_generator_is_told_so(run: Run, body: str) -> None:
    mine(body, MINE.replace("def", "async def"))
    error = f"error: mine.py:2: {NOT_ACTIONS}: write def, not async def\n"
    assert run("show", "mine.py") == (2, "", error)


def test_several_that_are_yielded_at_once_are_told_of_yield_from(run: Run) -> None:
    mine("yield (forward(m, 0) for m in (0, 1))")
    assert run("show", "mine.py")[2].endswith("microbatch), and several with `yield from`\n")


@pytest.mark.parametrize(
    "text",
    [
        "import schedir\nsched = schedir.build('1f1b')\n",
        "import schedir\nargs.schedule = executor.schedule.ranks\n",
        "def schedule(name): ...\n@schedule('mine')\ndef mine(pipe, rank): ...\n",
        "from torch.profiler import schedule\nschedule(wait=1, warmup=1, active=3)\n",
        "import torch.profiler\ntorch.profiler.schedule(wait=1, warmup=1, active=3)\n",
        "import typing\nfrom collections.abc import Generator\nx: typing.Generator[int]\n",
        "from math import *\nimport schedir\ns = schedir.build('1f1b')\n",
        "",
    ],
)
def test_what_has_no_schedule_is_refused_before_it_runs(run: Run, text: str) -> None:
    Path("train.py").write_text(f"open('ran', 'w').close()\n{text}")
    for command in ("show", "check", "compare", "export"):
        assert run(command, "train.py") == (
            2,
            "",
            "error: train.py has no @schedule; decorate its function with @schedule(name), or "
            "name it: train.py:function\n",
        )
    assert not Path("ran").exists()
    run("show", "train.py:main")
    assert Path("ran").exists()


def test_a_training_script_is_not_run(run: Run) -> None:
    script = Path(__file__).parents[1] / "examples" / "train_gpt.py"
    assert "train_gpt.py has no @schedule; " in run.refuses("check", str(script))


@pytest.mark.parametrize(
    "text",
    [
        "from schedir import schedule\n@schedule('mine')",
        "from schedir import schedule as declared\n@declared('mine')",
        "from schedir import *\n@schedule('mine')",
        "import schedir\n@schedir.schedule('mine')",
        "import schedir as s\n@s.schedule('mine')",
        "import schedir.library.authoring as a\n@a.schedule('mine')",
        "import schedir.library\ndeclared = schedir.library.schedule\n@declared('mine')",
        "if True:\n    from schedir.library import Generator as G\n@lambda f: G(f, 'mine')",
        "import passed_on\n@passed_on.schedule('mine')",
        "from passed_on import *\n@schedule('mine')",
        "import schedir as s\n@lambda f: s.Generator(f, 'mine')",
    ],
)
@pytest.mark.usefixtures("importable")
def test_whatever_may_declare_a_schedule_is_run(run: Run, text: str) -> None:
    Path("passed_on.py").write_text("from schedir import schedule\n")
    head = f"from schedir import forward, backward\n{text}\ndef mine(pipe, rank):\n"
    Path("mine.py").write_text(head + ONE)
    out = run.prints("export", "mine.py", "--ranks", "1", "--microbatches", "1")
    assert out.startswith("schedir 1\nname mine\n")


def test_files_below_the_working_directory_are_named_from_there(run: Run, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name, text in (("bad.sched", "schedir 2\n"), ("bad.py", "from schedir import schedule\n")):
        (tmp_path / "sub" / name).write_text(text)
        Path(name).write_text(text)
        for file in (Path(name), Path("sub") / name):
            code, _, err = run("show", str(file.absolute()))
            assert code == 2
            assert err.startswith(f"error: {file}")
    within = f"sub{tmp_path}/no.sched"  # which is no path below the working directory
    assert run("show", within)[2] == f"error: {within}: no such file\n"
    beside = tmp_path.parent / f"{tmp_path.name}-beside.sched"
    beside.write_text("")
    assert run("show", str(beside))[2].startswith(f"error: {beside}:1:1: ")


def test_a_generator_beside_the_working_directory_is_named_from_there(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine("yield 5")
    Path("here").mkdir()
    monkeypatch.chdir("here")
    assert run("show", "../mine.py")[2].startswith("error: ../mine.py:4: rank 0 yielded 5 (int)")


def test_what_a_generator_prints_stays_out_of_the_artefact(run: Run) -> None:
    Path("mine.py").write_text(f"print('hello')\n{MINE}{ONE}")
    code, out, err = run("export", "mine.py", "--format", "sched", "-m", "1", "-r", "1")
    assert (code, err) == (0, "hello\n")
    assert out.startswith("schedir 1\nname mine\n")


@pytest.mark.parametrize(
    ("text", "err"),
    [
        (
            SERIAL.replace("0B0", "0X0"),
            "5:13: unknown action kind 'X'; known: F B I W R SEND_ACT RECV_ACT SEND_GRAD "
            "RECV_GRAD OFFLOAD RELOAD UNSHARD RESHARD REDUCE_GRAD OPTIM_STEP\n"
            "    rank 0: 0F0 0X0\n"
            "                ^\n",
        ),
        (
            SERIAL.replace("name", "\tname"),
            "2:2: 'schedir' takes one value\n     name serial\n     ^\n",
        ),
        ("schedir 1\n", "2:1: the file ends without a 'name' line\n"),
        (
            SERIAL.encode().replace(b"serial", b"\xff"),
            "2:6: byte 0xff is not UTF-8\n    name �\n         ^\n",
        ),
    ],
)
def test_parse_errors_show_the_line(run: Run, text: str | bytes, err: str) -> None:
    Path("bad.sched").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert run("check", "bad.sched") == (2, "", f"error: bad.sched:{err}")


def test_long_lines_are_clipped_around_the_error(run: Run) -> None:
    Path("bad.sched").write_text(SERIAL.replace("0B0", "0B0 " * 300 + "0Q7" + " 0B0" * 300))
    code, _, err = run("check", "bad.sched")
    _, line, caret = err.splitlines()
    assert code == 2
    assert len(line) == 80
    assert line[caret.index("^") :].startswith("0Q7 ")


# The commands


def test_list(run: Run) -> None:
    header, *rows = run.prints("list").splitlines()
    assert header.split() == ["name", "aliases", "parameters", "description"]
    row_of = {row.split()[0]: row for row in rows}
    assert list(row_of) == list(EVERY)
    for name, said in (
        ("1f1b", "one-f-one-b"),
        ("fill-drain", "order=ascending"),
        ("interleaved-1f1b", "--chunks 2, group_size=None"),
        ("pipedream", "vertical_sync=false"),
    ):
        assert said in row_of[name]
    assert row_of["fill-drain"].endswith("every microbatch is in flight at once.")


def test_list_json(run: Run) -> None:
    rows = {row["name"]: row for row in json.loads(run.prints("list", "--json"))}
    assert list(rows) == list(EVERY)
    row = rows["interleaved-1f1b"]
    assert list(row) == ["name", "aliases", "file", "chunks", "parameters", "description"]
    assert rows["fill-drain"]["aliases"] == ["gpipe"]
    assert Path(row["file"]).read_text().startswith('"""')
    assert (row["chunks"], rows["1f1b"]["chunks"]) == (2, 1)
    assert row["parameters"] == [{"name": "group_size", "default": None}]
    assert rows["pipedream"]["parameters"] == [{"name": "vertical_sync", "default": False}]
    assert rows["fill-drain"]["description"].endswith("every microbatch is in flight at once.")


def test_list_json_of_any_generator(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def function(pipe: Pipeline, rank: int, needed: int, own: object = Kind, **more: int) -> Any:
        return []

    odds = [Generator(each, "odd") for each in (function, partial(function, needed=1))]
    monkeypatch.setattr("schedir.cli.list.installed", lambda: odds)
    ours, codeless = json.loads(run.prints("list", "--json"))
    assert ours["parameters"] == [{"name": "needed"}, {"name": "own", "default": str(Kind)}]
    assert (ours["file"], codeless["file"]) == (__file__, None)


def test_show_json(run: Run) -> None:
    data = json.loads(run.prints("show", "1f1b", "--json"))
    assert list(data) == ["makespan", "bubble_fraction", "ranks"]
    keys = ["rank", "busy", "idle", "span", "peak_activations", "weight_versions"]
    assert [list(rank) for rank in data["ranks"]] == [keys] * 4
    for option in ("--actions", "--compute-only", "--full"):
        said = run.refuses("show", "1f1b", "--json", option)
        assert said == f"error: --format json prints numbers only: leave out {option}\n"


def test_show_actions(run: Run) -> None:
    _, plain, _ = run("show", "1f1b")
    schedule = schedir.build("1f1b")
    out = run.prints("show", "1f1b", "--actions")
    assert out == plain + "\n".join(["", *schedir.dumps(schedule).splitlines()[4:], ""])
    out = run.prints("show", "1f1b", "--compute-only")
    tokens = re.findall(r"\d+[A-Z_]+\d*", out.removeprefix(plain))
    actions = [action for own in schedule.flat for action in own]
    assert tokens == [str(action) for action in actions if action.kind not in COMMUNICATION]


@pytest.mark.parametrize("argv", [["show"], ["show", "--json"], ["export", "--format", "sched"]])
def test_a_schedule_with_errors_is_explained_on_stderr(run: Run, argv: list[str]) -> None:
    code, out, err = run(*argv, "stuck.py", "--ranks", "2", "--microbatches", "2")
    assert (code, out) == (1, "")
    assert err.startswith("error[S301]: deadlock: ranks 0 and 1 wait on each other  (wait-cycle)\n")
    assert "  --> rank 0 #1 0B0      stuck.py:8\n" in err
    assert err.endswith("\nstuck: 1 error under async\n")


@pytest.mark.parametrize("name", EVERY)
def test_built_in_schedules_are_clean(run: Run, name: str) -> None:
    *found, verdict = run.prints("check", name).splitlines()
    assert verdict.startswith(f"{name}: clean under rank and every other channel model")
    # PipeDream without vertical sync runs a microbatch at different versions, by design; published
    # orders split backwards that some ranks then run as one.
    codes = {line.partition(":")[0] for line in found if line.startswith(("error", "warn", "note"))}
    assert codes - {"note[S503]"} == ({"note[S406]"} if name == "pipedream" else set())


def test_check_judges_by_channel(run: Run) -> None:
    out = run.prints("check", "dead.sched", "--channel", "edge")
    assert out.startswith("note[S213]: there is no OPTIM_STEP")
    also = "clean under edge (also: direction, async; not: host, rank, pair), 1 note"
    assert out.endswith(f"\ndead.sched: {also}\n")
    assert run("check", "dead.sched", "--channel", "edge", "--strict")[0] == 0
    code, out, err = run("check", "dead.sched", "--channel", "pair")
    assert (code, err) == (1, "")
    assert out.startswith("error[S301]: deadlock: ranks 0 and 1 wait on each other  (wait-cycle)\n")
    assert "on gloo" not in out
    assert out.endswith("\ndead.sched: 1 error under pair\n")


def test_check_judges_by_what_nccl_can_be_relied_on_for_and_says_what_else_runs(run: Run) -> None:
    code, out, _ = run("check", "dead.sched")
    assert code == 1
    assert "   = note: under --channel rank; clean under edge, direction and async\n" in out
    assert "   = note: it runs on gloo (async), but it can hang on NCCL (rank)\n" in out
    assert out.endswith("\ndead.sched: 1 error under rank\n")
    # What runs on gloo can be drawn.
    assert run("show", "dead.sched", "--json")[0] == 0
    assert run("export", "dead.sched", "--format", "torch-csv-comms")[0] == 0
    _, out, _ = run("check", "stuck.py", "--ranks", "2", "--microbatches", "2")
    assert "   = note: under every channel model\n" in out
    assert "on gloo" not in out


def test_check_formats(run: Run) -> None:
    said = "deadlock: ranks 0 and 1 wait on each other\n"
    argv = ("check", "dead.sched", "--channel", "rank", "--output-format")
    concise = f"dead.sched: rank 0 #3 0SEND_ACT1: S301 wait-cycle: {said}"
    assert run(*argv, "concise") == (1, concise, "")
    github = f"::error file=dead.sched,title=S301 wait-cycle::rank 0 #3 0SEND_ACT1: {said}"
    assert run(*argv, "github") == (1, github, "")
    code, out, _ = run(*argv, "json")
    data = json.loads(out)
    assert code == 1
    assert list(data) == ["ok", "channel", "diagnostics"]
    assert (data["ok"], data["channel"]) == (False, "rank")
    (found,) = data["diagnostics"]
    assert list(found) == ["code", "name", "severity", "message", "locations"]
    assert found["locations"][0] == {"rank": 0, "index": 3, "action": "0SEND_ACT1"}

    code, out, _ = run("check", "1f1b", "--output-format", "json")
    assert (code, json.loads(out)) == (0, {"ok": True, "channel": "rank", "diagnostics": []})


@pytest.mark.parametrize(("transport", "model"), TRANSPORTS.items())
def test_a_transport_stands_for_its_channel_model(run: Run, transport: str, model: str) -> None:
    for form in ("full", "concise", "json", "github"):
        argv = ("check", "dead.sched", "--output-format", form, "--channel")
        assert run(*argv, transport) == run(*argv, model)
    # The gloo of the table blocks in nothing, so that the list runs on that alone.
    assert run("check", "dead.sched", "--channel", transport)[0] == (transport != "gloo")
    compared = ("compare", "dead.sched", "1f1b", "--ranks", "2", "--json", "--channel")
    assert run(*compared, transport) == run(*compared, model)
    assert json.loads(run(*compared, transport)[1])["channel"] == model
    found = ("search", "--ranks", "2", "--microbatches", "2", "--channel")
    assert run(*found, transport) == run(*found, model)
    assert schedir.check(schedir.loads(DEADLOCK), transport).channel == model
    tied = partial(schedir.advance_receives, schedir.build("pipedream"), room=9, ties=[(0, 3)])
    assert tied(channel=transport) == tied(channel=model)


def test_an_unknown_channel_is_told_models_and_transports(run: Run) -> None:
    err = run.refuses("check", "1f1b", "--channel", "tcp")
    with pytest.raises(ValueError, match="unknown channel model 'tcp'; known: ") as raised:
        schedir.check(schedir.build("1f1b"), "tcp")
    for name in (*CHANNELS, *TRANSPORTS):
        assert name in err
        assert name in str(raised.value)


@pytest.mark.parametrize("command", ["show", "check", "compare", "export", "search"])
def test_the_shape_has_short_options(run: Run, command: str) -> None:
    target = [] if command == "search" else ["interleaved-1f1b"]
    short = run(command, *target, "-r", "2", "-m", "4", "-v", "3")
    assert short[0] == 0
    assert short == run(command, *target, "--ranks", "2", "--microbatches", "4", "--chunks", "3")
    if command in ("show", "export", "compare"):
        assert short != run(command, *target, "-r", "2", "-m", "4")


def test_check_takes_several_targets(run: Run) -> None:
    Path("bad.sched").write_text("schedir 2\n")
    shape = ("-r", "2", "-m", "4")
    reports = {target: run("check", target, *shape) for target in ("1f1b", "gpipe", "bad.sched")}
    reports["dead.sched"] = run("check", "dead.sched")
    out = run.prints("check", "1f1b", "gpipe", *shape)
    assert out == f"1f1b:\n{reports['1f1b'][1]}gpipe:\n{reports['gpipe'][1]}"
    code, out, err = run("check", "1f1b", "dead.sched", "gpipe", "-r", "2")
    assert (code, err) == (1, "")
    assert f"\ndead.sched:\n{reports['dead.sched'][1]}gpipe:\n" in out
    # What can't be loaded stops no other.
    code, out, err = run("check", "bad.sched", "dead.sched", "nope", "1f1b", "-r", "2")
    assert code == 2
    assert out.startswith(f"dead.sched:\n{reports['dead.sched'][1]}1f1b:\n1f1b: clean under rank")
    assert err.startswith(f"{reports['bad.sched'][2]}error: no schedule is named 'nope'")


def test_several_targets_in_the_other_formats(run: Run) -> None:
    Path("again.sched").write_text(DEADLOCK)
    targets = ("again.sched", "nope", "1f1b", "dead.sched")
    for form in ("concise", "github"):
        argv, shape = ("--output-format", form), ("-r", "2")
        each = [run("check", t, *argv, *(() if "." in t else shape)) for t in targets]
        code, out, err = run("check", *targets, *argv, *shape)
        assert (code, out, err) == (2, "".join(one[1] for one in each), each[1][2])
        assert out.count("S301") == 2
    code, out, err = run("check", *targets, "--output-format", "json")
    content = json.loads(out)
    assert (code, list(content)) == (2, ["targets"])
    assert [one.pop("target") for one in content["targets"]] == [*targets]
    dead, nope, clean, again = content["targets"]
    assert dead == again == json.loads(run("check", "dead.sched", "--output-format", "json")[1])
    assert clean == json.loads(run("check", "1f1b", "--output-format", "json")[1])
    assert err == f"error: {nope['error']}\n"
    assert list(nope) == ["error"]


@pytest.mark.parametrize(
    ("form", "argv"),
    [
        ("sched", ["check", "-"]),
        ("torch-csv", ["check", "-"]),
        ("torch-csv-comms", ["check", "-"]),
        ("sched", ["show", "-", "--json"]),
        ("sched", ["export", "-", "--format", "torch-csv-comms"]),
        ("sched", ["show", "1f1b", "--against", "-"]),
        ("torch-csv", ["compare", "-", "1f1b", "--json"]),
    ],
)
def test_a_list_is_read_from_standard_input(run: Run, form: str, argv: list[str]) -> None:
    file = "stdin.csv" if form.startswith("torch") else "stdin.sched"
    run("export", "1f1b", "--format", form, "-o", file)
    code, out, err = run(*[file if each == "-" else each for each in argv])
    with open(file) as stdin:
        piped = process(*argv, stdin=stdin)
    assert (piped.returncode, piped.stderr) == (code, err) == (0, err)
    assert piped.stdout == out.replace(file, "<stdin>")


def test_standard_input_that_is_no_schedule() -> None:
    for text, argv, message in (
        ("", [], "<stdin>:1:1: the file ends without a 'schedir' line"),
        ("schedir 1\nnom x\n", [], "<stdin>:2:1: "),
        (SERIAL, ["-r", "2"], "<stdin> has 1 ranks, not 2"),
    ):
        done = process("check", "-", *argv, input=text)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"error: {message}")
        assert len(done.stderr.splitlines()) == 2
    closed = f"{sys.executable} -m schedir check - <&-"
    done = subprocess.run(["bash", "-c", closed], capture_output=True, text=True, timeout=250)
    error, _ = without_page(done.stderr)
    assert (done.returncode, error) == (2, "error: <stdin>: Bad file descriptor\n")


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["export", "1f1b", "--format", "perfetto"], "a Perfetto trace (`schedir export "),
        (["check", "1f1b", "--output-format", "json"], "what `schedir check` has found"),
        (["show", "1f1b", "--json"], "what `schedir show --format json` prints"),
        (["compare", "1f1b", "--json"], "what `schedir compare --format json` prints"),
    ],
)
def test_json_of_another_kind_is_told_what_it_is(run: Run, argv: list[str], what: str) -> None:
    Path("it.json").write_text(run(*argv)[1])
    for other, wanted in (
        (["show", "it.json"], "file of timelines"),
        (["compare", "1f1b", "it.json"], "file of timelines"),
        (["check", "it.json"], "schedule"),
        (["show", "1f1b", "--costs", "it.json"], "costs"),
    ):
        assert run.refuses(*other).startswith(f"error: it.json: no {wanted}, but {what}")


def test_costs_and_timelines_are_told_apart(run: Run) -> None:
    schedir.CostModel().save("costs.json")
    schedir.simulate(schedir.build("1f1b"), schedir.CostModel()).save("line.json")
    for argv, error in (
        ("show costs.json", "costs.json: no file of timelines, but costs, for --costs"),
        ("check costs.json", "costs.json: no schedule, but costs, for --costs"),
        ("check line.json", "line.json: no schedule, but measured timelines: `schedir show`"),
        ("show 1f1b --costs line.json", "line.json: no costs, but measured timelines"),
    ):
        assert run.refuses(*argv.split()).startswith(f"error: {error}")


MEASURED = Path(__file__).parent / "runs" / "1f1b-2x8.json"  # on two ranks


def test_costs_of_a_run_have_its_ranks(run: Run) -> None:
    schedir.CostModel.fit(load_timelines(MEASURED)).save("costs.json")
    costs, two = ("--costs", "costs.json"), ("--ranks", "2")
    for argv in (
        ("show", "1f1b", "--json"),
        ("show", "1f1b", "--why"),
        ("check", "zb"),
        ("compare", "1f1b", "zbv", "--json"),
        ("search", "--microbatches", "2"),
        ("export", "1f1b", "--format", "perfetto"),
    ):
        found = run(*argv, *costs)
        assert found[0] == 0
        assert found == run(*argv, *costs, *two)
    assert schedir.build("1f1b", costs=schedir.CostModel.load("costs.json")).ranks == 2
    # What is asked for, or has a shape, has that.
    run("export", "1f1b", "-o", "four.sched")
    for asked in (("-r", "4"), ("four.sched",)):
        rows = json.loads(run("compare", "1f1b", *asked, "--json", *costs)[1])["rows"]
        assert {row["ranks"] for row in rows} == {4}
    said = "error: forward has 2 numbers, but 1f1b has 4 stages"
    assert run.refuses("show", "four.sched", *costs).startswith(said)


def test_of_findings_alike_three_are_shown(run: Run) -> None:
    each = "for m in range(pipe.microbatches):\n"
    mine(f"{each}    yield backward(rank, m)\n    yield forward(rank, m)")
    shape = ("mine.py", "--ranks", "1", "--microbatches", "30")
    code, out, _ = run("check", *shape)
    assert code == 1
    assert out.count("error[S201]") == 3
    assert out.count("\n   … and 27 more like it\n\n") == 1
    assert out.endswith("\nmine: 30 errors under rank\n")
    _, out, _ = run("check", *shape, "--output-format", "concise")
    assert len(out.splitlines()) == 4
    assert out.endswith("mine.py:5: S201 backward-before-forward: … and 27 more like it\n")
    _, out, _ = run("check", *shape, "--output-format", "json")
    assert len(json.loads(out)["diagnostics"]) == 30
    _, out, _ = run("check", *shape, "--output-format", "github")
    assert [line.endswith("; and 27 more like it") for line in out.splitlines()] == [0, 0, 1]
    _, out, err = run("show", *shape)
    assert (out, err.count("error[S201]")) == ("", 3)


def test_of_a_hundred_actions_on_a_wrong_rank_three_of_each_stage_are_shown(run: Run) -> None:
    _, text, _ = run("export", "1f1b", "-r", "2", "-m", "25")
    # One is where it belongs, so that the placement may be right.
    swapped = text.replace("placement 0 1", "placement 1 0").replace("rank 1:", "rank 1: 0F0")
    Path("swapped.sched").write_text(swapped)
    code, out, err = run("check", "swapped.sched")
    assert (code, err) == (1, "")
    # Of each stage 25 forwards, backwards, sends and receives, and its OPTIM_STEP.
    assert out.count("error[S103]") == 6
    assert out.count("   … and 98 more like it\n") == 2
    assert out.endswith("\nswapped.sched: 203 errors under rank\n")
    assert len(run("check", "swapped.sched", "--output-format", "concise")[1].splitlines()) == 9


@pytest.mark.parametrize(("severity", "codes"), [("warning", (0, 1)), ("error", (1, 1))])
def test_strict_allows_no_warning(
    run: Run, monkeypatch: pytest.MonkeyPatch, severity: Severity, codes: tuple[int, int]
) -> None:
    place = schedir.check(schedir.loads(RULES["S201"].example)).diagnostics[0].locations
    report = schedir.Report("edge", (odd(severity, *place),), CHANNELS)
    monkeypatch.setattr("schedir.cli.check.check", lambda *_, **__: report)
    assert (run("check", "1f1b")[0], run("check", "1f1b", "--strict")[0]) == codes


@sweep("name", EVERY, quick=NAMES)
def test_export_sched_and_back(run: Run, name: str) -> None:
    code, out, err = run("export", name, "--format", "sched", "-o", "it.sched")
    assert (code, out, err) == (0, "", "")
    assert schedir.loads(Path("it.sched").read_text()) == schedir.build(name)
    strict, out, _ = run("check", "it.sched", "--channel", "host", "--strict")
    assert strict == ("note[" in out)
    # Without its communication it gets the same again.
    _, out, _ = run("export", "it.sched", "--format", "sched", "--compute-only")
    assert "SEND" not in out
    Path("compute.sched").write_text(out)
    _, out, _ = run("export", "compute.sched", "--format", "sched")
    assert out == Path("it.sched").read_text()


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b"])
@pytest.mark.parametrize("form", ["torch-csv", "torch-csv-comms"])
def test_export_csv_and_back(run: Run, name: str, form: str) -> None:
    code, out, err = run("export", name, "--format", form)
    assert code == 0
    assert ("SEND_F" in out) == (form == "torch-csv-comms")
    assert sorted(err.splitlines()) == [
        f"warning: {stage}OPTIM_STEP is left out: torch has no OPTIM_STEP"
        for stage in range(schedir.build(name).stages)
    ]
    Path("it.csv").write_text(out)
    assert run("check", "it.csv", "--channel", "rank", "--strict")[0] == 0
    assert run("export", "it.csv", "--format", form)[1:] == (out, "")


def test_export_proves_only_what_it_completes(run: Run) -> None:
    shape = ("--ranks", "2", "--microbatches", "2")
    rows = "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n"
    assert run("export", "stuck.py", *shape, "--format", "torch-csv")[:2] == (0, rows)
    code, out, _ = run("export", "stuck.py", *shape, "--format", "sched", "--compute-only")
    assert (code, out.splitlines()[-1]) == (0, "rank 1: 1F0 1F1 1B0 1B1")
    broken = DEADLOCK.replace(" 1SEND_GRAD1", "")
    Path("broken.sched").write_text(broken)
    assert run("export", "broken.sched", "--format", "sched") == (0, broken, "")


def test_export_to_where_nothing_can_be_written(run: Run) -> None:
    for file, reason in (("no/such.sched", "No such file or directory"), (".", "Is a directory")):
        code, out, err = run("export", "1f1b", "--format", "sched", "-o", file)
        assert (code, out, err) == (2, "", f"error: {file}: {reason}\n")


@pytest.mark.parametrize(
    ("argv", "form"),
    [
        (["-o", "x.sched"], "sched"),
        (["-o", "x.sched", "--compute-only"], "sched"),
        (["-o", "plain"], "sched"),
        (["-o", "x.csv"], "torch-csv-comms"),
        (["-o", "x.csv", "--compute-only"], "torch-csv"),
        (["-o", "x.csv", "--format", "torch-csv"], "torch-csv"),
        (["-o", "x.txt", "--format", "torch-csv-comms"], "torch-csv-comms"),
    ],
)
def test_the_extension_tells_the_format(run: Run, argv: list[str], form: str) -> None:
    code, out, _ = run("export", "1f1b", *argv)
    assert (code, out) == (0, "")
    more = ["--compute-only"] if "--compute-only" in argv and form == "sched" else []
    assert Path(argv[1]).read_text() == run("export", "1f1b", "--format", form, *more)[1]


def test_a_csv_that_is_exported_by_its_extension_is_the_whole_list(run: Run) -> None:
    run("export", "1f1b", "-o", "it.csv")
    read = loads_torch_csv(Path("it.csv").read_bytes())
    assert read.is_complete
    ours = [list(actions[:-1]) for actions in schedir.build("1f1b").flat]
    sums = [[a for a in actions if a.kind is Kind.REDUCE_GRAD] for actions in read.flat]
    # Torch scales a stage's gradients where it sums them.
    assert sums == [[schedir.reduce_grad(rank)] for rank in range(4)]
    kept = [[a for a in actions if a.kind is not Kind.REDUCE_GRAD] for actions in read.flat]
    assert kept == ours


@pytest.mark.parametrize(
    ("file", "form", "message"),
    [
        ("x.txt", None, "the extension of x.txt names no format: use .sched or .csv or "),
        ("x.gif", None, "the extension of x.gif names no format"),
        ("x.csv", "sched", "--format sched contradicts x.csv, whose extension means"),
        ("x.sched", "torch-csv", "contradicts x.sched, whose extension means sched"),
    ],
)
def test_an_extension_that_tells_something_else(
    run: Run, file: str, form: str | None, message: str
) -> None:
    assert message in run.refuses(
        "export", "1f1b", "-o", file, *(["--format", form] if form else [])
    )
    assert not Path(file).exists()


def test_export_says_which_formats_there_are(run: Run) -> None:
    err = run.refuses("export", "1f1b", "--format", "gif")
    assert all(name in err for name in ("sched", "torch-csv", "torch-csv-comms"))
    assert run("export", "1f1b") == run("export", "1f1b", "--format", "sched")


def test_explain(run: Run) -> None:
    for code, rule in RULES.items():
        out = run.prints("explain", code)
        assert out.startswith(f"{rule.severity}[{code}]: {rule.name}\n")
    assert run("explain", code.lower()) == run("explain", rule.name) == (0, out, "")
    out = run.prints("explain", "s402")
    assert out.startswith("S402 is no longer reported: see S105 instead.\n\nerror[S105]")


def test_explain_lists_all(run: Run) -> None:
    out = run.prints("explain")
    listed = [tuple(line.split()[:2]) for line in out.splitlines()]
    assert listed == [(rule.code, rule.name) for rule in RULES.values()]
    err = run.refuses("explain", "S999")
    assert err.startswith("error: there is no diagnostic 'S999'; known: S101 ")
    assert all(known in err for known in RULES)


def test_in_a_folder_that_is_gone_errors_are_told(run: Run, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    assert run("check", "1f1b")[0] == 0
    assert run("check", "nope")[2].startswith("error: no schedule is named 'nope'")


def test_a_title_of_any_characters_makes_a_picture(run: Run) -> None:
    assert run("export", "1f1b", "--title", "a\x01b", "-o", "a.svg")[0] == 0
    titles = [each.text for each in ElementTree.parse("a.svg").iter() if each.text]
    assert r"a\x01b" in titles
