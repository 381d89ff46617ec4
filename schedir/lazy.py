"""Names of a package that are imported once somebody asks for them, so that commands start soon."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def on_demand(package: str, names: Mapping[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """The `__getattr__` of a package (PEP 562), which imports a module with its `names` where one
    of these is asked for, or the module itself."""

    def of_package(name: str) -> Any:
        for module, held in names.items():
            if name in held or module == f"{package}.{name}":
                found = import_module(module)
                known = vars(sys.modules[package])
                known.update({each: getattr(found, each) for each in held})
                return known[name]
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return of_package
