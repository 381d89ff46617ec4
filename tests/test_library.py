"""Finding and loading generators, and what a user's mistakes lead to."""

from __future__ import annotations

import gc
import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import schedir
from schedir import Action, LoadError, Pipeline, forward
from schedir.cli import main
from schedir.library import generator_of, installed, load

SOUND = """
from schedir import backward, forward, optim_step, schedule

def helper(stage, m):
    yield forward(stage, m)
    yield backward(stage, m)

@schedule("mine", aliases=("my own",))
def mine(pipe, rank, *, twice: bool = False):
    (stage,) = pipe.stages_of(rank)
    for m in range(pipe.microbatches):
        yield from helper(stage, m)
    yield optim_step(stage)

def undecorated(pipe, rank):
    return list(mine(pipe, rank))
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SOUND)
    return Path("mine.py")


@pytest.mark.usefixtures("importable")
def test_the_ways_to_name_a_generator_agree(file: Path) -> None:
    built = schedir.build(file, ranks=2, microbatches=2)
    for target in ("mine.py", "mine.py:mine", "mine:mine", generator_of("mine.py")):
        assert schedir.build(target, ranks=2, microbatches=2) == built
    plain = schedir.build("mine.py:undecorated", ranks=2, microbatches=2)
    assert (plain.name, plain.flat) == ("undecorated", built.flat)


@pytest.mark.parametrize("name", ["1F1B", "one_f_one_b", "GPipe", "Interleaved1F1B"])
def test_case_and_dashes_do_not_matter(name: str) -> None:
    assert schedir.build(name).ranks == 4


def test_source_lines_reach_through_helpers(file: Path) -> None:
    built = schedir.build(file, ranks=2, microbatches=1)
    places = {str(action): built.source_of(0, index) for index, action in enumerate(built.flat[0])}
    assert places["0F0"] == schedir.Source("mine.py", 5)
    assert places["0SEND_ACT0"] == schedir.Source("mine.py", 5)  # of what it sends
    assert places["0B0"] == schedir.Source("mine.py", 6)
    assert places["0OPTIM_STEP"] == schedir.Source("mine.py", 13)


NESTED = """
from schedir import backward, forward, together

def pair(s, m):
    yield forward(s, m)
    yield backward(s, m)

def pairs(s, batch):
    for m in batch:
        yield from pair(s, m)
        yield forward(s, m + 1)

def either(s):
    for some in (pair(s, 4), [forward(s, 5)], pairs(s, [6]), (backward(s, n) for n in (5, 6))):
        yield from some

def nested(pipe, rank):
    yield forward(0, 0)
    for entry in pair(0, 1):
        yield entry
    yield from pairs(0, [2])
    yield together(forward(0, 7), backward(0, 3))
    yield from either(0)
    yield backward(0, 0)

class Listed:
    def __call__(self, pipe, rank):
        return map(forward, [0, 0], [0, 1])

listed = Listed()
"""


def test_every_action_has_the_line_that_yielded_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of generators inside each other, whose frames come and go, the innermost one's."""
    monkeypatch.chdir(tmp_path)
    Path("nested.py").write_text(NESTED)
    found = load("nested.py:nested", ranks=1, microbatches=8)
    assert found.sources is not None
    assert {source.file for source in found.sources.lines} == {"nested.py"}
    lines = [found.sources.lines[number].line for number in found.sources.line_of]
    assert " ".join(f"{a}:{line}" for a, line in zip(found.flat[0], lines, strict=True)) == (
        "0F0:18 0F1:20 0B1:20 0F2:5 0B2:6 0F3:11 0F7:22 0B3:22 "
        "0F4:5 0B4:6 0F5:15 0F6:5 0B6:6 0F7:11 0B5:14 0B6:14 0B0:24"
    )
    unknown = load("nested.py:listed", ranks=1, microbatches=2)
    assert unknown.sources is not None
    assert unknown.sources.line_of.tolist() == [-1, -1]


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_held_off_and_restored(enabled: bool) -> None:
    seen: list[bool] = []

    def generator(pipe: Pipeline, rank: int) -> Iterator[Action]:
        seen.append(gc.isenabled())
        yield forward(0, 0)
        if pipe.microbatches > 1:
            raise RuntimeError
        yield schedir.backward(0, 0)

    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        for make in (load, schedir.build):
            make(generator, ranks=1, microbatches=1)
            assert gc.isenabled() is enabled
            with pytest.raises(LoadError):
                make(generator, ranks=1, microbatches=2)
            assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
    assert seen == [False] * 4


def test_sources_take_no_part_in_equality(file: Path) -> None:
    built = schedir.build(file)
    again = schedir.loads(schedir.dumps(built))
    assert not again.sources
    assert again == built
    assert again.content_hash == built.content_hash


@pytest.mark.parametrize(
    ("target", "arguments", "message"),
    [
        ("1f1", {}, "did you mean '1f1b'"),
        ("nothing.py", {}, "nothing.py: no such file"),
        ("mine.py:nothing", {}, "mine.py has no function 'nothing'"),
        ("mine.py:helper", {}, "mine.py:5: helper, rank 0: ValueError: stage must be an int"),
        ("no.such.module:f", {}, "No module named 'no'"),
        ("1f1b", {"ranks": 0}, "ranks must be an int >= 1, not 0"),
        ("1f1b", {"depth": 3}, "1f1b has no parameter 'depth'; it has: none"),
        ("1f1b", {"rank": 3}, "it has: none; did you mean 'ranks'?"),
        ("fill-drain", {"order": "x"}, "order must be 'ascending' or 'descending', not 'x'"),
        ("1f1b", {"chunks": 2}, "1f1b runs one stage per rank, not 2: leave chunks out"),
        ("mine.py", {"once": True}, "it has: twice"),
        ("mine.py", {"twice": "no"}, "twice of mine is true or false, not 'no'"),
        ("builtins:dict", {}, "dict is not a function that yields actions"),
    ],
)
@pytest.mark.usefixtures("file")
def test_what_cannot_be_loaded_is_said(
    target: str, arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(LoadError) as error:
        schedir.build(target, **arguments)  # type: ignore[arg-type]
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def endless(pipe: Pipeline, rank: int) -> Iterator[Action]:
    while True:
        yield forward(rank, 0)


def test_a_generator_that_does_not_end_is_stopped() -> None:
    with pytest.raises(LoadError, match="does it end"):
        schedir.build(endless)


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (lambda pipe: [0, 9], "rank outside 0..3"),
        (lambda pipe: [], "at least one stage"),
        (lambda pipe: [(0, 0)], "distinct ranks"),
        (lambda pipe: 1 / 0, "ZeroDivisionError"),
        (lambda pipe: ["a"], "placement of x"),
    ],
)
def test_a_wrong_placement_is_refused(placement: object, message: str) -> None:
    generator = schedir.schedule("x", placement=placement)(endless)  # type: ignore[arg-type]
    with pytest.raises(LoadError, match=message):
        schedir.build(generator)


def test_a_list_is_no_shape_to_change(tmp_path: Path) -> None:
    file = tmp_path / "a.sched"
    file.write_text(schedir.dumps(schedir.build("1f1b", ranks=2, microbatches=2)))
    assert schedir.build(file).ranks == 2
    assert schedir.build(str(file), ranks=2, microbatches=2).ranks == 2
    with pytest.raises(LoadError, match="has 2 ranks, not 3"):
        schedir.build(file, ranks=3)
    with pytest.raises(LoadError, match="takes no parameters: order"):
        schedir.build(file, order="ascending")


def test_entry_points(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A broken package's entry point must not keep the built-in names from loading."""
    found = [
        importlib.metadata.EntryPoint(
            "theirs", "schedir.schedules.one_f_one_b:one_f_one_b", "schedir.schedules"
        ),
        importlib.metadata.EntryPoint("broken", "no_such_module:x", "schedir.schedules"),
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found)
    assert schedir.build("1f1b").name == "1f1b"
    assert schedir.build("Theirs").name == "theirs"
    assert "theirs" in [generator.name for generator in installed()]
    assert "entry point broken = no_such_module:x" in caplog.text
    with pytest.raises(LoadError, match="no_such_module"):
        schedir.build("broken")


TUNED = """
from schedir import backward, forward, schedule

@schedule("tuned")
def tuned(pipe, rank, *, costs, twice: bool = False):
    '''Forwards first where they are quick.'''
    (stage,) = pipe.stages_of(rank)
    for m in range(pipe.microbatches):
        yield forward(stage, m)
        if costs.forward > 1:
            yield backward(stage, m)
    if costs.forward <= 1:
        for m in range(pipe.microbatches):
            yield backward(stage, m)
"""


def test_generator_sees_the_costs_that_it_asks_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tuned.py"
    path.write_text(TUNED)
    assert generator_of(path).parameters.keys() == {"twice"}
    quick = schedir.build(path, ranks=1, microbatches=2)
    slow = schedir.build(path, ranks=1, microbatches=2, costs=schedir.CostModel(forward=2))
    assert [str(action) for action in quick.actions[0]] == ["0F0", "0F1", "0B0", "0B1"]
    assert [str(action) for action in slow.actions[0]] == ["0F0", "0B0", "0F1", "0B1"]
    one = ["--ranks", "1", "--microbatches", "2", "--cost", "forward=2"]
    for command, printed in (("show", "F0 B0 F1 B1"), ("check", ""), ("export", "0F0 0B0")):
        assert main([command, str(path), *one]) == 0
        assert printed in capsys.readouterr().out
    # A cost that is one number is that of a whole rank: of a part of a stage it is less.
    table = schedir.compare([path], ranks=1, microbatches=2, costs=schedir.CostModel(forward=2))
    assert table.rows[0].peak_activations == 1
    with pytest.raises(SystemExit):
        main(["export", "1f1b", "--cost", "forward=2", "--format", "sched"])
    assert "1f1b does not depend on costs" in capsys.readouterr().err


def test_a_bare_decorator_is_told_that_it_needs_a_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import schedir\n\n\n@schedir.schedule\ndef mine(pipe, rank):\n"
        "    yield schedir.forward(0, 0)\n"
    )
    with pytest.raises(schedir.LoadError, match=r'mine\.py:4: .*: @schedule\("mine"\)$'):
        schedir.build(str(file), ranks=1, microbatches=1)


@pytest.mark.parametrize("wrong", [{"placement": "wave"}, {"chunks": "2"}, {"aliases": "pairs"}])
def test_what_a_schedule_is_declared_with_has_the_right_type(wrong: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"{next(iter(wrong))} must be"):
        schedir.schedule("mine", **wrong)
