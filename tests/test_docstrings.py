"""The examples in the docstrings of public names: they run as printed, and no name lacks one."""

from __future__ import annotations

import doctest
import importlib
import inspect
from pathlib import Path

import pytest

from tests.test_docs import PUBLIC

COMPLETE = ("schedir", "schedir.simulator", "schedir.finder", "schedir.runtime", "schedir.training")
"""The modules whose names all have an example."""


def owned() -> dict[str, tuple[str, object]]:
    """Each public name, with its module and value; modules share some, which the first one owns."""
    found: dict[str, tuple[str, object]] = {}
    seen: list[object] = []
    for module in PUBLIC:
        held = importlib.import_module(module)
        values = {name: getattr(held, name) for name in held.__all__ if not name.startswith("__")}
        for name, value in values.items():
            if not any(value is each for each in seen):
                found[f"{module}.{name}"] = module, value
        seen += values.values()
    return found


def has_docstring(value: object) -> bool:
    """A constant has only that of its type."""
    return inspect.isclass(value) or inspect.isroutine(value)


OWNED = owned()
DESCRIBED = {name: value for name, (_, value) in OWNED.items() if has_docstring(value)}
DESCRIBED |= {module: importlib.import_module(module) for module in PUBLIC}
CONSTANTS = [name for name in OWNED if name not in DESCRIBED and name.count(".") == 1]


def examples_of(name: str) -> list[doctest.DocTest]:
    """The docstrings of a name, and of the methods of a class, that have examples."""
    value = DESCRIBED[name]
    finder = doctest.DocTestFinder(exclude_empty=True, recurse=not inspect.ismodule(value))
    # Nothing is there but what an example imports: it is complete as it stands.
    found = finder.find(value, name, module=False, globs={"__name__": "__main__"})
    return [test for test in found if test.examples]


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of torch's own pipeline()
@pytest.mark.parametrize("name", DESCRIBED)
def test_the_examples_of_a_name_print_what_they_say(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = examples_of(name)
    if name in OWNED and OWNED[name][0] in COMPLETE:
        assert tests, f"{name} has no example"
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    for test in tests:
        runner = doctest.DocTestRunner()
        runner.run(test, out=said.append)
        assert not runner.failures, "".join(said)


@pytest.mark.parametrize("name", CONSTANTS)
def test_the_docstring_of_the_package_tells_of_its_constants(name: str) -> None:
    module, _, constant = name.rpartition(".")
    assert f"`{constant}`" in (importlib.import_module(module).__doc__ or "")
