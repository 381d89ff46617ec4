"""What the layout promises: imports go one way, and only the runtime imports torch."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import schedir

ROOT = Path(__file__).resolve().parents[1]
# Each part, and the parts that it may import. `errors` is everybody's.
MAY_IMPORT = {
    "errors": {"checker", "ir"},  # for types only
    "ir": set(),
    "passes": {"ir"},
    "checker": {"ir", "passes"},
    "simulator": {"ir", "passes", "checker"},
    "library": {"ir", "passes", "checker"},
    "render": {"ir", "checker", "simulator"},
    "runtime": {"ir", "passes", "checker", "simulator"},
    "cli": {"ir", "passes", "checker", "simulator", "render", "library"},
}


# The runtime's parts, each of which imports those before it alone.
RUNTIME = (
    "arguments",
    "call",
    "result",
    "fitting",
    "processes",
    "plan",
    "transports",
    "world",
    "batch",
    "gradients",
    "boundaries",
    "stage",
    "program",
    "assembly",
    "engine",
    "executor",
)


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("part", sorted(MAY_IMPORT))
def test_imports_go_one_way(part: str) -> None:
    package = ROOT / "schedir" / part
    files = sorted(package.rglob("*.py")) if package.is_dir() else [package.with_suffix(".py")]
    assert files
    for file in files:
        for name in imports(file):
            if name.startswith("schedir."):
                imported = name.split(".")[1]
                assert imported in MAY_IMPORT[part] | {part, "errors"}, f"{file} imports {name}"
            assert name.split(".")[0] != "torch" or part == "runtime", f"{file} imports {name}"


@pytest.mark.parametrize("part", RUNTIME)
def test_the_wings_of_the_runtime_import_one_way(part: str) -> None:
    package = ROOT / "schedir" / "runtime" / part
    files = sorted(package.rglob("*.py")) if package.is_dir() else [package.with_suffix(".py")]
    assert files
    before = RUNTIME[: RUNTIME.index(part) + 1]
    for file in files:
        for name in imports(file):
            if name.startswith("schedir.runtime."):
                assert name.split(".")[2] in before, f"{file} imports {name}"


def test_the_runtime_has_no_other_part() -> None:
    found = {path.stem for path in (ROOT / "schedir" / "runtime").iterdir()}
    assert found - {"__init__", "__pycache__"} == set(RUNTIME)


def test_schedules_import_only_schedir() -> None:
    for file in sorted((ROOT / "schedules").glob("*.py")):
        for name in imports(file):
            top = name.split(".")[0]
            assert top == "schedir" or top in sys.stdlib_module_names, f"{file} imports {name}"


def test_the_schedules_are_one_set_of_modules() -> None:
    assert (ROOT / "schedir" / "schedules").is_symlink()
    import schedir.schedules.one_f_one_b as module

    assert Path(module.__file__ or "").resolve() == ROOT / "schedules" / "one_f_one_b.py"


@pytest.mark.parametrize("statement", ["import schedir", "import schedir.cli"])
def test_torch_stays_unimported(statement: str) -> None:
    code = f"{statement}; import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_exists_and_has_a_docstring() -> None:
    for name in schedir.__all__:
        value = getattr(schedir, name)
        assert isinstance(value, (str, tuple)) or value.__doc__ or name == "Placement", name


def test_every_package_is_shipped() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {
        ".".join(file.parent.relative_to(ROOT).parts)
        for file in (ROOT / "schedir").glob("**/__init__.py")
    }
    assert set(settings["packages"]) == found | {"schedir.schedules"}
