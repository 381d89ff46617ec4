"""Work that is put off: importing a module until somebody asks for one of its names, and collecting
garbage until something large is built."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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


@contextmanager
def collector_held_off() -> Iterator[None]:
    """Turn off the garbage collector, which would search what is being built in vain, again and
    again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
