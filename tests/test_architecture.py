"""What the layout promises: imports go one way, and few parts import torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import schedir

ROOT = Path(__file__).resolve().parents[1]
# The floors of the house: a part imports itself and what is on the floors before its own.
FLOORS = [
    {*floor.split()}
    for floor in (
        *("errors files lazy display", "ir", "graph", "passes", "checker", "diagnosis"),
        *("simulator", "library", "finder", "render", "runtime", "training", "integrations cli"),
    )
]
# The parts of these floors, each of which imports those before it alone; they alone import torch.
WINGS = {
    "runtime": (
        *(
            "accelerator",
            "memory",
            "microbatches",
            "arguments",
            "call",
            "processes",
            "sharded",
        ),
        *(
            "transports",
            "plan",
            "session",
            "samples",
            "feeding",
            "gradients",
            "boundary",
            "stage",
            "program",
        ),
        *("recorder", "trace", "engine", "segments", "executor", "torch_schedule"),
    ),
    "training": (
        *("cutting", "data", "collective", "whole_names", "huggingface", "checkpoint"),
        *("measured_costs", "schedulers"),
        *("history", "evaluation"),
        *("callbacks", "loggers", "trainer"),
    ),
}


@cache
def imports(path: Path) -> set[str]:
    """The modules that a file imports: anywhere in it, for types alone, and in functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            named = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {name if name in MODULES else node.module for name in named}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in (ROOT / "schedir").rglob("*.py")}


def circle_in(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Names each of which leads to the next; none where there is no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def test_a_circle_is_found() -> None:
    assert circle_in({"a": {"b"}, "b": {"c"}}) == []
    assert set(circle_in({"x": {"a"}, "a": {"b"}, "b": {"c"}, "c": {"a"}})) == {"a", "b", "c"}


def test_imports_make_no_circle() -> None:
    assert circle_in({name: imports(path) for name, path in MODULES.items()}) == []


def test_one_door_leads_upwards() -> None:
    # `display` reaches `render` by its name, so that nothing here counts it as an import.
    names = {"schedir", "schedir.lazy", "schedir.display", "schedir.library.targets"}
    names |= {"schedir.cli", "schedir.render.outputs", "schedir.render.tables"}
    for name, path in MODULES.items():
        if name not in names:
            assert not re.search(r"\bimport_module\b|__import__", path.read_text()), name
    named = re.findall(r"import_module\((.*)\)", MODULES["schedir.display"].read_text())
    assert named == ['f"schedir.render.{module}"']


def test_every_part_is_on_a_floor() -> None:
    found = {name.split(".")[1] for name in MODULES if "." in name}
    assert found - {"__main__"} == set().union(*FLOORS)


def test_imports_go_one_way() -> None:
    wrong = []
    for name, path in MODULES.items():
        part = name.split(".")[1] if "." in name else ""
        floor = next((at for at, parts in enumerate(FLOORS) if part in parts), len(FLOORS))
        below = {part}.union(*FLOORS[:floor])
        for imported in imports(path):
            top, _, rest = imported.partition(".")
            upwards = top == "schedir" and rest and rest.split(".")[0] not in below
            if upwards or (top in ("torch", "transformers") and part not in WINGS):
                wrong.append(f"{name} imports {imported}")
    assert not wrong


@pytest.mark.parametrize("floor", WINGS)
def test_the_wings_of_a_floor_import_one_way(floor: str) -> None:
    wrong = []
    for name, path in MODULES.items():
        if name.startswith(f"schedir.{floor}."):
            before = WINGS[floor][: WINGS[floor].index(name.split(".")[2]) + 1]
            of_floor = [i for i in imports(path) if i.startswith(f"schedir.{floor}.")]
            wrong += [f"{name} imports {i}" for i in of_floor if i.split(".")[2] not in before]
    assert not wrong
    found = {path.stem for path in (ROOT / "schedir" / floor).iterdir()}
    assert found - {"__init__", "__pycache__"} == set(WINGS[floor])


def test_schedules_import_only_schedir() -> None:
    for file in sorted((ROOT / "schedules").glob("*.py")):
        for name in imports(file):
            top = name.split(".")[0]
            assert top == "schedir" or top in sys.stdlib_module_names, f"{file} imports {name}"


def test_the_schedules_are_one_set_of_modules() -> None:
    assert (ROOT / "schedir" / "schedules").is_symlink()
    import schedir.schedules.one_f_one_b as module

    assert Path(module.__file__ or "").resolve() == ROOT / "schedules" / "one_f_one_b.py"


def imported_by(statements: str) -> set[str]:
    """The modules that a new process has imported after some statements."""
    code = f"{statements}\nimport sys; print('\\n', *sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=250
    )
    return set(done.stdout.splitlines()[-1].split())


def test_commands_start_with_what_they_need_alone() -> None:
    found = imported_by("from schedir.cli import main; main(['check', '1f1b'])")
    parts = {name.removeprefix("schedir.") for name in found if name.startswith("schedir.")}
    assert not parts & {"finder", "simulator", "runtime", "training"}
    assert "library.blocks" not in parts
    of_render = {"diagnostics", "text"}
    assert {part for part in parts if part.startswith("render.")} == {
        f"render.{module}" for module in of_render
    }
    others = {"compare", "completion", "export", "list", "search", "show", "timelines"}
    assert not parts & {f"cli.{other}" for other in others}
    found |= imported_by("from schedir.cli import main; main(['show', '1f1b']); main(['list'])")
    assert not found & {"torch", "rich", "shtab"}


def test_a_repr_of_a_schedule_is_quick() -> None:
    before = imported_by("import schedir; it = schedir.build('1f1b')")
    later = imported_by("import schedir; it = schedir.build('1f1b'); repr(it)") - before
    assert "schedir.render.outputs" in later
    assert not {name for name in later if name.startswith(("rich", "schedir.simulator"))}


def test_what_is_imported_on_demand_is_there() -> None:
    statements = (
        "import schedir; schedir.simulate(schedir.build('1f1b'))",
        "import schedir; schedir.simulator.Timeline; schedir.finder.Row",
        "from schedir import CostModel, repeat_block",
        "from schedir import *; search, forecast",
        "from schedir.render import *; timeline_text",
        "import schedir.simulator.timeline, schedir; schedir.simulate(schedir.build('1f1b'))",
        "import schedir.checker.run, schedir; schedir.check(schedir.build('1f1b'))",
    )
    imported_by(f"""
import sys, schedir
assert not {{"schedir.finder", "schedir.simulator", "torch"}} & set(sys.modules)
for statement in {statements}:
    for name in [name for name in sys.modules if name.partition(".")[0] == "schedir"]:
        del sys.modules[name]
    exec(statement, {{}})  # raises nothing
""")
    assert set(schedir.__all__) | {"simulator", "finder"} <= set(dir(schedir))
    with pytest.raises(AttributeError, match="'schedir' has no attribute 'simulat'"):
        _ = schedir.simulat  # type: ignore[attr-defined]


def test_every_package_is_shipped() -> None:
    # setuptools finds the folders that have an __init__.py, and follows links.
    package = ROOT / "schedir"
    assert all((file.parent / "__init__.py").is_file() for file in package.glob("**/*.py"))
    for name in ("schedules", "docs"):
        assert (package / name).is_symlink()
        assert (package / name).resolve() == ROOT / name
