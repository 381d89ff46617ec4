"""The names of torch that are used exist: in the torch that is installed, and in the oldest one.

What runs on machines with GPUs is looked through; `tools/torch_names.py` does that, and has written
the list of what the oldest torch has.
"""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist
from torch_names import CALLS_OF_OBJECTS, ROOT, Torch, Use, read, used, uses
from torch_names import sources as looked_through

ONLY_WITH = {
    "torch.distributed.ProcessGroupNCCL": ("a build with NCCL has it", dist.is_nccl_available)
}
"""What not every build has, and whether this one should."""

NO_TORCH = {
    "of configs and models of transformers": [
        *("_attn_implementation", "_experts_implementation", "_from_config", "_init_weights"),
        *("_adjust_missing_and_unexpected_keys", "_get_dtype_plan", "_load_pretrained_model"),
        *("_is_hf_initialized", "_keys_to_ignore_on_save", "_model_mapping", "_weight_conversions"),
    ],
    "of an FSDPState, or its groups, which set it of themselves": [
        *("_all_gather_comm", "_auto_reshard_after_forward", "_comm_ctx", "_is_root", "_state_ctx"),
    ],
    "of a schedule of torch's, which sets it of itself": [
        *("_backward_requires_autograd", "_comp_type_to_function_map", "_n_microbatches"),
    ],
    "of an operator, which sets it of itself": ["_schema"],
    "of an FSDPState, from torch 2.13 on": ["_fsdp_param_groups", "_reset_iter_state"],
    "of sys": ["_getframe"],
    "a key of the state that a GradScaler gives": ["_growth_tracker"],
    "how the name of a rate ends that the Trainer logs": ["_per_second"],
    "how the names of operators end that make tensors alike": ["_like"],
    "how names begin that nodes of autograd have, each kind its own": ["_raw_saved_", "_saved_"],
}
"""Private names that are somebody else's."""


@cache
def names() -> dict[str, frozenset[str]]:
    return used()


def test_the_oldest_torch_has_all_that_is_used() -> None:
    version, listed = read()
    unknown = [
        f"{name}({', '.join(f'{keyword}=…' for keyword in sorted(new))})" if new else name
        for name, keywords in names().items()
        for new in [_new(keywords, listed[name].keywords) if name in listed else keywords]
        if name not in listed or new
    ]
    assert not unknown, (
        f"nobody has looked whether torch {version} has {', '.join(unknown)}: run `python "
        "tools/torch_names.py UNPACKED`, whose text says where to get that torch; it writes the "
        "list anew, or says what is not there, which the code has to do without"
    )
    assert listed.keys() <= names().keys(), "names are listed that nobody uses: run it as well"


def _new(keywords: frozenset[str], known: tuple[str, ...] | None) -> frozenset[str]:
    return frozenset() if known is None else keywords - {*known}


def test_the_list_is_of_the_oldest_torch() -> None:
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (needed,) = (each.removeprefix("torch>=") for each in needs if each.startswith("torch>="))
    assert f"{read()[0]}.".startswith(f"{needed}.")


def test_the_installed_torch_has_all_that_is_used() -> None:
    missing = [name for name in names() if not _exists(name) and not _excused(name)]
    assert not missing


def _exists(name: str) -> bool:
    """Whether there is such a module, or such a thing in one."""
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], 2):
        if isinstance(found, ModuleType) and (module := _module(".".join(parts[:number]))):
            found = module
        elif part in getattr(found, "__annotations__", ()):  # of instances: there is none to ask
            return number == len(parts)
        elif not hasattr(found, part):
            return False
        elif isinstance(getattr(found, part), property) and number < len(parts):
            found = getattr(found(), part)  # only an instance has what it names
        else:
            found = getattr(found, part)
    return True


def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _excused(name: str) -> bool:
    absent = [f"{other}." for other, (_, there) in ONLY_WITH.items() if not there()]
    return f"{name}.".startswith(tuple(absent))


def test_what_only_some_builds_have_is_used() -> None:
    assert ONLY_WITH.keys() <= names().keys()
    assert CALLS_OF_OBJECTS.keys() <= names().keys()


def test_all_private_names_are_accounted_for() -> None:
    """Those of objects too, whose types the code does not tell: they have to be in `OF_OBJECTS`."""
    known = {part for name in names() for part in name.split(".")}
    sources = {path: ast.parse(path.read_text()) for path in looked_through()}
    own = {name for tree in sources.values() for name in _defined(tree)}
    read_off = {name for path, tree in sources.items() for name in _private(tree, path)}
    assert read_off - own - known == {*chain(*NO_TORCH.values())}


def _defined(tree: ast.AST) -> Iterator[str]:
    """The functions and classes of a module, its variables, and what objects set of themselves."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(getattr(node, "ctx", None), ast.Store):
            yield ast.unparse(node).removeprefix("self.")


def _private(tree: ast.AST, path: Path) -> Iterator[str]:
    """The private names that a module which uses torch reads off something, by a string too."""
    if not any(uses(path.read_text())):
        return
    for node in ast.walk(tree):
        name = getattr(node, "attr", getattr(node, "value", None))
        if isinstance(name, str) and name.isidentifier() and re.match("_(?!_)", name):
            yield name


def test_names_are_found_however_they_are_imported() -> None:
    source = """
from __future__ import annotations
import os
import torch
import torch.fx as fx, torch.utils.data
from torch import nn
from torch._C import _private as public
from attrs import frozen

def run(model: nn.Module, group) -> torch.Tensor:
    with public(frozen):
        torch.empty(3, device=fx.device(), *model.shape)
        torch.cuda.Stream(priority=torch.x.y).wait(os.path)
    return group.torch.nothing
"""
    assert {*uses(source)} == {
        *map(Use, ("torch", "torch._C._private", "torch.fx", "torch.nn", "torch.utils.data")),
        *map(Use, ("torch.Tensor", "torch.fx.device", "torch.nn.Module", "torch.x.y")),
        *map(Use, ("torch.cuda.Stream", "torch.empty")),
        Use("torch.cuda.Stream", frozenset({"priority"})),
        Use("torch.empty", frozenset({"device"})),
    }


FILES = {
    "__init__.py": """
import sys
from math import nan
from . import _C, sub as other
from ._C import *
if sys.platform:
    from .sub import Thing as Renamed
def plain(x, *, device=None): ...
from .sub import loop
""",
    "_C/__init__.pyi": """
from torch import loop
def overloaded(x, dtype=None): ...
def overloaded(x, out=None): ...
number: Kind
class Kind:
    def method(self): ...
""",
    "sub.py": """
from torch.sub import loop
class Base:
    def __init__(self, size, **more): self.held = size
class Thing(Base):
    config: Inner
    class Options: max_size = 3
class Inner:
    limit: int
    def __init__(self, limit): ...
""",
    "version.py": "__version__ = '2.11.0+test'\n",
    "lib/libtorch_python.so": "\0_bound_in_c\0",
}


@pytest.fixture
def small(tmp_path: Path) -> Torch:
    for name, text in FILES.items():
        path = tmp_path / "torch" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Torch(tmp_path)


BOUND = {
    "__init__.py": "torch torch.plain torch.nan",
    "sub.py": "torch.sub torch.other.Thing torch.Renamed.Options.max_size "
    "torch.Renamed.config.limit torch.Renamed.held",
    "_C/__init__.pyi": "torch.number.method torch._C.number",
    "lib/libtorch_python.so": "torch.Renamed._bound_in_c",
    # of torch.loop each leads to another one
    "": "torch.nothing torch.sub.nothing torch.loop torch.Renamed.config.nothing "
    "torch.plain.nothing",
}


@pytest.mark.parametrize("file", BOUND)
def test_a_name_is_found_where_it_is_bound(small: Torch, file: str) -> None:
    expected = f"torch/{file}" if file else None
    assert {small.file_of(name) for name in BOUND[file].split()} == {expected}


def test_so_are_the_keywords_of_a_call(small: Torch) -> None:
    keywords = {
        "torch.plain": {"x", "device"},
        "torch.overloaded": {"x", "dtype", "out"},
        "torch.sub.Inner": {"self", "limit"},
        "torch.sub.Thing": None,  # it takes any
        "torch.number": None,
        "torch.nothing": None,
    }
    assert {name: small.keywords(name) for name in keywords} == keywords


def test_a_torch_says_its_version(small: Torch) -> None:
    assert small.version == "2.11.0+test"
