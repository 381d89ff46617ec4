"""Import the modules behind a package's names when they are first used, so that commands start
fast."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def on_demand(package: str, names: Mapping[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """The `__getattr__` of a package (PEP 562). `names` maps each module to the names that it
    defines; the module is imported when somebody asks for one of these names, or for the module
    itself."""

    def of_package(name: str) -> Any:
        for module, held in names.items():
            if name in held or module == f"{package}.{name}":
                found = import_module(module)
                known = vars(sys.modules[package])
                known.update({each: getattr(found, each) for each in held})
                return known[name]
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return of_package
